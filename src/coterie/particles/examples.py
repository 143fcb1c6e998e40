"""Named examples, each with its tables and what is to be drawn: `coterie particles NAME`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.particles.api import minimise, minimise_bilevel
from coterie.particles.attackers import Attackers, Move, drifting, fixed, mimicking, scattered
from coterie.particles.measured import Decay, decay, mean_field_error, slope
from coterie.particles.objectives import ackley, rastrigin
from coterie.particles.system import ClusteredSystem
from coterie.particles.theory import Bilevel, Landscape, Setting

Array = NDArray[np.float32]
Point = Tensor | Array | Sequence[float]


@dataclass(frozen=True)
class Table:
    """Numbers as text."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Curves:
    """Values by x, drawn with logarithmic axes where said."""

    caption: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False


@dataclass(frozen=True)
class Success:
    """The share of runs that found what was sought, for each row and column."""

    caption: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


@dataclass(frozen=True)
class Movie:
    """Particles by step, over a function in one or two dimensions."""

    caption: str
    steps: Sequence[int]
    positions: Sequence[Array]  # [N, d] each, d = 1 or 2
    consensus: Sequence[Array]  # [K, d] each
    sizes: Mapping[str, int]  # how many of the particles, in order, are of a kind
    axes: Sequence[Array]  # [d] arrays of coordinates
    landscape: Array  # the function there


@dataclass(frozen=True)
class Example:
    """What a named example has found."""

    title: str
    about: str
    tables: Sequence[Table]
    pictures: Sequence[Curves | Success | Movie]


def reached(x: Point, aim: Point, within: float = 0.1) -> float:
    """The share of runs [R, d] that came so near."""
    return float(((torch.as_tensor(x) - torch.as_tensor(aim)).norm(dim=-1) < within).float().mean())


# The slides' constrained Ackley

_BETAS = (  # beta, the steps the slides print, and how many of 10 they found
    (0.02, 1000, 1), (0.05, 200, 10), (0.1, 200, 10), (0.2, 200, 10), (0.3, 1000, 10), (0.5, 2000, 10), (0.8, 2000, 0),
)  # fmt: skip


def ackley_sphere(seed: int) -> Example:
    """The point of the unit sphere at which Ackley's function around (.4, .4, .4) is least."""
    aim = torch.full((3,), 3**-0.5)
    rows = []
    for beta, steps, slide in _BETAS:
        found = minimise_bilevel(
            lambda x: (1 - x.norm(dim=-1)).square(),
            lambda x: ackley(x - 0.4),
            ([-10.0] * 3, [10.0] * 3),
            beta=beta,
            particles=50,
            steps=steps,
            seed=seed,
            runs=50,
            alpha=30.0,
            noise=1.0,
            dt=0.1,
        )
        rows.append([f"{beta:g}", str(steps), f"{10 * reached(found.x, aim):.1f}", str(slide)])
    caption = "Runs of 10 that end within 0.1 of (1, 1, 1) / sqrt 3, ours from 50 repeats."
    about = (
        "The slides' second table, an equality constraint by two levels: L = (1 - |x|)^2, G Ackley's function around "
        "(.4, .4, .4), 50 particles, alpha 30, lambda 1, sigma 1, dt 0.1. The slides' G lacks a square and has a sign "
        "wrong; this is the function of the textbooks. beta .02 leaves one particle in the set, and G is never used."
    )
    return Example(
        "Ackley on the sphere", about, [Table(caption, ["beta", "steps", "found of 10", "slides"], rows)], []
    )


# Movies of one level


def _movie(x: Sequence[float], seed: int, noise: float, dimension: int, caption: str) -> Movie:
    found = minimise(
        rastrigin,
        ([x[0]] * dimension, [x[1]] * dimension),
        particles=60 if dimension == 1 else 150,
        alpha=30.0,
        noise=noise,
        dt=0.02,
        steps=240,
        seed=seed,
        record=4,
    )
    axes = [np.linspace(x[0], x[1], 400 if dimension == 1 else 90, dtype=np.float32)] * dimension
    grid = torch.tensor(np.stack(np.meshgrid(*axes, indexing="xy"), axis=-1))
    kept = found.history
    return Movie(
        caption,
        [record.step for record in kept],
        [record.positions[0] for record in kept],
        [record.consensus for record in kept],
        {"particles": kept[0].positions.shape[1]},
        axes,
        rastrigin(grid).numpy(),
    )


