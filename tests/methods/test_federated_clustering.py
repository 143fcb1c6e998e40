"""Federated clustering: gradients around one's own."""

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from coterie.core import Ask, Replies, run_round
from coterie.federation import Federation
from coterie.fleets.attacked import AttackedFleet
from coterie.methods import FederatedClustering, Local
from coterie.methods.federated_clustering import clustered
from coterie.model import Model
from coterie.randomness import Moment
from coterie.robust.attacks import SignFlip, Silent
from parabolas import PLAIN, STEPS, parabolas, point
from tiny import CLASSES, FEATURES, TRAIN, federation, fleet_of, furthest, mlp, play, setting_of

DATA, MODEL = federation(), mlp()
NORMALISED = Model(lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
ONCE = TRAIN.model_copy(update={"steps": 1})
ALONE, ALL = FederatedClustering(quantile=0.0), FederatedClustering(quantile=1.0)


@pytest.mark.parametrize("rounds", [1, 2, 10])
def test_the_centre_moves_toward_those_inside(rounds):
    """0 and 1 of 0, 1 and 10: v <- 1/3 + v/3, so that v = (1 - 3^-rounds) / 2."""
    centre, inside = clustered(torch.tensor([[0.0], [1.0], [10.0]]), 2 / 3, rounds)
    assert centre.item() == pytest.approx((1 - 3.0**-rounds) / 2, abs=1e-6)
    assert inside.tolist() == [True, True, False]


def test_what_cannot_be_measured_is_outside():
    centre, inside = clustered(torch.tensor([[0.0, 0.0], [3e38, 3e38], [1.0, 0.0]]), 1.0, 1)
    assert inside.tolist() == [True, False, True]
    assert torch.isfinite(centre).all()


@pytest.mark.parametrize(
    "changes",
    [{}, {"momentum": 0.0}, {"weight_decay": 0.1, "lr_decay": 0.5},
     {"optimiser": "adamw", "lr": 0.01, "weight_decay": 0.1}],
)  # fmt: skip
def test_with_nobody_else_inside_it_is_local_training_by_single_steps(changes):
    options = ONCE.model_copy(update=changes)
    alone = play(Local(), DATA, MODEL, options=options).models
    assert furthest(play(ALONE, DATA, MODEL, options=options).models, alone) < 1e-5
    assert furthest(play(ALL, DATA, MODEL, options=options).models, alone) > 1e-3


@pytest.mark.parametrize(("options", "after_two"), [(STEPS, 1.84), (PLAIN, 1.44)])
def test_with_all_inside_it_follows_the_mean_gradient(options, after_two):
    """Of 1, 3 and 8, the parabola toward 4: 0, 0.8, and 0.8 + 0.1 (0.5 8 + 6.4) with momentum, 0.8 + 0.64 without."""
    played = play(ALL, parabolas(1.0, 3.0, 8.0), point(), options=options, last=2)
    assert played.models[:, 0].tolist() == pytest.approx([after_two] * 3, abs=1e-5)


def watched(method: FederatedClustering, data: Federation, rounds: int) -> tuple[Tensor, Tensor]:
    """The models [N, 1] after some rounds and the weights of the last."""
    shown: list[Tensor] = []

    def watch(ask: Ask, replies: Replies) -> None:
        if replies.weights is not None:
            shown.append(replies.weights)

    with closing(fleet_of(method, data, point(), options=STEPS)) as fleet:
        state = method.start(setting_of(data, point()))
        for round in range(rounds):
            state = run_round(method, fleet, state, torch.arange(data.num_clients), Moment(0, round), watch)
        return fleet.memory()["theta"].clone(), shown[-1]


def test_clients_find_those_of_their_kind_and_it_is_shown():
    models, weights = watched(FederatedClustering(quantile=0.5), parabolas(1.0, 9.0, 1.2, 9.2), 60)
    assert models[:, 0].tolist() == pytest.approx([1.1, 9.1, 1.1, 9.1], abs=0.01)
    assert weights.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]


def test_batch_statistics_are_the_clients_own_and_those_of_letters_are_forgotten():
    data, moved = federation((6, 6, 6, 6)), slice(NORMALISED.layout.num_parameters, None)
    alone, together = (play(method, data, NORMALISED, options=ONCE, last=1).models for method in (Local(), ALL))
    assert torch.equal(together[:, moved], alone[:, moved])
    assert furthest(alone[:, moved], NORMALISED.initial(0)[moved]) > 1e-3
    assert furthest(together, alone) > 1e-3


def test_one_client_alone_trains_alone():
    single = federation((6,))
    alone = play(Local(), single, MODEL, options=ONCE).models
    torch.testing.assert_close(play(ALL, single, MODEL, options=ONCE).models, alone)


@pytest.mark.parametrize(("attack", "after"), [(SignFlip, -0.8 / 3), (Silent, 0.4)])
def test_forged_letters_are_read_and_missing_ones_are_not_missed(attack, after):
    """Of 1, 3 and 8 the last turns its gradient of -16 round: mean (-2 - 6 + 16) / 3; or it is silent: mean -4."""
    data = attack(malicious=[2]).enters(parabolas(1.0, 3.0, 8.0), "lie", 0)
    with closing(AttackedFleet(fleet_of(ALL, data, point(), options=PLAIN), attack(malicious=[2]), data)) as fleet:
        run_round(ALL, fleet, ALL.start(setting_of(data, point())), torch.arange(3), Moment(0, 0))
        assert fleet.memory()["theta"][:2, 0].tolist() == pytest.approx([after] * 2, abs=1e-6)
