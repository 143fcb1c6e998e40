"""ResNet-9, the residual network of cobo-neurips2024.txt."""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.models.base import ModelOptions
from coterie.models.parts import Width, normalising

SMALLEST = 8  # pixels a side: three poolings


class ResNet9(ModelOptions):
    """Eight convolutions of 3 x 3, two pairs of them with a way around them, and one linear layer; 6,621,540 parameters
    for colour images and 100 classes. The last pooling is of the whole image: 4 x 4 of 32 x 32 pixels, as in the
    paper's program."""

    name: Literal["resnet9"] = "resnet9"
    width: Width = 64
    """channels of the first convolution; later ones have 2, 4 and 8 times as many"""
    normalisation: Literal["batch", "group"] = "batch"
    """after each convolution; group normalisation has no statistics that clients could disagree about"""
    dropout: float = Field(0.2, ge=0, lt=1)
    """share of the units before the linear layer dropped in training"""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) != 3 or min(shape[1:]) < SMALLEST:
            allowed = f"images of shape (channels, height, width) of at least {SMALLEST} pixels a side"
            raise ModelError(f"model: a resnet9 takes {allowed}; examples are {shape}. Use mlp or cnn.")
        w = self.width
        return nn.Sequential(
            *self._block(shape[0], w),
            *self._block(w, 2 * w, pool=True),
            Residual(*self._block(2 * w, 2 * w), *self._block(2 * w, 2 * w)),
            *self._block(2 * w, 4 * w, pool=True),
            *self._block(4 * w, 8 * w, pool=True),
            Residual(*self._block(8 * w, 8 * w), *self._block(8 * w, 8 * w)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            nn.Linear(8 * w, outputs),
        )

    def _block(self, before: int, after: int, pool: bool = False) -> list[nn.Module]:
        layers = [nn.Conv2d(before, after, 3, padding=1), *normalising(self.normalisation, after), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)] if pool else layers


class Residual(nn.Sequential):
    """x + layers(x)."""

    def forward(self, x: Tensor) -> Tensor:
        deeper: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + deeper
