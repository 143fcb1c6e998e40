import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import NOBODY
from coterie.descent import Train
from coterie.federation import Federation, Targeted
from coterie.methods import Local
from coterie.metrics import (
    adjusted_rand,
    best_selection_rate,
    exposure,
    found_clusters,
    links_from_groups,
    links_from_peers,
    selection_rate,
    spread,
)
from coterie.model import Model
from coterie.training import beginning, rounds
from tiny import fleet_of, setting_of


def test_links_of_downloads_by_hand():
    links = links_from_peers(torch.tensor([2, 0]), torch.tensor([[0, NOBODY], [1, 3]]), 4)
    assert links.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_links_of_groups_by_hand():
    links = links_from_groups(torch.tensor([1, 0, 1, NOBODY, NOBODY]))
    assert links.nonzero().tolist() == [[0, 2], [2, 0]]


def test_selection_rate_by_hand():
    clusters = torch.tensor([0, 0, 1, 1])
    links = torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    assert selection_rate(links, clusters) == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)  # client 2 learned from nobody
    assert selection_rate(links, torch.tensor([0, 1, 1, 0])) == pytest.approx((0 + 0 + 1 / 3) / 3)
    assert selection_rate(links, None) is None
    assert selection_rate(torch.zeros(4, 4), clusters) is None


def test_the_oracles_rate_for_clusters_larger_than_the_budget_is_the_papers():
    """1 - epsilon of the budget from the own cluster, and of the random rest the own cluster's share of the others."""
    clusters = torch.arange(1200) % 4
    for epsilon in (0.5, 0.3, 0.1, 0.0):
        own = 299 / 1199
        expected = (1 - epsilon) + epsilon * own
        assert best_selection_rate(epsilon, 200, torch.arange(1200), clusters) == pytest.approx(expected)


def test_the_oracles_rate_counts_only_the_cohort_and_clusters_that_run_out():
    clusters = torch.tensor([0, 0, 1, 1, 1, 1])
    everybody = torch.arange(6)
    assert best_selection_rate(0.0, 3, everybody, clusters) == pytest.approx((2 * 1 / 3 + 4 * 3 / 3) / 6)
    assert best_selection_rate(1.0, 2, everybody, clusters) == pytest.approx((2 * 1 / 5 + 4 * 3 / 5) / 6)
    assert best_selection_rate(0.0, 3, torch.tensor([0, 1]), clusters) == 1.0
    assert best_selection_rate(0.0, 3, everybody, None) is None
    assert best_selection_rate(0.0, 3, torch.tensor([2]), clusters) is None


def planted(sizes: list[int], order: torch.Tensor, across: float) -> tuple[torch.Tensor, torch.Tensor]:
    clusters = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[order]
    links = (clusters[:, None] == clusters).float()
    return (links + across).fill_diagonal_(0.0), clusters


@given(st.lists(st.integers(2, 7), min_size=1, max_size=5), st.randoms(use_true_random=False), st.booleans())
def test_planted_clusters_are_found_whatever_the_numbering(sizes, random, noisy):
    order = list(range(sum(sizes)))
    random.shuffle(order)
    links, clusters = planted(sizes, torch.tensor(order), across=0.01 if noisy else 0.0)
    found = found_clusters(links)
    assert adjusted_rand(found, clusters) == 1.0
    assert len(set(found)) == len(sizes)


def test_one_sided_links_are_enough_and_the_unlinked_are_alone():
    links = torch.zeros(6, 6)
    for learner, teacher in ((0, 1), (1, 2), (2, 0), (3, 4)):
        links[learner, teacher] = 1.0
    found = found_clusters(links)
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4]
    assert len({found[0], found[3], found[5]}) == 3


def test_without_any_link_everybody_is_alone():
    assert sorted(found_clusters(torch.zeros(3, 3))) == [0, 1, 2]


def test_agreement_of_clusters_ignores_their_names():
    truth = torch.tensor([0, 0, 1, 1])
    assert adjusted_rand([5, 5, 2, 2], truth) == 1.0
    assert adjusted_rand([0, 1, 0, 1], truth) == pytest.approx(-0.5)
    assert adjusted_rand([0, 0, 0, 0], truth) == 0.0
    assert adjusted_rand([0, 0, 0, 0], None) is None


def test_the_spread_leaves_out_those_not_measured():
    assert spread(torch.tensor([1.0, math.nan, 3.0])) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert spread(torch.tensor([math.nan, math.inf])) is None


# To whom honest clients are exposed: clients 0 to 2 are one cluster and 3 to 5 another, 2 and 5 malicious

BAD, HALVES = torch.tensor([False, False, True, False, False, True]), torch.tensor([0, 0, 0, 1, 1, 1])


