"""What bad input gets: exit code 2, one clear message, no traceback, and nothing half-written."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import coterie as library
from coterie.errors import ConfigError, CoterieError, DataError, ModelError, RunError
from program import SCRIPT, SMALL, Ended, Listener, coterie, file, results, toml

__all__ = ["file"]  # a fixture


def said(ended: Ended) -> str:
    """The one message of a refusal."""
    assert ended.code == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("method.alhpa=1", ["method.alhpa: unknown key", 'Did you mean "alpha"?']),
        ("rounds=many", ["rounds: got 'many'", "integer"]),
        ("train.lr=-1", ["train.lr: got -1", "greater than 0"]),
        ("scenario.data=mnits", ["scenario.data: got 'mnits'", '"mnist"']),
        ("method.download=6", ["method.download: got 6", "1 to 5 (6 of the clients take part", "Lower it"]),
        ("participation=0.5", ["method.download: got 3", "1 to 2 (3 of the clients", "participation"]),
        ("participation=0.1", ["method.download: got 3", "nothing here (1 of the clients"]),
        ("scenario.examples_per_client=480", ["scenario.examples_per_client: got 480", "1 to 479", "1438 training"]),
        ("scenario.clients=1", ["scenario.clients: got 1", "2 or more"]),
        ("device=cudaa", ["device: got 'cudaa'", "cpu"]),
        ("device=meta", ["device: got 'meta'", "cpu"]),
        ("model.hidden=[0]", ["model.hidden.0: got 0", "greater than 0"]),
    ],
)
def test_a_setting_that_cannot_be_is_explained_and_nothing_is_written(
    file: Path, setting: str, words: list[str]
) -> None:
    message = said(coterie("run", file, "--out", "out", "--set", setting))
    assert all(word in message for word in words), message
    assert not Path("out").exists()


def test_the_installed_program_does_the_same(file: Path) -> None:
    ended = subprocess.run(
        [SCRIPT, "run", file, "--out", "out", "--set", "method.download=6"], capture_output=True, text=True, check=False
    )
    assert said(Ended(ended.returncode, ended.stdout, ended.stderr)).startswith("error: method.download: got 6")
    assert not Path("out").exists()


def test_a_model_that_cannot_take_the_data_is_explained(file: Path) -> None:
    settings = ["--set", "model.name=cnn", "--set", "model.channels=[1, 1, 1, 1]"]
    message = said(coterie("run", file, "--out", "out", *settings))
    assert "4 poolings" in message
    assert "(1, 8, 8)" in message
    assert not Path("out").exists()


def test_missing_data_is_answered_with_the_files_looked_for_and_where_to_get_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "empty"))
    message = said(coterie("run", file, "--out", "out", "--set", "scenario.data=mnist"))
    assert str(tmp_path / "empty") in message
    assert "train-images-idx3-ubyte" in message
    assert "`coterie data fetch mnist`" in message
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", [["nowhere.toml"], ["broken.toml"], ["folder"], ["folder", "--resume"]])
def test_what_is_no_configuration_is_named(file: Path, arguments: list[str]) -> None:
    Path("broken.toml").write_text("rounds = = 3")
    Path("folder").mkdir()
    message = said(coterie("run", *arguments))
    assert message.startswith(f"error: {arguments[0]}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "small.toml", "--sed", "3"], "--sed"),
        (["run"], "file"),
        (["run", "small.toml", "--seed", "x"], "'--seed'"),
        (["data", "fetsh"], "Did you mean 'fetch'?"),
    ],
)
def test_a_mistyped_command_line_is_answered_with_the_nearest(file: Path, arguments: list[str], words: str) -> None:
    ended = coterie(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert words in ended.err
    assert "Usage: " in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["methods", "fedcb"], 'Did you mean "fedcbo"?'),
        (["scenarios", "rotate"], 'Did you mean "rotated"?'),
        (["data", "fetch", "mnits"], 'Did you mean "mnist"?'),
        (["run", "small.toml", "--seed", "-1"], "seed: got -1"),
        (["compare", "small.toml", "--seeds", "0,a", "--out", "out"], "--seeds: got '0,a'"),
        (["compare", "small.toml", "--seeds", "-1", "--out", "out"], "seed: got -1"),
        (["compare", "small.toml", "--methods", "fedcb", "--out", "out"], 'Did you mean "fedcbo"?'),
        (["compare", "small.toml", "--methods", "local,local", "--out", "out"], "twice"),
    ],
)
def test_a_wrong_name_or_number_is_named(file: Path, arguments: list[str], words: str) -> None:
    assert words in said(coterie(*arguments))
    assert not Path("out").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "methods",
    [
        '["local", {name = "local", label = 3}]',
        '["local", {name = "local", label = "local"}]',
        '[{name = "local", label = "a/b"}, {name = "local", label = "a b"}]',  # one folder for both
        '["local", {name = "fedcbo", download = 6, label = "greedy"}]',
        '["local", {name = "fedcbo", alhpa = 6}]',
        '["local", {name = "fedavg", with = {rouds = 6}}]',
        '["local", {name = "fedavg", with = 6}]',
        '["local", "fedcb"]',
    ],
)
def test_a_comparison_with_one_mistake_does_not_begin(file: Path, methods: str) -> None:
    said(coterie("compare", file, "--out", "out", "--set", f"compare.methods={methods}"))
    assert not Path("out").exists()


def test_an_oracle_without_known_clusters_is_refused_before_anything_runs(file: Path) -> None:
    arguments = ["compare", file, "--out", "out", "--methods", "local,oracle", "--set", "rounds=1"]
    assert "method.name: got 'oracle'" in said(coterie(*arguments, "--set", "scenario.name=dirichlet"))
    assert not Path("out").exists()


def test_a_folder_that_holds_something_else_is_left_as_it_is(file: Path) -> None:
    out = Path("out")
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "already holds other files" in said(coterie("run", file, "--out", out))
    assert contents(out) == {"thesis.tex": b"years of work"}
    assert "small.toml is a file" in said(coterie("run", file, "--out", "small.toml"))
    assert file.read_text() == toml(SMALL)


def test_resuming_nothing_is_refused(file: Path) -> None:
    assert "no such run to resume" in said(coterie("run", file, "--resume"))
    assert "out holds no run" in said(coterie("run", file, "--resume", "--out", "out"))
    assert not Path("out").exists()
    assert not Path("runs").exists()


def test_a_run_is_neither_overwritten_nor_resumed_with_what_would_change_it(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    library.run(file, out=out, display=Listener(interrupt_after=2))
    before = contents(out)
    refusals = {
        "already holds a run": [],
        "rounds: got 1; allowed: at least 2": ["--resume", "--set", "rounds=1"],
        "method.alpha was 3.0 and is 4.0 now": ["--resume", "--set", "method.alpha=4.0"],
        "seed was 0 and is 1 now": ["--resume", "--seed", "1"],
        "scenario.clients was 6 and is 8 now": ["--resume", "--set", "scenario.clients=8"],
    }
    for words, arguments in refusals.items():
        assert words in said(coterie("run", file, "--out", out, *arguments))
        assert contents(out) == before
    assert coterie("run", out, "--resume").code == 0  # the control


def clients(scale: float = 1.0, outputs: int = 3) -> library.Federation:
    """Four clients of noise."""
    generator = np.random.default_rng(0)
    pairs = [(scale * generator.normal(size=(10, 4)), generator.integers(0, outputs, 10)) for _ in range(4)]
    pairs[0][1][:outputs] = np.arange(outputs)  # every label occurs
    return library.Federation.from_arrays(pairs)


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, outputs))


TABLES = {"rounds": 2, "method": {"name": "local"}}


def refused(kind: type[CoterieError], folder: Path, federation: library.Federation, model: nn.Module | None) -> str:
    with pytest.raises(kind) as error:
        library.run(TABLES, federation=federation, model=model, out=folder / "out")
    assert not (folder / "out").exists()
    return str(error.value)


def test_a_model_whose_output_does_not_fit_the_labels_is_refused(tmp_path: Path) -> None:
    message = refused(ModelError, tmp_path, clients(), network(5))
    assert "its output for one example is (5,); the labels need (3,)" in message
    assert "cannot take the data" in refused(ModelError, tmp_path, clients(), nn.Linear(7, 3))
    assert library.run(TABLES, federation=clients(), model=network(), out=tmp_path / "out").completed


def test_own_data_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "go together" in refused(ConfigError, tmp_path, clients(), None)


def test_data_that_is_not_a_number_is_refused_by_client() -> None:
    with pytest.raises(DataError, match=r"client 0.*x has NaN at"):
        clients(scale=float("nan"))


def test_a_run_is_not_resumed_on_other_data_or_with_another_network(tmp_path: Path) -> None:
    out = tmp_path / "out"
    library.run(TABLES, federation=clients(), model=network(), out=out, display=Listener(interrupt_after=1))
    before = contents(out)
    wider = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
    for federation, model in ((clients(scale=2.0), network()), (clients(), wider)):
        with pytest.raises(RunError, match="the data or the model are not those it began with"):
            library.run(TABLES, federation=federation, model=model, out=out, resume=True)
        assert contents(out) == before
    torch.manual_seed(0)  # a module brings its first weights, which no longer count
    assert library.run(TABLES, federation=clients(), model=network(), out=out, resume=True).completed
    assert results(out)["summary"]["rounds_completed"] == 2
