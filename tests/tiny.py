"""Small federations, models and runs for the tests of the core."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.clients import Clients
from coterie.core import Setting, Tensors
from coterie.descent import Train
from coterie.federation import Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import Kernel, KernelName, choose_kernel
from coterie.model import Model
from coterie.randomness import Moment
from coterie.training import Progress, beginning, collect_models, rounds

FEATURES, CLASSES = 3, 3
COUNTS = (7, 5, 6, 8)
START = Moment(0, 0)
TRAIN = Train(epochs=2, batch_size=4, lr=0.1, momentum=0.9)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, seed: int = 0, classes: int = CLASSES) -> Tensor:
    """Any labels."""
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def federation(
    counts: Sequence[int] = COUNTS, shape: tuple[int, ...] = (FEATURES,), seed: int = 0, **options: Any
) -> Federation:
    """Clients of these sizes in two true clusters, in which the same examples have different labels."""
    clusters = [client % 2 for client in range(len(counts))]
    centres = 2.0 * numbers(CLASSES, *shape, seed=99)

    def examples(count: int, cluster: int, seed: int) -> tuple[Tensor, Tensor]:
        y = labels(count, seed)
        return centres[y] + numbers(count, *shape, seed=seed), (y + cluster) % CLASSES

    train = [examples(n, cluster, 100 * seed + i) for i, (n, cluster) in enumerate(zip(counts, clusters, strict=True))]
    test = [examples(12, cluster, 5000 + cluster) for cluster in clusters]
    return Federation.from_arrays(train, test, clusters=clusters, **options)


def regression(counts: Sequence[int] = COUNTS, outputs: int = 2) -> Federation:
    """The same with real targets."""
    pairs = [(numbers(n, FEATURES, seed=i), numbers(n, outputs, seed=50 + i)) for i, n in enumerate(counts)]
    return Federation.from_arrays(pairs, (numbers(5, FEATURES, seed=90), numbers(5, outputs, seed=91)))


def mlp(hidden: int = 5) -> Model:
    """A classifier with one hidden layer."""
    return Model(lambda: nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)))


def clients_of(
    data: Federation, kernel: Kernel, options: Train = TRAIN, moment: Moment = START, ids: Tensor | None = None
) -> Clients:
    """All clients of a federation, or those named."""
    ids = torch.arange(data.num_clients) if ids is None else ids
    return Clients(ids, ids, data, data.keys, kernel, options, moment)


def starts(model: Model, data: Federation, seed: int = 0) -> Tensor:
    """[N, P]: the same initial model for all."""
    return model.initial(seed).repeat(data.num_clients, 1)


def furthest(mine: Tensor, theirs: Tensor) -> float:
    """How far two tensors are apart, relative to the largest number of the second."""
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


@dataclass(frozen=True)
class Played:
    """What is left of a short run."""

    progress: list[Progress]
    memory: Tensors
    models: Tensor  # [N, P]: what the clients predict with

    @property
    def last(self) -> Progress:
        return self.progress[-1]


def setting_of(data: Federation, model: Model, seed: int = 0) -> Setting:
    """What a method is told at the start."""
    return Setting(data.num_clients, lambda number: model.initial(seed, number), data.keys, data.clusters)


def fleet_of(
    method: Any, data: Federation, model: Model, kernel: KernelName = "loop", options: Train = TRAIN, **more: Any
) -> SimulatedFleet:
    """A fleet whose clients all start from the model's first initial vector."""
    memory = method.client_memory(starts(model, data), data.num_clients)
    return SimulatedFleet(data, choose_kernel(kernel, model), options, memory, **{"threads": 1, **more})


def play(
    method: Any,
    data: Federation,
    model: Model,
    *,
    kernel: KernelName = "loop",
    options: Train = TRAIN,
    last: int = 3,
    seed: int = 0,
    participation: float = 1.0,
    evaluate_every: int = 1,
    **of_fleet: Any,
) -> Played:
    """A whole run of a few rounds. `seed` leaves the initial models alone."""
    setting = setting_of(data, model)
    with closing(fleet_of(method, data, model, kernel, options, **of_fleet)) as fleet:
        played = list(
            rounds(
                method, fleet, setting, data.keys, beginning(method, setting), seed=seed, last=last,
                participation=participation, evaluate_every=evaluate_every,
            )
        )  # fmt: skip
        memory = {name: value.clone() for name, value in fleet.memory().items()}
        moment = Moment(seed, last - 1)
        return Played(played, memory, collect_models(method, fleet, played[-1].state, moment, model.layout.size))