def rastrigin_movies(seed: int) -> Example:
    """Sixty particles on a line and a hundred and fifty in a plane find the lowest of many valleys."""
    line = _movie((-4.5, 3.5), seed, 0.6, 1, "Rastrigin in one dimension; the cross is the consensus.")
    plane = _movie((-4.5, 3.5), seed, 0.6, 2, "Rastrigin in two dimensions; the darker, the lower.")
    rows = [
        [f"{len(movie.axes)}", f"{movie.steps[-1]}", f"{float(np.linalg.norm(movie.consensus[-1])):.4f}"]
        for movie in (line, plane)
    ]
    table = Table("How near the consensus came to the minimiser 0.", ["dimensions", "steps", "distance"], rows)
    about = "Consensus-based optimisation as it goes: alpha 30, lambda 1, sigma 0.6, dt 0.02."
    return Example("Rastrigin, the movie", about, [table], [line, plane])


# FedCBO


def valley(center: Point) -> Callable[[Tensor], Tensor]:
    """sqrt(1 + |y|^2) - 1 + .1 mean(1 - cos 2 pi y), y the way from the centre: nearly |y|, with waves."""

    def loss(x: Tensor) -> Tensor:
        y = x - torch.as_tensor(center).to(x)
        return (1 + y.square().sum(-1)).sqrt() - 1 + 0.1 * (1 - torch.cos(2 * math.pi * y)).mean(-1)

    return loss


def from_normal(count: int, generator: torch.Generator) -> Tensor:
    """[count, 2]: a start around 0 with standard deviation 2."""
    return 2 * torch.randn(count, 2, generator=generator)


def clusters(
    centers: Sequence[Point], size: int, alpha: float, seed: int = 0, runs: int = 1, dt: float = 0.01
) -> ClusteredSystem:
    """FedCBO with a valley for each cluster, lambda (1, .1), sigma (.3, .05), and a start that knows none of them."""
    return ClusteredSystem(
        [valley(center) for center in centers],
        from_normal,
        sizes=[size] * len(centers),
        alpha=alpha,
        noise=0.3,
        gradient_drift=0.1,
        gradient_noise=0.05,
        dt=dt,
        seed=seed,
        runs=runs,
    )


_TWO = (torch.tensor([1.5, 1.5]), torch.tensor([-1.5, -1.5]))
_PREDICTED = Setting(2, 1.0, 0.3, 0.1, 0.05, lipschitz=1 + 0.05 * 4 * math.pi**2)


def fedcbo(seed: int) -> Example:
    """Two, three and five clusters that do not know each other find their own minimisers; V beside the prediction."""
    rows, curves = [], {}
    for alpha in (1.0, 5.0, 20.0, 50.0, 200.0):
        system = clusters(_TWO, 200, alpha, seed, runs=5)
        measured = decay(system, _TWO, 800)
        curves[f"alpha {alpha:g}"] = _thinned(measured)
        rows.append([f"{alpha:g}", f"{float(measured.rate().mean()):.2f}", f"{_own(system, _TWO):.0%}"])
    times, first = curves["alpha 200"][0], curves["alpha 200"][1][0]
    predicted = _PREDICTED.rate
    curves[f"predicted, rate {predicted:.2f}"] = (times, [first * math.exp(-predicted * time) for time in times])
    more = []
    for count in (2, 3, 5):
        angle = 2 * math.pi * torch.arange(count) / count
        centers = list(2.0 * torch.stack([angle.cos(), angle.sin()], dim=1))
        system = clusters(centers, 100, 50.0, seed, runs=5).run(800)
        more.append([str(count), f"{_own(system, centers):.0%}"])
    tables = [
        Table(
            f"Measured rate of V_1 + V_2, mean of 5 runs (predicted at least {predicted:.2f} for large alpha), and "
            "clusters whose mean ends within 0.1 of their own minimiser.",
            ["alpha", "rate", "found"],
            rows,
        ),
        Table("More clusters, on a circle of radius 2, alpha 50.", ["clusters", "found"], more),
    ]
    about = (
        "System (4) of fedcbo-jmlr.txt: L_k = sqrt(1 + |y|^2) - 1 + .1 mean(1 - cos 2 pi y) around (1.5, 1.5) and its "
        "opposite, lambda (1, .1), sigma (.3, .05), dt .01, T 8, start N(0, 4 I), 200 + 200 particles."
    )
    drawn = Curves("V by time and the exponential of (15).", "time", "V_1 + V_2", curves)
    return Example("Two clusters", about, tables, [drawn, _clustered_movie(seed)])


