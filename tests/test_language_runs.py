"""Whole runs on text: perplexity, the same numbers again, and what a user reads when something is missing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import coterie as package
from coterie import hub
from language import write_texts
from program import coterie, results, toml

TINY: dict[str, Any] = {
    "rounds": 2,
    "scenario": {"name": "text", "languages": ["aa", "bb"], "tokens_per_client": 120, "test_tokens": 90, "length": 8,
                 "vocabulary": 270, "validation": 0.2, "public": "sentences"},
    "model": {"name": "lora", "layers": 1, "width": 8, "heads": 2, "rank": 2, "pretraining_steps": 2},
    "train": {"steps": 2, "batch_size": 4, "optimiser": "adamw", "lr": 0.01},
    "method": {"name": "fedavg"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTERIE_DATA", str(write_texts(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def changed(table: str, **keys: Any) -> dict[str, Any]:
    return {**TINY, table: {**TINY[table], **keys}}


def test_perplexity_is_the_mean_over_clients_of_exp_of_their_loss() -> None:
    run = package.run(TINY, out="one")
    losses = [client["loss"] for client in run.folder.clients() or []]
    perplexity = run.summary["perplexity"]
    assert perplexity["mean"] == pytest.approx(sum(map(math.exp, losses)) / 2, rel=1e-6)
    assert perplexity["per_client"] == pytest.approx([math.exp(loss) for loss in losses], rel=1e-6)
    assert 0 <= run.summary["accuracy"]["mean"] <= 1


def test_a_run_is_the_same_again_and_on_two_threads_and_resumed() -> None:
    first = package.run({**TINY, "threads": 1}, out="one")
    again = package.run({**TINY, "threads": 2}, out="two")
    package.run({**TINY, "rounds": 1, "threads": 1}, out="three")
    resumed = package.run({**TINY, "threads": 1}, out="three", resume=True)
    other = package.run({**TINY, "seed": 1}, out="four")
    assert results(first.path) == results(again.path) == results(resumed.path)
    assert results(first.path) != results(other.path)


def test_a_comparison_has_a_column_of_perplexity() -> None:
    Path("two.toml").write_text(toml(TINY))
    ended = coterie("compare", "two.toml", "--methods", "local,fedavg", "--seeds", "0", "--out", "both", "--quiet")
    assert ended.code == 0
    assert "perplexity" in ended.out
    rows = json.loads(Path("both/comparison.json").read_text())
    assert all(row["perplexity"] > 1 for row in rows)
    assert ">perplexity<" in Path("both/report.html").read_text()


@pytest.mark.parametrize(
    ("table", "keys", "message"),
    [
        ("scenario", {"tokens_per_client": 10**6}, "scenario.tokens_per_client: got 1000000; allowed: at most "),
        ("scenario", {"train": "novels"}, "text: "),
        ("scenario", {"tokenizer": "no/such-model"}, "scenario.tokenizer: got 'no/such-model'; allowed: the name of"),
        ("model", {"base": "gpt2"}, "scenario.tokenizer: got ''; allowed: \"gpt2\""),
    ],
)
def test_what_is_missing_is_one_sentence_and_no_traceback(
    table: str, keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.extra("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    Path("one.toml").write_text(toml(changed(table, **keys)))
    ended = coterie("run", "one.toml")
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_models_of_other_data_refuse_text() -> None:
    Path("one.toml").write_text(toml({**TINY, "model": {"name": "mlp", "hidden": [4]}}))
    ended = coterie("run", "one.toml")
    assert (ended.code, "it cannot take the data: examples have shape (8,)" in ended.err) == (2, True)
