"""FedCBO against numbers worked out with Python's own floats, and its known limits."""

from contextlib import closing
from math import exp, sqrt

import pytest
import torch
from torch import Tensor, nn

from coterie.core import run_round
from coterie.descent import Train
from coterie.federation import Federation
from coterie.kernels import KernelName, choose_kernel
from coterie.methods import FedCBO, Local
from coterie.model import Model
from coterie.randomness import Moment
from tiny import TRAIN, clients_of, federation, fleet_of, furthest, mlp, play, setting_of

# Four clients who fit y = theta x by the mean of (theta x - y)^2, each in one step down the whole gradient.
X = [[1.0, 2.0], [1.0, 1.0], [2.0, 3.0], [1.0, 3.0]]
Y = [[2.0, 4.0], [2.5, 1.5], [-2.0, -3.0], [-1.0, -2.0]]
FIRST, LR = 0.5, 0.1
LINES = Federation.from_arrays(
    [(torch.tensor(x)[:, None], torch.tensor(y)[:, None]) for x, y in zip(X, Y, strict=True)],
    (torch.ones(2, 1), torch.zeros(2, 1)),
)
ONE_STEP = Train(epochs=1, batch_size=10, lr=LR, momentum=0.0)


def line() -> Model:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, FIRST)
    return Model(module, "mse")


def loss(client: int, theta: float) -> float:
    return sum((theta * x - y) ** 2 for x, y in zip(X[client], Y[client], strict=True)) / 2


def step(client: int, theta: float) -> float:
    gradient = sum(2 * x * (theta * x - y) for x, y in zip(X[client], Y[client], strict=True)) / 2
    return theta - LR * gradient


def consensus(client: int, thetas: list[float], peers: list[int], alpha: float) -> float:
    weights = [exp(-alpha * loss(client, thetas[peer])) for peer in peers]
    return sum(weight * thetas[peer] for weight, peer in zip(weights, peers, strict=True)) / sum(weights)


def round_of(
    method: FedCBO, kernel: KernelName = "loop", liking: list[list[float]] | None = None, rounds: int = 1
) -> tuple[list[float], list[list[float]]]:
    """The program's models and likings after a round."""
    model = line()
    with closing(fleet_of(method, LINES, model, kernel, ONE_STEP)) as fleet:
        if liking is not None:
            fleet.restore({**fleet.memory(), "liking": torch.tensor(liking)})
        for number in range(rounds):
            run_round(method, fleet, method.start(setting_of(LINES, model)), torch.arange(4), Moment(0, number))
        return fleet.memory()["theta"][:, 0].tolist(), fleet.memory()["liking"].tolist()


def close(numbers: list[float]) -> object:
    return pytest.approx(numbers, rel=1e-5, abs=1e-6)  # float32 against Python's doubles


