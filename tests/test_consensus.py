import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.consensus import gibbs, in_quantile, mean_by_group, onto_simplex

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


# The sub-level set of the slides and of fedcb2o.txt (1.4)


def chosen(losses: list[float], share: float, slack: float = 0.0) -> list[int]:
    """The places of those in the quantile set."""
    return in_quantile(torch.tensor([losses]), share, slack)[0].nonzero()[:, 0].tolist()


def test_the_quantile_set_by_hand():
    """q_beta is the least q with at least a share beta of the losses up to it: of five the first to fifth smallest."""
    losses = [3.0, 1.0, 5.0, 2.0, 4.0]
    assert [len(chosen(losses, share)) for share in (0.01, 0.2, 0.21, 0.4, 0.6, 0.99, 1.0)] == [1, 1, 2, 2, 3, 5, 5]
    assert chosen(losses, 0.2) == [1]
    assert chosen(losses, 0.6) == [0, 1, 3]


def test_slack_lets_in_those_a_little_above_the_quantile():
    losses = [3.0, 1.0, 5.0, 2.0, 4.0]
    assert chosen(losses, 0.2, slack=0.99) == [1]
    assert chosen(losses, 0.2, slack=1.0) == [1, 3]
    assert chosen(losses, 0.4, slack=1.5) == [0, 1, 3]
    assert chosen(losses, 0.2, slack=100.0) == [0, 1, 2, 3, 4]


def test_those_as_good_as_the_quantile_are_all_in_it():
    assert chosen([2.0, 1.0, 2.0, 2.0, 7.0], 0.4) == [0, 1, 2, 3]
    assert chosen([2.0, 2.0], 0.01) == [0, 1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_losses_that_are_not_finite_are_out_and_not_counted(bad):
    """Half of the four others are two; of all six they would be three."""
    losses = [bad, 4.0, 1.0, bad, 3.0, 2.0]
    assert chosen(losses, 0.5) == [2, 5]
    assert chosen(losses, 1.0, slack=100.0) == [1, 2, 4, 5]
    assert chosen([9.0 if loss == bad or loss != loss else loss for loss in losses], 0.5) == [2, 4, 5]
    assert chosen([bad, bad], 0.5, slack=100.0) == []


def test_every_row_has_its_own_quantile():
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0], [40.0, NAN, 20.0, 10.0]])
    assert in_quantile(losses, 0.5).tolist() == [[True, True, False, False], [False, False, True, True]]


@given(st.integers(1, 200), st.integers(1, 200))
def test_the_number_in_the_set_does_not_suffer_from_rounding(number, part):
    """ceil(beta M): 15 of 0.6 * 25, which float32 makes 15.000001."""
    part = min(part, number)
    assert len(chosen([float(loss) for loss in range(number)], part / number)) == part
    assert len(chosen([float(loss) for loss in range(25)], 0.6)) == 15


@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=8), st.floats(0.01, 1), st.floats(0, 10))
def test_the_set_holds_the_best_and_grows_with_share_and_slack(losses, share, slack):
    inside = set(chosen(losses, share))
    assert len(inside) >= share * len(losses) - 1e-6
    assert max(losses[place] for place in inside) < min(
        [INF, *(losses[i] for i in range(len(losses)) if i not in inside)]
    )
    assert inside <= set(chosen(losses, share, slack)) <= set(chosen(losses, 1.0)) == set(range(len(losses)))


def test_the_averaged_quantile_by_hand():
    """Of 1 to 10 with beta = .5: the mean quantile from .25 to .5 is (.5 * 3 + 4 + 5) / 2.5 = 4.2; that of .5 is 5."""
    losses = torch.arange(1.0, 11.0)[None]
    assert in_quantile(losses, 0.5, averaged=True).sum().item() == 4
    assert in_quantile(losses, 0.5).sum().item() == 5
    assert in_quantile(losses, 0.5, slack=0.81, averaged=True).sum().item() == 5
    assert in_quantile(losses, 0.5, slack=0.79, averaged=True).sum().item() == 4
    with_gaps = torch.cat([losses, torch.full((1, 6), NAN)], dim=1)  # which count for nothing
    assert in_quantile(with_gaps, 0.5, averaged=True).tolist() == [[True] * 4 + [False] * 12]


def test_the_averaged_quantile_always_holds_the_least_loss():
    same = torch.full((1, 7), 0.1, dtype=torch.float64)
    assert in_quantile(same, 0.3, averaged=True).all()
    assert in_quantile(torch.tensor([[0.3, 0.1, 0.2]]), 1e-3, averaged=True).tolist() == [[False, True, False]]


def nearest_by_hand(values: list[float]) -> list[float]:
    """The nearest point of the simplex: for each set of entries that stay positive the one candidate, the best wins."""
    candidates = []
    for size in range(1, len(values) + 1):
        for chosen in itertools.combinations(range(len(values)), size):
            level = (sum(values[i] for i in chosen) - 1.0) / size
            point = [values[i] - level if i in chosen else 0.0 for i in range(len(values))]
            if min(point) >= 0.0:
                candidates.append(point)
    return min(candidates, key=lambda point: math.dist(point, values))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_the_projection_onto_the_simplex_is_the_nearest_point(values):
    projected = onto_simplex(torch.tensor(values, dtype=torch.float64))
    assert projected.tolist() == pytest.approx(nearest_by_hand(values), abs=1e-9)
    assert float(projected.sum()) == pytest.approx(1.0)


def test_who_is_not_there_gets_nothing_on_the_simplex():
    rows = torch.tensor([[0.5, -INF, 0.7], [-INF, -INF, 5.0], [-INF, -INF, -INF]])
    expected = torch.tensor([[0.4, 0.0, 0.6], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(onto_simplex(rows), expected, atol=1e-6, rtol=0)
