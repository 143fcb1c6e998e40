"""The configuration of a run: one TOML file, every key validated, every mistake one clear sentence."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from coterie.data import SCENARIOS
from coterie.descent import Train
from coterie.errors import ConfigError, explain, nearest
from coterie.kernels import KernelName, Precision
from coterie.methods import METHODS
from coterie.models import MODELS
from coterie.options import Options
from coterie.robust.attacks import ATTACKS

TABLES: dict[str, tuple[Mapping[str, type[Options]], str]] = {  # what there is, and which stands where none is named
    "scenario": (SCENARIOS, "rotated"),
    "model": (MODELS, "mlp"),
    "method": (METHODS, "fedcbo"),
    "attack": (ATTACKS, "label-flip"),
}


Kind = TypeVar("Kind", bound=Options)
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Compare(Options):
    """What `coterie compare` runs side by side."""

    methods: list[Any] = Field(["local", "fedavg", "ifca", "oracle", "fedcbo"], min_length=1)
    """names, or tables with a name, keys of that method, a label to show, and other settings in a table `with`"""
    attacks: list[Any] = []
    """each method meets each of these: names, or tables with a name and keys of that attack; unset: that of [attack]"""
    seeds: list[Seed] = Field([0], min_length=1)
    """one run of each method for each seed"""

    @field_validator("methods")
    @classmethod
    def _refuse_unknown_methods(cls, methods: list[Any]) -> list[Any]:
        for place, method in enumerate(methods):
            table = _as_table(method)
            keys = (
                {key: table[key] for key in table if key not in ("label", "with")}
                if isinstance(table, Mapping)
                else table
            )
            parse_table(f"compare.methods.{place}", keys, METHODS, default="")
            _check_with(f"compare.methods.{place}.with", _others(table))
        return methods

    @field_validator("attacks")
    @classmethod
    def _refuse_unknown_attacks(cls, attacks: list[Any]) -> list[Any]:
        for place, attack in enumerate(attacks):
            parse_table(f"compare.attacks.{place}", _as_table(attack), ATTACKS, default="")
        return attacks

    @model_validator(mode="after")
    def _refuse_two_attacks(self) -> Self:
        for place, method in enumerate(self.methods):
            if self.attacks and "attack" in _others(method):
                where, got = f"compare.methods.{place}.with.attack", _others(method)["attack"]
                raise ConfigError(explain(where, got, "nothing where attacks are listed", "Remove it, or the list."))
        return self


class Stay(Options):
    """When some clients are there; whoever is in no such table always is."""

    clients: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """their numbers"""
    joins: int = Field(1, ge=1, le=10**9)
    """the first round they are there, counted from 1"""
    leaves: int | None = Field(None, ge=2, le=10**9)
    """the first round they are gone again; unset: they stay"""

    @model_validator(mode="after")
    def _refuse_leaving_first(self) -> Self:
        if self.leaves is not None and self.leaves <= self.joins:
            raise ConfigError(explain("presence.leaves", self.leaves, f"more than {self.joins}, when they join"))
        return self


class Config(Options):
    """Everything that determines a run. Names of tables choose among what `coterie methods` and the like list."""

    seed: Seed = 0
    """all randomness follows from it"""
    rounds: int = Field(12, ge=1, le=10**9)
    """communication rounds"""
    evaluate_every: int = Field(1, ge=1, le=10**9)
    """rounds between evaluations on test data; the last round is always evaluated"""
    checkpoint_every: int = Field(1, ge=1, le=10**9)
    """rounds between checkpoints; the last round always leaves one"""
    participation: float = Field(1.0, gt=0, le=1)
    """share of the clients that take part in a round"""
    presence: list[Stay] = []
    """clients that join late or leave: tables [[presence]] with clients, joins, leaves"""
    initial: Literal["common", "own"] = "common"
    """whether all clients start from one initial model or each from its own"""
    kernel: KernelName = "auto"
    """how many models are computed at once: auto, loop, vmap or batched"""
    precision: Precision = "float32"
    """arithmetic of evaluation, of peers as of tests: float32, or bf16 for speed where the processor has it"""
    device: str = "cpu"
    """torch device of the simulation"""
    threads: int | None = Field(None, ge=1, le=10_000)
    """blocks of clients computed at a time; default: the cores there are"""
    block: int | None = Field(None, ge=1, le=10**9)
    """clients of a block; default: what fits"""
    save_models: bool = True
    """whether every client's final model is kept in the run's folder"""
    scenario: SerializeAsAny[Options] | None = None
    """who holds what"""
    model: SerializeAsAny[Options] | None = None
    """what every client computes"""
    train: Train = Train()
    """how a client trains"""
    method: SerializeAsAny[Options]
    """how clients collaborate"""
    attack: SerializeAsAny[Options] | None = None
    """what malicious clients do; without this table nobody is malicious"""
    label: str = ""
    """what tables and figures call this run; default: the method's name"""
    compare: Compare | None = None
    """what `coterie compare` runs side by side"""

    @property
    def shown(self) -> str:
        """The name for tables and figures."""
        return self.label or str(getattr(self.method, "name", type(self.method).__name__))

    @property
    def named(self) -> str:
        """The same with its attack, if there is one."""
        return f"{self.shown}, {getattr(self.attack, 'shown', '')}" if self.attack is not None else self.shown


