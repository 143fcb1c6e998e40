"""Problems with known answers that several tests use."""

import math

import torch

from coterie.particles import ClusteredSystem

GOOD = torch.tensor([1.0, 0.0])


def valley(center):
    """The loss of the note's FedCBO case: nearly |y|, wavy; the least value is 0 at the centre."""
    center = torch.as_tensor(center)

    def loss(x):
        y = x - center.to(x)
        return (1 + y.square().sum(-1)).sqrt() - 1 + 0.1 * (1 - torch.cos(2 * math.pi * y)).mean(-1)

    return loss


def from_normal(count, generator):
    """Around 0 with standard deviation 2 in two dimensions."""
    return 2 * torch.randn(count, 2, generator=generator)


def clusters(centers, size, alpha, dt=0.01, **options):
    """FedCBO with lambda = (1, .1) and sigma = (.3, .05)."""
    return ClusteredSystem(
        [valley(center) for center in centers],
        from_normal,
        sizes=[size] * len(centers),
        alpha=alpha,
        noise=0.3,
        gradient_drift=0.1,
        gradient_noise=0.05,
        dt=dt,
        **options,
    )


def ring(x):
    """L: its minimisers are the unit circle."""
    return (x.norm(dim=-1) - 1).square()


def upper(x):
    """G: least at (1, 0), among the minimisers of `ring` too; 1 at (-1, 0)."""
    y = x - GOOD.to(x)
    return y.square().sum(-1) / 4 + 0.05 * (1 - torch.cos(2 * math.pi * y)).sum(-1)


def reached(x, point, within=0.1):
    """The share of runs that came so near."""
    distance = (torch.as_tensor(x) - torch.as_tensor(point)).norm(dim=-1)
    return float((distance < within).float().mean())
