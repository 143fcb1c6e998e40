"""Whole runs and comparisons: what they leave behind, and what they do not depend on."""

import gc
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie import Federation
from coterie.config import parse
from coterie.errors import ConfigError, RunError
from coterie.runs import RunFolder
from coterie.world import World
from program import SMALL, Listener, results

QUIET = Listener()


def ran(folder: Path, name: str = "out", **changes: Any) -> coterie.Run:
    """A small run with some tables changed."""
    return coterie.run(SMALL | changes, out=folder / name, display=QUIET)


def models(folder: Path) -> Tensor:
    return load_file(folder / "models.safetensors")["models"]


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    run = ran(tmp_path)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary.keys() >= {
        "method", "scenario", "seed", "rounds", "accuracy", "loss", "selection_rate", "clusters", "seconds",
        "rounds_completed", "fleet",
    }  # fmt: skip
    accuracy = summary["accuracy"]
    assert accuracy.keys() == {"mean", "std", "min", "max", "per_client"}
    assert accuracy["mean"] == pytest.approx(statistics.fmean(accuracy["per_client"]), abs=1e-6)
    assert (summary["method"], summary["scenario"], summary["fleet"]) == ("fedcbo", "rotated", "simulated")
    assert summary["rounds_completed"] == 4
    assert [record["round"] for record in run.folder.records(warn=pytest.fail)] == [1, 2, 3, 4]
    per_client = run.folder.clients()
    assert per_client is not None
    assert [one["accuracy"] for one in per_client] == accuracy["per_client"]
    assert [one["cluster"] for one in per_client] == [0, 0, 0, 1, 1, 1]
    assert len(list(run.folder.checkpoints.iterdir())) == 2
    assert "<html" in run.folder.report.read_text()[:200]
    assert run.summary == summary


def test_the_configuration_kept_is_the_one_that_ran(tmp_path: Path) -> None:
    tables = ran(tmp_path, seed=3, method={"name": "local"}, rounds=1).folder.config
    again = parse({key: value for key, value in tables.items() if value is not None})
    assert again == parse(SMALL | {"seed": 3, "method": {"name": "local"}, "rounds": 1})
    assert again != parse(SMALL | {"seed": 3, "method": {"name": "local"}, "rounds": 2})


def test_rounds_between_evaluations_are_not_evaluated_and_the_last_is(tmp_path: Path) -> None:
    run = ran(tmp_path, rounds=5, evaluate_every=2)
    records = run.folder.records(warn=pytest.fail)
    assert [record["accuracy"] is not None for record in records] == [False, True, False, True, True]
    assert records[-1]["accuracy"]["mean"] == run.summary["accuracy"]["mean"]


def test_models_are_left_out_if_asked(tmp_path: Path) -> None:
    run = ran(tmp_path, rounds=1, save_models=False)
    assert not (run.path / "models.safetensors").exists()
    assert run.summary["accuracy"]["mean"] > 0
    with pytest.raises(RunError, match=r"models\.safetensors does not exist"):
        run.load_model(0, nn.Linear(1, 1))


def test_a_share_of_the_clients_takes_part_and_all_are_evaluated(tmp_path: Path) -> None:
    run = ran(tmp_path, participation=0.5, method={"name": "fedcbo", "download": 2})
    assert {record["clients"] for record in run.folder.records(warn=pytest.fail)} == {3}
    assert len(run.summary["accuracy"]["per_client"]) == 6
    initial = ran(tmp_path, "none", train={"lr": 1e-30}, method={"name": "local"}, rounds=1)
    first = ran(tmp_path, "first", participation=0.5, method={"name": "fedcbo", "download": 2}, rounds=1)
    untouched = (models(first.path) == models(initial.path)).all(dim=1)
    assert untouched.sum() == 3