@pytest.mark.parametrize("kernel", ["loop", "vmap", "batched"])
def test_a_round_of_four_lines_is_what_one_works_out_by_hand(kernel):
    """Everybody downloads all three others."""
    alpha, lambda_gamma = 0.7, 0.6
    method = FedCBO(download=3, alpha=alpha, consensus_step=lambda_gamma, epsilon=0.0, epsilon_last=0.0)
    # Algorithm 1: the gradients at 0.5 are the means of 2 x (x / 2 - y).
    trained = [step(client, FIRST) for client in range(4)]
    assert trained == pytest.approx(
        [
            0.5 - 0.1 * (2 * 1 * (0.5 - 2) + 2 * 2 * (1 - 4)) / 2,  # 1.25
            0.5 - 0.1 * (2 * 1 * (0.5 - 2.5) + 2 * 1 * (0.5 - 1.5)) / 2,  # 0.8
            0.5 - 0.1 * (2 * 2 * (1 + 2) + 2 * 3 * (1.5 + 3)) / 2,  # -1.45
            0.5 - 0.1 * (2 * 1 * (0.5 + 1) + 2 * 3 * (1.5 + 2)) / 2,  # -0.7
        ]
    )
    assert trained == pytest.approx([1.25, 0.8, -1.45, -0.7])
    # Algorithm 2 for client 0: its losses of 0.8, -1.45 and -0.7 are 3.6, 29.75625 and 18.225.
    losses = [loss(0, theta) for theta in trained[1:]]
    assert losses == pytest.approx([3.6, 29.75625, 18.225])
    total = exp(-0.7 * 3.6) + exp(-0.7 * 29.75625) + exp(-0.7 * 18.225)
    mean = (0.8 * exp(-0.7 * 3.6) - 1.45 * exp(-0.7 * 29.75625) - 0.7 * exp(-0.7 * 18.225)) / total
    moved = [1.25 - 0.6 * (1.25 - mean)]
    for client in (1, 2, 3):  # and in the same way for the others
        peers = [peer for peer in range(4) if peer != client]
        mean = consensus(client, trained, peers, alpha)
        moved.append(trained[client] - lambda_gamma * (trained[client] - mean))
    # (23), with the sign that favours low loss; its own loss is that of its trained model.
    liked = [
        [loss(c, trained[c]) - loss(c, trained[peer]) if peer != c else 0.0 for peer in range(4)] for c in range(4)
    ]
    thetas, liking = round_of(method, kernel)
    assert thetas == close(moved)
    for mine, theirs in zip(liking, liked, strict=True):
        assert mine == close(theirs)
    assert liking[0][1] > liking[0][2]  # client 1 has nearly the same line, client 2 the opposite one
    assert thetas != close(trained)
    assert round_of(method.model_copy(update={"alpha": 0.8}), kernel)[0] != close(moved)


def test_with_a_smaller_budget_only_the_peers_liked_best_are_met():
    liking = [[0.0, 3.0, 2.0, 1.0], [1.0, 0.0, 2.0, 3.0], [3.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 0.0]]
    met = [[1, 2], [3, 2], [0, 3], [2, 1]]
    method = FedCBO(download=2, alpha=0.05, consensus_step=1.0, epsilon=0.0, epsilon_last=0.0)
    trained = [step(client, FIRST) for client in range(4)]
    expected = [consensus(client, trained, met[client], 0.05) for client in range(4)]
    for client in range(4):
        for peer in met[client]:
            liking[client][peer] += loss(client, trained[client]) - loss(client, trained[peer])
    start = [[0.0, 3.0, 2.0, 1.0], [1.0, 0.0, 2.0, 3.0], [3.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 0.0]]
    thetas, liked = round_of(method, liking=start)
    assert thetas == close(expected)
    for mine, theirs in zip(liked, liking, strict=True):
        assert mine == close(theirs)
    assert round_of(method, liking=[[0.0] * 4] * 4)[0] != close(expected)


def test_a_second_round_starts_from_the_consensus_and_meets_those_liked_in_the_first():
    method = FedCBO(download=3, alpha=0.1, consensus_step=0.5, epsilon=0.0, epsilon_last=0.0)
    thetas = [FIRST] * 4
    likings = [[0.0] * 4 for _ in range(4)]
    for _ in range(2):
        trained = [step(client, theta) for client, theta in enumerate(thetas)]
        for client in range(4):
            peers = [peer for peer in range(4) if peer != client]
            mean = consensus(client, trained, peers, 0.1)
            thetas[client] = trained[client] - 0.5 * (trained[client] - mean)
            for peer in peers:
                likings[client][peer] += loss(client, trained[client]) - loss(client, trained[peer])
    mine, liked = round_of(method, rounds=2)
    assert mine == close(thetas)
    for one, other in zip(liked, likings, strict=True):
        assert one == close(other)
    assert round_of(method)[0] != close(thetas)


# Known limits

DATA, MODEL = federation(), mlp()


@pytest.mark.parametrize("kernel", ["loop", "batched"])
def test_without_a_consensus_step_every_client_learns_alone(kernel):
    alone = play(Local(), DATA, MODEL, kernel=kernel)
    assert torch.equal(play(FedCBO(download=2, consensus_step=0.0), DATA, MODEL, kernel=kernel).models, alone.models)
    assert furthest(play(FedCBO(download=2), DATA, MODEL, kernel=kernel).models, alone.models) > 1e-2


