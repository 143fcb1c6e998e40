"""Data: sources (what to load), fetch (where from), scenarios and partition (who holds what)."""

from coterie.data.fetch import fetch
from coterie.data.scenarios import DEALT, Scenario
from coterie.data.sources import SOURCES, Source, available, data_folder, load
from coterie.data.text import Text, federation_of_texts

SCENARIOS: dict[str, type[Scenario]] = {**DEALT, "text": Text}

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "Scenario",
    "Source",
    "available",
    "data_folder",
    "federation_of_texts",
    "fetch",
    "load",
]
