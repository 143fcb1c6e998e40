"""What a kernel is, and the parts all kernels share: one model's forward pass, peers' losses, mixtures."""

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.model import BATCH_STATISTICS, Layout, Model, loss_per_example

Precision = Literal["float32", "bf16"]
CHUNK = 2048  # examples of one forward pass in evaluation, or tokens of text: bounds its memory
STRETCH = 1 << 19  # numbers, of all models together, that are mixed at a time: they stay in the cache


@dataclass(frozen=True)
class Batch:
    """One mini-batch of each of C clients; rows beyond a client's length are padding."""

    x: Tensor  # [C, b, ...]
    y: Tensor  # [C, b, ...]
    length: list[int]  # C numbers, at least 1 each
    full: bool  # no padding anywhere
    places: Tensor  # [C, b] int64: which of its client's examples each is
    keys: Tensor  # [C] int64 of the training, for dropout
    step: int  # of the training


Accumulate = Callable[[Batch, float, float], None]


@dataclass(frozen=True)
class Shortened:
    """A descent that stands for another: fewer numbers move, and at the end they say where the models have gone."""

    kernel: "Kernel"
    theta: Tensor  # [C, Q] where it begins
    x: Tensor  # [C, n, ...] what stands for the examples
    expand: Callable[[Tensor, Tensor], None]  # from theta at the end, in place into the models [C, P] of the beginning


class Kernel(ABC):
    """Computes with rows of theta [C, P]; the client's mathematics is written once, above it."""

    name: str
    cache_block: int = 1  # clients that train side by side
    agrees_to: float = 0.0  # how far a number may be from the loop kernel's, relative to the largest of its tensor

    def __init__(self, model: Model, precision: Precision = "float32") -> None:
        self.model = model
        self.layout: Layout = model.layout
        self.precision = precision
        self._own = threading.local()

    @abstractmethod
    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        """A function (batch, keep, times) that does, for the parameters of every row,
        into <- keep * into + times * gradient of the batch's mean loss at theta.

        `into` may be theta itself. Buffers of theta (batch statistics) are updated by the forward pass.
        """

    def shortened(self, start: Tensor, x: Tensor, rows: Tensor, epochs: int) -> "Shortened | None":
        """The same descent from `start` [C, P], on these rows [C] of the examples x [N, n, ...], in fewer products,
        where there is such."""
        return None

    def evaluation_copy(self, theta: Tensor) -> Tensor:
        """theta in the precision in which models are evaluated."""
        return theta.to(torch.bfloat16) if self.precision == "bf16" else theta

    @torch.no_grad()
    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        """[n, ...] float32: what one model, in evaluation mode, answers to x [n, ...] of the vector's dtype."""
        module = self._module(vector.dtype, training=False)
        point_at(self.layout, module, vector)
        return torch.cat([module(part).float() for part in x.split(at_once(x))])

    @torch.no_grad()
    def losses(self, models: Tensor, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[M, n]: the loss at each of one client's examples x [n, ...], y [n, ...] of the models in these rows [M]."""
        losses = []
        for part, of_part in zip(x.split(at_once(x)), y.split(at_once(x)), strict=True):
            outputs = (self.outputs(models[row], part) for row in rows.tolist())
            losses.append(torch.stack([loss_per_example(self.model.loss, own, of_part) for own in outputs]))
        return torch.cat(losses, dim=1)

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the examples, in float32."""
        return loss_per_example(self.model.loss, outputs, y).mean()

    @torch.no_grad()
    def mix(self, models: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """[C, P]: for each client the sum of the models in its rows [C, M], weighted [C, M]. A stretch of all models at
        a time, which stays in the cache for all clients; client by client, so that no sum depends on the others."""
        share = weights.new_zeros(len(rows), len(models)).scatter_add_(1, rows, weights)  # [C, N]
        mixed = torch.empty(len(rows), models.shape[1], dtype=models.dtype, device=models.device)
        chosen = [row.nonzero()[:, 0] for row in share]
        size = max(1024, STRETCH // len(models))
        for stretch, into in zip(models.split(size, dim=1), mixed.split(size, dim=1), strict=True):
            for out, row, some in zip(into, share, chosen, strict=True):
                if 2 * len(some) > len(row):
                    torch.mv(stretch.T, row, out=out)
                else:
                    torch.mv(stretch[some].T, row[some], out=out)
        return mixed

    def _module(self, dtype: torch.dtype = torch.float32, *, training: bool) -> nn.Module:
        """This thread's module of a dtype, to be pointed at rows of theta."""
        modules: dict[torch.dtype, nn.Module] = self._own.__dict__.setdefault("modules", {})
        if dtype not in modules:
            modules[dtype] = copy.deepcopy(self.model.module).to(dtype)
            for part in modules[dtype].modules():
                if isinstance(part, BATCH_STATISTICS):
                    part.num_batches_tracked = None  # a counter nobody reads, and clients must not share
        return modules[dtype].train(training)


def at_once(x: Tensor) -> int:
    """How many of the examples [n, ...] are evaluated in one forward pass; every token of text has outputs."""
    return CHUNK if x.is_floating_point() else max(1, CHUNK // x.shape[1:].numel())


def point_at(layout: Layout, module: nn.Module, row: Tensor) -> list[nn.Parameter]:
    """Make the module's parameters and buffers views of a row of theta; returns its parameters."""
    tensors = dict(module.named_parameters())
    for piece in layout.parameters:
        tensors[piece.name].data = piece.of(row)
    if layout.buffers:
        buffers = dict(module.named_buffers())
        for piece in layout.buffers:
            buffers[piece.name].data = piece.of(row)
    return [tensors[piece.name] for piece in layout.parameters]
