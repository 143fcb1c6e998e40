"""Downloads from a real server on this machine: whole, interrupted, corrupted, dead."""

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from data_files import cifar_records

from coterie.data.fetch import DOWNLOADS, Download, Remote, fetch
from coterie.data.sources import SOURCES, load
from coterie.errors import ConfigError, DataError

CONTENT = np.random.Generator(np.random.Philox(key=1)).bytes(300_000)


class Server:
    """Serves `files`; breaks off after `break_after` bytes once; remembers who asked for what and what was sent."""

    def __init__(self, *, ranges: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None
        self.asked: list[tuple[str, str | None]] = []  # (path, its Range header)
        self.sent = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.asked.append((self.path, wanted))
                content = server.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and ranges else 0
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if wanted and ranges else 200)
                if wanted and ranges:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                body = content[start:][: server.break_after]
                server.break_after = None
                server.sent += len(body)
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/"

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [Server(), Server()]
    yield both
    for server in both:
        server.stop()


def closed_address() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def offer(
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    *mirrors: str,
    name: str = "file.bin",
    members: tuple[str, ...] = (),
) -> None:
    """Let `mnist` be one file with this content at these mirrors."""
    remote = Remote(name, hashlib.md5(content).hexdigest(), mirrors)
    monkeypatch.setitem(DOWNLOADS, "mnist", Download("MNIST/raw", (remote,), members))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_whole_download_is_put_in_place_and_not_repeated(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers[0]
    server.files["/file.bin"] = CONTENT
    offer(monkeypatch, CONTENT, server.address)
    (path,) = fetch("mnist", tmp_path)
    assert path == tmp_path / "MNIST/raw/file.bin"
    assert path.read_bytes() == CONTENT
    assert names_in(path.parent) == {"file.bin"}
    fetch("mnist", tmp_path)
    assert server.asked == [("/file.bin", None)]
    path.write_bytes(b"spoiled")
    assert fetch("mnist", tmp_path)[0].read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_an_interrupted_download_goes_on_where_it_stopped(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers[0]
    server.files["/file.bin"] = CONTENT
    server.break_after = 100_000
    offer(monkeypatch, CONTENT, server.address)
    with pytest.raises(DataError, match="what was received is kept"):
        fetch("mnist", tmp_path)
    assert names_in(tmp_path / "MNIST/raw") == {"file.bin.part"}
    have = (tmp_path / "MNIST/raw/file.bin.part").stat().st_size
    assert 0 < have <= 100_000
    (path,) = fetch("mnist", tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [("/file.bin", None), ("/file.bin", f"bytes={have}-")]
    assert server.sent == 100_000 + len(CONTENT) - have


def test_the_second_mirror_goes_on_where_the_first_broke_off(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for server in servers:
        server.files["/file.bin"] = CONTENT
    servers[0].break_after = 100_000
    offer(monkeypatch, CONTENT, *(server.address for server in servers))
    assert fetch("mnist", tmp_path)[0].read_bytes() == CONTENT
    ((_, asked),) = servers[1].asked
    assert asked is not None
    assert servers[1].sent == len(CONTENT) - int(asked.removeprefix("bytes=").removesuffix("-"))


def test_a_server_that_ignores_ranges_sends_it_from_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(ranges=False)
    try:
        server.files["/file.bin"] = CONTENT
        offer(monkeypatch, CONTENT, server.address)
        (tmp_path / "MNIST/raw").mkdir(parents=True)
        (tmp_path / "MNIST/raw/file.bin.part").write_bytes(CONTENT[:1000])
        assert fetch("mnist", tmp_path)[0].read_bytes() == CONTENT
        assert server.sent == len(CONTENT)
    finally:
        server.stop()


@pytest.mark.parametrize("left", [CONTENT, b"something else" * 50_000], ids=["complete", "spoiled"])
def test_a_part_that_needs_nothing_more_is_taken_if_right_and_dropped_if_wrong(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: bytes
) -> None:
    server = servers[0]
    server.files["/file.bin"] = CONTENT
    offer(monkeypatch, CONTENT, server.address)
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    (tmp_path / "MNIST/raw/file.bin.part").write_bytes(left)
    assert fetch("mnist", tmp_path)[0].read_bytes() == CONTENT
    assert server.sent == (0 if left == CONTENT else len(CONTENT))


def test_a_corrupted_first_mirror_falls_to_the_second(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers[0].files["/file.bin"] = CONTENT[:-1] + b"?"
    servers[1].files["/file.bin"] = CONTENT
    offer(monkeypatch, CONTENT, *(server.address for server in servers))
    (path,) = fetch("mnist", tmp_path)
    assert path.read_bytes() == CONTENT
    assert servers[1].asked == [("/file.bin", None)]  # nothing of the corrupted one was kept
    assert names_in(path.parent) == {"file.bin"}


def test_when_all_mirrors_fail_one_error_names_each_with_its_reason(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers[1].files["/file.bin"] = b"corrupted"
    mirrors = (closed_address(), *(server.address for server in servers))
    offer(monkeypatch, CONTENT, *mirrors)
    with pytest.raises(DataError) as caught:
        fetch("mnist", tmp_path)
    first, *listed, last = str(caught.value).splitlines()
    assert first == "file.bin: no mirror gave it."
    assert [line.split(": ")[0].strip() for line in listed] == [f"{mirror}file.bin" for mirror in mirrors]
    for line, reason in zip(listed, ("Connection refused", "404", "hash"), strict=True):
        assert reason in line
    assert "try again" in last
    assert names_in(tmp_path / "MNIST/raw") == set()


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


@pytest.mark.parametrize(("pack", "name"), [(tar_of, "all.tar.gz"), (zip_of, "all.zip")])
def test_only_the_wanted_members_leave_an_archive(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pack: object, name: str
) -> None:
    archive = pack({"in/a.bin": b"one", "../evil.bin": b"two", "in/b.bin": b"three"})  # type: ignore[operator]
    servers[0].files[f"/{name}"] = archive
    offer(monkeypatch, archive, servers[0].address, name=name, members=("in/a.bin", "in/b.bin"))
    paths = fetch("mnist", tmp_path)
    assert [path.read_bytes() for path in paths] == [b"one", b"three"]
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")} == {
        Path("MNIST/raw/a.bin"),
        Path("MNIST/raw/b.bin"),
    }
    assert fetch("mnist", tmp_path) == paths
    assert len(servers[0].asked) == 1


def test_an_archive_without_a_wanted_member_is_refused(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = tar_of({"in/a.bin": b"one"})
    servers[0].files["/all.tar.gz"] = archive
    offer(monkeypatch, archive, servers[0].address, name="all.tar.gz", members=("in/missing.bin",))
    with pytest.raises(DataError, match=r"cannot be unpacked .*in/missing.bin"):
        fetch("mnist", tmp_path)


def test_what_was_fetched_can_be_loaded(servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = DOWNLOADS["cifar100"]
    archive = tar_of({member: cifar_records(3, 2) for member in wanted.members})
    servers[0].files["/cifar.tar.gz"] = archive
    remote = Remote("cifar.tar.gz", hashlib.md5(archive).hexdigest(), (servers[0].address,))
    monkeypatch.setitem(DOWNLOADS, "cifar100", Download(wanted.folder, (remote,), wanted.members))
    fetch("cifar100", tmp_path)
    assert load("cifar100", tmp_path).train_y.tolist() == [0, 1, 2]


def test_every_source_has_a_download_that_gives_the_files_it_reads() -> None:
    assert fetch("digits") == []
    assert set(DOWNLOADS) == set(SOURCES) - {"digits"}
    for name, download in DOWNLOADS.items():
        spec = SOURCES[name]
        assert download.folder == spec.folders[0]
        names = [Path(member).name for member in download.members] or [remote.file for remote in download.files]
        assert {each.removesuffix(".gz") for each in names} == {*spec.editions[0].train, *spec.editions[0].test}
        for remote in download.files:
            assert len(remote.md5) == 32
            assert len(remote.mirrors) >= 2
            assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in remote.mirrors)


def test_an_unknown_name_and_an_unwritable_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='Did you mean "mnist"'):
        fetch("mnits")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"mnist: cannot write in .*COTERIE_DATA"):
        fetch("mnist", tmp_path / "file")
