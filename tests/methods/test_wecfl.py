"""WeCFL: k-means of what the clients send."""

from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import NOBODY, run_round
from coterie.errors import ConfigError
from coterie.methods import FedAvg, WeCFL
from coterie.methods.wecfl import sorted_into, spread_out
from coterie.randomness import Moment
from parabolas import PLAIN, parabolas, point
from tiny import federation, fleet_of, furthest, mlp, numbers, play, setting_of

DATA, MODEL = federation(), mlp()
FOUR = parabolas(1.0, 5.0, 1.2, 5.2, counts=[1, 1, 3, 1])


def test_with_one_cluster_it_is_fedavg():
    mean = play(FedAvg(), DATA, MODEL).models
    assert torch.equal(play(WeCFL(clusters=1), DATA, MODEL).models, mean)
    assert furthest(play(WeCFL(clusters=2), DATA, MODEL).models, mean) > 1e-2


def test_clients_of_a_cluster_have_their_mean_by_examples():
    """After a step from 0: 0.2, 1, 0.24, 1.04; the means are (0.2 + 3 0.24) / 4 = 0.23 and 1.02."""
    played = play(WeCFL(clusters=2), FOUR, point(), options=PLAIN, last=1)
    assert played.models[:, 0].tolist() == pytest.approx([0.23, 1.02, 0.23, 1.02], abs=1e-6)
    later = play(WeCFL(clusters=2), FOUR, point(), options=PLAIN, last=40, evaluate_every=40)
    assert later.models[:, 0].tolist() == pytest.approx([1.15, 5.1, 1.15, 5.1], abs=1e-3)


def test_k_means_by_hand():
    """From 0 and 1: 0 | 1 10 11, means 0 and (3 + 10 + 11) / 5 = 4.8; then 0 1 | 10 11, means 0.75 and 10.5, which
    stay. The sum is 0.75^2 + 3 0.25^2 + 0.5^2 + 0.5^2."""
    models, weight = torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.tensor([1, 3, 1, 1])
    centres, group, total = sorted_into(models, weight, models[:2])
    assert group.tolist() == [0, 0, 1, 1]
    assert centres[:, 0].tolist() == pytest.approx([0.75, 10.5])
    assert total == pytest.approx(1.25)
    assert sorted_into(models, weight, torch.tensor([[4.0], [99.0]]))[0][:, 0].tolist() == pytest.approx([4.0, 99.0])


def test_a_centre_with_nobody_near_stays_where_it_is():
    centres, group, _ = sorted_into(torch.tensor([[0.0], [2.0]]), torch.tensor([1, 1]), torch.tensor([[1.0], [50.0]]))
    assert group.tolist() == [0, 0]
    assert centres[:, 0].tolist() == [1.0, 50.0]


@given(seed=st.integers(0, 10**6))
def test_beginnings_are_models_far_from_each_other(seed):
    models = torch.tensor([[0.0], [0.0], [70.0], [70.0], [-90.0]])
    drawn = spread_out(models, numbers(5, 3, seed=seed).sigmoid())
    assert sorted(drawn[:, 0].tolist()) == [-90.0, 0.0, 70.0]


def test_beginnings_are_drawn_by_chance_not_by_number():
    models = torch.arange(6.0)[:, None]
    firsts = {spread_out(models, numbers(6, 1, seed=seed).sigmoid()).item() for seed in range(60)}
    assert firsts == set(range(6))


def test_who_takes_no_part_keeps_the_cluster_and_strangers_have_none():
    method = WeCFL(clusters=2)
    with closing(fleet_of(method, FOUR, point(), options=PLAIN)) as fleet:
        start = method.start(setting_of(FOUR, point()))
        assert start["group"].tolist() == [NOBODY] * 4
        first = run_round(method, fleet, start, torch.tensor([0, 1, 2]), Moment(0, 0))
        second = run_round(method, fleet, first, torch.tensor([1, 3]), Moment(0, 1))
    assert first["group"][3] == NOBODY
    assert first["group"][0] == first["group"][2] != first["group"][1]
    assert torch.equal(second["group"][[0, 2]], first["group"][[0, 2]])
    assert second["group"][3] != NOBODY


def test_more_clusters_than_clients_are_refused():
    with pytest.raises(ConfigError, match=r"method.clusters: got 5; allowed: 1 to 4, the number of clients. Lower it."):
        WeCFL(clusters=5).start(setting_of(DATA, MODEL))
    assert WeCFL(clusters=4).start(setting_of(DATA, MODEL))["centres"].shape == (4, MODEL.layout.size)
