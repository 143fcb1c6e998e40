"""What a person sees while a run goes on: a progress bar with the time left, or plain lines."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from coterie import tables


class Display(Protocol):
    """Follows one run after another."""

    def begin(self, label: str, rounds: int) -> None:
        """A run is being prepared."""
        ...

    def at(self, done: int) -> None:
        """Its rounds begin, so many being done already."""
        ...

    def round(self, record: Mapping[str, Any]) -> None: ...
    def end(self) -> None: ...
    def say(self, text: str) -> None: ...


class Bar:
    """A live progress bar with time left, accuracy and selection rate."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def begin(self, label: str, rounds: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        last = (TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[status]}", markup=False))
        self._progress = Progress(*columns, *last, console=self._console)
        self._task = self._progress.add_task(f"{label:>10}", total=rounds, status="preparing ...")
        self._progress.start()

    def at(self, done: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, status="first round ...")

    def round(self, record: Mapping[str, Any]) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=record["round"], status=status(record))

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def say(self, text: str) -> None:
        self._console.print(Text(text))


class Lines:
    """Plain lines, for files and pipes: one every two seconds, or with `quiet` only the last round's."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._label, self._rounds, self._done = "", 0, 0
        self._began = self._said = 0.0
        self._last: Mapping[str, Any] = {}

    def begin(self, label: str, rounds: int) -> None:
        self._label, self._rounds, self._last = label, rounds, {}

    def at(self, done: int) -> None:
        self._done = done
        self._began = self._said = time.monotonic()

    def round(self, record: Mapping[str, Any]) -> None:
        self._last = record
        now = time.monotonic()
        if not self._quiet and now - self._said > 2:
            self._said = now
            left = (now - self._began) / (record["round"] - self._done) * (self._rounds - record["round"])
            self.say(f"{self._label}: round {record['round']} of {self._rounds}, {status(record)}, {left:.0f} s left")

    def end(self) -> None:
        if self._last:
            self.say(f"{self._label}: round {self._last['round']} of {self._rounds}, {status(self._last)}")

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def status(record: Mapping[str, Any]) -> str:
    """The figures of a round in a few words."""
    parts = []
    if record["accuracy"] is not None:
        parts.append(f"accuracy {100 * record['accuracy']['mean']:.1f} %")
    elif record["loss"] is not None:
        parts.append(f"loss {record['loss']:.4g}")
    if record["selection_rate"] is not None:
        parts.append(f"own-cluster selection {100 * record['selection_rate']:.0f} %")
    if record["refused"]:
        parts.append(f"{len(record['refused'])} clients refused")
    return ", ".join(parts) or "not evaluated"


def default_display(quiet: bool = False) -> Display:
    """A bar on a terminal, lines elsewhere."""
    console = tables.console(stderr=True)
    return Bar(console) if sys.stderr.isatty() and not quiet else Lines(console, quiet)
