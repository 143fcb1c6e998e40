"""Clients whose loss is a parabola, so that what methods do can be computed by hand."""

from collections.abc import Sequence

import torch
from torch import nn

from coterie.descent import Train
from coterie.federation import Federation
from coterie.model import Model

PLAIN = Train(epochs=1, batch_size=9, lr=0.1, momentum=0.0)  # a step is theta <- 0.8 theta + 0.2 goal
STEPS = PLAIN.model_copy(update={"steps": 1, "momentum": 0.5})


def parabolas(*goals: float, counts: Sequence[int] | None = None) -> Federation:
    """Client i minimises (theta - goal_i)^2, on so many examples that are all the same."""
    counts = counts or [1] * len(goals)
    train = [(torch.ones(n, 1), torch.full((n, 1), goal)) for goal, n in zip(goals, counts, strict=True)]
    return Federation.from_arrays(train, (torch.ones(1, 1), torch.zeros(1, 1)))


def point(at: float = 0.0) -> Model:
    """A model of the one number theta."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, at)
    return Model(module, "mse")
