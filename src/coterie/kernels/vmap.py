"""Many clients at once through torch.func: the user's module, vectorised over the clients' axis."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.dropout import KeyedDropout
from coterie.kernels.base import Accumulate, Batch, Kernel, at_once
from coterie.model import Piece, loss_per_example

Named = dict[str, Tensor]


def _named(pieces: tuple[Piece, ...], theta: Tensor) -> dict[str, Tensor]:
    return {piece.name: piece.of(theta) for piece in pieces}


class VmapKernel(Kernel):
    """Padding takes part in the forward pass with weight zero; it must not have batch statistics to spoil."""

    name = "vmap"
    cache_block = 64
    agrees_to = 1e-4

    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        targets = _named(self.layout.parameters, into)
        buffers = _named(self.layout.buffers, theta)
        parameters = _named(self.layout.parameters, theta)

        def accumulate(batch: Batch, keep: float, times: float) -> None:
            length = torch.tensor(batch.length, device=theta.device)[:, None]
            weight = (torch.arange(batch.x.shape[1], device=theta.device) < length) / length
            module = self._module(training=batch.x.shape[1] > 1 or not self.model.uses_batch_statistics)
            gradient = vmap(grad(partial(self._loss, module, batch.step), has_aux=True))
            gradients, updated = gradient(parameters, buffers, batch.x, batch.y, weight, batch.keys)
            for name, target in targets.items():
                target.mul_(keep).add_(gradients[name], alpha=times)
            for name, buffer in buffers.items():
                buffer.copy_(updated[name])

        return accumulate

    def _loss(
        self,
        module: nn.Module,
        step: int,
        parameters: Named,
        buffers: Named,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        key: Tensor,
    ) -> tuple[Tensor, Named]:
        """The mean loss of one client's batch, and its batch statistics afterwards."""
        updated = {name: buffer.clone() for name, buffer in buffers.items()}
        with KeyedDropout(key, step):
            outputs = functional_call(module, (parameters, updated), (x,))
        return (loss_per_example(self.model.loss, outputs, y) * weight).sum(), updated

    @torch.no_grad()
    def losses(self, models: Tensor, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        module = self._module(models.dtype, training=False)
        chosen = _named(self.layout.pieces, models[rows])
        per_model = vmap(lambda tensors, part: functional_call(module, tensors, (part,)), in_dims=(0, None))
        losses = []
        for part, of_part in zip(x.split(at_once(x)), y.split(at_once(x)), strict=True):
            outputs = per_model(chosen, part).float()
            losses.append(torch.stack([loss_per_example(self.model.loss, own, of_part) for own in outputs]))
        return torch.cat(losses, dim=1)
