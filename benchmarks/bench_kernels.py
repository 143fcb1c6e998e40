"""Which kernel for which model: training by each kernel against a plain loop, one thread, CPU time.

    python benchmarks/bench_kernels.py

`auto` follows this table on CPUs: batched where the model is a stack of linear layers, else loop.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from coterie.clients import Clients
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.kernels import BatchedKernel, choose_kernel
from coterie.model import Model
from coterie.models import CNN, MLP
from coterie.randomness import Moment
from measure import ratio, report, take_turns

CLIENTS, IMAGES, BATCH, LR = 16, 64, 32, 0.05


def plain(make: Callable[[], nn.Module], data: Federation) -> None:
    """A module, an optimiser, shuffled slices of a tensor."""
    start = make()
    for x, y in zip(data.train.x, data.train.y):
        module = make()
        module.load_state_dict(start.state_dict())
        optimiser = torch.optim.SGD(module.parameters(), LR, 0.9)
        for _ in range(2):
            for chosen in torch.randperm(IMAGES).split(BATCH):
                optimiser.zero_grad()
                cross_entropy(module(x[chosen]), y[chosen]).backward()
                optimiser.step()


def compare(title: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Print how each kernel does on one network."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS, IMAGES, *shape, generator=draw)
    y = torch.randint(0, 10, (CLIENTS, IMAGES), generator=draw)
    keys = torch.arange(CLIENTS)
    examples = Examples(x, y, torch.full((CLIENTS,), IMAGES))
    data = Federation("noise", examples, None, ((x[0], y[0]),), torch.zeros_like(keys), None, keys, 10)
    model = Model(make)
    theta = model.initial(0).repeat(CLIENTS, 1)
    options = Train(epochs=2, batch_size=BATCH, lr=LR, momentum=0.9)

    def by(kernel: str) -> Callable[[], object]:
        clients = Clients(keys, keys, data, keys, choose_kernel(kernel, model), options, Moment(0, 0))
        return lambda: clients.train(theta)

    names = ["loop", "vmap"] + (["batched"] if BatchedKernel.accepts(model) else [])
    seconds = take_turns({"plain": lambda: plain(make, data), **{name: by(name) for name in names}}, repeats=5)
    for name in names:
        wanted = "time <= 1.1 plain, so >= 0.91" if name == "loop" and "CNN" in title else ""
        report(f"{title}, {name}: times a plain loop", ratio(seconds["plain"], seconds[name]), wanted)


def main() -> None:
    compare("MLP 64-32-10", lambda: MLP(hidden=[32]).build((1, 8, 8), 10), (1, 8, 8))
    compare("MLP 784-200-10", lambda: MLP(hidden=[200]).build((1, 28, 28), 10), (1, 28, 28))
    compare("CNN 16-32-128 on 28 x 28", lambda: CNN().build((1, 28, 28), 10), (1, 28, 28))


if __name__ == "__main__":
    main()