def test_the_folder_is_named_after_the_run_and_never_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = SMALL | {"rounds": 1, "method": {"name": "local"}}
    paths = [coterie.run(tables, display=QUIET).path for _ in range(2)]
    assert [str(path) for path in paths] == ["runs/local-rotated-seed0", "runs/local-rotated-seed0-2"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests below compare with: one client at a time, on one thread."""
    return ran(tmp_path_factory.mktemp("loop"), **NINE, kernel="loop", block=1, threads=1).path


NINE = {
    "rounds": 2,
    "scenario": SMALL["scenario"] | {"clients": 9},
    "method": {"name": "fedcbo", "download": 3, "noise": "anisotropic", "noise_level": 0.1},
    "participation": 0.7,
}


@pytest.mark.parametrize(("block", "threads"), [(7, 1), (None, 1), (7, 2), (None, 2)])
def test_neither_blocks_nor_threads_change_a_bit(
    reference: Path, tmp_path: Path, block: int | None, threads: int
) -> None:
    assert results(ran(tmp_path, **NINE, kernel="loop", block=block, threads=threads).path) == results(reference)


def test_another_seed_changes_the_run(reference: Path, tmp_path: Path) -> None:
    other = coterie.run(SMALL | NINE | {"kernel": "loop"}, out=tmp_path / "out", seed=1, display=QUIET)
    assert other.summary["seed"] == 1
    assert all(results(other.path)[name] != results(reference)[name] for name in ("models.safetensors", "clients.json"))


@pytest.mark.parametrize("kernel", ["batched", "vmap"])
def test_other_kernels_agree_with_the_loop(reference: Path, tmp_path: Path, kernel: str) -> None:
    """To 1e-4 of the largest weight: sums of float32 in another order, over two rounds of ten steps."""
    run = ran(tmp_path, **NINE, kernel=kernel, block=4)
    expected = models(reference)
    assert (models(run.path) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert run.summary["loss"] == pytest.approx(RunFolder(reference).summary()["loss"], rel=1e-4)  # type: ignore[index]
    assert run.summary["clusters"] == RunFolder(reference).summary()["clusters"]  # type: ignore[index]


@pytest.mark.parametrize("kernel", ["loop", "batched"])
def test_memory_that_nobody_wrote_is_read_by_nobody(tmp_path: Path, kernel: str) -> None:
    """With torch's deterministic mode fresh memory is filled with NaN: that of clients that do not take part, say."""
    torch.use_deterministic_algorithms(True)
    try:
        filled = ran(tmp_path, "filled", **NINE, kernel=kernel)
    finally:
        torch.use_deterministic_algorithms(False)
    assert filled.summary["refused"] == {}
    assert results(filled.path) == results(ran(tmp_path, "plain", **NINE, kernel=kernel).path)


def test_bf16_evaluation_changes_the_accuracy_by_little(tmp_path: Path) -> None:
    """Within two points: 8 bits of mantissa turn over an example here and there, not whole classes."""
    longer = {
        "rounds": 5,
        "train": {"epochs": 5, "batch_size": 10, "lr": 0.1},
        "model": {"name": "mlp", "hidden": [32]},
    }
    exact, short = (ran(tmp_path, precision, **longer, precision=precision) for precision in ("float32", "bf16"))
    assert exact.summary["accuracy"]["mean"] > 0.5
    assert short.summary["accuracy"]["mean"] == pytest.approx(exact.summary["accuracy"]["mean"], abs=0.02)
    assert short.summary["precision"] == "bf16"
    assert short.summary["loss"] != exact.summary["loss"]


def test_a_client_that_diverges_is_kept_out_counted_and_named(tmp_path: Path) -> None:
    pairs = blobs(5)
    pairs[2] = (pairs[2][0] * 1e30, pairs[2][1])
    tables = {"rounds": 3, "method": {"name": "fedcbo", "download": 4}, "train": {"epochs": 2, "lr": 0.1}}
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    federation = Federation.from_arrays(pairs)
    run = coterie.run(tables, federation=federation, model=network, out=tmp_path / "out", display=QUIET)
    assert run.summary["refused"].keys() == {"2"}
    assert run.summary["refused"]["2"]["count"] == 3
    assert "non-finite" in run.summary["refused"]["2"]["reason"]
    assert torch.isfinite(models(run.path)).all()
    others = [one for client, one in enumerate(run.summary["accuracy"]["per_client"]) if client != 2]
    assert min(others) >= 0.8  # of five examples each
    healthy = coterie.run(
        tables, federation=Federation.from_arrays(blobs(5)), model=network, out=tmp_path / "healthy", display=QUIET
    )
    assert healthy.summary["refused"] == {}


# Own data and models


def blobs(count: int, examples: int = 25, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients with two classes far apart."""
    generator = np.random.default_rng(seed)
    labels = [np.arange(examples) % 2 for _ in range(count)]
    return [(generator.normal(size=(examples, 4)) + 6.0 * y[:, None], y) for y in labels]


def test_own_data_and_a_network_with_batch_statistics_and_dropout(tmp_path: Path) -> None:
    def network() -> nn.Module:
        hidden = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)]
        return nn.Sequential(*hidden, nn.Linear(8, 2))

    train, test = blobs(4), blobs(4, examples=16, seed=1)
    tables = {"rounds": 2, "method": {"name": "fedcbo", "download": 2}, "train": {"batch_size": 5, "epochs": 2}}
    federation = Federation.from_arrays(train, test)
    run = coterie.run(tables, federation=federation, model=network, out=tmp_path / "out", display=QUIET)
    again = coterie.run(tables, federation=federation, model=network, out=tmp_path / "again", display=QUIET)
    assert results(run.path) == results(again.path)  # dropout included
    assert run.folder.config["scenario"] == {"name": "own data", "clients": 4}
    for client, (x, y) in enumerate(test):
        loaded = run.load_model(client, network()).eval()
        right = (loaded(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy() == y).mean()
        assert run.summary["accuracy"]["per_client"][client] == pytest.approx(right, abs=1e-6)
    assert run.summary["accuracy"]["mean"] > 0.9


def test_a_regression_has_a_loss_and_no_accuracy(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    slope = np.array([[1.0], [-2.0], [0.5]])
    inputs = [generator.normal(size=(20, 3)) for _ in range(3)]
    pairs = [(x, x @ slope) for x in inputs]
    tables = {"rounds": 5, "method": {"name": "fedavg"}, "train": {"batch_size": 10}}
    federation = Federation.from_arrays(pairs, pairs)
    run = coterie.run(tables, federation=federation, model=nn.Linear(3, 1), out=tmp_path / "out", display=QUIET)
    assert run.summary["accuracy"] is None
    loaded = run.load_model(0, nn.Linear(3, 1))
    with torch.no_grad():
        by_hand = [float(((loaded(torch.tensor(x).float()).numpy() - y) ** 2).mean()) for x, y in pairs]
    assert run.summary["loss"] == pytest.approx(statistics.fmean(by_hand), rel=1e-4, abs=1e-9)
    assert run.summary["loss"] < 0.01  # the law is linear
    row = coterie.Comparison(tmp_path, [run], True).rows()[0]
    assert row["accuracy"] is None
    assert row["loss"] == run.summary["loss"]


# Comparisons


def compared(
    folder: Path,
    methods: list[Any],
    seeds: tuple[int, ...] = (0,),
    attacks: list[Any] | None = None,
    **changes: Any,
) -> coterie.Comparison:
    tables = SMALL | {"rounds": 1, **changes}
    out = folder / "all"
    return coterie.compare(tables, methods=methods, attacks=attacks, seeds=seeds, out=out, display=Listener())


def test_a_row_is_the_mean_and_the_sample_deviation_over_seeds(tmp_path: Path) -> None:
    comparison = compared(tmp_path, ["local", "fedavg"], seeds=(0, 1, 5))
    assert sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir()) == [
        "fedavg-seed0", "fedavg-seed1", "fedavg-seed5", "local-seed0", "local-seed1", "local-seed5",
    ]  # fmt: skip
    summaries = [RunFolder(tmp_path / "all" / f"local-seed{seed}").summary() for seed in (0, 1, 5)]
    assert [summary["seed"] for summary in summaries if summary] == [0, 1, 5]
    a, b, c = (summary["accuracy"]["mean"] for summary in summaries if summary)
    mean = (a + b + c) / 3
    deviation = (((a - mean) ** 2 + (b - mean) ** 2 + (c - mean) ** 2) / 2) ** 0.5
    row = comparison.rows()[0]
    assert (row["method"], row["seeds"]) == ("local", 3)
    assert row["accuracy"] == pytest.approx(mean)
    assert row["accuracy_std"] == pytest.approx(deviation)
    assert deviation > 0
    assert row["selection_rate"] is None  # nobody is selected
    assert json.loads((tmp_path / "all" / "comparison.json").read_text()) == comparison.rows()
    assert (tmp_path / "all" / "report.html").exists()


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    row = compared(tmp_path, ["local"]).rows()[0]
    assert row["accuracy"] > 0
    assert row["accuracy_std"] is None


def test_a_name_stands_for_what_the_file_lists_under_it(tmp_path: Path) -> None:
    """By label first, which is the name where none is given; else by name; else it is the plain method."""
    listed: list[Any] = [
        {"name": "fedavg", "aggregation": "median"}, {"name": "fedavg", "label": "krum", "aggregation": "krum"},
        {"name": "fedcbo", "label": "sharp", "alpha": 30.0},
    ]  # fmt: skip
    done = compared(tmp_path, ["fedavg", "krum", "fedcbo", "ifca"], compare={"methods": listed})
    configs = [one.folder.config for one in done.runs]
    assert [config["label"] for config in configs] == ["", "krum", "sharp", ""]
    assert [config["method"].get("aggregation") for config in configs] == ["median", "krum", None, None]
    assert configs[2]["method"]["alpha"] == 30.0


def test_nobody_colludes_where_there_is_no_attack(tmp_path: Path) -> None:
    """[attack] says what all attacks have in common, but `none` is nobody doing anything."""
    flip = {"name": "label-flip", "source": 0, "target": 1, "malicious_per_cluster": 1, "collude": True}
    done = compared(tmp_path, ["fedcbo"], attacks=["none", "label-flip"], attack=flip)
    assert [one.folder.config["attack"]["collude"] for one in done.runs] == [False, True]
    assert [len(one.summary["attack"]["malicious"]) for one in done.runs] == [2, 2]


def test_finished_runs_are_kept_and_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    out, tables = tmp_path / "all", SMALL | {"rounds": 2, "compare": {"methods": ["local", "fedavg"]}}
    first = coterie.compare(SMALL | {"rounds": 2}, methods=["local"], out=out, display=Listener())
    written = (first.runs[0].path / "summary.json").stat().st_mtime_ns
    stopped = coterie.compare(tables, out=out, display=Listener(interrupt_after=1))
    assert not stopped.completed
    assert [run.path.name for run in stopped.runs] == ["local-seed0"]
    listener = Listener()
    finished = coterie.compare(tables, out=out, display=listener)
    assert finished.completed
    assert [row["method"] for row in finished.rows()] == ["local", "fedavg"]
    assert listener.rounds == [2]  # of fedavg, and nothing of local
    assert (first.runs[0].path / "summary.json").stat().st_mtime_ns == written


def test_a_bare_name_keeps_the_keys_of_the_file_and_a_table_changes_them(tmp_path: Path) -> None:
    sharp = {"name": "fedcbo", "label": "sharp", "alpha": 30.0}
    comparison = compared(tmp_path, ["fedcbo", sharp, {"name": "ifca", "clusters": 2}])
    kept = {run.summary["label"]: run.folder.config["method"] for run in comparison.runs}
    assert list(kept) == ["fedcbo", "sharp", "ifca"]
    assert (kept["fedcbo"]["download"], kept["fedcbo"]["alpha"]) == (3, 3.0)
    assert (kept["sharp"]["download"], kept["sharp"]["alpha"]) == (3, 30.0)
    assert kept["ifca"]["clusters"] == 2
    assert [row["method"] for row in comparison.rows()] == ["fedcbo", "sharp", "ifca"]


def test_a_table_may_change_settings_outside_its_method(tmp_path: Path) -> None:
    own = {"name": "local", "label": "own", "with": {"initial": "own", "train": {"lr": 0.2}}}
    comparison = compared(tmp_path, ["local", own], train={"lr": 0.1, "batch_size": 7})
    kept = {run.summary["label"]: run.folder.config for run in comparison.runs}
    assert (kept["local"]["initial"], kept["own"]["initial"]) == ("common", "own")
    assert (kept["local"]["train"]["lr"], kept["own"]["train"]["lr"]) == (0.1, 0.2)
    assert kept["own"]["train"]["batch_size"] == 7  # the rest of a table stays


def test_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedcbo with seed 0 twice"):
        compared(tmp_path, ["fedcbo", {"name": "fedcbo", "alpha": 30.0}])
    assert not (tmp_path / "all").exists()


def test_a_comparison_on_own_data(tmp_path: Path) -> None:
    comparison = coterie.compare(
        {"rounds": 1}, methods=["local", "fedavg"], federation=Federation.from_arrays(blobs(3)),
        model=nn.Linear(4, 2), out=tmp_path / "all", display=Listener(),
    )  # fmt: skip
    assert [row["method"] for row in comparison.rows()] == ["local", "fedavg"]


# attacks

ATTACKED: dict[str, Any] = {
    "scenario": SMALL["scenario"] | {"clients": 8, "validation": 0.25},
    "attack": {"name": "label-flip", "source": 0, "target": 1, "malicious_per_cluster": 1, "malicious_examples": 40},
}


def test_an_attacked_run_says_who_attacked_and_what_was_achieved(tmp_path: Path) -> None:
    run = ran(tmp_path, **ATTACKED)
    attack, per_client = run.summary["attack"], run.folder.clients()
    assert per_client is not None
    assert attack["malicious"] == [3, 7]
    assert [one["client"] for one in per_client if one["malicious"]] == [3, 7]
    assert [one["examples"] for one in per_client] == [15, 15, 15, 40, 15, 15, 15, 40]
    assert {len(values) for values in attack["per_client"].values()} == {8}
    for name in ("source_accuracy", "success_rate"):
        measured = [value for value in attack["per_client"][name] if value is not None]
        assert len(measured) == 6  # attackers are not measured
        assert attack[name] == pytest.approx(statistics.fmean(measured), abs=1e-6)
    assert run.summary["accuracy"]["per_client"][3] is None
    for what in ("selected", "weight"):
        shares = attack[what]
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)
        assert attack[f"{what}_malicious"] == pytest.approx(shares["own_malicious"] + shares["other_malicious"])
    assert ran(tmp_path, "peaceful").summary["attack"] is None


def test_each_method_meets_each_attack_with_as_many_attackers(tmp_path: Path) -> None:
    attacks = ["none", {"name": "scaling", "factor": 3.0}]
    comparison = compared(tmp_path, ["local", "fedcbo"], attacks=attacks, **ATTACKED)
    assert [(row["method"], row["attack"]) for row in comparison.rows()] == [
        ("local", "none"), ("local", "scaling"), ("fedcbo", "none"), ("fedcbo", "scaling"),
    ]  # fmt: skip
    kept = [run.folder.config["attack"] for run in comparison.runs]
    assert [(one["name"], one["malicious_per_cluster"]) for one in kept] == [("none", 1), ("scaling", 1)] * 2
    assert kept[1]["factor"] == 3.0
    alone, attacked = (comparison.rows()[place]["accuracy"] for place in (0, 1))
    assert alone == attacked  # nobody listens to anybody
    calm, scaled = (comparison.rows()[place]["loss"] for place in (2, 3))
    assert calm != scaled


def test_nothing_large_of_a_run_stays_in_memory(tmp_path: Path) -> None:
    """A comparison of many runs would else hold the data of all of them."""

    def federations() -> int:
        return sum(type(one) is Federation for one in gc.get_objects())

    ran(tmp_path, "first", rounds=1)  # what libraries keep of their first use is not ours
    gc.collect()
    gc.disable()
    try:
        before = federations()
        ran(tmp_path, rounds=1)
        assert federations() == before
        kept = World.of(parse(SMALL), None, None)
        assert federations() == before + 1
        del kept
    finally:
        gc.enable()
