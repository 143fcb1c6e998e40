"""Partitions: exact sizes, nothing twice, nothing lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.partition import (
    allot,
    deal,
    dirichlet,
    even_sizes,
    in_proportion,
    lognormal_weights,
    power_law_weights,
    skewed_sizes,
)

SEEDS = st.integers(0, 2**40)


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 50))
def test_even_sizes_add_up_and_differ_by_one_at_most(total: int, parts: int) -> None:
    sizes = even_sizes(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(0, 20), SEEDS)
def test_dealt_pieces_have_their_sizes_and_share_nothing(sizes: list[int], spare: int, seed: int) -> None:
    pool = torch.arange(sum(sizes) + spare) * 3 + 1
    pieces = deal(pool, sizes, seed, "test")
    assert [len(piece) for piece in pieces] == sizes
    together = torch.cat(pieces).tolist()
    assert len(set(together)) == len(together)
    assert set(together) <= set(pool.tolist())


def test_dealing_depends_on_the_seed_and_the_parts() -> None:
    def dealt(seed: int, part: int) -> list[int]:
        return deal(torch.arange(100), [50], seed, "test", part)[0].tolist()

    assert dealt(1, 2) == dealt(1, 2)
    assert dealt(1, 2) != dealt(2, 2)
    assert dealt(1, 2) != dealt(1, 3)


@pytest.mark.parametrize(
    ("weights", "seats", "room", "expected"),
    [
        ([0.5, 0.3, 0.2], 10, [10, 10, 10], [5, 3, 2]),
        ([0.5, 0.25, 0.25], 3, [9, 9, 9], [1, 1, 1]),
        ([0.8, 0.1, 0.1], 10, [4, 9, 9], [4, 3, 3]),  # the first is full: the rest is shared by the others
        ([1.0, 0.0, 0.0], 6, [4, 1, 9], [4, 0, 2]),  # only those of no weight have room: as their room is
        ([1.0, 2.0], 0, [5, 5], [0, 0]),
    ],
)
def test_seats_go_by_largest_remainder_within_the_room(
    weights: list[float], seats: int, room: list[int], expected: list[int]
) -> None:
    assert allot(np.array(weights), seats, np.array(room)).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=12), st.floats(0, 1))
def test_all_seats_are_given_and_no_room_is_overfilled(entries: list[tuple[float, int]], fill: float) -> None:
    weights, room = np.array([w for w, _ in entries]), np.array([r for _, r in entries])
    seats = int(fill * room.sum())
    given_out = allot(weights, seats, room)
    assert given_out.sum() == seats
    assert (given_out >= 0).all()
    assert (given_out <= room).all()


@settings(deadline=None)
@given(SEEDS, st.sampled_from([0.001, 0.1, 1.0, 100.0]), st.integers(1, 20))
def test_dirichlet_clients_share_nothing_and_have_their_sizes(seed: int, beta: float, clients: int) -> None:
    labels = torch.arange(200) % 5
    held = dirichlet(labels, 5, [200 // clients] * clients, beta, seed)
    together = torch.cat(held).tolist()
    assert [len(rows) for rows in held] == [200 // clients] * clients
    assert len(set(together)) == len(together)


def test_a_small_concentration_gives_one_class_and_a_large_one_all_alike() -> None:
    labels = torch.arange(10_000) % 10
    one = [torch.bincount(labels[rows], minlength=10) for rows in dirichlet(labels, 10, [100] * 20, 0.001, 0)]
    assert sum(int(counts.max()) >= 99 for counts in one) >= 18
    alike = [torch.bincount(labels[rows], minlength=10) for rows in dirichlet(labels, 10, [100] * 20, 1e5, 0)]
    assert all(int(counts.max()) <= 12 for counts in alike)
    assert not torch.equal(dirichlet(labels, 10, [100], 1.0, 0)[0], dirichlet(labels, 10, [100], 1.0, 1)[0])


def test_a_test_set_has_the_proportions_of_the_client_and_is_as_large_as_can_be() -> None:
    own = torch.tensor([0] * 6 + [1] * 3 + [3] * 1)
    labels = torch.tensor([0] * 30 + [1] * 30 + [2] * 30 + [3] * 30)
    rows = in_proportion(own, labels, most=1000, num_classes=4, seed=0, client=0)
    assert torch.bincount(labels[rows], minlength=4).tolist() == [30, 15, 0, 5]  # class 0 runs out first
    assert len(set(rows.tolist())) == 50
    fewer = in_proportion(own, labels, most=20, num_classes=4, seed=0, client=0)
    assert torch.bincount(labels[fewer], minlength=4).tolist() == [12, 6, 0, 2]
    assert not torch.equal(fewer, in_proportion(own, labels, most=20, num_classes=4, seed=0, client=1))


def test_a_class_without_test_examples_leaves_a_test_set_of_the_others() -> None:
    rows = in_proportion(torch.tensor([0, 1]), torch.tensor([1, 1, 1]), most=5, num_classes=2, seed=0, client=0)
    assert len(rows) == 1


@settings(deadline=None)
@given(
    SEEDS,
    st.floats(0, 3),
    st.integers(1, 50),
    st.integers(2, 40),
    st.sampled_from([lognormal_weights, power_law_weights]),
)
def test_skewed_sizes_add_up_within_their_bounds(
    seed: int, spread: float, clients: int, average: int, law: object
) -> None:
    weights = law(clients, spread, seed)  # type: ignore[operator]
    sizes = skewed_sizes(weights, clients * average, least=2, most=8 * average)
    assert sum(sizes) == clients * average
    assert min(sizes) >= 2
    assert max(sizes) <= 8 * average


def test_no_spread_gives_equal_sizes_and_more_gives_more() -> None:
    for law in (lognormal_weights, power_law_weights):
        spreads = [np.std(skewed_sizes(law(50, spread, 0), 5000, 2, 5000)) for spread in (0.0, 0.5, 1.5)]
        assert spreads[0] == 0
        assert spreads[0] < spreads[1] < spreads[2]
        assert not np.array_equal(law(50, 1.0, 0), law(50, 1.0, 1))


def test_power_law_weights_are_powers_of_the_rank() -> None:
    assert sorted(power_law_weights(4, 2.0, 0)) == pytest.approx([1 / 16, 1 / 9, 1 / 4, 1])
