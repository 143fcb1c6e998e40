"""What all reference networks have in common."""

import math
from abc import abstractmethod
from collections.abc import Callable

from torch import nn

from coterie.federation import Federation
from coterie.options import Options


class ModelOptions(Options):
    """What all networks have in common."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A fresh module for examples of this shape."""

    def maker(self, federation: Federation) -> Callable[[], nn.Module]:
        """A function that makes fresh modules for the clients of a federation."""
        outputs = federation.num_classes or math.prod(federation.train.y.shape[2:])
        return lambda: self.build(federation.input_shape, outputs)
