import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.descent import Train
from coterie.dropout import KeyedDropout
from coterie.errors import ModelError
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.randomness import Moment, fold, uniform
from tiny import CLASSES, FEATURES, START, clients_of, federation, furthest, numbers, starts

KEY, STEP = torch.tensor(12345), 3
OPTIONS = Train(epochs=2, batch_size=3)


def test_a_mask_is_a_function_of_the_key_and_the_call():
    with KeyedDropout(KEY, STEP):
        first, second = (F.dropout(torch.ones(4, 5), 0.25) for _ in range(2))
    with KeyedDropout(KEY, STEP):
        again = F.dropout(torch.ones(4, 5), 0.25)
    with KeyedDropout(KEY + 1, STEP):
        other_client = F.dropout(torch.ones(4, 5), 0.25)
    with KeyedDropout(KEY, STEP + 1):
        other_step = F.dropout(torch.ones(4, 5), 0.25)
    kept = uniform(fold(fold(KEY, torch.tensor(STEP)), torch.tensor(1)), 20).reshape(4, 5) >= 0.25
    assert torch.equal(first, kept / 0.75)
    assert torch.equal(again, first)
    for other in (second, other_client, other_step):
        assert not torch.equal(other, first)


def test_the_share_asked_for_is_dropped_and_the_mean_kept():
    with KeyedDropout(KEY, STEP):
        dropped = F.dropout(torch.ones(200, 200), 0.3)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=4.9 * (0.21 / 40_000) ** 0.5)  # one in 1e6
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.02)


def test_more_examples_in_a_batch_leave_the_masks_of_the_first_alone():
    with KeyedDropout(KEY, STEP):
        few = F.dropout(torch.ones(3, 5))
    with KeyedDropout(KEY, STEP):
        many = F.dropout(torch.ones(8, 5))
    assert torch.equal(many[:3], few)


@pytest.mark.parametrize("function", [F.dropout1d, F.dropout2d, F.dropout3d])
def test_whole_channels_are_dropped_where_the_layer_says_so(function):
    dims = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}[function]
    with KeyedDropout(KEY, STEP):
        dropped = function(torch.ones(6, 7, *[3] * dims), 0.5).flatten(2)
    assert torch.equal(dropped, dropped[:, :, :1].expand_as(dropped))
    assert 0 < (dropped[:, :, 0] == 0).sum() < 42
    with KeyedDropout(KEY, STEP):
        plain = F.dropout(torch.ones(6, 7, 3), 0.5)
    assert not torch.equal(plain, plain[:, :, :1].expand_as(plain))


def test_nothing_is_dropped_outside_training_or_at_zero_and_everything_at_one():
    x = numbers(4, 5)
    with KeyedDropout(KEY, STEP):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert (F.dropout(x, 1.0) == 0).all()


class With(nn.Module):
    """A linear layer after something that draws."""

    def __init__(self, draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draws, self.linear = draws, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draws(x)
        return self.linear(drawn[0] if isinstance(drawn, tuple) else drawn)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]


DRAWS = {
    "alpha dropout": nn.AlphaDropout(0.5),
    "rrelu": nn.RReLU(),
    "recurrent dropout": nn.GRU(FEATURES, FEATURES, 2, dropout=0.5),
    "attention dropout": attention,
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "gumbel softmax": F.gumbel_softmax,
    "rand_like": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randperm": lambda x: x[:, torch.randperm(FEATURES)],
}


def checked_and_trained(draw: Callable[[Tensor], Tensor], kernel: str) -> Tensor:
    data, model = federation(), Model(With(draw))
    model.check_fits(data.train.x[0], data.train.y[0], CLASSES)
    return clients_of(data, choose_kernel(kernel, model), OPTIONS).train(starts(model, data))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kernel", ["loop", "vmap"])
def test_other_draws_in_a_forward_pass_are_refused(draw, kernel):
    with pytest.raises(ModelError, match=r"draws random numbers.*allowed: dropout, dropout1d"):
        checked_and_trained(draw, kernel)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.ReLU(), nn.GRU(FEATURES, FEATURES)])
def test_a_forward_pass_with_keyed_dropout_or_no_draw_is_not_refused(layer):
    assert torch.isfinite(checked_and_trained(layer, "loop")).all()


def dropping() -> Model:
    return Model(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
    )


def trained(kernel: str, moment: Moment = START, options: Train = OPTIONS) -> Tensor:
    data, model = federation((7, 5, 5)), dropping()
    return clients_of(data, choose_kernel(kernel, model), options, moment).train(starts(model, data))


def test_dropout_trains_alike_on_loop_and_vmap_and_repeats_itself():
    assert torch.equal(trained("loop"), trained("loop"))
    assert furthest(trained("vmap"), trained("loop")) < 1e-4
    for other in (Moment(1, 0), Moment(0, 1)):
        assert furthest(trained("loop", other), trained("loop")) > 1e-2


def test_every_client_and_every_step_has_masks_of_its_own():
    masks: list[Tensor] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            masks.append(F.dropout(torch.ones(len(x), 16), 0.5, self.training))
            return super().forward(x)

    data = federation((4, 4, 4))
    model = Model(Spy(FEATURES, CLASSES))
    clients_of(data, choose_kernel("loop", model), Train(epochs=1, batch_size=2)).train(starts(model, data))
    assert len(masks) == 6  # three clients, two steps
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 6


def test_nothing_is_dropped_in_evaluation():
    model = dropping()
    vector, x = model.initial(0), numbers(10, FEATURES)
    module = copy.deepcopy(model.module).eval()
    nn.utils.vector_to_parameters(vector, module.parameters())
    for kernel in ("loop", "vmap"):
        assert torch.equal(choose_kernel(kernel, model).outputs(vector, x), module(x).detach())
