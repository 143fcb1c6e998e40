"""The report: one HTML file that needs nothing else, for one run or for a comparison of several."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from plotly.io import to_html
from plotly.offline import get_plotlyjs

from coterie.report import pictures, words
from coterie.report.pictures import Control, Picture
from coterie.report.shown import NO_ATTACK, ShownRun
from coterie.runs.files import write_atomically
from coterie.runs.folder import RunFolder


def write_report(path: Path, runs: Sequence[RunFolder], title: str) -> None:
    """Write one self-contained page about one run, or comparing several; runs of the same label are averaged.

    The page loads nothing from anywhere. Runs that have not ended are shown as far as they came, and the page says so.
    """
    shown = [ShownRun.of(run) for run in runs]
    several = len({run.attack for run in shown}) > 1
    groups: dict[str, list[ShownRun]] = {}
    for run in shown:
        groups.setdefault(f"{run.label}, {run.attack or NO_ATTACK}" if several else run.label, []).append(run)
    chosen = pictures.of_attacks(shown) if several else pictures.of_methods(groups)
    drawn = [_drawn(number, picture) for number, picture in enumerate(chosen, start=1)]
    tables = [words.headline(groups)]
    if several:
        tables = [*words.matrices(shown), words.folded("Every method under every attack", tables[0])]
    said = [f"<p>{escape(words.sentence(shown))}</p>", *tables, words.remarks(shown)]
    content = "\n".join([*said, *drawn, words.refused(shown)])
    parts = {"title": escape(title), "content": content, "settings": words.settings(shown)}
    write_atomically(path, _PAGE.substitute(parts, plotly=get_plotlyjs()))


def write_page(
    path: Path,
    title: str,
    about: str,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    drawn: Sequence[Picture],
    settings: str,
) -> None:
    """Write one self-contained page of tables (caption, head, rows) and figures with captions."""
    figures = [_drawn(number, picture) for number, picture in enumerate(drawn, start=1)]
    content = [f"<p>{escape(about)}</p>", *(words.table(*table) for table in tables), *figures]
    parts = {"title": escape(title), "content": "\n".join(content), "settings": f"<pre>{escape(settings)}</pre>"}
    write_atomically(path, _PAGE.substitute(parts, plotly=get_plotlyjs()))


def _drawn(number: int, picture: Picture) -> str:
    config = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage", "resetScale2d"]]}
    drawing = to_html(picture.figure, config, include_plotlyjs=False, full_html=False, div_id=f"figure-{number}")
    caption = escape(picture.caption)
    control = "" if picture.control is None else _control(f"figure-{number}", picture.control)
    return (
        f'<figure><div role="img" aria-label="{caption}">{drawing}</div>{control}'
        f"<figcaption><b>Figure {number}.</b> {caption}</figcaption></figure>"
    )


def _control(figure: str, control: Control) -> str:
    """A slider or a list of the browser's own, which is used by keyboard too."""
    names, at = [escape(name) for name in control.names], control.chosen
    which = f'data-figure="{figure}" autocomplete="off"'
    if control.slides:
        given = f'max="{len(names) - 1}" value="{at}" data-names="{"|".join(names)}" aria-valuetext="{names[at]}"'
        chosen = f'<input type="range" {which} {given}><output>{names[at]}</output>'
    else:
        options = [f"<option value={number}>{name}</option>" for number, name in enumerate(names)]
        chosen = f"<select {which}>{''.join(options)}</select>"
    return f'<label class="control">{control.what} {chosen}</label>'


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
.control { display: flex; gap: 0.6rem; align-items: center; font-size: 0.9rem; }
.control input { flex: 1; max-width: 40rem; }
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
<script>
for (const control of document.querySelectorAll("[data-figure]")) control.addEventListener("input", () => {
  const figure = document.getElementById(control.dataset.figure);
  Plotly.restyle(figure, {visible: figure.data.map(trace => trace.meta == control.value)});
  if (!control.dataset.names) return;
  const name = control.dataset.names.split("|")[control.value];
  control.nextElementSibling.value = name;
  control.setAttribute("aria-valuetext", name);
});
</script>
</body>
</html>
""")
