"""Texts as examples: tokenizers, sequences, and clients that each have a language."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.data.text import ByteLevelBPE, Text, federation_of_texts, sequences
from coterie.errors import ConfigError, DataError
from coterie.federation import Federation
from language import text, write_texts

SMALL: dict[str, Any] = {
    "languages": ["aa", "bb"], "tokens_per_client": 100, "test_tokens": 80, "length": 8, "vocabulary": 280,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    return write_texts(tmp_path) / "text"


def build(seed: int = 0, **options: Any) -> Federation:
    return Text(**(SMALL | options)).build(seed)


def rows(x: Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in x.tolist()}


def test_what_is_encoded_is_decoded_again() -> None:
    made = ByteLevelBPE([text("aa")], 280)
    new = "así: ¿ñandú? 雪\n"
    assert made.decode(made.tokens(text("bb"))) == text("bb")
    assert made.decode(made.tokens(new)) == new
    assert made.decode(made.tokens("one\n\n\ntwo")) == "one\ntwo\n"


def test_the_same_texts_give_the_same_tokens() -> None:
    first, again, other = (ByteLevelBPE([words], 280) for words in (text("aa"), text("aa"), text("bb")))
    assert first.size == again.size == 280
    assert torch.equal(first.tokens(text("aa", seed=1)), again.tokens(text("aa", seed=1)))
    assert not torch.equal(first.tokens(text("aa", seed=1)), other.tokens(text("aa", seed=1)))


def test_a_text_has_fewer_tokens_in_a_vocabulary_trained_on_it() -> None:
    own, foreign = ByteLevelBPE([text("aa")], 280), ByteLevelBPE([text("bb")], 280)
    assert len(own.tokens(text("aa"))) < 0.8 * len(foreign.tokens(text("aa")))


def test_the_first_tokens_are_those_that_all_begin_with() -> None:
    made = ByteLevelBPE([text("aa")], 280)
    whole = made.tokens(text("aa", lines=2500))  # more lines than are encoded at a time
    assert torch.equal(made.tokens(text("aa", lines=2500), 33), whole[:33])
    assert len(whole) > 2500 * 8


def test_each_token_of_a_sequence_is_followed_by_the_next() -> None:
    x, y = sequences(torch.arange(10), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [len(sequences(torch.arange(n), 3)[0]) for n in (0, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


def test_clients_of_a_language_divide_its_text_and_share_a_test(folder: Path) -> None:
    federation = build(clients_per_language=2)
    assert federation.train.x.shape == (4, 12, 8)
    assert federation.clusters is not None
    assert federation.clusters.tolist() == [0, 0, 1, 1]
    assert not rows(federation.train.x[0]) & rows(federation.train.x[1])
    first, second, third = (federation.tests[int(federation.test_of[client])][0] for client in (0, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert (federation.num_classes, federation.name) == (280, "text")
    assert federation.source == "aa, bb: docs, tested on ntrex"


def test_the_seed_decides_who_holds_what(folder: Path) -> None:
    first, again, other = build(0), build(0), build(1)
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, other.train.x)
    assert torch.equal(first.tests[0][0], other.tests[0][0])


def test_a_share_is_kept_for_validation(folder: Path) -> None:
    whole, parted = build(), build(validation=0.25)
    assert parted.validation is not None
    assert (parted.train.count.tolist(), parted.validation.count.tolist()) == ([9, 9], [3, 3])
    assert rows(parted.train.x[0]) | rows(parted.validation.x[0]) == rows(whole.train.x[0])


def test_public_text_is_that_of_all_languages(folder: Path) -> None:
    language = build(public="sentences", public_tokens=50).language
    assert language is not None
    assert language.public is not None
    assert language.public.shape == (2 * (49 // 8), 9)
    assert torch.equal(language.public[0, 8:], language.public[1, :1])
    of_one = build(public="sentences", public_tokens=50, public_languages=["bb"]).language
    assert of_one is not None
    assert of_one.public is not None
    assert torch.equal(of_one.public, language.public[49 // 8 :])
    without = build().language
    assert without is not None
    assert without.public is None


def test_files_may_be_gzipped_and_anywhere(folder: Path, tmp_path: Path) -> None:
    plain = build()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in folder.iterdir():
        (moved / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert torch.equal(build(folder=str(moved)).train.x, plain.train.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokens_per_client": 10**7},
            r"scenario\.tokens_per_client: got 10000000; allowed: at most \d+ \(aa\.docs",
        ),
        ({"clients_per_language": 500}, r"for 500 clients\)\. Lower it or scenario\.clients_per_language"),
        ({"test_tokens": 8}, r"scenario\.test_tokens: got 8; allowed: 9 or more, for one sequence"),
    ],
)
def test_too_few_tokens_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)
    most = build(tokens_per_client=800)
    assert most.train.count.tolist() == [100, 100]


def test_a_test_or_public_text_without_a_sequence_is_named(folder: Path) -> None:
    (folder / "bb.short.txt").write_text("a")
    (folder / "aa.short.txt").write_text("a")
    with pytest.raises(DataError, match=r"aa\.short: got 'a text of 2 tokens'; allowed: 9 or more"):
        build(test="short")
    with pytest.raises(DataError, match=r"public text: got 'a text of 2 tokens'; allowed: 9 or more"):
        build(public="short")


def test_attackers_with_other_amounts_of_text_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"attack\.malicious_examples: got 5; allowed: nothing with text"):
        Text(**SMALL).build(0, {0: 5})


def test_files_that_are_missing_or_no_text_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"aa\.novels\.txt is not there, nor aa\.novels\.txt\.gz\. Put it there"):
        build(train="novels")
    (folder / "aa.docs.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"aa\.docs\.txt cannot be read as UTF-8 text"):
        build()
    (folder / "aa.docs.txt").unlink()
    (folder / "aa.docs.txt.gz").write_bytes(gzip.compress(text("aa").encode())[:50])
    with pytest.raises(DataError, match=r"aa\.docs\.txt cannot be read as UTF-8 text"):
        build()


def test_own_texts_become_a_federation() -> None:
    own = [text("aa"), text("bb", lines=30), text("bb", seed=5)]
    federation = federation_of_texts(own, text("aa", seed=9), length=8, vocabulary=270, clusters=[0, 1, 1])
    assert federation.num_clients == 3
    assert federation.num_classes == 270
    assert len(federation.tests) == 1
    made = ByteLevelBPE(own, 270)
    assert torch.equal(federation.train.x[0], sequences(made.tokens(own[0]), 8)[0])
    assert int(federation.train.count[1]) < int(federation.train.count[2])


def test_own_texts_that_are_too_short_are_named() -> None:
    with pytest.raises(DataError, match=r"client 1: got 'a text of 2 tokens'; allowed: 9 or more, for one sequence"):
        federation_of_texts([text("aa"), "a"], text("aa"), length=8, vocabulary=256)
    with pytest.raises(DataError, match="test set: got 'a text of 0 tokens'"):
        federation_of_texts([text("aa")], "", length=8, vocabulary=256)
