"""Data files as their authors publish them, and what wrong ones get."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from data_files import cifar_records, idx_bytes, images, write, write_idx_set

from coterie.data.sources import SOURCES, SourceName, as_floats, available, data_folder, load
from coterie.errors import ConfigError, DataError


def emnist_names(edition: str) -> tuple[str, ...]:
    return tuple(
        f"emnist-{edition}-{part}-{kind}"
        for part in ("train", "test")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )


def test_the_table_and_the_type_of_names_agree() -> None:
    assert tuple(SOURCES) == get_args(SourceName)


def test_digits_are_split_by_class_and_always_alike() -> None:
    digits = load("digits")
    assert digits.train_x.shape == (1438, 1, 8, 8)
    assert digits.test_x.shape == (359, 1, 8, 8)
    assert (float(digits.train_x.min()), float(digits.train_x.max())) == (0.0, 1.0)
    whole = torch.bincount(torch.cat([digits.train_y, digits.test_y]))
    assert (torch.bincount(digits.test_y) - whole / 5).abs().max() <= 0.5
    assert torch.equal(load("digits").test_x, digits.test_x)
    sums = {tuple(image.flatten().tolist()) for image in digits.train_x}
    assert not any(tuple(image.flatten().tolist()) in sums for image in digits.test_x)


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_plain_or_gzipped_from_either_folder(tmp_path: Path, folder: str, ending: str) -> None:
    write_idx_set(tmp_path / folder, ending=ending)
    mnist = load("mnist", tmp_path)
    assert mnist.train_x.dtype == torch.uint8
    assert np.array_equal(mnist.train_x.numpy()[:, 0], images(12))
    assert mnist.test_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert (mnist.title, mnist.num_classes) == ("MNIST", 10)


def test_fashion_mnist_has_a_folder_of_its_own(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "FashionMNIST/raw")
    assert load("fashion-mnist", tmp_path).title == "Fashion-MNIST"
    assert available("mnist", tmp_path) is None


def test_emnist_is_made_upright_and_prefers_the_official_files(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "EMNIST/raw", emnist_names("47class"), classes=47)
    subset = load("emnist", tmp_path)
    assert subset.title == "EMNIST, balanced 47-class subset"
    assert np.array_equal(subset.train_x.numpy()[:, 0], images(12).transpose(0, 2, 1))
    assert not np.array_equal(subset.train_x.numpy()[:, 0], images(12))
    write_idx_set(tmp_path / "EMNIST/raw", emnist_names("balanced"), ".gz")
    assert load("emnist", tmp_path).title == available("emnist", tmp_path) == "EMNIST balanced"


def test_cifar10_batches_are_joined_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    for batch in range(5):
        write(folder / f"data_batch_{batch + 1}.bin", cifar_records(2, 1, first=2 * batch))
    write(folder / "test_batch.bin", cifar_records(3, 1))
    cifar = load("cifar10", tmp_path)
    assert cifar.title == "CIFAR-10"
    assert cifar.train_y.tolist() == list(range(10))
    assert cifar.train_x.shape == (10, 3, 32, 32)
    assert cifar.train_x[3, :, 5, 6].tolist() == [1, 100, 200]


def test_cifar10_without_all_batches_says_it_is_a_subset(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    write(folder / "data_batch_1.bin", cifar_records(2, 1))
    write(folder / "train_subset.bin", cifar_records(4, 1))
    write(folder / "test_batch.bin", cifar_records(3, 1))
    cifar = load("cifar10", tmp_path)
    assert "subset" in cifar.title
    assert len(cifar.train_y) == 4


def test_cifar100_uses_the_fine_labels(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary/train.bin", cifar_records(4, 2, first=90))
    write(tmp_path / "cifar-100-binary/test.bin", cifar_records(2, 2))
    cifar = load("cifar100", tmp_path)
    assert cifar.train_y.tolist() == [90, 91, 92, 93]
    assert cifar.train_x[2, :, 0, 0].tolist() == [2, 100, 200]


def test_pixels_become_floats_up_to_one_and_floats_stay() -> None:
    assert as_floats(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert as_floats(torch.tensor([0.5])).tolist() == [0.5]


def test_the_folder_is_the_variable_or_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("COTERIE_DATA")
    assert data_folder() != tmp_path
    assert "coterie" in str(data_folder())


def test_missing_files_are_named_with_the_folder_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    for part in (str(tmp_path / "MNIST/raw"), "t10k-labels-idx1-ubyte", "coterie data fetch mnist", "COTERIE_DATA"):
        assert part in message


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'got .fashon-mnist.*Did you mean "fashion-mnist"'):
        load("fashon-mnist")


def spoil(tmp_path: Path, name: str, content: bytes) -> Path:
    """A good MNIST folder in which one file holds this."""
    write_idx_set(tmp_path / "mnist")
    path = tmp_path / "mnist" / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x09\x03" + bytes(100), r"got '00 00 09 03'; allowed: idx files"),
        ("train-images-idx3-ubyte", b"", r"got ''; allowed: idx files"),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x03\x00", r"got '5 bytes'"),
        ("train-images-idx3-ubyte", idx_bytes(images(12))[:-1], r"got '207 bytes'; allowed: 208 bytes"),
        ("train-labels-idx1-ubyte", idx_bytes(np.arange(11) % 10), r"got 12 training images and 11 labels"),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.arange(6) + 5), r"mnist: test label: got 10; allowed: 0 to 9"),
        ("t10k-images-idx3-ubyte", idx_bytes(images(6, size=5)), r"allowed: the same shape"),
    ],
)
def test_malformed_idx_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    spoil(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        load("mnist", tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40])
def test_a_torn_gzip_is_named(tmp_path: Path, keep: int) -> None:
    write_idx_set(tmp_path / "mnist", ending=".gz")
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: |: got"):
        load("mnist", tmp_path)


def test_a_torn_cifar_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "cifar100/train.bin", cifar_records(4, 2)[:-1])
    write(tmp_path / "cifar100/test.bin", cifar_records(2, 2))
    with pytest.raises(DataError, match=r"train.bin: got '12295 bytes'; allowed: a multiple of 3074 bytes"):
        load("cifar100", tmp_path)
