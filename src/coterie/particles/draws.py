"""Normals and uniforms as a function of (seed, purpose, run, step, place), fast enough to be a small part of a step.

A key for each run and a counter give 64 bits by SplitMix64's finaliser, as in `randomness.py`; Box and Muller's
transform makes two normals of them. All is done in place, in blocks that fit the cache, and by NumPy, whose logarithm,
sine and cosine are two to three times faster than torch's. A normal has 24 bits, in float64 ensembles too, and is at
most 6.7.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.randomness import derive

TILE = (
    1 << 18
)  # elements worked on at once: below it the calls cost more than the arithmetic, above it the cache is left

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Words = NDArray[np.uint64]
Floats = NDArray[np.float32]


class Draws:
    """What one purpose of one seed draws; every run and step has numbers of its own, whoever is computed beside it."""

    def __init__(self, seed: int, purpose: str, runs: Iterable[int], per_step: int) -> None:
        self.keys: Words = np.array([derive(seed, purpose, run) for run in runs], dtype=np.uint64)
        self.per_step = per_step  # no step and run asks for more numbers
        self._room: Words = np.empty((3, 0), dtype=np.uint64)
        self._counter: Words = np.empty(0, dtype=np.uint64)

    def keep(self, runs: Tensor) -> None:
        """Go on with some of the runs [R] bool."""
        self.keys = self.keys[runs.cpu().numpy()]

    def normal(self, out: Tensor, runs: slice, step: int, first: int = 0) -> Tensor:
        """Fill [r, ...] with standard normals: of these runs, at this step, from the number `first` on.

        Other devices than the CPU draw by torch's own generator: other numbers, as much a function of the same.
        """
        if out.device.type != "cpu":
            return self.by_torch(out, runs, step, first)
        if out.dtype != torch.float32:
            return out.copy_(self.normal(torch.empty(out.shape), runs, step, first))
        flat = out.view(len(out), -1).numpy()
        rows = max(1, TILE // flat.shape[1])
        for row in range(0, len(flat), rows):  # a row is at most a tile
            self._box_muller(flat[row : row + rows], self._starts(runs, step, first)[row : row + rows])
        return out

    def ahead(self, out: Tensor, step: int) -> Tensor:
        """Fill [steps, R, ...] with what `normal` gives for all runs at each of the steps from `step` on."""
        steps = np.arange(step, step + out.shape[0], dtype=np.uint64) * np.uint64(self.per_step * _GOLDEN & _MASK)
        starts = (self.keys + steps[:, None]).ravel()
        self._box_muller(out.view(starts.size, -1).numpy(), starts)
        return out

    def uniform(self, out: Tensor, runs: slice, step: int, first: int = 0) -> Tensor:
        """Fill [r, ...] with multiples of 2**-24 in [0, 1), from the same bits as `normal`."""
        flat = out.view(len(out), -1)
        for at in range(0, flat.shape[1], TILE):
            part = flat[:, at : at + TILE]
            for row, start in enumerate(self._starts(runs, step, first + at)):
                words = self._words(start[None], part.shape[1])[0] >> np.uint64(40)
                part[row].copy_(torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-24)))
        return out

    def by_torch(self, out: Tensor, runs: slice, step: int, first: int) -> Tensor:
        """The same by a generator of the device, seeded anew for each run and step."""
        generator = torch.Generator(out.device)
        for row, key in zip(out, self.keys[runs].tolist(), strict=True):
            row.normal_(generator=generator.manual_seed(derive(key, "device", step, first)))
        return out

    def _starts(self, runs: slice, step: int, first: int) -> Words:
        """[r]: the state before the first word of each run."""
        return self.keys[runs] + np.uint64((step * self.per_step + first) * _GOLDEN & _MASK)

    def _words(self, starts: Words, count: int) -> Words:
        """[g, count]: `count` 64-bit words for each start, in memory that the next call overwrites."""
        size = len(starts) * count
        if self._room.shape[1] < size:
            self._room = np.empty((3, size), dtype=np.uint64)
        if len(self._counter) < count:
            self._counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        words: Words
        words, shifted = (room[:size].reshape(len(starts), count) for room in self._room[:2])
        np.add(starts[:, None], self._counter[:count], out=words)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
            np.right_shift(words, np.uint64(shift), out=shifted)
            np.bitwise_xor(words, shifted, out=words)
            if factor is not None:
                np.multiply(words, factor, out=words)
        return words

    def _box_muller(self, out: Floats, starts: Words) -> None:
        """Rows of normals: first all r cos a, then all r sin a."""
        half = (out.shape[1] + 1) // 2
        rest = out.shape[1] - half
        words = self._words(starts, half).view(np.int32).reshape(len(out), half, 2)
        radius, angle = self._room[2, : words.size // 2].view(np.float32).reshape(2, len(out), half)
        np.copyto(radius, words[..., 1])
        np.abs(radius, out=radius)  # of 31 bits, fine near 0, where the large normals come from
        radius += np.float32(0.5)
        radius *= np.float32(2.0**-31)
        np.log(radius, out=radius)
        radius *= np.float32(-2.0)
        np.sqrt(radius, out=radius)
        np.copyto(angle, words[..., 0])
        angle *= np.float32(math.pi * 2.0**-31)
        spare = self._room[1].view(np.float32)[: angle.size].reshape(angle.shape)
        cosine = np.cos(angle, out=spare)
        np.multiply(cosine, radius, out=out[:, :half])
        sine = np.sin(angle, out=angle)
        np.multiply(sine[:, :rest], radius[:, :rest], out=out[:, half:])
