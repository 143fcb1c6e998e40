"""From a configuration to a run: assemble the parts, play the rounds, keep everything in a folder."""

import hashlib
import itertools
import json
import math
import re
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie import config as configuration
from coterie.config import Compare, Config
from coterie.core import Method, Setting
from coterie.data import Scenario
from coterie.display import Display, default_display
from coterie.errors import ConfigError, RunError, explain
from coterie.federation import Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.metrics import adjusted_rand, found_clusters, spread
from coterie.model import Model
from coterie.models import ModelOptions
from coterie.randomness import Moment
from coterie.report import write_report
from coterie.runs import RunFolder, checkpoint, environment
from coterie.runs.files import write_atomically
from coterie.training import ChoosesPeers, Progress, beginning, collect_models, evaluate, rounds

MAY_CHANGE = {"rounds", "evaluate_every", "checkpoint_every", "threads", "block", "compare", "label"}  # on resuming
ConfigLike = Config | Mapping[str, Any] | Path | str


@dataclass(frozen=True)
class Run:
    """A run in its folder, finished or not."""

    path: Path
    completed: bool  # False if it was interrupted; it can be resumed

    @property
    def folder(self) -> RunFolder:
        """Everything that was kept of it."""
        return RunFolder(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The results."""
        summary = self.folder.summary()
        if summary is None:
            raise RunError(f"{self.path}: the run has not ended. Resume it: coterie run {self.path} --resume")
        return summary

    def load_model(self, client: int, module: nn.Module) -> nn.Module:
        """Put a client's final model into your module."""
        return self.folder.load_model(client, module)


def run(
    config: ConfigLike,
    *,
    federation: Federation | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    seed: int | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> Run:
    """Run one method and keep everything in a folder.

    `config` is a TOML file, a mapping with its tables, or the folder of a run to resume. Give `federation` and `model`
    (an nn.Module, or a function that makes one) to use your own data and network instead of [scenario] and [model].
    `out` is the folder, by default a new one below runs/. Interrupted by Ctrl-C, it stops after the round in hand.
    """
    settings = _resolve(config, seed, own=federation is not None)
    if (federation is None) != (model is None):
        raise ConfigError("run: federation and model go together; give both or none.")
    path = _folder_for(settings, config, out, resume)
    world = World.of(settings, federation, model)
    display = display or default_display()
    with world, _opened(path, world, resume) as folder:
        return Run(path, _play(world, folder, display))


def compare(
    config: ConfigLike,
    *,
    methods: Sequence[str | Mapping[str, Any]] | None = None,
    seeds: Sequence[int] | None = None,
    federation: Federation | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    display: Display | None = None,
) -> "Comparison":
    """Run several methods with several seeds, each in a folder of its own below `out`, and put them in one table.

    What is there already is kept: finished runs are not run again, unfinished ones are resumed.
    """
    base = _resolve(config, None, own=federation is not None)
    plan = base.compare or Compare()
    display = display or default_display()
    path = Path(out) if out is not None else unused(Path("runs") / "comparison")
    variants = [_variant(base, method, seed) for method in methods or plan.methods for seed in seeds or plan.seeds]
    _refuse_twins(variants)
    for variant in {variant.shown: variant for variant in variants}.values():
        World.of(variant, federation, model).fleet.close()  # what cannot be is refused before the first round
    finished: list[Run] = []
    for variant in variants:
        target = path / _place(variant)
        there = RunFolder.holds_a_run(target)
        finished.append(run(variant, federation=federation, model=model, out=target, resume=there, display=display))
        if not finished[-1].completed:
            break
    comparison = Comparison(path, [one for one in finished if one.completed], all(one.completed for one in finished))
    if comparison.runs:
        write_report(path / "report.html", [one.folder for one in comparison.runs], title="Comparison")
        write_atomically(path / "comparison.json", json.dumps(comparison.rows(), indent=2))
    return comparison


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    path: Path
    runs: list[Run]  # the finished ones
    completed: bool

    def rows(self) -> list[dict[str, Any]]:
        """One row for each method: means over seeds, and standard deviations over seeds where there are several."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for one in self.runs:
            groups.setdefault(one.summary["label"], []).append(one.summary)
        return [_row(label, summaries) for label, summaries in groups.items()]


def _row(label: str, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {
        "accuracy": [(one["accuracy"] or {}).get("mean") for one in summaries],
        "loss": [one["loss"] for one in summaries],
        "selection_rate": [one["selection_rate"] for one in summaries],
        "adjusted_rand": [one["clusters"]["adjusted_rand"] for one in summaries],
        "seconds": [one["seconds"] for one in summaries],
    }
    row: dict[str, Any] = {"method": label, "seeds": len(summaries)}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        row[name] = statistics.fmean(known) if known else None
        row[f"{name}_std"] = statistics.stdev(known) if len(known) > 1 else None
    return row


class World:
    """The assembled parts of a run."""

    def __init__(self, config: Config, federation: Federation, model: Model) -> None:
        self.config = config
        self.federation = federation.to(config.device)
        self.model = model
        self.method = cast(Method, config.method)
        sizes = self.federation.train.count
        equal = bool((sizes == sizes[0]).all())
        axes = len(federation.input_shape)
        self.kernel = choose_kernel(
            config.kernel, model, config.device, config.precision, equal_sizes=equal, example_axes=axes
        )
        self.setting = Setting(federation.num_clients, self._initial, self.federation.clusters)
        _check_budget(self.method, config, federation.num_clients)
        self.before = beginning(self.method, self.setting)
        memory = self.method.client_memory(self._starts(), federation.num_clients)
        self.fleet = SimulatedFleet(
            self.federation,
            self.kernel,
            config.train,
            memory,
            block=config.block,
            threads=config.threads,
        )

    @staticmethod
    def of(
        config: Config, federation: Federation | None, module: nn.Module | Callable[[], nn.Module] | None
    ) -> "World":
        """Build what the configuration names, or take what was given, and see that it fits together."""
        _check_device(config.device)
        federation = federation or cast(Scenario, config.scenario).build(config.seed)
        outputs = federation.num_classes or math.prod(federation.train.y.shape[2:])
        if module is None:
            options = cast(ModelOptions, config.model)
            shape = federation.input_shape
            module = lambda: options.build(shape, outputs)  # noqa: E731
        model = Model(module, "cross_entropy" if federation.num_classes else "mse")
        model.check_fits(federation.train.x[0, :2], federation.train.y[0, :2], federation.num_classes)
        return World(config, federation, model)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.close()

    def description(self) -> dict[str, Any]:
        """The resolved configuration, with names for what was given as objects."""
        tables = self.config.model_dump(mode="json")
        tables["scenario"] = tables["scenario"] or {
            "name": self.federation.name,
            "clients": self.federation.num_clients,
        }
        tables["model"] = tables["model"] or {"name": type(self.model.module).__name__}
        return tables

    def fingerprint(self) -> str:
        """A checksum of what is learned from and of the model's shape, so that a run is resumed with nothing else."""
        digest = hashlib.sha256(repr(self.model.layout).encode())
        for examples in filter(None, (self.federation.train, self.federation.validation)):
            for tensor in (examples.x, examples.y, examples.count):
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _initial(self, number: int) -> Tensor:
        return self.model.initial(self.config.seed, number).to(self.config.device)

    def _starts(self) -> Tensor:
        """[N, P]: the clients' initial models."""
        if self.config.initial == "common":
            return self._initial(0).expand(self.federation.num_clients, -1)
        return torch.stack([self._initial(1 + key) for key in self.federation.keys.tolist()])


def _check_device(device: str) -> None:
    """See that torch can compute there."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # torch has many kinds for this
        raise ConfigError(explain("device", device, "a torch device of this machine, such as cpu or cuda")) from None


def _check_budget(method: Method, config: Config, num_clients: int) -> None:
    """Nobody can download more peers than take part in a round."""
    cohort = max(1, round(config.participation * num_clients))
    if isinstance(method, ChoosesPeers) and method.download > cohort - 1:
        allowed = f"1 to {cohort - 1}" if cohort > 1 else "nothing here"
        allowed += f" ({cohort} of the clients take part in a round, and nobody downloads itself)"
        do = "Lower it, or raise scenario.clients or participation."
        raise ConfigError(explain("method.download", method.download, allowed, do))


def _play(world: World, folder: RunFolder, display: Display) -> bool:
    """Play the rounds that are left; True if the run is finished, False if it was interrupted."""
    config = world.config
    if (summary := folder.summary()) is not None and summary["rounds_completed"] == config.rounds:
        display.say(f"{folder.path}: finished already, nothing to do")
        if not folder.report.exists():  # it was killed just before
            _report(world, folder)
        return True
    since = progress = _latest(world, folder, display)
    folder.write_config(world.description())  # what may change on resuming
    folder.keep_rounds(since.round)
    display.begin(config.shown, since.round, config.rounds)
    with _interruption() as interrupted:
        for progress in rounds(
            world.method, world.fleet, world.setting, world.federation.keys, since, seed=config.seed,
            last=config.rounds, evaluate_every=config.evaluate_every, participation=config.participation,
        ):  # fmt: skip
            folder.append(progress.record)
            display.round(progress.record)
            stop = interrupted()
            if progress.round % config.checkpoint_every == 0 or progress.round == config.rounds or stop:
                checkpoint.save(folder.checkpoints, progress.round, _tensors(world, progress))
            if stop:
                break
    display.end()
    if progress.round < config.rounds:
        display.say(f"stopped after round {progress.round}; go on with: coterie run {folder.path} --resume")
        return False
    _finish(world, folder, progress)
    return True


def _tensors(world: World, progress: Progress) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    memory = {f"memory.{name}": value for name, value in world.fleet.memory().items()}
    return memory | {f"state.{name}": value for name, value in progress.state.items()} | {"links": progress.links}


def _latest(world: World, folder: RunFolder, display: Display) -> Progress:
    """Where the run stands: its newest whole checkpoint, or its beginning."""

    def warn(text: str) -> None:
        display.say(f"warning: {text}")
        folder.add_note(text)

    found = checkpoint.latest(folder.checkpoints, warn)
    if found is None:
        return world.before
    if found.round > world.config.rounds:
        allowed = f"at least {found.round}, the rounds this run has completed"
        raise RunError(explain("rounds", world.config.rounds, allowed))
    parts: dict[str, dict[str, Tensor]] = {"memory": {}, "state": {}}
    for name, value in found.tensors.items():
        kind, _, key = name.partition(".")
        if key:
            parts[kind][key] = value.to(world.config.device)
    world.fleet.restore(parts["memory"])
    folder.add_note(f"resumed after round {found.round}")
    return Progress(found.round, parts["state"], found.tensors["links"], {})


def _finish(world: World, folder: RunFolder, progress: Progress) -> None:
    """Write what a finished run leaves."""
    moment = Moment(world.config.seed, progress.round - 1)
    per_client = progress.per_client or evaluate(world.method, world.fleet, progress.state, moment)
    found = found_clusters(progress.links)
    truth = world.federation.clusters
    true = [None] * len(found) if truth is None else truth.tolist()
    folder.write_links(progress.links)
    folder.write_clients(
        [
            {"client": client, "cluster": true[client], "found": found[client], "accuracy": accuracy, "loss": loss,
             "examples": examples}
            for client, (accuracy, loss, examples) in enumerate(
                zip(per_client["accuracy"], per_client["loss"], world.federation.train.count.tolist(), strict=True)
            )
        ]
    )  # fmt: skip
    if world.config.save_models:
        models = collect_models(world.method, world.fleet, progress.state, moment, world.model.layout.size)
        layout = [(piece.name, tuple(piece.shape)) for piece in world.model.layout.pieces]
        folder.write_models(models, layout, range(len(models)))
    folder.write_summary(_summary(world, folder, per_client, found))
    _report(world, folder)


def _report(world: World, folder: RunFolder) -> None:
    write_report(folder.report, [folder], title=f"{world.config.shown} on {world.federation.name}")


def _summary(world: World, folder: RunFolder, per_client: Mapping[str, Tensor], found: list[int]) -> dict[str, Any]:
    config, truth = world.config, world.federation.clusters
    records = folder.records(warn=lambda text: None)
    accuracy = spread(per_client["accuracy"]) if world.federation.num_classes else None
    return {
        "method": getattr(config.method, "name", type(config.method).__name__),
        "label": config.shown,
        "scenario": world.federation.name,
        "data": world.federation.source,
        "seed": config.seed,
        "rounds": config.rounds,
        "rounds_completed": config.rounds,
        "accuracy": accuracy and {**accuracy, "per_client": per_client["accuracy"]},
        "loss": (spread(per_client["loss"]) or {}).get("mean"),
        "selection_rate": records[-1]["selection_rate"] if records else None,
        "clusters": {
            "adjusted_rand": adjusted_rand(found, truth),
            "true": None if truth is None else truth.tolist(),
            "found": found,
        },
        "refused": _refused(records),
        "seconds": sum(record["seconds"] for record in records),
        "fleet": world.fleet.name,
        "kernel": world.kernel.name,
        "precision": config.precision,
    }


def _refused(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each client that was refused: in how many rounds, and why the last time."""
    refused: dict[str, dict[str, Any]] = {}
    for record in records:
        for client, why in record["refused"].items():
            refused[client] = {"count": refused.get(client, {"count": 0})["count"] + 1, "reason": why}
    return refused


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is noted, to be heeded after the round in hand; the second is as usual."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        noted.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, usual)


@contextmanager
def _opened(path: Path, world: World, resume: bool) -> Iterator[RunFolder]:
    """The locked folder of a run: a new one, or on resuming the one that is there if it is of the same run."""
    config, data = world.description(), world.fingerprint()
    if not resume:
        with RunFolder.create(path, config, {**environment(), "data_fingerprint": data}) as folder:
            yield folder
        return
    with RunFolder.open(path) as folder:
        if (change := _difference(folder.config, config)) is not None:
            raise RunError(f"{path}: cannot be resumed, {change}. Undo that or choose another --out.")
        if folder.environment["data_fingerprint"] != data:
            raise RunError(f"{path}: cannot be resumed, the data or the model are not those it began with.")
        yield folder


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first key that changed and must not, in words."""
    for key in sorted({*old, *new} - (MAY_CHANGE if not prefix else set())):
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            if (inner := _difference(before, now, f"{prefix}{key}.")) is not None:
                return inner
        elif before != now:
            return f"{prefix}{key} was {before!r} and is {now!r} now"
    return None


def _resolve(config: ConfigLike, seed: int | None, own: bool) -> Config:
    """The configuration of a file, a mapping, or the folder of a run."""
    if isinstance(config, str | Path):
        path = Path(config)
        config = RunFolder(path).config if path.is_dir() else configuration.read(path)
        if path.is_dir() and own:
            config = {key: value for key, value in config.items() if key not in ("scenario", "model")}
    if not isinstance(config, Config):
        config = configuration.parse({key: value for key, value in config.items() if value is not None}, own_data=own)
    return config if seed is None else configuration.replaced(config, seed=seed)


def _folder_for(config: Config, source: ConfigLike, out: Path | str | None, resume: bool) -> Path:
    if out is not None:
        return Path(out)
    if isinstance(source, str | Path) and Path(source).is_dir():
        return Path(source)
    scenario = getattr(config.scenario, "name", "own-data")
    named = Path("runs") / _slug(f"{config.shown}-{scenario}-seed{config.seed}")
    return _newest(named) if resume else unused(named)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def unused(path: Path) -> Path:
    """The path, or with the first number behind it that is not there yet."""
    return next(candidate for candidate in _numbered(path) if not candidate.exists())


def _newest(path: Path) -> Path:
    """The last of the numbered paths that are there."""
    there = list(itertools.takewhile(Path.exists, _numbered(path)))
    if not there:
        raise RunError(f"{path}: no such run to resume. Name it by --out, or leave out --resume to begin it.")
    return there[-1]


def _variant(base: Config, method: str | Mapping[str, Any], seed: int) -> Config:
    """The base configuration with another method and seed. The base's own method keeps its keys unless they are given;
    a label names the row, and the keys of a table `with` go over those outside [method]."""
    table: dict[str, Any] = {"name": method} if isinstance(method, str) else dict(method)
    label, others = table.pop("label", ""), table.pop("with", {})
    if not isinstance(others, Mapping):
        raise ConfigError(explain("compare.methods: with", others, 'a table of settings, such as { initial = "own" }'))
    own: dict[str, Any] = base.method.model_dump() if table.get("name") == getattr(base.method, "name", None) else {}
    tables = base.model_dump(exclude={"compare"}, exclude_none=True) | {"seed": seed, "label": label}
    tables = configuration.merged(tables, others) | {"method": own | table}
    return configuration.parse(tables, own_data=base.scenario is None)


def _refuse_twins(variants: Sequence[Config]) -> None:
    places = [_place(variant) for variant in variants]
    for variant in variants:
        if places.count(_place(variant)) > 1:
            got = f"{variant.shown} with seed {variant.seed} twice"
            raise ConfigError(explain("compare", got, "each once", "Give one a label of its own."))


def _place(variant: Config) -> str:
    """The name of its folder among those of a comparison."""
    return _slug(f"{variant.shown}-seed{variant.seed}")


def _slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
