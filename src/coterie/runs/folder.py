"""The folder of one run: what was asked for, what happened in each round, and what came out.

    config.json           the resolved configuration          environment.json      versions, machine, commit
    metrics.jsonl         one line per round, append-only     notes.jsonl           what a reader should know
    clients.json          results of each client              summary.json          results of the run
    models.safetensors    the model of each client            links.safetensors     who learned from whom
    checkpoints/          to continue from                    report.html           all of it, to look at

`config.json` is written last when a folder is created: a folder without it holds no run.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from coterie.errors import ModelError, RunError
from coterie.runs.files import reason, write_atomically, write_tensors

Layout = Sequence[tuple[str, Sequence[int]]]  # names and shapes, in the order they lie in a row

_LOCK = ".lock"
_OF_A_CREATION = {_LOCK, "environment.json", "environment.json.tmp", "config.json.tmp"}  # may be left by a killed one
_NEEDED = {  # what the files must hold to be used
    "config.json": {"scenario"},
    "environment.json": {"data_fingerprint"},
    "clients.json": {"clients"},
    "summary.json": {
        "label", "scenario", "data", "rounds_completed", "accuracy", "loss", "selection_rate", "clusters", "refused",
        "attack", "seconds",
    },
}  # fmt: skip
_WRITE_ANEW = "Remove summary.json from its folder, then --resume writes all results anew."


class RunFolder:
    """A run on disk. `RunFolder(path)` reads one; `create` and `open` also lock it against other processes.

    Use the two as context managers, or call `close`: the lock ends there, and with the process however that ends.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: IO[bytes] | None = None
        if not self.holds_a_run(self.path):
            raise RunError(f"{self.path} holds no run (there is no config.json in it). Name the folder of a run.")

    @staticmethod
    def holds_a_run(path: Path | str) -> bool:
        """Whether a run was created there."""
        return (Path(path) / "config.json").is_file()

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], environment: Mapping[str, Any]) -> Self:
        """Begin a run in a folder that is new or empty; a folder with anything in it is refused and left as it is."""
        path = Path(path)
        _refuse_unless_empty(path)
        lock = _locked(path)
        try:
            _refuse_unless_empty(path)  # another process may have been faster
            _begin(path, config, environment)
        except BaseException:
            lock.close()
            raise
        folder = cls(path)
        folder._lock = lock
        return folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a run to continue it."""
        folder = cls(path)
        folder._lock = _locked(folder.path)
        try:
            folder._end_torn_lines()
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """The folder for `coterie.runs.checkpoint`."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """Where the report page goes."""
        return self.path / "report.html"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self._read("config.json")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace the resolved configuration, when a run is resumed with more rounds, say."""
        write_atomically(self.path / "config.json", _json(config, indent=2))

    @property
    def environment(self) -> dict[str, Any]:
        """The versions and the machine the run began with."""
        return self._read("environment.json")

    # What happens in the rounds

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the line of a round; it is on the disk when this returns. Call it before the round's checkpoint."""
        self._append("metrics.jsonl", _json(record) + "\n")

    def records(self, warn: Callable[[str], None]) -> list[dict[str, Any]]:
        """The lines of all rounds; `warn` is told of a line that is torn or damaged, which is left out."""
        return self._lines("metrics.jsonl", "round", int, warn)

    def keep_rounds(self, last: int, warn: Callable[[str], None]) -> None:
        """Drop the lines of later rounds, which will be run again, and damaged ones; `warn` is told what is lost."""
        kept = [record for record in self.records(warn=_say_nothing) if record["round"] <= last]
        lost = sorted({*range(1, last + 1)} - {record["round"] for record in kept})
        if lost:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            rounds = ", ".join(map(str, lost[:5])) + more
            warn(f"metrics.jsonl was damaged: what it held of these rounds is lost and in no sum or figure: {rounds}.")
        write_atomically(self.path / "metrics.jsonl", "".join(_json(record) + "\n" for record in kept))

    def add_note(self, text: str) -> None:
        """Keep something a reader of the results should know, such as a resumption; the report shows it."""
        self._append("notes.jsonl", _json({"note": text}) + "\n")

    def notes(self) -> list[str]:
        """All notes, oldest first."""
        return [line["note"] for line in self._lines("notes.jsonl", "note", str, _say_nothing)]

    # What comes out

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the results of the run."""
        write_atomically(self.path / "summary.json", _json(summary, indent=2))

    def summary(self) -> dict[str, Any] | None:
        """The results of the run, or None while it has not ended."""
        return self._read("summary.json") if (self.path / "summary.json").exists() else None

    def write_clients(self, clients: Sequence[Mapping[str, Any]]) -> None:
        """Write the results of each client."""
        write_atomically(self.path / "clients.json", _json({"clients": clients}, indent=2))

    def clients(self) -> list[dict[str, Any]] | None:
        """The results of each client, or None while the run has not ended."""
        return list(self._read("clients.json")["clients"]) if (self.path / "clients.json").exists() else None

    def write_links(self, links: Tensor) -> None:
        """Write how much each client learned from each other: [N, N], a row learns from a column."""
        self._write_tensors("links.safetensors", {"links": links.float()}, {})

    def links(self) -> Tensor | None:
        """How much each client learned from each other, or None if that was not written."""
        path = self.path / "links.safetensors"
        if not path.exists():
            return None
        with _tensors_of(path) as file:
            return torch.clone(file.get_tensor("links"))

    def write_models(self, models: Tensor, layout: Layout, clients: Sequence[int]) -> None:
        """Write the model of each client: a row of `models` [N, P] holds the tensors named in `layout` end to end."""
        names = [(name, list(shape)) for name, shape in layout]
        size = sum(math.prod(shape) for _, shape in names)
        if models.shape != (len(clients), size):
            raise ModelError(f"models: got shape {tuple(models.shape)}; allowed: {(len(clients), size)} by the layout.")
        tensors = {"models": models, "clients": torch.tensor(list(clients), dtype=torch.int64)}
        self._write_tensors("models.safetensors", tensors, {"layout": json.dumps(names)})

    def load_model(self, client: int, module: nn.Module) -> nn.Module:
        """Put a client's model into your module, which is changed in place and returned.

        Parameters and floating-point buffers are set; integer buffers (counters) stay as they are. Only this client's
        row is read. The module must have the names and shapes of the one that was trained; if not, ModelError says
        where they differ and the module is left as it was.
        """
        path = self.path / "models.safetensors"
        if not path.exists():
            raise RunError(f"{path} does not exist: models are written when a run ends. Finish it with --resume.")
        with _tensors_of(path) as file:
            layout = [(name, tuple(shape)) for name, shape in json.loads(file.metadata()["layout"])]
            slots = _slots(module)
            _refuse_mismatch(dict(layout), {name: tuple(slot.shape) for name, slot in slots.items()})
            row = file.get_slice("models")[_row_of(client, file.get_tensor("clients").tolist())]
        parts = row.flatten().split([math.prod(shape) for _, shape in layout])
        with torch.no_grad():
            for (name, shape), part in zip(layout, parts, strict=True):
                slots[name].copy_(part.view(shape))
        return module

    # Files

    def _text(self, name: str) -> str:
        """The content of a file, empty if it does not exist."""
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise RunError(f"{path} could not be read ({reason(error)}).") from error

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self._text(name))
            if not isinstance(content, dict) or not content.keys() >= _NEEDED[name]:
                raise ValueError(f"it is no table with {', '.join(sorted(_NEEDED[name]))}")
        except ValueError as error:
            lasting = name in ("config.json", "environment.json")
            what_to_do = "Put back a copy of it, or run it anew in another folder." if lasting else _WRITE_ANEW
            raise RunError(f"{self.path / name} is damaged ({error}). {what_to_do}") from error
        return content

    def _lines(self, name: str, key: str, kind: type, warn: Callable[[str], None]) -> list[dict[str, Any]]:
        """The lines of a file that are whole: tables with that key, whose value is of that kind."""
        records = []
        for number, line in enumerate(self._text(name).split("\n"), start=1):
            if not line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get(key), kind):
                records.append(record)
            else:
                warn(f"line {number} of {name} is torn or damaged and was left out.")
        return records

    def _append(self, name: str, text: str) -> None:
        path = self.path / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{path} could not be written ({reason(error)}). Mend that, then --resume.") from error

    def _end_torn_lines(self) -> None:
        """So that the next line does not continue one that a killed process did not finish."""
        for name in ("metrics.jsonl", "notes.jsonl"):
            if self._text(name)[-1:] not in ("", "\n"):
                self._append(name, "\n")

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        try:
            write_tensors(self.path, name, tensors, metadata)
        except OSError as error:
            raise RunError(
                f"{self.path / name} could not be written ({reason(error)}). Mend that, then --resume."
            ) from error


def environment() -> dict[str, Any]:
    """What a result may depend on besides the configuration; no names of hosts, users or folders."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("coterie", "torch", "numpy")},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "code": _code_version(),
    }


