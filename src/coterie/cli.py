"""The program: `coterie run`, `compare`, `demo`, and what there is to choose from."""

import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table

from coterie import tables
from coterie.errors import CoterieError, explain, nearest

if TYPE_CHECKING:
    from coterie.comparison import Comparison
    from coterie.experiment import Run
    from coterie.options import Options

INTERRUPTED = 130  # what shells report for Ctrl-C
app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    help="Federated learning in which clients with different data find out who to learn with.\n\n"
    "Begin with `coterie demo`, then `coterie run FILE.toml`. What a file may say: `coterie methods`, `scenarios`, "
    "`models`, `data`, `settings`.",
)
data_app = typer.Typer(invoke_without_command=True, help="The data sets, where they are, and how to get them.")
app.add_typer(data_app, name="data")

File = Annotated[Path, typer.Argument(help="a TOML file, or the folder of a run to resume")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="put a value over the file's: method.alpha=20")
]
Out = Annotated[Path | None, typer.Option(help="folder for the results; default: a new one below runs/")]
Methods = Annotated[str, typer.Option(help="names with commas between: those in the file's list, or any")]
Seeds = Annotated[str, typer.Option(help="numbers with commas between, put over the file's")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="only plain lines at the beginning and the end")]


@app.command()
def run(
    file: File,
    set: Set = [],  # noqa: B006
    out: Out = None,
    seed: Annotated[int | None, typer.Option(help="put over the file's seed")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    quiet: Quiet = False,
) -> None:
    """Run one method.

    Example: `coterie run experiments/fedcbo/fig3-quick.toml --set method.download=20 --seed 1`
    """
    from coterie import display, experiment

    config = file if file.is_dir() and not set else _tables(file, set)
    where = out or (file if file.is_dir() else None)
    result = experiment.run(config, out=where, seed=seed, resume=resume, display=display.default_display(quiet))
    if not result.completed:
        raise typer.Exit(INTERRUPTED)
    _show_run(result)


@app.command()
def compare(
    file: File,
    set: Set = [],  # noqa: B006
    out: Out = None,
    methods: Methods = "",
    seeds: Seeds = "",
    quiet: Quiet = False,
) -> None:
    """Run several methods and seeds, and put them in one table. What --out holds already is kept and continued.

    Example: `coterie compare experiments/fedcbo/table1-quick.toml --methods local,fedcbo --seeds 0,1,2`
    """
    from coterie import comparison, display

    result = comparison.compare(
        _tables(file, set),
        methods=_names(methods),
        seeds=_numbers(seeds),
        out=out,
        display=display.default_display(quiet),
    )
    _show_comparison(result)


@app.command()
def attack(
    file: File,
    set: Set = [],  # noqa: B006
    out: Out = None,
    methods: Methods = "",
    attacks: Annotated[
        str, typer.Option(help="names with commas between: those in the file's list, or any; default: all")
    ] = "",
    seeds: Seeds = "",
    quiet: Quiet = False,
) -> None:
    """Run several methods under several attacks, and put them in one table and one heat map. Every attack has as many
    malicious clients as the file's [attack] says. What --out holds already is kept and continued.

    Example: `coterie attack experiments/fedcb2o/attacks-quick.toml --attacks none,label-flip,sign-flip`
    """
    from coterie import comparison, config, display
    from coterie.robust.attacks import ATTACKS

    tables = _tables(file, set)
    plan = config.parse(tables).compare
    result = comparison.compare(
        tables,
        methods=_names(methods),
        attacks=_names(attacks) or (plan.attacks if plan else None) or list(ATTACKS),
        seeds=_numbers(seeds),
        out=out,
        display=display.default_display(quiet),
    )
    _show_comparison(result)


@app.command()
def demo(out: Out = None, quiet: Quiet = False) -> None:
    """Forty clients with rotated digits find their clusters, in a minute or two, on data that comes along."""
    from coterie import comparison, display
    from coterie.runs.names import unused

    file = Path(__file__).with_name("demo.toml")
    target = out or unused(Path("runs") / "demo")
    _show_comparison(comparison.compare(file, out=target, display=display.default_display(quiet)))


@app.command()
def methods(name: Annotated[str, typer.Argument(help="only this one")] = "") -> None:
    """The methods, with each option's meaning and default."""
    from coterie.methods import METHODS

    _list_options(METHODS, "method", name)


@app.command("attacks")
def list_attacks(name: Annotated[str, typer.Argument(help="only this one")] = "") -> None:
    """The attacks of malicious clients, with each option's meaning and default."""
    from coterie.robust.attacks import ATTACKS

    _list_options(ATTACKS, "attack", name)


@app.command()
def scenarios(name: Annotated[str, typer.Argument(help="only this one")] = "") -> None:
    """The scenarios (who holds what), with each option's meaning and default."""
    from coterie.data import SCENARIOS

    _list_options(SCENARIOS, "scenario", name)


@app.command()
def models(name: Annotated[str, typer.Argument(help="only this one")] = "") -> None:
    """The reference networks, with each option's meaning and default."""
    from coterie.models import MODELS

    _list_options(MODELS, "model", name)


@app.command()
def settings() -> None:
    """The keys of a file outside its [scenario], [model], [method] and [attack] tables."""
    from coterie.config import Compare, Config, Stay
    from coterie.descent import Train

    _print_options(
        "at the top of the file",
        Config,
        leave_out={"scenario", "model", "train", "method", "attack", "compare", "presence"},
    )
    _print_options("[train]", Train)
    _print_options("[[presence]]", Stay)
    _print_options("[compare]", Compare)


@data_app.callback()
def data(context: typer.Context) -> None:
    """The data sets, where they are, and how to get them."""
    if context.invoked_subcommand is not None:
        return
    from coterie.data import SOURCES, available, data_folder

    table = Table("data", "what", "found", title=f"in {data_folder()}; set COTERIE_DATA to look elsewhere")
    for name, spec in SOURCES.items():
        table.add_row(name, spec.description, available(name) or f"no; try: coterie data fetch {name}")
    tables.console().print(table)


@data_app.command("fetch")
def fetch_data(name: Annotated[str, typer.Argument(help="name of the data set, as `coterie data` lists it")]) -> None:
    """Download a data set into the data folder: checked, resumable, from the first mirror that answers."""
    from coterie.data import fetch

    for path in fetch(name):
        typer.echo(path)


@app.command()
def doctor() -> None:
    """What this machine offers, and whether everything needed is there."""
    from coterie.doctor import examine

    table = Table("what", "found", show_header=False)
    for what, found in examine():
        table.add_row(what, found)
    tables.console().print(table)


@app.command()
def particles(
    name: Annotated[str, typer.Argument(help="an example; without one they are listed")] = "",
    seed: Annotated[int, typer.Option(help="other seeds, other particles")] = 0,
    out: Annotated[Path | None, typer.Option(help="the page; default: runs/particles/NAME.html")] = None,
    show: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Consensus-based optimisation on R^d: run a named example, print its tables, and write its page.

    Example: `coterie particles ackley-sphere --open`
    """
    from coterie.particles.examples import EXAMPLES

    if not name:
        described = [(known, (example.__doc__ or "").strip()) for known, example in EXAMPLES.items()]
        tables.console().print(tables.of_text(("example", "what it shows"), described))
        return
    if name not in EXAMPLES:
        raise CoterieError(explain("example", name, ", ".join(EXAMPLES), nearest(name, EXAMPLES)))
    import torch

    from coterie.report.particles import write_example

    torch.set_num_threads(1)  # several only wait for each other over ensembles as small as these
    example, path = EXAMPLES[name](seed), out or Path("runs") / "particles" / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_example(path, example, f"coterie particles {name} --seed {seed}")
    console = tables.console()
    for table in example.tables:
        console.print(table.caption, tables.of_text(table.head, table.rows), sep="\n")
    console.print(f"page: {path}", soft_wrap=True)
    if show:
        typer.launch(str(path))


def main() -> None:
    """Run the program; a user's mistake ends it with one message and exit code 2, Ctrl-C with 130."""
    _prepare_streams()
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        app()  # ends by SystemExit, also for a mistyped command or option
    except CoterieError as error:
        _end(str(error))
    except OSError as error:  # a path that the system refuses, or a full disk under the output
        _end(f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # torch's words for the same
            raise
        _end("there is not enough memory for this. Take fewer clients, a smaller model or fewer threads.")


def _end(message: str) -> NoReturn:
    with suppress(OSError):
        tables.console(stderr=True).print(f"error: {message}", soft_wrap=True)
    try:
        sys.stdout.flush()
    except OSError:  # on leaving it would be tried again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(2)


def _prepare_streams() -> None:
    """A stream that was closed takes everything, and one that lacks a letter gets another for it."""
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. During an import it ends the program at once: torch would take an exception for a missing library."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # a progress bar hides the cursor
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _tables(file: Path, settings: list[str]) -> dict[str, Any]:
    """The tables of a file, or of the folder of a run, with settings put over them."""
    from coterie import config

    if not file.is_dir():
        return config.read(file, settings)
    from coterie.runs import RunFolder

    tables = {key: value for key, value in RunFolder(file).config.items() if value is not None}
    for setting in settings:
        config.put(tables, setting)
    return tables


def _names(text: str) -> list[str] | None:
    """What stands between commas, or None if nothing does."""
    return [name.strip() for name in text.split(",") if name.strip()] or None


def _numbers(text: str) -> list[int] | None:
    try:
        return [int(name) for name in _names(text) or []] or None
    except ValueError:
        raise CoterieError(explain("--seeds", text, "whole numbers with commas between, such as 0,1,2")) from None


def _show_run(result: "Run") -> None:
    tables.console().print(tables.of_run(result.summary, str(result.folder.report)))


def _show_comparison(comparison: "Comparison") -> None:
    if comparison.runs:
        console = tables.console()
        console.print(*tables.of_comparison(comparison.rows()), sep="\n")
        console.print(f"report: {comparison.path / 'report.html'}", soft_wrap=True)
    if not comparison.completed:
        raise typer.Exit(INTERRUPTED)


def _list_options(table: "Mapping[str, type[Options]]", key: str, only: str) -> None:
    if only and only not in table:
        raise CoterieError(explain(key, only, ", ".join(table), nearest(only, table)))
    for name, kind in table.items():
        if not only or name == only:
            _print_options(name, kind, leave_out={"name"})


def _print_options(heading: str, kind: "type[Options]", leave_out: frozenset[str] | set[str] = frozenset()) -> None:
    console = tables.console()
    console.print(heading, style="bold")
    console.print((kind.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " "))
    table = Table("option", "default", "meaning", box=None, pad_edge=True, header_style="dim")
    for name, field in kind.model_fields.items():
        if name not in leave_out:
            default = "required" if field.is_required() else field.get_default(call_default_factory=True)
            table.add_row(name, str(default), field.description or "")
    console.print(table, end="\n\n")


if __name__ == "__main__":
    main()
