"""Federated learning in which clients with different data find out who to learn with."""

import os
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large tensors on huge pages, which are fewer to clear

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "CoterieError",
    "Federation",
    "Run",
    "compare",
    "federation_of_texts",
    "minimise",
    "minimise_bilevel",
    "run",
]

_HOMES = {
    "Comparison": "comparison", "Run": "experiment", "compare": "comparison", "run": "experiment",
    "CoterieError": "errors", "Federation": "federation", "federation_of_texts": "data",
    "minimise": "particles.api", "minimise_bilevel": "particles.api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use, so that `coterie --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"coterie.{_HOMES[name]}"), name)
