import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.robust.aggregators import AGGREGATORS
from coterie.robust.defence import Aggregation, Defended, middle

INF, NAN = math.inf, math.nan
MODELS = torch.tensor([[0.0, 8.0], [1.0, 6.0], [2.0, 0.0], [6.0, 1.0], [90.0, -70.0]])
COUNTS, START = torch.tensor([1, 1, 1, 1, 4]), torch.tensor([0.0, 1.0])


def test_every_aggregator_can_be_chosen_and_sageflow():
    assert set(get_args(Aggregation)) == {*AGGREGATORS, "sageflow"}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_it_aggregates_by_the_aggregator_of_that_name_with_the_share_assumed_malicious(name):
    chosen = Defended(aggregation=name, assumed_malicious=0.2).aggregate(MODELS, COUNTS, START)
    assert torch.equal(chosen, AGGREGATORS[name](MODELS, COUNTS, START, 0.2))
    another = Defended(aggregation="mean" if name == "median" else "median").aggregate(MODELS, COUNTS, START)
    assert not torch.equal(chosen, another)


def test_the_share_assumed_malicious_is_cut_off():
    """1, 2, 6 and 0, 1, 6 remain of 0.2; of 0.4 the medians."""
    fifth, two_fifths = (
        Defended(aggregation="trimmed-mean", assumed_malicious=share).aggregate(MODELS, COUNTS, START)
        for share in (0.2, 0.4)
    )
    torch.testing.assert_close(fifth, torch.tensor([3.0, 7 / 3]))
    assert two_fifths.tolist() == [2.0, 1.0]


def test_sageflow_averages_by_its_weights_and_stays_at_the_start_where_it_trusts_nobody():
    """weight / loss^2 = 1 / 1, 1 / 4, 1 / 0.25 of the three sure of themselves: shares 4, 1, 16 of 21."""
    method = Defended(aggregation="sageflow", entropy_threshold=0.5, loss_sharpness=2.0)
    losses = torch.tensor([1.0, 2.0, 0.5, 0.1, 0.1])
    weight = method.trusted(torch.tensor([0.5, 0.1, 0.2, 0.6, 2.0]), losses, torch.tensor([1, 1, 1, 1, 4]))
    torch.testing.assert_close(weight, torch.tensor([4.0, 1.0, 16.0, 0.0, 0.0]) / 21)
    aggregated = method.aggregate(MODELS, weight, START)
    torch.testing.assert_close(aggregated, torch.tensor([(0 + 1 + 32) / 21, (32 + 6 + 0) / 21]))
    unsure = method.trusted(torch.full((5,), 0.6), losses, COUNTS)
    assert torch.equal(method.aggregate(MODELS, unsure, START), START)


# what several judges say


def test_the_middle_of_what_judges_say_by_hand():
    """Of an even number the upper of the two in the middle."""
    assert middle(torch.tensor([[3.0, 1.0], [1.0, 9.0], [2.0, 4.0]])).tolist() == [2.0, 4.0]
    assert middle(torch.tensor([[3.0], [1.0], [2.0], [7.0]])).tolist() == [3.0]
    assert middle(torch.tensor([[3.0, 5.0]])).tolist() == [3.0, 5.0]


def test_what_is_not_a_number_counts_as_the_worst():
    assert middle(torch.tensor([[NAN, NAN, 2.0], [NAN, 1.0, INF], [1.0, 3.0, NAN]])).tolist() == [INF, 3.0, INF]
    assert middle(torch.tensor([[INF], [INF], [1.0]])).tolist() == [INF]


@given(
    st.lists(st.floats(0, 10, width=32), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, -1e9, 1e9, NAN, INF]), max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_minority_of_lying_judges_decides_nothing(honest, lies, random):
    lies = lies[: len(honest) - 1]
    said = [*honest, *lies]
    random.shuffle(said)
    assert min(honest) <= float(middle(torch.tensor(said)[:, None])) <= max(honest)
    majority = [1e9] * (len(honest) + 1)
    assert float(middle(torch.tensor([*honest, *majority])[:, None])) == 1e9


@pytest.mark.parametrize(
    ("field", "value"),
    [("aggregation", "mode"), ("assumed_malicious", 0.5), ("assumed_malicious", -0.1), ("entropy_threshold", -1.0),
     ("entropy_threshold", INF), ("loss_sharpness", -1.0), ("loss_sharpness", NAN)],
)  # fmt: skip
def test_impossible_options_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Defended(**{field: value})