def _code_version() -> dict[str, Any] | None:
    """Commit of the checkout this code runs from and whether the code differs from it; None if it is no checkout."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed, perhaps inside somebody else's repository
    package = str(Path(__file__).parents[1])
    return {"commit": _git("rev-parse", "HEAD"), "dirty": _git("status", "--porcelain", "--", package) != ""}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@contextmanager
def _tensors_of(path: Path) -> Iterator[Any]:
    """The tensors of a file, read only when asked for."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} is damaged ({error}). {_WRITE_ANEW}") from error


def _refuse_unless_empty(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; a run needs a folder. Choose another --out.")
    present = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if "config.json" in present:
        raise RunError(f"{path} already holds a run. Continue it with --resume or choose another --out.")
    if present - _OF_A_CREATION:
        raise RunError(f"{path} already holds other files. Choose another --out.")


def _begin(path: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """A run that cannot begin leaves nothing, not even the folder."""
    try:
        write_atomically(path / "environment.json", _json(environment, indent=2))
        write_atomically(path / "config.json", _json(config, indent=2))
    except BaseException:
        with suppress(OSError):
            for name in (*_OF_A_CREATION, "config.json"):
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        raise


def _locked(path: Path) -> IO[bytes]:
    """Lock a folder until the returned file is closed or the process ends, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / _LOCK).open("ab")
    except OSError as error:
        raise RunError(f"{path} cannot hold a run ({reason(error)}). Choose another --out.") from error
    try:
        _take(file)
    except OSError as error:
        file.close()
        raise RunError(
            f"{path} could not be locked ({reason(error)}): another process is running in it. "
            "Wait for it or choose another --out."
        ) from error
    return file


if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """Only what JSON knows: tensors and arrays become lists, numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _slots(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and floating-point buffers, also those `state_dict` leaves out; a tied tensor once."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad} | buffers


def _refuse_mismatch(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    if saved == wanted:
        return
    differences = [
        f"{name}: saved {saved.get(name, 'nothing')}, your module {wanted.get(name, 'nothing')}"
        for name in dict.fromkeys([*saved, *wanted])
        if saved.get(name) != wanted.get(name)
    ]
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    raise ModelError(
        f"the saved model does not fit this module ({'; '.join(differences[:5])}{more}). "
        "Build the module with the model settings in the run's config.json."
    )


def _row_of(client: int, clients: list[int]) -> slice:
    """As a slice, for safetensors reads no more than that."""
    if client not in clients:
        raise RunError(
            f"client: got {client}; allowed: one of the {len(clients)} from {min(clients)} to {max(clients)}."
        )
    row = clients.index(client)
    return slice(row, row + 1)


def _say_nothing(message: str) -> None:
    """For a warning that has been given elsewhere."""
