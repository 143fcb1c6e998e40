"""The whole program on runs of well under a second."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from coterie.cli import main

SCRIPT = shutil.which("coterie", path=str(Path(sys.executable).parent)) or "coterie"
SMALL: dict[str, Any] = {
    "rounds": 4,
    "scenario": {"name": "rotated", "data": "digits", "clusters": 2, "clients": 6, "examples_per_client": 20},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"epochs": 1, "batch_size": 10, "lr": 0.1},
    "method": {"name": "fedcbo", "download": 3},
}


@dataclass(frozen=True)
class Ended:
    """What a user is left with: the exit code and what was printed."""

    code: int
    out: str
    err: str


def coterie(*arguments: object) -> Ended:
    """The program, in this process."""
    typed = ["coterie", *map(str, arguments)]
    with (
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        patch.object(sys, "argv", typed),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return Ended(code or 0, _plain(out), _plain(err))


def _plain(printed: StringIO) -> str:
    """Without colours, which some build services ask for."""
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())


def toml(tables: Mapping[str, Any]) -> str:
    """A configuration file of these tables; what JSON writes for a value TOML reads."""
    top = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            top += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(top) + "\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small configuration in an empty working folder, on a wide screen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "small.toml"
    path.write_text(toml(SMALL))
    return path


@dataclass
class Listener:
    """A display that keeps what it is told, and presses Ctrl-C after a round."""

    interrupt_after: int = 0
    rounds: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def begin(self, label: str, rounds: int) -> None:
        """A run is prepared."""

    def at(self, done: int) -> None:
        """Its rounds begin."""

    def round(self, record: Mapping[str, Any]) -> None:
        """A round is over."""
        self.rounds.append(record["round"])
        if record["round"] == self.interrupt_after:
            signal.raise_signal(signal.SIGINT)

    def end(self) -> None:
        """A run ends."""

    def say(self, text: str) -> None:
        """Words for the user."""
        self.said.append(text)


def results(folder: Path) -> dict[str, Any]:
    """All that a finished run found, but for the time it took: equal for equal runs, to the last bit."""
    summary = json.loads((folder / "summary.json").read_text())
    del summary["seconds"]
    files = ("models.safetensors", "links.safetensors", "clients.json")
    return {"summary": summary} | {name: (folder / name).read_bytes() for name in files}
