"""How particles move: the numbers of the equations, checked, and what may be a function of the step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from coterie.errors import ConfigError, explain, nearest

Rate = float | Callable[[int], float]  # a number, or a schedule: what it is at step 0, 1, 2, ...
Diffusion = Literal["isotropic", "anisotropic", "covariance"]


@dataclass(frozen=True)
class Now:
    """The numbers of one step."""

    alpha: float
    noise: float
    dt: float


@dataclass(frozen=True)
class Dynamics:
    """dx = -drift (x - m) dt + noise D(x - m) dB and, if asked for, terms for the own gradient and the own memory.

    m is the consensus: the mean of the particles under weights exp(-alpha f). D(y) is |y| (isotropic), diag(y)
    (anisotropic), or the root of the particles' weighted covariance (with noise sqrt 2 the consensus-based sampling of
    Carrillo, Hoffmann, Stuart and Vaes in its optimising mode, with sqrt(2 (1 + alpha)) in its sampling mode).
    alpha, noise and dt may be functions of the step.
    """

    alpha: Rate = 30.0
    drift: float = 1.0  # lambda, lambda_1
    noise: Rate = 1.0  # sigma, sigma_1
    dt: Rate = 0.01
    diffusion: Diffusion = "isotropic"
    gradient_drift: float = 0.0  # lambda_2, fedcbo-jmlr.txt (4)
    gradient_noise: float = 0.0  # sigma_2, times |gradient|
    memory_drift: float = 0.0  # toward the best point a particle has seen; the consensus is then one of these points
    memory_noise: float = 0.0  # times D(x - best)
    batch: int | None = None  # only so many particles are asked and heard in a step, in turn
    partial: bool = False  # only those of the batch move
    beta: float | None = None  # share of the particles in the quantile set, fedcb2o.txt (1.4); None: one level
    delta_q: float = 0.0  # what may be added to the quantile; the slides have 0, the theorems more
    averaged: bool = False  # the mean of the quantiles from beta/2 to beta, as in (1.4); the slides take that of beta
    radius: float | None = None  # R of (1.4): points farther from 0 are not in the set

    def __post_init__(self) -> None:
        for name in ("alpha", "noise", "dt"):
            if not callable(getattr(self, name)):
                _number(name, getattr(self, name), above_zero=name == "dt")
        for name in ("drift", "gradient_drift", "gradient_noise", "memory_drift", "memory_noise", "delta_q"):
            _number(name, getattr(self, name))
        for name in ("beta", "radius"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), above_zero=True)
        if self.beta is not None and self.beta > 1:
            raise ConfigError(explain("beta", self.beta, "above 0, at most 1"))
        if self.batch is not None and (isinstance(self.batch, bool) or not isinstance(self.batch, int)):
            raise ConfigError(explain("batch", self.batch, "None or a whole number"))
        if self.diffusion not in get_args(Diffusion):
            raise ConfigError(explain("diffusion", self.diffusion, ", ".join(get_args(Diffusion))))
        if self.remembers and (self.batch is not None or self.beta is not None):
            raise ConfigError(explain("memory_drift", self.memory_drift, "0 together with batch or with two levels"))

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "Dynamics":
        """From keyword arguments, of which unknown ones are named."""
        known = [field.name for field in fields(Dynamics)]
        for name in settings:
            if name not in known:
                raise ConfigError(explain("option", name, ", ".join(known), nearest(name, known)))
        return Dynamics(**settings)

    @cached_property
    def remembers(self) -> bool:
        """Whether particles keep the best point they have seen."""
        return self.memory_drift > 0 or self.memory_noise > 0

    @cached_property
    def descends(self) -> bool:
        """Whether particles follow gradients of their own."""
        return self.gradient_drift > 0 or self.gradient_noise > 0

    def at(self, step: int) -> Now:
        """The numbers of a step; what a schedule gives is checked like a constant."""
        return self._always or self._scheduled(step)

    @cached_property
    def _always(self) -> Now | None:
        rates = self.alpha, self.noise, self.dt
        return None if any(callable(rate) for rate in rates) else self._scheduled(0)

    def _scheduled(self, step: int) -> Now:
        values = {}
        for name in ("alpha", "noise", "dt"):
            rate = getattr(self, name)
            values[name] = _number(f"{name} at step {step}", rate(step), name == "dt") if callable(rate) else rate
        return Now(**values)


def _number(name: str, value: object, above_zero: bool = False) -> float:
    fine = isinstance(value, int | float) and math.isfinite(value) and (value > 0 if above_zero else value >= 0)
    if isinstance(value, bool) or not fine:
        raise ConfigError(explain(name, value, f"a finite number {'above' if above_zero else 'of at least'} 0"))
    return float(value)  # type: ignore[arg-type]
