"""FedAvg, IFCA and the oracle: means by hand, and where they are one another."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from coterie.core import NOBODY, run_round
from coterie.errors import ConfigError
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.methods import IFCA, FedAvg, Local, Oracle
from coterie.randomness import Moment
from tiny import COUNTS, TRAIN, clients_of, federation, fleet_of, furthest, mlp, play, setting_of

DATA, MODEL = federation(), mlp()


def one_cluster() -> Federation:
    return replace(DATA, clusters=torch.zeros(4, dtype=torch.int64))


def trained_alone() -> torch.Tensor:
    return play(Local(), DATA, MODEL, last=1).models


def test_fedavg_is_the_mean_weighted_by_examples():
    weights = torch.tensor(COUNTS).float() / sum(COUNTS)
    mean = (weights[:, None] * trained_alone()).sum(0)
    played = play(FedAvg(), DATA, MODEL, last=1)
    torch.testing.assert_close(played.last.state["theta"], mean, atol=1e-6, rtol=1e-6)
    assert torch.equal(played.models, played.last.state["theta"].repeat(4, 1))
    assert furthest(mean, trained_alone().mean(0)) > 1e-3  # unweighted, it would show


def test_the_oracle_is_fedavg_inside_each_true_cluster():
    alone, counts = trained_alone(), torch.tensor(COUNTS).float()[:, None]
    played = play(Oracle(), DATA, MODEL, last=1)
    for cluster in (0, 1):
        mine = DATA.clusters == cluster
        mean = (counts * alone)[mine].sum(0) / counts[mine].sum()
        torch.testing.assert_close(played.models[mine], mean.expand(2, -1), atol=1e-6, rtol=1e-6)
    assert played.last.record["selection_rate"] == 1.0
    assert furthest(played.models[0], played.models[1]) > 1e-2


@pytest.mark.parametrize("method", [IFCA(clusters=1), Oracle()])
def test_with_one_cluster_it_is_fedavg(method):
    mean = play(FedAvg(), one_cluster(), MODEL)
    assert torch.equal(play(method, one_cluster(), MODEL).models, mean.models)
    several = IFCA(clusters=2) if isinstance(method, IFCA) else method
    assert furthest(play(several, DATA, MODEL).models, mean.models) > 1e-2


def test_an_ifca_client_trains_and_predicts_with_the_model_that_suits_it_best():
    centres = torch.stack([MODEL.initial(0, number) for number in range(3)])
    clients = clients_of(DATA, choose_kernel("loop", MODEL), TRAIN)
    losses = clients.losses(centres, torch.arange(3).expand(4, -1))
    nearest = losses.argmin(1)
    assert len(set(nearest.tolist())) > 1
    trained = clients.train(centres[nearest])
    counts = torch.tensor(COUNTS).float()[:, None]
    method = IFCA(clusters=3)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        start = method.start(setting_of(DATA, MODEL))
        assert torch.equal(start["centres"], centres)
        assert start["group"].tolist() == [NOBODY] * 4
        state = run_round(method, fleet, start, torch.arange(4), Moment(0, 0))
    assert torch.equal(state["group"], nearest)
    for number in range(3):
        mine = nearest == number
        expected = (counts * trained)[mine].sum(0) / counts[mine].sum() if mine.any() else centres[number]
        torch.testing.assert_close(state["centres"][number], expected, atol=1e-6, rtol=1e-6)


def test_ifca_keeps_the_group_of_those_who_take_no_part():
    method = IFCA(clusters=2)
    with closing(fleet_of(method, DATA, MODEL)) as fleet:
        start = method.start(setting_of(DATA, MODEL))
        state = run_round(method, fleet, start, torch.tensor([1, 3]), Moment(0, 0))
    assert (state["group"][[0, 2]] == NOBODY).all()
    assert (state["group"][[1, 3]] != NOBODY).all()


def test_a_centre_whose_loss_is_not_a_number_suits_nobody():
    centres = torch.stack([torch.full((MODEL.layout.size,), 1e30), MODEL.initial(0)])
    clients = clients_of(DATA, choose_kernel("loop", MODEL), TRAIN)
    assert not torch.isfinite(clients.losses(centres, torch.arange(2).expand(4, -1))[:, 0]).any()
    assert IFCA(clusters=2).nearest(clients, centres).tolist() == [1, 1, 1, 1]


def test_the_oracle_needs_clusters_to_be_told():
    unknown = replace(DATA, clusters=None)
    with pytest.raises(ConfigError, match=r"method.name: got 'oracle'; allowed: a scenario whose clusters are known"):
        Oracle().start(setting_of(unknown, MODEL))


def test_fedavg_of_one_client_is_that_client_alone():
    single = federation((6,))
    alone = play(Local(), single, MODEL, last=2).models
    torch.testing.assert_close(play(FedAvg(), single, MODEL, last=2).models, alone)
    assert furthest(play(FedAvg(), DATA, MODEL, last=2).models[:1], alone) > 1e-2
