"""What a terminal shows of finished runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = {  # heading: what it shows, and times what
    "accuracy %": ("accuracy", 100.0),
    "perplexity": ("perplexity", 1.0),
    "source %": ("source_accuracy", 100.0),
    "success %": ("success_rate", 100.0),
    "malicious %": ("weight_malicious", 100.0),
    "improved %": ("improved", 100.0),
    "loss": ("loss", 1.0),
    "own cluster %": ("selection_rate", 100.0),
    "Rand": ("adjusted_rand", 1.0),
}
_WEIGHTS = {"within clusters": "within", "between clusters": "between"}
_WHERE_KNOWN = ("improved %", "perplexity")
_OF_ATTACKS = ("source %", "success %", "malicious %")
_ABOUT_ATTACKS = (
    "source: accuracy on what the attack aims at; success: share of it called what the attacker wants; "
    "malicious: weight of attackers in the models of honest clients"
)
_ABOUT_IMPROVED = "improved: share of clients that do better than alone"


def console(stderr: bool = False) -> Console:
    """The terminal, or what it is piped into, where tables keep their width. What it prints stands as it was written:
    labels and descriptions may look like markup."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=200 if piped else None, markup=False, emoji=False, highlight=False)


def of_run(summary: Mapping[str, Any], report: str) -> Table:
    """The summary of a run, and where its report is."""
    rows = {"method": summary["label"], "scenario": f"{summary['scenario']}, {summary['data'] or 'own data'}"}
    if figures := summary["accuracy"]:
        lowest, highest, std = (_percent(figures[name]) for name in ("min", "max", "std"))
        rows["test accuracy"] = f"{_percent(figures['mean'])} % (clients from {lowest} to {highest}, std {std})"
    if figures := summary.get("perplexity"):
        rows["test perplexity"] = f"{figures['mean']:.2f} (clients from {figures['min']:.2f} to {figures['max']:.2f})"
    rows["test loss"] = _number(summary["loss"])
    if attack := summary["attack"]:
        shares = {"success": attack["success_rate"], "malicious weight": attack["weight_malicious"]}
        known = [f"{what} {_percent(share)} %" for what, share in shares.items() if share is not None]
        rows["attack"] = ", ".join([attack["label"], *known])
    rows["own-cluster selection"] = f"{_percent(summary['selection_rate'])} %"
    if weights := summary.get("weights"):
        within, between = (_number(weights[name]) for name in ("within", "between"))
        rows["weights"] = f"within clusters {within}, between clusters {between}"
    rows["clusters found"] = f"adjusted Rand {_number(summary['clusters']['adjusted_rand'])}"
    if summary["refused"]:
        rows["refused clients"] = ", ".join(f"{who} ({why['reason']})" for who, why in summary["refused"].items())
    rows["time"] = f"{summary['seconds']:.1f} s for {summary['rounds_completed']} rounds"
    rows["report"] = report
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def of_text(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """What is text already."""
    return _table(headings, rows)


def of_comparison(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A row for each method and what is known of weights, or matrices of methods and attacks where there are several
    attacks."""
    return _matrices(rows) if len({row["attack"] for row in rows}) > 1 else [_by_method(rows), *_of_weights(rows)]


def _by_method(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Where there is an attack, or who is better than alone is known, that stands in place of what matters less."""
    attacked = any(row["attack"] is not None for row in rows)
    left_out = {"loss", "own cluster %", "Rand"} if attacked else set(_OF_ATTACKS)
    left_out |= {heading for heading in _WHERE_KNOWN if all(row.get(_COLUMNS[heading][0]) is None for row in rows)}
    columns = {heading: column for heading, column in _COLUMNS.items() if heading not in left_out}
    compared = "improved %" in columns
    last = [] if attacked or compared else ["seconds"]
    headings = ("method", "seeds", *columns, *last)
    lines = []
    for row in rows:
        cells = [_with_deviation(row, name, times) for name, times in columns.values()]
        lines.append((row["method"], str(row["seeds"]), *cells, *(_number(row[name]) for name in last)))
    about = [_ABOUT_ATTACKS] * attacked + [_ABOUT_IMPROVED] * compared
    return _table(headings, lines, caption="; ".join(about) or None)


def _of_weights(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table of its own, so that the other stays within a terminal's width."""
    lines = [
        (row["method"], *(_with_deviation(row, name) for name in _WEIGHTS.values()))
        for row in rows
        if any(row[name] is not None for name in _WEIGHTS.values())
    ]
    return [_table(("mean weight", *_WEIGHTS), lines)] if lines else []


def _matrices(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A row for each attack, a column for each method: accuracy, then success where an attack aims at something."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    matrices = []
    for title, name in (("accuracy of honest clients, %", "accuracy"), ("attack success, %", "success_rate")):
        cells: dict[str, dict[str, str]] = {}
        for row in rows:
            if row[name] is not None:
                cells.setdefault(row["attack"] or "–", {})[row["method"]] = _with_deviation(row, name, 100, digits=1)
        lines = [(attack, *(found.get(method, "–") for method in methods)) for attack, found in cells.items()]
        if lines:
            matrices.append(_table(("attack", *methods), lines, title=title))
    return matrices


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]], **looks: Any) -> Table:
    """A table that breaks lines between words only, for as long as the terminal is wide enough for its words."""
    table = Table(**looks)
    for heading, *column in zip(headings, *lines, strict=True):
        table.add_column(heading, min_width=max(len(word) for text in (heading, *column) for word in text.split()))
    for line in lines:
        table.add_row(*line)
    return table


def _with_deviation(row: Mapping[str, Any], name: str, times: float = 1.0, digits: int = 2) -> str:
    if row[name] is None:
        return "–"
    deviation = row[f"{name}_std"]
    return f"{times * row[name]:.{digits}f}" + ("" if deviation is None else f" ± {times * deviation:.{digits}f}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
