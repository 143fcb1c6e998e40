"""Weights from validation: whose model does well on my examples counts for me."""

import math

import pytest
import torch

from coterie.federation import Federation
from coterie.methods import Local, ValidationWeights
from parabolas import PLAIN, parabolas, point
from tiny import federation, furthest, mlp, play

DATA, MODEL = federation(), mlp()


def test_of_no_sharpness_it_is_the_plain_mean_of_all_models():
    alone = play(Local(), DATA, MODEL, last=1).models
    mean = alone.mean(0).expand(4, -1)
    torch.testing.assert_close(play(ValidationWeights(sharpness=0.0), DATA, MODEL, last=1).models, mean)
    assert furthest(play(ValidationWeights(sharpness=2.0), DATA, MODEL, last=1).models, mean) > 1e-3


def test_with_great_sharpness_each_keeps_the_best_model():
    """After a step from 0 toward 1, 2 and 30 they are at 0.2, 0.4 and 6; the first is best served by the second."""
    played = play(ValidationWeights(sharpness=1e3), parabolas(1.0, 2.0, 30.0), point(), options=PLAIN, last=1)
    assert played.models[:, 0].tolist() == pytest.approx([0.4, 0.4, 6.0], abs=1e-5)


@pytest.mark.parametrize(("measure", "of"), [("loss", lambda loss: loss), ("perplexity", math.exp)])
def test_two_clients_by_hand(measure, of):
    """After a step they are at 0.2 and 0.6; the losses for the first, who wants 1, are 0.64 and 0.16."""
    method = ValidationWeights(sharpness=1.5, measure=measure)
    played = play(method, parabolas(1.0, 3.0), point(), options=PLAIN, last=1)
    own, other = math.exp(-1.5 * of(0.64)), math.exp(-1.5 * of(0.16))
    assert played.models[0, 0].item() == pytest.approx((0.2 * own + 0.6 * other) / (own + other), abs=1e-5)


def test_sharp_weights_find_clusters_and_blunt_ones_do_not():
    goals = parabolas(1.0, 1.2, -1.0, -1.2)
    played = play(ValidationWeights(sharpness=50.0), goals, point(), options=PLAIN, last=40, evaluate_every=40)
    assert played.models[:, 0].tolist() == pytest.approx([1.1, 1.1, -1.1, -1.1], abs=0.1)
    together = play(ValidationWeights(sharpness=0.0), goals, point(), options=PLAIN, last=40, evaluate_every=40)
    assert together.models.abs().max() < 0.3


def test_where_no_loss_is_finite_the_own_model_stays():
    far = parabolas(1e3, -1e3)  # perplexities of exp(10^6)
    alone = play(Local(), far, point(), options=PLAIN, last=2).models
    assert torch.equal(play(ValidationWeights(measure="perplexity"), far, point(), options=PLAIN, last=2).models, alone)
    assert furthest(play(ValidationWeights(sharpness=0.0), far, point(), options=PLAIN, last=2).models, alone) > 0.5


def test_validation_examples_judge_where_there_are_any():
    """One of the four examples of each; those of the first client are not alike."""
    x, test = torch.ones(4, 1), (torch.ones(1, 1), torch.zeros(1, 1))
    clients = [(x, torch.tensor([[1.0], [1.0], [1.0], [9.0]])), (x, torch.full((4, 1), 3.0))]

    def first(share: float) -> tuple[float, dict[str, float]]:
        """The first client's model, and what it were if it judged by these examples."""
        data = Federation.from_arrays(clients, test, validation_share=share)
        alone = play(Local(), data, point(), options=PLAIN, last=1).models[:, 0]
        if_by = {}
        for name, examples in (("validation", data.validation), ("training", data.train)):
            if examples is not None:
                losses = (alone[:, None] - examples.y[0, : examples.count[0], 0]).square().mean(1)
                if_by[name] = float(losses.neg().softmax(0) @ alone)
        return float(play(ValidationWeights(), data, point(), options=PLAIN, last=1).models[0, 0]), if_by

    judged, if_by = first(0.25)
    assert judged == pytest.approx(if_by["validation"], abs=1e-5)
    assert judged != pytest.approx(if_by["training"], abs=1e-3)
    without, if_by = first(0.0)
    assert without == pytest.approx(if_by["training"], abs=1e-5)
    assert if_by.keys() == {"training"}