def test_with_alpha_zero_and_a_whole_step_everybody_adopts_the_mean_of_the_others():
    trained = play(Local(), DATA, MODEL, last=1).models
    others = (trained.sum(0) - trained) / 3
    adopted = play(FedCBO(download=3, alpha=0.0, consensus_step=1.0), DATA, MODEL, last=1).models
    torch.testing.assert_close(adopted, others, atol=1e-6, rtol=1e-6)
    assert furthest(play(FedCBO(download=3, alpha=1.0), DATA, MODEL, last=1).models, others) > 1e-3


def test_a_very_large_alpha_adopts_the_peer_with_the_least_loss():
    trained = play(Local(), DATA, MODEL, last=1).models
    clients = clients_of(DATA, choose_kernel("loop", MODEL), TRAIN)
    losses = clients.losses(trained, torch.arange(4).expand(4, -1)).fill_diagonal_(torch.inf)
    adopted = play(FedCBO(download=3, alpha=1e6), DATA, MODEL, last=1).models
    torch.testing.assert_close(adopted, trained[losses.argmin(1)], atol=1e-6, rtol=1e-6)


def test_clients_come_to_learn_from_their_own_cluster():
    many = federation([8] * 12)
    explored = play(FedCBO(download=4), many, MODEL, last=8, evaluate_every=8)
    rates = [progress.record["selection_rate"] for progress in explored.progress]
    assert rates[0] < 0.65  # at random: 5 of 11
    assert rates[-1] > 0.85
    assert explored.last.record["selection_oracle"] == pytest.approx(1.0)


# Noise: (70) and (71)

WIDE = Model(lambda: nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 3)))
EQUAL = federation((6, 6, 6))
LEVEL = 0.3


def moved(noise: str, consensus_step: float = 1.0, seed: int = 0) -> Tensor:
    method = FedCBO(download=2, alpha=1.0, consensus_step=consensus_step, noise=noise, noise_level=LEVEL)
    return play(method, EQUAL, WIDE, last=1, seed=seed).models


@pytest.mark.parametrize("noise", ["isotropic", "anisotropic"])
def test_noise_has_the_scale_of_the_papers_formula_in_every_coordinate(noise):
    """Divided by that scale it is standard normal: mean, deviation and neighbours within 5 standard errors."""
    size = WIDE.layout.num_parameters
    away = (moved("none", consensus_step=0.0) - moved("none"))[:, :size]
    added = (moved(noise) - moved("none"))[:, :size]
    scale = LEVEL * (away.norm(dim=1, keepdim=True) if noise == "isotropic" else away)
    there = scale.abs().expand_as(added) > 1e-3  # where the rounding of theta does not show
    normals = (added / scale)[there]
    count = len(normals)
    assert count > 2500
    assert abs(normals.mean()) < 5 / sqrt(count)
    assert abs(normals.std() - 1.0) < 5 / sqrt(2 * count)
    assert abs((normals[1:] * normals[:-1]).mean()) < 5 / sqrt(count)
    assert normals.unique().numel() > 0.99 * count
    assert not torch.equal(moved(noise, seed=1), moved(noise))


def test_noise_leaves_batch_statistics_alone():
    size = WIDE.layout.num_parameters
    for noise in ("isotropic", "anisotropic"):
        assert torch.equal(moved(noise)[:, size:], moved("none")[:, size:])
        assert not torch.equal(moved(noise)[:, :size], moved("none")[:, :size])


@pytest.mark.parametrize(
    ("field", "value"),
    [("download", 0), ("alpha", -1.0), ("alpha", float("inf")), ("consensus_step", 2.5), ("epsilon", 1.5),
     ("noise", "pink"), ("noise_level", -0.1)],
)  # fmt: skip
def test_impossible_options_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        FedCBO(**{field: value})
