"""Robustness criteria G of FedCB²O: how suspicious a peer's model is, seen from a client's own data.

A criterion is a function (the peers' losses by class, the client's own model's) -> [C, M], smaller is better; NaN or
infinity keeps a model out. To add one: `CRITERIA["mine"] = function`, then criterion = "mine".
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.clients import ClassLosses

Criterion = Callable[[ClassLosses, ClassLosses], Tensor]


def max_class_gap(peers: ClassLosses, own: ClassLosses) -> Tensor:
    """G_j = max_c (L_c(theta) - L_c(theta_j)), fedcb2o.txt (3.15): one class at which a peer is much worse betrays it.

    Differs from the authors' program: classes of which the client has no example are left out; there they count as a
    gap of 0, so that a peer that is better at every known class is not told from one that is as good.
    """
    absent = own.share[:, None] == 0
    return (peers.each - own.each).masked_fill(absent, -torch.inf).amax(-1)


def class_entropy(peers: ClassLosses, own: ClassLosses) -> Tensor:
    """G = -sum_c w_c log(L_c / L), fedcbo-slides-2024.txt, part 2: small where the loss is spread evenly over classes.

    Classes without examples have w_c = 0. A class loss of 0 counts as a millionth of the mean loss; if all are 0, they
    are spread evenly.
    """
    ratio = peers.each.clamp(min=1e-30) / peers.average[..., None].clamp(min=1e-30)
    return -(peers.share[:, None] * ratio.clamp(min=1e-6).log()).sum(-1)


def average_loss(peers: ClassLosses, own: ClassLosses) -> Tensor:
    """The mean loss itself: with it FedCB²O is FedCBO."""
    return peers.average


CRITERIA: dict[str, Criterion] = {
    "max_class_gap": max_class_gap,
    "class_entropy": class_entropy,
    "average_loss": average_loss,
}
