import math

import pytest
import torch
from torch import nn

from coterie.errors import ModelError
from coterie.kernels import BatchedKernel
from coterie.model import Model
from coterie.models import CNN, MLP, MODELS, CifarCNN, Linear
from tiny import numbers


@pytest.mark.parametrize("options", [Linear(), MLP(hidden=[7, 5]), CNN(channels=[3, 4], hidden=6)])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 11, 9)])
def test_a_network_takes_examples_of_its_shape_and_answers_once_for_each_class(options, shape):
    assert MODELS[options.name] is type(options)
    assert options.build(shape, 5)(numbers(4, *shape)).shape == (4, 5)


def test_the_papers_network_for_mnist_has_two_layers_of_200_and_10():
    module = MLP(hidden=[200]).build((1, 28, 28), 10)
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    assert shapes == [(200, 784), (200,), (10, 200), (10,)]
    assert sum(math.prod(shape) for shape in shapes) == 159_010


def test_the_papers_network_for_emnist_has_six_and_a_half_million_parameters():
    module = CNN(channels=[32, 64], hidden=2048).build((1, 28, 28), 47)
    assert sum(parameter.numel() for parameter in module.parameters()) == 6_572_975


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 12, 17)])
def test_the_network_for_cifar_has_2304_features_before_its_dense_part_and_fits_other_images(shape):
    module = CifarCNN().build(shape, 5)
    assert module(numbers(2, *shape)).shape == (2, 5)
    widths = [part.in_features for part in module.modules() if isinstance(part, nn.Linear)]
    assert widths[1:] == [384, 192]
    assert (widths[0] == 2304) == (shape == (3, 32, 32))


@pytest.mark.parametrize("shape", [(3, 11, 32), (12,)])
def test_the_network_for_cifar_refuses_what_it_cannot_pool(shape):
    with pytest.raises(ModelError, match=r"at least 12 pixels a side; examples are \("):
        CifarCNN().build(shape, 5)


def test_networks_of_linear_layers_are_computed_by_the_batched_kernel():
    assert BatchedKernel.accepts(Model(Linear().build((1, 8, 8), 3)))
    assert BatchedKernel.accepts(Model(MLP(hidden=[4, 4]).build((1, 8, 8), 3)))
    assert not BatchedKernel.accepts(Model(CNN().build((1, 8, 8), 3)))


def test_dropout_is_there_only_when_asked_for():
    def dropouts(share: float) -> list[float]:
        parts = CNN(dropout=share).build((1, 8, 8), 3).modules()
        return [part.p for part in parts if isinstance(part, nn.Dropout)]

    assert dropouts(0.0) == []
    assert dropouts(0.25) == [0.25]


@pytest.mark.parametrize("shape", [(12,), (1, 3, 8), (8, 8)])
def test_a_cnn_refuses_examples_it_cannot_pool(shape):
    with pytest.raises(ModelError, match=r"2 poolings.*at least 4 pixels a side; examples are \(.*Use mlp"):
        CNN(channels=[2, 2]).build(shape, 3)
    assert CNN(channels=[2, 2]).build((1, 4, 4), 3)(torch.zeros(1, 1, 4, 4)).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [(MLP, "hidden", []), (MLP, "hidden", [0]), (MLP, "hidden", [-3]), (CNN, "channels", []), (CNN, "channels", [0]),
     (CNN, "hidden", 0), (CNN, "dropout", 1.0)],
)  # fmt: skip
def test_impossible_sizes_are_refused(options, field, value):
    with pytest.raises(ValueError, match=field):
        options(**{field: value})
