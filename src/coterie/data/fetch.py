"""Download data sets from their public places: several mirrors, resumed where they stopped, checked, put in place."""

import logging
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pooch
import requests
import urllib3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coterie.data.sources import data_folder, known
from coterie.errors import DataError

Step = Callable[[int, int | None], None]  # (bytes here, bytes in all if known)

_CHUNK = 1 << 16
_PATIENCE = (10.0, 60.0)  # seconds to connect, and without a byte


@dataclass(frozen=True)
class Remote:
    """A file as published: the same bytes at every mirror."""

    file: str
    md5: str
    mirrors: tuple[str, ...]  # addresses of the folders it is in


@dataclass(frozen=True)
class Download:
    """What makes up a data set: its files, or an archive and the members wanted from it."""

    folder: str  # below the data folder
    files: tuple[Remote, ...]
    members: tuple[str, ...] = ()  # paths in the one archive; each lands in the folder under its last part


def _idx_files(mirrors: tuple[str, ...], md5s: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(Remote(name, md5, mirrors) for name, md5 in zip(names, md5s, strict=True))


_TORONTO = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")

DOWNLOADS: dict[str, Download] = {
    "mnist": Download(
        "MNIST/raw",
        _idx_files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion-mnist": Download(
        "FashionMNIST/raw",
        _idx_files(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            ),
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "emnist": Download(
        "EMNIST/raw",
        (
            Remote(
                "gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/",
                ),
            ),
        ),
        tuple(
            f"gzip/emnist-balanced-{part}-{kind}-ubyte.gz"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
    ),
    "cifar10": Download(
        "cifar-10-batches-bin",
        (Remote("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", _TORONTO),),
        (
            *(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
            "cifar-10-batches-bin/test_batch.bin",
        ),
    ),
    "cifar100": Download(
        "cifar-100-binary",
        (Remote("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", _TORONTO),),
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    ),
}


def fetch(name: str, folder: Path | None = None, *, progress: bool | None = None) -> list[Path]:
    """Download the data set of this name into `folder` (default: `data_folder()`) and return its files.

    What is already there stays. An interrupted download goes on where it stopped. Every file is checked against its
    published md5 before it takes its name. `progress` shows a bar; by default if standard error is a terminal.
    """
    known(name)
    if name not in DOWNLOADS:  # comes with a library
        return []
    download = DOWNLOADS[name]
    target = (folder or data_folder()).expanduser() / download.folder
    members = [target / Path(member).name for member in download.members]
    if members and all(path.is_file() for path in members):
        return members
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _bar(sys.stderr.isatty() if progress is None else progress) as follow:
            files = [_fetch_file(remote, target, follow(remote.file)) for remote in download.files]
            return _unpack(files[0], download.members, target) if download.members else files
    except OSError as reason:
        raise DataError(
            f"{name}: cannot write in {target} ({reason}). Choose another folder with COTERIE_DATA."
        ) from None


def _fetch_file(remote: Remote, target: Path, step: Step) -> Path:
    """The file from the first mirror that gives it whole and right."""
    part = target / f"{remote.file}.part"
    # what is left of an earlier download may be spoiled: then the first mirror deserves a second try
    mirrors = (*remote.mirrors, remote.mirrors[0]) if part.exists() else remote.mirrors
    failures = []
    for mirror in mirrors:
        try:
            return _retrieve(mirror + remote.file, remote, part, step)
        except (ValueError, requests.RequestException, urllib3.exceptions.HTTPError) as reason:
            failures.append(f"{mirror}{remote.file}: {_in_short(reason)}")
    listed = "".join(f"\n  {failure}" for failure in failures)
    raise DataError(
        f"{remote.file}: no mirror gave it.{listed}\n"
        f"Check the connection and try again (what was received is kept), or put the file into {target} yourself."
    )


def _retrieve(url: str, remote: Remote, part: Path, step: Step) -> Path:
    """Let pooch decide whether the file is needed, check its md5 and put it in place."""

    def download(url: str, output_file: str, _: Any) -> None:
        _resume(url, part, step)
        os.replace(part, output_file)  # a wrong checksum then deletes it

    pooch.get_logger().setLevel(logging.WARNING)
    return Path(pooch.retrieve(url, f"md5:{remote.md5}", remote.file, part.parent, downloader=download))


def _resume(url: str, part: Path, step: Step) -> None:
    """Append to `part` what is missing of it."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with requests.get(url, headers=headers, stream=True, timeout=_PATIENCE) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # nothing beyond what is here; the checksum decides
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            have = 0  # the server sends it from the start
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise ValueError(f"asked for bytes from {have}, got {response.headers.get('Content-Range')}")
        length = response.headers.get("Content-Length")
        whole = have + int(length) if length else None
        with part.open("ab" if have else "wb") as file:
            for chunk in response.raw.stream(_CHUNK, decode_content=False):
                file.write(chunk)
                step(file.tell(), whole)
    if whole is not None and part.stat().st_size < whole:
        raise ValueError(f"stopped after {part.stat().st_size} of {whole} bytes")


def _in_short(reason: BaseException) -> str:
    """The root of a failure in one line: libraries wrap `Connection refused` in paragraphs."""
    while reason.__context__ is not None:
        reason = reason.__context__
    return str(reason).partition("\n")[0][:200] or type(reason).__name__


def _unpack(archive: Path, members: tuple[str, ...], target: Path) -> list[Path]:
    """Only the wanted members, each written whole to a name we chose; then the archive goes."""
    try:
        with _opened(archive) as read:
            written = [_put(read(member), target / Path(member).name) for member in members]
    except (KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError) as reason:
        raise DataError(f"{archive}: cannot be unpacked ({reason}). Delete it and fetch it again.") from None
    archive.unlink()
    return written


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function from a member's name to its content."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            yield packed.open
    else:
        with tarfile.open(archive) as tar:
            yield partial(_tar_member, tar)


def _tar_member(tar: tarfile.TarFile, member: str) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise KeyError(f"{member} is not a file")
    return content


def _put(content: IO[bytes], path: Path) -> Path:
    """Write under a temporary name, then rename."""
    new = path.with_name(f"{path.name}.new")
    with content, new.open("wb") as file:
        shutil.copyfileobj(content, file)
    os.replace(new, path)
    return path


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[str], Step]]:
    """A function that starts a line of the progress display and returns what moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:

        def follow(description: str) -> Step:
            line = bar.add_task(description, total=None)
            return lambda here, whole: bar.update(line, completed=here, total=whole)

        yield follow
