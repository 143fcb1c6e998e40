"""Consensus-based optimisation beside CBXpy: Rastrigin, d = 20, CPU time on one thread, contestants taking turns.

    python benchmarks/particles.py

N particles in so many runs at once; isotropic noise, CBXpy with sched=None. Its NumPy version computes in float64 and
uses its own Rastrigin; its torch version and ours compute in float32. Ours uses the Rastrigin of our suite and, told
apart, the plain torch function that CBXpy's torch version has. 1000 steps where a turn takes a second or less, fewer
elsewhere, for every step does the same work. Memory is measured in a process of its own.
"""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cbx.dynamics.cbo import CBO
from cbx.objectives import Rastrigin
from cbx.utils.torch_utils import to_torch_dynamic

import coterie
from coterie.particles.objectives import rastrigin
from measure import ratio, report, take_turns

DIMENSION = 20
CASES = (  # particles, runs, steps, at least so many times its NumPy and its torch version
    (100, 1, 1000, 3.0, 3.0),
    (100, 100, 100, 5.0, 1.5),
    (10_000, 1, 100, 6.0, 1.8),
    (10_000, 100, 4, 6.0, 3.0),
)
SETTINGS = {"alpha": 30.0, "sigma": 0.3, "lamda": 1.0, "dt": 0.01, "noise": "isotropic"}


def plain(x: torch.Tensor) -> torch.Tensor:
    """Rastrigin as one writes it."""
    return (x * x - 10 * torch.cos(2 * torch.pi * x) + 10).sum(-1)


def theirs(dynamic: Any, function: Any, x: Any, steps: int) -> Callable[[], object]:
    """CBXpy from the same positions."""

    def work() -> None:
        made = dynamic(function, f_dim="3D", x=x, max_it=steps, verbosity=0, check_f_dims=False, **SETTINGS)
        made.optimize(sched=None)

    return work


def ours(function: Any, x: torch.Tensor, steps: int) -> Callable[[], object]:
    """The same dynamics from the same positions."""
    how = {"alpha": 30.0, "noise": 0.3, "drift": 1.0, "dt": 0.01}
    return lambda: coterie.minimise(function, x, runs=len(x), steps=steps, **how)


def compare(particles: int, runs: int, steps: int, numpy_goal: float, torch_goal: float) -> None:
    """One row of the table."""
    x = np.random.default_rng(0).uniform(-3, 3, (runs, particles, DIMENSION))
    single = torch.tensor(x, dtype=torch.float32)
    seconds = take_turns(
        {
            "ours": ours(rastrigin, single, steps),
            "ours, plain": ours(plain, single, steps),
            "its numpy": theirs(CBO, Rastrigin(), x, steps),
            "its torch": theirs(to_torch_dynamic(CBO), plain, single, steps),
        },
        repeats=3 if x.size > 1e6 else 5,
    )
    title = f"N = {particles}, {runs} runs, {steps} steps"
    report(f"{title}: times its NumPy version", ratio(seconds["its numpy"], seconds["ours"]), f">= {numpy_goal:g}")
    report(f"{title}: times its torch version", ratio(seconds["its torch"], seconds["ours"]), f">= {torch_goal:g}")
    report("  the same with one torch function for both", ratio(seconds["its torch"], seconds["ours, plain"]))
    report("  ns for a coordinate and step", 1e9 * min(seconds["ours"]) / steps / x.size)


def memory() -> None:
    """Print what a large search adds to this process, in arrays of the ensemble's size."""
    coterie.minimise(rastrigin, (-3.0, 3.0), particles=20_000, dimension=DIMENSION, steps=2)
    before = _peak()
    coterie.minimise(rastrigin, (-3.0, 3.0), particles=10_000, runs=100, dimension=DIMENSION, steps=3)
    arrays = (_peak() - before) / (1e6 * DIMENSION * 4)
    report("N = 10000, 100 runs: memory, in arrays of the ensemble's size", arrays, "<= 4")


def _peak() -> float:
    """The most memory this process has held, in bytes; Linux tells it in a file, and forgets the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024.0 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        memory()
    else:
        for case in CASES:
            compare(*case)
        subprocess.run([sys.executable, __file__, "memory"], check=True)
