"""Ditto: a common model and personal ones pulled toward it."""

import pytest
import torch
from torch import nn

from coterie.methods import Ditto, FedAvg, Local
from coterie.model import Model
from parabolas import PLAIN, STEPS, parabolas, point
from tiny import CLASSES, FEATURES, TRAIN, federation, furthest, mlp, play

DATA, MODEL = federation(), mlp()
TWO, TWICE = parabolas(1.0, 3.0), PLAIN.model_copy(update={"epochs": 2})
ONCE = TRAIN.model_copy(update={"steps": 1})


@pytest.mark.parametrize("options", [TRAIN, ONCE])
def test_without_attraction_it_is_local_training_to_the_last_bit(options):
    alone = play(Local(), DATA, MODEL, options=options).models
    assert torch.equal(play(Ditto(attraction=0.0), DATA, MODEL, options=options).models, alone)
    assert furthest(play(Ditto(attraction=0.5), DATA, MODEL, options=options).models, alone) > 1e-3


def test_two_rounds_by_hand():
    """The common model goes 0, 0.72 as in FedAvg; the first personal one 0, 0.34 (pulled to 0), then by
    theta + 0.1 (0.72 - theta) + 0.2 (1 - theta) to 0.51 and 0.629, the second 0, 1.02 and so on to 1.386, 1.6422."""
    first, second = (play(Ditto(attraction=1.0), TWO, point(), options=TWICE, last=last) for last in (1, 2))
    assert first.last.state["theta"].tolist() == pytest.approx([0.72], abs=1e-6)
    assert first.models[:, 0].tolist() == pytest.approx([0.34, 1.02], abs=1e-6)
    assert second.models[:, 0].tolist() == pytest.approx([0.629, 1.6422], abs=1e-6)


@pytest.mark.parametrize("options", [TWICE, STEPS])
def test_the_common_model_is_that_of_fedavg_whatever_the_attraction(options):
    mean = play(FedAvg(), TWO, point(), options=options).last.state["theta"]
    played = play(Ditto(attraction=5.0), TWO, point(), options=options)
    torch.testing.assert_close(played.last.state["theta"], mean, atol=1e-6, rtol=1e-6)
    assert furthest(played.models[0], mean) > 1e-2


def test_a_strong_pull_keeps_the_personal_models_at_the_common_one():
    weak, strong = (
        play(Ditto(attraction=attraction), TWO, point(), options=PLAIN, last=40, evaluate_every=40)
        for attraction in (0.1, 8)
    )
    assert strong.models.sub(2.0).abs().max() < 0.25  # 2 is the mean goal; a personal model stays 2 / (2 + 8) from it
    assert weak.models.sub(2.0).abs().min() > 0.9


def test_a_robust_mean_may_make_the_common_model():
    goals = parabolas(1.0, 1.0, 1.0, 90.0)
    plain, median = (
        play(Ditto(attraction=1.0, aggregation=kind), goals, point(), options=PLAIN, last=30, evaluate_every=30)
        for kind in ("mean", "median")
    )
    assert plain.last.state["theta"].item() > 20
    assert median.last.state["theta"].item() == pytest.approx(1.0, abs=0.01)


def test_batch_statistics_stay_those_of_the_clients_own_training():
    """The pull is of parameters. Statistics of a layer before all parameters depend on the examples alone."""
    first = Model(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    statistics = slice(first.layout.num_parameters, None)
    pulled, alone = play(Ditto(attraction=2.0), DATA, first), play(Local(), DATA, first)
    assert torch.equal(pulled.models[:, statistics], alone.models[:, statistics])
    assert furthest(pulled.last.state["theta"][statistics], alone.models[0, statistics]) > 1e-3
    assert not torch.equal(pulled.models, alone.models)
