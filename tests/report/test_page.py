"""The page says what the runs hold, loads nothing and opens in a browser."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from plotly.offline import get_plotlyjs

from coterie.report import pictures
from coterie.report.page import write_report
from coterie.report.shown import ShownRun
from coterie.runs.folder import RunFolder

MakeRun = Callable[..., RunFolder]  # the fixture of conftest.py
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Fails on a tag that is not closed in its place; keeps the text, the cells of tables and what would be loaded."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.rows: list[list[str]] = []
        self.count: dict[str, int] = {}
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def page_of(path: Path, *runs: RunFolder, title: str = "A title") -> Page:
    write_report(path, runs, title)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_of_one_run_says_what_was_run_and_what_came_out(tmp_path: Path, make_run: MakeRun) -> None:
    page = page_of(tmp_path / "report.html", make_run())
    assert "fedcbo on the scenario rotated with the data the digits: 6 clients, 3 rounds, seed 0." in page.text
    assert page.rows[0][:3] == ["method", "seeds", "accuracy %"]
    assert page.rows[1] == ["fedcbo", "1", "80.00", "5.00", "70.0", "90.0", "0.2500", "0.600", "0.875", "1.5"]
    assert page.count["figure"] == page.count["figcaption"] == 4
    assert page.count["table"] == page.count["caption"] == 1
    assert "To know when reading" not in page.text


def test_seeds_of_one_method_are_averaged(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run("fedcbo", seed) for seed in (0, 1)] + [make_run("local", 0, selection_rate=None)]
    page = page_of(tmp_path / "report.html", *runs)
    assert "fedcbo and local on the scenario rotated" in page.text
    assert "seeds 0 and 1." in page.text
    assert page.rows[1][:3] == ["fedcbo", "2", "81.00 ± 1.41"]  # of 80 and 82: sqrt(2)
    assert page.rows[2][:3] == ["local", "1", "80.00"]


def test_a_label_is_shown_in_place_of_the_method(tmp_path: Path, make_run: MakeRun) -> None:
    page = page_of(tmp_path / "report.html", make_run("fedcbo"), make_run("fedcbo", label="with noise"))
    assert [row[0] for row in page.rows] == ["method", "fedcbo", "with noise"]


def test_the_page_loads_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "report.html"
    page = page_of(path, make_run(), make_run("local"))
    assert page.loaded == []
    content = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in content
    assert not re.search(r"@import|url\(\s*['\"]?http", content[: content.index("<script>")])
    assert len(content) < 7_000_000  # the drawing library once


def test_what_a_user_can_name_is_harmless(tmp_path: Path, make_run: MakeRun) -> None:
    evil = "</script><script>alert('x')</script>$content"
    run = make_run(evil, scenario=evil, data=evil, refused={evil: {"count": 1, "reason": evil}})
    run.add_note(evil)
    path = tmp_path / "report.html"
    page = page_of(path, run, title=evil)
    plain = page_of(path, make_run(), title="plain")
    assert page.count["script"] == plain.count["script"]
    assert page.text.count(evil) >= 5  # shown as what it is


def test_what_a_reader_must_know_is_said(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(refused={"4": {"count": 2, "reason": "non-finite model"}})
    run.append({"round": 4, "seconds": 0.5, "clients": 6, "silent": 3, "refused": {}})
    run.add_note("resumed after round 2.")
    (run.path / "links.safetensors").unlink()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"round')
    page = page_of(tmp_path / "report.html", run)
    assert "resumed after round 2." in page.text
    assert "clients did not answer 3 times in all." in page.text
    assert "1 of the clients were refused" in page.text
    assert ["fedcbo, seed 0", "4", "2", "non-finite model"] in page.rows
    assert "who learned from whom was not written." in page.text
    assert "line 5 of" in page.text
    assert str(tmp_path) not in page.text
    assert page.count["figure"] == 3


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_came(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run()
    (run.path / "summary.json").unlink()
    run.append({"round": 4, "seconds": 0.5, "clients": 6, "refused": {"3": "non-finite model"}, "accuracy": None})
    page = page_of(tmp_path / "report.html", run)
    assert "not finished: 4 of 3 rounds so far." in page.text
    assert page.rows[1][:3] == ["fedcbo", "1", "80.00"]
    assert page.rows[1][-1] == "2.0"
    assert ["fedcbo, seed 0", "3", "1", "non-finite model"] in page.rows


def test_a_regression_shows_its_loss(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(accuracy=None)
    lines = [{"round": round, "seconds": 0.5, "accuracy": None, "loss": 1 / round} for round in (1, 2)]
    run.keep_rounds(0, pytest.fail)
    for line in lines:
        run.append(line)
    page = page_of(tmp_path / "report.html", run)
    assert "Loss by round" in page.text
    assert "Accuracy by round" not in page.text
    assert page.rows[1][2:7] == ["–", "–", "–", "–", "0.2500"]


def test_a_run_without_a_round_has_a_page(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"rounds": 5, "scenario": {}}, {"data_fingerprint": "0123"})
    run.close()
    page = page_of(tmp_path / "report.html", run)
    assert "not finished: 0 of 5 rounds so far." in page.text
    assert "figure" not in page.count


# attacks


def test_what_an_attack_did_stands_in_place_of_the_spread_over_clients(tmp_path: Path, attacked: MakeRun) -> None:
    page = page_of(tmp_path / "report.html", attacked("fedcbo", "label-flip"))
    assert "2 of the clients carry out the attack label-flip." in page.text
    assert page.rows[0] == [
        "method", "seeds", "accuracy %", "source accuracy %", "attack success %", "malicious downloads %", "loss",
        "selection rate", "adjusted Rand", "seconds",
    ]  # fmt: skip
    assert page.rows[1] == ["fedcbo", "1", "80.00", "75.00", "12.50", "37.5", "0.2500", "0.600", "0.875", "1.5"]
    assert "malicious, own cluster" in (tmp_path / "report.html").read_text()


def test_without_an_attack_nobody_is_called_malicious(tmp_path: Path, attacked: MakeRun, make_run: MakeRun) -> None:
    page = page_of(tmp_path / "report.html", attacked("fedcbo", "none"))
    assert page.rows == page_of(tmp_path / "other.html", make_run("fedcbo")).rows
    assert "carry out" not in page.text
    assert "malicious, own cluster" not in (tmp_path / "report.html").read_text()


def test_of_several_attacks_it_is_said_which_refused_clients_are_of(tmp_path: Path, attacked: MakeRun) -> None:
    refused = {"4": {"count": 2, "reason": "non-finite model"}}
    runs = [attacked("fedcbo", "none"), attacked("fedcbo", "label-flip"), attacked("fedcbo", "NaN", refused=refused)]
    page = page_of(tmp_path / "report.html", *runs)
    assert page.rows[:4] == [["attack", "fedcbo"], ["no attack", "80.0"], ["label-flip", "80.0"], ["NaN", "80.0"]]
    assert page.rows[4:6] == [["attack", "fedcbo"], ["label-flip", "12.5"]]
    assert "fedcbo, NaN, seed 0: 1 of the clients were refused" in page.text
    assert ["fedcbo, NaN, seed 0", "4", "2", "non-finite model"] in page.rows


def test_who_learns_from_whom_is_not_drawn_where_all_links_are_equal(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("fedavg")
    run.write_links(0.25 * (1 - torch.eye(6)))  # everybody is in one group
    assert "Who learns from whom" not in page_of(tmp_path / "report.html", run).text
    assert "Who learns from whom" in page_of(tmp_path / "report.html", make_run("fedcbo")).text


# weights

EARLY = (1 - torch.eye(6)).tolist()
LATE = [[float(i != j and i % 2 == j % 2) for j in range(6)] for i in range(6)]


def test_what_was_recorded_of_weights_is_drawn(mixing: MakeRun) -> None:
    shown = ShownRun.of(mixing([EARLY, LATE]))
    matrix, of_client = [one for one in pictures.of_methods({"cobo": [shown]}) if one.control is not None]
    order = [0, 2, 4, 1, 3, 5]
    for trace, recorded in zip(matrix.figure.data, (EARLY, LATE), strict=True):
        drawn = np.nan_to_num(trace.z)
        assert np.array_equal(drawn, np.array(recorded)[order][:, order])
    assert matrix.control == pictures.Control("round", ["10", "20"], 1, slides=True)
    assert of_client.control == pictures.Control("client", [f"client {i}" for i in range(6)], 0, slides=False)
    given = {(line.meta, line.name): list(line.y) for line in of_client.figure.data}
    assert len(given) == 30
    assert all(given[i, f"client {j}"] == [EARLY[i][j], LATE[i][j]] for i in range(6) for j in range(6) if i != j)


def test_clients_are_called_by_their_language_and_many_are_lines_by_cluster(mixing: MakeRun) -> None:
    run = mixing([EARLY, LATE])
    run.write_config(run.config | {"scenario": run.config["scenario"] | {"languages": ["ca", "es"]}})
    (figure,) = [
        one for one in pictures.of_methods({"cobo": [ShownRun.of(run)]}) if one.control and not one.control.slides
    ]
    assert figure.control is not None
    assert figure.control.names[:2] == ["ca (client 0)", "es (client 1)"]
    clusters = [client % 3 for client in range(13)]
    many = mixing(
        [np.ones((13, 13)).tolist()] * 2, clusters={"true": clusters, "found": clusters, "adjusted_rand": 1.0}
    )
    *_, figure = [one for one in pictures.of_methods({"cobo": [ShownRun.of(many)]}) if one.control is not None]
    assert [line.name for line in figure.figure.data][:3] == ["cluster 0", "cluster 1", "cluster 2"]
    assert len(figure.figure.data) == 13 * 3


def test_a_page_of_many_clients_and_rounds_stays_below_12_mb(tmp_path: Path, mixing: MakeRun) -> None:
    """Of 80 clients and 40 evaluated rounds; of more methods fewer rounds are drawn, with the first and the last."""
    clusters = [client // 8 for client in range(80)]
    weights = np.random.default_rng(0).random((80, 80)).round(3).tolist()
    run = mixing([weights] * 40, clusters={"true": clusters, "found": clusters, "adjusted_rand": 1.0})
    write_report(tmp_path / "report.html", [run], "Many")
    content = (tmp_path / "report.html").read_text()
    assert len(content) < 12e6
    assert 'max="39"' in content
    six = [one for one in pictures.of_methods({name: [ShownRun.of(run)] for name in "abcdef"}) if one.control]
    assert len(get_plotlyjs()) + sum(len(one.figure.to_json()) for one in six) < 12e6
    assert six[0].control is not None
    assert (six[0].control.names[0], six[0].control.names[-1]) == ("10", "400")
    assert len(six[0].control.names) == 15  # of 6 methods and 6,400 cells, 600,000 in all


def test_better_than_alone_and_weights_are_columns_where_they_are_known(tmp_path: Path, make_run: MakeRun) -> None:
    known = {"improved": 0.75, "weights": {"within": 0.95, "between": 0.125, "matrix": None}}
    page = page_of(tmp_path / "report.html", make_run("local"), make_run("cobo", **known))
    columns = {heading: (local, cobo) for heading, local, cobo in zip(*page.rows[:3], strict=True)}
    assert columns["improved %"] == ("–", "75.0")
    assert columns["weight within"] == ("–", "0.950")
    assert columns["weight between"] == ("–", "0.125")
    assert "do better than with the same seed alone" in page.text
    assert "improved %" not in page_of(tmp_path / "other.html", make_run("local")).rows[0]


def test_of_a_sweep_each_method_is_a_bar_for_each_value(make_run: MakeRun) -> None:
    groups: dict[str, list[ShownRun]] = {}
    for method in ("local", "cobo"):
        for clusters, seed in ((2, 0), (4, 0), (4, 1)):
            run = make_run(method, seed, label=f"{method}, {clusters}")
            run.write_config(run.config | {"scenario": run.config["scenario"] | {"clusters": clusters}})
            groups.setdefault(f"{method}, {clusters}", []).append(ShownRun.of(run))
    (sweep,) = [one for one in pictures.of_methods(groups) if one.figure.data[0].type == "bar"]
    assert [(bar.name, bar.x, bar.y) for bar in sweep.figure.data] == [
        (method, ("clusters 2", "clusters 4"), (0.8, pytest.approx(0.81))) for method in ("local", "cobo")
    ]
    assert "against clusters of the scenario" in sweep.caption
    alike = {label: runs for label, runs in groups.items() if label.endswith("4")}
    assert all(one.figure.data[0].type != "bar" for one in pictures.of_methods(alike))


def test_what_runs_a_method_in_another_way_is_a_bar_of_its_own(make_run: MakeRun) -> None:
    groups = {}
    for weights in ("box", "simplex"):
        run = make_run("cobo", label=weights)
        changed = {
            "method": {"name": "cobo", "weights": weights},
            "scenario": {"name": "rotated", "shift": len(groups)},
        }
        run.write_config(run.config | changed)
        groups[weights] = [ShownRun.of(run)]
    (sweep,) = [one for one in pictures.of_methods(groups) if one.figure.data[0].type == "bar"]
    assert [(bar.name, bar.y) for bar in sweep.figure.data] == [("box", (0.8, None)), ("simplex", (None, 0.8))]


# in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install the package chromium")
def test_the_page_opens_in_a_browser_and_draws_every_figure(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "report.html"
    write_report(path, [make_run(), make_run("<b>local", 1), make_run("<b>local", 2)], "Two methods")
    drawn = opened(path, tmp_path).split("<figure>")[1:]
    assert len(drawn) == 5
    assert all('class="main-svg"' in figure for figure in drawn)


def opened(path: Path, folder: Path) -> str:
    """What stands in the page when its scripts have run, without an error."""
    flags = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{part}" for part in QUIET)]
    flags += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=10000", "--enable-logging=stderr"]
    command = [str(CHROMIUM), *flags, "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    return shown.stdout


READER = """<script>addEventListener("load", () => {
  for (const [kind, value] of [["input", 0], ["select", 3]]) {
    const control = document.querySelector(kind + "[data-figure]");
    control.value = value;
    control.dispatchEvent(new Event("input"));
    const shown = document.getElementById(control.dataset.figure).data.filter(trace => trace.visible);
    control.insertAdjacentHTML("afterend", `<b>${shown.map(trace => trace.meta + ": " + trace.name)}</b>`);
  }
});</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install the package chromium")
def test_a_reader_chooses_the_round_and_the_client(tmp_path: Path, mixing: MakeRun) -> None:
    path = tmp_path / "report.html"
    write_report(path, [mixing([EARLY, LATE])], "Weights")
    path.write_text(path.read_text().replace("</body>", READER))
    content = opened(path, tmp_path)
    assert "<b>0: 10</b>" in content
    assert ">10</output>" in content
    assert 'aria-valuetext="10"' in content
    others = ",".join(f"3: client {client}" for client in (0, 1, 2, 4, 5))
    assert f"<b>{others}</b>" in content
