"""`minimise`, `minimise_bilevel`, and the same with the function's values told from outside."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import ConfigError, DataError, explain
from coterie.particles.functions import Function, Objective
from coterie.particles.start import Start
from coterie.particles.system import ClusteredSystem

Array = NDArray[Any]


@dataclass
class Record:
    """What was kept of one step, of the runs that were still going on: their numbers are in `runs`."""

    step: int
    runs: list[int]
    consensus: Array  # [r, d]
    least: Array  # [r], the least value among the particles
    positions: Array  # [r, N, d] before the step


@dataclass
class Result:
    """What came out. With `runs` given, a leading axis for the runs; without, the one run's own."""

    x: Any  # [d], the last consensus
    fun: Any  # its value; of two levels, the upper one
    lower: Any  # its value on the lower level; None if there is one level
    best_x: Any  # [d], the best point ever asked about; None if there are two levels
    best_fun: Any
    nfev: int  # points the functions were asked about, all runs together
    nit: Any  # steps made
    spread: Any  # mean squared distance of the particles from the consensus
    success: Any  # whether it stopped as was wished: by a criterion if one was given, else by the number of steps
    message: Any
    history: list[Record] = field(default_factory=list, repr=False)


def minimise(
    f: Function,
    start: Start,
    *,
    particles: int | None = None,
    steps: int = 1000,
    seed: int = 0,
    runs: int | Iterable[int] | None = None,
    stop_value: float | None = None,
    stop_spread: float | None = None,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    record: int = 0,
    gradient: Function | None = None,
    **options: Any,
) -> Result:
    """Minimise a function by consensus-based optimisation: no gradients needed, no convexity, no smoothness.

    f: of points [n, d], torch or NumPy, with values [n], or of one point [d] (see `takes`); it must not change them.
    start: bounds (lower, upper), a sampler (particles, generator) -> [particles, d], or an array of positions.
    runs: how many independent runs at once, or their numbers; a run's result depends on its number and the seed only.
    stop_value, stop_spread, max_evaluations (of each run), max_seconds end the search early; record: keep every so many
    steps in `history`. options: alpha, drift, noise, dt, diffusion, batch and the others of `Dynamics`; attackers,
    bounds (particles stay within), dimension, dtype, device and takes as for `ClusteredSystem`.

        result = coterie.minimise(lambda x: (x**2).sum(-1), ([-3, -3], [3, 3]), particles=50, alpha=30, steps=500)
    """
    slopes = None if gradient is None else [gradient]
    system = _system([f], start, particles, seed, runs, gradients=slopes, **options)
    stop = _Stop(stop_value, stop_spread, max_evaluations, max_seconds)
    return _search(system, steps, stop, record, single=runs is None)


def minimise_bilevel(
    lower: Function,
    upper: Function,
    start: Start,
    *,
    beta: float,
    particles: int | None = None,
    steps: int = 1000,
    seed: int = 0,
    runs: int | Iterable[int] | None = None,
    stop_spread: float | None = None,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    record: int = 0,
    **options: Any,
) -> Result:
    """Minimise `upper` among the minimisers of `lower` by CB²O, fedcb2o.txt (1.2) to (1.5).

    beta: the share of particles, best by `lower`, whose consensus under exp(-alpha upper) is sought. The slides have
    delta_q = 0, and small beta then lets a few attackers fill the set; with delta_q above 0 smaller beta is safer, as
    the theorem says. An equality constraint h(x) = 0 is `lower = h(x)**2`. Further arguments as for `minimise`.
    """
    system = _system([lower], start, particles, seed, runs, upper=upper, beta=beta, **options)
    stop = _Stop(None, stop_spread, max_evaluations, max_seconds)
    return _search(system, steps, stop, record, single=runs is None)


class Minimiser:
    """`minimise` for functions that are asked elsewhere: `ask` for points, `tell` their values, look at `result`.

    ask = Minimiser(([0, 0], [1, 1]), particles=20, alpha=30)
    for _ in range(50):
        points = ask.ask()            # [20, 2] NumPy
        ask.tell(points, [measure(point) for point in points])
    """

    def __init__(self, start: Start, *, particles: int | None = None, seed: int = 0, **options: Any) -> None:
        self._system = _system([_told], start, particles, seed, None, takes="numpy", **options)
        self._best = _Best(self._system.x)
        self._told = 0

    def ask(self) -> Array:
        """[B, d]: where the function's value is wanted next; the same until it is told."""
        return self._system.points()[0].cpu().numpy().copy()

    def tell(self, points: Array, values: Sequence[float] | Array) -> None:
        """Values [B] at the points that were asked for. A value that is not finite only loses its weight."""
        asked = self._system.points()
        if np.shape(points) != asked.shape[1:] or not np.array_equal(points, asked[0].cpu().numpy()):
            raise DataError(explain("points", np.shape(points), f"what ask gave, {tuple(asked.shape[1:])}, unchanged"))
        found = Objective(lambda _: np.asarray(values), "values", "numpy").values(asked[0])[None, None]
        self._best.see(asked, found[0])
        self._system.tell(found)
        self._told += len(values)

    @property
    def result(self) -> Result:
        """The consensus and the best point so far; `fun` is None, for nobody was asked about the consensus."""
        if not self._told:
            raise ConfigError(explain("result", None, "known after the first tell"))
        x, best, spread = self._system.consensus[0, 0], self._best.x[0], float(self._system.spread()[0, 0])
        values: dict[str, Any] = {
            "fun": None,
            "lower": None,
            "best_x": _array(best),
            "best_fun": float(self._best.value[0]),
        }
        said = f"after {self._system.steps} steps"
        return Result(
            _array(x), nfev=self._told, nit=self._system.steps, spread=spread, success=True, message=said, **values
        )


