"""Texts as examples: a tokenizer, sequences of tokens, and the scenario in which every client has a language."""

import gzip
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie import hub
from coterie.data.partition import deal
from coterie.data.scenarios import Scenario
from coterie.data.sources import data_folder
from coterie.errors import ConfigError, DataError, explain
from coterie.federation import Federation, Language

_LINES = 1000  # encoded at a time
Word = Annotated[str, Field(pattern=r"^[^/\\]+$")]  # part of a file's name


class Tokenizer(ABC):
    """Turns text into tokens, line by line; empty lines are left out."""

    size: int

    def __init__(self) -> None:
        self.tokens = lru_cache(maxsize=32)(self._tokens)  # the runs of a comparison read the same texts

    def _tokens(self, text: str, most: int | None = None) -> Tensor:
        """[n] int64: all tokens of a text, or the first so many."""
        lines = [line + "\n" for line in text.split("\n") if line]
        found: list[int] = []
        for begin in range(0, len(lines), _LINES):
            if most is None or len(found) < most:
                found += itertools.chain.from_iterable(self.encode(lines[begin : begin + _LINES]))
        return torch.tensor(found[:most], dtype=torch.int64)

    @abstractmethod
    def encode(self, lines: list[str]) -> list[list[int]]:
        """The tokens of each line, without any that mark its beginning or end."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> str:
        """Back to text."""


class ByteLevelBPE(Tokenizer):
    """Byte-level byte-pair encoding, trained on texts; the same texts give the same tokens.

    All clients must use one vocabulary, and it is trained where all their texts are: in a deployment that is more than
    clients may want to share, and one would train it on public text or take that of a public model.
    """

    def __init__(self, texts: Sequence[str], size: int) -> None:
        super().__init__()
        tokenizers = hub.extra("tokenizers")
        levels, trainers = hub.extra("tokenizers.pre_tokenizers"), hub.extra("tokenizers.trainers")
        bytes_first = levels.ByteLevel.alphabet()
        self._model = tokenizers.Tokenizer(hub.extra("tokenizers.models").BPE())
        self._model.pre_tokenizer = levels.ByteLevel(add_prefix_space=False)
        self._model.decoder = hub.extra("tokenizers.decoders").ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=bytes_first)
        self._model.train_from_iterator((line + "\n" for text in texts for line in text.split("\n") if line), trainer)
        self.size: int = self._model.get_vocab_size()

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch(lines)]

    def decode(self, tokens: Tensor) -> str:
        return str(self._model.decode(tokens.tolist()))


class Pretrained(Tokenizer):
    """The tokenizer of a Hugging Face model, by name or folder."""

    def __init__(self, name: str) -> None:
        super().__init__()
        load = hub.extra("transformers").AutoTokenizer.from_pretrained
        self._model = hub.loaded("scenario.tokenizer", name, load)
        self.size = len(self._model)

    def encode(self, lines: list[str]) -> list[list[int]]:
        with hub.quietly():  # which warns of lines longer than the model's context
            ids: list[list[int]] = self._model(lines, add_special_tokens=False)["input_ids"] if lines else []
        return ids

    def decode(self, tokens: Tensor) -> str:
        return str(self._model.decode(tokens.tolist()))


@lru_cache(maxsize=4)
def tokenizer_of(texts: tuple[str, ...], size: int, name: str = "") -> Tokenizer:
    """The tokenizer of that name, or else one of `size` tokens trained on the texts."""
    return Pretrained(name) if name else ByteLevelBPE(texts, size)


def sequences(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens [n] and those that follow them, in sequences [n // length, length]; what is left over is left out."""
    count = max(0, (len(tokens) - 1) // length)
    return tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)


def federation_of_texts(
    train: Sequence[str],
    test: Sequence[str] | str,
    *,
    length: int = 64,
    vocabulary: int = 2048,
    tokenizer: str = "",
    public: Sequence[str] = (),
    **options: Any,
) -> Federation:
    """A federation of your own texts: `train` holds the text of each client, `test` one for each, or one for all.

    Tokens come from the Hugging Face model named `tokenizer`, or from a vocabulary trained on the clients' texts, in
    sequences of this length. `public` texts are for pre-training a base model. Takes the options of
    `Federation.from_arrays` for validation, clusters, name and seed.
    """
    made = tokenizer_of(tuple(train), vocabulary, tokenizer)
    clients = [_enough(made.tokens(text), length, f"client {place}") for place, text in enumerate(train)]
    tests = [_enough(made.tokens(text), length, "test set") for text in ([test] if isinstance(test, str) else test)]
    shared = _public([made.tokens(text) for text in public], length)
    given = {"vocabulary": made.size, "name": "own texts", **options}
    federation = Federation.from_arrays(clients, tests[0] if isinstance(test, str) else tests, **given)
    return replace(federation, language=Language(tokenizer, shared))


def _enough(tokens: Tensor, length: int, who: str) -> tuple[Tensor, Tensor]:
    if len(tokens) <= length:
        do = "Give it a longer text or lower `length`."
        raise DataError(explain(who, f"a text of {len(tokens)} tokens", f"{length + 1} or more, for one sequence", do))
    return sequences(tokens, length)


def _public(texts: Sequence[Tensor], length: int) -> Tensor | None:
    """[n, length + 1]: all sequences of all texts."""
    pairs = [_enough(tokens, length, "public text") for tokens in texts]
    return torch.cat([torch.cat([x, y[:, -1:]], dim=1) for x, y in pairs]) if pairs else None


