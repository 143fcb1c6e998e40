"""CoBo: weights by the agreement of gradients, on parabolas by hand and in its limits."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from coterie.config import Stay
from coterie.core import Replies, run_round
from coterie.federation import Federation
from coterie.methods import CoBo, Local, Oracle
from coterie.methods.cobo import grouped
from coterie.model import Model
from coterie.randomness import Moment
from coterie.training import beginning, rounds
from parabolas import PLAIN, parabolas, point
from tiny import TRAIN, federation, fleet_of, furthest, mlp, play, setting_of

ONCE = PLAIN.model_copy(update={"steps": 1})
ALL_PAIRS = CoBo(pairs="all", weight_step=0.01, attraction=0.5)


def one_round(
    method: CoBo, data: Federation, model: Model, theta: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The models and the weights after a round from these."""
    with closing(fleet_of(method, data, model, options=ONCE)) as fleet:
        fleet.restore({"theta": theta.clone()})
        state = method.start(setting_of(data, model))
        state = {**state, "weights": state["weights"] if weights is None else weights}
        state = run_round(method, fleet, state, torch.arange(data.num_clients), Moment(0, 0))
        return fleet.memory()["theta"], state["weights"]


def quadratics(*clients: tuple[float, Sequence[float]]) -> Federation:
    """Client i minimises a_i / 2 |theta - mu_i|^2 in the plane, given as (a_i, mu_i): Example 2 of the paper."""
    train = [(torch.full((1, 1), a**0.5), torch.tensor(mu).mul(a**0.5)[None]) for a, mu in clients]
    return Federation.from_arrays(train, (torch.ones(1, 1), torch.zeros(1, 2)))


def plane() -> Model:
    return Model(nn.Linear(1, 2, bias=False), "mse")


# One iteration


def test_an_iteration_by_hand():
    """Goals 0, 0, 4 and models 1, 3, 2. At the midpoints 2, 1.5 and 2.5 the gradients are 4 and 4, 3 and -5, 5 and -3,
    so that w_02 = w_12 = 1 - 0.15, and w_01 = 1.16 is cut off at 1. Then theta <- theta - 0.1 (g + 0.5 sum)."""
    theta, weights = one_round(ALL_PAIRS, parabolas(0.0, 0.0, 4.0), point(), torch.tensor([[1.0], [3.0], [2.0]]))
    expected = torch.tensor([[0.0, 1.0, 0.85], [1.0, 0.0, 0.85], [0.85, 0.85, 0.0]])
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    by_hand = [1.0 - 0.1 * (2.0 - 1.425), 3.0 - 0.1 * (6.0 + 1.425), 2.0 - 0.1 * (-4.0 + 0.0)]
    assert theta[:, 0].tolist() == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(("where", "weight"), [("A", 1.0), ("B", 0.0), ("C", 0.0)])
def test_the_three_points_of_the_papers_first_figure(where, weight):
    """mu_1 and mu_2 are 2 apart. A: both far from them. B: both at the minimiser of the sum. C: each at its own."""
    data = quadratics((1.0, (-1.0, 0.0)), (1.0, (1.0, 0.0)))
    both = {"A": [[0.0, 9.0], [0.0, 9.0]], "B": [[0.0, 0.0], [0.0, 0.0]], "C": [[-1.0, 0.0], [1.0, 0.0]]}[where]
    method, begin = CoBo(pairs="all", weight_step=10.0), torch.full((2, 2), 0.5)
    _, weights = one_round(method, data, plane(), torch.tensor(both), begin)
    assert weights[0, 1].item() == weights[1, 0].item() == weight


