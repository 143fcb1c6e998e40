"""What the report draws: which figures there are of these runs, and their captions."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from coterie.report import figures
from coterie.report.shown import Groups, ShownRun, dig
from coterie.report.words import filled_matrices

Picture = tuple[go.Figure, str]  # and its caption


def of_methods(groups: Groups) -> Iterator[Picture]:
    """Of runs that meet the same attack or none."""
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
        yield figures.curves_by_round(success, "attack success"), caption + band
    for what, said in (("selected", "downloads"), ("weight", "weight in their consensus")):
        shares = {
            label: {name: fmean(values) for kind, name in _KINDS.items() if (values := _found(runs, what, kind))}
            for label, runs in groups.items()
        }
        if known := {label: found for label, found in shares.items() if found}:
            caption = f"To whom honest clients give their {said}, mean over clients and rounds."
            yield figures.shares_by_method(known, f"share of {said}"), caption


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
        yield figures.accuracy_by_client(clients), caption + "."


def _per_client(run: ShownRun) -> list[float]:
    return [value for value in dig(run.summary, "accuracy", "per_client") or () if value is not None]


def _link_figures(groups: Groups) -> Iterator[Picture]:
    """Of the first run of each label in which some learned more from each other than others did."""
    for label, runs in groups.items():
        run = next((run for run in runs if run.links is not None and _differ(run.links)), None)
        if run is None or run.links is None:
            continue
        true, found = dig(run.summary, "clusters", "true"), dig(run.summary, "clusters", "found")
        order = "by true cluster" if true else "by cluster found" if found else "by number"
        caption = f"Who learns from whom: {label}, seed {run.seed}. A row learns from the columns that are bright."
        note = " Lines separate the clusters." if true or found else ""
        yield figures.links_matrix(run.links, true or found, order), caption + note


def _differ(links: NDArray[Any]) -> bool:
    """Whether the links between different clients are not all equal."""
    between = links[~np.eye(len(links), dtype=bool)]
    return bool(np.any(between != between[:1]))


def of_attacks(runs: Sequence[ShownRun]) -> Iterator[Picture]:
    """Of runs under several attacks: each method against each."""
    for caption, attacks, methods, values, good in filled_matrices(runs):
        said = f"{caption}: a row is an attack, a column a method; the bluer, the better for honest clients."
        yield figures.heat_map(values, attacks, methods, good), said
