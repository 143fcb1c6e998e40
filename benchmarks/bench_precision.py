"""What bfloat16 evaluation does to FedCBO's weights and results, on the demo's rotated digits, seeds 0 to 2.

python benchmarks/bench_precision.py
"""

import statistics
from pathlib import Path

import torch

from coterie import config
from coterie.clients import Clients
from coterie.consensus import gibbs
from coterie.kernels import choose_kernel
from coterie.metrics import spread
from coterie.randomness import Moment
from coterie.training import Progress, rounds
from coterie.world import World
from measure import report

DEMO = Path(config.__file__).with_name("demo.toml")


def played(precision: str, seed: int, last: int) -> tuple[World, Progress]:
    """The demo's FedCBO after so many rounds."""
    tables = config.read(DEMO) | {"precision": precision, "seed": seed}
    world = World.of(config.parse(tables), None, None)
    keys = world.federation.keys
    *_, progress = rounds(world.method, world.fleet, world.setting, keys, world.before, seed=seed, last=last)
    return world, progress


def main() -> None:
    world, _ = played("float32", 0, 4)
    ids = world.federation.keys
    theta = world.fleet.memory()["theta"]
    everybody = ids.expand(len(ids), -1)

    def losses(precision: str) -> torch.Tensor:
        kernel = choose_kernel("auto", world.model, precision=precision)
        clients = Clients(ids, ids, world.federation, ids, kernel, world.config.train, Moment(0, 0))
        return clients.losses(kernel.evaluation_copy(theta), everybody)

    exact, short = losses("float32"), losses("bf16")
    report("largest relative error of a loss", ((exact - short) / exact).abs().max().item())
    for alpha in (3.0, 10.0, 20.0):
        moved = (gibbs(exact, alpha) - gibbs(short, alpha)).abs().sum(1) / 2
        report(f"alpha {alpha:g}: mean share of a client's weight that moves", moved.mean().item())
    for precision in ("float32", "bf16"):
        found = [played(precision, seed, 20)[1].per_client["accuracy"] for seed in range(3)]
        mean = statistics.fmean(spread(accuracy)["mean"] for accuracy in found)
        report(f"{precision}: final accuracy in %, mean of three seeds", 100 * mean)


if __name__ == "__main__":
    main()
