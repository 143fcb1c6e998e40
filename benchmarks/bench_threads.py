"""A whole FedCBO round of 100 clients (784-200-10, 200 images, 10 epochs, M = 16) on one and two threads; wall time.

python benchmarks/bench_threads.py
"""

import time

import torch

from bench_training import federation, network
from coterie.core import Setting
from coterie.descent import Train
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import FedCBO
from coterie.model import Model
from coterie.randomness import Moment
from coterie.training import beginning, play
from measure import ratio, report, take_turns


def main() -> None:
    data = federation()
    model = Model(network)
    kernel = choose_kernel("auto", model)
    method = FedCBO(download=16)
    setting = Setting(data.num_clients, lambda number: model.initial(0, number), data.keys)
    start = beginning(method, setting)

    def round_on(threads: int) -> object:
        memory = method.client_memory(model.initial(0).repeat(data.num_clients, 1), data.num_clients)
        fleet = SimulatedFleet(data, kernel, Train(epochs=10, batch_size=128), memory, threads=threads)

        def work() -> None:
            play(method, fleet, setting, data.keys, start, Moment(0, 0), 1.0, evaluated=False)

        return work

    seconds = take_turns({"one": round_on(1), "two": round_on(2)}, clock=time.perf_counter)  # type: ignore[dict-item]
    report("two threads: times one thread, wall time", ratio(seconds["one"], seconds["two"]), ">= 1.7")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
