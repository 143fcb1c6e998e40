"""What every method of the table must do; a new one is picked up from there."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest
import torch

from coterie.core import run_round
from coterie.methods import METHODS
from coterie.options import Options
from coterie.randomness import Moment
from coterie.training import beginning, draw_cohort, evaluate, rounds
from tiny import COUNTS, Played, federation, fleet_of, furthest, mlp, play, setting_of, starts

DATA, MODEL = federation(), mlp()
OPTIONS: Mapping[str, dict[str, Any]] = {
    "fedcbo": {"download": 2},
    "fedcb2o": {"download": 2},
    "dfedavgm": {"degree": 2},
    "ifca": {"clusters": 2},
    "cfl": {"mean_below": 1.0, "largest_above": 0.1},
    "wecfl": {"clusters": 2},
}


@pytest.fixture(params=METHODS)
def method(request) -> Options:
    return METHODS[request.param](**OPTIONS.get(request.param, {}))


def equal(mine: Played, theirs: Played) -> bool:
    return torch.equal(mine.models, theirs.models) and torch.equal(mine.last.links, theirs.last.links)


def test_it_is_listed_under_its_own_name_and_refuses_unknown_options(method):
    assert METHODS[method.name] is type(method)
    with pytest.raises(ValueError, match="no_such_option"):
        type(method)(no_such_option=1)


def test_a_round_keeps_the_shapes_of_state_and_memory(method):
    setting = setting_of(DATA, MODEL)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        before = {name: (value.shape, value.dtype) for name, value in fleet.memory().items()}
        state = method.start(setting)
        shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
        for round in range(2):
            state = run_round(method, fleet, state, torch.arange(4), Moment(0, round))
        assert {name: (value.shape, value.dtype) for name, value in state.items()} == shapes
        assert {name: (value.shape, value.dtype) for name, value in fleet.memory().items()} == before
        assert all(len(value) == DATA.num_clients for value in fleet.memory().values())


def test_every_client_has_a_model_to_predict_with_before_and_after_training(method):
    played = play(method, DATA, MODEL, last=1)
    assert played.models.shape == (len(COUNTS), MODEL.layout.size)
    assert torch.isfinite(played.models).all()
    assert (played.models - starts(MODEL, DATA)).abs().amax(1).min() > 1e-3
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        untrained = beginning(method, setting_of(DATA, MODEL))
        assert untrained.round == 0
        measured = evaluate(method, fleet, untrained.state, Moment(0, 0))
    assert torch.isfinite(measured["loss"]).all()


def test_training_lowers_the_loss(method):
    played = play(method, DATA, MODEL, last=5, evaluate_every=5)
    first = play(method, DATA, MODEL, last=1)
    assert played.last.record["loss"] < first.last.record["loss"]


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others(method):
    run = play(method, DATA, MODEL, last=2)
    assert equal(play(method, DATA, MODEL, last=2), run)
    assert furthest(play(method, DATA, MODEL, last=2, seed=1).models, run.models) > 1e-3


def test_those_who_take_no_part_remember_what_they_did(method):
    cohort = draw_cohort(DATA.keys, 0.5, Moment(0, 0))
    resting = [client for client in range(4) if client not in cohort.tolist()]
    assert len(resting) == 2
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        before = {name: value.clone() for name, value in fleet.memory().items()}
        run_round(method, fleet, method.start(setting_of(DATA, MODEL)), cohort, Moment(0, 0))
        for name, value in fleet.memory().items():
            assert torch.equal(value[resting], before[name][resting])
            assert not torch.equal(value[cohort], before[name][cohort])


def test_a_run_left_after_any_round_goes_on_as_if_it_had_not_been(method):
    setting = setting_of(DATA, MODEL)
    whole = play(method, DATA, MODEL, last=3, participation=0.75)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        first = list(rounds(method, fleet, setting, DATA.keys, beginning(method, setting), seed=0, last=2,
                            participation=0.75))[-1]  # fmt: skip
        kept = {name: value.clone() for name, value in fleet.memory().items()}
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        fleet.restore(kept)
        (third,) = rounds(method, fleet, setting, DATA.keys, first, seed=0, last=3, participation=0.75)
        for name, value in fleet.memory().items():
            assert torch.equal(value, whole.memory[name])
    for name, value in third.state.items():
        assert torch.equal(value, whole.last.state[name])
    assert torch.equal(third.links, whole.last.links)
    assert third.record["accuracy"] == whole.last.record["accuracy"]