def test_exposure_by_hand():
    """Client 0 gives shares 1/2, 1/4, 1/4 and client 4 gives 3/4, 1/4; the malicious client 2 does not count."""
    clients, peers = torch.tensor([0, 2, 4]), torch.tensor([[1, 2, 5], [5, 1, 0], [3, 0, NOBODY]])
    amount = torch.tensor([[2.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.3, 0.1, 0.0]])
    shares = {"own_honest": (1 / 2 + 3 / 4) / 2, "own_malicious": (1 / 4 + 0) / 2}
    shares |= {"other_honest": (0 + 1 / 4) / 2, "other_malicious": (1 / 4 + 0) / 2}
    assert exposure(clients, peers, amount, BAD, HALVES) == pytest.approx(shares)
    honest = exposure(clients, peers, amount, torch.zeros(6).bool(), HALVES)
    assert honest == pytest.approx({
        "own_honest": (3 / 4 + 0 + 3 / 4) / 3, "own_malicious": 0.0, "other_honest": (1 / 4 + 1 + 1 / 4) / 3,
        "other_malicious": 0.0,
    })  # fmt: skip


def test_without_clusters_all_are_of_ones_own():
    found = exposure(torch.tensor([0]), torch.tensor([[1, 5]]), torch.tensor([[3.0, 1.0]]), BAD, None)
    assert found == {"own_honest": 0.75, "own_malicious": 0.25, "other_honest": 0.0, "other_malicious": 0.0}


def test_who_gives_nobody_anything_does_not_count_and_if_all_do_there_is_no_exposure():
    peers, amount = torch.tensor([[1, NOBODY], [4, 5]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert exposure(torch.tensor([0, 3]), peers, amount, BAD, HALVES) == {
        "own_honest": 0.25, "own_malicious": 0.75, "other_honest": 0.0, "other_malicious": 0.0,
    }  # fmt: skip
    assert exposure(torch.tensor([0, 3]), peers, torch.zeros(2, 2), BAD, HALVES) is None
    assert exposure(torch.tensor([2, 5]), peers, amount, BAD, HALVES) is None


@given(st.lists(st.lists(st.floats(0.01, 9), min_size=5, max_size=5), min_size=1, max_size=6), st.floats(0.1, 10))
def test_the_shares_of_an_exposure_sum_to_one_whatever_the_amounts(amounts, scale):
    clients = torch.arange(len(amounts))
    peers = torch.tensor([[peer for peer in range(6) if peer != client] for client in clients.tolist()])
    amount = torch.tensor(amounts)
    found = exposure(clients, peers, amount, BAD, HALVES)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert exposure(clients, peers, scale * amount, BAD, HALVES) == pytest.approx(found, abs=1e-5)
    assert min(found.values()) > 0.0


def test_how_models_do_where_an_attack_aims_by_hand():
    """Four test images of class 1 that should be called 0. Client 0 calls them 1, 2, 1, 0 and client 1 calls them all
    1; the test set of client 2 has none, and client 3 is malicious."""
    aimed = Targeted(torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 1.0], [3.0, 1.0]]), torch.ones(4).long(), 0)
    nowhere = Targeted(torch.zeros(0, 2), torch.zeros(0).long(), 0)
    one, other = (torch.eye(2), torch.tensor([0, 1])), (torch.eye(2), torch.tensor([0, 2]))
    data = replace(
        Federation.from_arrays([one] * 4, [one, one, other, one]), tests=(one, other), targeted=(aimed, nowhere),
        test_of=torch.tensor([0, 0, 1, 0]), num_classes=3,
    )  # fmt: skip
    first, second = [1.0, 0.0, 0.0, 1.0, 0.72, 0.62], [1.0, 0.0, 0.0, 4.0, 0.0, 0.0]
    model, method = Model(torch.nn.Linear(2, 3, bias=False)), Local()
    standstill = Train(epochs=1, lr=1e-30)

    def recorded(malicious: list[bool]):
        with closing(fleet_of(method, data, model, options=standstill)) as fleet:
            fleet.restore({"theta": torch.tensor([first, second, first, first])})
            before = beginning(method, setting_of(data, model))
            (progress,) = rounds(
                method, fleet, setting_of(data, model), data.keys, before, seed=0, last=1,
                malicious=torch.tensor(malicious),
            )  # fmt: skip
        return progress.record["attack"], progress.per_client

    attack, per_client = recorded([False, False, False, True])
    assert per_client["source_accuracy"].tolist() == pytest.approx([0.5, 1.0, math.nan, math.nan], nan_ok=True)
    assert per_client["success_rate"].tolist() == pytest.approx([0.25, 0.0, math.nan, math.nan], nan_ok=True)
    assert (attack["source_accuracy"], attack["success_rate"]) == pytest.approx((0.75, 0.125))
    assert torch.isfinite(per_client["accuracy"]).tolist() == [True, True, True, False]
    assert attack["selected"] is attack["weight"] is None
    everybody, _ = recorded([False] * 4)
    assert (everybody["source_accuracy"], everybody["success_rate"]) == pytest.approx((2 / 3, 1 / 6))
