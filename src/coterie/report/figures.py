"""Data to plotly figures, one small function each. Names are escaped here: plotly reads markup in them."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean, stdev
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

Curve = Mapping[int, float]  # round -> value
Matrices = Mapping[int, NDArray[np.float32]]  # round -> [N, N]
Curves = Mapping[str, Sequence[Curve]]  # what a reader calls it -> one curve per seed, none where it has no such thing

# Okabe and Ito's colours, which most colour-blind readers tell apart, without black and yellow: they vanish on a page
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")  # 7 and 6: 42 different pairs
_PATTERNS = ("", "/", "x", ".", "-", "+")
_BAD, _GOOD = "#FFF3D6", "#56B4E9"  # cells of a heat map: black numbers are read on both and on all between
_MOST_CELLS = 300  # clients a side of the matrix; beyond, neighbours are averaged
_MOST_POINTS = 5000


def curves_by_round(curves: Curves, what: str, percent: bool = True) -> go.Figure:
    """Mean over seeds by round; a band of one standard deviation where there are several seeds."""
    figure = _figure(what, percent)
    for index, (label, seeds) in enumerate(curves.items()):
        if seeds:  # the others keep their colours from figure to figure
            _add_curve(figure, label, seeds, index)
    return figure


def selection_by_round(curves: Curves, expected: Curves) -> go.Figure:
    """How often peers of the own cluster were asked, and what one who knows the clusters would reach."""
    figure = curves_by_round(curves, "asked within the own cluster")
    expected = {label: seeds for label, seeds in expected.items() if seeds}
    for oracle, labels in _same_curves(expected).items():
        name = "an oracle's expectation" + ("" if len(labels) == len(expected) else f" ({', '.join(labels)})")
        line = {"color": "#888888", "dash": "dash", "width": 2}
        rounds, values = zip(*oracle, strict=True)
        figure.add_scatter(x=rounds, y=values, name=_shown(name), mode="lines", line=line)
    return figure


def accuracy_by_client(groups: Mapping[str, Sequence[float]]) -> go.Figure:
    """A box and a point per client for each group."""
    figure = _figure("accuracy on the client's own test data", percent=True)
    points = "all" if sum(map(len, groups.values())) <= _MOST_POINTS else "outliers"
    for index, (label, values) in enumerate(groups.items()):
        look = {"color": _COLOURS[index % len(_COLOURS)], "size": 4, "opacity": 0.6}
        box = {"boxpoints": points, "jitter": 0.5, "pointpos": 0, "marker": look, "line": {"width": 1.5}}
        figure.add_box(y=list(values), name=_shown(label), **box)
    return figure.update_layout(showlegend=False, xaxis_title=None, xaxis_type="category")


def links_matrix(links: NDArray[Any], clusters: Sequence[int] | None, order: str) -> go.Figure:
    """Who learns from whom: a row learns from a column; clients in order of their cluster, lines between clusters."""
    figure, blocks = _square(len(links), clusters, order)
    values = _averaged(np.asarray(links, dtype=np.float32), blocks)
    return figure.add_heatmap(**_cells(values, blocks, float(values.max())))


def weights_by_round(matrices: Matrices, clusters: Sequence[int] | None, order: str) -> go.Figure:
    """The same of the weights in each round, a trace for each: the last is shown, without the diagonal."""
    rounds, stacked = list(matrices), np.stack(list(matrices.values()))
    figure, blocks = _square(stacked.shape[1], clusters, order)
    for index, weights in enumerate(stacked):
        values = _averaged(np.where(np.eye(len(weights), dtype=bool), np.nan, weights), blocks)
        look = _cells(values, blocks, float(stacked.max()))
        figure.add_heatmap(**look, name=str(rounds[index]), meta=index, visible=index == len(rounds) - 1)
    return figure


def weights_of_each_client(matrices: Matrices, lines: Mapping[str, Sequence[int]]) -> go.Figure:
    """The mean weight that a client gives to the others of each line by round; the first client's are shown."""
    rounds, stacked = list(matrices), np.stack(list(matrices.values()))
    figure, traces = _figure("weight", percent=False), []
    for client in range(stacked.shape[1]):
        for index, (name, members) in enumerate(lines.items()):
            if others := [member for member in members if member != client]:
                values = stacked[:, client, others].mean(1)
                look = _look(index) | {"name": _shown(name), "meta": client, "visible": client == 0}
                traces.append(go.Scatter(x=rounds, y=values, mode="lines+markers", **look))
    return figure.add_traces(traces)


