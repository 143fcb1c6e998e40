"""Checkpoints between rounds: a name that carries the checksum, so that one rename commits both."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from coterie.errors import RunError
from coterie.runs.files import checksum, reason, write_tensors

_NAME = re.compile(r"round-(\d{6,})-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round. The tensors are copies: free to be changed, and independent of the file."""

    round: int
    tensors: dict[str, Tensor]
    path: Path


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], keep: int = 2) -> Path:
    """Write the state after a round and keep the last `keep` checkpoints; the history ends at this round.

    The file is `round-000012-<first 16 hex digits of its sha256>.safetensors`. Whenever the process is killed, the
    folder holds the checkpoints of before or those of after, whole. Raises RunError if the disk does not take it.
    """
    try:
        path = write_tensors(folder, f"round-{round:06d}-{{checksum}}.safetensors", tensors)
        _forget_others(path, keep)
    except OSError as error:
        raise RunError(_refusal(folder, round, error)) from error
    return path


def latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None; `warn` is told of each damaged one that was passed over."""
    for path in reversed(_checkpoints(folder)):
        damage = _damage(path)
        if damage is None:
            return Checkpoint(_round(path), _load(path), path)
        warn(f"checkpoint {path.name} is damaged ({damage}) and was passed over.")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest round first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_round)


def _round(path: Path) -> int:
    return int(path.name.split("-")[1])


def _damage(path: Path) -> str | None:
    expected = path.stem.split("-")[2]
    try:
        return None if checksum(path) == expected else "its content does not match the checksum in its name"
    except OSError as error:
        return reason(error)


def _load(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _forget_others(newest: Path, keep: int) -> None:
    """Later rounds go as well: they were damaged, or belong to a history that was not continued."""
    others = [path for path in _checkpoints(newest.parent) if path != newest]
    earlier = [path for path in others if _round(path) < _round(newest)]
    kept = earlier[max(0, len(earlier) - (keep - 1)) :]
    for path in others:
        if path not in kept:
            path.unlink()


def _refusal(folder: Path, round: int, error: OSError) -> str:
    before = [path for path in _checkpoints(folder) if _round(path) < round]
    intact = (
        f"The checkpoint of round {_round(before[-1])} is intact: mend that, then continue from it with --resume."
        if before
        else "There is none of an earlier round: mend that, then --resume, which begins again with round 1."
    )
    return f"the checkpoint of round {round} could not be written to {folder} ({reason(error)}). {intact}"
