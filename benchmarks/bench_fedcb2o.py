"""What judging peers by class costs: a FedCB²O round against a FedCBO round on the same work, one thread, CPU time.

    python benchmarks/bench_fedcb2o.py

40 clients of 400 noise images, 100 more to judge by, 47 classes, M = 8, as in experiments/fedcb2o/table1-quick.toml but
without attackers, who change neither round; then fewer clients with the network of the paper.
"""

from collections.abc import Callable
from contextlib import closing

import torch
from torch import nn

from coterie.core import Setting
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import FedCB2O, FedCBO
from coterie.model import Model
from coterie.models import CNN, MLP
from coterie.randomness import Moment
from coterie.training import beginning, play
from measure import ratio, report, take_turns

CLASSES = 47


def noise(clients: int, images: int, seed: int) -> Examples:
    """Images and labels without meaning."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(clients, images, 1, 28, 28, generator=draw)
    return Examples(x, torch.randint(0, CLASSES, (clients, images), generator=draw), torch.full((clients,), images))


def compare(title: str, make: Callable[[], nn.Module], clients: int, options: Train) -> None:
    """Print what a round of FedCB²O costs, given FedCBO's."""
    train, keys = noise(clients, 400, 0), torch.arange(clients)
    tests = ((train.x[0, :1], train.y[0, :1]),)
    data = Federation(
        "noise", train, noise(clients, 100, 1), tests, torch.zeros_like(keys), None, keys, CLASSES
    )  # fmt: skip
    model = Model(make)
    setting = Setting(clients, lambda number: model.initial(0, number), data.keys)

    def round_of(method: FedCBO | FedCB2O) -> Callable[[], object]:
        memory = method.client_memory(model.initial(0).repeat(clients, 1), clients)
        start = beginning(method, setting)

        def work() -> None:
            with closing(SimulatedFleet(data, choose_kernel("auto", model), options, memory, threads=1)) as fleet:
                play(method, fleet, setting, data.keys, start, Moment(0, 0), 1.0, evaluated=False)

        return work

    plain = FedCBO(download=8, selection="likelihood", own_model="included")
    rounds = {"fedcbo": round_of(plain)}
    for criterion in ("max_class_gap", "class_entropy"):
        rounds[criterion] = round_of(FedCB2O(download=8, criterion=criterion, own_model="included"))
    seconds = take_turns(rounds, repeats=5)
    for criterion in ("max_class_gap", "class_entropy"):
        report(f"{title}, {criterion}: times a FedCBO round", ratio(seconds[criterion], seconds["fedcbo"]), "<= 1.15")


def main() -> None:
    compare("MLP 784-200-47", lambda: MLP(hidden=[200]).build((1, 28, 28), CLASSES), 40, Train(epochs=5, batch_size=64))
    paper = Train(epochs=1, batch_size=64)
    compare("CNN 32-64-2048", lambda: CNN(channels=[32, 64], hidden=2048).build((1, 28, 28), CLASSES), 9, paper)


if __name__ == "__main__":
    main()
