"""Files that are there whole or not at all, whenever the process or the machine stops."""

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from coterie.errors import RunError

WORKSPACE = ".writing"  # a subfolder for tensors in the making; all that a killed process leaves behind is in it


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file under a temporary name, flush it to the disk, and only then give it its name."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        commit(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        what_to_do = "Mend that and try again; a run that has begun goes on with --resume."
        raise RunError(f"{path} could not be written ({reason(error)}). {what_to_do}") from error


def write_tensors(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Write a safetensors file; `{checksum}` in the name becomes the first 16 hex digits of its sha256.

    The tensors are written from where they are. Only those that safetensors refuses are copied first: the ones that
    are not contiguous and the ones that share memory with another. Raises OSError if the disk does not take them.
    """
    workspace = folder / WORKSPACE
    shutil.rmtree(workspace, ignore_errors=True)  # left by a killed process
    try:
        workspace.mkdir(parents=True)
        temporary = workspace / "tensors"
        save_file(_separate(tensors), temporary, metadata)
        temporary.chmod(workspace.stat().st_mode & 0o666)  # safetensors hides its files from the group
        path = folder / name.format(checksum=checksum(temporary))
        commit(temporary, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return path


def checksum(path: Path) -> str:
    """The first 16 hex digits of a file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def commit(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, after its content and before the return have reached the disk."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def reason(error: OSError) -> str:
    """What the system says, without the number and the path."""
    return error.strerror or str(error)


def _sync_folder(folder: Path) -> None:
    """A rename is durable once the folder is; Windows has no such call and needs none."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, contiguous and no two of them in one storage."""
    storages: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        shared = place in storages
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
        storages.add(place)
    return separate