def _clustered_movie(seed: int) -> Movie:
    system, kept = clusters(_TWO, 100, 50.0, seed), []
    for step in range(0, 321, 8):
        before = system.x[0].numpy().copy()
        consensus = system.run(1).consensus[:, 0].numpy().copy()
        system.run(7)
        kept.append((step, before, consensus))
    axis = np.linspace(-5, 5, 90, dtype=np.float32)
    grid = torch.tensor(np.stack(np.meshgrid(axis, axis, indexing="xy"), axis=-1))
    lower = torch.minimum(valley(_TWO[0])(grid), valley(_TWO[1])(grid)).numpy()
    steps, positions, consensus = zip(*kept, strict=True)
    caption = "Two clusters of 100, alpha 50, over the lower of their losses."
    return Movie(caption, steps, positions, consensus, {"cluster 1": 100, "cluster 2": 100}, [axis, axis], lower)


def mean_field(seed: int) -> Example:
    """How far N particles are from infinitely many, by synchronous coupling."""
    sizes = [50, 100, 200, 400, 800, 1600]
    errors = mean_field_error(lambda n: clusters(_TWO, n, 5.0, seed, runs=16 if n < 5000 else 1), sizes, 20_000, 200)
    found = slope(sizes, errors)
    rows = [[str(size), f"{error:.2e}"] for size, error in zip(sizes, errors, strict=True)]
    table = Table(
        f"Slope of the logarithms {found:.2f}; the theorem's is -1.", ["particles per cluster", "error"], rows
    )
    line = [errors[0] * sizes[0] / size for size in sizes]
    curves = {"measured": (sizes, errors), "1/N": (sizes, line)}
    drawn = Curves("Mean squared distance from the mean-field copy.", "particles per cluster", "error", curves, True)
    about = (
        "The two clusters with alpha 5 up to T = 2: a particle beside a copy with its start and noise that follows "
        "the consensus of 20,000 + 20,000 particles; the worst time, mean of 16 runs (fedcbo-jmlr.txt, Theorem 4)."
    )
    return Example("The mean-field error", about, [table], [drawn])


# CB²O under attack

_SHARES = (0.0, 0.1, 0.3, 0.5, 0.7)
_SIZE = 200


def ring(x: Tensor) -> Tensor:
    """L = (|x| - 1)^2."""
    return x.square().sum(-1).sqrt().sub(1.0).square()


def upper(x: Tensor) -> Tensor:
    """G = |y|^2 / 4 + .05 sum(1 - cos 2 pi y) with y = x - (1, 0)."""
    y = x - torch.tensor([1.0, 0.0]).to(x)
    return torch.add(y.square().sum(-1) / 4, (1 - torch.cos(2 * math.pi * y)).sum(-1), alpha=0.05)


def _attacked(seed: int, share: float, beta: float, delta_q: float, alpha: float = 50.0, move: Move = fixed) -> float:
    """The share of 10 runs that find (1, 0)."""
    count = round(share * _SIZE)
    system = ClusteredSystem(
        [ring],
        ([-2.0, -2.0], [2.0, 2.0]),
        sizes=[_SIZE - count],
        upper=upper,
        beta=beta,
        delta_q=delta_q,
        alpha=alpha,
        noise=0.5,
        dt=0.05,
        seed=seed,
        runs=10,
        attackers=Attackers(torch.tensor([[-1.0, 0.0]]).expand(count, 2), move) if count else None,
    )
    return reached(system.run(400).positions().mean(1), torch.tensor([1.0, 0.0]))


