from dataclasses import replace
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.clients import Clients, Peers
from coterie.core import NOBODY
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.peers import LEAST, ByLikelihood, EpsilonGreedy
from coterie.randomness import Moment
from tiny import clients_of, federation, mlp, numbers

KERNEL = choose_kernel("loop", mlp())
MANY = federation([2] * 30)
GREEDY, CURIOUS, HALF = EpsilonGreedy(0.0, 0.0, 0.0), EpsilonGreedy(1.0, 0.0, 1.0), EpsilonGreedy(0.5, 0.0, 0.5)


def some(data: Federation = MANY, round: int = 0, seed: int = 0, ids: Tensor | None = None) -> Clients:
    return clients_of(data, KERNEL, moment=Moment(seed, round), ids=ids)


def everybody(data: Federation = MANY) -> Tensor:
    return torch.arange(data.num_clients)


def nothing_known(data: Federation = MANY) -> Tensor:
    return torch.zeros(data.num_clients, data.num_clients)


@given(
    st.integers(1, 12), st.floats(0, 1), st.integers(2, 30), st.integers(0, 5), st.booleans()
)  # fmt: skip
def test_nobody_names_itself_a_stranger_or_anybody_twice(budget, epsilon, cohort_size, round, known):
    cohort = torch.randperm(30, generator=torch.Generator().manual_seed(round))[:cohort_size].sort().values
    liking = numbers(30, 30, seed=round) if known else nothing_known()
    chosen = EpsilonGreedy(epsilon, 0.0, 0.0).choose(some(round=round, ids=cohort), liking[cohort], cohort, budget)
    for client, peers in zip(cohort.tolist(), chosen.tolist(), strict=True):
        named = [peer for peer in peers if peer != NOBODY]
        assert client not in named
        assert set(named) <= set(cohort.tolist())
        assert len(set(named)) == len(named) == min(budget, cohort_size - 1)
        assert peers[len(named) :] == [NOBODY] * (len(peers) - len(named))


@pytest.mark.parametrize(("epsilon", "at_random"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_the_budget_is_split_between_random_and_liked_peers(epsilon, at_random):
    liking = -torch.arange(30.0).expand(30, 30)  # everybody likes 0 best, then 1, ...
    chosen = EpsilonGreedy(epsilon, 0.0, 0.0).choose(some(), liking, everybody(), 8)
    for client, peers in enumerate(chosen.tolist()):
        random = peers[:at_random]
        left = [peer for peer in range(30) if peer != client and peer not in random]
        assert peers[at_random:] == left[: 8 - at_random]  # of those left, the best, best first
    if at_random:
        met = torch.zeros(30).scatter_add(0, chosen[:, :at_random].flatten(), torch.ones(30 * at_random))
        assert (met > 0).sum() > 20  # 60 draws or more of 30 meet less than 20 once in far more than a million runs


def test_exploration_falls_as_in_the_papers_remark_6():
    paper = EpsilonGreedy(0.5, 0.01, 0.1)
    assert [paper.exploration(round) for round in (0, 1, 39, 40, 41, 100)] == pytest.approx(
        [0.5, 0.49, 0.11, 0.1, 0.1, 0.1]
    )


def test_choices_repeat_themselves_and_change_with_round_seed_and_client():
    chosen = CURIOUS.choose(some(), nothing_known(), everybody(), 5)
    assert torch.equal(CURIOUS.choose(some(), nothing_known(), everybody(), 5), chosen)
    for other in (some(round=1), some(seed=1)):
        assert not torch.equal(CURIOUS.choose(other, nothing_known(), everybody(), 5), chosen)
    assert len({tuple(row) for row in chosen.tolist()}) == 30


def test_ties_of_liking_favour_nobody_and_are_reproducible():
    chosen = GREEDY.choose(some(), nothing_known(), everybody(), 5)
    assert torch.equal(GREEDY.choose(some(), nothing_known(), everybody(), 5), chosen)
    met = torch.bincount(chosen.flatten(), minlength=30)  # 150 choices, five on average
    assert met.max() < 18  # exceeded in less than one of a million: Chernoff, 30 peers
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 25


def test_renumbering_the_clients_renumbers_their_choices():
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))  # new place -> old place
    new_number = torch.argsort(order)
    liking = numbers(30, 30).round()  # with many ties
    chosen = HALF.choose(some(), liking, everybody(), 6)
    moved = MANY.renumbered(order)
    again = HALF.choose(some(moved), liking[order][:, order], everybody(), 6)
    assert torch.equal(again, new_number[chosen[order]])
    unmoved_keys = replace(moved, keys=torch.arange(30))
    assert not torch.equal(HALF.choose(some(unmoved_keys), liking[order][:, order], everybody(), 6), again)


def test_a_block_of_clients_chooses_as_it_would_among_all():
    liking = numbers(30, 30)
    chosen = HALF.choose(some(), liking, everybody(), 6)
    part = torch.tensor([3, 17, 29])
    assert torch.equal(HALF.choose(some(ids=part), liking[part], everybody(), 6), chosen[part])


