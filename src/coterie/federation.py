"""The data of a federation: what each client trains on, judges peers with and is tested on.

Shapes, here and everywhere: N clients of the federation, n examples of a client (padded to the largest client).
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from coterie.errors import ConfigError, DataError, explain
from coterie.randomness import bits, derive

Pair = tuple[Any, Any]  # (x, y): numpy arrays, tensors or lists


@dataclass(frozen=True)
class Examples:
    """Examples of several clients side by side; rows beyond a client's count are padding and never used."""

    x: Tensor  # [N, n, ...] float32, or [N, n, T] int64 tokens
    y: Tensor  # [N, n] int64 labels, [N, n, T] int64 next tokens, or [N, n, ...] float32 targets of a regression
    count: Tensor  # [N] int64, at least 1

    @staticmethod
    def of(clients: Sequence[tuple[Tensor, Tensor]]) -> "Examples":
        """Stack clients of unequal sizes, padding with zeros."""
        return Examples.filled([len(x) for x, _ in clients], clients)

    @staticmethod
    def filled(counts: Sequence[int], clients: Iterable[tuple[Tensor, Tensor]]) -> "Examples":
        """The same for clients made one at a time, so that nothing is held twice; `counts` are their sizes."""
        stacked: tuple[Tensor, Tensor] | None = None
        for row, pair in enumerate(clients):
            if stacked is None:
                x, y = (part.new_empty(len(counts), max(counts), *part.shape[1:]) for part in pair)
                stacked = x, y
            for whole, part in zip(stacked, pair, strict=True):
                whole[row, : counts[row]] = part
                whole[row, counts[row] :] = 0
        if stacked is None:
            raise DataError(explain("train", "no clients", "at least one"))
        return Examples(*stacked, torch.tensor(counts))

    def to(self, device: str) -> "Examples":
        """The same on a torch device."""
        return Examples(self.x.to(device), self.y.to(device), self.count.to(device))

    def rows(self, chosen: Tensor) -> "Examples":
        """The same for some of the clients."""
        return Examples(self.x[chosen], self.y[chosen], self.count[chosen])


@dataclass(frozen=True)
class Targeted:
    """Test examples of one distribution on which an attack wants a label of its own."""

    x: Tensor  # [n, ...], none where the distribution has no such examples
    y: Tensor  # [n] int64, what they are
    label: int  # what the attacker wants them to be called


@dataclass(frozen=True)
class Language:
    """What the texts of a federation have in common."""

    tokenizer: str  # the name or folder of a Hugging Face model whose tokens these are; empty: trained on these texts
    public: Tensor | None = None  # [n, T + 1] int64: text that everybody may see


