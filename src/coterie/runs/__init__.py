"""What a run leaves on disk: its folder and its checkpoints. Knows nothing of methods and fleets."""

from coterie.runs.folder import RunFolder, environment

__all__ = ["RunFolder", "environment"]
