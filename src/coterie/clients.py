"""What clients do with their own data: train, judge models, draw noise; and the peers they downloaded.

Everything has a leading axis C: a block of clients in a simulation, one client on a device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import NOBODY, Tensors
from coterie.descent import Batches, Carried, Pull, Train, descend, follow, fresh
from coterie.federation import Examples, Federation
from coterie.kernels import Kernel, at_once
from coterie.randomness import Moment, bits, fold, normal, uniform

OPTIMISER = "optimiser."  # begins the names under which a fleet remembers what optimisers carry
UNMEASURED = -1.0  # in place of a share that is of nothing: a NaN would pass no fleet


@dataclass(frozen=True)
class Score:
    """How models do on their client's test data."""

    loss: Tensor  # [C] mean loss
    accuracy: Tensor  # [C] share of right answers; zeros for a regression


@dataclass(frozen=True)
class ClassLosses:
    """How models do on each class of the examples their client judges by; a regression or text has one class."""

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
    carried: Tensors = field(default_factory=dict)  # what optimisers left in earlier rounds
    optimiser: dict[str, Tensor] = field(default_factory=dict)  # what they leave in this one

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

    def round_keys(self, purpose: str) -> Tensor:
        """[C] the same, whichever exchange of the round it is."""
        return fold(replace(self.moment, exchange=0).key(purpose), self.population[self.ids])

    def train(self, theta: Tensor, pull: Pull | None = None, *, name: str = "", epochs: int | None = None) -> Tensor:
        """[C, P] -> [C, P]: local training, in blocks that fit the cache; `epochs` in place of what [train] says.

        Models that a method trains side by side have names, and with them batches and an optimiser of their own.
        """
        options = self.options if epochs is None else self.options.model_copy(update={"epochs": epochs, "steps": None})
        trained = torch.empty(theta.shape, device=theta.device)
        carried = self._carried(name, theta) if options.steps else None
        for begin in range(0, len(self), self.kernel.cache_block):
            block = slice(begin, begin + self.kernel.cache_block)
            own = carried and {key: value[block] for key, value in carried.items()}
            spring = None if pull is None else pull.rows(block)
            self._part(block)._train(theta[block], trained[block], options, spring, own, name)
        return trained

    def step(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """[C, P] -> [C, P]: one step of the optimiser along a gradient [C, P] of the method's own making."""
        carried = self._carried("", theta) if self.options.steps else fresh(self.options, theta)
        moved, parameters = theta.clone(), slice(self.num_parameters)
        follow(moved[:, parameters], gradient[:, parameters], self.options, self._lr, carried)
        return moved

    def first_gradient(self, theta: Tensor, *, statistics: bool = False) -> Tensor:
        """[C, P]: the gradient on the batch with which local training would begin in this round. With `statistics` the
        batch moves those of theta, in place."""
        return self.gradient(theta, self.round_keys("shuffle"), self.options.batch_size, statistics=statistics)

    def gradient(
        self, theta: Tensor, draws: Tensor | None = None, size: int | None = None, *, statistics: bool = False
    ) -> Tensor:
        """[C, P]: the gradient of the mean loss over a client's training examples, or over `size` of them that the keys
        `draws` [C] choose; zero for buffers. Batch statistics are forgotten, or with `statistics` moved in place."""
        gradient = torch.zeros_like(theta)
        whole = self.data.train.x.shape[1]
        one_batch = self.options.model_copy(update={"epochs": 1, "steps": 1, "batch_size": size or whole})
        keys = self.round_keys("gradient") if draws is None else draws
        for begin in range(0, len(self), self.kernel.cache_block):
            block = slice(begin, begin + self.kernel.cache_block)
            batches = Batches(self.data.train, self.rows[block], keys[block], keys[block], one_batch)
            forgets = self.kernel.layout.buffers and not statistics
            start = theta[block].clone() if forgets else theta[block]
            for batch in batches:
                self.kernel.bind(start, gradient[block])(batch, 1.0, 1.0)
        return gradient

    def loss(self, theta: Tensor) -> Tensor:
        """[C]: the mean loss of each client's model on the examples it judges by."""
        return self.losses(self.kernel.evaluation_copy(theta), self._own_rows)[:, 0]

    def losses(self, models: Tensor, rows: Tensor, most: int | None = None) -> Tensor:
        """[C, M]: for each client the mean losses of the models in its rows [C, M] of `models`; on no more than `most`
        of its examples, drawn anew in each round."""
        return torch.stack([losses.mean(1) for losses, _ in self._judged(models, rows, most)])

    def class_loss(self, theta: Tensor) -> ClassLosses:
        """Each client's model by class, M = 1."""
        return self.class_losses(self.kernel.evaluation_copy(theta), self._own_rows)

    def class_losses(self, models: Tensor, rows: Tensor) -> ClassLosses:
        """`losses` by class."""
        each, share = [], []
        for losses, y in self._judged(models, rows):
            classes = self.data.num_classes if y.dim() == 1 else None
            member = F.one_hot(y, classes).to(losses) if classes else losses.new_ones(len(y), 1)
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
            x = _as_input(self.judging.x[data_row, : self.judging.count[data_row]], models.dtype)
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

    def _judged(self, models: Tensor, rows: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """For each client the losses [M, n] of the models in its rows on the examples it judges by, and their y [n]."""
        keys = self.round_keys("judged")
        for client, data_row in enumerate(self.rows.tolist()):
            count = int(self.judging.count[data_row])
            x, y = self.judging.x[data_row, :count], self.judging.y[data_row, :count]
            if most is not None and most < count:
                drawn = bits(keys[client], count).argsort()[:most]
                x, y = x[drawn], y[drawn]
            yield self.kernel.losses(models, rows[client], _as_input(x, models.dtype), y), y

    def _test(self, vector: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss and share of right answers; text in parts, for the outputs for all its tokens would fill memory."""
        size = at_once(x) if self.data.is_text else len(x)
        total_loss = total_right = 0.0
        for part, of_part in zip(x.split(size), y.split(size), strict=True):
            outputs = self.kernel.outputs(vector, _as_input(part, vector.dtype))
            total_loss += len(part) * self.kernel.mean_loss(outputs, of_part).item()
            if self.data.num_classes:
                total_right += len(part) * (outputs.argmax(1) == of_part).float().mean().item()
        return total_loss / len(x), total_right / len(x)

    def at(self, places: Tensor) -> "Clients":
        """Those at these places [n], which may repeat; what optimisers carry stays here."""
        return replace(self, ids=self.ids[places], rows=self.rows[places], carried={}, optimiser={})

    @property
    def _lr(self) -> float:
        return self.options.lr * self.options.lr_decay**self.moment.round

    def _part(self, block: slice) -> "Clients":
        return replace(self, ids=self.ids[block], rows=self.rows[block], carried={}, optimiser={})

    def _carried(self, name: str, theta: Tensor) -> Carried:
        """What this optimiser carried here [C, ...], to be changed in place; at first what a fresh one does."""
        prefix = f"{OPTIMISER}{name}."
        if not any(key.startswith(prefix) for key in self.optimiser):
            known = {key: value.clone() for key, value in self.carried.items() if key.startswith(prefix)}
            new = {} if known else {prefix + key: value for key, value in fresh(self.options, theta).items()}
            self.optimiser.update(known or new)
        return {key.removeprefix(prefix): value for key, value in self.optimiser.items() if key.startswith(prefix)}

    def _train(
        self, start: Tensor, trained: Tensor, options: Train, pull: Pull | None, carried: Carried | None, name: str
    ) -> None:
        """From `start` [C, P] into `trained`, by fewer products where the kernel knows how."""
        examples, rows, lr = self.data.train, self.rows, self._lr
        plain = options.optimiser == "sgd" and not options.steps and not options.weight_decay and pull is None
        shortened = self.kernel.shortened(start, examples.x, rows, options.epochs) if plain else None
        if shortened is None:
            batches = self._batches(examples, rows, options, name)
            descend(self.kernel, batches, start, trained, options, lr, pull, carried)
            return
        stand_in = Examples(shortened.x, examples.y[rows], examples.count[rows])
        batches = self._batches(stand_in, torch.arange(len(self), device=rows.device), options, name)
        moved = torch.empty_like(shortened.theta)
        descend(shortened.kernel, batches, shortened.theta, moved, options, lr)
        shortened.expand(moved, trained)

    def _batches(self, examples: Examples, rows: Tensor, options: Train, name: str) -> Batches:
        """Those of this round's training: the same in whichever exchange a method trains."""
        return Batches(examples, rows, self.round_keys(f"shuffle{name}"), self.round_keys(f"dropout{name}"), options)


def _as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the arithmetic of a model; tokens are numbers of words."""
    return x.to(dtype) if x.is_floating_point() else x


class Peers:
    """The published models a client asked for: a view into what the fleet holds, never a [C, M, P] tensor."""

    def __init__(
        self,
        asked: Tensor,
        there: Tensor,
        rows: Tensor,
        published: Tensor,
        judged: Tensor,
        kernel: Kernel,
        letters: Mapping[tuple[int, int], Tensor] | None = None,
    ) -> None:
        self.asked = asked  # [C, M], NOBODY where the client had nobody to name
        self.ids = asked.masked_fill(~there, NOBODY)  # [C, M], NOBODY also where a peer was not delivered
        self.weights: Tensor | None = None  # [C, M] by which they were mixed last, for who watches an experiment
        self._rows = rows  # [C, M] where it lies in `published`
        self._published = published  # [rows, P]
        self._judged = judged  # the same in the precision of evaluation
        self._kernel = kernel
        self._letters = letters or {}

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
        mixed, nobody = self._kernel.mix(self._published, self._rows, weights), ~weights.any(1)
        mixed[nobody] = otherwise[nobody]
        return mixed

    def of(self, client: int) -> Tensor:
        """[m, P]: the models delivered to one client."""
        return self._published[self._rows[client][self.delivered[client]]]

    @property
    def each(self) -> Tensor:
        """[K, P]: a copy of all models delivered, client by client, in the order of `delivered.nonzero()`."""
        return self._published[self._rows[self.delivered]]

    def wrote(self, clients: Clients) -> Tensor:
        """[C, M] bool: which peers wrote to the client that asks."""
        pairs = zip(clients.ids.tolist(), self.asked.tolist(), strict=True)
        there = [[(peer, client) in self._letters for peer in peers] for client, peers in pairs]
        return torch.tensor(there, dtype=torch.bool, device=self.asked.device).view(self.asked.shape)

    def letters(self, clients: Clients) -> list[Tensor]:
        """What they wrote [P], in the order of `wrote.nonzero()`."""
        pairs = zip(clients.ids.tolist(), self.asked.tolist(), strict=True)
        pairs_asked = ((peer, client) for client, peers in pairs for peer in peers)
        return [self._letters[pair] for pair in pairs_asked if pair in self._letters]
