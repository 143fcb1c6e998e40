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
    named = zip(module._modules, module, strict=True)  # named_children() would leave out a module used twice
    return [part for name, child in named for part in _parts(child, f"{prefix}{name}.")]


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
        self._units: dict[torch.device, Tensor] = {}
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

    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        alone = len(theta) == 1  # then without the clients' axis: plain products have less overhead
        weights, biases = self._views(theta, alone)
        weights_into, biases_into = self._views(into, alone)
        product, affine = (torch.mm, torch.addmm) if alone else (torch.bmm, torch.baddbmm)
        add_product, add_sum = (Tensor.addmm_, _add_sum_of_rows) if alone else (Tensor.baddbmm_, Tensor.baddbmm_)
        last = len(weights) - 1

        @torch.inference_mode()
        def accumulate(batch: Batch, keep: float, times: float) -> None:
            values = [batch.x[0].flatten(1) if alone else batch.x.flatten(2)]  # [C, b, width] of each layer
            for layer, weight, bias in zip(self._layers[:-1], weights[:-1], biases[:-1], strict=True):
                signal = product(values[-1], weight.mT) if bias is None else affine(bias.mT, values[-1], weight.mT)
                values.append(_activate(layer.activation, signal))
            weight, bias = weights[-1], biases[-1]  # the outputs stand upright, [C, out, b]: a faster softmax
            outputs = product(weight, values[-1].mT) if bias is None else affine(bias, weight, values[-1].mT)
            delta = self._output_gradient(outputs, batch)
            step = times / batch.length[0] if batch.full else times
            ones = delta.new_ones(*delta.shape[:-2], delta.shape[-1], 1)
            for at in range(last, -1, -1):
                below = product(delta.mT, weights[at]) if at else None  # before the weight moves
                add_product(weights_into[at], delta, values[at], beta=keep, alpha=step)
                if (target := biases_into[at]) is not None:
                    add_sum(target, delta, ones, beta=keep, alpha=step)
                if below is not None:
                    delta = _slope(self._layers[at - 1].activation, below, values[at]).mT

        return accumulate

    def _views(self, theta: Tensor, alone: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        """The layers' weights [C, out, in] and biases [C, out, 1], or without C for one client alone."""
        theta = theta[0] if alone else theta
        biases = [None if layer.bias is None else layer.bias.of(theta)[..., None] for layer in self._layers]
        return [layer.weight.of(theta) for layer in self._layers], biases

    def _output_gradient(self, outputs: Tensor, batch: Batch) -> Tensor:
        """By the outputs [C, out, b]: the gradient of the mean loss, times b if the batch is full; zero in padding."""
        if self.model.loss == "mse":
            gradient = (outputs - batch.y.flatten(2).mT.reshape(outputs.shape)) * (2.0 / outputs.shape[-2])
        else:
            right = self._unit_vectors(outputs).index_select(0, batch.y.view(-1)).view(*batch.y.shape, -1)
            gradient = torch.softmax(outputs, dim=-2).sub_(right.mT.reshape(outputs.shape))
        if not batch.full:
            length = torch.tensor(batch.length, device=outputs.device)[:, None, None]
            gradient *= (torch.arange(outputs.shape[-1], device=outputs.device) < length) / length
        return gradient

    def _unit_vectors(self, outputs: Tensor) -> Tensor:
        """[out, out]: row k is 1 at k."""
        if outputs.device not in self._units:
            self._units[outputs.device] = torch.eye(outputs.shape[-2], device=outputs.device)
        return self._units[outputs.device]

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


def _add_sum_of_rows(target: Tensor, delta: Tensor, ones: Tensor, *, beta: float, alpha: float) -> None:
    """target [out, 1] <- beta target + alpha (delta [out, b] times ones [b, 1]); a product with a vector is faster."""
    target[:, 0].addmv_(delta, ones[:, 0], beta=beta, alpha=alpha)


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
