"""FedAvg with what is around its common model: the pull of FedProx, fine-tuning, averages after every step."""

import pytest
import torch

from coterie.methods import FedAvg, FedProx
from parabolas import PLAIN, STEPS, parabolas, point
from tiny import TRAIN, federation, furthest, mlp, play

DATA, MODEL = federation(), mlp()
TWO, TWICE = parabolas(1.0, 3.0), PLAIN.model_copy(update={"epochs": 2})


def test_the_pull_acts_from_the_second_step_on():
    """From 0: 0.2 and 0.6; then 0.2 - 0.1 0.2 + 0.1 1.6 = 0.34 and 0.6 - 0.1 0.6 + 0.1 4.8 = 1.02."""
    pulled = play(FedProx(attraction=1.0), TWO, point(), options=TWICE, last=1)
    assert pulled.last.state["theta"].tolist() == pytest.approx([0.68], abs=1e-6)
    free = play(FedAvg(), TWO, point(), options=TWICE, last=1)
    assert free.last.state["theta"].tolist() == pytest.approx([0.72], abs=1e-6)


def test_without_attraction_or_with_one_step_it_is_fedavg_to_the_last_bit():
    options = TRAIN.model_copy(update={"steps": 1})
    assert torch.equal(play(FedProx(attraction=0.0), DATA, MODEL).models, play(FedAvg(), DATA, MODEL).models)
    assert torch.equal(
        play(FedProx(attraction=0.5), DATA, MODEL, options=options).models,
        play(FedAvg(), DATA, MODEL, options=options).models,
    )
    assert furthest(play(FedProx(attraction=0.5), DATA, MODEL).models, play(FedAvg(), DATA, MODEL).models) > 1e-3


@pytest.mark.parametrize(("options", "after_two"), [(STEPS, 0.92), (STEPS.model_copy(update={"steps": None}), 0.72)])
def test_averaging_every_step_keeps_each_clients_momentum(options, after_two):
    """Heavy ball on the mean parabola: 0, 0.4, and 0.4 + 0.1 (0.5 4 + 3.2) = 0.92; anew in each round, 0.4 + 0.32."""
    played = play(FedAvg(), TWO, point(), options=options, last=2)
    assert played.last.state["theta"].tolist() == pytest.approx([after_two], abs=1e-6)


def test_fine_tuned_clients_predict_with_what_their_training_makes_of_the_common_model():
    """From 0.4: 0.52, 0.616 toward 1, and 0.92, 1.336 toward 3."""
    played = play(FedAvg(fine_tuning=2), TWO, point(), options=PLAIN, last=1)
    assert played.last.state["theta"].tolist() == pytest.approx([0.4], abs=1e-6)
    assert played.models[:, 0].tolist() == pytest.approx([0.616, 1.336], abs=1e-6)


@pytest.mark.parametrize("steps", [None, 2])
def test_fine_tuning_leaves_the_federation_as_it_was(steps):
    options = TRAIN.model_copy(update={"steps": steps})
    tuned = play(FedAvg(fine_tuning=3), DATA, MODEL, options=options)
    plain = play(FedAvg(), DATA, MODEL, options=options)
    assert torch.equal(tuned.last.state["theta"], plain.last.state["theta"])
    assert tuned.memory.keys() == plain.memory.keys()
    assert all(torch.equal(tuned.memory[name], value) for name, value in plain.memory.items())
    assert len(tuned.models.unique(dim=0)) == 4
    assert tuned.last.record["loss"] != plain.last.record["loss"]
