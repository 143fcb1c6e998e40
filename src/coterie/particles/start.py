"""Where particles begin and where they must stay: bounds, samplers and arrays as a user may write them."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError, DataError, explain
from coterie.particles.draws import Draws
from coterie.randomness import derive

Start = Any  # (lower, upper), a sampler (particles, generator) -> [particles, d], or an array [N, d] or [R, N, d]


def beginning(
    start: Start,
    particles: int | None,
    dimension: int | None,
    runs: list[int],
    seed: int,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Tensor:
    """[R, N, d]: a new array with the first positions."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(explain("dtype", dtype, "torch.float32 or torch.float64"))
    if isinstance(start, tuple):
        x = _uniform(*box("start", start, dimension), _counted(particles), runs, seed, dtype or torch.float32)
    elif callable(start):
        x = _sampled(start, _counted(particles), runs, seed, dtype or torch.float32)
    else:
        x = _given(start, len(runs), dtype)
        if particles not in (None, x.shape[1]):
            raise ConfigError(explain("particles", particles, f"{x.shape[1]}, as many as start holds"))
    if dimension not in (None, x.shape[2]):
        raise ConfigError(explain("dimension", dimension, f"{x.shape[2]}, that of start"))
    if not bool(torch.isfinite(x).all()):
        raise DataError("start: some of its coordinates are NaN or infinite; allowed: finite numbers.")
    return x.to(device)


def box(name: str, bounds: object, dimension: int | None) -> tuple[Tensor, Tensor]:
    """([d], [d]) float64 from a pair of numbers or of d numbers each."""
    do = "Give two numbers (and dimension), or two lists of d numbers."
    try:
        low, high = (torch.as_tensor(np.asarray(side, dtype=np.float64)) for side in bounds)  # type: ignore[attr-defined]
        shape = torch.broadcast_shapes(low.shape, high.shape, () if dimension is None else (dimension,))
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(explain(name, bounds, "a pair (lower, upper)", do)) from None
    if len(shape) != 1 or shape[0] == 0:
        raise ConfigError(explain(name, bounds, "bounds in at least one dimension", do))
    low, high = low.expand(shape), high.expand(shape)
    if not bool((low <= high).all()) or not bool(torch.isfinite(high - low).all()):
        raise ConfigError(explain(name, bounds, "finite bounds, lower at most upper", "Are they reversed?"))
    return low, high


def numbered(runs: int | Iterable[int]) -> list[int]:
    """The numbers of the runs: a run's results depend on its number, not on which others are computed beside it."""
    try:
        numbers = list(range(runs)) if isinstance(runs, int) else [int(run) for run in runs]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(explain("runs", runs, "a number of at least 1, or different numbers of at least 0"))
    return numbers


def _counted(particles: int | None) -> int:
    if particles is None or particles < 1:
        raise ConfigError(explain("particles", particles, "a whole number of at least 2"))
    return particles


def _uniform(low: Tensor, high: Tensor, count: int, runs: list[int], seed: int, dtype: torch.dtype) -> Tensor:
    x = torch.empty(len(runs), count, len(low), dtype=dtype)
    Draws(seed, "start", runs, count * len(low)).uniform(x, slice(None), 0)
    return x.mul_((high - low).to(dtype)).add_(low.to(dtype))


def _sampled(sampler: Callable[..., Any], count: int, runs: list[int], seed: int, dtype: torch.dtype) -> Tensor:
    found = []
    for run in runs:
        generator = torch.Generator().manual_seed(derive(seed, "start", run))
        x = torch.as_tensor(sampler(count, generator), dtype=dtype)
        if x.ndim != 2 or len(x) != count:
            raise DataError(explain("start, shape of what it gives", tuple(x.shape), f"({count}, dimension)"))
        found.append(x)
    return torch.stack(found)


def _given(array: object, runs: int, dtype: torch.dtype | None) -> Tensor:
    try:
        x = torch.as_tensor(array if isinstance(array, Tensor) else np.asarray(array))
        x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.float32))
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(explain("start", array, "(lower, upper), a sampler, or an array of numbers")) from None
    if x.ndim not in (2, 3) or 0 in x.shape or (x.ndim == 3 and len(x) != runs):
        shapes = f"(particles, dimension), or with {runs} before them for the runs"
        raise DataError(explain("start, shape", tuple(x.shape), shapes))
    return x.expand(runs, *x.shape[-2:]).clone(memory_format=torch.contiguous_format)
