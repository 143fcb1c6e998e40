"""What a person sees while a run goes on."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from coterie.display import Bar, Display, Lines, default_display, status


def record(round: int, **changes: Any) -> dict[str, Any]:
    """What a round leaves."""
    plain = {"accuracy": {"mean": 0.5}, "loss": 1.25, "selection_rate": 0.25, "refused": {}}
    return {"round": round, **plain, **changes}


def shown(display: Display, printed: io.StringIO, rounds: int = 3) -> str:
    display.begin("fedcbo", rounds)
    display.at(0)
    for number in range(1, rounds + 1):
        display.round(record(number, accuracy={"mean": number / 10}))
    display.end()
    return printed.getvalue()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "accuracy 50.0 %, own-cluster selection 25 %"),
        ({"selection_rate": None}, "accuracy 50.0 %"),
        ({"accuracy": None, "selection_rate": None}, "loss 1.25"),
        ({"accuracy": None, "loss": None, "selection_rate": None}, "not evaluated"),
        (
            {"refused": {"3": "why", "5": "why"}, "selection_rate": None},
            "accuracy 50.0 %, 2 clients refused",
        ),
    ],
)
def test_a_round_in_a_few_words(changes: dict[str, Any], words: str) -> None:
    assert status(record(1, **changes)) == words


def test_a_short_run_is_one_plain_line() -> None:
    printed = io.StringIO()
    display = Lines(Console(file=printed, width=40))
    assert shown(display, printed) == "fedcbo: round 3 of 3, accuracy 30.0 %, own-cluster selection 25 %\n"


def test_a_long_run_says_a_line_every_two_seconds_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.5, 3.0, 4.5])  # a round takes one and a half
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    printed = io.StringIO()
    lines = shown(Lines(Console(file=printed)), printed).splitlines()
    assert len(lines) == 2
    assert "round 2 of 3" in lines[0]
    assert lines[0].endswith("2 s left")  # 1.5 s for the one round left
    assert "left" not in lines[1]


def test_a_quiet_run_says_only_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 3.0, 6.0, 9.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    printed = io.StringIO()
    assert shown(Lines(Console(file=printed), quiet=True), printed).count("\n") == 1


def test_a_run_without_a_round_says_nothing() -> None:
    printed = io.StringIO()
    assert shown(Lines(Console(file=printed)), printed, rounds=0) == ""


def test_a_bar_shows_rounds_accuracy_and_time_left_on_a_terminal() -> None:
    printed = io.StringIO()
    display = Bar(Console(file=printed, force_terminal=True, width=140))
    text = shown(display, printed)
    for words in ("fedcbo", "3/3", "accuracy 30.0 %", "own-cluster selection 25 %", "0:00:00"):
        assert words in text
    display.say("[not markup] done")
    assert "[not markup] done" in printed.getvalue()


def test_a_label_that_looks_like_markup_is_shown_as_it_is() -> None:
    printed = io.StringIO()
    for display in (Bar(Console(file=printed, force_terminal=True, width=140)), Lines(Console(file=printed))):
        display.begin("[/red]x", 1)
        display.round(record(1))
        display.end()
        display.say("stopped after [bold]x :bug:")
    assert printed.getvalue().count("[/red]x") >= 2
    assert printed.getvalue().count("stopped after [bold]x :bug:") == 2


def test_two_runs_after_each_other_have_a_bar_each() -> None:
    printed = io.StringIO()
    display = Bar(Console(file=printed, force_terminal=True, width=140))
    shown(display, printed)
    printed.truncate(0)
    assert "2/2" in shown(display, printed, rounds=2)


@pytest.mark.parametrize(
    ("terminal", "quiet", "kind"), [(True, False, Bar), (True, True, Lines), (False, False, Lines)]
)
def test_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, kind: type
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Stream())
    assert type(default_display(quiet)) is kind
