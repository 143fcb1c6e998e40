"""What the theorems speak of, measured: the decay of V, and how far N particles are from infinitely many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.particles.system import ClusteredSystem


@dataclass(frozen=True)
class Decay:
    """V by time."""

    times: Tensor  # [T + 1]
    energy: Tensor  # [T + 1, R]: the sum over the clusters of half the mean squared distance to the minimiser

    def rate(self, down_to: float = 1e-3) -> Tensor:
        """[R]: the rate of the exponential that fits V best (least squares of its logarithm) until it has fallen to
        this share of what it was; with finite alpha it ends a little above zero."""
        fallen = (self.energy <= down_to * self.energy[0]).cumsum(0) > 0
        weight = (~fallen).double()
        weight[:2] = 1.0
        logs, times = self.energy.double().clamp(min=1e-300).log(), self.times.double()[:, None]
        mean_time, mean_log = ((weight * value).sum(0) / weight.sum(0) for value in (times, logs))
        slope = (weight * (times - mean_time) * (logs - mean_log)).sum(0) / (weight * (times - mean_time) ** 2).sum(0)
        return -slope


def energy(positions: Tensor, minimiser: Tensor) -> Tensor:
    """[R]: V = half the mean squared distance of positions [R, n, d] from a point [d], fedcbo-jmlr.txt Theorem 3."""
    return 0.5 * (positions - minimiser.to(positions)).square().sum(-1).mean(1)


def decay(system: ClusteredSystem, minimisers: Sequence[Tensor], steps: int) -> Decay:
    """Make so many steps and measure V before, between and after them."""

    def total() -> Tensor:
        return torch.stack([energy(system.positions(k), point) for k, point in enumerate(minimisers)]).sum(0)

    times, found = [system.time], [total()]
    for _ in range(steps):
        system.run(1)
        times.append(system.time)
        found.append(total())
    return Decay(torch.tensor(times, dtype=torch.float64), torch.stack(found))


def mean_field_error(
    make: Callable[[int], ClusteredSystem], sizes: Sequence[int], reference: int, steps: int
) -> list[float]:
    """For each number of particles the mean squared distance of a particle from its mean-field copy, at worst in time.

    The copy has the same start and the same Brownian motion but follows the consensus of the mean field, for which
    that of `reference` particles stands (synchronous coupling; the error in fedcbo-jmlr.txt Theorem 4 is about 1/N).
    make(n) gives a fresh system of n particles per cluster, with one or more runs, over which the mean is taken.
    """
    field, path = make(reference), []
    for _ in range(steps):
        field.run(1)
        path.append(field.consensus.mean(1, keepdim=True))  # over its runs, each as good as another
    errors = []
    for size in sizes:
        system, copy, worst = make(size), make(size), 0.0
        for consensus in path:
            system.run(1)
            copy.move(consensus.expand_as(copy.consensus))
            worst = max(worst, float((system.x - copy.x).square().sum(-1).mean()))
        errors.append(worst)
    return errors


def slope(sizes: Sequence[int], errors: Sequence[float]) -> float:
    """Of the logarithms, by least squares."""
    x, y = torch.tensor(sizes, dtype=torch.float64).log(), torch.tensor(errors, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
