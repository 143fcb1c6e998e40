from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.core import NOBODY, Ask, client_task
from coterie.descent import Train
from coterie.errors import ModelError
from coterie.federation import Federation
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import METHODS, FedCBO, Local
from coterie.model import Model
from coterie.randomness import Moment
from tiny import COUNTS, TRAIN, Played, federation, furthest, mlp, play, starts

EIGHT = federation((7, 5, 3, 5, 2, 8, 4, 1))
FEDCBO = FedCBO(download=4, noise="anisotropic", noise_level=0.1)
OF_METHOD: Mapping[str, dict[str, object]] = {
    "fedcbo": {"download": 3, "noise": "isotropic", "noise_level": 0.05}, "ifca": {"clusters": 2},
    "cfl": {"mean_below": 1.0, "largest_above": 0.1}, "wecfl": {"clusters": 2},
    "fedcb2o": {"download": 3}, "dfedavgm": {"graph": "complete"},  # other graphs join clients by number
}  # fmt: skip
SHORT = Train(epochs=1, batch_size=5)
INF, NAN = float("inf"), float("nan")


def same(mine: Played, theirs: Played) -> bool:
    memories = all(torch.equal(mine.memory[name], theirs.memory[name]) for name in theirs.memory)
    return memories and torch.equal(mine.models, theirs.models) and torch.equal(mine.last.links, theirs.last.links)


def played(method: Any, data: Federation = EIGHT, *, last: int = 3, **more: Any) -> Played:
    """A short run in which not everybody takes part."""
    return play(method, data, mlp(), participation=0.8, options=SHORT, last=last, evaluate_every=last, **more)


@cache
def reference(kernel: str) -> Played:
    """One thread, and blocks as the fleet likes them."""
    return played(FEDCBO, kernel=kernel)


