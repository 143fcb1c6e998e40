"""The page of a particles example: movies, curves and maps of success."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from coterie.particles.examples import Curves, Example, Movie, Success
from coterie.report.figures import _COLOURS, _SYMBOLS, _figure, _shown, heat_map
from coterie.report.page import write_page
from coterie.report.pictures import Picture


def write_example(path: Path, example: Example, settings: str) -> None:
    """Write one self-contained page about an example."""
    tables = [(table.caption, table.head, table.rows) for table in example.tables]
    write_page(path, example.title, example.about, tables, [_drawn(shown) for shown in example.pictures], settings)


def _drawn(shown: Curves | Success | Movie) -> Picture:
    if isinstance(shown, Curves):
        return Picture(curves(shown), shown.caption)
    if isinstance(shown, Success):
        return Picture(heat_map(shown.values, shown.rows, shown.columns, more_is_better=True), shown.caption)
    return Picture(movie(shown), shown.caption)


def curves(shown: Curves) -> go.Figure:
    """Lines over a logarithmic axis."""
    figure = _figure(shown.y, percent=False).update_xaxes(title_text=shown.x, type="log" if shown.log_x else "linear")
    for index, (name, (x, y)) in enumerate(shown.curves.items()):
        last = index == len(shown.curves) - 1  # what is predicted
        line = {"color": _COLOURS[index % len(_COLOURS)], "dash": "dash" if last else "solid", "width": 2}
        figure.add_scatter(x=list(x), y=list(y), name=_shown(name), mode="lines", line=line)
    return figure.update_yaxes(type="log", exponentformat="power")


def movie(shown: Movie) -> go.Figure:
    """Particles by step, with a slider and a button that plays them."""
    figure = _figure("", percent=False)
    figure.add_traces([_ground(shown), *_particles(shown, 0)])
    moving = list(range(1, len(figure.data)))
    figure.frames = [
        go.Frame(data=_particles(shown, place), traces=moving, name=str(step)) for place, step in enumerate(shown.steps)
    ]
    figure.update_xaxes(title_text=None, range=[float(shown.axes[0][0]), float(shown.axes[0][-1])])
    if len(shown.axes) == 2:
        figure.update_yaxes(range=[float(shown.axes[1][0]), float(shown.axes[1][-1])])
    return figure.update_layout(height=520, **_controls(shown.steps))


def _ground(shown: Movie) -> go.Scatter:
    """The function that is searched; in two dimensions as squares, for plotly drops a heat map when points move."""
    if len(shown.axes) == 1:
        line = {"color": "#888888", "width": 1.5}
        return go.Scatter(x=shown.axes[0], y=shown.landscape, mode="lines", line=line, name="function")
    x, y = np.meshgrid(*(np.round(axis[::2], 3) for axis in shown.axes))
    look = {"symbol": "square", "size": 26, "color": np.round(shown.landscape[::2, ::2], 2).ravel()}
    look |= {"colorscale": ("#30506B", "#DDE6EE")}
    return go.Scatter(x=x.ravel(), y=y.ravel(), mode="markers", marker=look, hoverinfo="skip", showlegend=False)


def _particles(shown: Movie, place: int) -> list[Any]:
    """Each kind of particle in its colour, and the consensus points."""
    points, found, start = [], shown.positions[place], 0
    for index, (kind, size) in enumerate(shown.sizes.items()):
        look = {"color": _COLOURS[(index + 1) % len(_COLOURS)], "symbol": _SYMBOLS[index], "size": 6, "opacity": 0.8}
        points.append(_scatter(shown, found[start : start + size], kind, look))
        start += size
    cross = {"symbol": "x", "size": 12, "color": "#D55E00", "line": {"color": "white", "width": 1}}
    return [*points, _scatter(shown, shown.consensus[place], "consensus", cross)]


def _scatter(shown: Movie, at: Any, name: str, look: dict[str, Any]) -> go.Scatter:
    on_line = len(shown.axes) == 1
    height = np.interp(at[:, 0], shown.axes[0], shown.landscape) if on_line else at[:, 1]
    return go.Scatter(
        x=np.round(at[:, 0], 3), y=np.round(height, 3), mode="markers", marker=look, name=_shown(name), hoverinfo="skip"
    )


def _controls(steps: Sequence[int]) -> dict[str, Any]:
    now = {"mode": "immediate", "frame": {"duration": 80, "redraw": False}, "transition": {"duration": 0}}
    play = {"label": "play", "method": "animate", "args": [None, {**now, "fromcurrent": True}]}
    pause = {"label": "pause", "method": "animate", "args": [[None], now]}
    stops = [{"label": str(step), "method": "animate", "args": [[str(step)], now]} for step in steps]
    buttons = {"type": "buttons", "buttons": [play, pause], "direction": "left", "x": 0, "y": -0.12, "yanchor": "top"}
    slider = {"steps": stops, "currentvalue": {"prefix": "step "}, "x": 0.2, "len": 0.8, "y": -0.05}
    return {"updatemenus": [buttons], "sliders": [slider]}
