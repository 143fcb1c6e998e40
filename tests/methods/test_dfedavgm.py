"""DFedAvgM: its graphs, a ring worked out by hand, and FedAvg as its limit."""

from contextlib import closing
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.config import parse
from coterie.core import NOBODY, run_round
from coterie.descent import Train
from coterie.errors import ConfigError
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.methods import DFedAvgM, FedAvg, Local
from coterie.methods.dfedavgm import neighbours
from coterie.model import Model
from coterie.randomness import Moment
from coterie.robust.defence import Aggregation
from coterie.world import World
from tiny import TRAIN, Played, clients_of, federation, fleet_of, furthest, mlp, play, setting_of

GRAPHS = ("ring", "grid", "random-regular", "complete")


# Graphs


def lists(graph: Any, num_clients: int, degree: int = 4, seed: int = 0) -> list[list[int]]:
    """Each client's neighbours."""
    rows = neighbours(graph, num_clients, degree, seed).tolist()
    return [[peer for peer in row if peer != NOBODY] for row in rows]


def reached(of: list[list[int]]) -> set[int]:
    """All whom client 0 hears of, sooner or later."""
    known, news = {0}, [0]
    while news:
        news = [peer for peer in of[news.pop()] if peer not in known] + news
        known.update(news)
    return known


def is_symmetric(of: list[list[int]]) -> bool:
    return all(client in of[peer] for client, peers in enumerate(of) for peer in peers)


def test_a_ring_by_hand():
    assert neighbours("ring", 5, 6, 0).tolist() == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
    assert neighbours("ring", 2, 6, 0).tolist() == [[1], [0]]


def test_a_grid_by_hand():
    """0 1 2 above 3 4 5; a prime number of clients makes a line."""
    assert lists("grid", 6) == [[1, 3], [0, 2, 4], [1, 5], [0, 4], [1, 3, 5], [2, 4]]
    assert neighbours("grid", 6, 6, 0)[0].tolist() == [1, 3, NOBODY]
    assert lists("grid", 5) == [[1], [0, 2], [1, 3], [2, 4], [3]]
    assert [len(peers) for peers in lists("grid", 9)] == [2, 3, 2, 3, 4, 3, 2, 3, 2]


def test_in_a_complete_graph_everybody_is_everybodys_neighbour():
    assert lists("complete", 4) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_smallest_federations_have_graphs_too(graph):
    assert neighbours(graph, 1, 0, 0).tolist() == [[NOBODY]]
    assert neighbours(graph, 2, 1, 0).tolist() == [[1], [0]]


@given(st.sampled_from(GRAPHS), st.integers(3, 30), st.integers(2, 29), st.integers(0, 3))
def test_every_graph_is_symmetric_connected_and_without_loops(graph, num_clients, degree, seed):
    degree = min(degree, num_clients - 1)
    of = lists(graph, num_clients, degree, seed)
    assert len(of) == num_clients
    assert is_symmetric(of)
    assert reached(of) == set(range(num_clients))
    assert all(client not in peers and len(set(peers)) == len(peers) for client, peers in enumerate(of))
    degrees = {"ring": {2}, "complete": {num_clients - 1}, "grid": {1, 2, 3, 4}}
    degrees["random-regular"] = {degree + degree * num_clients % 2}
    assert set(map(len, of)) <= degrees[graph]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_graph_of_few_edges_is_drawn_until_it_hangs_together(seed):
    """Two neighbours each: left to chance, 40 clients fall into several rings three times in four."""
    assert len(reached(lists("random-regular", 40, 2, seed))) == 40


@pytest.mark.parametrize("degree", [50, 90, 98, 99])
def test_a_random_graph_of_many_edges_is_found(degree):
    assert {len(peers) for peers in lists("random-regular", 100, degree)} == {degree}


def test_a_seed_has_one_random_graph_and_another_seed_another():
    drawn = neighbours("random-regular", 20, 4, 7)
    neighbours.cache_clear()
    assert torch.equal(neighbours("random-regular", 20, 4, 7), drawn)
    assert not torch.equal(neighbours("random-regular", 20, 4, 8), drawn)
    for graph in ("ring", "grid", "complete"):
        assert torch.equal(neighbours(graph, 20, 4, 7), neighbours(graph, 20, 4, 8))


