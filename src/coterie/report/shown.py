"""What the report needs of a run folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from coterie.runs.folder import RunFolder


@dataclass(frozen=True)
class ShownRun:
    """A run as far as it came."""

    label: str
    attack: str  # what it met, "" if nobody attacked
    seed: Any
    config: dict[str, Any]
    environment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]  # empty while the run has not ended
    links: NDArray[Any] | None
    remarks: list[str]

    @staticmethod
    def of(folder: RunFolder) -> "ShownRun":
        """Read it, whether it has ended or not."""
        remarks = folder.notes()
        config, summary, links = folder.config, folder.summary() or {}, folder.links()
        records = folder.records(remarks.append)
        if not summary:
            remarks.append(f"not finished: {len(records)} of {config.get('rounds', '?')} rounds so far.")
        if links is None and summary.get("selection_rate") is not None:
            remarks.append("who learned from whom was not written.")
        method = summary.get("method") or dig(config, "method", "name") or folder.path.name
        return ShownRun(
            label=str(summary.get("label") or method),
            attack=_attack(summary.get("attack") or config.get("attack")),
            seed=summary.get("seed", config.get("seed")),
            config=config,
            environment=folder.environment,
            records=records,
            summary=summary,
            links=None if links is None else links.numpy(),
            remarks=remarks,
        )

    @property
    def named(self) -> str:
        """What tells it from the others."""
        return ", ".join(filter(None, (self.label, self.attack, f"seed {self.seed}")))

    def number(self, *keys: str) -> float | None:
        """A value of the summary, or of the last round that has it."""
        for source in (self.summary, *reversed(self.records)):
            found = dig(source, *keys)
            if found is not None:
                return float(found)
        return None

    def curve(self, *keys: str) -> dict[int, float]:
        """A value by round, where it was recorded."""
        found = {record["round"]: dig(record, *keys) for record in self.records}
        return {round: float(value) for round, value in found.items() if value is not None}


NO_ATTACK = "no attack"
Groups = Mapping[str, Sequence[ShownRun]]  # runs of one label differ in their seeds


def _attack(table: Mapping[str, Any] | None) -> str:
    """What an attack is called; nothing if it is the one that consists in doing nothing."""
    return str(table.get("label") or table.get("name")) if table and table.get("name") != "none" else ""


def dig(tree: Any, *keys: str) -> Any:
    """`tree[key][key]...`, or None where the way ends."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def distinct(values: Iterator[Any]) -> list[str]:
    """Each once, in words."""
    return list(dict.fromkeys(str(value) for value in values if value is not None)) or ["unknown"]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
