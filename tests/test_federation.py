"""Federations of a user's own clients: splits, padding, renumbering, and what bad data gets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from coterie.errors import ConfigError, DataError
from coterie.federation import Examples, Federation, shuffled, split

Arrays = tuple[np.ndarray, np.ndarray]


def client(number: int, size: int = 10, classes: int = 3) -> Arrays:
    """Examples that can be told apart: x is 1000 * number + place."""
    x = (1000 * number + np.arange(size, dtype=np.float64))[:, None]
    return x, np.arange(size) % classes


def clients(*sizes: int) -> list[Arrays]:
    return [client(number, size) for number, size in enumerate(sizes)]


def values(x: Tensor) -> set[float]:
    return set(x.flatten().tolist())


def test_unequal_clients_are_padded_with_zeros_and_counted() -> None:
    federation = Federation.from_arrays([client(1, 2), client(2, 3)], client(3, 5))
    assert federation.train.count.tolist() == [2, 3]
    assert federation.train.x[:, :, 0].tolist() == [[1000, 1001, 0], [2000, 2001, 2002]]
    assert federation.train.y.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert (federation.train.x.dtype, federation.train.y.dtype) == (torch.float32, torch.int64)
    assert (federation.num_clients, federation.input_shape, federation.num_classes) == (2, (1,), 3)
    assert federation.validation is None


def test_clients_made_one_at_a_time_stack_like_those_in_a_list() -> None:
    pairs = [(torch.ones(2, 1), torch.zeros(2)), (torch.ones(3, 1), torch.zeros(3))]
    at_once, one_by_one = Examples.of(pairs), Examples.filled([2, 3], iter(pairs))
    assert torch.equal(at_once.x, one_by_one.x)
    assert at_once.x[0, :, 0].tolist() == [1, 1, 0]


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.45), st.floats(0, 0.45), st.integers(0, 2**40), st.integers(0, 99))
def test_a_split_uses_every_example_once_in_the_asked_shares(
    count: int, validation: float, test: float, seed: int, key: int
) -> None:
    parts = 1 + (validation > 0) + (test > 0)
    if count < parts:
        with pytest.raises(DataError, match=f"client {key}"):
            split(count, validation, test, seed, key)
        return
    pieces = split(count, validation, test, seed, key)
    assert sorted(torch.cat(pieces).tolist()) == list(range(count))
    for piece, share in zip(pieces[1:], (validation, test), strict=True):
        assert (len(piece) == 0) == (share == 0)
        assert abs(len(piece) - count * share) <= 1
    assert len(pieces[0]) >= 1


def test_a_share_is_kept_for_testing_and_one_for_validation() -> None:
    federation = Federation.from_arrays(clients(20, 10), validation_share=0.1, test_share=0.3)
    assert federation.validation is not None
    assert federation.train.count.tolist() == [12, 6]
    assert federation.validation.count.tolist() == [2, 1]
    assert [len(y) for _, y in federation.tests] == [6, 3]
    assert federation.test_of.tolist() == [0, 1]
    for number, whole in enumerate(clients(20, 10)):
        trained = values(federation.train.x[number, : federation.train.count[number]])
        judged = values(federation.validation.x[number, : federation.validation.count[number]])
        tested = values(federation.tests[number][0])
        assert trained | judged | tested == set(whole[0].flatten().tolist())
        assert len(trained) + len(judged) + len(tested) == len(whole[0])


def test_a_split_depends_on_the_seed_and_the_client_alone() -> None:
    def tested(seed: int, *sizes: int) -> set[float]:
        return values(Federation.from_arrays(clients(*sizes), seed=seed).tests[0][0])

    assert tested(1, 50, 10) == tested(1, 50, 30, 20)
    assert tested(1, 50, 10) != tested(2, 50, 10)
    assert split(50, 0.0, 0.5, 1, 0)[2].tolist() != split(50, 0.0, 0.5, 1, 1)[2].tolist()


def test_a_given_test_set_leaves_all_own_examples_for_training() -> None:
    shared = Federation.from_arrays(clients(4, 4), client(9, 6))
    own = Federation.from_arrays(clients(4, 4), [client(8, 5), client(9, 6)])
    assert shared.train.count.tolist() == own.train.count.tolist() == [4, 4]
    assert (len(shared.tests), shared.test_of.tolist()) == (1, [0, 0])
    assert ([len(y) for _, y in own.tests], own.test_of.tolist()) == ([5, 6], [0, 1])


def test_lists_and_tensors_are_taken_like_arrays() -> None:
    x, y = client(1, 4)
    kinds = [(x, y), (torch.from_numpy(x), torch.from_numpy(y)), (x.tolist(), y.tolist())]
    made = [Federation.from_arrays([pair], pair) for pair in kinds]
    for federation in made:
        assert torch.equal(federation.train.x, made[0].train.x)
        assert torch.equal(federation.tests[0][1], made[0].tests[0][1])
    assert not torch.equal(made[0].train.x, Federation.from_arrays([client(2, 4)], client(2, 4)).train.x)


def test_read_only_and_byte_swapped_arrays_are_taken() -> None:
    x, y = client(1, 4)
    x.flags.writeable = False
    federation = Federation.from_arrays([(x, y.astype(">i4"))], (x.astype(">f8"), y))
    assert federation.train.y.tolist() == [[0, 1, 2, 0]]
    assert torch.equal(federation.tests[0][0], federation.train.x[0])


def test_floating_targets_make_a_regression() -> None:
    x, y = client(0, 10)
    federation = Federation.from_arrays([(x, np.stack([y, 2.0 * y], 1))])
    assert federation.num_classes is None
    assert (federation.train.y.shape, federation.train.y.dtype) == ((1, 8, 2), torch.float32)


def test_datasets_are_taken_like_arrays() -> None:
    pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients(6, 8)]
    datasets: list[Dataset[tuple[Tensor, ...]]] = [TensorDataset(x, y) for x, y in pairs]
    for test_of_arrays, test_of_datasets in ((None, None), (pairs[0], datasets[0]), (pairs, datasets)):
        arrays = Federation.from_arrays(pairs, test_of_arrays, seed=3)
        made = Federation.from_datasets(datasets, test_of_datasets, seed=3)
        assert torch.equal(arrays.train.x, made.train.x)
        assert torch.equal(arrays.tests[-1][0], made.tests[-1][0])
        assert arrays.test_of.tolist() == made.test_of.tolist()


class Pictures(Dataset[tuple[object, int]]):
    """A dataset without a transform to tensors."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> tuple[object, int]:
        return object(), place


