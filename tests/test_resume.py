"""A run that was killed, interrupted or damaged goes on to the very same result."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import Mock

import pytest

from coterie.comparison import compare
from coterie.errors import RunError
from coterie.experiment import run
from coterie.runs import RunFolder
from program import SCRIPT, SMALL, Listener, coterie, file, results, toml

__all__ = ["file"]  # a fixture

ROUNDS = 8
TABLES: dict[str, Any] = SMALL | {
    "rounds": ROUNDS,
    "participation": 0.7,
    "method": {"name": "fedcbo", "download": 2, "noise": "anisotropic", "noise_level": 0.1},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("whole") / "out"
    assert run(TABLES, out=path, display=Listener()).completed
    return results(path)


def test_another_seed_is_another_result(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """What the equalities below are worth."""
    run(TABLES, out=tmp_path / "out", seed=1, display=Listener())
    assert all(one != uninterrupted[name] for name, one in results(tmp_path / "out").items())


def rounds_on_disk(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def after(rounds: int, path: Path) -> bool:
    return rounds_on_disk(path) >= rounds


def writing_a_checkpoint(rounds: int, path: Path) -> bool:
    return after(rounds, path) and (path / "checkpoints" / ".writing").exists()


def writing_results(rounds: int, path: Path) -> bool:
    return (path / "links.safetensors").exists()


MOMENTS: list[tuple[Callable[[int, Path], bool], int]] = [
    (after, 0),
    (after, 1),
    (after, 3),
    (writing_a_checkpoint, 2),
    (writing_a_checkpoint, 5),
    (writing_results, ROUNDS),
]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[BaseProcess]:
    """The same run in a process of its own, forked from one that has imported everything."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["coterie.experiment"])
    process = context.Process(target=run, args=(TABLES,), kwargs={"out": tmp_path / "out"})
    process.start()
    yield process
    process.kill()
    process.join()


def until(happened: Callable[[], bool], alive: Callable[[], bool]) -> None:
    """Look every half a millisecond, for a minute at most."""
    limit = time.monotonic() + 60
    while not happened():
        assert alive(), "it ended too early"
        assert time.monotonic() < limit
        time.sleep(0.0005)


