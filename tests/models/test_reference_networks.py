import math

import pytest
import torch
from torch import nn

from coterie.errors import ModelError
from coterie.kernels import BatchedKernel
from coterie.model import Model
from coterie.models import CNN, MLP, MODELS, CifarCNN, Linear, ResNet9
from coterie.models.parts import normalising
from tiny import numbers

SMALL = [
    Linear(), MLP(hidden=[7, 5]), CNN(channels=[3, 4], hidden=6), ResNet9(width=2),
    ResNet9(width=3, normalisation="group"),
]  # fmt: skip


@pytest.mark.parametrize("options", SMALL)
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


def test_resnet9_is_that_of_the_papers_program_to_the_last_number():
    module = ResNet9().build((3, 32, 32), 100)
    assert sum(parameter.numel() for parameter in module.parameters()) == 6_621_540
    assert sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point()) == 4480
    assert [part.p for part in module.modules() if isinstance(part, nn.Dropout)] == [0.2]


def test_the_last_pooling_of_resnet9_is_of_the_whole_image_and_its_residuals_add_to_what_goes_in():
    module = ResNet9(width=2, dropout=0.0, normalisation="group").build((1, 16, 24), 3).eval()
    features = {}
    for place, part in enumerate(module):
        part.register_forward_hook(
            lambda part, given, answer, place=place: features.update({place: (given[0], answer)})
        )
    module(numbers(2, 1, 16, 24))
    residuals = [place for place, part in enumerate(module) if type(part).__name__ == "Residual"]
    for place in residuals:
        given, answer = features[place]
        inner = answer - given
        assert (inner >= -1e-6).all()  # a ReLU ends it
        assert inner.max() > 0.1
    assert features[residuals[1] + 1][0].shape == (2, 16, 2, 3)
    assert torch.equal(features[residuals[1] + 1][1].flatten(1), features[residuals[1]][1].amax((2, 3)))


@pytest.mark.parametrize("shape", [(3, 7, 32), (12,)])
def test_resnet9_refuses_what_it_cannot_pool(shape):
    with pytest.raises(ModelError, match=r"at least 8 pixels a side; examples are \("):
        ResNet9(width=2).build(shape, 5)


def kinds(module: nn.Module) -> list[str]:
    return [type(part).__name__ for part in module.modules() if "Norm" in type(part).__name__]


def test_normalisation_follows_every_convolution_or_none():
    assert kinds(CNN().build((1, 8, 8), 3)) == []
    assert kinds(CNN(normalisation="batch").build((1, 8, 8), 3)) == ["BatchNorm2d"] * 2
    assert kinds(CNN(normalisation="group").build((1, 8, 8), 3)) == ["GroupNorm"] * 2
    assert kinds(ResNet9(width=2).build((1, 8, 8), 3)) == ["BatchNorm2d"] * 8
    assert kinds(ResNet9(width=2, normalisation="group").build((1, 8, 8), 3)) == ["GroupNorm"] * 8
    with pytest.raises(ValueError, match="normalisation"):
        ResNet9(normalisation="none")


@pytest.mark.parametrize(("channels", "groups"), [(512, 32), (128, 32), (64, 16), (16, 4), (18, 2), (3, 1), (7, 1)])
def test_groups_are_of_four_channels_at_least_if_they_divide_them(channels, groups):
    (layer,) = normalising("group", channels)
    assert (layer.num_groups, layer.num_channels) == (groups, channels)


@pytest.mark.parametrize("options", [CNN(channels=[3, 4], hidden=6), ResNet9(width=2, dropout=0.0)])
def test_only_batch_normalisation_lets_examples_of_a_batch_touch_each_other(options):
    x = numbers(4, 1, 8, 8)
    for normalisation, alone in (("group", True), ("batch", False)):
        module = options.model_copy(update={"normalisation": normalisation}).build((1, 8, 8), 3).train()
        together, single = module(x)[:2], module(x[:2])
        assert torch.allclose(together, single, atol=1e-5) == alone


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
