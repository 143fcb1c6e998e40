"""Reference networks, and the table of their names."""

import itertools
import math
from typing import Literal

from pydantic import Field
from torch import nn

from coterie.errors import ModelError
from coterie.models.base import ModelOptions
from coterie.models.lora import Lora
from coterie.models.parts import Normalisation, Width, normalising
from coterie.models.resnet import ResNet9


class Linear(ModelOptions):
    """A linear map of the flattened example: softmax regression."""

    name: Literal["linear"] = "linear"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


class MLP(ModelOptions):
    """Fully connected layers with ReLU between; the papers' network for MNIST is hidden = [200]."""

    name: Literal["mlp"] = "mlp"
    hidden: list[Width] = Field([200], min_length=1)
    """widths of the hidden layers"""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        widths = [math.prod(shape), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


class CNN(ModelOptions):
    """Convolutions of 5 x 5 with ReLU and max-pooling by 2 after each, then one hidden dense layer."""

    name: Literal["cnn"] = "cnn"
    channels: list[Width] = Field([16, 32], min_length=1)
    """output channels of the convolutions"""
    hidden: Width = 128
    """width of the dense layer"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """share of the dense layer's units dropped in training"""
    normalisation: Normalisation = "none"
    """after each convolution: none, batch or group"""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) != 3 or min(shape[1:]) < 2 ** len(self.channels):
            raise ModelError(
                f"model: a cnn with {len(self.channels)} poolings takes images of shape (channels, height, width) of "
                f"at least {2 ** len(self.channels)} pixels a side; examples are {shape}. Use mlp or fewer channels."
            )
        layers: list[nn.Module] = []
        for before, after in zip((shape[0], *self.channels[:-1]), self.channels, strict=True):
            normalise = normalising(self.normalisation, after)
            layers += [nn.Conv2d(before, after, 5, padding=2), *normalise, nn.ReLU(), nn.MaxPool2d(2)]
        side = [length // 2 ** len(self.channels) for length in shape[1:]]
        dense = nn.Linear(self.channels[-1] * side[0] * side[1], self.hidden)
        ending = [nn.Dropout(self.dropout)] if self.dropout else []
        return nn.Sequential(*layers, nn.Flatten(), dense, nn.ReLU(), *ending, nn.Linear(self.hidden, outputs))


class CifarCNN(ModelOptions):
    """Two convolutions of 5 x 5 with max-pooling of 3 x 3 by 2 and local response normalisation, then three linear
    layers with nothing between: the network of IFCA's experiments, as the authors of FedCB²O wrote it down for the
    CIFAR-10 runs of fedcbo-slides-2024.txt; the dense part has 2304-384-192 inputs on 32 x 32 pixels."""

    name: Literal["cifar-cnn"] = "cifar-cnn"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) != 3 or min(shape[1:]) < 12:
            allowed = "images of shape (channels, height, width) of at least 12 pixels a side"
            raise ModelError(f"model: a cifar-cnn takes {allowed}; examples are {shape}. Use mlp or cnn.")

        def normalise() -> nn.Module:
            return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75)

        first = [nn.Conv2d(shape[0], 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2), normalise()]
        second = [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), normalise(), nn.MaxPool2d(3, 2)]
        height, width = (((side - 4 - 1) // 2 - 1) // 2 for side in shape[1:])
        dense = [nn.Linear(64 * height * width, 384), nn.Linear(384, 192), nn.Linear(192, outputs)]
        return nn.Sequential(*first, *second, nn.Flatten(), *dense)


MODELS: dict[str, type[ModelOptions]] = {
    "linear": Linear,
    "mlp": MLP,
    "cnn": CNN,
    "cifar-cnn": CifarCNN,
    "resnet9": ResNet9,
    "lora": Lora,
}
