"""The pages of the particles examples, and the command that writes them."""

import re
from pathlib import Path

import pytest

from coterie.particles.examples import EXAMPLES, Curves, Example, Success, Table, rastrigin_movies
from coterie.report.particles import curves, movie, write_example
from program import coterie


def test_the_command_lists_runs_and_refuses(tmp_path: Path) -> None:
    listed = coterie("particles")
    assert all(name in listed.out for name in EXAMPLES)
    page = tmp_path / "deep" / "page.html"
    ended = coterie("particles", "rastrigin", "--out", str(page), "--seed", "1")
    assert ended.code == 0, ended.err
    assert "dimensions" in ended.out
    assert str(page) in ended.out
    html = page.read_text()
    assert "coterie particles rastrigin --seed 1" in html
    assert html.count("Plotly.addFrames(") >= 2  # two movies
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', html)  # nothing is loaded from elsewhere
    wrong = coterie("particles", "ratrigin")
    assert wrong.code == 2
    assert 'Did you mean "rastrigin"' in wrong.err


def test_a_movie_has_a_frame_for_each_step_and_moves_all_but_the_ground() -> None:
    shown = rastrigin_movies(0).pictures[1]
    figure = movie(shown)
    assert [frame.name for frame in figure.frames] == [str(step) for step in shown.steps]
    assert {tuple(frame.traces) for frame in figure.frames} == {(1, 2)}
    last = figure.frames[-1].data
    assert last[0].x == pytest.approx(shown.positions[-1][:, 0], abs=1e-3)
    assert last[1].y == pytest.approx(shown.consensus[-1][:, 1], abs=1e-3)
    assert figure.data[1].x != pytest.approx(last[0].x, abs=1e-3)


def test_curves_and_maps_are_drawn_and_names_are_not_markup(tmp_path: Path) -> None:
    lines = Curves("<b>V</b>", "time", "V", {"<i>one</i>": ([0, 1], [2.0, 1.0]), "predicted": ([0, 1], [2.0, 0.5])})
    figure = curves(lines)
    assert figure.layout.yaxis.type == "log"
    assert figure.data[0].name == "&lt;i&gt;one&lt;/i&gt;"
    assert (figure.data[0].line.dash, figure.data[1].line.dash) == ("solid", "dash")
    found = Success("found", [[0.0, 1.0]], ["w_m .1"], ["beta .1", "beta .2"])
    page = tmp_path / "page.html"
    write_example(page, Example("T", "about", [Table("a < b", ["x"], [["1"]])], [lines, found]), "said")
    html = page.read_text()
    assert "a &lt; b" in html
    assert "&lt;b&gt;V&lt;/b&gt;" in html
    assert "100.0" in html
