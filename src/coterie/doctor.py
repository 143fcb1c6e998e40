"""What a machine offers to Coterie."""

import platform
import time
from collections.abc import Iterator
from importlib.metadata import version

import torch

from coterie.data import SOURCES, available, data_folder
from coterie.fleets.simulated import available_cores


def examine() -> Iterator[tuple[str, str]]:
    """What was looked at, and what was found."""
    yield "coterie", version("coterie")
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, {'CUDA' if torch.cuda.is_available() else 'no CUDA device'}"
    yield "cores", str(available_cores())
    single, half = (matrix_peak(dtype) for dtype in (torch.float32, torch.bfloat16))
    yield "matrix products", f"{single:.0f} GFLOP/s a core in float32, {half:.0f} in bfloat16"
    advice = 'precision = "bf16" should speed up evaluation' if half > 1.5 * single else "bf16 would not help here"
    yield "precision", advice
    yield "data folder", str(data_folder())
    found = [name for name in SOURCES if available(name)]
    yield "data found", ", ".join(found)
    if missing := [name for name in SOURCES if name not in found]:
        yield "data missing", f"{', '.join(missing)} (coterie data fetch NAME)"


def matrix_peak(dtype: torch.dtype = torch.float32, size: int = 1024, seconds: float = 0.3) -> float:
    """GFLOP/s of square matrix products on one thread: what nothing here can exceed. By CPU time, the best of many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best, until = float("inf"), time.process_time() + seconds
    while time.process_time() < until:
        began = time.process_time()
        left @ right
        best = min(best, time.process_time() - began)
    torch.set_num_threads(threads)
    return 2e-9 * size**3 / best
