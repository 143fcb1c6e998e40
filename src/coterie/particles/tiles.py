"""An ensemble cut into tiles that fit the cache, each with the clusters' parts of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from coterie.particles.draws import TILE


@dataclass(frozen=True)
class Piece:
    """Particles of one cluster in one tile, all of it views of the system's memory."""

    cluster: int
    runs: slice
    part: slice
    x: Tensor  # [r, n, d]
    away: Tensor  # [r, n, d], room for x - m
    consensus: Tensor  # [r, 1, d]
    noise: list[Tensor]  # [r, n, d] for each of the steps that are drawn at once


@dataclass(frozen=True)
class Tile:
    """Some of the particles of some runs, few enough for the cache."""

    runs: slice
    first: int
    noise: Tensor  # [A, r, n, d], A the number of steps that are drawn at once
    pieces: list[Piece]


def tiles(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Blocks (runs, particles) of about TILE numbers: several whole runs, or parts of one, cut alike in every run."""
    runs, count, dimension = shape
    if count * dimension > TILE:
        rows = max(1, TILE // dimension)
        for run in range(runs):
            for first in range(0, count, rows):
                yield slice(run, run + 1), slice(first, min(first + rows, count))
    else:
        several = TILE // (count * dimension)
        for run in range(0, runs, several):
            yield slice(run, min(run + several, runs)), slice(0, count)
