"""What the report says: sentences, tables, remarks."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean, stdev
from typing import Any

from coterie.report.shown import NO_ATTACK, Groups, ShownRun, dig, distinct, listed


def sentence(runs: Sequence[ShownRun]) -> str:
    """What was run, in a sentence."""
    labels, seeds = distinct(run.label for run in runs), distinct(run.seed for run in runs)
    scenarios = distinct(run.summary.get("scenario") or dig(run.config, "scenario", "name") for run in runs)
    finished = [run for run in runs if run.summary.get("data")]
    sources = distinct(run.summary.get("data") or dig(run.config, "scenario", "data") for run in finished or runs)
    clients = distinct(dig(run.config, "scenario", "clients") or _last(run, "clients") for run in runs)
    rounds = distinct(run.summary.get("rounds_completed", len(run.records)) for run in runs)
    return (
        f"{listed(labels)} on the scenario {listed(scenarios)} with the data {listed(sources)}: "
        f"{listed(clients)} clients, {listed(rounds)} rounds, {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{listed(seeds)}.{_attackers(runs)}"
    )


def _attackers(runs: Sequence[ShownRun]) -> str:
    """Who is malicious, in a sentence of its own."""
    numbers = {len(dig(run.summary, "attack", "malicious") or ()) for run in runs if run.attack} - {0}
    attacks = [name for name in dict.fromkeys(run.attack for run in runs) if name]
    if not numbers or not attacks:
        return ""
    several = len(attacks) > 1
    what = f"one of {len(attacks)} attacks" if several else f"the attack {attacks[0]}"
    return f" {listed([str(number) for number in sorted(numbers)])} of the clients carry out {what}."


_Column = tuple[str, tuple[str, ...], float, str]  # heading, where it is, factor, format
_COLUMNS: tuple[_Column, ...] = (
    ("accuracy %", ("accuracy", "mean"), 100, ".2f"),
    ("std %", ("accuracy", "std"), 100, ".2f"),
    ("lowest %", ("accuracy", "min"), 100, ".1f"),
    ("highest %", ("accuracy", "max"), 100, ".1f"),
    ("improved %", ("improved",), 100, ".1f"),
    ("loss", ("loss",), 1, ".4f"),
    ("perplexity", ("perplexity", "mean"), 1, ".2f"),
    ("selection rate", ("selection_rate",), 1, ".3f"),
    ("weight within", ("weights", "within"), 1, ".3f"),
    ("weight between", ("weights", "between"), 1, ".3f"),
    ("adjusted Rand", ("clusters", "adjusted_rand"), 1, ".3f"),
    ("seconds", ("seconds",), 1, ".1f"),
)
_OF_ATTACKS: tuple[_Column, ...] = (
    ("source accuracy %", ("attack", "source_accuracy"), 100, ".2f"),
    ("attack success %", ("attack", "success_rate"), 100, ".2f"),
    ("malicious downloads %", ("attack", "selected_malicious"), 100, ".1f"),
    ("their weight %", ("attack", "weight_malicious"), 100, ".1f"),
)
_UNATTACKED = ("std %", "lowest %", "highest %")  # what gives way to those of attacks, so that a page holds them all
_ABOUT = {
    "improved %": "Improved is the share of clients that do better than with the same seed alone.",
    "weight within": "Weights are means over pairs of clients of the same true cluster and of different ones.",
}
_WHERE_KNOWN = (*(column[0] for column in _OF_ATTACKS), *_ABOUT, "weight between", "perplexity")
# where the spread over the seeds is worth the width
_WITH_SPREAD = ("accuracy %", "improved %", "selection rate", "attack success %")


def headline(groups: Groups) -> str:
    """The table of results, a row for each label."""
    attacked = any(run.attack for runs in groups.values() for run in runs)
    columns = _COLUMNS
    if attacked:
        columns = (_COLUMNS[0], *_OF_ATTACKS, *(column for column in _COLUMNS[1:] if column[0] not in _UNATTACKED))
    columns = tuple(column for column in columns if column[0] not in _WHERE_KNOWN or _known(column, groups))
    head = ["method", "seeds", *(column[0] for column in columns)]
    rows = [[label, str(len(runs)), *(_cell(runs, column) for column in columns)] for label, runs in groups.items()]
    shown = table("Results on the clients' own test data", head, rows)
    several = any(len(runs) > 1 for runs in groups.values())
    averaged = " Means over the seeds; ± is their sample standard deviation." if several else ""
    honest = "All of honest clients: source accuracy is that on the examples the attack aims at, attack success the "
    honest += "share of them called what it wants, downloads and weight are shares of all, mean over the rounds."
    about = f"{honest if attacked else 'std, lowest and highest are over the clients.'}{averaged}"
    said = "".join(f" {_ABOUT[name]}" for name in head if name in _ABOUT)
    return f'{shown}<p class="soft">{about}{said}</p>'


def _known(column: _Column, groups: Groups) -> bool:
    return any(_cell(runs, column) != "–" for runs in groups.values())


def _matrix(runs: Sequence[ShownRun], *keys: str) -> tuple[list[str], list[str], list[list[float | None]]]:
    """(attacks, methods, the mean over the seeds of a value for each attack and method)."""
    attacks, methods = (list(dict.fromkeys(names)) for names in zip(*((run.attack, run.label) for run in runs)))
    cells: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if (value := run.number(*keys)) is not None:
            cells.setdefault((run.attack, run.label), []).append(value)
    values = [[fmean(cells[a, m]) if (a, m) in cells else None for m in methods] for a in attacks]
    return [attack or NO_ATTACK for attack in attacks], methods, values


_Matrix = tuple[str, list[str], list[str], list[list[float | None]], bool]  # caption, attacks, methods, values, good
_MATRICES: tuple[tuple[str, tuple[str, ...], bool], ...] = (  # caption, where it is, whether more is better
    ("Accuracy of honest clients, in %", ("accuracy", "mean"), True),
    ("Attack success, in %: the share of the examples an attack aims at that honest clients' models call what it wants",
     ("attack", "success_rate"), False),
)  # fmt: skip


def filled_matrices(runs: Sequence[ShownRun]) -> Iterator[_Matrix]:
    """Those of the matrices that hold anything, without the attacks about which they say nothing."""
    for caption, keys, good in _MATRICES:
        attacks, methods, values = _matrix(runs, *keys)
        known = [row for row, found in enumerate(values) if any(value is not None for value in found)]
        if known:
            yield caption, [attacks[row] for row in known], methods, [values[row] for row in known], good


def matrices(runs: Sequence[ShownRun]) -> list[str]:
    """The matrices as tables."""
    tables = []
    for caption, attacks, methods, values, _ in filled_matrices(runs):
        rows = [
            [attack, *("–" if value is None else f"{100 * value:.1f}" for value in found)]
            for attack, found in zip(attacks, values, strict=True)
        ]
        tables.append(table(f"{caption}.", ["attack", *methods], rows))
    return tables


def folded(title: str, content: str) -> str:
    """What is shown when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _cell(runs: Sequence[ShownRun], column: _Column) -> str:
    heading, keys, factor, form = column
    found = [_seconds(run) if heading == "seconds" else run.number(*keys) for run in runs]
    values = [factor * value for value in found if value is not None]
    if not values:
        return "–"
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 and heading in _WITH_SPREAD else ""
    return format(fmean(values), form) + spread


