import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.consensus import gibbs, mean_by_group

INF, NAN = math.inf, math.nan


def test_weights_by_hand():
    weights = gibbs(torch.tensor([[0.0, math.log(2.0), math.log(4.0)]]), alpha=1.0)
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 2 / 7, 1 / 7]]))
    sharper = gibbs(torch.tensor([[0.0, math.log(2.0), math.log(4.0)]]), alpha=2.0)
    torch.testing.assert_close(sharper, torch.tensor([[16 / 21, 4 / 21, 1 / 21]]))


def test_alpha_zero_weighs_all_alike():
    assert gibbs(torch.tensor([[0.3, 5.0, 2.0, 9.0]]), 0.0).tolist() == [[0.25] * 4]


def test_losses_whose_exponentials_underflow_still_have_weights():
    losses = torch.tensor([1000.0, 1000.1, 1000.2])
    assert torch.exp(-10.0 * losses).sum() == 0.0  # alpha L = 10,000: the formula as printed gives 0 / 0
    expected = torch.softmax(torch.tensor([0.0, -1.0, -2.0]), 0)
    torch.testing.assert_close(gibbs(losses, 10.0), expected, atol=1e-3, rtol=0)  # float32 keeps 1000.1 to 3e-5


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_has_weight_zero(bad):
    weights = gibbs(torch.tensor([[bad, 1.0, 1.0], [1.0, 1.0, 1.0]]), 3.0)
    assert weights[0].tolist() == [0.0, 0.5, 0.5]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))


def test_if_all_losses_are_bad_all_weights_are_zero():
    assert gibbs(torch.tensor([[NAN, INF]]), 1.0).tolist() == [[0.0, 0.0]]


@given(st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=8), st.floats(0, 100), st.floats(-50, 50))
def test_weights_sum_to_one_fall_with_the_loss_and_ignore_a_shift(losses, alpha, shift):
    of = torch.tensor(losses, dtype=torch.float64)
    weights = gibbs(of, alpha)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert weights[of.argmin()] == weights.max()
    torch.testing.assert_close(gibbs(of + shift, alpha), weights, atol=1e-6, rtol=0)


def test_means_of_groups_by_hand():
    models = torch.tensor([[1.0, 0.0], [3.0, 4.0], [10.0, 10.0]])
    otherwise = torch.tensor([[-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]])
    means = mean_by_group(models, torch.tensor([0, 0, 2]), torch.tensor([1, 3, 5]), otherwise)
    assert means.tolist() == [[2.5, 3.0], [-2.0, -2.0], [10.0, 10.0]]
