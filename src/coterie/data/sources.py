"""The data sets that scenarios deal out, read from the files in which their authors publish them.

Images stay uint8 until a client's share is made of them; `as_floats` scales them to [0, 1].
"""

import gzip
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import pooch
import torch
from torch import Tensor

from coterie.errors import ConfigError, DataError, explain, nearest
from coterie.federation import shuffled

SourceName = Literal["digits", "mnist", "fashion-mnist", "emnist", "cifar10", "cifar100"]


@dataclass(frozen=True)
class Source:
    """A data set as loaded; `title` says which one exactly, for reports."""

    name: str
    title: str
    train_x: Tensor  # [n, c, h, w] uint8, or float32 in [0, 1]
    train_y: Tensor  # [n] int64
    test_x: Tensor
    test_y: Tensor
    num_classes: int


@dataclass(frozen=True)
class Edition:
    """One set of files a data set may come as."""

    title: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    first: tuple[int, int] | None = None  # how many training and test examples are taken, where the rest is unbalanced


@dataclass(frozen=True)
class SourceSpec:
    """Where a data set is looked for and how it is read."""

    description: str
    num_classes: int
    folders: tuple[str, ...] = ()  # below the data folder, in order of preference
    editions: tuple[Edition, ...] = ()  # likewise; none for data that comes with a library
    read: Callable[[Sequence[Path]], tuple[Tensor, Tensor]] | None = None


def as_floats(images: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1]."""
    return images.to(torch.float32).div_(255) if images.dtype == torch.uint8 else images


def data_folder() -> Path:
    """Where data files are: the environment variable COTERIE_DATA, else the user's cache folder."""
    wanted = os.environ.get("COTERIE_DATA")
    try:
        folder = Path(wanted or pooch.os_cache("coterie")).expanduser()
        folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, or the home of nobody
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(explain("COTERIE_DATA", wanted, f"the path of a folder ({reason})", "Change it.")) from None
    return folder


def load(name: str, folder: Path | None = None) -> Source:
    """The data set of this name, from `folder` (default: `data_folder()`)."""
    spec = known(name)
    if spec.read is None:
        return _digits()
    edition, where = _locate(name, spec, folder or data_folder())
    train_x, train_y = spec.read([where[file] for file in edition.train])
    test_x, test_y = spec.read([where[file] for file in edition.test])
    if edition.first is not None:
        train, test = edition.first
        train_x, train_y, test_x, test_y = train_x[:train], train_y[:train], test_x[:test], test_y[:test]
    _check(name, spec.num_classes, (train_x, train_y), (test_x, test_y))
    return Source(name, edition.title, train_x, train_y, test_x, test_y, spec.num_classes)


def available(name: str, folder: Path | None = None) -> str | None:
    """The title of what `load` would find, or None if files are missing."""
    spec = known(name)
    if spec.read is None:
        return _DIGITS_TITLE
    try:
        return _locate(name, spec, folder or data_folder())[0].title
    except DataError:
        return None


def known(name: str) -> SourceSpec:
    """The entry of SOURCES, or an error that suggests the nearest."""
    if name not in SOURCES:
        raise ConfigError(explain("scenario.data", name, ", ".join(SOURCES), nearest(name, SOURCES)))
    return SOURCES[name]


def _locate(name: str, spec: SourceSpec, root: Path) -> tuple[Edition, dict[str, Path]]:
    """The first edition of which one folder has all files, gzipped or not."""
    for edition in spec.editions:
        for folder in spec.folders:
            names = (*edition.train, *edition.test)
            files = {file: _plain_or_gzipped(root / folder / file) for file in names}
            found = {file: path for file, path in files.items() if path is not None}
            if len(found) == len(names):
                return edition, found
    raise DataError(_missing(name, spec, root))


def _plain_or_gzipped(path: Path) -> Path | None:
    return next((each for each in (path, path.with_name(path.name + ".gz")) if each.is_file()), None)


def _missing(name: str, spec: SourceSpec, root: Path) -> str:
    """Every file looked for, and what to do."""
    folders = " or ".join(str(root / folder) for folder in spec.folders)
    files = ", or ".join(", ".join((*edition.train, *edition.test)) for edition in spec.editions)
    return (
        f"{name}: its files are not there. Looked in {folders} for {files} (each also with .gz). "
        f"Run `coterie data fetch {name}`, or set COTERIE_DATA to the folder that holds them."
    )


def _check(name: str, num_classes: int, *parts: tuple[Tensor, Tensor]) -> None:
    """Images and labels agree with each other and with the data set."""
    for part, (x, y) in zip(("training", "test"), parts, strict=True):
        if len(x) != len(y) or not len(x):
            raise DataError(f"{name}: got {len(x)} {part} images and {len(y)} labels; allowed: as many of both.")
        if int(y.max()) >= num_classes:
            raise DataError(explain(f"{name}: {part} label", int(y.max()), f"0 to {num_classes - 1}"))
    (train_x, _), (test_x, _) = parts
    if train_x.shape[1:] != test_x.shape[1:]:
        shapes = f"shapes {tuple(train_x.shape[1:])} and {tuple(test_x.shape[1:])}"
        raise DataError(explain(f"{name}: training and test images", shapes, "the same shape"))


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as reason:
        raise DataError(f"{path}: cannot be read ({reason}). Delete it and fetch it again.") from None


