"""The reference kernel: one client after another, through the user's module and torch's autograd."""

import torch
from torch import Tensor

from coterie.dropout import KeyedDropout
from coterie.kernels.base import Accumulate, Batch, Kernel, point_at
from coterie.model import loss_per_example


class LoopKernel(Kernel):
    """Exact: no padding reaches the model, so batch statistics are those of the client's own examples. A last batch of
    one example has no statistics: a model that uses them sees it in evaluation mode."""

    name = "loop"

    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        targets = [[piece.of(row) for piece in self.layout.parameters] for row in into]

        def accumulate(batch: Batch, keep: float, times: float) -> None:
            for client, length in enumerate(batch.length):
                module = self._module(training=length > 1 or not self.model.uses_batch_statistics)
                parameters = point_at(self.layout, module, theta[client])
                with torch.enable_grad(), KeyedDropout(batch.keys[client], batch.step):
                    outputs = module(batch.x[client, :length])
                    loss = loss_per_example(self.model.loss, outputs, batch.y[client, :length]).mean()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                for target, gradient in zip(targets[client], gradients, strict=True):
                    if keep != 1.0:
                        target.mul_(keep)
                    target.add_(gradient, alpha=times)

        return accumulate
