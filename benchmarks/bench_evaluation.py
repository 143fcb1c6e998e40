"""Judging peers: 40 clients evaluate 20 downloaded MLPs 784-200-10 each on their own 200 images; one thread, CPU time.

python benchmarks/bench_evaluation.py
"""

import torch

from bench_training import CLIENTS, IMAGES, PARAMETERS, federation, network
from coterie.clients import Clients
from coterie.descent import Train
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.randomness import Moment
from measure import matrix_products, ratio, report, take_turns

ASKING, PEERS = 40, 20


def main() -> None:
    data = federation()
    model = Model(network)
    models = model.initial(0).repeat(CLIENTS, 1) + 1e-3 * torch.randn(CLIENTS, model.layout.size)
    ids = torch.arange(ASKING)
    rows = torch.stack([torch.randperm(CLIENTS)[:PEERS] for _ in range(ASKING)])

    def judge(precision: str) -> torch.Tensor:
        kernel = choose_kernel("auto", model, precision=precision)
        clients = Clients(ids, ids, data, data.keys, kernel, Train(), Moment(0, 0))
        return clients.losses(kernel.evaluation_copy(models), rows)

    def plainly() -> None:
        modules = [network() for _ in range(PEERS)]
        with torch.no_grad():
            for client in range(ASKING):
                for module, row in zip(modules, rows[client]):
                    torch.nn.utils.vector_to_parameters(models[row], module.parameters())
                    torch.nn.functional.cross_entropy(module(data.train.x[client]), data.train.y[client])

    def products_alone() -> None:
        """The first layer's products in the same order, and nothing else: float32 cannot be faster than this."""
        weights, room = models[:, : 784 * 200].view(-1, 200, 784), torch.empty(IMAGES, 200)
        for client in range(ASKING):
            x = data.train.x[client].flatten(1)
            for row in rows[client].tolist():
                torch.mm(x, weights[row].mT, out=room)

    peak = matrix_products()
    paths = {"float32": lambda: judge("float32"), "bf16": lambda: judge("bf16")}
    seconds = take_turns({"peak": peak, **paths, "plain": plainly, "products": products_alone})
    flop = ASKING * PEERS * IMAGES * 2 * PARAMETERS
    at_peak = [s * flop / peak.flop for s in seconds["peak"]]
    error = (judge("bf16") - judge("float32")).abs().max().item()
    report("float32: share of the matrix-product peak", ratio(at_peak, seconds["float32"]), ">= 0.80")
    report("  the first layer's products alone", ratio(at_peak, seconds["products"]))
    report("bf16: times the float32 path", ratio(seconds["float32"], seconds["bf16"]), ">= 1.7")
    report("float32: times a plain loop over modules", ratio(seconds["plain"], seconds["float32"]))
    report("bf16: largest error of a loss (losses are about 2.3)", error)


if __name__ == "__main__":
    main()
