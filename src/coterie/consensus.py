"""Consensus: how losses become weights, and models an average. Shared by methods and particles."""

import torch
from torch import Tensor


def gibbs(losses: Tensor, alpha: float) -> Tensor:
    """[..., M]: weights exp(-alpha L_i) / sum_k exp(-alpha L_k), fedcbo-jmlr.txt (21), computed in the log domain:
    exp(-alpha L) itself underflows for the paper's own settings. A NaN or infinite loss gets weight zero; if all losses
    are such, all weights are zero.
    """
    infinite = -torch.inf
    logits = torch.nan_to_num(-alpha * losses, nan=infinite, posinf=infinite, neginf=infinite)
    return torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)


def in_quantile(losses: Tensor, share: float, slack: float = 0.0, averaged: bool = False) -> Tensor:
    """[..., M] bool: the models whose loss is at most the `share`-quantile of the finite ones plus `slack`.

    The sub-level set Q_beta of the slides (fedcbo-slides-2024.txt, part 2), q_beta the ceil(beta M)-th smallest loss;
    with slack = delta_q > 0 and `averaged`, which takes the mean of the quantiles from beta/2 to beta, the form of
    fedcb2o.txt (1.4), without its ball. Without slack a few attackers who reach the least loss fill the set.
    """
    finite = torch.isfinite(losses)
    ordered = torch.where(finite, losses, torch.inf).sort(dim=-1).values
    count = finite.sum(-1, keepdim=True).double()
    if averaged:
        threshold = _mean_quantile(ordered, share * count)
    else:
        rank = (share * count - 1e-9).ceil()  # 15 of 0.6 * 25 in spite of rounding
        threshold = ordered.gather(-1, rank.long().clamp(min=1) - 1)
    return finite & (losses <= threshold + slack)


def _mean_quantile(ordered: Tensor, upto: Tensor) -> Tensor:
    """[..., 1]: the mean quantile from beta/2 to beta of sorted losses [..., M]; upto = beta M [..., 1].

    The quantile is the j-th smallest loss between (j - 1)/M and j/M, so each has the length of that stretch as weight.
    """
    place = torch.arange(ordered.shape[-1], device=ordered.device, dtype=upto.dtype)
    stretch = (torch.minimum(place + 1, upto) - torch.maximum(place, upto / 2)).clamp(min=0.0)
    share = stretch / stretch.sum(-1, keepdim=True).clamp(min=1e-300)
    mean = (share * torch.where(share > 0, ordered, 0.0)).sum(-1, keepdim=True).to(ordered.dtype)
    return torch.maximum(mean, ordered[..., :1])  # rounding must not leave out the least loss


def mean_by_group(models: Tensor, group: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    """[K, P]: the weighted mean of the models [R, P] of each group [R]; `otherwise` [K, P] for groups without any."""
    share = torch.zeros(len(otherwise), len(models), device=models.device)
    share[group, torch.arange(len(models), device=models.device)] = weight.to(share.dtype)
    total = share.sum(1, keepdim=True)
    return torch.where(total > 0, (share / total.clamp(min=1e-38)) @ models, otherwise)


def onto_simplex(values: Tensor) -> Tensor:
    """[..., n]: the nearest point of the probability simplex, by sorting (Held, Wolfe and Crowder 1974). An entry of
    minus infinity gets nothing, and a row of such is all zero."""
    ordered = values.sort(dim=-1, descending=True).values.nan_to_num(neginf=0.0)
    count = torch.arange(1, values.shape[-1] + 1, device=values.device)
    allowed = torch.isfinite(values).sum(-1, keepdim=True)
    threshold = (ordered.cumsum(-1) - 1.0) / count
    support = ((ordered > threshold) & (count <= allowed)).sum(-1, keepdim=True)
    chosen = threshold.gather(-1, (support - 1).clamp(min=0))
    return torch.where(support > 0, (values - chosen).clamp(min=0.0), 0.0)