def _seconds(run: ShownRun) -> float:
    """Of the whole run; a record has only those of its round."""
    return float(run.summary.get("seconds") or sum(run.curve("seconds").values()))


def remarks(runs: Sequence[ShownRun]) -> str:
    """What a reader should know, such as resumptions and refusals."""
    about: dict[str, list[str]] = {}  # what is true of several runs is said once
    for run in runs:
        for remark in (*run.remarks, *_counted(run)):
            about.setdefault(remark, []).append(run.named)
    if not about:
        return ""
    items = [f"{'; '.join(names)}: {remark}" if len(runs) > 1 else remark for remark, names in about.items()]
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<section class="remarks"><h2>To know when reading</h2><ul>{entries}</ul></section>'


def _counted(run: ShownRun) -> Iterator[str]:
    silent = sum(record.get("silent") or 0 for record in run.records)
    if silent:
        yield f"clients did not answer {int(silent)} times in all."
    there = _refusals(run)
    if there:
        yield f"{len(there)} of the clients were refused at least once; they are listed at the end."


def _refusals(run: ShownRun) -> dict[str, tuple[int, str]]:
    """By client: how often its answer was kept from the others, and why."""
    if run.summary.get("refused"):
        return {client: (found["count"], found["reason"]) for client, found in run.summary["refused"].items()}
    refused: dict[str, tuple[int, str]] = {}
    for record in run.records:
        for client, why in (record.get("refused") or {}).items():
            refused[client] = (refused.get(client, (0, ""))[0] + 1, why)
    return refused


def refused(runs: Sequence[ShownRun]) -> str:
    """The clients that were refused, and why."""
    rows = [[run.named, client, str(count), why] for run in runs for client, (count, why) in _refusals(run).items()]
    if not rows:
        return ""
    shown = table("Clients whose answer was kept from all others.", ["run", "client", "times", "reason"], rows)
    return folded("Refused clients", shown)


def settings(runs: Sequence[ShownRun]) -> str:
    """The configuration and the environment of every run."""
    shown = [{"run": run.named, "config": run.config, "environment": run.environment} for run in runs]
    return f"<pre>{escape(json.dumps(shown, indent=2))}</pre>"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    table = f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _last(run: ShownRun, key: str) -> Any:
    return next((record[key] for record in reversed(run.records) if key in record), None)