def _as_table(entry: Any) -> Any:
    """What a name in a list stands for."""
    return {"name": entry} if isinstance(entry, str) else entry


def _others(method: Any) -> Any:
    """The settings outside [method] that an entry of `compare.methods` brings."""
    return _as_table(method).get("with", {})


def _check_with(key: str, others: Any) -> None:
    if not isinstance(others, Mapping):
        raise ConfigError(explain(key, others, 'a table of settings, such as { initial = "own" }'))
    for table, do in (("method", "Write its keys beside the name."), ("compare", "Remove it.")):
        if table in others:
            raise ConfigError(explain(f"{key}.{table}", others[table], "nothing", do))


def parse(tables: Mapping[str, Any], *, own_data: bool = False) -> Config:
    """Validate a whole configuration; `own_data` leaves scenario and model to the caller."""
    values = dict(tables)
    for key, (known, default) in TABLES.items():
        if key == "attack" and values.get(key) is None:
            continue
        if own_data and key in ("scenario", "model"):
            if key in values:
                raise ConfigError(
                    explain(key, values[key], "nothing, since the data or model were given", "Remove it.")
                )
        elif not isinstance(values.get(key), Options):
            values[key] = parse_table(key, values.get(key, {}), known, default)
    if "train" in values:
        values["train"] = validated(Train, values["train"], "train.")
    if isinstance(values.get("compare"), Mapping):
        values["compare"] = validated(Compare, values["compare"], "compare.")
    return validated(Config, values, "")


def parse_table(key: str, table: Any, known: Mapping[str, type[Options]], default: str) -> Options:
    """A table whose `name` says which options it takes."""
    if not isinstance(table, Mapping):
        raise ConfigError(explain(key, table, f"a table such as [{key}] with a name", f"Names: {', '.join(known)}."))
    name = table.get("name", default)
    if not isinstance(name, str) or name not in known:
        raise ConfigError(explain(f"{key}.name", name, ", ".join(known), nearest(str(name), known)))
    return validated(known[name], {**table, "name": name}, f"{key}.")


def validated(kind: type[Kind], values: Any, prefix: str) -> Kind:
    """The options of these values, or a ConfigError that names the first key that is wrong."""
    try:
        return values if isinstance(values, kind) else kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(one, kind, prefix) for one in error.errors())) from None


def _sentence(error: ErrorDetails, kind: type[Options], prefix: str) -> str:
    where = (prefix + ".".join(str(part) for part in error["loc"])).rstrip(".")
    if error["type"] == "extra_forbidden":
        known = [name for name in kind.model_fields if name != "name"]
        hint = nearest(str(error["loc"][-1]), known)
        return f"{where}: unknown key. {hint + ' ' if hint else ''}Known keys here: {', '.join(known)}."
    field = kind.model_fields.get(str(error["loc"][0])) if error["loc"] else None
    meaning = f"Meaning: {field.description.rstrip('.')}." if field and field.description else ""
    return explain(where, error["input"], _allowed(error), meaning)


def _allowed(error: ErrorDetails) -> str:
    """pydantic's words, shortened, and in those of TOML."""
    if error["type"] in ("model_type", "dict_type"):
        return "a table"
    message = re.sub("^(Input|List|String) should (be|have) (a valid )?| after validation, not .*$", "", error["msg"])
    return message.replace("'", '"')


def merged(tables: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others put over them key by key; a table with another name replaces the whole."""
    result = dict(tables)
    for key, value in over.items():
        mine = result.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            kept = mine if value.get("name", mine.get("name")) == mine.get("name") else {}
            result[key] = {**kept, **value}
        else:
            result[key] = value
    return result


def replaced(config: Config, **changes: Any) -> Config:
    """The same configuration with some keys changed, validated again."""
    return validated(Config, dict(config) | changes, "")


def read(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file, with `key=value` settings such as method.alpha=20 put over them."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name a TOML file, such as one of experiments/.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and tables as deep
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    for setting in settings:
        put(tables, setting)
    return tables


def put(tables: dict[str, Any], setting: str) -> None:
    """Set one key, given as table.key=value with a TOML value; anything that is no TOML value is text."""
    key, equals, text = setting.partition("=")
    *path, last = (part.strip() for part in key.split("."))
    if not equals or not all((*path, last)):
        raise ConfigError(explain("--set", setting, "key=value, such as method.alpha=20"))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    table: Any = tables
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(explain("--set", setting, f"a key inside a table; {part} is not one"))
    if last == "name" and path and table.get("name", TABLES.get(".".join(path), ({}, value))[1]) != value:
        table.clear()  # the other one's keys mean nothing here
    table[last] = value
