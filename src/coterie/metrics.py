"""What is measured of a run: who learned from whom, and what clusters that shows."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import NOBODY

MOST_CLUSTERS = 32
MOST_SHOWN = 100  # clients of whom a record holds all weights


def links_from_peers(clients: Tensor, peers: Tensor, num_clients: int) -> Tensor:
    """[N, N]: 1 where the row's client downloaded the column's model; peers [S, M] of clients [S]."""
    links = torch.zeros(num_clients, num_clients + 1)
    links[clients[:, None].cpu(), peers.cpu()] = 1.0  # NOBODY = -1 falls into the last column
    return links[:, :num_clients]


def weights_from_peers(peers: Tensor, weights: Tensor, num_clients: int) -> Tensor:
    """[R, N]: the weights [R, M] of peers [R, M] in the columns of these peers."""
    mixed = torch.zeros(len(peers), num_clients + 1)
    mixed[torch.arange(len(peers))[:, None], peers.cpu()] = weights.float().cpu()  # NOBODY as above
    return mixed[:, :num_clients]


def weights_within(weights: Tensor, took_part: Tensor, clusters: Tensor | None) -> dict[str, float | None]:
    """The means of w_ij over pairs i != j of the same and of different true clusters, both of whom took part [N]."""
    if clusters is None:
        return {"within": None, "between": None}
    same = (clusters[:, None] == clusters).cpu()
    pairs = (took_part[:, None] & took_part).fill_diagonal_(False)
    kinds = {"within": weights[pairs & same], "between": weights[pairs & ~same]}
    return {name: float(found.mean()) if len(found) else None for name, found in kinds.items()}


def shown_weights(weights: Tensor) -> list[list[float]] | None:
    """The matrix for people to read, None if it is of too many clients."""
    return [[round(weight, 3) for weight in row] for row in weights.tolist()] if len(weights) <= MOST_SHOWN else None


def links_from_groups(group: Tensor) -> Tensor:
    """[N, N]: 1 between different clients whose models are averaged together."""
    group = group.cpu()
    together = (group[:, None] == group) & (group[:, None] != NOBODY)
    return together.fill_diagonal_(False).float()


def selection_rate(links: Tensor, clusters: Tensor | None) -> float | None:
    """The mean over clients of the share of own-cluster peers among those they learned from, fedcbo-jmlr.txt (24)."""
    learned = links.sum(1)
    if clusters is None or not learned.any():
        return None
    same = (clusters[:, None] == clusters).cpu()
    rates = (links * same).sum(1)[learned > 0] / learned[learned > 0]
    return float(rates.mean())


def best_selection_rate(exploration: float, download: int, cohort: Tensor, clusters: Tensor | None) -> float | None:
    """What a client that knows the clusters could reach while exploring at random: fedcbo-jmlr.txt, Remark 9."""
    if clusters is None or len(cohort) < 2:
        return None
    own = clusters[cohort]
    mates = (own[:, None] == own).sum(1).double() - 1
    budget = min(download, len(cohort) - 1)
    random = min(round(exploration * download), budget)
    met = random * mates / (len(cohort) - 1)
    rates = (met + torch.minimum(mates - met, torch.tensor(float(budget - random)))) / budget
    return float(rates.mean())


def exposure(
    clients: Tensor, peers: Tensor, amount: Tensor, malicious: Tensor, clusters: Tensor | None
) -> dict[str, float] | None:
    """Of the amounts [S, M] that honest clients [S] give their peers [S, M], the shares that go to honest and malicious
    ones of their own and other clusters, mean over the clients: fedcb2o.txt, Fig. 5. None if nobody gives any."""
    total = amount.sum(1)
    giving = ~malicious[clients] & (total > 0)
    if not giving.any():
        return None
    share = amount[giving] / total[giving][:, None]
    named = peers[giving].clamp(min=0)
    bad = malicious[named]
    own = torch.ones_like(bad) if clusters is None else clusters[clients[giving]][:, None] == clusters[named]
    kinds = {"own_honest": own & ~bad, "own_malicious": own & bad, "other_honest": ~own & ~bad}
    kinds["other_malicious"] = ~own & bad
    return {name: float((share * kind).sum(1).mean()) for name, kind in kinds.items()}


def found_clusters(links: Tensor) -> list[int]:
    """Clusters by who learns from whom: spectral clustering of the symmetric links, as many clusters as stand before
    the largest gap of the eigenvalues. A client linked to nobody is a cluster of its own.
    """
    from sklearn.cluster import KMeans  # here, because importing it takes more than a second

    weight = (links + links.T).double().numpy()
    degree = weight.sum(1)
    labels = np.arange(len(weight)) + len(weight)  # of the unlinked
    linked = np.flatnonzero(degree)
    if len(linked):
        scale = 1.0 / np.sqrt(degree[linked])
        values, vectors = np.linalg.eigh(weight[np.ix_(linked, linked)] * scale[:, None] * scale)
        most = min(MOST_CLUSTERS, len(linked))
        leading = values[::-1][: most + 1]
        number = int(np.argmax(leading[:-1] - leading[1:])) + 1 if len(leading) > 1 else 1
        space = vectors[:, ::-1][:, :number]
        space /= np.linalg.norm(space, axis=1, keepdims=True).clip(min=1e-12)
        labels[linked] = KMeans(number, n_init=10, random_state=0).fit_predict(space)
    return [int(label) for label in np.unique(labels, return_inverse=True)[1]]


def clusters_by_weights(weights: Tensor) -> list[int]:
    """Clusters by average linkage: two become one while the mean weight between their clients is above a half. Rows
    that share out 1 in all, as on the simplex, are taken in units of their greatest weight."""
    from sklearn.cluster import AgglomerativeClustering

    if len(weights) == 1:
        return [0]
    weights = weights.double().cpu()
    if torch.allclose(weights.sum(1), torch.ones(len(weights), dtype=weights.dtype), atol=1e-3):
        weights = weights / weights.amax(1, keepdim=True)
    distance = (1.0 - (weights + weights.T) / 2).fill_diagonal_(0.0)
    linkage = AgglomerativeClustering(None, metric="precomputed", linkage="average", distance_threshold=0.5)
    return [int(label) for label in linkage.fit_predict(distance.numpy())]


def adjusted_rand(found: list[int], clusters: Tensor | None) -> float | None:
    """Agreement of found and true clusters: 1 is perfect, 0 is chance."""
    from sklearn.metrics import adjusted_rand_score

    return None if clusters is None else float(adjusted_rand_score(clusters.tolist(), found))


def perplexities(losses: Tensor) -> Tensor:
    """exp of each client's mean test loss, in float64; of a model gone astray, a number whose square can be written."""
    return losses.double().clamp(max=300.0).exp()


def spread(values: Tensor) -> dict[str, Any] | None:
    """Mean, population standard deviation, least and greatest of the clients that were measured."""
    measured = values[torch.isfinite(values)].double()
    if not len(measured):
        return None
    mean = float(measured.mean())
    deviation = math.sqrt(float(((measured - mean) ** 2).mean()))
    return {"mean": mean, "std": deviation, "min": float(measured.min()), "max": float(measured.max())}
