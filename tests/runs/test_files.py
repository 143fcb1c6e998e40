"""Files are there whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.errors import RunError
from coterie.runs import files


def refuse(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_content_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    files.write_atomically(path, "first, and longer")
    files.write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_full_disk_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    files.write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=r"No space left on device.*--resume"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_tensors_that_share_memory_or_are_not_contiguous_are_written(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    tensors = {"matrix": matrix, "transposed": matrix.T, "row": matrix[1], "alone": torch.arange(4)[::2]}
    path = files.write_tensors(tmp_path, "all.safetensors", tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")  # the example of the standard, FIPS 180
    assert files.checksum(path) == "ba7816bf8f01cfea"


def test_tensor_files_are_as_readable_as_others(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    path = files.write_tensors(tmp_path, "some.safetensors", {"a": torch.zeros(1)})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