@dataclass(frozen=True)
class Federation:
    """Everything a simulation needs to know about its clients. `keys` are their identities: every random draw of a
    client depends on its key and not on its place, so that renumbering the clients permutes the results."""

    name: str
    train: Examples
    validation: Examples | None  # kept for judging peers; without it peers are judged on the training examples
    tests: tuple[
        tuple[Tensor, Tensor], ...
    ]  # (x [n, ...], y [n, ...]): test sets, shared by clients of one distribution
    test_of: Tensor  # [N] int64: which of the tests is this client's
    clusters: Tensor | None  # [N] int64: true clusters, where the scenario knows them
    keys: Tensor  # [N] int64
    num_classes: int | None  # None for a regression; of text the size of the vocabulary
    source: str = ""  # which data set exactly, for reports
    malicious: Tensor | None = None  # [N] bool: who attacks; for who watches an experiment, no method sees it
    targeted: tuple[Targeted, ...] = ()  # one for each of the tests, where an attack has a target
    language: Language | None = None  # where the data is text, and it is known

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_clients(self) -> int:
        return len(self.keys)

    @property
    def is_text(self) -> bool:
        """Whether examples are sequences of tokens, each followed by the next."""
        return not self.train.x.is_floating_point()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[2:])

    @staticmethod
    def from_arrays(
        train: Sequence[Pair],
        test: Sequence[Pair] | Pair | None = None,
        *,
        validation_share: float = 0.0,
        test_share: float = 0.2,
        clusters: Sequence[int] | None = None,
        vocabulary: int | None = None,
        name: str = "own data",
        seed: int = 0,
    ) -> "Federation":
        """A federation of your own clients: `train` holds one (x, y) per client, as arrays, tensors or lists.

        `test` holds one (x, y) per client, or is one (x, y) for all. Without it `test_share` of each client's own
        examples is kept for testing. `validation_share` of them is kept for judging peers. Which ones depends on
        `seed` and the client alone; training, validation and test never overlap. Whole-number y means classification
        with labels from 0, floating y means regression. Pixels are taken as they are: scale them before. Whole-number x
        and y of one shape (examples, length) mean text: tokens and those that follow them, of a `vocabulary` of so
        many, by default one more than the largest.
        """
        clients = [_tensors(pair, f"client {i}") for i, pair in enumerate(train)]
        _check_agreement([(f"client {i}", pair) for i, pair in enumerate(clients)])
        if test is None and not test_share:
            raise ConfigError(explain("test_share", test_share, "more than 0 and less than 1", "Or give `test`."))
        own_test_share = test_share if test is None else 0.0
        if vocabulary is not None and clients[0][0].is_floating_point():
            raise ConfigError(explain("vocabulary", vocabulary, "nothing: these examples are no tokens", "Remove it."))
        parts = [split(len(x), validation_share, own_test_share, seed, key) for key, (x, _) in enumerate(clients)]
        fitted, judged, tested = (
            [_take(*pair) for pair in zip(clients, part, strict=True)] for part in zip(*parts, strict=True)
        )
        tests = tested if test is None else _given_tests(test, len(clients))
        _check_agreement([("client 0", clients[0]), *((f"test set {i}", pair) for i, pair in enumerate(tests))])
        everybody = torch.arange(len(clients))
        return Federation(
            name=name,
            train=Examples.of(fitted),
            validation=Examples.of(judged) if validation_share else None,
            tests=tuple(tests),
            test_of=everybody if len(tests) == len(clients) else torch.zeros_like(everybody),
            clusters=None if clusters is None else _cluster_numbers(clusters),
            keys=everybody,
            num_classes=vocabulary or _num_classes([*clients, *tests]),
            source=name,
        )

    @staticmethod
    def from_datasets(
        train: "Sequence[Dataset[Any]]", test: "Sequence[Dataset[Any]] | Dataset[Any] | None" = None, **options: Any
    ) -> "Federation":
        """The same for torch `Dataset`s whose items are (x, y); takes the options of `from_arrays`."""
        clients = [_collected(dataset, f"client {i}") for i, dataset in enumerate(train)]
        if test is None:
            return Federation.from_arrays(clients, **options)
        if isinstance(test, Dataset):
            return Federation.from_arrays(clients, _collected(test, "test set"), **options)
        tests = [_collected(dataset, f"test set {i}") for i, dataset in enumerate(test)]
        return Federation.from_arrays(clients, tests, **options)

    def to(self, device: str) -> "Federation":
        """The same on a torch device."""
        if device == str(self.keys.device):
            return self
        return replace(
            self,
            train=self.train.to(device),
            validation=None if self.validation is None else self.validation.to(device),
            tests=tuple((x.to(device), y.to(device)) for x, y in self.tests),
            test_of=self.test_of.to(device),
            clusters=None if self.clusters is None else self.clusters.to(device),
            keys=self.keys.to(device),
            malicious=None if self.malicious is None else self.malicious.to(device),
            targeted=tuple(replace(one, x=one.x.to(device), y=one.y.to(device)) for one in self.targeted),
        )

    def renumbered(self, order: Tensor) -> "Federation":
        """The clients in another order, each keeping its key: `order[i]` is the old place of the new client i."""
        if not torch.equal(order.sort().values, torch.arange(self.num_clients)):
            raise DataError(explain("order", order.tolist(), f"each of 0 to {self.num_clients - 1} once"))
        return self.only(order)

    def only(self, clients: Tensor) -> "Federation":
        """Some of the clients [n], in this order, each keeping its key."""
        return replace(
            self,
            train=self.train.rows(clients),
            validation=None if self.validation is None else self.validation.rows(clients),
            test_of=self.test_of[clients],
            clusters=None if self.clusters is None else self.clusters[clients],
            keys=self.keys[clients],
            malicious=None if self.malicious is None else self.malicious[clients],
        )


