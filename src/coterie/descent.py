"""The one local loop: what a client does with its own examples between two exchanges.

Every method trains through `descend`; momentum, AdamW, weight decay and the pull toward another model are its options.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Examples
from coterie.kernels import Batch, Kernel
from coterie.options import Options
from coterie.randomness import bits, fold

ADAM_EPSILON = 1e-8


class Train(Options):
    """How a client trains on its own examples. The optimiser starts anew in each round, as in the papers' programs, but
    with `steps` it goes on where it was: a round is then a part of one training."""

    epochs: int = Field(5, ge=1, le=10_000)
    """passes over the client's examples in each round"""
    steps: int | None = Field(None, ge=1, le=10**6)
    """mini-batch steps in each round instead of epochs, each on a batch drawn anew; for methods that exchange often"""
    batch_size: int = Field(50, ge=1, le=10**9)
    """examples of a step; a last, smaller batch is kept"""
    optimiser: Literal["sgd", "adamw"] = "sgd"
    """sgd, with momentum if that is not 0, or adamw"""
    lr: float = Field(0.1, gt=0, le=1e6)
    """step size"""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """by how much the step size is multiplied after each round"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """heavy-ball momentum; with adamw beta_1"""
    second_momentum: float = Field(0.999, ge=0, lt=1)
    """beta_2 of adamw"""
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """pull of the parameters to zero: added to the gradient, or with adamw apart from it"""


@dataclass(frozen=True)
class Pull:
    """A spring between a model and another: each step also moves it by -lr strength (theta - toward), parameters only
    and beside the momentum."""

    toward: Tensor  # [C, P]
    strength: Tensor  # [C, 1]

    def rows(self, chosen: slice | Tensor) -> "Pull":
        """The same for some of the clients."""
        return Pull(self.toward[chosen], self.strength[chosen])


Carried = dict[str, Tensor]  # what an optimiser knows of the steps before, [C, ...] each


def fresh(options: Train, theta: Tensor) -> Carried:
    """What an optimiser knows of models theta [C, P] that have made no step."""
    if options.optimiser == "adamw":
        moments = {name: torch.zeros_like(theta) for name in ("first", "second")}
        return {**moments, "steps": theta.new_zeros(len(theta), 1)}
    return {"velocity": torch.zeros_like(theta)}


class Batches:
    """The mini-batches of some clients: each shuffles its own examples in every epoch, by a function of its key.

    Clients with more steps stand first (`order`), so those still training are always the first so many. A batch is
    valid until the next is asked for: they all live in the same memory, which stays in the cache.
    """

    def __init__(self, examples: Examples, rows: Tensor, shuffle: Tensor, dropout: Tensor, options: Train) -> None:
        """rows [C]: where the clients stand in `examples`; shuffle [C] and dropout [C]: the keys of their draws."""
        self._x, self._y = examples.x.flatten(0, 1), examples.y.flatten(0, 1)  # [N n, ...], views
        self._size = options.batch_size
        counts = examples.count[rows]
        steps = -(-counts // self._size)  # in one epoch
        total = torch.full_like(steps, options.steps) if options.steps else options.epochs * steps
        self.order = torch.argsort(total, descending=True, stable=True)  # [C]
        self.back = torch.argsort(self.order)
        self.sorted = bool((total[1:] > total[:-1]).any())  # the order is not the clients' own
        self._steps: list[int] = steps[self.order].tolist()
        self._total: list[int] = total[self.order].tolist()  # descending
        self._counts: list[int] = counts[self.order].tolist()
        self._dropout = dropout[self.order]
        self._places = self._shuffles(shuffle[self.order])  # [C, epochs, longest] among a client's examples
        self._first = rows[self.order, None] * examples.x.shape[1]  # [C, 1] its first example in the flat data
        room = len(self._steps) * min(self._size, max(self._counts))
        self._room_x, self._room_y = (
            self._x.new_empty(room, *self._x.shape[1:]),
            self._y.new_empty(room, *self._y.shape[1:]),
        )

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._total[0]):
            yield self._batch(step, sum(total > step for total in self._total))

    def _shuffles(self, keys: Tensor) -> Tensor:
        """[C, epochs, longest]: each client's examples in random order for every epoch, padding behind them."""
        epochs = max(-(-total // steps) for total, steps in zip(self._total, self._steps, strict=True))
        scores = bits(fold(keys[:, None], torch.arange(epochs, device=keys.device)), max(self._counts))
        for client, count in enumerate(self._counts):
            scores[client, :, count:] = torch.iinfo(torch.int64).max
        return scores.argsort(dim=-1, stable=True)

    def _batch(self, step: int, active: int) -> Batch:
        begins = [step % steps * self._size for steps in self._steps[:active]]
        length = [min(self._size, count - begin) for count, begin in zip(self._counts, begins, strict=False)]
        longest = max(length)
        if len(set(self._steps[:active])) == 1:
            places = self._places[:active, step // self._steps[0], begins[0] : begins[0] + longest]
        else:
            places = self._gathered(step, begins, longest)
        chosen = (places + self._first[:active]).view(-1)
        x, y = self._room_x[: len(chosen)], self._room_y[: len(chosen)]
        torch.index_select(self._x, 0, chosen, out=x)
        torch.index_select(self._y, 0, chosen, out=y)
        shape = (active, longest)
        x, y = x.view(*shape, *x.shape[1:]), y.view(*shape, *y.shape[1:])
        return Batch(x, y, length, min(length) == longest, places, self._dropout[:active], step)

    def _gathered(self, step: int, begins: list[int], longest: int) -> Tensor:
        """The places of a batch of clients that stand in different epochs; beyond a client's last, any of its own."""
        device = self._places.device
        epochs = torch.tensor([step // steps for steps in self._steps[: len(begins)]], device=device)
        within = torch.tensor(begins, device=device)[:, None] + torch.arange(longest, device=device)
        own = self._places[torch.arange(len(begins), device=device), epochs]  # [C, longest of all]
        return own.gather(1, within.clamp(max=own.shape[1] - 1))


def descend(
    kernel: Kernel,
    batches: Batches,
    start: Tensor,
    theta: Tensor,
    options: Train,
    lr: float,
    pull: Pull | None = None,
    carried: Carried | None = None,
) -> None:
    """From `start` [C, P] into `theta` [C, P], one step for each batch.

    sgd: v <- momentum v + gradient, theta <- theta - lr v. With weight decay the gradient has that of the decay added;
    with a pull theta moves toward another model as well. The optimiser goes on from `carried`, which is changed in
    place; without it, it begins anew.
    """
    torch.index_select(start, 0, batches.order, out=theta)
    if options.optimiser == "sgd" and not options.momentum and not options.weight_decay and pull is None:
        _straight(kernel, batches, theta, lr)
    else:
        ordered = None if pull is None else pull.rows(batches.order)
        _by_rule(kernel, batches, theta, options, lr, ordered, carried or fresh(options, theta))
    if batches.sorted:
        theta.copy_(theta[batches.back])


def _straight(kernel: Kernel, batches: Batches, theta: Tensor, lr: float) -> None:
    """theta <- theta - lr gradient, with no gradient ever stored."""
    bound = 0
    for batch in batches:
        if bound != len(batch.length):  # clients that have finished fall off the end
            bound = len(batch.length)
            accumulate = kernel.bind(theta[:bound], into=theta[:bound])
        accumulate(batch, 1.0, -lr)


def _by_rule(
    kernel: Kernel,
    batches: Batches,
    theta: Tensor,
    options: Train,
    lr: float,
    pull: Pull | None,
    carried: Carried,
) -> None:
    rule = _AdamW(options, lr, carried) if options.optimiser == "adamw" else None
    speed = carried["velocity"] if rule is None else torch.zeros_like(theta)
    bound = 0
    for batch in batches:
        if bound != len(batch.length):
            bound = len(batch.length)
            accumulate = kernel.bind(theta[:bound], into=speed[:bound])
            moved = slice(kernel.layout.num_parameters)
            parameters, change = theta[:bound, moved], speed[:bound, moved]
        accumulate(batch, options.momentum if rule is None else 0.0, 1.0)
        if options.weight_decay and rule is None:
            change.add_(parameters, alpha=options.weight_decay)
        if pull is not None:  # before the step, so that both are of the same theta
            parameters.lerp_(pull.toward[:bound, moved], lr * pull.strength[:bound])
        if rule is not None:
            rule.step(parameters, change)
        else:
            parameters.add_(change, alpha=-lr)


def follow(parameters: Tensor, gradient: Tensor, options: Train, lr: float, carried: Carried) -> None:
    """One step of the optimiser, in place, along a gradient that is given; both [C, parameters]."""
    if options.optimiser == "adamw":
        _AdamW(options, lr, carried).step(parameters, gradient)
        return
    velocity = carried["velocity"][:, : parameters.shape[1]]
    velocity.mul_(options.momentum).add_(gradient).add_(parameters, alpha=options.weight_decay)
    parameters.add_(velocity, alpha=-lr)


class _AdamW:
    """Loshchilov and Hutter 2019: moments of the gradient, corrected for their beginning at zero; decay apart."""

    def __init__(self, options: Train, lr: float, carried: Carried) -> None:
        self._options, self._lr = options, lr
        self._first, self._second, self._steps = (carried[name] for name in ("first", "second", "steps"))

    def step(self, parameters: Tensor, gradient: Tensor) -> None:
        beta_1, beta_2, lr = self._options.momentum, self._options.second_momentum, self._lr
        count, width = parameters.shape
        steps = self._steps[:count].add_(1.0)
        first = self._first[:count, :width].lerp_(gradient, 1.0 - beta_1)
        second = self._second[:count, :width].mul_(beta_2).addcmul_(gradient, gradient, value=1.0 - beta_2)
        scale = (second / (1.0 - beta_2**steps)).sqrt_().add_(ADAM_EPSILON)
        parameters.mul_(1.0 - lr * self._options.weight_decay)
        parameters.sub_(first.div(scale).mul_(lr / (1.0 - beta_1**steps)))