@pytest.mark.parametrize(("moment", "rounds"), MOMENTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_killed_at_any_moment_it_resumes_to_the_same_bits(
    begun: BaseProcess, tmp_path: Path, uninterrupted: dict[str, Any], moment: Callable[[int, Path], bool], rounds: int
) -> None:
    out = tmp_path / "out"
    until(lambda: RunFolder.holds_a_run(out), begun.is_alive)
    until(lambda: moment(rounds, out), begun.is_alive)
    if moment is after:
        time.sleep(random.Random(rounds).uniform(0, 0.03))  # anywhere in the round
    begun.kill()
    begun.join()
    assert begun.exitcode == -signal.SIGKILL
    listener = Listener()
    assert run(out, resume=True, display=listener).completed
    assert len(listener.rounds) <= ROUNDS - max(0, rounds - 1)  # it did not begin anew
    assert results(out) == uninterrupted
    assert (out / "report.html").exists()


@pytest.mark.parametrize("method", ["local", "fedavg", "ifca", "oracle"])
def test_every_method_goes_on_where_it_was_interrupted(tmp_path: Path, method: str) -> None:
    tables = SMALL | {"method": {"name": method}, "participation": 0.5, "rounds": 3}
    run(tables, out=tmp_path / "whole", display=Listener())
    assert not run(tables, out=tmp_path / "out", display=Listener(interrupt_after=1)).completed
    listener = Listener()
    assert run(tmp_path / "out", resume=True, display=listener).completed
    assert listener.rounds == [2, 3]
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_ctrl_c_stops_the_program_after_the_round_in_hand_and_says_how_to_go_on(tmp_path: Path) -> None:
    many = TABLES | {"rounds": 30}
    (tmp_path / "many.toml").write_text(toml(many))
    process = subprocess.Popen(
        [SCRIPT, "run", "many.toml", "--out", "out"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    out = tmp_path / "out"
    with process:
        until(lambda: after(2, out), lambda: process.poll() is None)
        os.kill(process.pid, signal.SIGINT)
        printed, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    assert "Traceback" not in messages
    stopped = rounds_on_disk(out)
    assert 2 <= stopped < 30
    assert f"stopped after round {stopped}; go on with: coterie run out --resume" in messages
    assert any(path.name.startswith(f"round-{stopped:06d}") for path in (out / "checkpoints").iterdir())
    assert coterie("run", out, "--resume").code == 0
    run(many, out=tmp_path / "whole", display=Listener())
    assert results(out) == results(tmp_path / "whole")


def test_an_interruption_between_checkpoints_leaves_one(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    tables = TABLES | {"checkpoint_every": 5}
    run(tables, out=tmp_path / "out", display=Listener(interrupt_after=3))
    listener = Listener()
    run(tmp_path / "out", resume=True, display=listener)
    assert listener.rounds == [4, 5, 6, 7, 8]
    assert results(tmp_path / "out") == uninterrupted


@pytest.mark.parametrize(("damaged", "goes_on_with"), [(1, 4), (2, 1)])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, uninterrupted: dict[str, Any], damaged: int, goes_on_with: int
) -> None:
    out = tmp_path / "out"
    run(TABLES, out=out, display=Listener(interrupt_after=4))
    newest = sorted((out / "checkpoints").iterdir())[-damaged:]
    for path in newest:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    listener = Listener()
    assert run(out, resume=True, display=listener).completed
    warnings = [text for text in listener.said if text.startswith("warning: ")]
    assert [path.name in text for path, text in zip(reversed(newest), warnings, strict=False)] == [True] * damaged
    assert [text for text in warnings if "beginning again with round 1" in text] == warnings[damaged:]
    assert len(warnings[damaged:]) == (goes_on_with == 1)
    assert any("damaged" in note for note in RunFolder(out).notes())
    assert listener.rounds[0] == goes_on_with
    assert results(out) == uninterrupted


def test_more_rounds_equal_a_run_of_that_many_from_the_start(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    run(TABLES | {"rounds": 3}, out=tmp_path / "out", display=Listener())
    assert results(tmp_path / "out") != uninterrupted
    listener = Listener()
    run(TABLES, out=tmp_path / "out", resume=True, display=listener)
    assert listener.rounds == [4, 5, 6, 7, 8]
    assert RunFolder(tmp_path / "out").config["rounds"] == ROUNDS
    assert results(tmp_path / "out") == uninterrupted


def test_what_does_not_change_a_result_may_change_on_resuming(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    run(TABLES | {"threads": 1}, out=tmp_path / "out", display=Listener(interrupt_after=2))
    run(TABLES | {"threads": 2, "checkpoint_every": 3}, out=tmp_path / "out", resume=True, display=Listener())
    assert RunFolder(tmp_path / "out").config["threads"] == 2
    assert results(tmp_path / "out") == uninterrupted


def test_the_size_of_a_block_may_not_for_it_changes_the_rounding(tmp_path: Path) -> None:
    run(TABLES, out=tmp_path / "out", display=Listener(interrupt_after=1))
    with pytest.raises(RunError, match="block was None and is 3 now"):
        run(TABLES | {"block": 3}, out=tmp_path / "out", resume=True, display=Listener())


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    tables = SMALL | {"rounds": 1, "method": {"name": "local"}}
    run(tables, out=tmp_path / "out", display=Listener())
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.suffix}
    listener = Listener()
    assert run(tables, out=tmp_path / "out", resume=True, display=listener).completed
    assert listener.rounds == []
    assert any("finished already" in text for text in listener.said)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_report_that_was_not_reached_is_written_later(tmp_path: Path) -> None:
    tables = SMALL | {"rounds": 1, "method": {"name": "local"}}
    report = run(tables, out=tmp_path / "out", display=Listener()).folder.report
    report.unlink()
    run(tables, out=tmp_path / "out", resume=True, display=Listener())
    assert "<html" in report.read_text()[:200]


def test_a_report_of_fewer_rounds_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed when it has written the summary of six rounds."""
    tables = SMALL | {"method": {"name": "local"}}
    report = run(tables | {"rounds": 2}, out=tmp_path / "out", display=Listener()).folder.report
    with monkeypatch.context() as patched:
        patched.setattr("coterie.experiment.write_report", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            run(tables | {"rounds": 6}, out=tmp_path / "out", resume=True, display=Listener())
    listener = Listener()
    run(tables | {"rounds": 6}, out=tmp_path / "out", resume=True, display=listener)
    assert listener.rounds == []
    assert "6 rounds" in report.read_text()
    assert "2 rounds" not in report.read_text()


def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a Ctrl-C just before it."""

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return function(*arguments, **options)

    return interrupted


@pytest.mark.parametrize(
    ("before", "stopped_after"),
    [("environment", 0), ("RunFolder.keep_rounds", 0), ("RunFolder.write_links", 4), ("write_report", 4)],
)
def test_ctrl_c_is_heeded_and_answered_from_the_first_moment_to_the_last(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, before: str, stopped_after: int
) -> None:
    with monkeypatch.context() as patched:
        place = f"coterie.experiment.{before}"
        patched.setattr(place, interrupting(resolve_name(place.replace(".experiment.", ".experiment:", 1))))
        ended = coterie("run", file, "--out", "out")
    assert ended.code == 130
    assert f"stopped after round {stopped_after}; go on with: coterie run out --resume" in ended.err
    assert coterie("run", "out", "--resume").code == 0
    assert (tmp_path / "out" / "report.html").exists()
    run(SMALL, out=tmp_path / "whole", display=Listener())
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_ctrl_c_in_the_last_round_stops_a_comparison(tmp_path: Path) -> None:
    stopping, listener = Listener(interrupt_after=2), Listener()
    tables = SMALL | {"rounds": 2}
    assert not compare(tables, methods=["local", "fedavg"], out=tmp_path / "all", display=stopping).completed
    assert stopping.rounds == [1, 2]
    assert compare(tables, methods=["local", "fedavg"], out=tmp_path / "all", display=listener).completed
    assert listener.rounds == [1, 2]


# Damage


@pytest.mark.parametrize(
    ("content", "lost"),
    [("garbled", "2"), ('{"x": 1}', "2"), ("[1]", "2"), ("", "2"), (None, "1, 2, 3")],
)
def test_rounds_whose_records_are_lost_are_named(
    tmp_path: Path, uninterrupted: dict[str, Any], content: str | None, lost: str
) -> None:
    run(TABLES, out=tmp_path / "out", display=Listener(interrupt_after=3))
    metrics = tmp_path / "out" / "metrics.jsonl"
    lines = metrics.read_text().split("\n")
    if content is None:
        metrics.unlink()
    else:
        metrics.write_text("\n".join([lines[0], content, *lines[2:]]))
    listener = Listener()
    assert run(tmp_path / "out", resume=True, display=listener).completed
    (warning,) = listener.said
    assert warning.startswith("warning: ")
    assert warning.endswith(f"in no sum or figure: {lost}.")
    assert warning.removeprefix("warning: ") in RunFolder(tmp_path / "out").notes()
    assert listener.rounds == [4, 5, 6, 7, 8]
    assert results(tmp_path / "out") == uninterrupted


def test_it_is_said_that_a_run_without_its_checkpoints_begins_again(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    run(TABLES, out=tmp_path / "out", display=Listener(interrupt_after=3))
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    listener = Listener()
    assert run(tmp_path / "out", resume=True, display=listener).completed
    assert listener.said == ["warning: there is no whole checkpoint: beginning again with round 1."]
    assert listener.rounds[0] == 1
    assert results(tmp_path / "out") == uninterrupted


def test_nothing_is_said_of_a_run_that_is_whole(tmp_path: Path) -> None:
    run(TABLES, out=tmp_path / "out", display=Listener(interrupt_after=3))
    listener = Listener()
    run(tmp_path / "out", resume=True, display=listener)
    assert listener.said == []


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"rounds_completed": 8}'])
def test_a_damaged_summary_is_written_anew(tmp_path: Path, uninterrupted: dict[str, Any], content: str) -> None:
    run(TABLES, out=tmp_path / "out", display=Listener())
    (tmp_path / "out" / "summary.json").write_text(content)
    listener = Listener()
    assert run(tmp_path / "out", resume=True, display=listener).completed
    assert listener.said == ["warning: summary.json was damaged and is written anew."]
    assert listener.rounds == []
    assert results(tmp_path / "out") == uninterrupted


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"scenario": 1}', '{"scenario": {}}'])
@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_file_of_the_wrong_form_is_one_message(tmp_path: Path, file: Path, name: str, content: str) -> None:
    run(SMALL, out=tmp_path / "out", display=Listener(interrupt_after=1))
    kept = (tmp_path / "out" / name).read_text()
    (tmp_path / "out" / name).write_text(content)
    for ended in (coterie("run", "out", "--resume"), coterie("run", file, "--out", "out", "--resume")):
        assert ended.code == 2
        assert ended.err.startswith("error: ")
        assert "Traceback" not in ended.err
    (tmp_path / "out" / name).write_text(kept)
    assert coterie("run", "out", "--resume").code == 0


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("when", ["checkpoint.save", "write_report"])
def test_a_full_disk_is_answered_with_what_goes_on_afterwards(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    function = resolve_name(f"coterie.experiment:{when}")

    def refused(*arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            return function(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(f"coterie.experiment.{when}", refused)
        ended = coterie("run", file, "--out", "out")
    assert ended.code == 2
    assert "No space left on device" in ended.err
    assert "--resume" in ended.err
    assert "again with round 1" in ended.err or when != "checkpoint.save"
    assert coterie("run", "out", "--resume").code == 0
    run(SMALL, out=tmp_path / "whole", display=Listener())
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_a_comparison_resumes_what_was_killed(tmp_path: Path) -> None:
    tables = SMALL | {"rounds": 2}
    stopping, listener = Listener(interrupt_after=1), Listener()
    run(tables | {"method": {"name": "local"}}, out=tmp_path / "all" / "local-seed0", display=stopping)
    assert compare(tables, methods=["local"], out=tmp_path / "all", display=listener).completed
    assert listener.rounds == [2]
