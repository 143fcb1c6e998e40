"""By which weights clients mix each other's models, as a simulation records it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import coterie
from coterie.core import Ask, client_task
from coterie.methods import CoBo, DFedAvgM, FedAvg, FedCB2O, FedCBO, Local
from coterie.metrics import clusters_by_weights, found_clusters, shown_weights, weights_within
from coterie.runs import checkpoint
from program import SMALL, Listener
from tiny import federation, mlp, play

DATA, MODEL = federation(), mlp()  # four clients, clusters 0 1 0 1
WEIGHTS = torch.tensor([[0.125, 0.25], [0.25, 0.5], [0.375, 0.75], [0.5, 1.0]])
NEXT = torch.tensor([[1, 2], [2, 3], [3, 0], [0, 1]])  # a client of the other cluster, then one of the own


@dataclass(frozen=True)
class Mixes:
    """Clients mix the models of NEXT by WEIGHTS, in the first rounds."""

    rounds: int = 10**9

    def client_memory(self, theta, num_clients):
        return {"theta": theta}

    def start(self, setting):
        return {}

    @client_task
    def show(self, clients, memory, given):
        return {}, {"publish": memory["theta"]}

    @client_task
    def mix(self, clients, memory, given):
        return {"theta": given.downloaded.mix(given["weights"], memory["theta"])}, {}

    def round(self, state, cohort, moment):
        yield Ask(self.show, cohort)
        if moment.round < self.rounds:
            yield Ask(self.mix, cohort, each={"weights": WEIGHTS[cohort]}, peers=NEXT[cohort])
        return state

    def serving(self, clients, memory, given):
        return memory["theta"]


def test_the_matrix_holds_who_was_mixed_with_which_weight():
    played = play(Mixes(), DATA, MODEL, last=1)
    assert played.last.weights is not None
    assert played.last.weights.tolist() == [
        [0, 0.125, 0.25, 0], [0, 0, 0.25, 0.5], [0.75, 0, 0, 0.375], [0.5, 1, 0, 0],
    ]  # fmt: skip
    record = played.last.record["weights"]
    assert record["within"] == (0.25 + 0.5 + 0.75 + 1) / 4  # of 4 pairs, each mixed
    assert record["between"] == (0.125 + 0.25 + 0.375 + 0.5) / 8  # of 8 pairs, 4 of them mixed
    assert torch.tensor(record["matrix"]).equal(played.last.weights)


def test_who_takes_no_part_has_no_weight_and_is_in_no_mean():
    played = play(Mixes(), DATA, MODEL, last=8, participation=0.75)
    absent = set()
    for progress in played.progress:
        weights = progress.weights
        assert weights is not None
        (gone,) = (~weights.any(1)).nonzero()[:, 0].tolist()
        assert not weights[:, gone].any()
        there = [client for client in range(4) if client != gone]
        pairs = [(i, j) for i in there for j in there if i != j]
        within = [float(weights[i, j]) for i, j in pairs if i % 2 == j % 2]
        assert len(within) == 2
        assert progress.record["weights"]["within"] == pytest.approx(sum(within) / 2)
        absent.add(gone)
    assert len(absent) > 1


def test_the_last_weights_stay_when_nobody_mixes_and_the_record_is_of_its_round():
    played = play(Mixes(rounds=1), DATA, MODEL, last=3)
    assert [progress.record["weights"] is None for progress in played.progress] == [False, True, True]
    first, last = played.progress[0].weights, played.last.weights
    assert first is not None
    assert last is not None
    assert torch.equal(first, last)


def test_the_matrix_is_recorded_where_clients_are_evaluated():
    played = play(Mixes(), DATA, MODEL, last=5, evaluate_every=2)
    there = ["matrix" in progress.record["weights"] for progress in played.progress]
    assert there == [False, True, False, True, True]
    assert shown_weights(torch.full((100, 100), 1 / 3)) == [[0.333] * 100] * 100
    assert shown_weights(torch.zeros(101, 101)) is None


def test_without_true_clusters_or_pairs_there_is_no_mean():
    everybody = torch.ones(4, dtype=torch.bool)
    assert weights_within(torch.eye(4), everybody, None) == {"within": None, "between": None}
    one_cluster = weights_within(torch.full((4, 4), 0.5), everybody, torch.zeros(4))
    assert one_cluster == {"within": 0.5, "between": None}


@pytest.mark.parametrize("method", [FedCBO(download=2), FedCB2O(download=2), DFedAvgM(degree=2), CoBo(pairs="all")])
def test_every_method_that_mixes_peers_shows_its_weights(method: Any):
    weights = play(method, DATA, MODEL, last=2).last.weights
    assert weights is not None
    assert weights.any()
    assert not weights.diagonal().any()
    assert weights.min() >= 0


@pytest.mark.parametrize("method", [Local(), FedAvg(), DFedAvgM(degree=2, aggregation="median")])
def test_other_methods_have_none(method: Any):
    played = play(method, DATA, MODEL, last=2)
    assert played.last.weights is None
    assert played.last.record["weights"] is None


def test_downloaded_models_share_the_whole_weight_and_cobos_weights_are_those_of_its_state():
    fedcbo = play(FedCBO(download=2), DATA, MODEL, last=2).last.weights
    assert fedcbo is not None
    torch.testing.assert_close(fedcbo.sum(1), torch.ones(4))
    assert (fedcbo.count_nonzero(1) == 2).all()
    cobo = play(CoBo(pairs="all", weight_step=0.5), DATA, MODEL, last=3).last
    assert cobo.weights is not None
    assert torch.equal(cobo.weights, cobo.state["weights"])
    assert 0 < cobo.weights.mean() < 0.75  # they have moved from 1 between all


# Clusters


def symmetric(size: int, pairs: dict[tuple[int, int], float]) -> Tensor:
    weights = torch.zeros(size, size)
    for (i, j), weight in pairs.items():
        weights[i, j] = weights[j, i] = weight
    return weights


@pytest.mark.parametrize(("third", "together"), [(0.1, False), (0.3, True)])
def test_clusters_become_one_while_the_mean_weight_between_them_is_above_a_half(third: float, together: bool):
    """Clients 0 and 1 first; then it is the mean of 0.8 and the third weight that counts: 0.45 or 0.55."""
    found = clusters_by_weights(symmetric(3, {(0, 1): 0.9, (0, 2): 0.8, (1, 2): third}))
    assert found[0] == found[1]
    assert (found[2] == found[0]) == together


def test_a_weight_is_the_mean_of_both_directions_and_a_lone_client_is_a_cluster():
    assert len(set(clusters_by_weights(torch.tensor([[0.0, 1.0], [0.2, 0.0]])))) == 1
    assert len(set(clusters_by_weights(torch.tensor([[0.0, 0.7], [0.2, 0.0]])))) == 2
    assert clusters_by_weights(torch.zeros(1, 1)) == [0]


def test_weights_on_the_simplex_are_told_apart_though_none_is_above_a_half():
    blocks = torch.block_diag(*[(1 - torch.eye(4)) / 3] * 2)
    found = clusters_by_weights(blocks)
    assert found[:4] == [found[0]] * 4
    assert found[4:] == [1 - found[0]] * 4
    assert len(set(clusters_by_weights(0.9 * blocks))) == 8  # in a box a weight of 0.3 joins nobody


# Runs

COBO = {"name": "cobo", "pairs": "all", "weight_step": 0.5}


def ran(path: Path, **changes: Any) -> coterie.Run:
    return coterie.run(SMALL | changes, out=path, display=Listener())


def test_the_summary_has_the_weights_and_clusters_come_from_those_of_the_state(tmp_path: Path):
    cobo = ran(tmp_path / "cobo", method=COBO)
    weights = cobo.summary["weights"]
    records = cobo.folder.records(warn=pytest.fail)
    assert weights == records[-1]["weights"]
    assert weights["within"] != weights["between"]
    held = checkpoint.latest(cobo.folder.checkpoints, pytest.fail)
    assert held is not None
    assert cobo.summary["clusters"]["found"] == clusters_by_weights(held.tensors["state.weights"])
    assert weights["matrix"] == shown_weights(held.tensors["state.weights"])
    assert cobo.summary["improved"] is None


def test_sparse_downloads_are_clustered_by_their_links(tmp_path: Path):
    fedcbo = ran(tmp_path / "fedcbo")
    links = fedcbo.folder.links()
    assert links is not None
    assert fedcbo.summary["clusters"]["found"] == found_clusters(links)
    assert fedcbo.summary["weights"]["within"] > 0
    assert ran(tmp_path / "local", method={"name": "local"}).summary["weights"] is None


def test_killed_after_the_last_checkpoint_the_weights_are_those_of_the_uninterrupted_run(tmp_path: Path):
    run = ran(tmp_path / "cobo", method=COBO)
    whole = run.summary["weights"]
    (run.path / "summary.json").unlink()
    assert coterie.run(run.path, resume=True, display=Listener()).summary["weights"] == whole
    held = checkpoint.latest(run.folder.checkpoints, pytest.fail)
    assert held is not None
    del held.tensors["weights"]
    checkpoint.save(run.folder.checkpoints, held.round, held.tensors)
    (run.path / "summary.json").unlink()
    assert coterie.run(run.path, resume=True, display=Listener()).summary["weights"] is None


@pytest.mark.parametrize("method", [COBO, SMALL["method"]])
def test_interrupted_and_resumed_the_weights_are_the_same_to_the_last_bit(tmp_path: Path, method: dict[str, Any]):
    def weights(path: Path) -> tuple[Any, Tensor]:
        (last,) = path.glob("checkpoints/round-000004-*")
        records = [record["weights"] for record in coterie.Run(path, True).folder.records(warn=pytest.fail)]
        return records, load_file(last)["weights"]

    whole = ran(tmp_path / "whole", method=method)
    stopped = coterie.run(SMALL | {"method": method}, out=tmp_path / "out", display=Listener(interrupt_after=2))
    assert not stopped.completed
    resumed = coterie.run(tmp_path / "out", resume=True, display=Listener())
    assert weights(resumed.path)[0] == weights(whole.path)[0]
    assert torch.equal(weights(resumed.path)[1], weights(whole.path)[1])
    assert resumed.summary["weights"] == whole.summary["weights"]
    other = coterie.run(SMALL | {"method": method}, out=tmp_path / "other", seed=1, display=Listener())
    assert not torch.equal(weights(other.path)[1], weights(whole.path)[1])


# Better than alone


def test_improved_is_the_share_of_clients_that_do_better_than_alone(tmp_path: Path):
    done = coterie.compare(
        SMALL | {"rounds": 2}, methods=["local", "fedavg", COBO], seeds=(0, 1), out=tmp_path / "all", display=Listener()
    )
    by_hand: dict[str, list[float]] = {}
    for seed in (0, 1):
        found = {run.summary["label"]: run for run in done.runs if run.summary["seed"] == seed}
        alone = found["local"].summary["accuracy"]["per_client"]
        for label in ("fedavg", "cobo"):
            better = [a > b for a, b in zip(found[label].summary["accuracy"]["per_client"], alone, strict=True)]
            assert found[label].summary["improved"] == sum(better) / 6
            by_hand.setdefault(label, []).append(sum(better) / 6)
        assert found["local"].summary["improved"] is None
    rows = {row["method"]: row for row in done.rows()}
    assert rows["fedavg"]["improved"] == pytest.approx(sum(by_hand["fedavg"]) / 2)
    assert rows["cobo"]["improved"] == pytest.approx(sum(by_hand["cobo"]) / 2)
    assert rows["local"]["improved"] is rows["local"]["within"] is None
    assert rows["cobo"]["within"] > 0
    assert rows["fedavg"]["within"] is None


def test_without_a_counterpart_it_is_not_known(tmp_path: Path):
    """Alone on other data, or not in the comparison at all."""
    few = {"name": "local", "with": {"scenario": {"examples_per_client": 15}}}
    done = coterie.compare(SMALL | {"rounds": 1}, methods=[few, "fedavg"], out=tmp_path / "all", display=Listener())
    assert [run.summary["improved"] for run in done.runs] == [None, None]


def test_of_a_regression_a_lower_loss_is_better(tmp_path: Path):
    inputs = [torch.randn(20, 3, generator=torch.Generator().manual_seed(client)) for client in range(3)]
    pairs = [(x, x.sum(1, keepdim=True)) for x in inputs]
    data = coterie.Federation.from_arrays(pairs, pairs)
    done = coterie.compare(
        {"rounds": 3, "train": {"lr": 0.02}}, methods=["local", "fedavg"], federation=data,
        model=torch.nn.Linear(3, 1), out=tmp_path / "all", display=Listener(),
    )  # fmt: skip
    alone, together = ([one["loss"] for one in run.folder.clients() or ()] for run in done.runs)
    better = [mine < theirs for mine, theirs in zip(together, alone, strict=True)]
    assert done.runs[1].summary["improved"] == sum(better) / 3
