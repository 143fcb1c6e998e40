"""Stacks of linear layers: batched products and explicit gradients, in place, in blocks that fit the cache.

Where a client has few examples x_i of many features, the first layer is moved in their coordinates: every step of
gradient descent adds multiples of examples to its weights, so that W = W_0 + sum_i a_i x_i^T for some a_i [out], and
W x_k = W_0 x_k + sum_i a_i <x_i, x_k>. With the inner products computed once, a step costs n instead of 2 d products
per unit and example, and the descent is the same but for rounding.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.kernels.base import Accumulate, Batch, Kernel, Precision, Shortened
from coterie.model import Layout, Model, Piece

CACHE = 5 << 20  # bytes of parameters that train side by side: fewer pay more for each call, more leave the cache
SPARSE_BELOW = 1 / 20  # share of published models a client mixes, below which a sparse product is faster


def _relu_slope(gradient: Tensor, value: Tensor) -> Tensor:
    slope: Tensor = torch.ops.aten.threshold_backward.grad_input(gradient, value, 0, grad_input=gradient)
    return slope


# What may follow a linear layer: the function in place, and the gradient before it from that after it and its value.
ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (Tensor.relu_, _relu_slope),
    nn.Tanh: (Tensor.tanh_, lambda gradient, value: gradient * (1.0 - value * value)),
    nn.Sigmoid: (Tensor.sigmoid_, lambda gradient, value: gradient * value * (1.0 - value)),
    nn.Identity: (lambda value: value, lambda gradient, value: gradient),
}


@dataclass(frozen=True)
class _Linear:
    weight: Piece  # [out, in]
    bias: Piece | None  # [out]
    activation: type[nn.Module] = nn.Identity  # what follows it


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
                layers.append(_Linear(pieces[f"{prefix}weight"], pieces.get(f"{prefix}bias")))
            elif type(part) in ACTIVATIONS and not isinstance(part, nn.Identity):
                layers[-1] = replace(layers[-1], activation=type(part))
        self._layers = layers
        self._units: dict[torch.device, Tensor] = {}
        self.cache_block = max(1, min(64, CACHE // (4 * self.layout.size)))

    @staticmethod
    def accepts(model: Model, example_axes: int = 1) -> bool:
        """[Flatten], then Linear layers with at most one of the known activations after each, none after the last."""
        kinds = [part for _, part in _parts(model.module) if not isinstance(part, nn.Identity)]
        if kinds and type(kinds[0]) is nn.Flatten and kinds[0].start_dim == 1 and kinds[0].end_dim == -1:
            kinds, example_axes = kinds[1:], 1
        known = all(type(part) is nn.Linear or type(part) in ACTIVATIONS for part in kinds)
        linear = [type(part) is nn.Linear for part in kinds]
        alternate = all(a or b for a, b in itertools.pairwise(linear))
        names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
        shared = len(names) != len(model.layout.parameters)
        return example_axes == 1 and known and alternate and bool(linear) and linear[0] and linear[-1] and not shared

    def bind(self, theta: Tensor, into: Tensor) -> Accumulate:
        alone = len(theta) == 1  # then without the clients' axis: plain products have less overhead
        product, affine = (torch.mm, torch.addmm) if alone else (torch.bmm, torch.baddbmm)
        add_product, add_sum = (Tensor.addmm_, _add_sum_of_rows) if alone else (Tensor.baddbmm_, Tensor.baddbmm_)
        weights, biases = self._views(theta, alone)
        functions = [ACTIVATIONS[layer.activation] for layer in self._layers]
        hidden = list(zip([w.mT for w in weights[:-1]], [b if b is None else b.mT for b in biases[:-1]], functions))
        entry = self._entry(theta, into)
        lowest = (None, None) if entry is None else (weights[0], entry.function)
        targets = list(zip(*self._views(into, alone), [lowest[0], *weights[1:]], [lowest[1], *functions[:-1]]))[::-1]

        @torch.inference_mode()
        def accumulate(batch: Batch, keep: float, times: float) -> None:
            values = [batch.x.flatten(2)[0] if alone else batch.x.flatten(2)]  # [C, b, width] of each layer
            if entry is not None:
                values = [entry.forward(values[0])]
            for weight, bias, (activate, _) in hidden:
                value = product(values[-1], weight) if bias is None else affine(bias, values[-1], weight)
                values.append(activate(value))
            weight, bias = weights[-1], biases[-1]  # the outputs stand upright, [C, out, b]: a faster softmax
            outputs = product(weight, values[-1].mT) if bias is None else affine(bias, weight, values[-1].mT)
            delta = self._output_gradient(outputs, batch)
            step = times / batch.length[0] if batch.full else times
            ones = delta.new_ones(*delta.shape[:-2], delta.shape[-1], 1)
            for weight_into, bias_into, upper, function in targets:
                value = values.pop()
                below = None if upper is None else product(delta.mT, upper)  # before the weight moves
                add_product(weight_into, delta, value, beta=keep, alpha=step)
                if bias_into is not None:
                    add_sum(bias_into, delta, ones, beta=keep, alpha=step)
                if below is not None and function is not None:
                    delta = function[1](below, value).mT
            if entry is not None:
                entry.backward(delta, batch, keep, step)

        return accumulate

    def shortened(self, start: Tensor, x: Tensor, rows: Tensor, epochs: int) -> Shortened | None:
        """In the coordinates of the examples, where that is less work; a single layer is left as it is."""
        examples, (out, features) = x.shape[1], self._layers[0].weight.shape
        as_it_is = 2 * epochs * out * features  # products an example: forward and backward
        if len(self._layers) == 1 or examples * (features + epochs * out) + 2 * out * features > as_it_is:
            return None
        return _by_examples(self, start, x[rows].flatten(2))

    def _entry(self, theta: Tensor, into: Tensor) -> "_Entry | None":
        """What stands between the examples and the first of the layers: nothing."""
        return None

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
            right = self._unit_vectors(outputs).index_select(0, batch.y.view(-1))
            if outputs.dim() == 3:
                right = right.view(*batch.y.shape, -1)
            gradient = torch.softmax(outputs, dim=-2).sub_(right.mT)
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
            signal = ACTIVATIONS[layer.activation][0](signal)
        return signal.float()

    @torch.inference_mode()
    def losses(self, models: Tensor, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """One model after another, where it lies, in hidden layers that stay in the cache: gathering the published
        weights first would cost a third of the speed."""
        rooms = [x.new_empty(len(x), layer.weight.shape[0]) for layer in self._layers[:-1]]
        weights = [layer.weight.of(models) for layer in self._layers]
        biases = [None if layer.bias is None else layer.bias.of(models) for layer in self._layers]
        activations = [ACTIVATIONS[layer.activation][0] for layer in self._layers]
        outputs = x.new_empty(len(rows), weights[-1].shape[1], len(x))  # upright
        for row, out in zip(rows.tolist(), outputs):
            signal = x.flatten(1)
            for weight, bias, activate, room in zip(weights, biases, activations, rooms):  # all but the last
                signal = torch.mm(signal, weight[row].mT, out=room)
                signal = activate(signal if bias is None else signal.add_(bias[row]))
            torch.mm(weights[-1][row], signal.mT, out=out)
        outputs = outputs.float()
        if biases[-1] is not None:
            outputs += biases[-1][rows, :, None]
        if self.model.loss == "mse":
            return (outputs - y.flatten(1).T).square().mean(1)
        return -outputs.log_softmax(1).gather(1, y.expand(len(rows), 1, -1))[:, 0]

    @torch.no_grad()
    def mix(self, models: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Dense products where clients mix a fair share of what is published, else sums over their rows."""
        if rows.shape[1] < SPARSE_BELOW * len(models):
            return F.embedding_bag(rows, models, mode="sum", per_sample_weights=weights)
        share = weights.new_zeros(len(rows), len(models)).scatter_add_(1, rows, weights)
        mixed: Tensor = share @ models
        return mixed


