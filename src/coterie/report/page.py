"""The report: one HTML file that needs nothing else, for one run or for a comparison of several."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from coterie.report import figures
from coterie.runs.files import write_atomically
from coterie.runs.folder import RunFolder


@dataclass(frozen=True)
class _Run:
    """What the page needs of a run folder."""

    label: str
    attack: str  # what it met, "" if nobody attacked
    seed: Any
    config: dict[str, Any]
    environment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]  # empty while the run has not ended
    links: NDArray[Any] | None
    remarks: list[str]

    @property
    def named(self) -> str:
        """What tells it from the others."""
        return ", ".join(filter(None, (self.label, self.attack, f"seed {self.seed}")))

    def number(self, *keys: str) -> float | None:
        """A value of the summary, or of the last round that has it."""
        for source in (self.summary, *reversed(self.records)):
            found = _dig(source, *keys)
            if found is not None:
                return float(found)
        return None

    def curve(self, *keys: str) -> dict[int, float]:
        """A value by round, where it was recorded."""
        found = {record["round"]: _dig(record, *keys) for record in self.records}
        return {round: float(value) for round, value in found.items() if value is not None}


_Groups = Mapping[str, Sequence[_Run]]  # runs of one label differ in their seeds


def write_report(path: Path, runs: Sequence[RunFolder], title: str) -> None:
    """Write one self-contained page about one run, or comparing several; runs of the same label are averaged.

    The page loads nothing from anywhere. Runs that have not ended are shown as far as they came, and the page says so.
    """
    shown = [_read(run) for run in runs]
    several = len({run.attack for run in shown}) > 1
    groups: dict[str, list[_Run]] = {}
    for run in shown:
        groups.setdefault(f"{run.label}, {run.attack or _NO_ATTACK}" if several else run.label, []).append(run)
    pictures = _matrices(shown) if several else _figures(groups)
    drawn = [_drawn(number, *picture) for number, picture in enumerate(pictures, start=1)]
    headline = _headline(groups)
    tables = [*_matrix_tables(shown), _folded("Every method under every attack", headline)] if several else [headline]
    content = [f"<p>{escape(_sentence(shown))}</p>", *tables, _remarks(shown), *drawn, _refused(shown)]
    parts = {"title": escape(title), "content": "\n".join(content), "settings": _settings(shown)}
    write_atomically(path, _PAGE.substitute(parts, plotly=get_plotlyjs()))


def write_page(
    path: Path,
    title: str,
    about: str,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    pictures: Sequence["_Figure"],
    settings: str,
) -> None:
    """Write one self-contained page of tables (caption, head, rows) and figures with captions."""
    drawn = [_drawn(number, *picture) for number, picture in enumerate(pictures, start=1)]
    content = [f"<p>{escape(about)}</p>", *(_table(*table) for table in tables), *drawn]
    parts = {"title": escape(title), "content": "\n".join(content), "settings": f"<pre>{escape(settings)}</pre>"}
    write_atomically(path, _PAGE.substitute(parts, plotly=get_plotlyjs()))


def _read(folder: RunFolder) -> _Run:
    remarks = folder.notes()
    config, summary, links = folder.config, folder.summary() or {}, folder.links()
    records = folder.records(remarks.append)
    if not summary:
        remarks.append(f"not finished: {len(records)} of {config.get('rounds', '?')} rounds so far.")
    if links is None and summary.get("selection_rate") is not None:
        remarks.append("who learned from whom was not written.")
    method = summary.get("method") or _dig(config, "method", "name") or folder.path.name
    return _Run(
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


_NO_ATTACK = "no attack"


def _attack(table: Mapping[str, Any] | None) -> str:
    """What an attack is called; nothing if it is the one that consists in doing nothing."""
    return str(table.get("label") or table.get("name")) if table and table.get("name") != "none" else ""


# What is said


def _sentence(runs: Sequence[_Run]) -> str:
    labels, seeds = _distinct(run.label for run in runs), _distinct(run.seed for run in runs)
    scenarios = _distinct(run.summary.get("scenario") or _dig(run.config, "scenario", "name") for run in runs)
    finished = [run for run in runs if run.summary.get("data")]
    sources = _distinct(run.summary.get("data") or _dig(run.config, "scenario", "data") for run in finished or runs)
    clients = _distinct(_dig(run.config, "scenario", "clients") or _last(run, "clients") for run in runs)
    rounds = _distinct(run.summary.get("rounds_completed", len(run.records)) for run in runs)
    return (
        f"{_listed(labels)} on the scenario {_listed(scenarios)} with the data {_listed(sources)}: "
        f"{_listed(clients)} clients, {_listed(rounds)} rounds, {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{_listed(seeds)}.{_attackers(runs)}"
    )


def _attackers(runs: Sequence[_Run]) -> str:
    """Who is malicious, in a sentence of its own."""
    numbers = {len(_dig(run.summary, "attack", "malicious") or ()) for run in runs if run.attack} - {0}
    attacks = [name for name in dict.fromkeys(run.attack for run in runs) if name]
    if not numbers or not attacks:
        return ""
    several = len(attacks) > 1
    what = f"one of {len(attacks)} attacks" if several else f"the attack {attacks[0]}"
    return f" {_listed([str(number) for number in sorted(numbers)])} of the clients carry out {what}."


_Column = tuple[str, tuple[str, ...], float, str]  # heading, where it is, factor, format
_COLUMNS: tuple[_Column, ...] = (
    ("accuracy %", ("accuracy", "mean"), 100, ".2f"),
    ("std %", ("accuracy", "std"), 100, ".2f"),
    ("lowest %", ("accuracy", "min"), 100, ".1f"),
    ("highest %", ("accuracy", "max"), 100, ".1f"),
    ("loss", ("loss",), 1, ".4f"),
    ("selection rate", ("selection_rate",), 1, ".3f"),
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
_WITH_SPREAD = ("accuracy %", "selection rate", "attack success %")  # where that over the seeds is worth the width


def _headline(groups: _Groups) -> str:
    attacked = any(run.attack for runs in groups.values() for run in runs)
    columns = _COLUMNS
    if attacked:
        known = [column for column in _OF_ATTACKS if any(_cell(runs, column) != "–" for runs in groups.values())]
        columns = (_COLUMNS[0], *known, *(column for column in _COLUMNS[1:] if column[0] not in _UNATTACKED))
    head = ["method", "seeds", *(column[0] for column in columns)]
    rows = [[label, str(len(runs)), *(_cell(runs, column) for column in columns)] for label, runs in groups.items()]
    table = _table("Results on the clients' own test data", head, rows)
    several = any(len(runs) > 1 for runs in groups.values())
    averaged = " Means over the seeds; ± is their sample standard deviation." if several else ""
    honest = "All of honest clients: source accuracy is that on the examples the attack aims at, attack success the "
    honest += "share of them called what it wants, downloads and weight are shares of all, mean over the rounds."
    about = f"{honest if attacked else 'std, lowest and highest are over the clients.'}{averaged}"
    return f'{table}<p class="soft">{about}</p>'


def _matrix(runs: Sequence[_Run], *keys: str) -> tuple[list[str], list[str], list[list[float | None]]]:
    """(attacks, methods, the mean over the seeds of a value for each attack and method)."""
    attacks, methods = (list(dict.fromkeys(names)) for names in zip(*((run.attack, run.label) for run in runs)))
    cells: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if (value := run.number(*keys)) is not None:
            cells.setdefault((run.attack, run.label), []).append(value)
    values = [[fmean(cells[a, m]) if (a, m) in cells else None for m in methods] for a in attacks]
    return [attack or _NO_ATTACK for attack in attacks], methods, values


_Matrix = tuple[str, list[str], list[str], list[list[float | None]], bool]  # caption, attacks, methods, values, good
_MATRICES: tuple[tuple[str, tuple[str, ...], bool], ...] = (  # caption, where it is, whether more is better
    ("Accuracy of honest clients, in %", ("accuracy", "mean"), True),
    ("Attack success, in %: the share of the examples an attack aims at that honest clients' models call what it wants",
     ("attack", "success_rate"), False),
)  # fmt: skip


def _filled(runs: Sequence[_Run]) -> Iterator[_Matrix]:
    """Those of the matrices that hold anything, without the attacks about which they say nothing."""
    for caption, keys, good in _MATRICES:
        attacks, methods, values = _matrix(runs, *keys)
        known = [row for row, found in enumerate(values) if any(value is not None for value in found)]
        if known:
            yield caption, [attacks[row] for row in known], methods, [values[row] for row in known], good


def _matrix_tables(runs: Sequence[_Run]) -> list[str]:
    tables = []
    for caption, attacks, methods, values, _ in _filled(runs):
        rows = [
            [attack, *("–" if value is None else f"{100 * value:.1f}" for value in found)]
            for attack, found in zip(attacks, values, strict=True)
        ]
        tables.append(_table(f"{caption}.", ["attack", *methods], rows))
    return tables


def _matrices(runs: Sequence[_Run]) -> "Iterator[_Figure]":
    for caption, attacks, methods, values, good in _filled(runs):
        said = f"{caption}: a row is an attack, a column a method; the bluer, the better for honest clients."
        yield figures.heat_map(values, attacks, methods, good), said


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _cell(runs: Sequence[_Run], column: _Column) -> str:
    heading, keys, factor, form = column
    found = [_seconds(run) if heading == "seconds" else run.number(*keys) for run in runs]
    values = [factor * value for value in found if value is not None]
    if not values:
        return "–"
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 and heading in _WITH_SPREAD else ""
    return format(fmean(values), form) + spread


def _seconds(run: _Run) -> float:
    """Of the whole run; a record has only those of its round."""
    return float(run.summary.get("seconds") or sum(run.curve("seconds").values()))


def _remarks(runs: Sequence[_Run]) -> str:
    about: dict[str, list[str]] = {}  # what is true of several runs is said once
    for run in runs:
        for remark in (*run.remarks, *_counted(run)):
            about.setdefault(remark, []).append(run.named)
    if not about:
        return ""
    items = [f"{'; '.join(names)}: {remark}" if len(runs) > 1 else remark for remark, names in about.items()]
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<section class="remarks"><h2>To know when reading</h2><ul>{listed}</ul></section>'


def _counted(run: _Run) -> Iterator[str]:
    silent = sum(record.get("silent") or 0 for record in run.records)
    if silent:
        yield f"clients did not answer {int(silent)} times in all."
    refused = _refusals(run)
    if refused:
        yield f"{len(refused)} of the clients were refused at least once; they are listed at the end."


def _refusals(run: _Run) -> dict[str, tuple[int, str]]:
    """By client: how often its answer was kept from the others, and why."""
    if run.summary.get("refused"):
        return {client: (found["count"], found["reason"]) for client, found in run.summary["refused"].items()}
    refused: dict[str, tuple[int, str]] = {}
    for record in run.records:
        for client, why in (record.get("refused") or {}).items():
            refused[client] = (refused.get(client, (0, ""))[0] + 1, why)
    return refused


def _refused(runs: Sequence[_Run]) -> str:
    rows = [[run.named, client, str(count), why] for run in runs for client, (count, why) in _refusals(run).items()]
    if not rows:
        return ""
    table = _table("Clients whose answer was kept from all others.", ["run", "client", "times", "reason"], rows)
    return _folded("Refused clients", table)


def _settings(runs: Sequence[_Run]) -> str:
    settings = [{"run": run.named, "config": run.config, "environment": run.environment} for run in runs]
    return f"<pre>{escape(json.dumps(settings, indent=2))}</pre>"


# What is drawn

_Figure = tuple[go.Figure, str]  # and its caption


def _figures(groups: _Groups) -> Iterator[_Figure]:
    averaged = any(len(runs) > 1 for runs in groups.values())
    band = " Lines are means over the seeds, bands one standard deviation." if averaged else ""
    accuracy, loss = _curves(groups, "accuracy", "mean"), _curves(groups, "loss")
    if accuracy:
        yield figures.curves_by_round(accuracy, "accuracy"), f"Accuracy by round, mean over the clients.{band}"
    elif loss:
        yield figures.curves_by_round(loss, "loss", percent=False), f"Loss by round, mean over the clients.{band}"
    if any(run.attack for runs in groups.values() for run in runs):
        yield from _attack_figures(groups, band)
    yield from _client_figures(groups)
    yield from _link_figures(groups)
    selection = _curves(groups, "selection_rate")
    if selection:
        caption = "Share of the asked peers that belong to the asking client's own cluster, by round."
        expected = _curves(groups, "selection_oracle")
        yield figures.selection_by_round(selection, expected), caption + band


def _curves(groups: _Groups, *keys: str) -> dict[str, list[dict[int, float]]]:
    curves = {label: [curve for run in runs if (curve := run.curve(*keys))] for label, runs in groups.items()}
    return curves if any(curves.values()) else {}


_KINDS = {
    "own_honest": "honest, own cluster",
    "own_malicious": "malicious, own cluster",
    "other_honest": "honest, other cluster",
    "other_malicious": "malicious, other cluster",
}


def _attack_figures(groups: _Groups, band: str) -> Iterator[_Figure]:
    success = _curves(groups, "attack", "success_rate")
    if success:
        caption = "Attack success by round, mean over the honest clients."
        yield figures.curves_by_round(success, "attack success"), caption + band
    for what, said in (("selected", "downloads"), ("weight", "weight in their consensus")):
        shares = {
            label: {name: fmean(values) for kind, name in _KINDS.items() if (values := _found(runs, what, kind))}
            for label, runs in groups.items()
        }
        if known := {label: found for label, found in shares.items() if found}:
            caption = f"To whom honest clients give their {said}, mean over clients and rounds."
            yield figures.shares_by_method(known, f"share of {said}"), caption


def _found(runs: Sequence[_Run], what: str, kind: str) -> list[float]:
    return [value for run in runs if (value := _dig(run.summary, "attack", what, kind)) is not None]


def _client_figures(groups: _Groups) -> Iterator[_Figure]:
    by_label = {label: [value for run in runs for value in _per_client(run)] for label, runs in groups.items()}
    clients = {label: values for label, values in by_label.items() if values}
    caption = "Accuracy of each client's model; a point is a client"
    if len(groups) == 1 and clients:
        ((label, values),) = clients.items()
        clusters = [c for run in groups[label] for c in _dig(run.summary, "clusters", "true") or ()]
        if len(clusters) == len(values):
            clients = {
                f"cluster {c}": [v for v, d in zip(values, clusters, strict=True) if c == d]
                for c in sorted(set(clusters))
            }
            caption += ", by true cluster"
    if clients:
        yield figures.accuracy_by_client(clients), caption + "."


def _per_client(run: _Run) -> list[float]:
    return [value for value in _dig(run.summary, "accuracy", "per_client") or () if value is not None]


def _link_figures(groups: _Groups) -> Iterator[_Figure]:
    """Of the first run of each label in which some learned more from each other than others did."""
    for label, runs in groups.items():
        run = next((run for run in runs if run.links is not None and _differ(run.links)), None)
        if run is None or run.links is None:
            continue
        true, found = _dig(run.summary, "clusters", "true"), _dig(run.summary, "clusters", "found")
        order = "by true cluster" if true else "by cluster found" if found else "by number"
        caption = f"Who learns from whom: {label}, seed {run.seed}. A row learns from the columns that are bright."
        note = " Lines separate the clusters." if true or found else ""
        yield figures.links_matrix(run.links, true or found, order), caption + note


def _differ(links: NDArray[Any]) -> bool:
    """Whether the links between different clients are not all equal."""
    between = links[~np.eye(len(links), dtype=bool)]
    return bool(np.any(between != between[:1]))


def _drawn(number: int, figure: go.Figure, caption: str) -> str:
    config = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage", "resetScale2d"]]}
    drawing = to_html(figure, config, include_plotlyjs=False, full_html=False, div_id=f"figure-{number}")
    return (
        f'<figure><div role="img" aria-label="{escape(caption)}">{drawing}</div>'
        f"<figcaption><b>Figure {number}.</b> {escape(caption)}</figcaption></figure>"
    )


# Small help


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    table = f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _dig(tree: Any, *keys: str) -> Any:
    """`tree[key][key]...`, or None where the way ends."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _last(run: _Run, key: str) -> Any:
    return next((record[key] for record in reversed(run.records) if key in record), None)


