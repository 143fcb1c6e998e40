"""What the report draws: which figures there are of these runs, and their captions."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from coterie.report import figures
from coterie.report.figures import Matrices
from coterie.report.shown import Groups, ShownRun, dig, listed
from coterie.report.words import filled_matrices

MOST_ROUNDS = 60  # that a slider shows
MOST_CELLS = 600_000  # of all matrices of a page, which are most of its size
MOST_LINES = 12


class Control(NamedTuple):
    """What a reader chooses; of the figure those traces are shown whose `meta` is the number of the choice."""

    what: str
    names: Sequence[str]
    chosen: int
    slides: bool  # or is a list


class Picture(NamedTuple):
    """A figure and what is said below it."""

    figure: go.Figure
    caption: str
    control: Control | None = None


def of_methods(groups: Groups) -> Iterator[Picture]:
    """Of runs that meet the same attack or none."""
    averaged = any(len(runs) > 1 for runs in groups.values())
    band = " Lines are means over the seeds, bands one standard deviation." if averaged else ""
    accuracy, loss = _curves(groups, "accuracy", "mean"), _curves(groups, "loss")
    if accuracy:
        yield Picture(figures.curves_by_round(accuracy, "accuracy"), f"Accuracy by round, mean over the clients.{band}")
    elif loss:
        caption = f"Loss by round, mean over the clients.{band}"
        yield Picture(figures.curves_by_round(loss, "loss", percent=False), caption)
    yield from _sweep_figures(groups)
    if any(run.attack for runs in groups.values() for run in runs):
        yield from _attack_figures(groups, band)
    yield from _client_figures(groups)
    yield from _weight_figures(groups)
    yield from _link_figures(groups)
    selection = _curves(groups, "selection_rate")
    if selection:
        caption = "Share of the asked peers that belong to the asking client's own cluster, by round."
        expected = _curves(groups, "selection_oracle")
        yield Picture(figures.selection_by_round(selection, expected), caption + band)


def _curves(groups: Groups, *keys: str) -> dict[str, list[dict[int, float]]]:
    curves = {label: [curve for run in runs if (curve := run.curve(*keys))] for label, runs in groups.items()}
    return curves if any(curves.values()) else {}


_KINDS = {
    "own_honest": "honest, own cluster",
    "own_malicious": "malicious, own cluster",
    "other_honest": "honest, other cluster",
    "other_malicious": "malicious, other cluster",
}


def _attack_figures(groups: Groups, band: str) -> Iterator[Picture]:
    success = _curves(groups, "attack", "success_rate")
    if success:
        caption = "Attack success by round, mean over the honest clients."
        yield Picture(figures.curves_by_round(success, "attack success"), caption + band)
    for what, said in (("selected", "downloads"), ("weight", "weight in their consensus")):
        shares = {
            label: {name: fmean(values) for kind, name in _KINDS.items() if (values := _found(runs, what, kind))}
            for label, runs in groups.items()
        }
        if known := {label: found for label, found in shares.items() if found}:
            caption = f"To whom honest clients give their {said}, mean over clients and rounds."
            yield Picture(figures.grouped_bars(known, f"share of {said}"), caption)


def _found(runs: Sequence[ShownRun], what: str, kind: str) -> list[float]:
    return [value for run in runs if (value := dig(run.summary, "attack", what, kind)) is not None]


def _client_figures(groups: Groups) -> Iterator[Picture]:
    by_label = {label: [value for run in runs for value in _per_client(run)] for label, runs in groups.items()}
    clients = {label: values for label, values in by_label.items() if values}
    caption = "Accuracy of each client's model; a point is a client"
    if len(groups) == 1 and clients:
        ((label, values),) = clients.items()
        clusters = [c for run in groups[label] for c in dig(run.summary, "clusters", "true") or ()]
        if len(clusters) == len(values):
            clients = {
                f"cluster {c}": [v for v, d in zip(values, clusters, strict=True) if c == d]
                for c in sorted(set(clusters))
            }
            caption += ", by true cluster"
    if clients:
        yield Picture(figures.accuracy_by_client(clients), caption + ".")


def _per_client(run: ShownRun) -> list[float]:
    return [value for value in dig(run.summary, "accuracy", "per_client") or () if value is not None]


def _weight_figures(groups: Groups) -> Iterator[Picture]:
    """Of the first run of each label that recorded matrices of weights."""
    recorded = {label: [(run, found) for run in runs if (found := _recorded(run))] for label, runs in groups.items()}
    first = {label: found[0] for label, found in recorded.items() if found}
    for label, (run, matrices) in first.items():
        yield from _of_weights(run, f"{label}, seed {run.seed}", _thinned(matrices, len(first)))


def _of_weights(run: ShownRun, named: str, matrices: Matrices) -> Iterator[Picture]:
    """All weights, to go through the rounds, and those of each client by round."""
    clusters, order, note = _order(run)
    names = _names(run, len(next(iter(matrices.values()))))
    rounds = Control("round", [str(round) for round in matrices], len(matrices) - 1, slides=True)
    caption = f"By which weights a row learns from the columns: {named}.{note}"
    yield Picture(figures.weights_by_round(matrices, clusters, order), caption, rounds)
    lines = {name: [client] for client, name in enumerate(names)}
    caption = f"Weights that a client gives to others, by round: {named}."
    if len(names) > MOST_LINES:
        lines = {
            f"cluster {c}": [i for i, d in enumerate(clusters or ()) if d == c] for c in sorted({*(clusters or ())})
        }
        caption += " A line is the mean over the others of a cluster."
    if lines:
        chosen = Control("client", names, 0, slides=False)
        yield Picture(figures.weights_of_each_client(matrices, lines), caption, chosen)


def _recorded(run: ShownRun) -> Matrices:
    """The matrices of weights by round."""
    found = {record["round"]: dig(record, "weights", "matrix") for record in run.records}
    return {round: np.asarray(matrix, dtype=np.float32) for round, matrix in found.items() if matrix is not None}


def _thinned(matrices: Matrices, sliders: int) -> Matrices:
    """Some of them, evenly chosen with the first and the last, so that a page with so many sliders stays small."""
    rounds = list(matrices)
    most = max(2, min(MOST_ROUNDS, MOST_CELLS // (sliders * matrices[rounds[0]].size)))
    kept = np.linspace(0, len(rounds) - 1, min(most, len(rounds))).round().astype(int)
    return {rounds[place]: matrices[rounds[place]] for place in kept}


def _names(run: ShownRun, count: int) -> list[str]:
    """What the clients are called: by number, and by language if each cluster is of one."""
    called = [f"client {client}" for client in range(count)]
    languages, clusters = dig(run.config, "scenario", "languages"), dig(run.summary, "clusters", "true")
    if not languages or not clusters:
        return called
    return [f"{languages[cluster]} ({name})" for cluster, name in zip(clusters, called, strict=True)]


def _sweep_figures(groups: Groups) -> Iterator[Picture]:
    """Where runs differ in their scenario: how each method does against what differs."""
    runs = [run for runs in groups.values() for run in runs]
    varied = _varied([dig(run.config, "scenario") or {} for run in runs])
    accuracies: dict[str, dict[str, list[float]]] = {}
    for run in runs if varied else ():
        if (accuracy := run.number("accuracy", "mean")) is not None:
            setting = ", ".join(f"{key} {dig(run.config, 'scenario', key)}" for key in varied)
            accuracies.setdefault(setting, {}).setdefault(_method(run, runs), []).append(accuracy)
    if accuracies:
        bars = {setting: {name: fmean(of) for name, of in found.items()} for setting, found in accuracies.items()}
        caption = f"Accuracy against {listed(varied)} of the scenario, mean over the clients and seeds."
        yield Picture(figures.grouped_bars(bars, "accuracy"), caption)


def _varied(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all tables."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def _method(run: ShownRun, runs: Sequence[ShownRun]) -> str:
    """The method's name, or the run's label where others run the same method in another way."""
    table = dig(run.config, "method")
    others = [dig(other.config, "method") for other in runs]
    same = [other for other in others if dig(other, "name") == dig(table, "name")]
    return str(dig(table, "name")) if all(other == table for other in same) else run.label


def _link_figures(groups: Groups) -> Iterator[Picture]:
    """Of the first run of each label in which some learned more from each other than others did."""
    for label, runs in groups.items():
        run = next((run for run in runs if run.links is not None and _differ(run.links)), None)
        if run is None or run.links is None:
            continue
        clusters, order, note = _order(run)
        caption = f"Who learns from whom: {label}, seed {run.seed}. A row learns from the columns that are bright."
        yield Picture(figures.links_matrix(run.links, clusters, order), caption + note)


def _order(run: ShownRun) -> tuple[list[int] | None, str, str]:
    """Clusters by which to order a matrix, how that is called, and what is said of it."""
    true, found = dig(run.summary, "clusters", "true"), dig(run.summary, "clusters", "found")
    order = "by true cluster" if true else "by cluster found" if found else "by number"
    return true or found, order, " Lines separate the clusters." if true or found else ""


def _differ(links: NDArray[Any]) -> bool:
    """Whether the links between different clients are not all equal."""
    between = links[~np.eye(len(links), dtype=bool)]
    return bool(np.any(between != between[:1]))


def of_attacks(runs: Sequence[ShownRun]) -> Iterator[Picture]:
    """Of runs under several attacks: each method against each."""
    for caption, attacks, methods, values, good in filled_matrices(runs):
        said = f"{caption}: a row is an attack, a column a method; the bluer, the better for honest clients."
        yield Picture(figures.heat_map(values, attacks, methods, good), said)
