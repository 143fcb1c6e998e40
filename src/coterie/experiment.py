"""From a configuration to a run: assemble the parts, play the rounds, keep everything in a folder."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from coterie import config as configuration
from coterie.config import Config
from coterie.data import SCENARIOS
from coterie.display import Display, default_display
from coterie.errors import ConfigError, RunError, explain
from coterie.federation import Federation
from coterie.metrics import adjusted_rand, clusters_by_weights, found_clusters, perplexities, shown_weights, spread
from coterie.randomness import Moment
from coterie.report import write_report
from coterie.runs import RunFolder, checkpoint, environment
from coterie.runs.names import numbered, slug, unused
from coterie.training import Progress, collect_models, evaluate, rounds
from coterie.world import Network, World

MAY_CHANGE = {"rounds", "evaluate_every", "checkpoint_every", "threads", "compare", "label"}  # on resuming
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
    model: Network | None = None,
    out: Path | str | None = None,
    seed: int | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> Run:
    """Run one method and keep everything in a folder.

    `config` is a TOML file, a mapping with its tables, or the folder of a run to resume. Give `federation` and `model`
    (an nn.Module, or a function that makes one) to use your own data and network instead of [scenario] and [model].
    `out` is the folder, by default a new one below runs/. Interrupted by Ctrl-C, it stops after the round in hand, or
    after writing the results in hand.
    """
    settings = resolve(config, seed, own=federation is not None)
    if (federation is None) != (model is None):
        raise ConfigError("run: federation and model go together; give both or none.")
    path = _folder_for(settings, config, out, resume)
    display = display or default_display()
    display.begin(settings.named, settings.rounds)
    try:
        with (
            World.of(settings, federation, model) as world,
            _interruption() as interrupted,
            _opened(path, world, resume) as folder,
        ):
            return Run(path, _play(world, folder, display, interrupted))
    finally:
        display.end()


def _play(world: World, folder: RunFolder, display: Display, interrupted: Callable[[], bool]) -> bool:
    """Play the rounds that are left and write what comes out; True if all is done, False if it was interrupted."""

    def warn(text: str) -> None:
        display.say(f"warning: {text}")
        folder.add_note(text)

    done = world.config.rounds
    if _finished(folder, done, warn):
        display.say(f"{folder.path}: finished already, nothing to do")
    else:
        progress = _rounds(world, folder, display, warn, interrupted)
        done = progress.round
        if not interrupted():
            _finish(world, folder, progress)
    if not interrupted() and not folder.report.exists():
        write_report(folder.report, [folder], title=f"{world.config.named} on {world.federation.name}")
    if stopped := interrupted():
        display.say(f"stopped after round {done}; go on with: coterie run {folder.path} --resume")
    return not stopped


def _finished(folder: RunFolder, rounds: int, warn: Callable[[str], None]) -> bool:
    """Whether the folder holds the results of so many rounds."""
    try:
        summary = folder.summary()
    except RunError:
        warn("summary.json was damaged and is written anew.")
        return False
    return summary is not None and summary["rounds_completed"] == rounds


def _rounds(
    world: World, folder: RunFolder, display: Display, warn: Callable[[str], None], interrupted: Callable[[], bool]
) -> Progress:
    """Play the rounds that are left, or as many as there is time for."""
    config = world.config
    progress = _latest(world, folder, warn)
    folder.write_config(world.description())  # what may change on resuming
    folder.keep_rounds(progress.round, warn)
    display.at(progress.round)
    played = rounds(
        world.method, world.fleet, world.setting, world.federation.keys, progress, seed=config.seed,
        last=config.rounds, evaluate_every=config.evaluate_every, participation=config.participation,
        malicious=world.federation.malicious, present=world.present,
    )  # fmt: skip
    stop = interrupted()
    while not stop and progress.round < config.rounds:
        progress = next(played)
        folder.append(progress.record)
        display.round(progress.record)
        stop = interrupted()
        if progress.round % config.checkpoint_every == 0 or progress.round == config.rounds or stop:
            checkpoint.save(folder.checkpoints, progress.round, _tensors(world, progress))
    return progress


def _tensors(world: World, progress: Progress) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    memory = {f"memory.{name}": value for name, value in world.fleet.memory().items()}
    state = {f"state.{name}": value for name, value in progress.state.items()}
    weights = {} if progress.weights is None else {"weights": progress.weights}
    return memory | state | {"links": progress.links} | weights


def _latest(world: World, folder: RunFolder, warn: Callable[[str], None]) -> Progress:
    """Where the run stands: its newest whole checkpoint, or its beginning."""
    found = checkpoint.latest(folder.checkpoints, warn)
    if found is None:
        if folder.checkpoints.exists() or folder.records(warn=lambda text: None):
            warn("there is no whole checkpoint: beginning again with round 1.")
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
    weights = found.tensors.get("weights")
    return Progress(found.round, parts["state"], found.tensors["links"], {}, weights=weights)


def _finish(world: World, folder: RunFolder, progress: Progress) -> None:
    """Write what a finished run leaves."""
    moment = Moment(world.config.seed, progress.round - 1)
    malicious = world.federation.malicious
    there = world.present(progress.round)
    per_client = progress.per_client or evaluate(world.method, world.fleet, progress.state, moment, malicious, there)
    found = _clusters(progress)
    truth = world.federation.clusters
    true = [None] * len(found) if truth is None else truth.tolist()
    folder.write_links(progress.links)
    folder.write_clients(
        [
            {"client": client, "cluster": true[client], "found": found[client], "accuracy": accuracy, "loss": loss,
             "examples": examples, "malicious": malicious is not None and bool(malicious[client])}
            for client, (accuracy, loss, examples) in enumerate(
                zip(per_client["accuracy"], per_client["loss"], world.federation.train.count.tolist(), strict=True)
            )
        ]
    )  # fmt: skip
    if world.config.save_models:
        models = collect_models(world.method, world.fleet, progress.state, moment, world.model.layout.size)
        layout = [(piece.name, tuple(piece.shape)) for piece in world.model.layout.pieces]
        folder.write_models(models, layout, range(len(models)))
    folder.report.unlink(missing_ok=True)  # of fewer rounds: whoever sees these results sees their report or none
    folder.write_summary(_summary(world, folder, progress, per_client, found))


def _clusters(progress: Progress) -> list[int]:
    """By average linkage of the weights between all clients that a method keeps in its state, as CoBo does. Else by
    who learned from whom: FedCBO's clients download few others in a round, and its links are of all rounds."""
    weights = progress.state.get("weights")
    return found_clusters(progress.links) if weights is None else clusters_by_weights(weights)


