"""How a server or a client makes one model of several when some of them may lie. The models are finite."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from coterie.consensus import gibbs

Aggregator = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(models [K, P], weight [K] >= 0, start [P] where training began, share assumed malicious in [0, 0.5)) -> [P]"""

COLUMNS = 4096
"""Coordinates at once. Sorting and float64 make copies: of all models [K, P], with P in millions, they would not fit;
of [K, 4096] they fit the cache as well."""
ITERATIONS, TOLERANCE, SMOOTHING = 1000, 1e-9, 1e-6
"""Weiszfeld: steps at most; the relative change of every coefficient at which it stands; the least distance counted, as
a share of the typical one, which is also how far from a model the result may be if that model is the answer."""


def mean(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: the weighted mean, which a single liar moves anywhere."""
    counted = _counted(weight)
    return (counted / counted.sum()).to(models.dtype) @ models


def median(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: each coordinate's median, unweighted, as a client may lie about its weight too: Yin et al. 2018."""
    return _trimmed(models, (len(models) - 1) // 2)


def trimmed_mean(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: each coordinate's mean without the assumed number of least and greatest, unweighted: Yin et al. 2018."""
    return _trimmed(models, _liars(malicious, len(models)))


def geometric_median(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: where the weighted sum of distances to the models is least, by smoothed Weiszfeld: Pillutla et al. 2022.

    Every iterate is the origin plus a combination of the models less the origin, so all distances follow from one
    matrix [K, K]. The origin is the coordinates' weighted median: a mean would be carried off by one huge model, and
    rounding with it. Differs from the paper: iterates until it stands, not for a few exchanges with the clients.
    """
    counted = _counted(weight)
    origin = _weighted_median(models, counted)
    # on the CPU, because each step asks whether it was the last
    coefficients = _weiszfeld(_gram(models, origin).cpu(), counted.cpu())
    return _combine(models, origin, coefficients.to(models.device))


def krum(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: the model nearest to others, the first of equals, unweighted: Blanchard et al. 2017.

    With 2 f + 2 >= K it still chooses one and promises nothing.
    """
    return models[_krum_scores(models, malicious).argmin()].clone()


def multi_krum(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: the unweighted mean of the K - f models with the least scores of Krum, f as assumed: Blanchard et al. 2017.

    The paper leaves the number open; K - f are as many as are honest if the assumption holds.
    """
    scores = _krum_scores(models, malicious)
    chosen = torch.zeros_like(scores)
    chosen[scores.argsort(stable=True)[: len(models) - _liars(malicious, len(models))]] = 1.0
    return mean(models, chosen, start, malicious)


def norm_clipping(models: Tensor, weight: Tensor, start: Tensor, malicious: float) -> Tensor:
    """[P]: start plus the weighted mean of the updates, none longer than the median of their lengths: Sun et al. 2019.

    Differs from the paper: its bound is a constant; here it follows the updates, which shrink as training goes on.
    """
    counted = _counted(weight)
    norms = torch.stack([block.square().sum(1) for block in _centred(models, start)]).sum(0).sqrt()
    clipped = (norms.quantile(0.5) / norms.clamp(min=1e-150)).clamp(max=1.0)
    return _combine(models, start, counted / counted.sum() * clipped)


AGGREGATORS: dict[str, Aggregator] = {
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "geometric-median": geometric_median,
    "krum": krum,
    "multi-krum": multi_krum,
    "norm-clipping": norm_clipping,
}


def sageflow_weights(entropies: Tensor, losses: Tensor, weight: Tensor, threshold: float, sharpness: float) -> Tensor:
    """[K]: weight / loss^sharpness, normalised, of models whose mean prediction entropy is at most the threshold, else
    zero: Eb-filtering and loss-weighted averaging of Sageflow, Park et al. 2021. All zeros if no model passes.

    Computed in the log domain. Differs from the paper: a loss or an entropy that is not finite counts as filtered.
    """
    passed = torch.isfinite(entropies) & (entropies <= threshold)
    costs = sharpness * losses.double().clamp(min=1e-38).log() - weight.double().log()
    return gibbs(torch.where(passed & torch.isfinite(losses), costs, torch.inf), 1.0).to(torch.float32)


def _counted(weight: Tensor) -> Tensor:
    """[K] float64: the weights; if all are zero, everybody counts alike."""
    return torch.where((weight > 0).any(), weight.double(), 1.0)


def _liars(malicious: float, number: int) -> int:
    """floor(malicious K), but 29 of 0.29 * 100 in spite of rounding, and few enough that one stays between two cuts."""
    return min(int(malicious * number + 1e-9), (number - 1) // 2)


def _trimmed(models: Tensor, cut: int) -> Tensor:
    """[P]: each coordinate's mean without its `cut` least and `cut` greatest values."""
    ordered = (block.T.contiguous().sort(dim=1).values for block in models.split(COLUMNS, dim=1))
    kept = slice(cut, len(models) - cut)
    return torch.cat([values[:, kept].mean(1, dtype=torch.float64) for values in ordered]).to(models.dtype)


def _weighted_median(models: Tensor, weight: Tensor) -> Tensor:
    """[P]: for each coordinate the middle of the values that have at most half the weight on either side."""
    medians = []
    for block in models.split(COLUMNS, dim=1):
        ordered, order = block.T.contiguous().sort(dim=1)
        below = weight[order].cumsum(1)  # [columns, K], a value's own weight included
        half = below[:, -1:] / 2
        lower, upper = (below < half).sum(1, keepdim=True), (below <= half).sum(1, keepdim=True)
        medians.append((ordered.gather(1, lower) / 2 + ordered.gather(1, upper) / 2).squeeze(1))
    return torch.cat(medians)


def _centred(models: Tensor, origin: Tensor) -> Iterator[Tensor]:
    """[K, COLUMNS] float64 at a time: the models less the origin."""
    for block, of_origin in zip(models.split(COLUMNS, dim=1), origin.split(COLUMNS)):
        yield block.double() - of_origin.double()


def _gram(models: Tensor, origin: Tensor) -> Tensor:
    """[K, K] float64: inner products of the models less the origin, so that rounding is relative to their spread."""
    gram = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for block in _centred(models, origin):
        gram += block @ block.T
    return (gram + gram.T) / 2  # a product need not round both triangles alike, and ties should be ties


def _combine(models: Tensor, origin: Tensor, coefficients: Tensor) -> Tensor:
    """[P]: the origin plus the coefficients [K] times the models less the origin."""
    moved = torch.cat([coefficients @ block for block in _centred(models, origin)])
    return (origin.double() + moved).to(models.dtype)


def squared_distances(models: Tensor) -> Tensor:
    """[K, K] float64: between all pairs of models."""
    gram = _gram(models, _trimmed(models, (len(models) - 1) // 2))  # honest models are near their median
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp(min=0.0)


def _krum_scores(models: Tensor, malicious: float) -> Tensor:
    """[K]: the sum of the squared distances to the K - f - 2 nearest others, at least one."""
    nearest = max(1, len(models) - _liars(malicious, len(models)) - 2)
    return squared_distances(models).sort(dim=1).values[:, 1 : 1 + nearest].sum(1)  # the first is oneself


def _weiszfeld(gram: Tensor, weight: Tensor) -> Tensor:
    """[K]: the combination of K vectors, given by their inner products, with the least weighted sum of distances."""
    squares, coefficients = gram.diagonal(), torch.zeros_like(weight)
    typical = _weighted_median(squares.sqrt()[:, None], weight)  # zero if most of the weight is in one place
    least = (SMOOTHING * typical).square().clamp(min=1e-300)
    for _ in range(ITERATIONS):
        product = gram @ coefficients
        pull = weight / (squares - 2 * product + coefficients @ product).clamp(min=least).sqrt()
        before, coefficients = coefficients, pull / pull.sum()
        if torch.allclose(coefficients, before, rtol=TOLERANCE, atol=0.0):
            break
    return coefficients
