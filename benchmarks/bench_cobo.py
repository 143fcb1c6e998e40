"""What CoBo costs: an iteration against one of local training, and its mixing step against loops over pairs; one
thread, CPU time.

    python benchmarks/bench_cobo.py
"""

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from coterie.core import Setting, run_round
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import CoBo, Local
from coterie.model import Model
from coterie.models import CNN, ResNet9
from coterie.randomness import Moment
from measure import ratio, report, take_turns

CLIENTS, IMAGES, ITERATIONS = 80, 256, 4
LR, RHO = 0.01, 0.5


def iterations() -> None:
    """80 clients with a small convolutional network, batches of 32; pairs drawn with chance 1/n."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS, IMAGES, 1, 28, 28, generator=draw)
    y = torch.randint(0, 10, (CLIENTS, IMAGES), generator=draw)
    keys = torch.arange(CLIENTS)
    examples = Examples(x, y, torch.full((CLIENTS,), IMAGES))
    data = Federation("noise", examples, None, ((x[0], y[0]),), torch.zeros_like(keys), None, keys, 10)
    model = Model(lambda: CNN().build((1, 28, 28), 10))
    setting = Setting(CLIENTS, lambda number: model.initial(0, number), keys)
    options = Train(steps=1, batch_size=32, lr=LR, momentum=0.9)

    def by(method: CoBo | Local) -> Callable[[], object]:
        memory = method.client_memory(model.initial(0).repeat(CLIENTS, 1), CLIENTS)
        fleet = SimulatedFleet(data, choose_kernel("auto", model), options, memory, threads=1)
        state, round = method.start(setting), count()
        return lambda: [run_round(method, fleet, state, keys, Moment(0, next(round))) for _ in range(ITERATIONS)]

    seconds = take_turns({"cobo": by(CoBo(attraction=RHO)), "local": by(Local())}, repeats=5)
    report("CoBo, 80 CNN clients, constant: times local", ratio(seconds["cobo"], seconds["local"]), "<= 1.6")


def mixing() -> None:
    """8 clients with 6.6 million parameters, all drawn together."""
    clients = 8
    model = Model(lambda: ResNet9().build((3, 32, 32), 100))
    theta = torch.randn(clients, model.layout.size, generator=torch.Generator().manual_seed(0))
    weights = 1.0 - torch.eye(clients)
    kernel, everybody = choose_kernel("loop", model), torch.arange(clients).repeat(clients, 1)

    def at_once() -> Tensor:
        degree = weights.sum(1, keepdim=True)
        trained.copy_(theta)  # what local training begins with in any case
        return trained.lerp_(kernel.mix(theta, everybody, weights / degree), LR * RHO * degree)

    def by_pairs() -> list[list[Tensor]]:
        before = [[piece.of(row).clone() for piece in model.layout.pieces] for row in theta]
        for i, own in enumerate(layers):
            pulls = [torch.zeros_like(layer) for layer in own]
            for k, other in enumerate(before):
                for pull, mine, theirs in zip(pulls, before[i], other, strict=True):
                    pull += weights[i, k] * (mine - theirs)
            for layer, start, pull in zip(own, before[i], pulls, strict=True):
                layer.copy_(start - LR * RHO * pull)
        return layers

    trained = torch.empty_like(theta)
    moved = torch.empty_like(theta)
    layers = [[piece.of(row) for piece in model.layout.pieces] for row in moved]
    by_pairs()
    torch.testing.assert_close(at_once(), moved, atol=1e-5, rtol=0)
    seconds = take_turns({"at once": at_once, "by pairs": by_pairs})
    report("mixing 8 x 6.6 M: loops over pairs, times ours", ratio(seconds["by pairs"], seconds["at once"]), ">= 5")


if __name__ == "__main__":
    mixing()
    iterations()
