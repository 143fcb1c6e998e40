"""What can go wrong for a user, each with what was got, what is allowed and what to do.

CoterieError            exit code 2: the user can mend it; the program prints the message and no traceback
├── ConfigError         a key, a value or a combination in the configuration
├── DataError           data that is missing, malformed, or does not fit
├── ModelError          a model that does not fit the data
└── RunError            a run folder that cannot be written, read or resumed
"""

from collections.abc import Iterable
from difflib import get_close_matches


class CoterieError(Exception):
    """A mistake a user can mend; the message is one readable sentence or a few."""


class ConfigError(CoterieError):
    """A configuration key, value or combination that is not allowed."""


class DataError(CoterieError):
    """Data that is missing, malformed, or does not fit what was asked for."""


class ModelError(CoterieError):
    """A model that does not fit the data or cannot be computed."""


class RunError(CoterieError):
    """A run folder that cannot be written, read or resumed."""


def explain(where: str, got: object, allowed: str, do: str = "") -> str:
    """The one form of message: `method.download: got 50; allowed: 1 to 39. Lower it or raise scenario.clients.`"""
    return f"{where}: got {got!r}; allowed: {allowed}." + (f" {do}" if do else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean "alpha"?` if a known name is close, else an empty string."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'Did you mean "{found[0]}"?' if found else ""
