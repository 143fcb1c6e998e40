"""Adapters of a language model: one training step of 4 and of 16 clients by each kernel, one thread, CPU time.

    python benchmarks/bench_llm.py

`auto` follows this table on CPUs. Needs the extra `llm`; the base models are drawn, nothing is downloaded.
"""

from collections.abc import Callable

import torch

from coterie.clients import Clients
from coterie.descent import Train
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.models import MODELS
from coterie.randomness import Moment
from measure import ratio, report, take_turns

STEPS = 4
SIZES = {  # layers, width, vocabulary, sequences of a batch, tokens of a sequence
    "2 x 32, batch 2 x 16": (2, 32, 256, 2, 16),
    "2 x 64, batch 4 x 32": (2, 64, 512, 4, 32),
    "2 x 128, batch 8 x 64": (2, 128, 1024, 8, 64),
    "4 x 256, batch 8 x 64": (4, 256, 2048, 8, 64),
}


def texts(clients: int, vocabulary: int, sequences: int, length: int) -> Federation:
    """Random tokens."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, vocabulary, (clients, 4 * sequences, length + 1), generator=draw)
    pairs = [(own[:, :-1], own[:, 1:]) for own in x]
    return Federation.from_arrays(pairs, pairs[0], vocabulary=vocabulary)


def compare(title: str, clients: int, dropout: float) -> None:
    """Print how vmap does against the loop over clients."""
    layers, width, vocabulary, sequences, length = SIZES[title]
    data = texts(clients, vocabulary, sequences, length)
    options = MODELS["lora"].model_validate({"layers": layers, "width": width, "dropout": dropout})
    model = Model(options.maker(data))
    theta = model.initial(0).repeat(clients, 1)
    train = Train(steps=STEPS, batch_size=sequences, optimiser="adamw", lr=0.002)

    def by(kernel: str) -> Callable[[], object]:
        made = choose_kernel(kernel, model)
        return lambda: Clients(data.keys, data.keys, data, data.keys, made, train, Moment(0, 0)).train(theta)

    seconds = take_turns({"loop": by("loop"), "vmap": by("vmap")}, repeats=5)
    of_step = 1000 * min(seconds["loop"]) / clients / STEPS
    name = f"GPT-2 of {title}, dropout {dropout:g}, {clients} clients"
    report(f"{name}: ms of a client's step by loop", of_step)
    report(f"{name}: loop / vmap", ratio(seconds["loop"], seconds["vmap"]))


def main() -> None:
    for title in SIZES:
        for clients in (4, 16):
            for dropout in (0.0, 0.1):
                compare(title, clients, dropout)


if __name__ == "__main__":
    main()
