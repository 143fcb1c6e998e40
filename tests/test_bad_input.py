"""What bad input gets: exit code 2, one clear message, no traceback, and nothing half-written."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import coterie as library
from coterie.cli import main
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
        ("presence=[{clients=[9], joins=2}]", ["presence.clients: got 9", "0 to 5, each in one table only"]),
        ("presence=[{clients=[1]}, {clients=[1], joins=2}]", ["presence.clients: got 1", "each in one table only"]),
        ("presence=[{clients=[1], joins=3, leaves=3}]", ["presence.leaves: got 3", "more than 3, when they join"]),
        ("presence=[{clients=[0,1,2,3,4,5], joins=2}]", ["presence: got 'nobody in round 1'", "at least one client"]),
        ("presence=[{clients=[0,1,2], joins=2}]", ["method.download: got 3", "1 to 2 (3 of the clients"]),
        ("device=cudaa", ["device: got 'cudaa'", "cpu"]),
        ("device=meta", ["device: got 'meta'", "cpu"]),
        ("model.hidden=[0]", ["model.hidden.0: got 0", "greater than 0"]),
        ("train.lr=1e308", ["train.lr: got 1e+308", "less than or equal to 1000000"]),
        ("train.weight_decay=1e308", ["train.weight_decay: got 1e+308", "less than or equal to 1000000"]),
        ("train.epochs=1000000000000", ["train.epochs: got 1000000000000", "less than or equal to 10000"]),
        (f"train.epochs={10**30}", [f"train.epochs: got {10**30}", "less than or equal to 10000"]),
        (f"train.batch_size={10**30}", [f"train.batch_size: got {10**30}", "less than or equal to"]),
        ("method.epsilon_decay=inf", ["method.epsilon_decay: got inf", "less than or equal to 1"]),
        ("scenario.clients=1000000000000", ["scenario.clients: got 1000000000000", "less than or equal to 10000000"]),
        ('model={name="cnn", hidden=9223372036854775808}', ["model.hidden: got 9223372036854775808", "1000000"]),
        ('method={name="ifca", clusters=7}', ["method.clusters: got 7", "1 to 6, the number of clients"]),
        (
            'attack={name="backdoor", size=9, malicious_per_cluster=1}',
            ["attack.size: got 9", "1 to 8, for it must fit an example"],
        ),
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
        (["compare", "small.toml", "--seeds", "-1", "--out", "out"], "compare.seeds.0: got -1"),
        (["compare", "small.toml", "--methods", "fedcb", "--out", "out"], 'Did you mean "fedcbo"?'),
        (["compare", "small.toml", "--methods", "local,local", "--out", "out"], "twice"),
    ],
)
def test_a_wrong_name_or_number_is_named(file: Path, arguments: list[str], words: str) -> None:
    assert words in said(coterie(*arguments))
    assert not Path("out").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("methods=[{}]", "compare.methods.0.name: got ''"),
        ("attacks=[{}]", "compare.attacks.0.name: got ''"),
        ('methods=["local", {name = "fedavg", with = {method = {}}}]', "compare.methods.1.with.method: got {}"),
        ('methods=[{name = "fedavg", with = {compare = {}}}]', "compare.methods.0.with.compare: got {}"),
        ('methods=[{name = "fedavg", with = {rounds = 0}}]', "compare, fedavg: rounds: got 0"),
        ('methods=[{name = "ifca", clusters = 7, label = "many"}]', "compare, many: method.clusters: got 7"),
        ('attacks=["none", {name = "stale", age = 0}]', "compare.attacks.1.age: got 0"),
        ("seeds=[0, -1]", "compare.seeds.1: got -1"),
    ],
)
def test_a_mistake_in_a_comparison_is_told_with_its_entry(file: Path, setting: str, words: str) -> None:
    assert words in said(coterie("compare", file, "--out", "out", "--set", f"compare.{setting}"))
    assert not Path("out").exists()


def test_an_attack_beside_listed_attacks_is_refused(file: Path) -> None:
    methods = '["local", {name = "fedavg", with = {attack = {name = "none", malicious_per_cluster = 0}}}]'
    settings = ["--set", f"compare.methods={methods}", "--set", "rounds=1", "--out", "out"]
    message = said(coterie("compare", file, *settings, "--set", 'compare.attacks=["none"]'))
    assert "compare.methods.1.with.attack" in message
    assert not Path("out").exists()
    assert coterie("compare", file, *settings).code == 0


@pytest.mark.parametrize("entry", [{}, {"label": "x"}])
def test_an_entry_given_in_python_needs_a_name_too(tmp_path: Path, entry: dict[str, str]) -> None:
    for asked in ({"methods": [entry]}, {"attacks": [entry]}):
        with pytest.raises(ConfigError, match=r"compare\..*0\.name: got ''"):
            library.compare(SMALL, out=tmp_path / "out", **asked)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("command", ["compare", "attack"])
def test_a_comparison_leaves_a_foreign_folder_as_it_is(file: Path, command: str) -> None:
    out = Path("out")
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    few = ["--set", "rounds=1", "--set", "attack.malicious_per_cluster=1"]
    assert "already holds other files" in said(coterie(command, file, "--out", out, *few))
    assert contents(out) == {"thesis.tex": b"years of work"}
    assert "small.toml is a file" in said(coterie(command, file, "--out", "small.toml", *few))


@pytest.mark.parametrize("left", ["fedavg-seed0/.lock", "earlier/config.json", "comparison.json"])
def test_a_folder_in_which_a_comparison_began_is_continued(file: Path, left: str) -> None:
    (Path("out") / left).parent.mkdir(parents=True)
    (Path("out") / left).write_text("")
    assert coterie("compare", file, "--out", "out", "--methods", "fedavg", "--set", "rounds=1").code == 0
    assert Path("out/fedavg-seed0/summary.json").exists()


LONG = 300 * "a"


@pytest.mark.parametrize(
    "arguments", [["run", "small.toml", "--out", LONG], ["compare", "small.toml", "--out", LONG], ["run", LONG]]
)
def test_a_path_that_the_system_refuses_is_told_in_one_line(file: Path, arguments: list[str]) -> None:
    assert f"{LONG}" in said(coterie(*arguments))


@pytest.mark.parametrize("folder", [LONG, "~nobody-of-this-name/x"])
@pytest.mark.parametrize("arguments", [["data"], ["run", "small.toml", "--set", "scenario.data=mnist"]])
def test_a_data_folder_that_cannot_be_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, folder: str, arguments: list[str]
) -> None:
    monkeypatch.setenv("COTERIE_DATA", folder)
    assert said(coterie(*arguments)).startswith(f"error: COTERIE_DATA: got '{folder}'")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 bytes"), True),
        (OSError(28, "No space left on device"), True),
        (RuntimeError("a defect"), False),
    ],
)
def test_what_the_machine_lacks_is_told_and_a_defect_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: bool
) -> None:
    def fail() -> Path:
        raise error

    monkeypatch.setattr("coterie.data.data_folder", fail)
    if told:
        said(coterie("data"))
    else:
        with pytest.raises(RuntimeError, match="a defect"), patch.object(sys, "argv", ["coterie", "data"]):
            main()


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


def test_what_is_no_federation_or_no_model_is_refused(tmp_path: Path) -> None:
    assert "federation: got 'list'" in refused(ConfigError, tmp_path, [clients()], network())  # type: ignore[arg-type]
    assert "federation: got 'list'" in refused(ConfigError, tmp_path, [], network())  # type: ignore[arg-type]
    assert "model: got 3" in refused(ModelError, tmp_path, clients(), 3)  # type: ignore[arg-type]


def test_malicious_clients_with_own_data_bring_their_own_examples(tmp_path: Path) -> None:
    attack = {"name": "silent", "malicious": [0]}
    with pytest.raises(ConfigError, match=r"attack\.malicious_examples: got 5; allowed: nothing with data of your own"):
        library.run(
            TABLES | {"attack": attack | {"malicious_examples": 5}},
            federation=clients(), model=network(), out=tmp_path / "out",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
    tables = TABLES | {"attack": attack}
    assert library.run(tables, federation=clients(), model=network(), out=tmp_path / "out").completed


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
