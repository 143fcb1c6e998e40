"""Tiny data files in the formats of the authors."""

import gzip
from pathlib import Path

import numpy as np

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def images(count: int, seed: int = 0, size: int = 4) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, (count, size, size), dtype=np.uint8)


def write_idx_set(folder: Path, names: tuple[str, ...] = IDX_NAMES, ending: str = "", classes: int = 10) -> None:
    """Twelve training and six test images."""
    train_x, train_y, test_x, test_y = names
    for name, array in (
        (train_x, images(12)),
        (train_y, np.arange(12) % classes),
        (test_x, images(6, 1)),
        (test_y, np.arange(6) % classes),
    ):
        write(folder / f"{name}{ending}", idx_bytes(array))


def cifar_records(count: int, label_bytes: int, first: int = 0) -> bytes:
    """Record i has labels 7 (coarse) and first + i (fine), all red pixels i, all green 100, all blue 200."""
    rows = np.empty((count, label_bytes + 3072), np.uint8)
    rows[:, 0] = 7
    rows[:, label_bytes - 1] = first + np.arange(count)
    rows[:, label_bytes:] = np.repeat(
        np.stack([np.arange(count), np.full(count, 100), np.full(count, 200)], 1), 1024, axis=1
    )
    return rows.tobytes()
