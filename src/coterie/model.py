"""A user's nn.Module seen as one vector, its parameters first and its float buffers after them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.dropout import KeyedDropout, RefuseOtherDraws
from coterie.errors import CoterieError, ModelError, explain
from coterie.randomness import derive

Loss = Literal["cross_entropy", "mse"]
_A_MODEL = "an nn.Module, or a function without arguments that makes one"
BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class Piece:
    """Where one tensor of a module lies in the vector."""

    name: str
    shape: torch.Size
    begin: int
    end: int

    def of(self, theta: Tensor) -> Tensor:
        """The view of this tensor in a vector or in each row of a matrix."""
        return theta[..., self.begin : self.end].view(*theta.shape[:-1], *self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of a module's tensors in the vector theta. Frozen parameters stay out: all clients have the same.
    So do integer buffers, which are counters, and buffers that a module does not save, which are constants."""

    parameters: tuple[Piece, ...]
    buffers: tuple[Piece, ...]

    @staticmethod
    def of(module: nn.Module) -> "Layout":
        """Parameters to be trained as the module names them, then its floating buffers."""
        position = 0
        groups: tuple[list[Piece], list[Piece]] = ([], [])
        saved = module.state_dict()
        floats: list[tuple[str, Tensor]] = [
            (name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point() and name in saved
        ]
        trained: list[tuple[str, Tensor]] = [
            (name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad
        ]
        for group, named in zip(groups, (trained, floats)):
            for name, tensor in named:
                group.append(Piece(name, tensor.shape, position, position + tensor.numel()))
                position += tensor.numel()
        return Layout(tuple(groups[0]), tuple(groups[1]))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.parameters + self.buffers

    @property
    def num_parameters(self) -> int:
        return self.parameters[-1].end

    @property
    def size(self) -> int:
        return self.pieces[-1].end

    def flatten(self, module: nn.Module) -> Tensor:
        """The vector of a module's present values, float32."""
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([values[piece.name].detach().reshape(-1).float() for piece in self.pieces])


class Model:
    """What every client computes: a module, its loss, and how its numbers lie in a vector.

    `module` is an nn.Module (its weights are the common start) or a function that makes one. A classifier answers
    [n, classes], or [n, vocabulary, T] to [n, T] tokens, and is trained by cross entropy; a regressor answers the shape
    of its targets, by mean squared error.
    """

    def __init__(self, module: nn.Module | Callable[[], nn.Module], loss: Loss = "cross_entropy") -> None:
        if not callable(module):
            raise ModelError(explain("model", module, _A_MODEL))
        self._make = None if isinstance(module, nn.Module) else module
        self.module = copy.deepcopy(module) if isinstance(module, nn.Module) else _seeded(module, 0)
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ModelError("model: none of its parameters requires a gradient; there is nothing to learn.")
        if any(isinstance(part, BATCH_STATISTICS) and part.momentum is None for part in self.module.modules()):
            raise ModelError(
                "model: got batch normalisation with momentum None, which counts batches over all clients; allowed: a "
                "number. Set its momentum, such as 0.1."
            )
        self.loss: Loss = loss
        self.layout = Layout.of(self.module)
        self.uses_batch_statistics = any(isinstance(part, BATCH_STATISTICS) for part in self.module.modules())

    def initial(self, seed: int, number: int = 0) -> Tensor:
        """The `number`-th initial model [P]. A module given as such is its own number 0; others are drawn anew."""
        if self._make is not None:
            return self.layout.flatten(_seeded(self._make, derive(seed, "initial model", number)))
        if number == 0:
            return self.layout.flatten(self.module)
        return self.layout.flatten(_seeded(lambda: _reset(self.module), derive(seed, "initial model", number)))

    def _check_draws(self, x: Tensor) -> None:
        """Refuse a training-mode forward pass that draws random numbers other than by dropout."""
        module = copy.deepcopy(self.module).train()
        for part in module.modules():
            if isinstance(part, BATCH_STATISTICS):
                part.eval()  # two examples may be too few for statistics
        with torch.no_grad(), KeyedDropout(torch.tensor(0), 0), RefuseOtherDraws():  # type: ignore[no-untyped-call]
            module(x)

    def check_fits(self, x: Tensor, y: Tensor, num_classes: int | None) -> None:
        """Refuse a model whose output does not fit the labels, before anything else is done."""
        module = copy.deepcopy(self.module).eval()
        try:
            with torch.no_grad():
                outputs = module(x)
        except Exception as error:
            raise ModelError(
                f"model: it cannot take the data: examples have shape {tuple(x.shape[1:])}, and it fails with: "
                f"{_in_short(error)}"
            ) from error
        self._check_draws(x)
        wanted = y.shape if num_classes is None else (len(x), num_classes, *y.shape[1:])
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) != tuple(wanted):
            got = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs).__name__
            do = "Change the size of its last layer."
            if isinstance(outputs, Tensor) and num_classes is None and y.dim() == 1:
                do = (
                    "Floating y are targets of a regression: give whole numbers if they are labels of classes, or y of "
                    "the shape that the model answers."
                )
            raise ModelError(f"model: its output for one example is {got}; the labels need {tuple(wanted[1:])}. {do}")


def _in_short(error: Exception) -> str:
    """Its first line: torch adds where in its C++ the error was met."""
    return str(error).partition("\n")[0]


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module as torch's own initialisers do from this seed, leaving the caller's generator alone."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make()
    except CoterieError:
        raise
    except Exception as error:  # a layer larger than the memory, or a class that wants arguments
        raise ModelError(
            f"model: it cannot be built: {_in_short(error)}; allowed: {_A_MODEL}. Make it smaller or mend it."
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(explain("model", module, _A_MODEL))
    return module


def _reset(module: nn.Module) -> nn.Module:
    """A copy with every layer's weights drawn anew; layers must know how (`reset_parameters`, as torch's do)."""
    fresh = copy.deepcopy(module)
    for name, part in fresh.named_modules():
        own = any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False))
        if own and not hasattr(part, "reset_parameters"):
            raise ModelError(
                f"model: layer {name or 'itself'} has weights but no reset_parameters(), so no further initial model "
                "can be drawn. Give a function that makes the module instead of the module."
            )
        if own:
            part.reset_parameters()
    return fresh


def loss_per_example(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """[n]: the loss of each example; further axes (pixels, tokens, outputs) are averaged."""
    if loss == "mse":
        return F.mse_loss(outputs, targets, reduction="none").reshape(len(outputs), -1).mean(1)
    # classes last: where that is how a language model computed them, several times faster
    values = F.cross_entropy(outputs.movedim(1, -1).flatten(0, -2), targets.flatten(), reduction="none")
    return values.reshape(len(outputs), -1).mean(1)