@pytest.mark.parametrize("block", [1, 7, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_and_threads_change_no_bit_of_the_loop_kernels_models(block, threads):
    run = played(FEDCBO, block=block, threads=threads)
    assert same(run, reference("loop"))


@pytest.mark.parametrize("block", [1, 7, 8])
@pytest.mark.parametrize("kernel", ["vmap", "batched"])
def test_blocks_change_the_other_kernels_models_by_rounding_only(kernel, block):
    """Products of other shapes add up in another order: float32 roundings, grown over three rounds of training."""
    run = play(
        FEDCBO, EIGHT, mlp(), kernel=kernel, block=block, threads=2, participation=0.8, options=SHORT, evaluate_every=3
    )
    assert furthest(run.models, reference(kernel).models) < 1e-4
    assert furthest(run.models, reference("loop").models) < 1e-3
    assert torch.equal(run.last.links, reference(kernel).last.links)


def test_another_seed_gives_other_models():
    other = played(FEDCBO, seed=1)
    assert furthest(other.models, reference("loop").models) > 0.05
    assert not torch.equal(other.last.links, reference("loop").last.links)


@pytest.mark.parametrize(("name", "kernel"), [*((name, "loop") for name in METHODS), ("fedcbo", "batched")])
def test_renumbered_clients_get_the_permuted_result(name, kernel):
    """Means over clients add up in another order: a few float32 roundings, grown over three rounds of training."""
    method = METHODS[name](**OF_METHOD.get(name, {}))
    order = torch.tensor([3, 5, 0, 7, 2, 1, 6, 4])
    run = played(method, last=2, kernel=kernel)
    moved = played(method, EIGHT.renumbered(order), last=2, kernel=kernel)
    assert furthest(moved.models, run.models[order]) < 1e-4
    for mine, theirs in zip(moved.progress, run.progress, strict=True):
        assert torch.equal(mine.links, theirs.links[order][:, order])
        assert mine.record["selection_rate"] == pytest.approx(theirs.record["selection_rate"])
    for measured in ("loss", "accuracy"):
        mine, theirs = moved.last.per_client[measured], run.last.per_client[measured]
        torch.testing.assert_close(mine, theirs[order], atol=1e-4, rtol=0)
    unmoved = replace(EIGHT.renumbered(order), keys=EIGHT.keys)  # the same data under other identities
    assert furthest(played(method, unmoved, last=2, kernel=kernel).models, run.models[order]) > 1e-3


# A client that diverges


def exploding(client: int, data: Federation) -> Federation:
    """Finite examples, but so large that the first step of training is not."""
    x = data.train.x.clone()
    x[client, : data.train.count[client]] = 3e38 * x[client, : data.train.count[client]].sign()
    return replace(data, train=replace(data.train, x=x))


def without(client: int, data: Federation) -> Federation:
    left = torch.tensor([number for number in range(data.num_clients) if number != client])
    return replace(
        data, train=data.train.rows(left), test_of=data.test_of[left], clusters=data.clusters[left],
        keys=data.keys[left],
    )  # fmt: skip


FIVE = federation((7, 5, 6, 8, 4))
LEFT = torch.tensor([0, 1, 3, 4])


def test_a_diverging_client_is_refused_named_and_kept_out_of_everybodys_consensus():
    """The others end bit for bit as if it had never been there."""
    everyone = FedCBO(download=4, epsilon=0.0, epsilon_last=0.0)
    run = play(everyone, exploding(2, FIVE), mlp(), options=SHORT)
    for progress in run.progress:
        assert list(progress.record["refused"]) == ["2"]
        assert "non-finite" in progress.record["refused"]["2"]
        assert progress.record["silent"] == 0
    assert torch.isfinite(run.models).all()
    alone = play(FedCBO(download=3, epsilon=0.0, epsilon_last=0.0), without(2, FIVE), mlp(), options=SHORT)
    assert torch.equal(run.models[LEFT], alone.models)
    healthy = play(everyone, FIVE, mlp(), options=SHORT)
    assert furthest(healthy.models[LEFT], alone.models) > 1e-2
    assert healthy.last.record["refused"] == {}


def test_a_diverging_clients_memory_stays_as_it_was():
    run = play(FedCBO(download=4), exploding(2, FIVE), mlp(), last=2)
    assert torch.equal(run.memory["theta"][2], mlp().initial(0))
    assert (run.memory["liking"][2] == 0).all()
    assert not torch.equal(run.memory["theta"][1], mlp().initial(0))


OTHER_KERNELS = [("fedcbo", "vmap"), ("fedcbo", "batched")]


@pytest.mark.parametrize(("name", "kernel"), [*((name, "loop") for name in METHODS), *OTHER_KERNELS])
def test_no_method_lets_a_diverging_client_spoil_the_others(name, kernel):
    method = METHODS[name](**OF_METHOD.get(name, {}))
    run = play(method, exploding(2, FIVE), mlp(), kernel=kernel, options=SHORT, last=2)
    assert [list(progress.record["refused"]) for progress in run.progress] == [["2"], ["2"]]
    assert torch.isfinite(run.models).all()
    assert furthest(run.models[LEFT], starts(mlp(), FIVE)[LEFT]) > 1e-2


def test_if_every_client_diverges_the_run_goes_on_from_where_it_stood():
    data = federation((4, 4))
    for client in range(2):
        data = exploding(client, data)
    for name in METHODS:
        method = METHODS[name](**{**OF_METHOD.get(name, {}), **({"download": 1} if name == "fedcbo" else {})})
        run = play(method, data, mlp(), last=2)
        assert [sorted(progress.record["refused"]) for progress in run.progress] == [["0", "1"]] * 2
        assert torch.equal(run.models[0], mlp().initial(0))


@pytest.mark.parametrize("kernel", ["loop", "vmap", "batched"])
def test_what_lies_in_memory_where_nobody_published_reaches_nobody(kernel, monkeypatch):
    """New memory may hold anything; here it holds NaN."""
    expected = played(FedCBO(download=2), last=2, kernel=kernel)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
    run = played(FedCBO(download=2), last=2, kernel=kernel)
    assert [progress.record["refused"] for progress in run.progress] == [{}, {}]
    assert torch.equal(run.models, expected.models)


# The protocol


class Post:
    """Tasks that publish, deliver and remember simple numbers; every model is one number."""

    @client_task
    def publish(self, clients, memory, given):
        """Publishes 1 + own id."""
        return {}, {"publish": (1.0 + clients.ids)[:, None].expand(-1, 2), "examples": clients.examples}

    @client_task
    def read(self, clients, memory, given):
        peers = given.downloaded
        read = peers.mix(torch.ones(peers.ids.shape) * peers.delivered, otherwise=torch.full((len(clients), 2), -1.0))
        return {}, {"read": read[:, 0], "delivered": peers.delivered}

    @client_task
    def read_and_publish(self, clients, memory, given):
        memory, reply = self.read(clients, memory, given)
        return memory, {**reply, "publish": (100.0 + clients.ids)[:, None].expand(-1, 2)}

    @client_task
    def remember(self, clients, memory, given):
        return {"sum": memory["sum"] + given["each"] + given["all"]}, {}


POST = Post()
FOUR = federation(COUNTS)
EVERYBODY = torch.arange(4)


@pytest.fixture
def fleet():
    model = Model(nn.Linear(1, 1))  # two numbers
    memory = {"sum": torch.zeros(4), "untouched": torch.ones(4, 3)}
    with closing(SimulatedFleet(FOUR, choose_kernel("loop", model), TRAIN, memory, block=2, threads=2)) as made:
        yield made


def test_published_models_reach_those_who_ask_and_not_the_coordinator(fleet):
    published = fleet.answer(Ask(POST.publish, torch.tensor([0, 1, 3])), Moment(0, 0))
    assert set(published.values) == {"examples"}
    assert published["examples"].tolist() == [COUNTS[0], COUNTS[1], COUNTS[3]]
    wanted = torch.tensor([[1, 3], [2, NOBODY], [0, 2], [0, 0]])
    read = fleet.answer(Ask(POST.read, EVERYBODY, peers=wanted), Moment(0, 0, 1))
    assert read["delivered"].tolist() == [[True, True], [False, False], [True, False], [True, True]]
    assert read["read"].tolist() == [2.0 + 4.0, -1.0, 1.0, 1.0 + 1.0]


def test_publications_live_for_one_round(fleet):
    fleet.answer(Ask(POST.publish, EVERYBODY), Moment(0, 0))
    ask = Ask(POST.read, EVERYBODY, peers=torch.zeros(4, 1, dtype=torch.int64))
    assert fleet.answer(ask, Moment(0, 0, 1))["delivered"].all()
    assert not fleet.answer(ask, Moment(0, 1))["delivered"].any()


def test_what_is_published_in_an_exchange_is_seen_from_the_next_on(fleet):
    fleet.answer(Ask(POST.publish, EVERYBODY), Moment(0, 0))
    ask = Ask(POST.read_and_publish, EVERYBODY, peers=torch.tensor([[3], [0], [1], [2]]))
    assert fleet.answer(ask, Moment(0, 0, 1))["read"].tolist() == [4.0, 1.0, 2.0, 3.0]
    assert fleet.answer(ask, Moment(0, 0, 2))["read"].tolist() == [103.0, 100.0, 101.0, 102.0]


def test_each_client_gets_its_own_value_and_only_those_asked_change(fleet):
    asked = torch.tensor([3, 0, 2])
    each = {"each": torch.tensor([30.0, 1.0, 20.0])}
    replies = fleet.answer(Ask(POST.remember, asked, each=each, shared={"all": torch.tensor(0.5)}), Moment(0, 0))
    assert replies.clients.tolist() == [3, 0, 2]
    assert fleet.memory()["sum"].tolist() == [1.5, 0.0, 20.5, 30.5]
    assert fleet.memory()["untouched"].tolist() == torch.ones(4, 3).tolist()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_client_with_a_bad_number_is_refused_and_the_others_are_not(fleet, bad):
    each = {"each": torch.tensor([1.0, bad, 3.0, 4.0])}
    replies = fleet.answer(Ask(POST.remember, EVERYBODY, each=each, shared={"all": torch.tensor(0.0)}), Moment(0, 0))
    assert replies.clients.tolist() == [0, 2, 3]
    assert list(replies.refused) == [1]
    assert fleet.memory()["sum"].tolist() == [1.0, 0.0, 3.0, 4.0]


def test_a_fleet_goes_on_from_what_it_is_given_back(fleet):
    before = {name: value.clone() for name, value in fleet.memory().items()}
    ask = Ask(POST.remember, EVERYBODY, each={"each": torch.ones(4)}, shared={"all": torch.tensor(0.0)})
    fleet.answer(ask, Moment(0, 0))
    fleet.restore(before)
    fleet.answer(ask, Moment(0, 0))
    assert fleet.memory()["sum"].tolist() == [1.0] * 4


def test_a_mistake_of_the_model_is_told_and_not_swallowed_by_a_thread():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ModelError("this layer is broken")

    with pytest.raises(ModelError, match="broken"):
        play(Local(), FOUR, Model(Broken(3, 3)), options=Train(epochs=1), threads=2, last=1)


# Letters


class Post:
    """Tasks that write to peers and read what peers wrote."""

    @client_task
    def show(self, clients, memory, given):
        return {}, {"publish": memory["theta"]}

    @client_task
    def write(self, clients, memory, given):
        """Client c writes 10 c + p to peer p."""
        what = 10.0 * clients.ids[:, None] + given.downloaded.asked
        return {}, {"letters": what[..., None].expand(-1, -1, memory["theta"].shape[1]) * 1.0}

    @client_task
    def write_too_short(self, clients, memory, given):
        return {}, {"letters": torch.ones(*given.downloaded.asked.shape, 2)}

    @client_task
    def read(self, clients, memory, given):
        wrote = given.downloaded.wrote(clients)
        found = torch.full(wrote.shape, -1.0)
        if wrote.any():
            found[wrote] = torch.stack(given.downloaded.letters(clients))[:, 0]
        return {}, {"found": found}


def read(fleet: SimulatedFleet, moment: Moment, *, letters: bool = True) -> list[list[float]]:
    """What clients 0, 1 and 2 find from each of these three."""
    everybody = torch.arange(3)
    return fleet.answer(Ask(Post().read, everybody, peers=everybody.repeat(3, 1), letters=letters), moment)[
        "found"
    ].tolist()


@pytest.mark.parametrize("block", [1, 3])
def test_a_letter_reaches_its_addressee_only_and_for_one_round(block):
    data, model, moment = federation(), mlp(), Moment(0, 0)
    memory = {"theta": starts(model, data)}
    with closing(SimulatedFleet(data, choose_kernel("loop", model), TRAIN, memory, block=block, threads=2)) as fleet:
        writers = Ask(Post().write, torch.tensor([0, 2]), peers=torch.tensor([[1, 2], [1, NOBODY]]))
        assert "letters" not in fleet.answer(writers, moment).values  # the coordinator does not see them
        assert read(fleet, moment) == [[-1.0, -1.0, -1.0], [1.0, -1.0, 21.0], [2.0, -1.0, -1.0]]
        assert read(fleet, moment, letters=False) == [[-1.0] * 3] * 3
        assert read(fleet, Moment(0, 1)) == [[-1.0] * 3] * 3


def test_letters_of_another_length_are_refused():
    data, model = federation(), mlp()
    memory = {"theta": starts(model, data)}
    with closing(SimulatedFleet(data, choose_kernel("loop", model), TRAIN, memory, threads=1)) as fleet:
        ask = Ask(Post().write_too_short, torch.tensor([0]), peers=torch.tensor([[1]]))
        assert "letters of the wrong shape: got (1, 2)" in fleet.answer(ask, Moment(0, 0)).refused[0]
        assert read(fleet, Moment(0, 0)) == [[-1.0] * 3] * 3


def test_what_a_task_replies_of_its_memory_is_what_it_was():
    """Rows of memory are views; a reply must not change with the memory that the task returns."""

    class Swap:
        @client_task
        def swap(self, clients, memory, given):
            return {"theta": memory["theta"] + 1.0}, {"before": memory["theta"]}

    data, model = federation(), mlp()
    with closing(SimulatedFleet(data, choose_kernel("loop", model), TRAIN, {"theta": starts(model, data)})) as fleet:
        before = fleet.answer(Ask(Swap().swap, torch.arange(4)), Moment(0, 0))["before"]
        assert torch.equal(before, starts(model, data))
        assert torch.equal(fleet.memory()["theta"], starts(model, data) + 1.0)
