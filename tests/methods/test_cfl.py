"""CFL: when a federation is split, and into what."""

from contextlib import closing
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import run_round
from coterie.methods import CFL, FedAvg
from coterie.methods.cfl import parted
from coterie.randomness import Moment
from parabolas import PLAIN, parabolas, point
from tiny import federation, fleet_of, furthest, mlp, numbers, play, setting_of

DATA, MODEL = federation(), mlp()
FOUR = parabolas(1.0, 1.2, -1.0, -1.2)  # the mean update is 0, the longest 0.24
EVERYBODY = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize("options", [{"mean_below": 0.0}, {"most_clusters": 1}, {"largest_above": 1e9}])
def test_one_that_never_splits_is_fedavg(options):
    mean = play(FedAvg(), DATA, MODEL).models
    assert torch.equal(play(CFL(**options), DATA, MODEL).models, mean)
    assert furthest(play(CFL(mean_below=1.0, separation=0.0), DATA, MODEL).models, mean) > 1e-2


def test_a_split_is_between_those_who_pull_apart_and_each_half_has_its_mean():
    played = play(CFL(most_clusters=2), FOUR, point(), options=PLAIN, last=1)
    assert played.last.state["group"].tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert played.models[:, 0].tolist() == pytest.approx([0.22, 0.22, -0.22, -0.22], abs=1e-6)
    later = play(CFL(most_clusters=2), FOUR, point(), options=PLAIN, last=40, evaluate_every=40)
    assert later.models[:, 0].tolist() == pytest.approx([1.1, 1.1, -1.1, -1.1], abs=1e-3)


def test_a_half_that_pulls_apart_is_split_again_up_to_the_most_there_may_be():
    """Once at 1.1 those who want 1.0 and 1.2 disagree."""
    groups = [
        play(CFL(most_clusters=most), FOUR, point(), options=PLAIN, last=40, evaluate_every=40).last.state["group"]
        for most in (3, 10)
    ]
    assert [len(group.unique()) for group in groups] == [3, 4]


@pytest.mark.parametrize(
    ("options", "splits"),
    [({}, True), ({"mean_below": 0.04}, False), ({"mean_below": 0.06}, True), ({"largest_above": 2.1}, False),
     ({"largest_above": 1.9}, True), ({"separation": 0.99}, True), ({"separation": 1.0}, False)],
)  # fmt: skip
def test_each_bound_decides_alone(options, splits):
    """The mean is (4 + 3 - 6) / 10 = 0.1, a twentieth of the longest; the cosine across is -1."""
    updates, weight = torch.tensor([[1.0], [1.0], [-2.0]]), torch.tensor([4, 3, 3])
    assert bool(CFL(**options).smaller_half(updates, weight).any()) == splits


def test_nobody_leaves_alone_or_without_moving():
    assert not CFL().smaller_half(torch.ones(1, 2), EVERYBODY[:1]).any()
    assert not CFL(separation=0.0).smaller_half(torch.zeros(4, 2), EVERYBODY).any()


def test_the_smaller_half_leaves():
    leaves = CFL(mean_below=1.0).smaller_half(
        torch.tensor([[-1.0, 0.1], [1.0, 0.0], [1.0, 0.1], [1.0, 0.2]]), EVERYBODY
    )
    assert leaves.tolist() == [True, False, False, False]


def test_who_takes_no_part_in_a_split_stays_with_the_larger_half():
    """The third, who would leave with the fourth."""
    method = CFL(most_clusters=2)
    with closing(fleet_of(method, FOUR, point(), options=PLAIN)) as fleet:
        start = method.start(setting_of(FOUR, point()))
        state = run_round(method, fleet, start, torch.tensor([0, 1, 3]), Moment(0, 0))
    assert state["group"].tolist() == [0, 0, 0, 1]
    assert state["centres"][:, 0].tolist() == pytest.approx([0.22, -0.24], abs=1e-6)


def test_there_are_never_more_models_than_clients():
    assert CFL(most_clusters=10).start(setting_of(DATA, MODEL))["centres"].shape == (4, MODEL.layout.size)


@given(count=st.integers(2, 7), seed=st.integers(0, 10**6))
def test_no_other_two_parts_are_less_alike(count, seed):
    direction = torch.nn.functional.normalize(numbers(count, 3, seed=seed), dim=1)
    cosine = direction @ direction.T

    def across(other: torch.Tensor) -> float:
        return float(cosine[other][:, ~other].max())

    halves = [torch.tensor([False, *choice]) for choice in product([False, True], repeat=count - 1)]
    assert across(parted(cosine)) == pytest.approx(min(across(half) for half in halves if half.any()), abs=1e-5)