@pytest.mark.parametrize(
    ("num_clients", "degree", "allowed"),
    [(4, 4, "2 to 3"), (4, 1, "2 to 3"), (3, 6, "2 to 2"), (2, 2, "1 to 1")],
)
def test_a_degree_that_no_connected_graph_has_is_refused_before_anything_runs(num_clients, degree, allowed):
    data, model = federation([5] * num_clients), mlp()
    message = rf"method\.degree: got {degree}; allowed: {allowed}, so that all {num_clients} clients hang together"
    with pytest.raises(ConfigError, match=message):
        DFedAvgM(degree=degree).start(setting_of(data, model))
    with pytest.raises(ConfigError, match=message):
        World.of(parse({"method": {"name": "dfedavgm", "degree": degree}}, own_data=True), data, nn.Linear(3, 3))
    for graph in ("ring", "grid", "complete"):
        DFedAvgM(degree=degree, graph=graph).start(setting_of(data, model))
    DFedAvgM(degree=num_clients - 1).start(setting_of(data, model))


@pytest.mark.parametrize(("field", "value"), [("degree", 0), ("graph", "star"), ("aggregation", "mode")])
def test_impossible_options_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"method.{field}: got"):
        parse({"method": {"name": "dfedavgm", field: value}}, own_data=True)


# A ring of four clients who fit y = theta x by the mean of (theta x - y)^2, each in one step down the whole gradient

EXAMPLES = [[(1.0, 2.0)], [(1.0, 2.5), (1.0, 1.5)], [(2.0, -2.0), (3.0, -3.0), (1.0, 0.0)], [(1.0, -1.0)] * 4]
LINES = Federation.from_arrays(
    [(torch.tensor([[x] for x, _ in own]), torch.tensor([[y] for _, y in own])) for own in EXAMPLES],
    (torch.ones(2, 1), torch.zeros(2, 1)),
)
COUNTS = [1, 2, 3, 4]
STEP = Train(epochs=1, batch_size=10, lr=0.1, momentum=0.0)


def line() -> Model:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    return Model(module, "mse")


def stepped(client: int, theta: float = 0.5) -> float:
    return theta - 0.1 * sum(2 * x * (theta * x - y) for x, y in EXAMPLES[client]) / COUNTS[client]


def mean_of(clients: list[int], thetas: list[float]) -> float:
    return sum(COUNTS[c] * thetas[c] for c in clients) / sum(COUNTS[c] for c in clients)


def round_of(
    method: Any, thetas: list[float] | None = None, cohort: tuple[int, ...] = (0, 1, 2, 3), **more: Any
) -> Tensor:
    """[4]: the models after a round."""
    model = line()
    with closing(fleet_of(method, LINES, model, options=STEP, **more)) as fleet:
        if thetas is not None:
            fleet.restore({"theta": torch.tensor(thetas)[:, None]})
        state = method.start(setting_of(LINES, model))
        run_round(method, fleet, state, torch.tensor(cohort), Moment(0, 0))
        return fleet.memory()["theta"][:, 0]


def close(found: Tensor, expected: Any) -> None:
    """float32 against Python's doubles."""
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=1e-6, rtol=1e-5)


def test_a_round_on_a_ring_is_what_one_works_out_by_hand():
    trained = [stepped(client) for client in range(4)]
    assert trained == pytest.approx([
        0.5 - 0.1 * 2 * (0.5 - 2),
        0.5 - 0.1 * (2 * (0.5 - 2.5) + 2 * (0.5 - 1.5)) / 2,
        0.5 - 0.1 * (4 * (1 + 2) + 6 * (1.5 + 3) + 2 * 0.5) / 3,
        0.5 - 0.1 * 2 * (0.5 + 1),
    ])  # fmt: skip
    assert trained == pytest.approx([0.8, 0.8, 0.5 - 4 / 3, 0.2])
    expected = [
        (1 * 0.8 + 2 * 0.8 + 4 * 0.2) / 7,
        (2 * 0.8 + 1 * 0.8 + 3 * (0.5 - 4 / 3)) / 6,
        (3 * (0.5 - 4 / 3) + 2 * 0.8 + 4 * 0.2) / 9,
        (4 * 0.2 + 1 * 0.8 + 3 * (0.5 - 4 / 3)) / 8,
    ]
    found = round_of(DFedAvgM(graph="ring"))
    close(found, expected)
    unweighted = (trained[0] + trained[1] + trained[3]) / 3
    assert abs(float(found[0]) - unweighted) > 1e-2
    assert furthest(round_of(DFedAvgM(graph="complete")), found) > 1e-2


