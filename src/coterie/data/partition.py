"""Who holds which examples: pure functions from sizes, labels and a seed to index tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.federation import shuffled
from coterie.randomness import derive, normal


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` things in `parts` parts that differ by one at most, the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def deal(pool: Tensor, sizes: Sequence[int], seed: int, purpose: str, *parts: int) -> list[Tensor]:
    """Disjoint pieces of these sizes from the shuffled pool; sizes that add up to the pool use all of it."""
    order = pool[shuffled(len(pool), seed, purpose, *parts)]
    ends = np.cumsum(sizes)
    return [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def allot(weights: NDArray[np.float64], seats: int, room: NDArray[np.int64]) -> NDArray[np.int64]:
    """`seats` seats in proportion to the weights (largest remainders), at most `room` each.

    What does not fit goes to the others in proportion, and to those of no weight when no other has room.
    """
    given = np.zeros_like(room)
    while (left := seats - int(given.sum())) > 0:
        open_weights = np.where(given < room, weights, 0.0)
        if not open_weights.sum() > 0:
            open_weights = (room - given).astype(np.float64)
        share = open_weights / open_weights.sum() * left
        whole = np.floor(share).astype(np.int64)
        rest = np.where(open_weights > 0, share - whole, -1.0)
        whole[np.argsort(-rest, kind="stable")[: left - int(whole.sum())]] += 1
        given += np.minimum(whole, room - given)
    return given


def dirichlet(labels: Tensor, num_classes: int, sizes: Sequence[int], beta: float, seed: int) -> list[Tensor]:
    """Each client draws its label proportions from a symmetric Dirichlet law and takes examples in that proportion.

    Nobody shares an example. When a class runs out, the client takes the rest from its other classes.
    """
    pools = [(labels == label).nonzero().flatten() for label in range(num_classes)]
    pools = [pool[shuffled(len(pool), seed, "dirichlet pool", label)] for label, pool in enumerate(pools)]
    taken = np.zeros(num_classes, dtype=np.int64)
    room = np.array([len(pool) for pool in pools])
    held = []
    for client, size in enumerate(sizes):
        generator = np.random.Generator(np.random.Philox(key=derive(seed, "dirichlet", client)))
        counts = allot(generator.dirichlet(np.full(num_classes, beta)), size, room - taken)
        held.append(torch.cat([pools[c][taken[c] : taken[c] + counts[c]] for c in range(num_classes)]))
        taken += counts
    return held


def in_proportion(own: Tensor, labels: Tensor, most: int, num_classes: int, seed: int, client: int) -> Tensor:
    """Indices of as many of `labels` as there are, up to `most`, in which the classes occur as in the client's own."""
    share = torch.bincount(own, minlength=num_classes).numpy() / len(own)
    room = torch.bincount(labels, minlength=num_classes).numpy()
    reach = min(room[label] / share[label] for label in range(num_classes) if share[label] > 0)
    counts = allot(share, max(1, int(min(reach, most))), room)
    picked = []
    for label in range(num_classes):
        pool = (labels == label).nonzero().flatten()
        picked.append(pool[shuffled(len(pool), seed, "test in proportion", client, label)[: counts[label]]])
    return torch.cat(picked).sort().values


def skewed_sizes(weights: NDArray[np.float64], total: int, least: int, most: int) -> list[int]:
    """Sizes in proportion to the weights, adding up to `total`, each from `least` to `most`."""
    clients = len(weights)
    above = allot(weights, total - least * clients, np.full(clients, most - least))
    return [least + int(size) for size in above]


def lognormal_weights(clients: int, sigma: float, seed: int) -> NDArray[np.float64]:
    """exp of independent normals of standard deviation sigma."""
    drawn = normal(torch.tensor([derive(seed, "log-normal sizes")]), clients)[0].double().numpy()
    return np.exp(sigma * drawn)


def power_law_weights(clients: int, exponent: float, seed: int) -> NDArray[np.float64]:
    """rank ** -exponent, the ranks in random order."""
    rank = shuffled(clients, seed, "power-law sizes").double().numpy() + 1
    return rank**-exponent
