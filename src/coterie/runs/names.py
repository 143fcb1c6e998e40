"""Names for the folders of runs."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path


def numbered(path: Path) -> Iterator[Path]:
    """The path, then with 2, 3 and so on behind it."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def unused(path: Path) -> Path:
    """The path, or with the first number behind it that is not there yet."""
    return next(candidate for candidate in numbered(path) if not candidate.exists())


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