def test_momentum_is_that_of_the_local_training():
    """Two epochs of one step: the second goes on with 0.9 of the first."""
    first, first_speed = stepped(3), stepped(3) - 0.5
    second = first + 0.9 * first_speed + stepped(3, first) - first
    options = Train(epochs=2, batch_size=10, lr=0.1, momentum=0.9)
    alone = play(DFedAvgM(graph="grid"), LINES, line(), options=options, last=1).models
    trained = play(Local(), LINES, line(), options=options, last=1).models[:, 0].tolist()
    assert trained[3] == pytest.approx(second)
    close(alone[:, 0], [mean_of([c, *own], trained) for c, own in enumerate(lists("grid", 4))])


def test_a_second_round_starts_from_the_first_ones_mean():
    ring = lists("ring", 4)
    thetas = [0.5] * 4
    for _ in range(2):
        trained = [stepped(client, theta) for client, theta in enumerate(thetas)]
        thetas = [mean_of([client, *ring[client]], trained) for client in range(4)]
    found = play(DFedAvgM(graph="ring"), LINES, line(), options=STEP, last=2)
    close(found.models[:, 0], thetas)
    assert found.last.links.count_nonzero(1).tolist() == [2] * 4


def test_who_takes_no_part_keeps_its_model_and_is_nobodys_neighbour():
    trained = [stepped(client) for client in range(4)]
    found = round_of(DFedAvgM(graph="ring"), cohort=(0, 1, 3))
    close(found, [mean_of([0, 1, 3], trained), mean_of([1, 0], trained), 0.5, mean_of([3, 0], trained)])
    close(round_of(DFedAvgM(graph="ring"), cohort=(0, 2))[[0, 2]], [trained[0], trained[2]])  # not neighbours


def test_a_neighbour_whose_model_is_refused_has_no_part_in_the_mean():
    trained = [stepped(client) for client in range(4)]
    found = round_of(DFedAvgM(graph="ring"), [0.5, 0.5, float("nan"), 0.5])
    close(found[[0, 1, 3]], [mean_of([0, 1, 3], trained), mean_of([1, 0], trained), mean_of([3, 0], trained)])


# Robust means

ROBUST = [name for name in get_args(Aggregation) if name != "mean"]
SIX, MODEL = federation((7, 5, 6, 8, 4, 9)), mlp()


def trained_alone() -> Tensor:
    return play(Local(), SIX, MODEL, last=1).models


def aggregated(method: DFedAvgM, models: Tensor, own: int, others: list[int]) -> Tensor:
    """What a client makes of its own and others' trained models."""
    chosen = torch.tensor([own, *others])
    weight = SIX.train.count[chosen]
    if method.aggregation == "sageflow":
        judge = clients_of(SIX, choose_kernel("loop", MODEL), ids=torch.tensor([own]))
        weight = method.trusted(judge.entropies(models, chosen[None])[0], judge.losses(models, chosen[None])[0], weight)
    return method.aggregate(models[chosen], weight, models[own])


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize("graph", ["ring", "grid"])
def test_each_client_aggregates_its_own_model_and_its_neighbours(aggregation, graph):
    method = DFedAvgM(graph=graph, aggregation=aggregation, entropy_threshold=0.8)
    models = trained_alone()
    expected = torch.stack([aggregated(method, models, own, others) for own, others in enumerate(lists(graph, 6))])
    found = play(method, SIX, MODEL, last=1).models
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert furthest(play(DFedAvgM(graph=graph), SIX, MODEL, last=1).models, found) > 1e-3


@pytest.mark.parametrize("aggregation", ROBUST)
def test_each_aggregation_leaves_out_who_is_silent(aggregation):
    """Client 1 is malicious and says nothing; of the cohort without client 4, client 0 hears only client 5."""
    settings = {"method": {"name": "dfedavgm", "graph": "ring", "aggregation": aggregation, "entropy_threshold": 0.8}}
    config = parse(settings | {"attack": {"name": "silent", "malicious": [1]}, "train": TRAIN}, own_data=True)
    with World.of(config, SIX, MODEL.module) as world:
        world.fleet.restore({"theta": MODEL.initial(0).repeat(6, 1)})
        run_round(world.method, world.fleet, world.before.state, torch.tensor([0, 1, 2, 3, 5]), Moment(0, 0))
        found = world.fleet.memory()["theta"]
    models = trained_alone()
    for own, others in ((0, [5]), (2, [3]), (3, [2]), (5, [0])):
        torch.testing.assert_close(found[own], aggregated(config.method, models, own, others), atol=1e-6, rtol=1e-5)
    assert torch.equal(found[[1, 4]], MODEL.initial(0).repeat(2, 1))