def grouped_bars(groups: Mapping[str, Mapping[str, float]], what: str) -> go.Figure:
    """A group of bars for each name, of which each is of some kind; there is none where nothing is known."""
    figure = _figure(what, percent=True).update_layout(barmode="group").update_xaxes(title_text=None, type="category")
    kinds = list(dict.fromkeys(kind for found in groups.values() for kind in found))
    for index, kind in enumerate(kinds):
        heights = [found.get(kind) for found in groups.values()]
        look = {"color": _COLOURS[index % len(_COLOURS)], "pattern": {"shape": _PATTERNS[index % len(_PATTERNS)]}}
        figure.add_bar(x=[_shown(name) for name in groups], y=heights, name=_shown(kind), marker=look)
    return figure


def heat_map(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], more_is_better: bool
) -> go.Figure:
    """A number between 0 and 1 for each row and column, written into its cell in percent; None is left empty."""
    figure = _figure("", percent=False).update_xaxes(title_text=None, type="category", showgrid=False, side="top")
    figure.add_heatmap(
        x=[_shown(name) for name in columns],
        y=[_shown(name) for name in rows],
        z=[list(row) for row in values],
        zmin=0,
        zmax=1,
        text=[["" if value is None else f"{100 * value:.1f}" for value in row] for row in values],
        texttemplate="%{text}",
        textfont={"color": "black"},
        colorscale=(_BAD, _GOOD) if more_is_better else (_GOOD, _BAD),
        colorbar={"thickness": 12, "outlinewidth": 0, "tickformat": ".0%"},
        hovertemplate="%{y}, %{x}: %{text} %<extra></extra>",
    )
    figure.update_yaxes(title_text=None, type="category", showgrid=False, autorange="reversed")
    return figure.update_layout(height=120 + 34 * len(rows))


def mean_curve(seeds: Sequence[Curve]) -> dict[int, tuple[float, float]]:
    """Mean and sample standard deviation over the seeds that have the round."""
    rounds = sorted({round for curve in seeds for round in curve})
    values = {round: [curve[round] for curve in seeds if round in curve] for round in rounds}
    return {round: (fmean(found), stdev(found) if len(found) > 1 else 0.0) for round, found in values.items()}


def _shown(name: str) -> str:
    """A name as plotly shows it unchanged."""
    return escape(name, quote=False)


