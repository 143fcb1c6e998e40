"""Randomness as a function: every draw is a hash of (seed, purpose, round, client, step), never the next of a stream.

Results therefore do not depend on sharding, order, fleet, or on having been interrupted. The hash is SplitMix64's
finaliser (Steele, Lea, Flood 2014), chained over the parts of a key; a counter added to a key and finalised once more
gives the bits of one number. Everything is integer arithmetic on int64 tensors, the same on every device.
"""

import math
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _finalise_each(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def derive(seed: int, purpose: str, *parts: int) -> int:
    """One non-negative 63-bit number from a seed, a purpose and any integers: a seed for something else."""
    word = int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")
    key = _finalise((seed ^ word) & _MASK)
    for part in parts:
        key = _finalise((key + _GOLDEN * ((part & _MASK) + 1)) & _MASK)
    return key >> 1


def fold(key: int | Tensor, parts: int | Tensor) -> Tensor:
    """A key for each of `parts` (or of `key`): the chaining of `derive`, for many clients or steps at once."""
    if isinstance(parts, int):
        return _finalise_each(torch.as_tensor(key) + _signed(_GOLDEN * (parts + 1) & _MASK))
    return _finalise_each(key + (parts + 1) * _signed(_GOLDEN))


def bits(keys: Tensor, count: int) -> Tensor:
    """[..., count] int64: uniform 64-bit words, `count` for each key."""
    counter = torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    return _finalise_each(keys[..., None] + counter)


def uniform(keys: Tensor, count: int) -> Tensor:
    """[..., count] float32 in [0, 1), multiples of 2**-24."""
    return _shift(bits(keys, count), 40).to(torch.float32) * 2.0**-24


def normal(keys: Tensor, count: int) -> Tensor:
    """[..., count] float32 standard normals by Box and Muller: two from each 64-bit word.

    Key by key, because vectorised sines and logarithms may round the last elements of a tensor differently: so a
    client draws the same numbers whoever stands beside it.
    """
    drawn = torch.empty(keys.numel(), count, device=keys.device)
    for row, key in zip(drawn, keys.reshape(-1), strict=True):
        words = bits(key, (count + 1) // 2)
        radius = torch.sqrt(-2.0 * torch.log((_shift(words, 32).to(torch.float32) + 0.5) * 2.0**-32))
        angle = (words & 0xFFFFFFFF).to(torch.float32) * (2.0 * math.pi * 2.0**-32)
        row[:] = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]
    return drawn.reshape(*keys.shape, count)


@dataclass(frozen=True)
class Moment:
    """Where in a run a draw is made."""

    seed: int
    round: int
    exchange: int = 0

    def key(self, purpose: str, *parts: int) -> int:
        """The key of a draw that is the same for all clients."""
        return derive(self.seed, purpose, self.round, self.exchange, *parts)
