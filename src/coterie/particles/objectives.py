"""Test functions with known minimisers, for points [..., d]; torch, so that gradients come with them.

The definitions are those of Jamil and Yang, A literature survey of benchmark functions (2013), unless said otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def _cos(x: Tensor) -> Tensor:
    """torch.cos; of many numbers on a CPU by NumPy, in less than half the time, unless a gradient is wanted."""
    if x.numel() < 1 << 13 or x.device.type != "cpu" or x.requires_grad:
        return torch.cos(x)
    return torch.from_numpy(np.cos(x.numpy()))


def ackley(x: Tensor) -> Tensor:
    """-20 exp(-0.2 sqrt(mean x^2)) - exp(mean cos 2 pi x) + e + 20. Not differentiable at its minimiser 0."""
    bumps = torch.exp(_cos(2.0 * math.pi * x).mean(-1))
    return 20.0 + math.e - 20.0 * torch.exp(-0.2 * x.square().mean(-1).sqrt()) - bumps


def rastrigin(x: Tensor) -> Tensor:
    """10 d + sum x^2 - 10 cos 2 pi x; the minimiser is 0."""
    waves = _cos((2.0 * math.pi) * x)
    return torch.add(x * x, waves, alpha=-10.0).sum(-1) + 10.0 * x.shape[-1]


def rosenbrock(x: Tensor) -> Tensor:
    """sum 100 (x_{i+1} - x_i^2)^2 + (1 - x_i)^2, a curved valley; the minimiser is (1, ..., 1). d >= 2."""
    return (100.0 * (x[..., 1:] - x[..., :-1].square()).square() + (1.0 - x[..., :-1]).square()).sum(-1)


def griewank(x: Tensor) -> Tensor:
    """1 + sum x^2 / 4000 - prod cos(x_i / sqrt i); the minimiser is 0."""
    scale = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype).sqrt()
    return 1.0 + x.square().sum(-1) / 4000.0 - _cos(x / scale).prod(-1)


def himmelblau(x: Tensor) -> Tensor:
    """(a^2 + b - 11)^2 + (a + b^2 - 7)^2 in two dimensions; four minimisers, one of them (3, 2)."""
    a, b = x.unbind(-1)
    return (a.square() + b - 11.0).square() + (a + b.square() - 7.0).square()


def sphere(x: Tensor) -> Tensor:
    """sum x^2."""
    return x.square().sum(-1)


def styblinski_tang(x: Tensor) -> Tensor:
    """sum (x^4 - 16 x^2 + 5 x) / 2; the minimiser has -2.903534 everywhere and the value -39.16617 d."""
    return 0.5 * (x.pow(4) - 16.0 * x.square() + 5.0 * x).sum(-1)


def schwefel(x: Tensor) -> Tensor:
    """418.9829 d - sum x sin sqrt |x| on [-500, 500]^d; the minimiser has 420.968746 everywhere, near a corner."""
    return 418.9828872724339 * x.shape[-1] - (x * x.abs().sqrt().sin()).sum(-1)


def levy(x: Tensor) -> Tensor:
    """Levy's function with w = 1 + (x - 1) / 4; the minimiser is (1, ..., 1)."""
    w = 1.0 + (x - 1.0) / 4.0
    inner = ((w[..., :-1] - 1.0).square() * (1.0 + 10.0 * torch.sin(math.pi * w[..., :-1] + 1.0).square())).sum(-1)
    last = (w[..., -1] - 1.0).square() * (1.0 + torch.sin(2.0 * math.pi * w[..., -1]).square())
    return torch.sin(math.pi * w[..., 0]).square() + inner + last


def zakharov(x: Tensor) -> Tensor:
    """sum x^2 + s^2 + s^4 with s = sum i x_i / 2; the minimiser is 0."""
    s = (0.5 * torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype) * x).sum(-1)
    return x.square().sum(-1) + s.square() + s.pow(4)


def beale(x: Tensor) -> Tensor:
    """Beale's function in two dimensions; the minimiser is (3, 0.5)."""
    a, b = x.unbind(-1)
    return (1.5 - a + a * b).square() + (2.25 - a + a * b**2).square() + (2.625 - a + a * b**3).square()


def three_hump_camel(x: Tensor) -> Tensor:
    """2 a^2 - 1.05 a^4 + a^6 / 6 + a b + b^2 in two dimensions; the minimiser is 0."""
    a, b = x.unbind(-1)
    return 2.0 * a.square() - 1.05 * a.pow(4) + a.pow(6) / 6.0 + a * b + b.square()


@dataclass(frozen=True)
class Known:
    """A function of the suite, where it is usually searched, and its least value and where it is reached."""

    function: Callable[[Tensor], Tensor]
    within: tuple[float, float]
    coordinates: tuple[float, ...]  # of a minimiser; one number stands for all coordinates
    value: float = 0.0  # per coordinate if there is one number
    dimension: int | None = None  # None: any
    smooth: bool = True  # at the minimiser

    def minimiser(self, dimension: int) -> Tensor:
        """[d] float64."""
        return torch.tensor(self.coordinates, dtype=torch.float64).expand(dimension).clone()


SUITE = {
    "ackley": Known(ackley, (-32.768, 32.768), (0.0,), smooth=False),
    "rastrigin": Known(rastrigin, (-5.12, 5.12), (0.0,)),
    "rosenbrock": Known(rosenbrock, (-5.0, 10.0), (1.0,)),
    "griewank": Known(griewank, (-600.0, 600.0), (0.0,)),
    "himmelblau": Known(himmelblau, (-5.0, 5.0), (3.0, 2.0), dimension=2),
    "sphere": Known(sphere, (-5.12, 5.12), (0.0,)),
    "styblinski_tang": Known(styblinski_tang, (-5.0, 5.0), (-2.903534027771177,), -39.16616570377142),
    "schwefel": Known(schwefel, (-500.0, 500.0), (420.9687462275036,)),
    "levy": Known(levy, (-10.0, 10.0), (1.0,)),
    "zakharov": Known(zakharov, (-5.0, 10.0), (0.0,)),
    "beale": Known(beale, (-4.5, 4.5), (3.0, 0.5), dimension=2),
    "three_hump_camel": Known(three_hump_camel, (-5.0, 5.0), (0.0,), dimension=2),
}
