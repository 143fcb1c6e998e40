"""The criteria G against numbers worked out by hand: two peers, three classes, of which the last may be absent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.clients import ClassLosses
from coterie.robust.criteria import CRITERIA, average_loss, class_entropy, max_class_gap

INF, NAN = math.inf, math.nan
ALL, NO_THIRD = [0.5, 0.25, 0.25], [0.75, 0.25, 0.0]
LOSSES = st.floats(1e-3, 1e3)


def of(peers: list[list[float]], share: list[float], own: list[float] | None = None) -> tuple[ClassLosses, ClassLosses]:
    """The class losses of the peers of one client, and of its own model."""
    shares = torch.tensor([share])
    own = [1.0] * len(share) if own is None else own
    return ClassLosses(torch.tensor([peers]), shares), ClassLosses(torch.tensor([[own]]), shares)


def values(criterion: str, *arguments: object) -> list[float]:
    return CRITERIA[criterion](*of(*arguments))[0].tolist()


def test_the_table_has_the_criteria_of_the_paper_and_of_the_slides():
    expected = {"max_class_gap": max_class_gap, "class_entropy": class_entropy, "average_loss": average_loss}
    assert expected == CRITERIA


# (3.15)


def test_the_largest_gap_by_hand():
    own = [1.0, 2.0, 0.5]
    assert values("max_class_gap", [[1.5, 1.0, 0.5], [0.5, 1.0, 4.5]], ALL, own) == [0.5, 4.0]
    assert values("max_class_gap", [[0.5, 1.0, 0.25]], ALL, own) == [-0.25]  # better everywhere, least so here


def test_a_class_without_examples_has_no_gap():
    """Counted as 0, as in the authors' program, it would hide that both peers are better at every known class."""
    better = [[0.5, 1.0, 0.0], [0.75, 1.75, 0.0]]
    assert values("max_class_gap", better, NO_THIRD, [1.0, 2.0, 0.0]) == [-0.5, -0.25]
    assert values("max_class_gap", better, ALL, [1.0, 2.0, 0.0]) == [0.0, 0.0]


@given(st.lists(st.tuples(LOSSES, LOSSES), min_size=1, max_size=6), st.integers(0, 5), st.floats(0, 100))
def test_a_model_like_ones_own_has_no_gap_and_one_worse_class_betrays_it(classes, place, worse):
    peer, own = map(list, zip(*classes))
    share = [1 / len(own)] * len(own)
    place %= len(own)
    assert values("max_class_gap", [own], share, own) == [0.0]
    peer[place] = own[place] + worse
    assert values("max_class_gap", [peer], share, own)[0] >= worse * (1 - 1e-6) - 1e-4  # of 1e3 float32 keeps 6e-5


# the slides


def test_the_entropy_of_class_losses_by_hand():
    """L = 0.5 * 1 + 0.25 * 2 + 0.25 * 4 = 2 and 0.5 * 3 + 0.25 * 1 + 0.25 * 1 = 2."""
    by_hand = [
        -(0.5 * math.log(1 / 2) + 0.25 * math.log(2 / 2) + 0.25 * math.log(4 / 2)),
        -(0.5 * math.log(3 / 2) + 0.5 * math.log(1 / 2)),
    ]
    found = values("class_entropy", [[1.0, 2.0, 4.0], [3.0, 1.0, 1.0], [7.0, 7.0, 7.0]], ALL)
    assert found == pytest.approx([*by_hand, 0.0], abs=1e-6)
    assert by_hand == pytest.approx([math.log(2) / 4, math.log(4 / 3) / 2])


def test_a_class_without_examples_has_no_part_in_the_entropy():
    """L = 0.75 * 1 + 0.25 * 5 = 2."""
    by_hand = -(0.75 * math.log(1 / 2) + 0.25 * math.log(5 / 2))
    assert values("class_entropy", [[1.0, 5.0, 0.0]], NO_THIRD) == pytest.approx([by_hand], rel=1e-6)
    assert values("class_entropy", [[1.0, 5.0, 0.0]], ALL)[0] > 3.0  # a loss of 0 where there are examples is uneven


def test_a_class_loss_of_zero_counts_as_a_millionth_and_no_loss_at_all_as_even():
    """L = 0.5 * 4 = 2."""
    by_hand = -(0.5 * math.log(4 / 2) + 0.5 * math.log(1e-6))
    found = values("class_entropy", [[4.0, 0.0, 0.0], [4.0, 1e-9, 0.0], [0.0, 0.0, 0.0]], ALL)
    assert found == pytest.approx([by_hand, by_hand, 0.0], rel=1e-6)


@given(st.lists(st.tuples(LOSSES, st.integers(1, 9)), min_size=1, max_size=6), st.floats(0.01, 100))
def test_the_entropy_is_never_negative_and_ignores_the_scale_of_the_loss(classes, scale):
    """Jensen's inequality: it is 0 for equal losses only. Tolerances are some roundings of logarithms up to 14."""
    losses, counts = zip(*classes)
    share = [count / sum(counts) for count in counts]
    found, scaled, even = values(
        "class_entropy", [losses, [scale * loss for loss in losses], [scale] * len(share)], share
    )
    assert found >= -1e-5
    assert scaled == pytest.approx(found, abs=1e-4)
    assert even == pytest.approx(0.0, abs=1e-5)
    if max(losses) > 2 * min(losses):
        assert found > 1e-3  # least for half the loss in a share of 1/46: log(1 - 1/92) + log(2) / 46 = 0.004


# what all have in common


def test_the_average_loss_by_hand():
    assert values("average_loss", [[1.0, 2.0, 4.0], [3.0, 1.0, 1.0]], ALL) == [2.0, 2.0]
    assert values("average_loss", [[1.0, 5.0, 0.0]], NO_THIRD) == [2.0]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("share", [ALL, NO_THIRD])
@pytest.mark.parametrize("bad", [[INF, INF, INF], [NAN, NAN, NAN], [1.0, INF, 1.0], [NAN, 1.0, 1.0]])
def test_a_model_with_a_class_loss_that_is_not_finite_has_no_finite_value_and_spoils_no_other(criterion, share, bad):
    """A peer that was not delivered has infinite losses in all classes."""
    found = values(criterion, [bad, [1.0, 3.0, 2.0]], share)
    assert not math.isfinite(found[0])
    assert found[1:] == values(criterion, [[1.0, 3.0, 2.0]], share)
    assert math.isfinite(found[1])


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_client_judges_by_its_own_examples_and_its_own_model(criterion):
    rows = [([[1.0, 2.0, 4.0], [2.0, 1.0, 0.5]], ALL, [1.0, 1.0, 3.0]), ([[3.0, 2.0, 0.0], [2.0, 5.0, 0.0]], NO_THIRD)]
    alone = [CRITERIA[criterion](*of(*row)) for row in rows]
    peers, own = zip(*[of(*row) for row in rows])
    together = [
        ClassLosses(torch.cat([one.each for one in part]), torch.cat([one.share for one in part]))
        for part in (peers, own)
    ]
    assert torch.equal(CRITERIA[criterion](*together), torch.cat(alone))
    assert not torch.equal(alone[0], alone[1])