class Text(Scenario):
    """Every client has text of one language, or of one domain: a true cluster. The task is to tell the next token.

    Reads `LANGUAGE.KIND.txt`, gzipped or not, UTF-8, one paragraph a line. The clients of a language share its
    sequences at random, so that none is held twice, and are tested on one text.
    """

    name: Literal["text"] = "text"
    """Which scenario."""
    languages: list[Word] = Field(["ca", "es", "de", "nl"], min_length=1)
    """Names of the languages, or of any domains: how their files' names begin."""
    folder: str = ""
    """Where the files are; unset: in `text` below the data folder."""
    train: Word = "docs"
    """Kind of the texts that clients train on."""
    test: Word = "ntrex"
    """Kind of the texts that they are tested on."""
    public: Word | None = None
    """Kind of texts that everybody may see, to pre-train a base model on."""
    public_languages: list[Word] | None = Field(None, min_length=1)
    """Languages of those; unset: all. With some, the base model is a stranger to the others."""
    clients_per_language: int = Field(1, ge=1, le=10**6)
    """Number of clients of each language."""
    tokens_per_client: int = Field(100_000, ge=2, le=10**10)
    """Tokens each client holds, those kept for validation included, in whole sequences."""
    test_tokens: int = Field(20_000, ge=2, le=10**10)
    """Tokens of each test text, its first ones; all, if it has fewer."""
    public_tokens: int = Field(200_000, ge=2, le=10**10)
    """Tokens of the public text of each language, its first ones; all, if it has fewer."""
    length: int = Field(64, ge=2, le=10**6)
    """Tokens of a sequence, the most that a prediction is made from."""
    validation: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of each client's sequences kept for judging peers; with 0 peers are judged on the training sequences."""
    vocabulary: int = Field(2048, ge=256, le=10**6)
    """Tokens of the byte-level BPE vocabulary that is trained on the training texts of all languages."""
    tokenizer: str = ""
    """Name or folder of a Hugging Face model whose tokenizer is taken instead; it must be that of model.base."""

    def build(self, seed: int, attackers: Mapping[int, int] | None = None) -> Federation:
        """The federation of this scenario; the same for the same seed."""
        if attackers:
            raise ConfigError(explain("attack.malicious_examples", max(attackers.values()), "nothing with text"))
        self._check_lengths()
        texts = [self._read(language, self.train) for language in self.languages]
        made = tokenizer_of(tuple(texts), self.vocabulary, self.tokenizer)
        clients: list[tuple[Tensor, Tensor]] = []
        for place, text in enumerate(texts):
            clients += self._dealt(place, made.tokens(text), seed)
        tests = [self._test_of(language, made) for language in self.languages]
        federation = Federation.from_arrays(
            clients, [tests[place] for place in self.cluster_of()], validation_share=self.validation,
            clusters=self.cluster_of(), vocabulary=made.size, name=self.name, seed=seed,
        )  # fmt: skip
        return replace(
            federation,
            tests=tuple(tests),
            test_of=torch.tensor(self.cluster_of()),  # clients of a language share one
            language=Language(self.tokenizer, self._public(made)),
            source=f"{', '.join(self.languages)}: {self.train}, tested on {self.test}",
        )

    def cluster_of(self) -> list[int]:
        """The language of each client."""
        return [place for place in range(len(self.languages)) for _ in range(self.clients_per_language)]

    def _check_lengths(self) -> None:
        for name in ("tokens_per_client", "test_tokens", "public_tokens"):
            if getattr(self, name) <= self.length:
                allowed = f"{self.length + 1} or more, for one sequence of scenario.length"
                raise ConfigError(explain(f"scenario.{name}", getattr(self, name), allowed))

    def _dealt(self, place: int, tokens: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
        """The sequences of each client of a language."""
        x, y = sequences(tokens, self.length)
        each = self.tokens_per_client // self.length
        if each * self.clients_per_language > len(x):
            most = len(x) // self.clients_per_language * self.length
            have = f"{self.languages[place]}.{self.train} has {len(tokens)} tokens"
            allowed = f"at most {most} ({have} for {self.clients_per_language} clients)"
            do = "Lower it or scenario.clients_per_language, or bring more text."
            raise ConfigError(explain("scenario.tokens_per_client", self.tokens_per_client, allowed, do))
        sizes = [each] * self.clients_per_language
        return [(x[rows], y[rows]) for rows in deal(torch.arange(len(x)), sizes, seed, "text", place)]

    def _test_of(self, language: str, made: Tokenizer) -> tuple[Tensor, Tensor]:
        tokens = made.tokens(self._read(language, self.test), self.test_tokens)
        return _enough(tokens, self.length, f"{language}.{self.test}")

    def _public(self, made: Tokenizer) -> Tensor | None:
        if self.public is None:
            return None
        texts = [self._read(language, self.public) for language in self.public_languages or self.languages]
        return _public([made.tokens(text, self.public_tokens) for text in texts], self.length)

    def _read(self, language: str, kind: str) -> str:
        folder = Path(self.folder).expanduser() if self.folder else data_folder() / "text"
        path = folder / f"{language}.{kind}.txt"
        packed = path.with_name(f"{path.name}.gz")
        try:
            content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
            return content.decode()
        except FileNotFoundError:
            do = "Put it there, or set scenario.folder or COTERIE_DATA to the folder that holds it."
            raise DataError(f"text: {path} is not there, nor {packed.name}. {do}") from None
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"text: {path} cannot be read as UTF-8 text: {error}.") from None
