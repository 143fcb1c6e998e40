"""The commands: what they print, and that they are quick about it."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.config import Config, Stay
from coterie.data import SCENARIOS, SOURCES
from coterie.descent import Train
from coterie.methods import METHODS
from coterie.models import MODELS
from coterie.options import Options
from coterie.robust.attacks import ATTACKS
from program import SCRIPT, SMALL, coterie, file, toml

__all__ = ["file"]  # a fixture
DEMO = Path(__file__).parents[1] / "src" / "coterie" / "demo.toml"


def test_the_installed_program_offers_its_commands() -> None:
    ended = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    for command in (
        "run",
        "compare",
        "attack",
        "demo",
        "methods",
        "attacks",
        "scenarios",
        "models",
        "settings",
        "data",
        "doctor",
    ):
        assert command in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["rnu"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    script = (
        "import sys; from coterie.cli import main; sys.argv = ['coterie', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: print('heavy:', {'torch', 'sklearn', 'numpy'} & set(sys.modules), end='')"
    )
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert ended.stdout.endswith("heavy: set()")


@pytest.mark.parametrize("command", ["run", "compare", "attack", "demo", "methods", "data"])
@pytest.mark.parametrize("width", ["80", "160"])
def test_help_fits_the_screen(monkeypatch: pytest.MonkeyPatch, command: str, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    ended = coterie(command, "--help")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= int(width)
    assert "…" not in ended.out


@pytest.mark.parametrize("command", ["run", "compare", "attack"])
def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    printed = coterie(command, "--help").out
    assert f"Example: coterie {command} experiments/" in printed
    example = printed.partition("Example: coterie ")[2].split()[1]
    assert (DEMO.parents[2] / example).exists()


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ("methods", METHODS),
        ("attacks", ATTACKS),
        ("scenarios", SCENARIOS),
        ("models", MODELS),
        ("settings", {"at the top of the file": Config, "[train]": Train, "[[presence]]": Stay}),
    ],
)
def test_every_option_is_listed_with_its_default(
    monkeypatch: pytest.MonkeyPatch, command: str, kinds: dict[str, type[Options]]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ended = coterie(command)
    assert ended.code == 0
    lines = ended.out.splitlines()
    for name, kind in kinds.items():
        assert name in lines
        section = lines[lines.index(name) :]
        for key, option in kind.model_fields.items():
            if key in ("name", "scenario", "model", "train", "method", "attack", "compare", "presence"):
                continue
            row = next(line.split(maxsplit=1) for line in section if line.split()[:1] == [key])
            default = option.get_default(call_default_factory=True)
            assert row[1].startswith(str(default)), (name, key)


def test_what_looks_like_markup_is_printed_as_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    label = "[/red]x [bold]y :bug:"
    ended = coterie("run", file, "--out", "out", "--set", f'label="{label}"', "--set", "rounds=1")
    assert ended.code == 0
    assert label in ended.out
    assert ended.err.startswith(f"{label}: round 1 of 1")
    assert label in coterie("compare", file, "--set", f'compare.methods=[{{name="local", label="{label}"}}]').out
    assert label in coterie("run", file, "--set", f'model.name="{label}"').err
    assert "unset: that of [attack]" in coterie("settings").out


@pytest.mark.parametrize(
    ("pressed_at", "code"), [("coterie.display", 130), ("torch", 130), ("numpy", 130), ("never", 2)]
)
def test_ctrl_c_during_an_import_ends_the_program_without_a_word(pressed_at: str, code: int) -> None:
    """torch would take an interrupted import of numpy for a numpy that is not there."""
    script = (
        "import signal, sys\nfrom coterie.cli import main\n"
        "class Presses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[2]: sys.meta_path.remove(self); signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presses())\nsys.argv[1:1] = ['run']\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", script, pressed_at], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert (ended.stdout + ended.stderr == "") is (code == 130)  # else it is named as no file


def test_ctrl_c_elsewhere_ends_the_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.data_folder", lambda: signal.raise_signal(signal.SIGINT))
    ended = coterie("data")
    assert (ended.code, ended.out, ended.err) == (130, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_letters_that_the_output_lacks_are_replaced(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run([SCRIPT, "methods", "fedcb2o"], capture_output=True, env=environment, check=True)
    assert ("FedCB?O" if encoding == "ascii" else "FedCB²O") in ended.stdout.decode()
    assert ended.stderr == b""


@pytest.mark.parametrize(
    ("where", "code", "words"), [(">&-", 0, ""), (">/dev/full", 2, "error: No space left on device.\n")]
)
def test_an_output_that_takes_nothing_leaves_no_traceback(where: str, code: int, words: str) -> None:
    ended = subprocess.run(["sh", "-c", f'"$0" models {where}', SCRIPT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, words)


def test_one_method_alone_can_be_listed() -> None:
    printed = coterie("methods", "ifca").out
    assert "clusters" in printed
    assert "download" not in printed


def test_the_data_sets_are_listed_with_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    printed = coterie("data").out
    assert all(name in printed for name in SOURCES)
    assert str(tmp_path) in printed
    assert "coterie data fetch mnist" in printed
    assert "coterie data fetch digits" not in printed  # it comes along


def test_the_doctor_measures_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    printed = coterie("doctor").out
    for words in ("torch", "cores", "GFLOP/s a core in float32", "data found", "digits", "coterie data fetch NAME"):
        assert words in printed


def test_a_run_prints_its_results_once_and_plain_lines_meanwhile(file: Path) -> None:
    ended = coterie("run", file, "--out", "out")
    assert ended.code == 0
    for words in ("fedcbo", "test accuracy", "own-cluster selection", "adjusted Rand", "out/report.html", "4 rounds"):
        assert words in ended.out
    assert ended.err.startswith("fedcbo: round 4 of 4, accuracy ")
    assert ended.err.count("\n") == 1


def test_settings_and_the_seed_are_put_over_the_file(file: Path) -> None:
    ended = coterie("run", file, "--set", "method.name=local", "--set", "rounds=1", "--seed", "7", "--quiet")
    assert ended.code == 0
    assert "runs/local-rotated-seed7/report.html" in ended.out
    assert Path("runs/local-rotated-seed7/summary.json").exists()


def test_a_finished_run_shows_its_results_again(file: Path) -> None:
    first = coterie("run", file, "--out", "out", "--set", "rounds=1")
    again = coterie("run", "out", "--resume")
    assert again.code == 0
    assert again.out == first.out
    assert "finished already" in again.err
    more = coterie("run", "out", "--resume", "--set", "rounds=2")
    assert "2 rounds" in more.out


def test_a_regression_and_unknown_clusters_leave_dashes(file: Path) -> None:
    ended = coterie("run", file, "--out", "out", "--set", "scenario.name=dirichlet", "--set", "rounds=1")
    assert ended.code == 0
    assert "adjusted Rand –" in ended.out


def test_a_comparison_is_one_table(file: Path) -> None:
    options = ["--methods", "local, fedcbo", "--seeds", "0, 1", "--set", "rounds=1"]
    ended = coterie("compare", file, "--out", "out", *options)
    assert ended.code == 0
    rows = {line.split("│")[1].strip(): line for line in ended.out.splitlines() if line.startswith("│")}
    assert list(rows) == ["local", "fedcbo"]
    assert all("±" in row for row in rows.values())
    assert "–" in rows["local"]  # it selects nobody
    assert "report: out/report.html" in ended.out


def test_the_methods_and_seeds_of_the_file_are_taken_where_none_are_given(file: Path) -> None:
    tables: dict[str, Any] = SMALL | {"rounds": 1, "compare": {"methods": ["local", "fedavg"], "seeds": [2]}}
    file.write_text(toml(tables))
    assert coterie("compare", file, "--out", "out").code == 0
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == ["fedavg-seed2", "local-seed2"]


def test_the_demo_compares_all_methods(tmp_path: Path) -> None:
    """Its file, for one round and one seed."""
    plan = tomllib.loads(DEMO.read_text())["compare"]
    ended = coterie("compare", DEMO, "--set", "rounds=1", "--seeds", "0", "--out", tmp_path / "demo")
    assert ended.code == 0
    assert all(f"│ {method} " in ended.out for method in plan["methods"])
    assert {"local", "fedavg", "fedcbo"} <= set(plan["methods"])


def test_methods_and_attacks_make_two_matrices(file: Path) -> None:
    attacked = {"attack": {"name": "label-flip", "source": 0, "target": 1, "malicious_per_cluster": 1}}
    file.write_text(toml(SMALL | {"rounds": 1} | attacked))
    options = ["--methods", "local,fedavg", "--attacks", "none,label-flip,silent", "--out", "out"]
    ended = coterie("attack", file, *options)
    assert ended.code == 0
    rows = [line.split("│")[1].strip() for line in ended.out.splitlines() if line.startswith("│")]
    assert rows == ["none", "label-flip", "silent", "label-flip"]  # accuracy of all, success where there is an aim
    page = Path("out/report.html").read_text()
    assert "a row is an attack, a column a method" in page


def test_all_attacks_are_run_where_none_are_named(file: Path) -> None:
    few = ["--set", "rounds=1", "--set", "attack.name=none", "--set", "attack.malicious_per_cluster=1"]
    assert coterie("attack", file, "--methods", "local", *few, "--out", "out").code == 0
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {f"local-{name}-seed0" for name in ATTACKS}
