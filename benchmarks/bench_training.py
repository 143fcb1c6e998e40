"""Local training of an MLP 784-200-10: 100 clients x 200 images, batch 50, 5 epochs, plain SGD; one thread, CPU time.

The share of the peak counts the products of textbook gradient descent. The batched kernel needs fewer where clients
have few examples (kernels/batched.py); "by features" is the same kernel without that.

python benchmarks/bench_training.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from coterie.clients import Clients
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.kernels import Kernel, choose_kernel
from coterie.model import Model
from coterie.models import MLP
from coterie.randomness import Moment
from measure import matrix_products, ratio, report, take_turns

CLIENTS, IMAGES, BATCH, EPOCHS, LR = 100, 200, 50, 5, 0.05
PARAMETERS = 784 * 200 + 200 + 200 * 10 + 10


def federation() -> Federation:
    """Noise in the shape of MNIST: the time does not depend on what the pixels show."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS, IMAGES, 1, 28, 28, generator=draw)
    y = torch.randint(0, 10, (CLIENTS, IMAGES), generator=draw)
    return Federation(
        name="noise",
        train=Examples(x, y, torch.full((CLIENTS,), IMAGES)),
        validation=None,
        tests=((x[0], y[0]),),
        test_of=torch.zeros(CLIENTS, dtype=torch.int64),
        clusters=None,
        keys=torch.arange(CLIENTS),
        num_classes=10,
    )


def network() -> nn.Module:
    """The paper's network for MNIST."""
    return MLP(hidden=[200]).build((1, 28, 28), 10)


def plain_slices(data: Federation) -> None:
    """What one would write by hand: a module, an optimiser, shuffled slices of a tensor."""
    start = network()
    for x, y in zip(data.train.x, data.train.y, strict=True):
        module = network()
        module.load_state_dict(start.state_dict())
        optimiser = torch.optim.SGD(module.parameters(), LR)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(IMAGES).split(BATCH):
                optimiser.zero_grad()
                cross_entropy(module(x[chosen]), y[chosen]).backward()
                optimiser.step()


def plain_loaders(data: Federation) -> None:
    """The same as most research programs write it."""
    start = network()
    for x, y in zip(data.train.x, data.train.y, strict=True):
        module = network()
        module.load_state_dict(start.state_dict())
        optimiser = torch.optim.SGD(module.parameters(), LR)
        loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimiser.zero_grad()
                cross_entropy(module(images), labels).backward()
                optimiser.step()


def main() -> None:
    data = federation()
    model = Model(network)
    theta = model.initial(0).repeat(CLIENTS, 1)
    options = Train(epochs=EPOCHS, batch_size=BATCH, lr=LR, momentum=0.0)

    def coterie(kernel: Kernel, momentum: float = 0.0) -> None:
        chosen = options.model_copy(update={"momentum": momentum})
        ids = data.keys
        Clients(ids, ids, data, ids, kernel, chosen, Moment(0, 0)).train(theta)

    batched, by_features, loop = (choose_kernel(name, model) for name in ("batched", "batched", "loop"))
    by_features.shortened = lambda *arguments: None  # type: ignore[method-assign]

    peak = matrix_products()
    seconds = take_turns(
        {
            "peak": peak,
            "batched": lambda: coterie(batched),
            "batched, momentum": lambda: coterie(batched, 0.9),
            "by features": lambda: coterie(by_features),
            "slices": lambda: plain_slices(data),
            "loaders": lambda: plain_loaders(data),
            "loop": lambda: coterie(loop),
        }
    )
    first = 784 * 200  # no gradient flows to the pixels
    flop = CLIENTS * IMAGES * EPOCHS * (6 * PARAMETERS - 2 * first)

    def share(name: str) -> float:
        return ratio([s * flop / peak.flop for s in seconds["peak"]], seconds[name])

    report("batched: times the plain loop over slices", ratio(seconds["slices"], seconds["batched"]), ">= 1.7")
    report("batched: times the plain loop over DataLoaders", ratio(seconds["loaders"], seconds["batched"]), ">= 2.1")
    report("batched: share of the matrix-product peak", share("batched"), ">= 0.65")
    report("batched with momentum 0.9: share of the matrix-product peak", share("batched, momentum"))
    report("batched by features: share of the matrix-product peak", share("by features"))
    report("loop: times the plain loop over slices", ratio(seconds["slices"], seconds["loop"]))


if __name__ == "__main__":
    main()
