"""Data: sources (what to load), fetch (where from), scenarios and partition (who holds what)."""

from coterie.data.fetch import fetch
from coterie.data.scenarios import SCENARIOS, Scenario
from coterie.data.sources import SOURCES, Source, available, data_folder, load

__all__ = ["SCENARIOS", "SOURCES", "Scenario", "Source", "available", "data_folder", "fetch", "load"]
