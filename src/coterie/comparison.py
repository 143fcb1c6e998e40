"""Several methods and seeds side by side, in one table."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import config as configuration
from coterie.config import Compare, Config
from coterie.display import Display, default_display
from coterie.errors import ConfigError, CoterieError, RunError, explain
from coterie.experiment import ConfigLike, Run, resolve, run
from coterie.federation import Federation
from coterie.report import write_report
from coterie.runs import RunFolder
from coterie.runs.files import write_atomically
from coterie.runs.names import slug, unused
from coterie.world import Network, World, unattacked

COMMON = ("malicious_per_cluster", "malicious", "malicious_examples", "collude")  # what all attacks know


def compare(
    config: ConfigLike,
    *,
    methods: Sequence[str | Mapping[str, Any]] | None = None,
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    seeds: Sequence[int] | None = None,
    federation: Federation | None = None,
    model: Network | None = None,
    out: Path | str | None = None,
    display: Display | None = None,
) -> "Comparison":
    """Run several methods with several seeds, each in a folder of its own below `out`, and put them in one table. Given
    several attacks, each method meets each of them. A name stands for what the file's [compare] lists under it.

    What is there already is kept: finished runs are not run again, unfinished ones are resumed.
    """
    base = resolve(config, None, own=federation is not None)
    listed = base.compare or Compare()
    wanted = {
        "methods": _listed(methods, listed.methods),
        "attacks": _listed(attacks, listed.attacks),
        "seeds": list(seeds or listed.seeds),
    }
    plan = configuration.validated(Compare, wanted, "compare.")
    display = display or default_display()
    path = Path(out) if out is not None else unused(Path("runs") / "comparison")
    variants = [
        _variant(base, method, attack, seed)
        for method in plan.methods
        for attack in plan.attacks or [None]
        for seed in plan.seeds
    ]
    _refuse_twins(variants)
    _refuse_foreign(path, {_place(variant) for variant in variants})
    _refuse_impossible(variants, federation, model)
    finished: list[Run] = []
    for variant in variants:
        target = path / _place(variant)
        there = RunFolder.holds_a_run(target)
        finished.append(run(variant, federation=federation, model=model, out=target, resume=there, display=display))
        if not finished[-1].completed:
            break
    comparison = Comparison(path, [one for one in finished if one.completed], all(one.completed for one in finished))
    if comparison.runs:
        _note_improved(comparison.runs)
        write_report(path / "report.html", [one.folder for one in comparison.runs], title="Comparison")
        write_atomically(path / "comparison.json", json.dumps(comparison.rows(), indent=2))
    return comparison


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    path: Path
    runs: list[Run]  # the finished ones
    completed: bool

    def rows(self) -> list[dict[str, Any]]:
        """One row for each method and attack: means over seeds, and standard deviations where there are several."""
        groups: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
        for one in self.runs:
            summary = one.summary
            groups.setdefault((summary["label"], (summary["attack"] or {}).get("label")), []).append(summary)
        return [_row(label, attack, summaries) for (label, attack), summaries in groups.items()]


def _row(label: str, attack: str | None, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {
        "accuracy": [(one["accuracy"] or {}).get("mean") for one in summaries],
        "loss": [one["loss"] for one in summaries],
        "perplexity": [(one.get("perplexity") or {}).get("mean") for one in summaries],
        "selection_rate": [one["selection_rate"] for one in summaries],
        "adjusted_rand": [one["clusters"]["adjusted_rand"] for one in summaries],
        "improved": [one.get("improved") for one in summaries],
        **{name: [(one.get("weights") or {}).get(name) for one in summaries] for name in ("within", "between")},
        "seconds": [one["seconds"] for one in summaries],
    }
    for name in ("source_accuracy", "success_rate", "selected_malicious", "weight_malicious"):
        columns[name] = [(one["attack"] or {}).get(name) for one in summaries]
    row: dict[str, Any] = {"method": label, "attack": attack, "seeds": len(summaries)}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        row[name] = statistics.fmean(known) if known else None
        row[f"{name}_std"] = statistics.stdev(known) if len(known) > 1 else None
    return row


def _note_improved(runs: Sequence[Run]) -> None:
    """Into the summary of each run that has a counterpart in which the same clients learn alone."""
    lonely = [one for one in runs if one.summary["method"] == "local"]
    alone = {_circumstances(one): one for one in reversed(lonely)}
    for one in runs:
        other = alone.get(_circumstances(one))
        if other is None or one in lonely or (share := _improved(one, other)) == one.summary.get("improved"):
            continue
        with RunFolder.open(one.path) as folder:
            folder.write_summary(one.summary | {"improved": share})


def _circumstances(run: Run) -> tuple[Any, ...]:
    """What two runs have in common whose clients can be compared: seed, attack, data and model."""
    summary = run.summary
    return summary["seed"], (summary["attack"] or {}).get("label"), run.folder.environment["data_fingerprint"]


def _improved(run: Run, alone: Run) -> float | None:
    """The share of clients that do better than alone: by accuracy, or by loss where accuracy says nothing."""
    of_text = run.summary.get("perplexity") is not None
    name, sign = ("loss", -1) if of_text or run.summary["accuracy"] is None else ("accuracy", 1)
    both = zip(run.folder.clients() or (), alone.folder.clients() or (), strict=False)  # none where a file is gone
    pairs = [(mine[name], theirs[name]) for mine, theirs in both]
    known = [sign * (mine - theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return statistics.fmean(gain > 0 for gain in known) if known else None


def _listed(wanted: Sequence[str | Mapping[str, Any]] | None, file: Sequence[str | Mapping[str, Any]]) -> list[Any]:
    """What is wanted, or else all that the file lists. A name is what the file gives that label, or else that name."""
    listed: list[Any] = [{"name": entry} if isinstance(entry, str) else entry for entry in file]
    found: list[Any] = []
    for one in wanted or listed:
        called = [entry for entry in listed if entry.get("label", entry["name"]) == one]
        found += called or [entry for entry in listed if entry["name"] == one] or [one]
    return found


def _variant(
    base: Config, method: str | Mapping[str, Any], attack: str | Mapping[str, Any] | None, seed: int
) -> Config:
    """The base configuration with another method, attack and seed. The base's own method keeps its keys unless they are
    given, and so does what all attacks have in common; a label names the row, and the keys of a table `with` go over
    those outside [method]."""
    table: dict[str, Any] = {"name": method} if isinstance(method, str) else dict(method)
    label, others = table.pop("label", ""), table.pop("with", {})
    own: dict[str, Any] = base.method.model_dump() if table.get("name") == getattr(base.method, "name", None) else {}
    tables = base.model_dump(exclude={"compare"}, exclude_none=True) | {"seed": seed, "label": label}
    tables = configuration.merged(tables, others) | {"method": own | table}
    if attack is not None:
        tables["attack"] = _attack_table(base, {"name": attack} if isinstance(attack, str) else dict(attack))
    with _naming(label or table["name"]):
        return configuration.parse(tables, own_data=base.scenario is None)


def _refuse_impossible(variants: Sequence[Config], federation: Federation | None, model: Network | None) -> None:
    """What cannot be is refused before the first round; the data is made once where it is the same."""
    made: dict[str, Federation] = {}
    for variant in {variant.named: variant for variant in variants}.values():
        data = f"{variant.scenario!r} {getattr(variant.attack, 'malicious_examples', None)}"
        if federation is None and data not in made:
            made[data] = unattacked(variant)
        with _naming(variant.named), World.of(variant, made[data] if federation is None else federation, model):
            pass


@contextmanager
def _naming(entry: str) -> Iterator[None]:
    """A refusal says which of the methods it is about."""
    try:
        yield
    except CoterieError as error:
        raise type(error)(f"compare, {entry}: {error}") from error


def _attack_table(base: Config, table: dict[str, Any]) -> dict[str, Any]:
    """An attack's keys, over those of the base's [attack] that all attacks have in common, or that are its own."""
    own: dict[str, Any] = base.attack.model_dump(exclude_none=True) if base.attack is not None else {}
    common = own if own.get("name") == table.get("name") else {key: own[key] for key in COMMON if key in own}
    if table.get("name") == "none":
        common.pop("collude", None)
    return common | table


def _refuse_twins(variants: Sequence[Config]) -> None:
    places = [_place(variant) for variant in variants]
    for variant in variants:
        if places.count(_place(variant)) > 1:
            got = f"{variant.named} with seed {variant.seed} twice"
            raise ConfigError(explain("compare", got, "each once", "Give one a label of its own."))


def _refuse_foreign(path: Path, places: Iterable[str]) -> None:
    """A folder that holds something, but nothing of a comparison, is left as it is."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; a comparison needs a folder. Choose another --out.")
    present = list(path.iterdir()) if path.exists() else []
    own = {"comparison.json", *places}  # a run that was hardly begun has nothing in it yet
    if present and not any(entry.name in own or RunFolder.holds_a_run(entry) for entry in present):
        raise RunError(f"{path} already holds other files. Choose another --out.")


def _place(variant: Config) -> str:
    """The name of its folder among those of a comparison."""
    return slug(f"{variant.named}-seed{variant.seed}")
