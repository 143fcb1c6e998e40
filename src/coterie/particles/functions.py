"""A user's function made fit for many points: torch or NumPy in batches, or one point at a time."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError, DataError, explain

Takes = Literal["torch", "numpy", "point"]  # [n, d] -> [n] of torch or NumPy, or [d] -> number
Function = Callable[[Any], Any]


class Objective:
    """A function of points [n, d] with values [n], however the user wrote it. Counts the points it was asked about."""

    def __init__(
        self, function: Function, name: str = "f", takes: Takes | None = None, gradient: Function | None = None
    ) -> None:
        if not callable(function):
            raise ConfigError(explain(name, function, "a function of points"))
        if takes is not None and takes not in get_args(Takes):
            raise ConfigError(explain("takes", takes, ", ".join(get_args(Takes))))
        self.function, self.name, self.takes, self.by_hand = function, name, takes, gradient
        self.asked = 0

    def values(self, points: Tensor) -> Tensor:
        """[n] values at the points [n, d], of their type and on their device."""
        return self._attached(points).detach()

    def _attached(self, points: Tensor) -> Tensor:
        """The values with what torch knows of how they came about."""
        self.takes = self.takes or self._recognised(points)
        try:
            return self._called(self.takes, points)
        except DataError:
            raise
        except Exception as error:  # whatever a user's function may raise
            raise DataError(f"{self.name} raised {type(error).__name__}: {error}") from error

    def gradients(self, points: Tensor) -> Tensor:
        """[n, d] gradients, by `gradient` if the user gave one, else by torch's automatic differentiation."""
        if self.by_hand is not None:
            return self._gradients_by_hand(self.by_hand, points)
        self.takes = self.takes or self._recognised(points)
        if self.takes != "torch":
            do = "Write the function with torch, or give its gradient."
            raise ConfigError(explain(f"gradient of {self.name}", None, "a function of points [n, d]", do))
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            total = self._attached(points).sum()
        return torch.autograd.grad(total, points)[0]

    def _gradients_by_hand(self, gradient: Function, points: Tensor) -> Tensor:
        given = points if self.takes == "torch" else points.cpu().numpy()
        found = torch.as_tensor(gradient(given), dtype=points.dtype, device=points.device)
        if found.shape != points.shape:
            raise DataError(explain(f"gradient of {self.name}, shape", tuple(found.shape), str(tuple(points.shape))))
        return found

    def _called(self, takes: Takes, points: Tensor) -> Tensor:
        self.asked += points.shape[0]
        if takes == "torch":
            return self._checked(self.function(points), points)
        array = points.detach().cpu().numpy()
        array.flags.writeable = False  # it is the particles' own memory
        if takes == "numpy":
            return self._checked(self.function(array), points)
        found = [self.function(point) for point in array]
        sizes = {np.size(value) for value in found}
        if sizes != {1}:
            raise DataError(explain(f"{self.name}, size of its value at one point", max(sizes), "a single number"))
        return self._checked(np.array([np.reshape(value, ()) for value in found], dtype=np.float64), points)

    def _checked(self, found: Any, points: Tensor) -> Tensor:
        """As a tensor of the points' type, if there is one real number for each."""
        values = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found))
        if values.shape != points.shape[:1]:
            do = f"It was called with points of shape {tuple(points.shape)}."
            raise DataError(explain(f"{self.name}, shape of its values", tuple(values.shape), f"({len(points)},)", do))
        if values.is_complex():
            raise DataError(explain(f"{self.name}, type of its values", str(values.dtype), "real numbers"))
        return values.to(points)

    def _recognised(self, points: Tensor) -> Takes:
        """The first way to call the function that gives a number for each of a few points.

        There are not as many points as dimensions, lest the one be taken for the other.
        """
        few = points[:2] if points.shape[1] != 2 else points[:1].expand(3, 2).contiguous()
        few = few if len(few) > 1 else few.expand(2, -1).contiguous()
        complaints = []
        for takes in get_args(Takes):
            try:
                self._called(takes, few)
            except Exception as error:  # it takes its points in another way, or not at all
                complaints.append(f"{takes}: {type(error).__name__}: {error}")
            else:
                return takes  # type: ignore[no-any-return]
        allowed = "a function of points [n, d], torch or NumPy, with values [n], or of one point [d]"
        raise DataError(f"{self.name} can be called in no way; allowed: {allowed}. " + " | ".join(complaints))
