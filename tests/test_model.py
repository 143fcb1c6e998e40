import pytest
import torch
from torch import nn

from coterie.errors import ModelError
from coterie.model import Layout, Model, loss_per_example
from tiny import labels, numbers


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_a_vector_holds_parameters_then_float_buffers_and_no_counters():
    module = normalised()
    layout = Layout.of(module)
    assert [piece.name for piece in layout.parameters] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias",
    ]  # fmt: skip
    assert [piece.name for piece in layout.buffers] == ["1.running_mean", "1.running_var"]
    assert layout.num_parameters == 12 + 4 + 4 + 4 + 8 + 2
    assert layout.size == layout.num_parameters + 8
    vector = layout.flatten(module)
    for piece in layout.pieces:
        assert torch.equal(piece.of(vector), module.state_dict()[piece.name])


def test_pieces_of_a_matrix_are_views_row_by_row():
    piece = Layout.of(nn.Linear(3, 2)).parameters[0]
    theta = numbers(5, 8)
    assert torch.equal(piece.of(theta)[3], piece.of(theta[3]))
    piece.of(theta)[3, 1, 2] = 7.0
    assert theta[3, 5] == 7.0


def test_a_given_module_is_the_first_initial_model_and_stays_as_it_is():
    module = normalised()
    before = Layout.of(module).flatten(module)
    model = Model(module)
    assert torch.equal(model.initial(0), before)
    assert torch.equal(model.initial(1), before)
    drawn = model.initial(0, 1)
    assert not torch.equal(drawn, before)
    assert torch.equal(model.initial(0, 1), drawn)
    assert not torch.equal(model.initial(0, 2), drawn)
    assert not torch.equal(model.initial(1, 1), drawn)
    assert torch.equal(Layout.of(module).flatten(module), before)


def test_a_function_that_makes_modules_is_drawn_by_seed_and_number():
    model = Model(normalised)
    drawn = [model.initial(0), model.initial(0, 1), model.initial(1)]
    assert torch.equal(drawn[0], Model(normalised).initial(0))
    assert len({tuple(vector.tolist()) for vector in drawn}) == 3


def test_making_initial_models_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    Model(normalised).initial(3)
    Model(normalised()).initial(3, 1)
    module_draws = not torch.equal(torch.get_rng_state(), before)  # normalised() itself draws, in the caller's name
    assert module_draws
    torch.set_rng_state(before)
    Model(normalised).initial(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_that_cannot_be_drawn_anew_is_named():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    model = Model(nn.Sequential(nn.Linear(3, 3), Scale()))
    assert model.initial(0).shape == (15,)
    with pytest.raises(ModelError, match=r"layer 1 has weights but no reset_parameters.*function that makes"):
        model.initial(0, 1)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ModelError, match="requires a gradient"):
        Model(nn.Flatten())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (3, r"model: got 3; allowed: an nn\.Module, or a function without arguments that makes one"),
        (lambda: None, r"model: got None; allowed: an nn\.Module"),
        (nn.Linear, r"model: it cannot be built: .*missing 2 required positional arguments.*; allowed: an nn\.Module"),
        (lambda: nn.Linear(2**63, 1), r"model: it cannot be built: .*Make it smaller"),
    ],
)
def test_what_is_no_model_is_refused(module, message):
    with pytest.raises(ModelError, match=message):
        Model(module)
    Model(lambda: nn.Linear(3, 1))


@pytest.mark.parametrize("outputs", [1, 3])
def test_floating_labels_are_named_as_the_cause(outputs):
    model, x = Model(nn.Linear(3, outputs), "mse"), numbers(4, 3)
    with pytest.raises(ModelError, match=rf"is \({outputs},\).*whole numbers if they are labels.*or y of the shape"):
        model.check_fits(x, numbers(4), None)
    model.check_fits(x, numbers(4, outputs), None)
    Model(nn.Linear(3, outputs)).check_fits(x, labels(4, classes=outputs), outputs)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(3, 4), r"output for one example is \(4,\); the labels need \(2,\)"),
        (nn.Linear(5, 2), r"cannot take the data: examples have shape \(3,\)"),
        (nn.GRU(3, 2), "output for one example is tuple"),
    ],
)
def test_a_model_that_does_not_fit_the_labels_is_refused(module, message):
    with pytest.raises(ModelError, match=message):
        Model(module).check_fits(numbers(4, 3), labels(4, classes=2), num_classes=2)
    Model(nn.Linear(3, 2)).check_fits(numbers(4, 3), labels(4, classes=2), num_classes=2)


def test_a_regressor_must_answer_the_shape_of_its_targets():
    Model(nn.Linear(3, 2), "mse").check_fits(numbers(4, 3), numbers(4, 2), None)
    with pytest.raises(ModelError, match=r"is \(1,\); the labels need \(2,\)"):
        Model(nn.Linear(3, 1), "mse").check_fits(numbers(4, 3), numbers(4, 2), None)


def test_losses_by_hand():
    outputs, targets = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert loss_per_example("mse", outputs, targets).tolist() == [2.0, 4.5]
    even = loss_per_example("cross_entropy", torch.zeros(2, 4), torch.tensor([0, 3]))
    torch.testing.assert_close(even, torch.full((2,), 4.0).log())