def read_idx(path: Path, dimensions: int) -> Tensor:
    """A uint8 array in the idx format: 0, 0, 8 (unsigned bytes), the number of dimensions, each size, the bytes."""
    content = _content(path)
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)):
        allowed = f"idx files of unsigned bytes in {dimensions} dimensions, 00 00 08 {dimensions:02}"
        raise DataError(explain(str(path), content[:4].hex(" "), allowed, "Delete it and fetch it again."))
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + prod(shape):
        allowed = f"{start + prod(shape)} bytes for dimensions {shape}"
        raise DataError(explain(str(path), f"{len(content)} bytes", allowed, "Delete it and fetch it again."))
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _read_idx_pair(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    images, labels = paths
    return read_idx(images, 3)[:, None], read_idx(labels, 1).to(torch.int64)


def _read_emnist(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """EMNIST stores its images transposed."""
    x, y = _read_idx_pair(paths)
    return x.transpose(2, 3).contiguous(), y


def _read_cifar(label_bytes: int) -> Callable[[Sequence[Path]], tuple[Tensor, Tensor]]:
    """Records of some label bytes, the last of which counts, then 3,072 pixels: red, green, blue planes of 32 x 32."""
    length = label_bytes + 3072

    def records(path: Path) -> Tensor:
        content = _content(path)
        if not content or len(content) % length:
            allowed = f"a multiple of {length} bytes, one record an image"
            raise DataError(explain(str(path), f"{len(content)} bytes", allowed, "Delete it and fetch it again."))
        return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, length).copy())

    def read(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([records(path) for path in paths])
        return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].to(torch.int64)

    return read


_DIGITS_TITLE = "digits of scikit-learn (8 x 8 pixels)"


def _digits() -> Source:
    """1,797 digits; of each class a fifth, always the same, is the test set."""
    from sklearn.datasets import load_digits  # slow to import, and needed here alone

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.reshape(-1, 1, 8, 8) / 16).to(torch.float32)
    y = torch.from_numpy(labels).to(torch.int64)
    tested = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        members = (y == label).nonzero().flatten()
        tested[members[shuffled(len(members), 0, "digits test set", label)[: round(len(members) / 5)]]] = True
    return Source("digits", _DIGITS_TITLE, x[~tested], y[~tested], x[tested], y[tested], 10)


def _idx_edition(title: str, train: str, test: str, first: tuple[int, int] | None = None) -> Edition:
    """Images and labels of each part, in the naming of the idx files."""
    parts = [(f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in (train, test)]
    return Edition(title, parts[0], parts[1], first)


SOURCES: dict[str, SourceSpec] = {
    "digits": SourceSpec("Handwritten digits, 8 x 8, 1,797 images; comes with scikit-learn", 10),
    "mnist": SourceSpec(
        "Handwritten digits, 28 x 28, 60,000 + 10,000 images",
        10,
        ("MNIST/raw", "mnist"),
        (_idx_edition("MNIST", "train", "t10k"),),
        _read_idx_pair,
    ),
    "fashion-mnist": SourceSpec(
        "Articles of clothing, 28 x 28, 60,000 + 10,000 images, 10 classes",
        10,
        ("FashionMNIST/raw", "fashion-mnist"),
        (_idx_edition("Fashion-MNIST", "train", "t10k"),),
        _read_idx_pair,
    ),
    "emnist": SourceSpec(
        "Handwritten letters and digits, 28 x 28, 47 classes, 112,800 + 18,800 images (or a subset)",
        47,
        ("EMNIST/raw", "emnist"),
        (
            _idx_edition("EMNIST balanced", "emnist-balanced-train", "emnist-balanced-test"),
            _idx_edition(
                "EMNIST, balanced 47-class subset", "emnist-47class-train", "emnist-47class-test", (36_660, 6_110)
            ),
        ),
        _read_emnist,
    ),
    "cifar10": SourceSpec(
        "Colour photographs, 32 x 32, 10 classes, 50,000 + 10,000 images (or a subset)",
        10,
        ("cifar-10-batches-bin", "cifar10"),
        (
            Edition("CIFAR-10", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
            Edition("CIFAR-10, subset of the training images", ("train_subset.bin",), ("test_batch.bin",)),
        ),
        _read_cifar(label_bytes=1),
    ),
    "cifar100": SourceSpec(
        "Colour photographs, 32 x 32, 100 classes, 50,000 + 10,000 images",
        100,
        ("cifar-100-binary", "cifar100"),
        (Edition("CIFAR-100", ("train.bin",), ("test.bin",)),),
        _read_cifar(label_bytes=2),
    ),
}