def shuffled(count: int, seed: int, purpose: str, *parts: int) -> Tensor:
    """[count] int64: the numbers 0 to count - 1 in an order that the arguments alone decide."""
    return torch.argsort(bits(torch.tensor(derive(seed, purpose, *parts)), count), stable=True)


def split(count: int, validation_share: float, test_share: float, seed: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """(training, validation, test) examples of the client with this key: disjoint, together all `count` of them.

    A share that is not zero gives at least one example, and one is always left for training.
    """
    for name, share in (("validation_share", validation_share), ("test_share", test_share)):
        if not 0.0 <= share < 1.0:
            raise ConfigError(explain(name, share, "0 or more and less than 1"))
    if validation_share + test_share >= 1.0:
        raise ConfigError(explain("validation_share + test_share", validation_share + test_share, "less than 1"))
    validation, test = (max(round(count * share), int(share > 0)) for share in (validation_share, test_share))
    wanted = 1 + int(validation_share > 0) + int(test_share > 0)
    if count < wanted:
        raise DataError(
            explain(f"client {key}", f"{count} examples", f"at least {wanted}, one for each part of the split")
        )
    test = min(test, count - wanted + 1)
    validation = min(validation, count - test - 1)
    pieces = torch.tensor_split(shuffled(count, seed, "split", key), (count - validation - test, count - test))
    training, validating, testing = (piece.sort().values for piece in pieces)
    return training, validating, testing


def _take(pair: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][rows]


def _cluster_numbers(clusters: Any) -> Tensor:
    """[N] int64"""
    try:
        numbers = [operator.index(cluster) for cluster in clusters]
    except TypeError:
        numbers = [-1]
    if min(numbers, default=0) < 0:
        raise DataError(explain("clusters", clusters, "a whole number from 0 for each client"))
    return torch.tensor(numbers)


def _num_classes(pairs: Sequence[tuple[Tensor, Tensor]]) -> int | None:
    """One more than the largest label or token, or None for a regression."""
    if pairs[0][1].is_floating_point():
        return None
    return 1 + max(0, *(int(part.max()) for pair in pairs for part in pair if not part.is_floating_point()))


def _numbers(value: Any, where: str) -> Tensor:
    """Any array of numbers as a tensor of its own."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    else:
        try:
            array = np.asarray(value)
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        except (TypeError, ValueError) as reason:
            raise DataError(f"{where} is not an array of numbers: {reason}.") from None
    if tensor.is_complex():
        raise DataError(explain(where, str(tensor.dtype), "real numbers"))
    return tensor


def _tensors(pair: Any, who: str) -> tuple[Tensor, Tensor]:
    """(x as float32, y as int64 labels or float32 targets), or both as int64 tokens."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(explain(who, type(pair).__name__, "a pair (x, y)"))
    x, y = _numbers(pair[0], f"{who}: x"), _numbers(pair[1], f"{who}: y")
    if x.dim() < 2:
        raise DataError(explain(f"{who}: x", f"shape {tuple(x.shape)}", "(examples, features, ...)"))
    if y.dim() < 1 or len(x) != len(y):
        raise DataError(explain(f"{who}: y", f"shape {tuple(y.shape)}", f"one y for each of {len(x)} examples"))
    if not len(x):
        raise DataError(explain(who, "0 examples", "at least one"))
    tokens = not x.is_floating_point() and not y.is_floating_point() and x.shape == y.shape and x.shape[1:].numel() > 1
    if not y.is_floating_point() and y.dim() > 1 and not tokens:
        raise DataError(explain(f"{who}: y", f"shape {tuple(y.shape)}", f"one label per example, ({len(x)},)"))
    kinds = torch.int64 if tokens else torch.float32, torch.float32 if y.is_floating_point() else torch.int64
    return x.to(kinds[0]), y.to(kinds[1])


def _is_pair(value: Any) -> bool:
    """Whether this is one (x, y) rather than a sequence of them."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    arrays = all(hasattr(part, "shape") for part in value)
    return arrays or (isinstance(value, tuple) and not isinstance(value[0], tuple))


def _given_tests(test: Any, num_clients: int) -> list[tuple[Tensor, Tensor]]:
    """The user's test sets: one per client, or one for all."""
    if _is_pair(test):
        return [_tensors(test, "test set")]
    if len(test) != num_clients:
        allowed = "one (x, y) for each client, or one (x, y) for all"
        raise DataError(explain("test", f"{len(test)} test sets for {num_clients} clients", allowed))
    return [_tensors(pair, f"test set {i}") for i, pair in enumerate(test)]


def _collected(dataset: "Dataset[Any]", who: str) -> tuple[Tensor, Tensor]:
    """All items of a dataset as (x, y)."""
    items = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    if not items:
        raise DataError(explain(who, "0 examples", "at least one"))
    if any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
        raise DataError(explain(who, f"items of type {type(items[0]).__name__}", "items (x, y)"))
    x, y = (
        [_numbers(value, f"{who}: {name}") for value in column]
        for name, column in zip("xy", zip(*items, strict=True), strict=True)
    )
    for name, column in (("x", x), ("y", y)):
        if len({value.shape for value in column}) > 1:
            raise DataError(f"{who}: the items' {name} differ in shape; allowed: the same shape for all.")
    return torch.stack(x), torch.stack(y)


def _check_agreement(named: "Sequence[tuple[str, tuple[Tensor, Tensor]]]") -> None:
    """Every pair looks like the first: the same shape of an example and the same kind of y."""
    if not named:
        raise DataError(explain("train", "no clients", "at least one"))
    first, reference = named[0]
    for who, pair in named[1:]:
        for name, mine, theirs in zip("xy", pair, reference, strict=True):
            if mine.shape[1:] != theirs.shape[1:]:
                allowed = f"{tuple(theirs.shape[1:])} as for {first}"
                raise DataError(explain(f"{who}: {name}", f"shape {tuple(mine.shape[1:])} per example", allowed))
        if pair[1].dtype != reference[1].dtype:
            raise DataError(
                f"{who}: y is {_kind(pair[1])} but that of {first} is {_kind(reference[1])}; allowed: one kind."
            )


def _kind(y: Tensor) -> str:
    return "floating (regression)" if y.is_floating_point() else "whole numbers (classification)"


def _check(federation: Federation) -> None:
    """Everything a federation must satisfy, named by client; called whenever one is made."""
    keys = federation.keys.tolist()
    for name, of_clients in (
        ("clusters", federation.clusters),
        ("test_of", federation.test_of),
        ("train", federation.train.count),
    ):
        if of_clients is not None and len(of_clients) != len(keys):
            raise DataError(explain(name, f"{len(of_clients)} entries", f"one for each of {len(keys)} clients"))
    if len(set(keys)) < len(keys):
        raise DataError(explain("keys", keys, "a different one for each client"))
    for part, examples in (("", federation.train), (" (validation)", federation.validation)):
        if examples is not None:
            for row, (key, count) in enumerate(zip(keys, examples.count.tolist(), strict=True)):
                pair = (examples.x[row, :count], examples.y[row, :count])
                _check_values(f"client {key}{part}", *pair, federation.num_classes)
    for place, (x, y) in enumerate(federation.tests):
        users = (federation.test_of == place).nonzero()
        who = f"client {keys[int(users[0])]} (test)" if len(users) else f"test set {place}"
        _check_values(who, x, y, federation.num_classes)


def _check_values(who: str, x: Tensor, y: Tensor, num_classes: int | None) -> None:
    """At least one example, all numbers finite, labels in range."""
    if not len(x):
        raise DataError(explain(who, "0 examples", "at least one"))
    for name, values in (("x", x), ("y", y)):
        bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
        if bad.any():
            kind = "NaN" if values.isnan().any() else "infinity"
            raise DataError(
                f"{who}: {name} has {kind} at {int(bad.sum())} of {len(values)} examples; allowed: finite numbers."
            )
    for name, values in (("y", y), ("x", x)):
        if num_classes and not values.is_floating_point() and (values.min() < 0 or values.max() >= num_classes):
            wrong = int(values.min() if values.min() < 0 else values.max())
            what = "labels" if y.dim() == 1 else "tokens"
            raise DataError(explain(f"{who}: {name}", wrong, f"{what} 0 to {num_classes - 1}"))