def test_norm_clipping_clips_how_far_neighbours_are_from_the_own_model():
    """Client 2's neighbours are 1.633 and 1.033 away and the median of 0, 1.033 and 1.633 is 1.033."""
    trained = [stepped(client) for client in range(4)]
    near, far = trained[3] - trained[2], trained[1] - trained[2]
    assert (near, far) == pytest.approx((31 / 30, 49 / 30))
    found = round_of(DFedAvgM(graph="ring", aggregation="norm-clipping"))
    close(found[2], trained[2] + (2 * near + 4 * near) / 9)
    assert abs(float(found[2]) - trained[2] - (2 * far + 4 * near) / 9) > 1e-2


@pytest.mark.parametrize("aggregation", ["median", "trimmed-mean", "geometric-median", "krum", "multi-krum"])
def test_robust_neighbourhoods_survive_a_liar_that_the_mean_does_not(aggregation):
    def worst(aggregation: str) -> float:
        settings = {"method": {"name": "dfedavgm", "graph": "complete", "aggregation": aggregation}, "train": TRAIN}
        config = parse(
            settings | {"attack": {"name": "scaling", "factor": 1e4, "malicious": [5]}, "rounds": 1}, own_data=True
        )
        with World.of(config, SIX, MODEL.module) as world:
            run_round(world.method, world.fleet, world.before.state, torch.arange(6), Moment(0, 0))
            return float(world.fleet.memory()["theta"][:5].abs().max())

    assert worst("mean") > 100
    assert worst(aggregation) < 10


# FedAvg as its limit


@pytest.mark.parametrize("aggregation", sorted({"mean", *ROBUST} - {"sageflow", "norm-clipping"}))
def test_on_the_complete_graph_one_round_is_fedavg(aggregation):
    """But for the order in which models are added up. Sageflow has other judges there, norm-clipping another origin."""
    options = {"aggregation": aggregation, "assumed_malicious": 0.2}  # of six one, which leaves Krum no ties
    fedavg = play(FedAvg(**options), SIX, MODEL, last=1).models
    complete = play(DFedAvgM(graph="complete", **options), SIX, MODEL, last=1)
    torch.testing.assert_close(complete.models, fedavg, atol=1e-5, rtol=1e-5)
    assert complete.last.links.tolist() == (1 - torch.eye(6)).tolist()
    assert furthest(play(DFedAvgM(graph="ring", **options), SIX, MODEL, last=1).models, fedavg) > 1e-2


def test_on_the_complete_graph_with_everybody_there_it_stays_fedavg():
    """Three rounds grow the roundings of other orders of addition."""
    fedavg = play(FedAvg(), SIX, MODEL).models
    assert furthest(play(DFedAvgM(graph="complete"), SIX, MODEL).models, fedavg) < 1e-4
    assert furthest(play(DFedAvgM(graph="random-regular", degree=3), SIX, MODEL).models, fedavg) > 1e-2


def test_sageflow_by_clients_who_trust_nobody_leaves_everybody_alone():
    unsure = DFedAvgM(graph="ring", aggregation="sageflow", entropy_threshold=0.0)
    assert torch.equal(play(unsure, SIX, MODEL, last=1).models, trained_alone())


# Blocks and numbering. The mean on the complete graph is also in fleets/test_simulated.py


def same(mine: Played, theirs: Played) -> bool:
    return torch.equal(mine.models, theirs.models) and torch.equal(mine.last.links, theirs.last.links)


@pytest.mark.parametrize("aggregation", ["mean", "sageflow", "trimmed-mean"])
def test_blocks_and_threads_change_no_bit(aggregation):
    method = DFedAvgM(graph="random-regular", degree=3, aggregation=aggregation)
    whole = play(method, SIX, MODEL, participation=0.8)
    for block, threads in ((1, 2), (4, 1), (6, 2)):
        assert same(play(method, SIX, MODEL, participation=0.8, block=block, threads=threads), whole)
    assert not same(play(method, SIX, MODEL, participation=0.8, seed=1), whole)


@pytest.mark.parametrize("aggregation", ["median", "geometric-median", "sageflow", "norm-clipping"])
def test_renumbered_clients_get_the_permuted_result(aggregation):
    """On the complete graph; others join clients by number. Sums change their order: float32 roundings."""
    order = torch.tensor([3, 5, 0, 2, 1, 4])
    method = DFedAvgM(graph="complete", aggregation=aggregation)
    whole, moved = (play(method, data, MODEL, participation=0.8) for data in (SIX, SIX.renumbered(order)))
    assert furthest(moved.models, whole.models[order]) < 1e-4
    assert torch.equal(moved.last.links, whole.last.links[order][:, order])
    assert furthest(moved.models, whole.models) > 1e-3