def test_a_dataset_of_other_things_than_numbers_is_refused() -> None:
    with pytest.raises(DataError, match=r"client 0: x is not an array of numbers"):
        Federation.from_datasets([Pictures()])


def test_renumbered_clients_keep_their_data_and_their_keys() -> None:
    federation = Federation.from_arrays(clients(5, 6, 7), validation_share=0.2, clusters=[0, 1, 1])
    moved = federation.renumbered(torch.tensor([2, 0, 1]))
    assert moved.keys.tolist() == [2, 0, 1]
    assert moved.train.count.tolist() == [federation.train.count[i].item() for i in (2, 0, 1)]
    assert moved.test_of.tolist() == [2, 0, 1]
    assert moved.clusters is not None
    assert moved.clusters.tolist() == [1, 0, 1]
    assert federation.validation is not None
    assert moved.validation is not None
    assert torch.equal(moved.validation.x[0], federation.validation.x[2])
    assert not torch.equal(moved.train.x, federation.train.x)
    back = moved.renumbered(torch.tensor([1, 2, 0]))
    assert torch.equal(back.train.x, federation.train.x)


def test_an_order_that_is_no_renumbering_is_refused() -> None:
    with pytest.raises(DataError, match=r"order: got .0, 0.; allowed: each of 0 to 1 once"):
        Federation.from_arrays(clients(5, 5)).renumbered(torch.tensor([0, 0]))


def test_shuffled_is_a_permutation_that_its_arguments_decide() -> None:
    order = shuffled(1000, 1, "here", 2)
    assert sorted(order.tolist()) == list(range(1000))
    assert torch.equal(order, shuffled(1000, 1, "here", 2))
    for other in (shuffled(1000, 2, "here", 2), shuffled(1000, 1, "there", 2), shuffled(1000, 1, "here", 3)):
        assert not torch.equal(order, other)


def broken(x: object = None, y: object = None) -> list[Arrays]:
    """Four clients of which number 3 is broken."""
    good = clients(10, 10, 10, 10)
    own = good[3]
    good[3] = (own[0] if x is None else x, own[1] if y is None else y)  # type: ignore[assignment]
    return good