def attackers(seed: int) -> Example:
    """Honest particles among others who sit where L is least and G is not, with and without delta_q."""
    betas, alphas = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8), (2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0)
    shares, more = [f"w_m {share:g}" for share in _SHARES], (0.05, 0.1, 0.3, 0.5, 0.7, 0.9)
    pictures = [
        Success(
            f"Runs that find the good minimiser, delta_q = {delta_q:g}.",
            [[_attacked(seed, share, beta, delta_q) for beta in betas] for share in _SHARES],
            shares,
            [f"beta {beta:g}" for beta in betas],
        )
        for delta_q in (0.0, 0.01)
    ]
    pictures.append(
        Success(
            "The same by alpha with beta = .2 and delta_q = .01: the least alpha that works grows with log(w_m / w_b).",
            [[_attacked(seed, share, 0.2, 0.01, alpha) for alpha in alphas] for share in more],
            [f"w_m {share:g}, log {math.log(share / (1 - share)):.1f}" for share in more],
            [f"alpha {alpha:g}" for alpha in alphas],
        )
    )
    moves: dict[str, Move] = {
        "fixed": fixed,
        "drifting back to (-1, 0) with noise": drifting(lambda x, time: torch.tensor([-1.0, 0.0]) - x, 0.1),
        "random in [-2, 2]^2": scattered(-2.0, 2.0),
        "mimicking: they minimise L": mimicking(),
    }
    rows = [
        [name, *(f"{_attacked(seed, 0.3, 0.2, delta_q, move=move):.0%}" for delta_q in (0.0, 0.01))]
        for name, move in moves.items()
    ]
    tables = [
        *(_as_table(picture) for picture in pictures),
        Table("Kinds of attackers, w_m = .3, beta = .2.", ["attackers", "delta_q 0", "delta_q .01"], rows),
        _conditions(),
    ]
    about = (
        "L = (|x| - 1)^2, G = |y|^2 / 4 + .05 sum(1 - cos 2 pi y), y = x - (1, 0); attackers at (-1, 0), where L = 0 "
        "and G = 1. 200 particles, alpha 50, lambda 1, sigma .5, dt .05, 400 steps, start in [-2, 2]^2, 10 runs a cell."
    )
    return Example("Two levels under attack", about, tables, pictures)


def _conditions() -> Table:
    """Theorem 2.2's numbers for this problem: |y| <= 2 sqrt G everywhere, and G <= (.25 + .1 pi^2) |y|^2."""
    steep = 0.25 + 0.1 * math.pi**2
    landscape = Landscape(
        H_L=1.0, h_L=2.0, R_LH=1.0, eta_L=1.0, nu_L=0.5, L_inf=0.25,
        H_G=steep, h_G=2.0, R_GH=10.0, eta_G=0.5, nu_G=0.5, R_G=0.5, G_inf=0.0625, K_G=0.25, k_G=2.0, R_GK=1.0,
    )  # fmt: skip
    setting = Setting(2, 1.0, 0.5, vartheta=0.5)

    def problem(malicious: float) -> Bilevel:
        energy = 0.5 * (8 / 3 + 1)  # half of E|x - (1, 0)|^2 for x uniform in [-2, 2]^2
        return Bilevel(setting, landscape, energy, lambda r: min(1.0, math.pi * r**2 / 16), 0.01, malicious, 1e-6)

    rows = []
    for share in (0.0, 0.3, 0.7):
        of, added = problem(share), problem(share).alpha_0 - problem(0.0).alpha_0
        beta = f"1e{of.log_beta_0 / math.log(10):.0f}"
        alpha = [f"{of.alpha_0:.2e}", f"{added:.2e}"]
        rows.append([f"{share:g}", f"{of.horizon:.1f}", f"{of.largest_delta_q:.1e}", beta, *alpha])
    caption = (
        "What Theorem 2.2 asks for (epsilon .01, vartheta .5, delta_q 1e-6): sufficient and far from needed; the maps "
        "above show what is needed."
    )
    return Table(caption, ["w_m", "T*", "delta_q up to", "beta_0", "alpha_0", "of it for attackers"], rows)


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "ackley-sphere": ackley_sphere,
    "rastrigin": rastrigin_movies,
    "fedcbo": fedcbo,
    "mean-field": mean_field,
    "attackers": attackers,
}


def _own(system: ClusteredSystem, centers: Sequence[Tensor]) -> float:
    """The share of clusters, over all runs, whose mean is at their own minimiser."""
    found = [reached(system.positions(k).mean(1), center) for k, center in enumerate(centers)]
    return sum(found) / len(found)


def _thinned(measured: Decay) -> tuple[list[float], list[float]]:
    """Every tenth value, mean over the runs."""
    return measured.times[::10].tolist(), measured.energy[::10].mean(1).tolist()


def _as_table(success: Success) -> Table:
    rows = [[name, *(f"{value:.0%}" for value in row)] for name, row in zip(success.rows, success.values, strict=True)]
    return Table(success.caption, ["", *success.columns], rows)
