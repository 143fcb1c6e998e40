"""Stacks of linear layers: batched products and explicit gradients, in place, in blocks that fit the cache."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.kernels.base import Accumulate, Batch, Kernel, Precision
from coterie.model import Model, Piece

CACHE = 1 << 20  # bytes of parameters that train side by side: half of a usual second-level cache
SPARSE_BELOW = 1 / 32  # share of published models a client mixes, below which a sparse product is faster
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)


@dataclass(frozen=True)
class _Linear:
    weight: Piece  # [out, in]
    bias: Piece | None  # [out]
    activation: nn.Module  # what follows it


def _parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The modules of nested Sequentials in order, with the names of their parameters' prefixes."""
    if type(module) is not nn.Sequential:
        return [(prefix, module)]
    return [part for name, child in module.named_children() for part in _parts(child, f"{prefix}{name}.")]


class BatchedKernel(Kernel):
    """Products run on [block, ...] stacks that are views into theta, so that an update is one product with
    accumulation into the parameters themselves and no gradient is ever stored."""

    name = "batched"
    agrees_to = 1e-4

    def __init__(self, model: Model, precision: Precision = "float32") -> None:
        super().__init__(model, precision)
        pieces = {piece.name: piece for piece in self.layout.parameters}
        layers: list[_Linear] = []
        for prefix, part in _parts(model.module):
            if isinstance(part, nn.Linear):
                layers.append(_Linear(pieces[f"{prefix}weight"], pieces.get(f"{prefix}bias"), nn.Identity()))
            elif isinstance(part, ACTIVATIONS) and not isinstance(part, nn.Identity):
                layers[-1] = _Linear(layers[-1].weight, layers[-1].bias, part)
        self._layers = layers
        self.cache_block = max(1, min(64, CACHE // (4 * self.layout.size)))

    @staticmethod
    def accepts(model: Model) -> bool:
        """[Flatten], then Linear layers with at most one of the known activations after each, none after the last."""
        kinds = [part for _, part in _parts(model.module) if not isinstance(part, nn.Identity)]
        if kinds and type(kinds[0]) is nn.Flatten and kinds[0].start_dim == 1 and kinds[0].end_dim == -1:
            kinds = kinds[1:]
        known = all(type(part) is nn.Linear or type(part) in ACTIVATIONS for part in kinds)
        linear = [type(part) is nn.Linear for part in kinds]
        alternate = all(a or b for a, b in itertools.pairwise(linear))
        names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
        shared = len(names) != len(model.layout.parameters)
        return known and alternate and bool(linear) and linear[0] and linear[-1] and not shared

    @torch.no_grad()
    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        weights = [layer.weight.of(theta) for layer in self._layers]  # [C, out, in] each
        biases = [layer.bias.of(theta)[:, :, None] if layer.bias else None for layer in self._layers]  # [C, out, 1]
        weights_into = [layer.weight.of(into) for layer in self._layers]
        biases_into = [layer.bias.of(into)[:, :, None] if layer.bias else None for layer in self._layers]
        last = len(weights) - 1

        @torch.no_grad()
        def accumulate(batch: Batch, keep: float, times: float) -> None:
            activations = [batch.x.flatten(2)]  # [C, b, width] each
            for at, (weight, bias, layer) in enumerate(zip(weights, biases, self._layers, strict=True)):
                if (
                    at == last
                ):  # the outputs stand upright, [C, classes, b]: a softmax over rows is several times faster
                    signal = _affine(bias, weight, activations[-1].transpose(1, 2))
                else:
                    hidden = _affine(
                        bias.transpose(1, 2) if bias is not None else None, activations[-1], weight.transpose(1, 2)
                    )
                    activations.append(_activate(layer.activation, hidden))
            delta = self._output_gradient(signal, batch)  # [C, out, b], times the batch's length
            step, ones = self._step(batch, times, delta)
            for at in range(last, -1, -1):
                below = torch.bmm(delta.transpose(1, 2), weights[at]) if at else None  # before the weight moves
                weights_into[at].baddbmm_(delta, activations[at], beta=keep, alpha=step)
                if (target := biases_into[at]) is not None:
                    target.baddbmm_(delta, ones, beta=keep, alpha=step)
                if below is not None:
                    delta = _slope(self._layers[at - 1].activation, below, activations[at]).transpose(1, 2)

        return accumulate

    def _output_gradient(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Gradient of the summed loss by the outputs [C, out, b]; zero where there is padding."""
        if self.model.loss == "mse":
            target = batch.y.flatten(2).transpose(1, 2)
            gradient = (outputs - target) * (2.0 / outputs.shape[1])
        else:
            gradient = torch.softmax(outputs, dim=1)
            gradient.scatter_add_(1, batch.y[:, None], gradient.new_full((1, 1, 1), -1.0).expand_as(batch.y[:, None]))
        if not batch.full:
            length = torch.tensor(batch.length, device=outputs.device)[:, None, None]
            gradient *= (torch.arange(outputs.shape[2], device=outputs.device) < length) / length
        return gradient

    def _step(self, batch: Batch, times: float, like: Tensor) -> tuple[float, Tensor]:
        """The factor of a full batch's summed gradient, and a column of ones that sums over the batch."""
        factor = times / batch.length[0] if batch.full else times
        return factor, like.new_ones(1, 1, 1).expand(len(like), like.shape[2], 1)

    @torch.no_grad()
    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        signal = x.flatten(1)
        for layer in self._layers:
            signal = F.linear(signal, layer.weight.of(vector), layer.bias.of(vector) if layer.bias else None)
            signal = _activate(layer.activation, signal)
        return signal.float()

    @torch.no_grad()
    def mix(self, models: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """One product: dense where clients mix a fair share of what is published, else sparse."""
        share = weights.new_zeros(len(rows), len(models)).scatter_add_(1, rows, weights)
        if rows.shape[1] < SPARSE_BELOW * len(models):
            share = share.to_sparse_csr()
        mixed: Tensor = share @ models
        return mixed


def _affine(bias: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if bias is None else torch.baddbmm(bias, left, right)


def _activate(activation: nn.Module, signal: Tensor) -> Tensor:
    """In place, on a tensor just made."""
    match activation:
        case nn.ReLU():
            return signal.relu_()
        case nn.Tanh():
            return signal.tanh_()
        case nn.Sigmoid():
            return signal.sigmoid_()
    return signal


def _slope(activation: nn.Module, gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient before an activation, from the gradient after it and its value."""
    match activation:
        case nn.ReLU():
            return torch.ops.aten.threshold_backward(gradient, value, 0)  # type: ignore[no-any-return]
        case nn.Tanh():
            return gradient * (1.0 - value * value)
        case nn.Sigmoid():
            return gradient * value * (1.0 - value)
    return gradient
