"""Side-by-side measurement: contestants take turns in one process, and ratios are taken within a turn."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

torch.set_num_threads(1)


def take_turns(
    contestants: Mapping[str, Callable[[], object]], repeats: int = 7, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each contestant in each turn, after one turn that is not counted. CPU time unless said otherwise."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, work in contestants.items():
            began = clock()
            work()
            if turn:
                seconds[name].append(clock() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over turns of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def matrix_products(
    gigaflops: float = 20.0, size: int = 1024, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    """Square matrix products of so many GFLOP: the machine's peak as one more contestant."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    times = max(1, round(gigaflops * 1e9 / (2 * size**3)))

    def work() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    work.flop = times * 2 * size**3  # type: ignore[attr-defined]
    return work


def report(name: str, value: float, wanted: str = "") -> None:
    """One line of a benchmark's table."""
    print(f"{name:<72} {value:9.3g}" + (f"   wanted: {wanted}" if wanted else ""), flush=True)