def _figure(y_title: str, percent: bool) -> go.Figure:
    """Empty axes that suit a light and a dark page: no background, translucent grid; the page colours the text."""
    line = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
    figure = go.Figure(layout={"template": None, "height": 420, "margin": {"l": 10, "r": 10, "t": 30, "b": 10}})
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font_size=13)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, showlegend=True)
    figure.update_layout(modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#999999", "activecolor": "#777777"})
    figure.update_xaxes(title_text="round", **line)
    return figure.update_yaxes(title_text=y_title, tickformat=".0%" if percent else None, **line)


def _add_curve(figure: go.Figure, label: str, seeds: Sequence[Curve], index: int) -> None:
    points = mean_curve(seeds)
    rounds = list(points)
    if len(seeds) > 1:
        upper = [mean + spread for mean, spread in points.values()]
        lower = [mean - spread for mean, spread in points.values()]
        band = {
            "fill": "toself",
            "fillcolor": _COLOURS[index % len(_COLOURS)],
            "opacity": 0.2,
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
        outline = {"x": rounds + rounds[::-1], "y": upper + lower[::-1], "mode": "lines"}
        figure.add_scatter(**outline, **band, showlegend=False, legendgroup=str(index))
    values = [mean for mean, _ in points.values()]
    group = str(index)  # so that the band is shown and hidden with its line
    figure.add_scatter(x=rounds, y=values, name=_shown(label), mode="lines+markers", legendgroup=group, **_look(index))


def _look(index: int) -> dict[str, Any]:
    """Of a line and its points."""
    colour, symbol = _COLOURS[index % len(_COLOURS)], _SYMBOLS[index % len(_SYMBOLS)]
    return {"line": {"color": colour, "width": 2}, "marker": {"symbol": symbol, "size": 6}}


def _square(size: int, clusters: Sequence[int] | None, order: str) -> tuple[go.Figure, list[NDArray[np.int64]]]:
    """Axes for a matrix of clients, and the blocks of clients that make a row."""
    members = np.asarray(clusters if clusters is not None else np.zeros(size), dtype=np.int64)
    blocks = _blocks(members, -(-size // _MOST_CELLS))
    figure = _figure(f"learns, {order}", percent=False).update_xaxes(title_text=f"is learned from, {order}")
    if clusters is not None:
        _mark_clusters(figure, [int(members[block[0]]) for block in blocks])
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", ticklabelstandoff=8)
    return figure.update_layout(height=560), blocks


def _cells(values: NDArray[np.float32], blocks: Sequence[NDArray[np.int64]], greatest: float) -> dict[str, Any]:
    """A heat map of such a matrix."""
    names = [f"client {block[0]}" if len(block) == 1 else f"clients {block[0]} … {block[-1]}" for block in blocks]
    scale = {"zmin": 0, "zmax": greatest, "colorscale": "Cividis", "colorbar": {"thickness": 12, "outlinewidth": 0}}
    return {"x": names, "y": names, "z": values, "hovertemplate": "%{y} from %{x}: %{z:.3g}<extra></extra>", **scale}


def _same_curves(expected: Curves) -> dict[tuple[tuple[int, float], ...], list[str]]:
    """Methods that ask alike have the same oracle: one line for all of them."""
    labels: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for label, seeds in expected.items():
        curve = tuple((round, mean) for round, (mean, _) in mean_curve(seeds).items())
        labels.setdefault(curve, []).append(label)
    return labels


def _blocks(members: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Clients in order of their cluster, in blocks of at most `size` clients of one cluster."""
    blocks: list[NDArray[np.int64]] = []
    for cluster in np.unique(members):
        clients = np.flatnonzero(members == cluster)
        blocks += np.array_split(clients, -(-len(clients) // size))
    return blocks


def _averaged(links: NDArray[np.float32], blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """The mean link from block to block."""
    order, starts = np.concatenate(blocks), np.cumsum([0, *map(len, blocks)])[:-1]
    sizes = np.array([len(block) for block in blocks], dtype=np.float32)
    sums = np.add.reduceat(np.add.reduceat(links[order][:, order], starts, axis=0), starts, axis=1)
    return np.asarray(sums / np.outer(sizes, sizes), dtype=np.float32)


def _mark_clusters(figure: go.Figure, cluster_of: Sequence[int]) -> None:
    """Lines between the clusters and their names in the middle of their stretch."""
    starts = [i for i, cluster in enumerate(cluster_of) if i == 0 or cluster != cluster_of[i - 1]]
    for start in starts[1:]:
        figure.add_vline(x=start - 0.5, line_width=2, line_color="#D55E00")
        figure.add_hline(y=start - 0.5, line_width=2, line_color="#D55E00")
    middles = [(start + end - 1) / 2 for start, end in zip(starts, [*starts[1:], len(cluster_of)], strict=True)]
    names = [str(cluster_of[start]) for start in starts]
    figure.update_xaxes(tickvals=middles, ticktext=names).update_yaxes(tickvals=middles, ticktext=names)
