"""Memory of a simulation: 2,000 clients of 200 images with an MLP 784-200-10, M = 50, two rounds.

python benchmarks/bench_memory.py
"""

import resource
import sys

import torch

from bench_training import network
from coterie.core import Setting
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import FedCBO
from coterie.model import Model
from coterie.training import beginning, rounds
from measure import report

CLIENTS, IMAGES, DOWNLOAD = 2000, 200, 50


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS, IMAGES, 1, 28, 28, generator=draw)
    y = torch.randint(0, 10, (CLIENTS, IMAGES), generator=draw)
    keys = torch.arange(CLIENTS)
    count = torch.full((CLIENTS,), IMAGES)
    tests = ((x[0], y[0]),)
    data = Federation("noise", Examples(x, y, count), None, tests, torch.zeros_like(keys), None, keys, 10)
    model = Model(network)
    method = FedCBO(download=DOWNLOAD)
    setting = Setting(CLIENTS, lambda number: model.initial(0, number), data.keys)
    memory = method.client_memory(model.initial(0).expand(CLIENTS, -1), CLIENTS)
    fleet = SimulatedFleet(data, choose_kernel("auto", model), Train(epochs=1, batch_size=100), memory)
    for _ in rounds(method, fleet, setting, keys, beginning(method, setting), seed=0, last=2):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    models = CLIENTS * model.layout.size * 4 / 1e9
    report("2,000 clients, M = 50: peak memory in GB", peak, "< 6")
    report("  of which the images they hold", x.numel() * 4 / 1e9)
    report("  and one copy of all models (memory and publications are one each)", models)


if __name__ == "__main__":
    main()
