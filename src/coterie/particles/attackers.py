"""Malicious particles: they take part in every consensus and move as they like, fedcb2o.txt (1.7b)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.consensus import gibbs
from coterie.particles.draws import Draws


@dataclass(frozen=True)
class Seen:
    """What attackers know when they move."""

    step: int
    time: float
    dt: float
    losses: Tensor  # [K, R, n]: of each cluster, at their own positions
    draws: Draws

    def normal(self, like: Tensor) -> Tensor:
        """Standard normals of this shape [R, n, d], the same for the same run and step."""
        return self.draws.normal(torch.empty_like(like), slice(None), self.step)

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of this shape [R, n, d]."""
        return self.draws.uniform(torch.empty_like(like), slice(None), self.step)


Move = Callable[[Tensor, Seen], Tensor]  # [R, n, d] -> [R, n, d]


@dataclass(frozen=True)
class Attackers:
    """Where malicious particles begin ([n, d], or anything `start` may be, with `count`) and how they move."""

    start: Any
    move: Move
    count: int | None = None


def fixed(x: Tensor, seen: Seen) -> Tensor:
    """They stay where they are."""
    return x


def drifting(velocity: Callable[[Tensor, float], Tensor], noise: float = 0.0) -> Move:
    """dx = velocity(x, t) dt + noise dB for any function of the positions and the time."""

    def move(x: Tensor, seen: Seen) -> Tensor:
        moved = x + seen.dt * velocity(x, seen.time)
        return moved.add_(seen.normal(x), alpha=noise * seen.dt**0.5) if noise else moved

    return move


def scattered(lower: float, upper: float) -> Move:
    """Somewhere else at random in a box at every step."""
    return lambda x, seen: lower + (upper - lower) * seen.uniform(x)


def mimicking(alpha: float = 50.0, drift: float = 1.0, noise: float = 0.5, cluster: int = 0) -> Move:
    """They minimise L as honest particles would, by consensus among themselves, and care not for G."""

    def move(x: Tensor, seen: Seen) -> Tensor:
        away = x - torch.bmm(gibbs(seen.losses[cluster], alpha)[:, None], x)
        spread = away.norm(dim=-1, keepdim=True) * seen.normal(x)
        return torch.add(x - drift * seen.dt * away, spread, alpha=noise * seen.dt**0.5)

    return move