@dataclass(frozen=True)
class _Entry:
    """A first layer in the coordinates of the examples, with its activation."""

    theta: Tensor  # [C, n, out], contiguous rows of a larger matrix: the a_i
    into: Tensor  # [rows, out]: the same of `into` among everything else, seen as rows of this width
    function: tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        """x [C, b, n + out]: an example's inner products with all, then W_0 x."""
        inner, begin = x.split([self.theta.shape[1], self.theta.shape[2]], dim=-1)
        alone = x.dim() == 2
        affine = torch.addmm if alone else torch.baddbmm
        return self.function[0](affine(begin, inner, self.theta[0] if alone else self.theta))

    def backward(self, delta: Tensor, batch: Batch, keep: float, step: float) -> None:
        """The gradient by a_i is delta of example i; delta: [C, out, b]."""
        clients, examples, out = self.theta.shape
        if keep != 1.0:
            self.into.view(clients, -1, out)[:, :examples].mul_(keep)
        first = torch.arange(clients, device=delta.device)[:, None] * (len(self.into) // clients)
        self.into.index_add_(0, (batch.places + first).view(-1), delta.mT.reshape(-1, out), alpha=step)


class _ByExamples(BatchedKernel):
    """The descent of another batched kernel with the first layer in the coordinates of `examples` examples. A row of
    its theta holds those, then the other layers, then what makes it a multiple of the first layer's width."""

    def __init__(self, whole: BatchedKernel, examples: int) -> None:
        first, *others = whole._layers
        self._examples, self._first = examples, first
        self.model, self._units, self._own = whole.model, whole._units, whole._own
        width = first.weight.shape[0]
        moved = examples * width - others[0].weight.begin
        self._layers = [
            replace(layer, weight=_moved(layer.weight, moved), bias=layer.bias and _moved(layer.bias, moved))
            for layer in others
        ]
        size = -(-(whole.layout.size + moved) // width) * width
        self.layout = Layout((Piece("by examples", torch.Size([size]), 0, size),), ())

    def _entry(self, theta: Tensor, into: Tensor) -> _Entry:
        width = self._first.weight.shape[0]
        own = theta.view(len(theta), -1, width)[:, : self._examples]
        return _Entry(own, into.view(-1, width), ACTIVATIONS[self._first.activation])


def _by_examples(whole: BatchedKernel, start: Tensor, x: Tensor) -> Shortened:
    """x: [C, n, features]. The bias counts as the weight of one more feature that is always 1."""
    kernel = _ByExamples(whole, x.shape[1])
    first, begin = whole._layers[0], whole._layers[1].weight.begin
    others = slice(kernel._layers[0].weight.begin, kernel._layers[0].weight.begin + whole.layout.size - begin)
    theta = start.new_zeros(len(start), kernel.layout.size)
    theta[:, others] = start[:, begin:]
    inner, at_start = x @ x.mT, x @ first.weight.of(start).mT
    if first.bias is not None:
        inner += 1.0
        at_start += first.bias.of(start)[:, None]

    def expand(moved: Tensor, models: Tensor) -> None:
        coordinates = moved.view(len(moved), -1, first.weight.shape[0])[:, : x.shape[1]]
        models.copy_(start)
        models[:, begin:] = moved[:, others]
        first.weight.of(models).baddbmm_(coordinates.mT, x)
        if first.bias is not None:
            first.bias.of(models).add_(coordinates.sum(1))

    return Shortened(kernel, theta, torch.cat([inner, at_start], dim=2), expand)


def _moved(piece: Piece, by: int) -> Piece:
    return replace(piece, begin=piece.begin + by, end=piece.end + by)


def _add_sum_of_rows(target: Tensor, delta: Tensor, ones: Tensor, *, beta: float, alpha: float) -> None:
    """target [out, 1] <- beta target + alpha (delta [out, b] times ones [b, 1]); a product with a vector is faster."""
    target[:, 0].addmv_(delta, ones[:, 0], beta=beta, alpha=alpha)