def _distinct(values: Iterator[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value is not None)) or ["unknown"]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# The policy forbids the page to load anything, whatever is in it.
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --text: #1f2328; --page: #ffffff; --line: #d0d7de; --soft: #59636e; --note: #fff8e6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --page: #14171c; --line: #3a414b; --soft: #a3acb8; --note: #2b2616; }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.1rem; margin: 0; }
.wide { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
.soft { margin: 0; }
caption, figcaption, .soft { text-align: left; color: var(--soft); font-size: 0.9rem; padding: 0.4rem 0; }
th, td { padding: 0.35rem 0.4rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; overflow-wrap: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
tbody th { white-space: normal; min-width: 8rem; }
figure { margin: 2rem 0; }
.remarks { background: var(--note); padding: 0.75rem 1rem; border-radius: 0.4rem; margin: 1rem 0; }
.remarks ul { margin: 0.25rem 0 0; padding-left: 1.2rem; }
details { margin: 1rem 0; }
pre { overflow-x: auto; font-size: 0.85rem; overflow-wrap: normal; }
.main-svg :is(.xtick, .ytick, .legend, .g-xtitle, .g-ytitle, .infolayer) text { fill: var(--text) !important; }
</style>
<script>$plotly</script>
</head>
<body>
<main>
<h1>$title</h1>
$content
<details><summary>Settings and environment</summary>$settings</details>
</main>
</body>
</html>
""")