def test_a_cohort_too_small_for_the_budget_leaves_nobody_at_the_end():
    cohort = torch.tensor([4, 9, 20])
    chosen = GREEDY.choose(some(ids=cohort), nothing_known()[cohort], cohort, 5)
    assert [sorted(row[:2]) for row in chosen.tolist()] == [[9, 20], [4, 20], [4, 9]]
    assert (chosen[:, 2:] == NOBODY).all()
    alone = GREEDY.choose(some(ids=cohort[:1]), nothing_known()[:1], cohort[:1], 2)
    assert (alone == NOBODY).all()


# What is learned of peers, by clients who fit y = theta x: a model of this loss on the one example x = 1, y = 0.


def met(own: list[float], of_peers: list[list[float]], asked: list[list[int]], there: list[list[bool]] | None = None):
    """(clients, theta, peers, losses): losses of the own models, and of the peers asked for."""
    data = Federation.from_arrays([(torch.ones(1, 1), torch.zeros(1, 1))] * len(own), (torch.ones(1, 1),) * 2)
    clients = clients_of(data, choose_kernel("loop", Model(torch.nn.Linear(1, 1, bias=False), "mse")))
    ids = torch.tensor(asked)
    delivered = (ids != NOBODY) & (torch.ones_like(ids).bool() if there is None else torch.tensor(there))
    peers = Peers(ids, delivered, ids.clamp(min=0), torch.zeros(9, 1), torch.zeros(9, 1), clients.kernel)
    losses = torch.tensor(of_peers).masked_fill(~delivered, torch.inf)
    return clients, torch.tensor(own).sqrt()[:, None], peers, losses


def test_a_peer_whose_model_does_better_than_ones_own_is_liked_more():
    liking = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    learned = GREEDY.learn(liking, *met([4.0], [[0.5, 4.5, 9.0]], [[3, 1, NOBODY]]))
    assert learned.tolist() == [[0.0, 0.5, 2.0, 6.5]]
    assert liking.tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_losses_that_are_not_finite_are_disliked_with_a_finite_number():
    learned = GREEDY.learn(torch.zeros(1, 4), *met([4.0], [[float("nan"), float("inf"), -float("inf")]], [[0, 1, 2]]))
    assert learned.tolist() == [[-1e6, -1e6, 1e6, 0.0]]


def test_a_peer_that_was_asked_and_is_silent_counts_as_bad_as_the_worst_that_answered():
    there = [[True, False, True], [False, False, False]]
    learned = GREEDY.learn(torch.zeros(2, 4), *met([4.0, 4.0], [[5.0, 0.0, 7.0]] * 2, [[0, 1, 2]] * 2, there))
    assert learned.tolist() == [[-1.0, -3.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


# ProbSampling: fedcb2o.txt, Algorithm 2

LIKELY = ByLikelihood(2.0, 0.5)


@given(st.integers(1, 12), st.integers(2, 30), st.integers(0, 5), st.booleans())
def test_by_likelihood_nobody_names_itself_a_stranger_or_anybody_twice(budget, cohort_size, round, known):
    cohort = torch.randperm(30, generator=torch.Generator().manual_seed(round))[:cohort_size].sort().values
    liking = numbers(30, 30, seed=round).abs() if known else nothing_known()
    chosen = LIKELY.choose(some(round=round, ids=cohort), liking[cohort], cohort, budget)
    assert chosen.shape == (cohort_size, budget)
    for client, peers in zip(cohort.tolist(), chosen.tolist(), strict=True):
        named = [peer for peer in peers if peer != NOBODY]
        assert client not in named
        assert set(named) <= set(cohort.tolist())
        assert len(set(named)) == len(named) == min(budget, cohort_size - 1)
        assert peers[len(named) :] == [NOBODY] * (len(peers) - len(named))


def test_whoever_was_never_met_is_asked_first_and_alone():
    liking = torch.ones(30, 30)
    liking[:, [3, 8, 20]] = 0.0
    chosen = LIKELY.choose(some(), liking, everybody(), 5)
    for client, peers in enumerate(chosen.tolist()):
        assert set(peers) == {3, 8, 20} - {client} | {NOBODY}
    few = LIKELY.choose(some(), liking, everybody(), 2)
    assert all(set(peers) <= {3, 8, 20} for peers in few.tolist())
    assert len({tuple(sorted(peers)) for peers in few.tolist()}) > 1
    assert not set(LIKELY.choose(some(), torch.ones(30, 30), everybody(), 5).flatten().tolist()) <= {3, 8, 20}


def test_peers_are_drawn_in_proportion_to_their_likelihood():
    """One draw of four peers by 1 : 2 : 3 : 4 for each of 3,000 rounds. A chi-squared of 3 degrees of freedom is above
    24.3 once in 50,000 times; drawn uniformly it would be some 600."""
    four = federation([2] * 5)
    liking = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]])
    first = torch.tensor([0])
    drawn = [
        int(LIKELY.choose(some(four, round=n, ids=first), liking, torch.arange(5), 1)) for n in range(3000)
    ]  # fmt: skip
    counts = torch.bincount(torch.tensor(drawn), minlength=5)[1:].double()
    expected = 3000 * torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3
    assert ((counts - 750) ** 2 / 750).sum() > 100