def _told(points: Array) -> Array:
    raise ConfigError("ask and tell: the gradient is not known. Allowed: gradient_drift = 0, gradient_noise = 0.")


class _Best:
    """The best point of each run so far."""

    def __init__(self, x: Tensor) -> None:
        self.value = x.new_full(x.shape[:1], torch.inf)  # [R]
        self.x = x[:, 0].clone()  # [R, d]

    def see(self, points: Tensor, values: Tensor) -> Tensor:
        """Take note of points [R, B, d] with values [R, B]; the least of them [R]."""
        least = values.amin(dim=1)
        if not (least >= self.value).all():  # better, or NaN
            least, place = values.nan_to_num(torch.inf, torch.inf, torch.inf).min(dim=1)
            better = least < self.value
            self.value = torch.where(better, least, self.value)
            points = points.gather(1, place[:, None, None].expand(-1, 1, points.shape[2]))[:, 0]
            self.x = torch.where(better[:, None], points, self.x)
        return least

    def keep(self, runs: Tensor) -> None:
        self.value, self.x = self.value[runs], self.x[runs]


@dataclass(frozen=True)
class _Stop:
    value: float | None
    spread: float | None
    evaluations: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        for name in ("spread", "evaluations", "seconds"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise ConfigError(explain(f"the limit of {name}", limit, "a number above 0"))

    @property
    def wished(self) -> bool:
        """Whether there is a criterion of success, not only a limit of effort."""
        return self.value is not None or self.spread is not None

    def reasons(self, system: ClusteredSystem, best: _Best, asked: int, began: float) -> list[str]:
        """For each run why it ends now, or an empty string."""
        count = len(system.runs)
        if self.seconds is not None and time.monotonic() - began >= self.seconds:
            return ["the time is over"] * count
        if self.evaluations is not None and asked >= self.evaluations:
            return ["the evaluations are used up"] * count
        reasons = [""] * count
        if self.spread is not None and system.steps:
            close = (system.spread()[0] <= self.spread).tolist()
            reasons = ["the particles agree within stop_spread" if near else "" for near in close]
        if self.value is not None:
            low = (best.value <= self.value).tolist()
            reasons = ["stop_value is reached" if met else why for met, why in zip(low, reasons, strict=True)]
        return reasons


def _system(
    losses: list[Function], start: Start, particles: int | None, seed: int, runs: Any, **options: Any
) -> ClusteredSystem:
    sizes = None if particles is None else [_whole("particles", particles, 1)]
    _whole("seed", seed, 0)
    return ClusteredSystem(losses, start, sizes=sizes, seed=seed, runs=1 if runs is None else runs, **options)


def _whole(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(explain(name, value, f"a whole number of at least {least}"))
    return value


@torch.no_grad()
def _search(system: ClusteredSystem, steps: int, stop: _Stop, record: int, single: bool) -> Result:
    """Step until every run has a reason to stop; a run that has one is left alone and changes no more."""
    _whole("steps", steps, 1)
    _whole("record", record, 0)
    order, ended, history, began = system.runs, dict[int, "_Ended"](), list[Record](), time.monotonic()
    best, checks = _Best(system.x), any(limit is not None for limit in vars(stop).values())
    while system.runs and system.steps < steps:
        asked = system.points()
        values = system.evaluate()
        least = best.see(asked, values[0])
        if record and system.steps % record == 0:
            before = system.x.cpu().numpy().copy()
        system.agree(values)
        if record and system.steps % record == 0:
            seen = _array(system.consensus[0]), _array(least), before
            history.append(Record(system.steps, list(system.runs), *seen))
        system.move(values=values)
        if checks:
            asked_each = system.steps * values.shape[0] * values.shape[2]
            _end_some(system, best, stop.reasons(system, best, asked_each, began), stop, ended)
    _end_some(system, best, [f"{steps} steps are made"] * len(system.runs), stop, ended)
    return _result(system, [ended[run] for run in order], history, single)


@dataclass(frozen=True)
class _Ended:
    x: Tensor
    best_x: Tensor
    best_value: float
    spread: float
    steps: int
    success: bool
    message: str


def _end_some(system: ClusteredSystem, best: _Best, reasons: list[str], stop: _Stop, ended: dict[int, _Ended]) -> None:
    if not any(reasons):
        return
    spread = system.spread()[0].tolist()
    for row, (run, why) in enumerate(zip(system.runs, reasons, strict=True)):
        if why:
            happy = why.startswith(("the particles", "stop_value")) or (not stop.wished and why.endswith("made"))
            x, least = system.consensus[0, row].clone(), float(best.value[row])
            ended[run] = _Ended(x, best.x[row].clone(), least, spread[row], system.steps, happy, why)
    going_on = torch.tensor([not why for why in reasons], device=system.x.device)
    best.keep(going_on)
    system.keep(going_on)


def _result(system: ClusteredSystem, ended: list[_Ended], history: list[Record], single: bool) -> Result:
    x = torch.stack([run.x for run in ended])
    values = [function.values(x).cpu().numpy() for function in system.functions]
    two = bool(system.uppers)
    columns: dict[str, Any] = {
        "x": _array(x),
        "fun": values[-1],
        "lower": values[0] if two else None,
        "best_x": None if two else _array(torch.stack([run.best_x for run in ended])),
        "best_fun": None if two else np.array([run.best_value for run in ended]),
        "nit": np.array([run.steps for run in ended]),
        "spread": np.array([run.spread for run in ended]),
        "success": np.array([run.success for run in ended]),
        "message": [run.message for run in ended],
    }
    if single:
        columns = {name: None if column is None else column[0] for name, column in columns.items()}
    return Result(**columns, nfev=system.asked, history=history)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy().copy()
