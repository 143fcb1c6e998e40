from contextlib import closing
from dataclasses import dataclass

import pytest
import torch

from coterie.core import LARGEST, Replies
from coterie.kernels import choose_kernel
from coterie.methods import FedAvg, FedCBO, Local
from coterie.metrics import best_selection_rate, links_from_peers, selection_rate
from coterie.randomness import Moment
from coterie.training import REMEMBER, beginning, draw_cohort, evaluate, rounds
from tiny import clients_of, federation, fleet_of, mlp, play, setting_of, starts

DATA, MODEL = federation(), mlp()
MANY = torch.arange(1000)


@pytest.mark.parametrize(("participation", "size"), [(1.0, 1000), (0.25, 250), (0.0014, 1), (0.0001, 1)])
def test_a_cohort_is_the_share_asked_for_and_at_least_one(participation, size):
    cohort = draw_cohort(MANY, participation, Moment(0, 0))
    assert len(cohort) == size
    assert (cohort.diff() > 0).all()  # ordered, nobody twice
    assert cohort.min() >= 0
    assert cohort.max() < 1000


def test_a_cohort_is_reproducible_and_another_in_every_round_and_seed():
    cohort = draw_cohort(MANY, 0.5, Moment(0, 0))
    assert torch.equal(draw_cohort(MANY, 0.5, Moment(0, 0)), cohort)
    for other in (Moment(0, 1), Moment(1, 0)):
        shared = torch.isin(draw_cohort(MANY, 0.5, other), cohort).sum()
        assert 170 < shared < 330  # 250 expected, 5 deviations of about 16 either way


def test_a_cohort_holds_the_same_clients_however_they_are_numbered():
    keys = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    cohort = draw_cohort(keys, 0.3, Moment(0, 0))
    assert torch.equal(keys[cohort].sort().values, draw_cohort(MANY, 0.3, Moment(0, 0)))


def test_evaluation_comes_every_so_often_and_at_the_end():
    played = play(Local(), DATA, MODEL, last=5, evaluate_every=2)
    assert [progress.round for progress in played.progress] == [1, 2, 3, 4, 5]
    evaluated = [progress.per_client is not None for progress in played.progress]
    assert evaluated == [False, True, False, True, True]
    assert [progress.record["accuracy"] is not None for progress in played.progress] == evaluated
    assert [progress.record["loss"] is not None for progress in played.progress] == evaluated


def test_evaluating_changes_nothing():
    often, seldom = (play(FedCBO(download=2), DATA, MODEL, last=3, evaluate_every=every) for every in (1, 3))
    assert torch.equal(often.models, seldom.models)
    assert torch.equal(often.memory["liking"], seldom.memory["liking"])


def test_what_is_recorded_is_what_the_clients_measure():
    played = play(Local(), DATA, MODEL, last=2)
    score = clients_of(DATA, choose_kernel("loop", MODEL)).score(played.models)
    assert played.last.per_client is not None
    assert torch.equal(played.last.per_client["accuracy"], score.accuracy)
    assert torch.equal(played.last.per_client["loss"], score.loss)
    record = played.last.record
    assert record["accuracy"]["mean"] == pytest.approx(float(score.accuracy.mean()))
    assert record["accuracy"]["min"] == float(score.accuracy.min())
    assert record["loss"] == pytest.approx(float(score.loss.mean()))
    assert record["round"] == 2
    assert record["clients"] == 4
    assert record["seconds"] > 0
    assert record["refused"] == {}


def test_a_model_gone_astray_is_measured_too():
    """Its logits are some 1e28, far beyond what a fleet lets through, and its answers as good as any."""
    data, model, method = federation(), mlp(), Local()
    with closing(fleet_of(method, data, model)) as fleet:
        honest = evaluate(method, fleet, {}, Moment(0, 0))
        fleet.restore({"theta": 1e14 * starts(model, data)})
        astray = evaluate(method, fleet, {}, Moment(0, 0))
    assert (astray["loss"] == LARGEST).all()
    assert (honest["loss"] < 10).all()
    assert ((astray["accuracy"] >= 0) & (astray["accuracy"] <= 1)).all()


