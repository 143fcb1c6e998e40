"""What clients do with their own data: train, judge models, draw noise; and the peers they downloaded.

Everything has a leading axis C: a block of clients in a simulation, one client on a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import NOBODY
from coterie.federation import Examples, Federation
from coterie.kernels import Batch, Kernel
from coterie.options import Options
from coterie.randomness import Moment, bits, fold, normal, uniform

UNMEASURED = -1.0  # in place of a share that is of nothing: a NaN would pass no fleet


class Train(Options):
    """How a client trains on its own examples. The optimiser starts anew in each call, as in the papers' programs."""

    epochs: int = Field(5, ge=1, le=10_000)
    """passes over the client's examples in each round"""
    batch_size: int = Field(50, ge=1, le=10**9)
    """examples of a step; a last, smaller batch is kept"""
    lr: float = Field(0.1, gt=0, le=1e6)
    """step size"""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """by how much the step size is multiplied after each round"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """heavy-ball momentum"""
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """pull of the parameters to zero, added to the gradient"""


@dataclass(frozen=True)
class Score:
    """How models do on their client's test data."""

    loss: Tensor  # [C] mean loss
    accuracy: Tensor  # [C] share of right answers; zeros for a regression


@dataclass(frozen=True)
class ClassLosses:
    """How models do on each class of the examples their client judges by; a regression has one class."""

    each: Tensor  # [C, M, K] mean losses; 0 for a class of which the client has no example
    share: Tensor  # [C, K] the classes' shares of its examples

    @property
    def average(self) -> Tensor:
        """[C, M]: over all examples; infinite where a class has no finite loss."""
        return torch.einsum("cmk,ck->cm", self.each, self.share).nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class Clients:
    """Some clients of a federation at one moment of a run."""

    ids: Tensor  # [C] int64, their numbers in the federation
    rows: Tensor  # [C] int64, where their data lie in `data`
    data: Federation
    population: Tensor  # [N] int64: the keys of all clients, by id
    kernel: Kernel
    options: Train
    moment: Moment

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_parameters(self) -> int:
        """How many of a model's P numbers are parameters; batch statistics follow them."""
        return self.kernel.layout.num_parameters

    @property
    def examples(self) -> Tensor:
        """[C] how many examples each trains on."""
        return self.data.train.count[self.rows]

    @property
    def judging(self) -> Examples:
        """What clients judge models by: their validation examples, or the training examples where there are none."""
        return self.data.validation or self.data.train

    def keys(self, purpose: str) -> Tensor:
        """[C] one key per client for draws of this purpose at this moment."""
        return fold(self.moment.key(purpose), self.population[self.ids])

    def train(self, theta: Tensor) -> Tensor:
        """[C, P] -> [C, P]: local training, in blocks that fit the cache."""
        trained = torch.empty(theta.shape, device=theta.device)
        for begin in range(0, len(self), self.kernel.cache_block):
            block = slice(begin, begin + self.kernel.cache_block)
            self._part(block)._train(theta[block], trained[block])
        return trained

    def gradient(self, theta: Tensor) -> Tensor:
        """[C, P]: the gradient of the mean loss over all of a client's training examples; zero for buffers."""
        gradient = torch.zeros_like(theta)
        whole = self.options.model_copy(update={"epochs": 1, "batch_size": self.data.train.x.shape[1]})
        for begin in range(0, len(self), self.kernel.cache_block):
            block = slice(begin, begin + self.kernel.cache_block)
            batches = Batches(self._part(block), whole, self.data.train, self.rows[block])
            start = theta[block][batches.order].clone()  # the forward pass may move batch statistics
            into = torch.zeros_like(start)
            for batch in batches:
                self.kernel.bind(start, into)(batch, 0.0, 1.0)
            gradient[block] = into[batches.back]
        return gradient

    def loss(self, theta: Tensor) -> Tensor:
        """[C]: the mean loss of each client's model on the examples it judges by."""
        return self.losses(self.kernel.evaluation_copy(theta), self._own_rows)[:, 0]

    def losses(self, models: Tensor, rows: Tensor) -> Tensor:
        """[C, M]: for each client the mean losses of the models in its rows [C, M] of `models`."""
        return torch.stack([losses.mean(1) for losses, _ in self._judged(models, rows)])

    def class_loss(self, theta: Tensor) -> ClassLosses:
        """Each client's model by class, M = 1."""
        return self.class_losses(self.kernel.evaluation_copy(theta), self._own_rows)

    def class_losses(self, models: Tensor, rows: Tensor) -> ClassLosses:
        """`losses` by class."""
        each, share = [], []
        for losses, y in self._judged(models, rows):
            member = F.one_hot(y, self.data.num_classes).to(losses) if self.data.num_classes else y.new_ones(len(y), 1)
            count = member.sum(0)
            each.append(losses @ member / count.clamp(min=1))
            share.append(count / len(y))
        return ClassLosses(torch.stack(each), torch.stack(share))

    def entropy(self, theta: Tensor) -> Tensor:
        """[C]: the mean entropy of each client's own model on the examples it judges by."""
        return self.entropies(self.kernel.evaluation_copy(theta), self._own_rows)[:, 0]

    def entropies(self, models: Tensor, rows: Tensor) -> Tensor:
        """[C, M]: the mean entropy, in nats, of what these models predict for the examples a client judges by."""
        entropies = torch.empty(rows.shape, device=models.device)
        for client, data_row in enumerate(self.rows.tolist()):
            x = self.judging.x[data_row, : self.judging.count[data_row]].to(models.dtype)
            for place, row in enumerate(rows[client].tolist()):
                log_chance = self.kernel.outputs(models[row], x).log_softmax(1)
                entropies[client, place] = -(log_chance.exp() * log_chance).sum(1).mean()
        return entropies

    def score(self, theta: Tensor) -> Score:
        """Test each client's model on its test data; clients with one model and one test set are computed once."""
        models = self.kernel.evaluation_copy(theta)
        tests = self.data.test_of[self.rows].tolist()
        found: list[tuple[float, float]] = []
        for client, test in enumerate(tests):
            if client and test == tests[client - 1] and torch.equal(models[client], models[client - 1]):
                found.append(found[-1])
            else:
                found.append(self._test(models[client], *self.data.tests[test]))
        loss, accuracy = torch.tensor(found, device=theta.device).T
        return Score(loss, accuracy)

    def targeted(self, theta: Tensor) -> dict[str, Tensor]:
        """[C] each, on the test examples an attack aims at: the share called what they are and what the attacker wants;
        UNMEASURED for clients whose distribution has no such examples."""
        models, found = self.kernel.evaluation_copy(theta), []
        for client, test in enumerate(self.data.test_of[self.rows].tolist()):
            aim = self.data.targeted[test]
            if not len(aim.x):
                found.append([UNMEASURED, UNMEASURED])
                continue
            answers = self.kernel.outputs(models[client], aim.x.to(models.dtype)).argmax(1)
            found.append([(answers == wanted).float().mean().item() for wanted in (aim.y, aim.label)])
        right, wanted = torch.tensor(found, device=theta.device).T
        return {"source_accuracy": right, "success_rate": wanted}

    def uniform(self, purpose: str, count: int) -> Tensor:
        """[C, count] uniform in [0, 1), a function of the client and the moment."""
        return uniform(self.keys(purpose), count)

    def normal(self, purpose: str, count: int) -> Tensor:
        """[C, count] standard normals, a function of the client and the moment."""
        return normal(self.keys(purpose), count)

    @property
    def _own_rows(self) -> Tensor:
        return torch.arange(len(self), device=self.ids.device)[:, None]

    def _judged(self, models: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each client the losses [M, n] of the models in its rows on the examples it judges by, and their y [n]."""
        for client, data_row in enumerate(self.rows.tolist()):
            count = self.judging.count[data_row]
            x, y = self.judging.x[data_row, :count].to(models.dtype), self.judging.y[data_row, :count]
            yield self.kernel.losses(models, rows[client], x, y), y

    def _test(self, vector: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        outputs = self.kernel.outputs(vector, x.to(vector.dtype))
        right = (outputs.argmax(1) == y).float().mean().item() if self.data.num_classes else 0.0
        return self.kernel.mean_loss(outputs, y).item(), right

    def _part(self, block: slice) -> "Clients":
        return Clients(
            self.ids[block], self.rows[block], self.data, self.population, self.kernel, self.options, self.moment
        )

    def _train(self, start: Tensor, trained: Tensor) -> None:
        """From `start` [C, P] into `trained`, by fewer products where the kernel knows how."""
        examples, rows, epochs = self.data.train, self.rows, self.options.epochs
        shortened = None if self.options.weight_decay else self.kernel.shortened(start, examples.x, rows, epochs)
        if shortened is None:
            self._descend(self.kernel, Batches(self, self.options, examples, rows), start, trained)
            return
        stand_in = Examples(shortened.x, examples.y[rows], examples.count[rows])
        batches = Batches(self, self.options, stand_in, torch.arange(len(self), device=rows.device))
        moved = torch.empty_like(shortened.theta)
        self._descend(shortened.kernel, batches, shortened.theta, moved)
        shortened.expand(moved, trained)

    def _descend(self, kernel: Kernel, batches: "Batches", start: Tensor, theta: Tensor) -> None:
        """Stochastic gradient descent with momentum: v <- momentum v + gradient, theta <- theta - lr v.

        From `start` [C, P] into `theta`; nothing large is allocated but the velocity.
        """
        torch.index_select(start, 0, batches.order, out=theta)
        momentum, decay = self.options.momentum, self.options.weight_decay
        lr = self.options.lr * self.options.lr_decay**self.moment.round
        plain = not momentum and not decay
        speed = theta if plain else torch.zeros_like(theta)
        bound = 0
        for batch in batches:
            if bound != len(batch.length):  # clients that have finished fall off the end
                bound = len(batch.length)
                accumulate = kernel.bind(theta[:bound], into=speed[:bound])
                moved = slice(kernel.layout.num_parameters)
                parameters, change = theta[:bound, moved], speed[:bound, moved]
            if plain:
                accumulate(batch, 1.0, -lr)
                continue
            accumulate(batch, momentum, 1.0)
            if decay:
                change.add_(parameters, alpha=decay)
            parameters.add_(change, alpha=-lr)
        if batches.sorted:
            theta.copy_(theta[batches.back])


class Peers:
    """The published models a client asked for: a view into what the fleet holds, never a [C, M, P] tensor."""

    def __init__(
        self, asked: Tensor, there: Tensor, rows: Tensor, published: Tensor, judged: Tensor, kernel: Kernel
    ) -> None:
        self.asked = asked  # [C, M], NOBODY where the client had nobody to name
        self.ids = asked.masked_fill(~there, NOBODY)  # [C, M], NOBODY also where a peer was not delivered
        self.weights: Tensor | None = None  # [C, M] by which they were mixed last, for who watches an experiment
        self._rows = rows  # [C, M] where it lies in `published`
        self._published = published  # [rows, P]
        self._judged = judged  # the same in the precision of evaluation
        self._kernel = kernel

    @property
    def delivered(self) -> Tensor:
        """[C, M] bool"""
        return self.ids != NOBODY

    def losses(self, clients: Clients) -> Tensor:
        """[C, M]: the mean loss of each peer's model on the asking client's examples; infinite where undelivered."""
        return clients.losses(self._judged, self._rows).masked_fill(~self.delivered, torch.inf)

    def class_losses(self, clients: Clients) -> ClassLosses:
        """The same by class."""
        losses = clients.class_losses(self._judged, self._rows)
        return replace(losses, each=losses.each.masked_fill(~self.delivered[..., None], torch.inf))

    def entropies(self, clients: Clients) -> Tensor:
        """[C, M]: the mean entropy of each peer's predictions on the asking client's examples; infinite likewise."""
        return clients.entropies(self._judged, self._rows).masked_fill(~self.delivered, torch.inf)

    def mix(self, weights: Tensor, otherwise: Tensor) -> Tensor:
        """[C, P]: the weighted sums of the peers' models; `otherwise` [C, P] for clients whose weights are all zero."""
        self.weights = weights = weights * self.delivered
        mixed = self._kernel.mix(self._published, self._rows, weights)
        return torch.where(weights.any(1, keepdim=True), mixed, otherwise)

    def of(self, client: int) -> Tensor:
        """[m, P]: the models delivered to one client."""
        return self._published[self._rows[client][self.delivered[client]]]


class Batches:
    """The mini-batches of some clients: each shuffles its own examples in every epoch, by a function of its key.

    Clients with more steps stand first (`order`), so those still training are always the first so many. A batch is
    valid until the next is asked for: they all live in the same memory, which stays in the cache.
    """

    def __init__(self, clients: Clients, options: Train, examples: Examples, rows: Tensor) -> None:
        self._x, self._y = examples.x.flatten(0, 1), examples.y.flatten(0, 1)  # [N n, ...], views
        self._size, self._epochs = options.batch_size, options.epochs
        steps = -(-clients.examples // options.batch_size)
        self.order = torch.argsort(steps, descending=True, stable=True)  # [C]
        self.back = torch.argsort(self.order)
        self.sorted = bool((steps[1:] > steps[:-1]).any())  # the order is not the clients' own
        self._steps: list[int] = steps[self.order].tolist()  # in one epoch, descending
        self._counts: list[int] = clients.examples[self.order].tolist()
        self._dropout = clients.keys("dropout")[self.order]
        self._places = self._shuffles(clients)  # [C, epochs, longest] among a client's examples
        self._first = rows[self.order, None] * examples.x.shape[1]  # [C, 1] its first example in the flat data
        room = len(self._steps) * min(self._size, max(self._counts))
        self._room_x, self._room_y = (
            self._x.new_empty(room, *self._x.shape[1:]),
            self._y.new_empty(room, *self._y.shape[1:]),
        )

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._epochs * self._steps[0]):
            active = sum(self._epochs * steps > step for steps in self._steps)
            yield self._batch(step, active)

    def _shuffles(self, clients: Clients) -> Tensor:
        """[C, epochs, longest]: each client's examples in random order for every epoch, padding behind them."""
        epochs = torch.arange(self._epochs, device=self.order.device)
        keys = fold(clients.keys("shuffle")[self.order, None], epochs)
        scores = bits(keys, max(self._counts))
        for client, count in enumerate(self._counts):
            scores[client, :, count:] = torch.iinfo(torch.int64).max
        return scores.argsort(dim=-1, stable=True)

    def _batch(self, step: int, active: int) -> Batch:
        begins = [step % steps * self._size for steps in self._steps[:active]]
        length = [min(self._size, count - begin) for count, begin in zip(self._counts, begins, strict=False)]
        longest = max(length)
        if self._steps[0] == self._steps[active - 1]:
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