def test_without_replacement_all_are_drawn_when_the_budget_allows():
    chosen = LIKELY.choose(some(), torch.full((30, 30), LEAST), everybody(), 29)
    assert all(sorted(peers) == sorted(set(range(30)) - {client}) for client, peers in enumerate(chosen.tolist()))


def test_choices_by_likelihood_repeat_themselves_and_are_renumbered_with_the_clients():
    liking = numbers(30, 30).abs()
    chosen = LIKELY.choose(some(), liking, everybody(), 6)
    assert torch.equal(LIKELY.choose(some(), liking, everybody(), 6), chosen)
    assert not torch.equal(LIKELY.choose(some(round=1), liking, everybody(), 6), chosen)
    part = torch.tensor([3, 17, 29])
    assert torch.equal(LIKELY.choose(some(ids=part), liking[part], everybody(), 6), chosen[part])
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    again = LIKELY.choose(some(MANY.renumbered(order)), liking[order][:, order], everybody(), 6)
    assert torch.equal(again, torch.argsort(order)[chosen[order]])


def test_the_likelihood_is_the_papers_moving_average():
    """(3.12) with kappa = 2, zeta = 0.25: 0.75 * 0.4 + 0.25 exp(-2 * 0.5), and from nothing 0.25 exp(-2 * 1)."""
    liking = torch.tensor([[0.4, 0.3, 0.0, 0.2]])
    learned = ByLikelihood(2.0, 0.25).learn(liking, *met([1.0], [[0.5, 1.0, 3.0]], [[0, 2, NOBODY]]))
    assert learned[0].tolist() == pytest.approx([0.3 + 0.25 * exp(-1), 0.3, 0.25 * exp(-2), 0.2])


def test_who_is_silent_or_useless_counts_as_met_and_is_not_asked_first_again():
    losses = [[float("nan"), float("inf"), 1e6, 0.5]]
    learned = LIKELY.learn(torch.zeros(1, 5), *met([1.0], losses, [[0, 1, 2, 3]], [[True, True, True, False]]))
    assert (learned[0, :4] > 0).all()
    assert (learned[0, :4] < 1e-29).all()
    assert learned[0, 4] == 0.0


@pytest.mark.parametrize("memory", [0.5, 0.999, 1.0])
def test_whoever_was_met_and_becomes_useless_is_still_known(memory):
    """0.7 + 1 (1e-30 - 0.7) is 0 in float32, and would be asked first for ever."""
    likely = ByLikelihood(2.0, memory)
    liking = torch.tensor([[0.7, 0.0, LEAST, 0.4]])
    for _ in range(3):
        liking = likely.learn(liking, *met([1.0], [[1e6, 1e6, 1e6, 0.0]], [[0, NOBODY, 2, NOBODY]]))
    assert (liking[0, [0, 2]] > 0).all()
    assert liking[0].tolist() == pytest.approx([0.7 * (1 - memory) ** 3, 0.0, 0.0, 0.4])
    assert liking[0, 1] == 0.0  # never met
    assert likely.choose(some(federation([2] * 4), ids=torch.tensor([3])), liking, torch.arange(4), 3).tolist() == [
        [1, NOBODY, NOBODY]
    ]


def test_with_zeta_one_only_the_newest_meeting_counts():
    learned = ByLikelihood(3.0, 1.0).learn(torch.tensor([[0.9, 0.1]]), *met([1.0], [[0.5, 0.25]], [[1, 0]]))
    assert learned[0].tolist() == pytest.approx([exp(-0.75), exp(-1.5)])


def test_a_peer_first_met_in_the_place_where_nobody_stands_keeps_what_is_its_own():
    """NOBODY stands at place 0 of the table in `learn`; client 0 must not feel it."""
    learned = LIKELY.learn(torch.tensor([[0.3, 0.0]]), *met([1.0], [[0.5, 0.1]], [[1, NOBODY]]))
    assert learned[0].tolist() == pytest.approx([0.3, 0.5 * exp(-1.0)])


def test_losses_too_large_for_the_exponential_keep_their_order_in_the_draw_only_down_to_the_least():
    learned = LIKELY.learn(torch.zeros(1, 3), *met([1.0], [[30.0, 34.0, 1000.0]], [[0, 1, 2]]))
    assert learned[0].tolist() == pytest.approx([0.5 * exp(-60.0), 0.5 * exp(-68.0), 0.5 * LEAST], abs=1e-33)