NAN = np.where(np.arange(10)[:, None] < 2, np.nan, 1.0)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (broken(x=NAN), r"client 3: x has NaN at 2 of 10 examples; allowed: finite numbers"),
        (broken(x=np.full((10, 1), 1e300)), r"client 3: x has infinity at 10 of 10 examples"),
        (broken(x=np.ones((9, 1))), r"client 3: y: got 'shape \(10,\)'; allowed: one y for each of 9 examples"),
        (broken(x=np.ones((10, 2))), r"client 3: x: got 'shape \(2,\) per example'; allowed: \(1,\) as for client 0"),
        (broken(x=np.ones(10)), r"client 3: x: got 'shape \(10,\)'; allowed: \(examples, features, ...\)"),
        (broken(x=[["a"]] * 10), r"client 3: x is not an array of numbers"),
        (broken(x=[[1], [1, 2]] * 5), r"client 3: x is not an array of numbers"),
        (broken(x=torch.ones(10, 1, dtype=torch.complex64)), r"client 3: x: got 'torch.complex64'; allowed: real"),
        (broken(y=np.ones((10, 1), int)), r"client 3: y: got 'shape \(10, 1\)'; allowed: one label per example"),
        (broken(y=np.arange(10) - 1), r"client 3: y: got -1; allowed: labels 0 to 8"),
        (broken(y=np.ones(10)), r"client 3: y is floating \(regression\) but that of client 0 is whole numbers"),
        (broken(np.ones((0, 1)), np.ones(0, int)), r"client 3: got '0 examples'; allowed: at least one"),
        ([*clients(5, 5), (np.ones((5, 1)),)], r"client 2: got 'tuple'; allowed: a pair \(x, y\)"),
        ([], r"train: got 'no clients'; allowed: at least one"),
    ],
)
def test_bad_clients_are_named_with_what_is_wrong(train: list[Arrays], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(train, client(0))


def test_nan_in_a_test_or_validation_part_is_named_too() -> None:
    with pytest.raises(DataError, match=r"client 0 \(test\): x has NaN at 2 of 10"):
        Federation.from_arrays(clients(5, 5), (NAN, np.zeros(10, int)))
    good = Federation.from_arrays(clients(5), client(0), validation_share=0.5)
    assert good.validation is not None
    spoiled = replace(good.validation, x=good.validation.x * torch.nan)
    with pytest.raises(DataError, match=r"client 0 \(validation\): x has NaN"):
        replace(good, validation=spoiled)


def test_a_label_beyond_the_classes_is_refused() -> None:
    federation = Federation.from_arrays(clients(5), client(0))
    with pytest.raises(DataError, match=r"client 0: y: got 2; allowed: labels 0 to 1"):
        replace(federation, num_classes=2)
    assert replace(federation, num_classes=4).num_classes == 4


def test_a_client_too_small_to_split_is_named() -> None:
    with pytest.raises(DataError, match=r"client 1: got '2 examples'; allowed: at least 3"):
        Federation.from_arrays(clients(5, 2), validation_share=0.1)


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0.2), (1.0, 0.2), (0.1, 1.5), (0.5, 0.5), (float("nan"), 0.2)])
def test_shares_that_leave_nothing_are_refused(validation: float, test: float) -> None:
    with pytest.raises(ConfigError, match="less than 1"):
        Federation.from_arrays(clients(5), validation_share=validation, test_share=test)


def test_wrong_numbers_of_tests_and_clusters_are_refused() -> None:
    with pytest.raises(DataError, match="3 test sets for 2 clients"):
        Federation.from_arrays(clients(5, 5), clients(5, 5, 5))
    with pytest.raises(DataError, match="clusters: got '1 entries'; allowed: one for each of 2 clients"):
        Federation.from_arrays(clients(5, 5), clusters=[0])


def test_without_test_sets_a_share_must_be_kept_for_testing() -> None:
    with pytest.raises(ConfigError, match=r"test_share: got 0\.0; allowed: more than 0 and less than 1\. Or give"):
        Federation.from_arrays(clients(5, 5), test_share=0.0)
    assert Federation.from_arrays(clients(5, 5), client(0), test_share=0.0).num_clients == 2


@pytest.mark.parametrize("clusters", [list("ab"), [0.0, 1.0], [0, -1], [[0], [1]], 3])
def test_clusters_that_are_no_whole_numbers_are_refused(clusters: Any) -> None:
    with pytest.raises(DataError, match=r"^clusters: got .*; allowed: a whole number from 0 for each client"):
        Federation.from_arrays(clients(5, 5), clusters=clusters)


@pytest.mark.parametrize("clusters", [[4, 1], (4, 1), np.array([4, 1]), torch.tensor([4, 1])])
def test_clusters_are_any_whole_numbers(clusters: Any) -> None:
    federation = Federation.from_arrays(clients(5, 5), clusters=clusters)
    assert federation.clusters is not None
    assert federation.clusters.tolist() == [4, 1]


def test_two_clients_with_the_same_key_are_refused() -> None:
    federation = Federation.from_arrays(clients(5, 5))
    with pytest.raises(DataError, match="keys"):
        replace(federation, keys=torch.tensor([1, 1]))