def test_rounds_go_on_from_any_progress():
    method, setting = FedAvg(), setting_of(DATA, MODEL)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        first = next(rounds(method, fleet, setting, DATA.keys, beginning(method, setting), seed=3, last=4))
        rest = list(rounds(method, fleet, setting, DATA.keys, first, seed=3, last=4))
        assert list(rounds(method, fleet, setting, DATA.keys, rest[-1], seed=3, last=4)) == []
    assert [progress.round for progress in rest] == [2, 3, 4]
    assert torch.equal(rest[-1].state["theta"], play(method, DATA, MODEL, last=4, seed=3).last.state["theta"])


class Watched:
    """A fleet that notes every exchange in which peers are named."""

    def __init__(self, fleet) -> None:
        self._fleet, self.num_clients, self.name = fleet, fleet.num_clients, fleet.name
        self.peers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def answer(self, ask, moment):
        if ask.peers is not None:
            self.peers.append((ask.clients, ask.peers))
        return self._fleet.answer(ask, moment)


def test_links_and_rates_are_of_the_peers_that_were_downloaded_and_fade():
    method, setting = FedCBO(download=2), setting_of(DATA, MODEL)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        watched = Watched(fleet)
        played = list(
            rounds(method, watched, setting, DATA.keys, beginning(method, setting), seed=0, last=3, participation=0.75)
        )
    links = torch.zeros(4, 4)
    for (clients, peers), progress in zip(watched.peers, played, strict=True):
        new = links_from_peers(clients, peers, 4)
        assert new.sum() == 6  # three clients, two peers each
        links = REMEMBER * links + new
        torch.testing.assert_close(progress.links, links)
        assert progress.record["selection_rate"] == selection_rate(new, DATA.clusters)
        assert progress.record["clients"] == 3


def test_the_oracles_rate_is_recorded_for_methods_that_choose_peers():
    method = FedCBO(download=2, epsilon=1.0, epsilon_decay=0.5, epsilon_last=0.0)
    played = play(method, DATA, MODEL, last=3)
    expected = [best_selection_rate(epsilon, 2, torch.arange(4), DATA.clusters) for epsilon in (1.0, 0.5, 0.0)]
    assert [progress.record["selection_oracle"] for progress in played.progress] == expected
    assert len(set(expected)) > 1
    assert play(Local(), DATA, MODEL, last=1).last.record["selection_oracle"] is None
    assert play(Local(), DATA, MODEL, last=1).last.record["selection_rate"] is None


@dataclass
class HalfSilent:
    """A fleet in which clients of odd number never answer."""

    fleet: object
    name: str = "half silent"
    num_clients: int = 4

    def answer(self, ask, moment):
        replies = self.fleet.answer(ask, moment)
        heard = replies.clients % 2 == 0
        return Replies(replies.clients[heard], {name: value[heard] for name, value in replies.values.items()})


def test_silent_clients_are_counted_and_not_measured():
    method, setting = FedAvg(), setting_of(DATA, MODEL)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        silent = HalfSilent(fleet)
        (progress,) = rounds(method, silent, setting, DATA.keys, beginning(method, setting), seed=0, last=1)
        measured = evaluate(method, silent, progress.state, Moment(0, 0))
        everyone = evaluate(method, fleet, progress.state, Moment(0, 0))
    assert progress.record["silent"] == 2
    assert progress.record["clients"] == 4
    assert torch.isnan(measured["loss"]).tolist() == [False, True, False, True]
    assert measured["loss"][0] == everyone["loss"][0]
    assert progress.record["loss"] == pytest.approx(float(everyone["loss"][[0, 2]].mean()))
