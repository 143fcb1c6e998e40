"""The data of a federation: what each client trains on, judges peers with and is tested on.

Shapes, here and everywhere: N clients of the federation, n examples of a client (padded to the largest client).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.errors import DataError


@dataclass(frozen=True)
class Examples:
    """Examples of several clients side by side; rows beyond a client's count are padding and never used."""

    x: Tensor  # [N, n, ...] float32
    y: Tensor  # [N, n] int64 labels, or [N, n, ...] float32 targets of a regression
    count: Tensor  # [N] int64, at least 1

    @staticmethod
    def of(clients: Sequence[tuple[Tensor, Tensor]]) -> "Examples":
        """Stack clients of unequal sizes, padding with zeros."""
        count = torch.tensor([len(x) for x, _ in clients])
        longest = int(count.max())
        (x, y) = clients[0]
        stacked_x = x.new_zeros(len(clients), longest, *x.shape[1:])
        stacked_y = y.new_zeros(len(clients), longest, *y.shape[1:])
        for row, (x, y) in enumerate(clients):
            stacked_x[row, : len(x)] = x
            stacked_y[row, : len(y)] = y
        return Examples(stacked_x, stacked_y, count)

    def rows(self, chosen: Tensor) -> "Examples":
        """The same for some of the clients."""
        return Examples(self.x[chosen], self.y[chosen], self.count[chosen])


@dataclass(frozen=True)
class Federation:
    """Everything a simulation needs to know about its clients. `keys` are their identities: every random draw of a
    client depends on its key and not on its place, so that renumbering the clients permutes the results."""

    name: str
    train: Examples
    validation: Examples | None  # kept for judging peers; without it peers are judged on the training examples
    tests: tuple[tuple[Tensor, Tensor], ...]  # (x [n, ...], y [n, ...]): test sets, shared by clients of one distribution
    test_of: Tensor  # [N] int64: which of the tests is this client's
    clusters: Tensor | None  # [N] int64: true clusters, where the scenario knows them
    keys: Tensor  # [N] int64
    num_classes: int | None  # None for a regression
    source: str = ""  # which data set exactly, for reports