def _summary(
    world: World, folder: RunFolder, progress: Progress, per_client: Mapping[str, Tensor], found: list[int]
) -> dict[str, Any]:
    config, truth = world.config, world.federation.clusters
    records = folder.records(warn=lambda text: None)
    accuracy = spread(per_client["accuracy"]) if world.federation.num_classes else None
    perplexity = perplexities(per_client["loss"])
    of_text = spread(perplexity) if world.federation.is_text else None
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
        "perplexity": of_text and {**of_text, "per_client": perplexity},
        "selection_rate": records[-1].get("selection_rate") if records else None,
        "clusters": {
            "adjusted_rand": adjusted_rand(found, truth),
            "true": None if truth is None else truth.tolist(),
            "found": found,
        },
        "weights": _weights(progress, records),
        "improved": None,  # known where it is compared with clients that learn alone
        "refused": _refused(records),
        "attack": _attack(world, per_client, records),
        "seconds": sum(record.get("seconds", 0.0) for record in records),
        "fleet": world.fleet.name,
        "kernel": world.kernel.name,
        "precision": config.precision,
    }


def _weights(progress: Progress, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """By which weights clients mixed each other's models, in the last round in which they did."""
    if progress.weights is None:
        return None
    last: Mapping[str, Any] = next((found for line in reversed(records) if (found := line.get("weights"))), {})
    return {**{kind: last.get(kind) for kind in ("within", "between")}, "matrix": shown_weights(progress.weights)}


def _attack(
    world: World, per_client: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """What the attack achieved, all for honest clients: how their models do where it aims, after the last round, and
    how many of their downloads, with what weight, were malicious, mean over the rounds."""
    attack, malicious = world.config.attack, world.federation.malicious
    if attack is None or malicious is None:
        return None
    aimed = {name: per_client.get(name) for name in ("source_accuracy", "success_rate")}
    shares = {
        what: _mean_shares([record.get("attack", {}).get(what) for record in records])
        for what in ("selected", "weight")
    }
    return {
        "name": getattr(attack, "name", type(attack).__name__),
        "label": getattr(attack, "shown", ""),
        "malicious": malicious.nonzero()[:, 0],
        **{name: None if values is None else (spread(values) or {}).get("mean") for name, values in aimed.items()},
        **{f"{what}_malicious": share and share["own_malicious"] + share["other_malicious"]
           for what, share in shares.items()},
        **shares,
        "per_client": aimed,
    }  # fmt: skip


def _mean_shares(found: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    known = [shares for shares in found if shares]
    return {name: fmean(shares[name] for shares in known) for name in known[0]} if known else None


def _refused(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each client that was refused: in how many rounds, and why the last time."""
    refused: dict[str, dict[str, Any]] = {}
    for record in records:
        for client, why in record.get("refused", {}).items():
            refused[client] = {"count": refused.get(client, {"count": 0})["count"] + 1, "reason": why}
    return refused


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is noted, to be heeded when what is in hand is done; the second is as usual."""
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


def resolve(config: ConfigLike, seed: int | None, own: bool) -> Config:
    """The configuration of a file, a mapping, or the folder of a run."""
    if isinstance(config, str | Path):
        path = Path(config)
        config = _stored(path, own) if path.is_dir() else configuration.read(path)
    if not isinstance(config, Config):
        config = configuration.parse({key: value for key, value in config.items() if value is not None}, own_data=own)
    return config if seed is None else configuration.replaced(config, seed=seed)


def _stored(path: Path, own: bool) -> dict[str, Any]:
    """The configuration in the folder of a run; data and model given as objects are only named there."""
    tables = RunFolder(path).config
    scenario = tables["scenario"]
    if not own and isinstance(scenario, Mapping) and scenario.get("name") not in SCENARIOS:
        raise RunError(
            f"{path}: it was run from Python with data of its own. Resume it from there: "
            f"coterie.run({str(path)!r}, federation=..., model=..., resume=True)"
        )
    return {key: value for key, value in tables.items() if not own or key not in ("scenario", "model")}


def _folder_for(config: Config, source: ConfigLike, out: Path | str | None, resume: bool) -> Path:
    if out is not None:
        return Path(out)
    if isinstance(source, str | Path) and Path(source).is_dir():
        return Path(source)
    scenario = getattr(config.scenario, "name", "own-data")
    named = Path("runs") / slug(f"{config.named}-{scenario}-seed{config.seed}")
    return _newest(named) if resume else unused(named)


def _newest(path: Path) -> Path:
    """The last of the numbered paths that are there."""
    there = list(itertools.takewhile(Path.exists, numbered(path)))
    if not there:
        raise RunError(f"{path}: no such run to resume. Name it by --out, or leave out --resume to begin it.")
    return there[-1]