def test_on_a_simplex_each_row_is_projected_by_itself():
    """The agreements of the test above: 16, -15, -15. Row 0: (0.5 + 0.16, 0.5 - 0.15) less 0.005; row 2 is a tie."""
    method = CoBo(pairs="all", weight_step=0.01, weights="simplex")
    theta = torch.tensor([[1.0], [3.0], [2.0]])
    _, weights = one_round(method, parabolas(0.0, 0.0, 4.0), point(), theta)
    expected = torch.tensor([[0.0, 0.655, 0.345], [0.655, 0.0, 0.345], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


# Many


def test_weights_become_the_block_matrix_and_clusters_find_their_own_minimisers():
    """Example 2: two clusters with curvatures of their own. With weights that stay 1 they stay drawn together."""
    west, east = (-3.0, 1.0), (3.0, 1.0)
    clients = [(1.0, west), (2.0, west), (1.5, west), (2.0, east), (1.0, east)]
    data, blocks = quadratics(*clients), torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).fill_diagonal_(0.0)
    goals = torch.tensor([mu for _, mu in clients])
    options = {"options": ONCE, "last": 300, "evaluate_every": 300}
    free = play(CoBo(pairs="all", weight_step=0.05), data, plane(), **options)
    assert torch.equal(free.last.state["weights"], blocks)
    torch.testing.assert_close(free.models, goals, atol=1e-4, rtol=0)
    tied = play(CoBo(pairs="all", weight_step=0.0), data, plane(), **options)
    assert (tied.models - goals).abs().max() > 1.0


def test_fixed_weights_lead_to_the_solution_of_the_linear_system():
    """a_i (x_i - mu_i) + rho sum_k (x_i - x_k) = 0 where all weights stay 1."""
    goals, rho = torch.tensor([-2.0, 0.0, 5.0]), 0.5
    played = play(CoBo(weight_step=0.0, attraction=rho), parabolas(*goals.tolist()), point(), options=ONCE, last=100)
    system = (2.0 + 3.0 * rho) * torch.eye(3) - rho
    torch.testing.assert_close(played.models[:, 0], torch.linalg.solve(system, 2.0 * goals), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rho", [0.2, 1.0])
def test_the_distance_to_collaborators_falls_by_a_known_factor(rho):
    """Theorem I's consensus distance: with equal curvature 2 and c collaborators that agree, x_i - x_j shrinks by
    1 - lr (2 + rho c) in each iteration."""
    theta, rate = torch.tensor([[0.0], [1.0], [4.0]]), 1.0 - 0.1 * (2.0 + 3 * rho)
    moved, weights = one_round(CoBo(pairs="all", attraction=rho), parabolas(7.0, 7.0, 7.0), point(), theta)
    assert (weights[0, 1:] == 1.0).all()
    torch.testing.assert_close(moved - moved[0], rate * (theta - theta[0]), atol=1e-5, rtol=0)


# Limits


@pytest.mark.parametrize("changes", [{}, {"steps": 1}, {"steps": 3}])
def test_without_attraction_it_is_local_training(changes):
    data, options = federation(), TRAIN.model_copy(update=changes)
    alone = play(Local(), data, mlp(), options=options).models
    assert torch.equal(play(CoBo(attraction=0.0, pairs="all"), data, mlp(), options=options).models, alone)
    assert furthest(play(CoBo(attraction=0.5, pairs="all"), data, mlp(), options=options).models, alone) > 1e-3


def test_with_the_oracles_blocks_it_averages_inside_clusters_in_the_limit():
    """lr rho c = 1: x_i <- mean of its cluster - lr g_i, whose mean on parabolas moves as the oracle's model does."""
    goals, clusters = (1.0, 3.0, -4.0, -6.0), torch.tensor([0, 0, 1, 1])
    data = replace(parabolas(*goals), clusters=clusters)
    blocks = (clusters[:, None] == clusters).float().fill_diagonal_(0.0)
    theta = torch.tensor([[0.0], [2.0], [1.0], [5.0]])
    method = CoBo(weight_step=0.0, attraction=1.0 / (0.1 * 2))
    moved, _ = one_round(method, data, point(), theta, blocks)
    assert moved[:, 0].tolist() == pytest.approx([1.0 + 0.2, 1.0 + 0.2, 3.0 - 1.0, 3.0 - 2.2], abs=1e-5)
    means = moved.view(2, 2).mean(1)
    for start, after in zip((1.0, 3.0), means.tolist(), strict=True):
        oracle = play(Oracle(), data, point(start), options=ONCE, last=1).last.state["centres"][:, 0].tolist()
        assert after == pytest.approx(oracle[0 if start == 1.0 else 1], abs=1e-5)
    everybody, _ = one_round(method, data, point(), theta)
    assert (everybody - moved).abs().max() > 0.5


# Which pairs


def looked_at(method: CoBo, clients: int, round: int) -> int:
    everybody = torch.arange(clients)
    return len(method._chosen(everybody, everybody, Moment(0, round)))


def test_pairs_are_drawn_as_often_as_they_should_be():
    """12 clients have 66 pairs. Five standard deviations: a false alarm in 1.7 million; the draws are fixed anyway."""
    assert [looked_at(CoBo(pairs="all"), 12, round) for round in (0, 500)] == [66, 66]
    assert looked_at(CoBo(pairs="time"), 12, 0) == 66
    for method, rounds_played, chance in (
        (CoBo(pairs="constant"), range(300), [1 / 12] * 300),
        (CoBo(pairs="time"), range(1, 400), [1 / (t + 1) for t in range(1, 400)]),
        (CoBo(pairs="mixed", mixed_until=50), range(400), [1 / 12 if t < 50 else 1 / (t + 1) for t in range(400)]),
    ):
        found = sum(looked_at(method, 12, round) for round in rounds_played)
        deviation = (66 * sum(p * (1 - p) for p in chance)) ** 0.5
        assert abs(found - 66 * sum(chance)) < 5 * deviation
    assert looked_at(CoBo(pairs="constant"), 1, 0) == 0


def test_pairs_are_grouped_by_their_first():
    owners, others = grouped(torch.tensor([[5, 1], [2, 7], [5, 0], [5, 9]]))
    assert owners.tolist() == [2, 5]
    assert others.tolist() == [[7, -1, -1], [1, 0, 9]]


# Clients that come and go


@dataclass
class Deaf:
    """A fleet in which some clients do not answer some tasks."""

    fleet: object
    silent: set[int]
    tasks: set[str]

    def answer(self, ask, moment):
        replies = self.fleet.answer(ask, moment)
        if ask.task.__name__ not in self.tasks:
            return replies
        heard = torch.tensor([client not in self.silent for client in replies.clients.tolist()], dtype=torch.bool)
        return Replies(replies.clients[heard], {name: value[heard] for name, value in replies.values.items()})


@pytest.mark.parametrize("tasks", [{"show"}, {"write"}, {"compare"}, {"write", "compare"}])
def test_silent_clients_block_nobody_and_their_weights_stay(tasks):
    data, theta = parabolas(0.0, 4.0, 0.0, 4.0), torch.tensor([[1.0], [2.0], [3.0], [2.0]])
    with closing(fleet_of(ALL_PAIRS, data, point(), options=ONCE)) as fleet:
        fleet.restore({"theta": theta.clone()})
        state = ALL_PAIRS.start(setting_of(data, point()))
        state = run_round(ALL_PAIRS, Deaf(fleet, {3}, tasks), state, torch.arange(4), Moment(0, 0))
        after = fleet.memory()["theta"]
    known = one_round(ALL_PAIRS, data, point(), theta)[1]
    assert torch.equal(state["weights"][:3, :3], known[:3, :3])
    assert (known[[0, 2], 3] < 1.0).all()  # the goals 0 and 4, models 1 and 2, then 3 and 2
    stayed = state["weights"][[0, 2], 3] == 1.0
    assert stayed.all() or tasks in ({"write"}, {"compare"})  # of each pair only one writes, and the other compares
    assert (after[:3] != theta[:3]).all()
    assert torch.isfinite(after).all()


def played_with(stays: list[Stay], method: CoBo, last: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """The models after each round, and who was asked for in it."""
    data, model = federation(), mlp()
    setting, asked = setting_of(data, model), list[Tensor]()

    def present(round: int) -> Tensor:
        there = torch.ones(data.num_clients, dtype=torch.bool)
        for stay in stays:
            there[stay.clients] = stay.joins <= round < (stay.leaves or round + 1)
        return there

    with closing(fleet_of(method, data, model, options=TRAIN)) as fleet:
        inner = fleet.answer

        def answer(ask, moment):
            if ask.peers is not None:
                asked.append(ask.peers.unique())
            return inner(ask, moment)

        fleet.answer = answer  # type: ignore[method-assign]
        models = [
            fleet.memory()["theta"].clone()
            for _ in rounds(
                method, fleet, setting, data.keys, beginning(method, setting), seed=0, last=last, present=present
            )
        ]
    return models, asked


def test_who_joins_or_leaves_changes_nobody_elses_draws():
    always, _ = played_with([], CoBo(attraction=0.0, pairs="all"))
    coming, _ = played_with([Stay(clients=[3], joins=2, leaves=4)], CoBo(attraction=0.0, pairs="all"))
    for mine, theirs in zip(coming, always, strict=True):
        assert torch.equal(mine[:3], theirs[:3])
    assert torch.equal(coming[0][3], mlp().initial(0))  # not there yet
    assert torch.equal(coming[3][3], coming[2][3])  # gone
    assert not torch.equal(coming[2][3], coming[0][3])


def test_they_touch_others_only_while_they_are_there():
    always, asked = played_with([], CoBo(pairs="all"))
    leaving, asked_later = played_with([Stay(clients=[3], leaves=3)], CoBo(pairs="all"))
    assert all(torch.equal(leaving[round][:3], always[round][:3]) for round in (0, 1))
    assert furthest(leaving[3][:3], always[3][:3]) > 1e-5
    assert any(3 in peers for peers in asked[-2:])
    assert not any(3 in peers for peers in asked_later[-6:])
