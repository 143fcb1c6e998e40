"""What a configuration may say, and what is answered to one that may not."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.config import TABLES, Config, merged, parse, put, read, replaced, validated
from coterie.data import SCENARIOS
from coterie.descent import Train
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.models import MODELS

ROOT = Path(__file__).parents[1]
SHIPPED = [ROOT / "src" / "coterie" / "demo.toml", *sorted((ROOT / "experiments").rglob("*.toml"))]
CONTRACT = """
seed = 0
rounds = 12
evaluate_every = 1
[scenario]
name = "rotated"
data = "mnist"
clusters = 4
clients = 80
examples_per_client = 200
[model]
name = "mlp"
hidden = [200]
[train]
epochs = 10
batch_size = 128
lr = 0.1
momentum = 0.9
[method]
name = "fedcbo"
download = 16
alpha = 10.0
consensus_step = 0.98
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def refusal(tables: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(tables)
    return str(refused.value)


def changed(*settings: str) -> dict[str, Any]:
    tables: dict[str, Any] = {"method": {"name": "fedcbo", "download": 3}}
    for setting in settings:
        put(tables, setting)
    return tables


def test_the_documented_file_is_understood_key_by_key(tmp_path: Path) -> None:
    config = parse(read(written(tmp_path, CONTRACT)))
    dumped = config.model_dump()
    assert (config.seed, config.rounds, config.evaluate_every) == (0, 12, 1)
    assert dumped["scenario"]["clients"] == 80
    assert dumped["scenario"]["data"] == "mnist"
    assert dumped["model"] == {"name": "mlp", "hidden": [200]}
    assert (config.train.epochs, config.train.batch_size, config.train.momentum) == (10, 128, 0.9)
    assert (dumped["method"]["download"], dumped["method"]["consensus_step"]) == (16, 0.98)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert parse(read(path)).rounds > 1


def test_an_empty_file_is_fedcbo_on_rotated_digits() -> None:
    dumped = parse({}).model_dump()
    assert (dumped["method"]["name"], dumped["scenario"]["name"], dumped["scenario"]["data"], dumped["model"]["name"]) \
        == ("fedcbo", "rotated", "digits", "mlp")  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("rouds=3", "rounds"),
        ("sceanrio.name=iid", "scenario"),
        ("scenario.exampels_per_client=3", "examples_per_client"),
        ("model.hiden=[3]", "hidden"),
        ("train.epoch=2", "epochs"),
        ("method.alhpa=1", "alpha"),
        ("compare.metods=[]", "methods"),
        ('compare.methods=["local", {name = "ifca", clustres = 3}]', "clusters"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(setting: str, nearest: str) -> None:
    message = refusal(changed(setting))
    assert "unknown key" in message
    assert f'Did you mean "{nearest}"?' in message
    assert message.startswith(setting.partition("=")[0].split(".")[0])


def test_a_key_like_no_other_gets_the_list_alone() -> None:
    message = refusal(changed("train.zzz=2"))
    assert message.startswith("train.zzz: unknown key. Known keys here: epochs, steps, batch_size,")
    assert "Did you mean" not in message


@pytest.mark.parametrize(
    ("setting", "got", "allowed"),
    [
        ("rounds=0", "got 0", "greater than or equal to 1"),
        ("rounds=2.5", "got 2.5", "integer"),
        ("rounds=true", "got True", "integer"),
        ('rounds="3"', "got '3'", "integer"),
        ("seed=-1", "got -1", "greater than or equal to 0"),
        ("participation=0", "got 0", "greater than 0"),
        ("participation=1.5", "got 1.5", "less than or equal to 1"),
        ("precision=bf8", "got 'bf8'", '"float32" or "bf16"'),
        ("threads=0", "got 0", "greater than or equal to 1"),
        ("save_models=1", "got 1", "boolean"),
        ("label=3", "got 3", "string"),
        ("train=3", "got 3", "a table"),
        ("train.lr=nan", "got nan", "less than or equal to 1000000"),
        ("train.momentum=1", "got 1", "less than 1"),
        ("scenario=[1]", "got [1]", "a table such as [scenario]"),
        ("scenario.data=mnits", "got 'mnits'", '"fashion-mnist"'),
        ("scenario.name=rotate", "got 'rotate'", "permuted"),
        ("model.name=mpl", "got 'mpl'", "linear, mlp, cnn"),
        ("model.hidden=[]", "got []", "at least 1 item"),
        ("model.hidden=[-3]", "got -3", "greater than 0"),
        ("method.name=fedcb", "got 'fedcb'", 'Did you mean "fedcbo"?'),
        ('method.name=["fedcbo"]', "got ['fedcbo']", "fedavg"),
        ("method.download=0", "got 0", "greater than or equal to 1"),
        ("compare=3", "got 3", "a table"),
        ("compare.methods=[]", "got []", "at least 1 item"),
        ("compare.methods=[3]", "got 3", "a table"),
        ('compare.methods=["fedcb"]', "got 'fedcb'", 'Did you mean "fedcbo"?'),
        ('compare.seeds=["a"]', "got 'a'", "integer"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_got_and_what_is_allowed(setting: str, got: str, allowed: str) -> None:
    message = refusal(changed(setting))
    assert message.startswith(setting.partition("=")[0])
    assert got in message
    assert allowed in message
    assert "\n" not in message
    assert ".." not in message


def test_all_mistakes_of_a_table_are_told_at_once() -> None:
    message = refusal(changed("train.lr=0", "train.epochs=0"))
    assert [line.partition(":")[0] for line in message.split("\n")] == ["train.epochs", "train.lr"]


def test_own_data_leaves_no_room_for_a_scenario_or_a_model() -> None:
    assert parse({"rounds": 3}, own_data=True).scenario is None
    for key in ("scenario", "model"):
        with pytest.raises(ConfigError, match=f"^{key}: got .* Remove it"):
            parse({key: {}}, own_data=True)


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ({"name": "fedcbo", "noise": "isotropic"}, {"noise_level": 0.1}),
        ({"name": "fedcb2o", "quantile_slack": 0.1}, {"quantile": 0.5}),
    ],
)
def test_an_option_that_does_nothing_by_itself_is_refused(alone: dict[str, Any], together: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"method\.(noise_level|quantile_slack): got"):
        parse({"method": alone})
    assert parse({"method": alone | together})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.lr=3", 3),
        ("train.lr = 0.5", 0.5),
        ("train.lr=true", True),
        ('train.lr="quoted"', "quoted"),
        ("train.lr=plain text", "plain text"),
        ("train.lr=permuted", "permuted"),
        ("train.lr=a=b", "a=b"),
        ("train.lr=[1, 2]", [1, 2]),
        ('train.lr={name = "local"}', {"name": "local"}),
        ("train.lr=", ""),
    ],
)
def test_a_setting_is_a_toml_value_or_text(setting: str, value: Any) -> None:
    tables: dict[str, Any] = {"train": {"epochs": 1}}
    put(tables, setting)
    assert tables == {"train": {"epochs": 1, "lr": value}}


def test_a_setting_reaches_any_depth_and_the_last_one_counts() -> None:
    tables: dict[str, Any] = {}
    for setting in ("rounds=3", "a.b.c=1", "rounds=4"):
        put(tables, setting)
    assert tables == {"rounds": 4, "a": {"b": {"c": 1}}}


def test_another_name_drops_the_other_ones_keys_and_the_same_name_keeps_them() -> None:
    assert changed("method.name=local")["method"] == {"name": "local"}
    assert changed("method.name=fedcbo")["method"] == {"name": "fedcbo", "download": 3}
    unnamed: dict[str, Any] = {"method": {"download": 3}}
    put(unnamed, "method.name=fedcbo")  # which it was by default
    assert unnamed["method"] == {"name": "fedcbo", "download": 3}
    put(unnamed, "method.name=ifca")
    assert unnamed["method"] == {"name": "ifca"}


@pytest.mark.parametrize("setting", ["rounds", "=3", "", ".=3", "method.=3", "a..b=3", "rounds.x=3"])
def test_a_malformed_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set: got "):
        put({"rounds": 3}, setting)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 3\n")
    assert read(path) == {"rounds": 3}


def test_a_number_of_thousands_of_digits_is_no_number(tmp_path: Path) -> None:
    assert changed(f"rounds={'1' * 5000}")["rounds"] == "1" * 5000
    assert changed(f"rounds={'1' * 4000}")["rounds"] == int("1" * 4000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        read(written(tmp_path, f"rounds = {'1' * 5000}"))


def test_settings_are_put_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds = 3\nseed = 5\n")
    assert read(path, ["rounds=7"]) == {"rounds": 7, "seed": 5}


@pytest.mark.parametrize(
    ("content", "words"), [(b"rounds = = 3", "not valid TOML"), (b"\xff\xfe", "cannot be read"), (None, "no such file")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "some.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_written_down_is_read_back_the_same(method: str, scenario: str) -> None:
    config = parse({"seed": 3, "method": {"name": method}, "scenario": {"name": scenario}, "train": {"lr": 0.3}})
    tables = json.loads(config.model_dump_json())
    again = parse({key: value for key, value in tables.items() if value is not None})
    assert again == config
    assert again != replaced(config, seed=4)


def test_a_changed_key_is_validated_and_the_rest_stays() -> None:
    config = parse({"train": {"lr": 0.3}, "scenario": {"clients": 7}})
    assert replaced(config, seed=9) == config.model_copy(update={"seed": 9})
    with pytest.raises(ConfigError, match=r"^seed: got -1"):
        replaced(config, seed=-1)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse({}).rounds = 3


def test_every_option_says_what_it_means() -> None:
    for kind in (Config, *METHODS.values(), *SCENARIOS.values(), *MODELS.values()):
        silent = [key for key, field in kind.model_fields.items() if key != "name" and not field.description]
        assert not silent, f"{kind.__name__}: {silent}"


@pytest.mark.parametrize("number", [float("inf"), 1e308, 10**30, -(10**30)])
def test_no_option_takes_a_number_that_nothing_could_compute(number: float) -> None:
    tables: list[tuple[str, Any]] = [("", Config), ("train.", Train)]
    tables += [(f"{table}.", kind) for table, (kinds, _) in TABLES.items() for kind in kinds.values()]
    for prefix, kind in tables:
        for key, field in kind.model_fields.items():
            if field.annotation in (int, float, int | None, float | None):
                with pytest.raises(ConfigError, match=rf"^{prefix}{key}: got "):
                    validated(kind, {key: number}, prefix)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def somewhat_known(names: list[str], keys: list[str]) -> st.SearchStrategy[Any]:
    """A table that may be right, and may hold anything under known and unknown keys."""
    values = JUNK | st.integers(1, 5) | st.floats(0, 1)
    return st.builds(
        lambda name, rest: {**rest, "name": name},
        st.sampled_from(names) | JUNK,
        st.dictionaries(st.sampled_from(keys) | st.text(max_size=5), values, max_size=3),
    )


def keys_of(table: str) -> list[str]:
    return sorted({key for kind in TABLES[table][0].values() for key in kind.model_fields})


@given(
    st.dictionaries(st.sampled_from(sorted(Config.model_fields)) | st.text(max_size=5), JUNK, max_size=3),
    st.fixed_dictionaries(
        {}, optional={table: somewhat_known(list(TABLES[table][0]), keys_of(table)) for table in TABLES}
    ),
)
def test_whatever_is_written_the_answer_is_a_configuration_or_one_message(
    junk: dict[str, Any], tables: dict[str, Any]
) -> None:
    try:
        assert isinstance(parse(junk | tables), Config)
    except ConfigError as refused:
        assert ": " in str(refused)  # noqa: PT017 (either end is right)


@given(st.text(max_size=20))
def test_whatever_is_typed_after_set_is_a_key_or_one_message(setting: str) -> None:
    tables: dict[str, Any] = {"rounds": 3}
    try:
        put(tables, setting)
    except ConfigError as refused:
        assert str(refused).startswith("--set: got")  # noqa: PT017
        assert tables == {"rounds": 3}
    else:
        assert "=" in setting


def test_tables_put_over_others_change_their_keys_unless_the_name_is_another() -> None:
    base = {"rounds": 3, "train": {"lr": 0.1, "epochs": 2}, "model": {"name": "mlp", "hidden": [5]}}
    over = {"rounds": 4, "train": {"lr": 0.2}, "model": {"name": "cnn"}}
    assert merged(base, over) == {"rounds": 4, "train": {"lr": 0.2, "epochs": 2}, "model": {"name": "cnn"}}
    assert merged(base, {"model": {"hidden": [6]}})["model"] == {"name": "mlp", "hidden": [6]}
    assert base["rounds"] == 3
