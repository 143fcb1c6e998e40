"""What all reference networks have in common."""

from abc import abstractmethod

from torch import nn

from coterie.options import Options


class ModelOptions(Options):
    """What all networks have in common."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A fresh module for examples of this shape."""
