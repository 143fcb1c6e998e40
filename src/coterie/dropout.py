"""Dropout as a function of a key, so that a client drops the same units on every kernel and every fleet."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.errors import ModelError
from coterie.randomness import fold, uniform

_WHOLE_CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d)


class KeyedDropout(TorchFunctionMode):
    """While entered, functional dropout draws its masks from a client's key and the step of its training."""

    def __init__(self, key: Tensor, step: int) -> None:
        super().__init__()
        self._key = key
        self._step = step
        self._calls = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.dropout or function in _WHOLE_CHANNELS:
            return self._dropout(function in _WHOLE_CHANNELS, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return torch.zeros_like(input)
        self._calls += 1
        key = fold(fold(self._key, self._step), self._calls)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if channels else input.shape
        kept = uniform(key, shape.numel() if isinstance(shape, torch.Size) else shape[0] * shape[1]).reshape(shape) >= p
        return input * kept / (1.0 - p)


class RefuseOtherDraws(TorchDispatchMode):
    """While entered, anything that draws from torch's own generators is refused; keyed dropout does not."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise ModelError(
                f"model: its forward pass draws random numbers by {function.name()}; allowed: dropout, dropout1d, "
                "dropout2d and dropout3d of torch.nn, which are made reproducible. Replace the other draws."
            )
        return function(*args, **(kwargs or {}))
