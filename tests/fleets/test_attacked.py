"""What malicious clients can do to a federation, and what they cannot."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import coterie
from coterie.config import parse
from coterie.core import NOBODY, Ask, State, Tensors, client_task, merging_task, run_round
from coterie.federation import Federation
from coterie.fleets.attacked import SENT, AttackedFleet
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.methods import METHODS, FedAvg, Local
from coterie.model import Model
from coterie.options import Options
from coterie.randomness import Moment
from coterie.robust.attacks import ATTACKS, Attack, NoAttack, NonFinite, Seen, SignFlip, Silent, Stale
from coterie.robust.defence import Aggregation
from coterie.training import collect_models, rounds
from coterie.world import World
from program import SMALL, Listener, results
from tiny import CLASSES, FEATURES, TRAIN, federation, furthest, mlp, numbers

SIX = federation((7, 5, 6, 8, 5, 4))  # clusters 0 1 0 1 0 1
LIARS, BENIGN = [2, 5], [0, 1, 3, 4]  # one liar in each
SHORT = {"epochs": 1, "batch_size": 8, "lr": 0.1}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "fedcbo": {"download": 3}, "fedcb2o": {"download": 3}, "ifca": {"clusters": 2},
    "federated_clustering": {"quantile": 1.0}, "wecfl": {"clusters": 2}, "cfl": {"mean_below": 1, "largest_above": 0.1},
    "dfedavgm": {"graph": "complete"},  # other graphs join clients by number
}  # fmt: skip
TRUSTING = 2.0  # of three classes the entropy is 1.1 at most
DEFENDED: dict[str, Options] = {
    f"{name}, {aggregation}": METHODS[name](
        **OPTIONS.get(name, {}), aggregation=aggregation, entropy_threshold=TRUSTING
    )
    for name in ("fedavg", "dfedavgm")
    for aggregation in get_args(Aggregation)
    if aggregation != "mean"
}
ALL: dict[str, Options] = {name: kind(**OPTIONS.get(name, {})) for name, kind in METHODS.items()} | DEFENDED
TALK_TO_NOBODY = {"local", "oracle-min", "oracle-max"}  # nothing is sent, the attackers are gone, they are honest
WHY = {"nan": "non-finite", "infinity": "non-finite", "huge": "larger than 1e+15", "shape": "wrong shape"}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


@dataclass(frozen=True)
class Ended:
    """What is left of a short run."""

    models: Tensor  # [N, P]
    malicious: Tensor  # [N] bool
    memory: Tensors
    state: State
    links: Tensor
    records: list[Mapping[str, Any]]

    @property
    def benign(self) -> Tensor:
        return self.models[~self.malicious]


def played(method: Options, attack: Attack | None, data: Federation = SIX, **changes: Any) -> Ended:
    """A run of two rounds, assembled as the program does it, so that oracles get the federation they want."""
    settings = {"rounds": 2, "seed": 0, "participation": 1.0, "kernel": "loop", "threads": 1, "block": 8, **changes}
    config = parse({"method": method, "attack": attack, "train": SHORT, **settings}, own_data=True)
    last = config.rounds
    with World.of(config, data, network) as world:
        malicious = world.federation.malicious
        progress = list(
            rounds(
                world.method, world.fleet, world.setting, world.federation.keys, world.before, seed=config.seed,
                last=last, evaluate_every=last, participation=config.participation, malicious=malicious,
            )
        )  # fmt: skip
        memory = {name: value.clone() for name, value in world.fleet.memory().items()}
        state, moment = progress[-1].state, Moment(config.seed, last - 1)
        models = collect_models(world.method, world.fleet, state, moment, world.model.layout.size)
        malicious = torch.zeros(len(models), dtype=torch.bool) if malicious is None else malicious
        return Ended(models, malicious, memory, state, progress[-1].links, [one.record for one in progress])


def alike(mine: Ended, theirs: Ended) -> bool:
    """To the last bit, but for what attackers remember beside."""
    memories = all(torch.equal(mine.memory[name], value) for name, value in theirs.memory.items() if name != SENT)
    states = all(torch.equal(mine.state[name], value) for name, value in theirs.state.items())
    return memories and states and torch.equal(mine.models, theirs.models) and torch.equal(mine.links, theirs.links)


@cache
def reference(name: str, attack: type[Attack] | None) -> Ended:
    return played(ALL[name], attack and attack(malicious=LIARS))


# Those who do not lie


class Truthful(Attack):
    """Goes the whole way of a lie and then says what is true."""

    name: str = "truthful"
    crafts = eavesdrops = remembers = True


@pytest.mark.parametrize("attack", [NoAttack(malicious=LIARS), SignFlip(malicious_per_cluster=0)])
@pytest.mark.parametrize("name", METHODS)
def test_without_attackers_or_without_an_attack_nothing_changes(name, attack):
    """But for an oracle that takes the malicious out, whether they attack or not."""
    data = SIX.only(torch.tensor(BENIGN)) if name == "oracle-min" and attack.malicious else SIX
    assert alike(played(ALL[name], attack), played(ALL[name], None, data))


@pytest.mark.parametrize("name", METHODS)
def test_liars_that_say_the_truth_change_nothing(name):
    assert alike(reference(name, Truthful), reference(name, NoAttack))


@pytest.mark.parametrize("name", METHODS)
def test_a_real_attack_changes_what_honest_clients_learn_together(name):
    attacked, healthy = reference(name, SignFlip).benign, reference(name, NoAttack).benign
    assert torch.equal(attacked, healthy) == (name in TALK_TO_NOBODY)


def test_the_fleet_has_the_name_and_the_size_of_the_one_inside():
    with closing(fleet_of(NoAttack(malicious=LIARS))) as fleet:
        assert (fleet.name, fleet.num_clients) == ("simulated", 8)


# Every method under every attack


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", METHODS)
def test_under_every_attack_honest_clients_go_on_learning(name, attack):
    run = reference(name, ATTACKS[attack])
    assert torch.isfinite(run.benign).all()
    assert all(torch.isfinite(value).all() for value in run.state.values())
    assert (run.benign - mlp().initial(0)).abs().amax(1).min() > 1e-3


PAIRS = [*(("fedcbo", attack) for attack in ATTACKS), *((name, "min-max") for name in METHODS if name != "fedcbo")]


@pytest.mark.parametrize(("name", "attack"), PAIRS)
def test_the_same_seed_gives_the_same_bits_in_whatever_blocks_and_threads(name, attack):
    run = played(ALL[name], ATTACKS[attack](malicious=LIARS), block=2, threads=2)
    assert alike(run, reference(name, ATTACKS[attack]))


@pytest.mark.parametrize("name", DEFENDED)
def test_every_defence_survives_models_of_a_million(name):
    run = played(ALL[name], ATTACKS["random"](malicious=LIARS, spread=1e6), rounds=3)
    assert torch.isfinite(run.benign).all()
    assert run.records[0]["refused"] == {}
    assert all(torch.isfinite(value).all() for value in run.state.values())


@pytest.mark.parametrize("attack", ["random", "label-flip", "min-sum"])
def test_another_seed_gives_other_numbers(attack):
    runs = [played(ALL["fedcbo"], ATTACKS[attack](malicious=LIARS), seed=seed) for seed in (0, 1)]
    assert not torch.equal(runs[0].benign, runs[1].benign)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS.values() if attack is not NoAttack])
def test_every_attack_reaches_those_who_learn_with_attackers_and_nobody_else(attack):
    assert not torch.equal(reference("fedavg", attack).benign, reference("fedavg", NoAttack).benign)
    assert torch.equal(reference("local", attack).benign, reference("local", NoAttack).benign)


RENUMBERED = [("fedcbo", "min-max", True), ("fedavg", "random", False), ("dfedavgm", "a-little-is-enough", True),
              ("fedcb2o", "stale", True), ("ifca", "inner-product", False), ("oracle", "backdoor", False)]  # fmt: skip


@pytest.mark.parametrize(("name", "attack", "collude"), RENUMBERED)
def test_renumbered_clients_get_the_permuted_result(name, attack, collude):
    """Sums over clients are added in another order: some float32 roundings, grown over two rounds of training."""
    order = torch.tensor([3, 5, 0, 2, 1, 4])

    def run(data: Federation, malicious: Sequence[int]) -> Ended:
        kind = ATTACKS[attack](malicious=malicious, collude=collude)
        return played(ALL[name], kind, data, participation=0.8, rounds=3)

    here, moved = run(SIX, [1, 2, 4]), run(SIX.renumbered(order), [3, 4, 5])
    assert furthest(moved.benign, here.models[order][~moved.malicious]) < 1e-4
    assert torch.equal(moved.links, here.links[order][:, order])
    others = run(replace(SIX.renumbered(order), keys=SIX.keys), [3, 4, 5])  # the same data under other identities
    assert furthest(others.benign, here.models[order][~others.malicious]) > 1e-3


# What may reach nobody


SENT_TO = [(name, payload) for name in ALL for payload in WHY if "dfedavgm," not in name or payload == "nan"]


@pytest.mark.parametrize(("name", "payload"), SENT_TO)
def test_a_payload_does_no_more_than_silence_and_names_its_sender(name, payload):
    """Where nothing is sent, or attackers are taken out or made honest, there is nobody to be named."""
    run = played(ALL[name], NonFinite(payload=payload, malicious=LIARS))
    named = set() if name in TALK_TO_NOBODY else {"2", "5"}
    for record in run.records:
        assert record["refused"].keys() == named
        assert all(WHY[payload] in reason for reason in record["refused"].values())
        assert record["silent"] == 0
    assert torch.isfinite(run.benign).all()
    assert torch.equal(run.benign, reference(name, Silent).benign)
    assert reference(name, Silent).records[0]["refused"] == {}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_finite_does_more_than_silence(name):
    heard = not torch.equal(reference(name, SignFlip).benign, reference(name, Silent).benign)
    assert heard == (name not in TALK_TO_NOBODY)


@pytest.mark.parametrize("payload", WHY)
@pytest.mark.parametrize("name", ["fedcbo", "fedcb2o", "dfedavgm"])
def test_colluding_does_not_carry_a_payload_to_anybody(name, payload):
    attack = NonFinite(payload=payload, malicious=LIARS, collude=True)
    assert torch.equal(played(ALL[name], attack).benign, reference(name, Silent).benign)


@pytest.mark.parametrize("attack", [NonFinite, Silent])
@pytest.mark.parametrize("name", sorted(METHODS.keys() - TALK_TO_NOBODY))
def test_a_round_of_attackers_alone_leaves_everything_as_it_was(name, attack):
    config = parse({"method": ALL[name], "attack": attack(malicious=LIARS), "train": SHORT}, own_data=True)
    with World.of(config, SIX, network) as world:
        before = {key: value.clone() for key, value in world.fleet.memory().items()}
        state = run_round(world.method, world.fleet, world.before.state, torch.tensor(LIARS), Moment(0, 0))
        assert all(torch.equal(state[key], value) for key, value in world.before.state.items())
        assert all(torch.equal(world.fleet.memory()[key][BENIGN], before[key][BENIGN]) for key in before)


def test_a_round_of_attackers_alone_who_send_something_changes_the_common_model():
    config = parse({"method": FedAvg(), "attack": SignFlip(malicious=LIARS), "train": SHORT}, own_data=True)
    with World.of(config, SIX, network) as world:
        state = run_round(world.method, world.fleet, world.before.state, torch.tensor(LIARS), Moment(0, 0))
        assert furthest(state["theta"], world.before.state["theta"]) > 1e-3


SUMMARIES = [("fedcbo", "nan"), ("dfedavgm", "shape"), ("fedavg", "huge"), ("local", "nan"), ("oracle-min", "nan")]


@pytest.mark.parametrize(("name", "payload"), SUMMARIES)
def test_the_summary_of_a_run_names_them(name, payload, tmp_path):
    attack = NonFinite(payload=payload, malicious=LIARS)
    tables = {"rounds": 3, "method": ALL[name], "train": SHORT, "attack": attack}
    run = coterie.run(tables, federation=SIX, model=network, out=tmp_path / "out", display=Listener())
    refused = run.summary["refused"]
    assert refused.keys() == (set() if name in TALK_TO_NOBODY else {"2", "5"})
    assert all(one["count"] == 3 and WHY[payload] in one["reason"] for one in refused.values())
    assert run.summary["attack"]["malicious"] == ([] if name == "oracle-min" else LIARS)


# What is checked besides models


class Answers:
    """Tasks that answer and remember what they are given."""

    @client_task
    def count(self, clients, memory, given):
        theta = torch.ones(len(clients), 2)
        said = {"loss": given["loss"], "examples": given["examples"], "start": clients.ids, "heard": clients.ids}
        return {"kept": given["kept"]}, {"publish": theta, **said}

    @client_task
    def judge(self, clients, memory, given):
        return {}, {"losses": given["loss"][:, None].expand(-1, 3)}


@pytest.mark.parametrize("attack", [NoAttack(malicious=[1]), SignFlip(malicious=[1]), Truthful(malicious=[1])])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("where", ["loss", "kept"])
def test_a_bad_number_beside_the_model_is_refused_like_a_model(where, bad, attack):
    said = {"loss": torch.ones(4), "kept": torch.zeros(4), "examples": torch.tensor([3, 4, 5, 6])}
    said[where][1] = bad
    memory = {"kept": torch.full((8,), 7.0)}
    with closing(fleet_of(attack, memory=memory)) as fleet:
        replies = fleet.answer(Ask(Answers().count, torch.arange(4), each=said), Moment(0, 0))
        assert replies.clients.tolist() == [0, 2, 3]
        assert replies["examples"].tolist() == [3, 5, 6]
        assert list(replies.refused) == [1]
        assert fleet.memory()["kept"].tolist() == [0.0, 7.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0]
        read = fleet.answer(Ask(TALK.listen, torch.tensor([0]), peers=torch.tensor([[1, 2]])), Moment(0, 0, 1))
        assert read["delivered"].tolist() == [[False, True]]
        judged = {**said, "loss": torch.ones(4).index_fill(0, torch.tensor(1), bad)}
        verdict = fleet.answer(Ask(Answers().judge, torch.arange(4), each=judged), Moment(0, 0, 2))
        assert (verdict.clients.tolist(), list(verdict.refused)) == ([0, 2, 3], [1])


def test_attackers_that_are_refused_for_different_reasons_are_all_named():
    said = {"loss": torch.tensor([1.0, torch.nan, 1.0, 1.0]), "kept": torch.zeros(4), "examples": torch.arange(1, 5)}
    attack = NonFinite(payload="huge", malicious=[1, 3])
    with closing(fleet_of(attack, memory={"kept": torch.zeros(8)})) as fleet:
        replies = fleet.answer(Ask(Answers().count, torch.arange(4), each=said), Moment(0, 0))
    assert replies.clients.tolist() == [0, 2]
    assert replies.refused == {1: "non-finite model or reply", 3: "a number larger than 1e+15"}


@pytest.mark.parametrize("attack", [NoAttack(malicious=[1]), SignFlip(malicious=[1]), Truthful(malicious=[1])])
def test_good_numbers_beside_the_model_pass_untouched(attack):
    said = {"loss": numbers(4), "kept": torch.zeros(4), "examples": torch.tensor([3, 2**40, 1, 6])}
    with closing(fleet_of(attack, memory={"kept": torch.zeros(8)})) as fleet:
        replies = fleet.answer(Ask(Answers().count, torch.arange(4), each=said), Moment(0, 0))
        assert replies.refused == {}
        assert set(replies.values) == {"loss", "examples", "start", "heard"}
        assert replies["start"].tolist() == replies["heard"].tolist() == [0, 1, 2, 3]
        assert torch.equal(replies["loss"], said["loss"])
        assert torch.equal(replies["examples"], said["examples"])


# Who hears whom, by hand


class Talk:
    """Models are two equal numbers. Clients publish 10 + their number and ask for client 0."""

    @client_task
    def talk(self, clients, memory, given):
        wanted = torch.zeros(len(clients), len(given["budget"]), dtype=torch.int64)
        return {}, {"publish": (10.0 + clients.ids)[:, None].expand(-1, 2), "wanted": wanted}

    @client_task
    def send(self, clients, memory, given):
        """The same to a coordinator that averages."""
        return {}, {"theta": (10.0 + clients.ids)[:, None].expand(-1, 2), "examples": clients.examples}

    @client_task
    def listen(self, clients, memory, given):
        peers = given.downloaded
        first = peers.mix(torch.ones(peers.ids.shape) * peers.delivered, otherwise=torch.zeros(len(clients), 2))
        return {}, {"heard": first[:, 0], "delivered": peers.delivered}

    @client_task
    def listen_and_talk(self, clients, memory, given):
        memory, reply = self.listen(clients, memory, given)
        return memory, {**reply, "publish": (100.0 + clients.ids)[:, None].expand(-1, 2)}

    @merging_task
    def forget(self, clients, memory, given):
        return {"theta": torch.full_like(memory["theta"], -1.0)}, {}


TALK = Talk()
COUNTS = (7, 5, 6, 8, 5, 4, 3, 2)
EIGHT = federation(COUNTS)  # even clients are one cluster, odd ones the other
FOUR_LIARS = [0, 2, 3, 4]  # so that 6 is honest in the one, and 1, 5 and 7 in the other


def fleet_of(attack: Attack, data: Federation = EIGHT, memory: Tensors | None = None) -> AttackedFleet:
    """Clients whose models are two numbers: a hundred times their own."""
    entered = attack.enters(data, "lie", 0)
    theta = 100.0 * torch.arange(data.num_clients)[:, None].expand(-1, 2)
    kernel = choose_kernel("loop", Model(nn.Linear(1, 1)))
    inside = SimulatedFleet(entered, kernel, TRAIN, {"theta": theta} if memory is None else memory, threads=1)
    return AttackedFleet(inside, attack, entered)


def wanted_of(fleet: AttackedFleet, cohort: Sequence[int], budget: int, round: int = 0) -> dict[int, list[int]]:
    """Whom everybody of the cohort wants to download."""
    ask = Ask(TALK.talk, torch.tensor(cohort), shared={"budget": torch.zeros(budget)})
    replies = fleet.answer(ask, Moment(0, round))
    return dict(zip(replies.clients.tolist(), replies["wanted"].tolist(), strict=True))


class Colluding(Attack):
    """Nothing but colluding."""

    name: str = "colluding"
    collude: bool = True


def test_attackers_choose_attackers_of_their_cluster_first_then_its_honest_clients_and_nobody_else():
    with closing(fleet_of(Colluding(malicious=FOUR_LIARS))) as fleet:
        wanted = wanted_of(fleet, range(8), budget=5)
    assert (sorted(wanted[0][:2]), wanted[0][2:]) == ([2, 4], [6, NOBODY, NOBODY])
    assert (sorted(wanted[2][:2]), wanted[2][2:]) == ([0, 4], [6, NOBODY, NOBODY])
    assert (sorted(wanted[4][:2]), wanted[4][2:]) == ([0, 2], [6, NOBODY, NOBODY])
    assert (sorted(wanted[3][:3]), wanted[3][3:]) == ([1, 5, 7], [NOBODY, NOBODY])
    assert all(wanted[honest] == [0] * 5 for honest in (1, 5, 6, 7))


def test_attackers_that_do_not_collude_choose_as_the_method_says():
    with closing(fleet_of(NoAttack(malicious=FOUR_LIARS))) as fleet:
        assert wanted_of(fleet, range(8), budget=2) == {client: [0, 0] for client in range(8)}


def test_without_clusters_all_attackers_are_accomplices():
    with closing(fleet_of(Colluding(malicious=FOUR_LIARS), replace(EIGHT, clusters=None))) as fleet:
        assert sorted(wanted_of(fleet, range(8), budget=3)[3]) == [0, 2, 4]


def test_honest_clients_are_drawn_anew_in_each_round_and_all_of_them_are():
    with closing(fleet_of(Colluding(malicious=FOUR_LIARS))) as fleet:
        drawn = [wanted_of(fleet, range(8), budget=1, round=round)[3][0] for round in range(40)]
        attackers = [wanted_of(fleet, range(8), budget=1, round=round)[0][0] for round in range(40)]
        assert wanted_of(fleet, range(8), budget=1, round=7)[3] == [drawn[7]]
    assert set(drawn) == {1, 5, 7}
    assert set(attackers) == {2, 4}


@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.sets(st.integers(0, 7), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_accomplices_are_present_of_the_own_cluster_attackers_first_and_named_once(cohort, malicious, budget, round):
    with closing(fleet_of(Colluding(malicious=sorted(malicious)))) as fleet:
        wanted = wanted_of(fleet, sorted(cohort), budget, round)
    assert wanted.keys() == cohort
    for client in cohort & malicious:
        mates = {other for other in cohort - {client} if other % 2 == client % 2}
        named = [other for other in wanted[client] if other != NOBODY]
        assert wanted[client] == named + [NOBODY] * (budget - len(named))
        assert len(set(named)) == len(named) == min(budget, len(mates))
        assert set(named) <= mates
        assert set(named[: len(mates & malicious)]) <= malicious
        assert not set(named[len(mates & malicious) :]) & malicious


def after_averaging(attack: Attack, cohort: Sequence[int], budget: int) -> Tensor:
    """The clients' models [N] after they talked and listened."""
    with closing(fleet_of(attack)) as fleet:
        ask = Ask(TALK.talk, torch.tensor(cohort), shared={"budget": torch.zeros(budget)})
        talked = fleet.answer(ask, Moment(0, 0))
        fleet.answer(Ask(TALK.forget, talked.clients, peers=talked["wanted"]), Moment(0, 0, 1))
        theta = fleet.memory()["theta"]
        assert torch.equal(theta[:, 0], theta[:, 1])
        return theta[:, 0].clone()


def test_attackers_average_what_they_download_and_their_own_model_by_examples():
    models = after_averaging(Colluding(malicious=FOUR_LIARS), range(8), budget=3)
    expected = {
        0: (7 * 0 + 6 * 12 + 5 * 14 + 3 * 16) / 21,
        2: (6 * 200 + 7 * 10 + 5 * 14 + 3 * 16) / 21,
        4: (5 * 400 + 7 * 10 + 6 * 12 + 3 * 16) / 21,
        3: (8 * 300 + 5 * 11 + 4 * 15 + 2 * 17) / 19,
    }
    for client, model in expected.items():
        assert float(models[client]) == pytest.approx(model, rel=1e-6)
    assert models[[1, 5, 6, 7]].tolist() == [-1.0] * 4  # these do as the method says
    alone = after_averaging(NoAttack(malicious=FOUR_LIARS), range(8), budget=3)
    assert alone.tolist() == [-1.0] * 8


def test_attackers_average_only_what_they_get():
    """Client 4 is away, and nobody of client 3's cluster is there."""
    models = after_averaging(Colluding(malicious=FOUR_LIARS), [0, 2, 3, 6], budget=3)
    assert float(models[0]) == pytest.approx((7 * 0 + 6 * 12 + 3 * 16) / 16)
    assert float(models[2]) == pytest.approx((6 * 200 + 7 * 10 + 3 * 16) / 16)
    assert float(models[3]) == 300.0
    assert float(models[4]) == 400.0
    assert float(models[6]) == -1.0


@pytest.mark.parametrize("payload", WHY)
def test_those_who_collude_get_no_payload_of_each_other(payload):
    """Refused, they are not asked to listen; here they are asked all the same and get the honest model only."""
    attack = NonFinite(payload=payload, malicious=[0, 2, 4], collude=True)
    with closing(fleet_of(attack)) as fleet:
        ask = Ask(TALK.talk, torch.arange(8), shared={"budget": torch.zeros(3)})
        talked = fleet.answer(ask, Moment(0, 0))
        assert sorted(talked.refused) == [0, 2, 4]
        fleet.answer(Ask(TALK.forget, torch.tensor([0]), peers=torch.tensor([[2, 4, 6]])), Moment(0, 0, 1))
        assert fleet.memory()["theta"][0].tolist() == pytest.approx([3 * 16 / 10] * 2)


@pytest.mark.parametrize("name", ["fedcbo", "fedcb2o"])
def test_in_a_run_colluding_attackers_learn_from_their_own_cluster_only(name):
    data = federation((7, 5, 6, 8, 5, 4, 6, 6))
    strangers = (data.clusters[:, None] != data.clusters)[[2, 5]]
    for collude in (True, False):
        run = played(ALL[name], ATTACKS["label-flip"](malicious=[2, 5], collude=collude), data, rounds=3)
        assert bool((run.links[[2, 5]] * strangers).any()) != collude
        assert run.links[[2, 5]].any()


# Eavesdropping


def spy(*, eavesdropping: bool = True, malicious: Sequence[int] = FOUR_LIARS) -> tuple[Attack, list[Seen]]:
    """An attack that sends the truth, and what its attackers saw, cluster by cluster."""
    notes: list[Seen] = []

    class Spy(Attack):
        name: str = "spy"
        crafts = True
        eavesdrops = eavesdropping

        def craft(self, seen: Seen) -> Tensor:
            notes.append(seen)
            return seen.own

    return Spy(malicious=list(malicious)), notes


def firsts(models: Tensor) -> list[float]:
    return models[:, 0].tolist()


COHORTS = {
    "everybody": (range(8), [([10, 12, 14], [16]), ([13], [11, 15, 17])]),
    "some of each": ([0, 1, 3, 6, 7], [([10], [16]), ([13], [11, 17])]),
    "no attacker of the odd": ([1, 4, 5, 6], [([14], [16])]),
    "no honest one of the even": ([2, 3, 4, 5], [([12, 14], []), ([13], [15])]),
    "attackers only": ([0, 3], [([10], []), ([13], [])]),
    "honest only": ([1, 5, 6], []),
}


@pytest.mark.parametrize("task", [TALK.talk, TALK.send])
@pytest.mark.parametrize("cohort", COHORTS)
def test_attackers_hear_what_honest_clients_of_their_cluster_send(cohort, task):
    present, expected = COHORTS[cohort]
    attack, notes = spy()
    with closing(fleet_of(attack)) as fleet:
        ask = Ask(task, torch.tensor(list(present)), shared={"budget": torch.zeros(1)})
        replies = fleet.answer(ask, Moment(0, 5))
    assert [(firsts(seen.own), firsts(seen.others)) for seen in notes] == expected
    assert [firsts(seen.around) for seen in notes] == [others or own for own, others in expected]
    assert all(seen.round == 5 for seen in notes)
    assert replies.clients.tolist() == list(present)
    assert not any(key.startswith("attack.") for key in replies.values)
    if "theta" in replies.values:
        assert firsts(replies["theta"]) == [10 + client for client in present]


def test_attackers_that_do_not_eavesdrop_hear_nobody():
    attack, notes = spy(eavesdropping=False)
    with closing(fleet_of(attack)) as fleet:
        fleet.answer(Ask(TALK.send, torch.arange(8)), Moment(0, 0))
    assert [firsts(seen.own) for seen in notes] == [[10, 12, 14], [13]]
    assert all(len(seen.others) == 0 for seen in notes)


def test_without_clusters_attackers_hear_all_honest_clients():
    attack, notes = spy()
    with closing(fleet_of(attack, replace(EIGHT, clusters=None))) as fleet:
        fleet.answer(Ask(TALK.send, torch.arange(8)), Moment(0, 0))
    assert [(firsts(seen.own), firsts(seen.others)) for seen in notes] == [([10, 12, 13, 14], [11, 15, 16, 17])]


@pytest.mark.parametrize("name", ["fedcbo", "fedcb2o", "fedavg", "oracle", "dfedavgm"])
def test_in_a_run_attackers_hear_what_the_honest_train_and_know_where_they_began(name):
    """In the first round everybody starts from one model and trains as alone."""
    attack, notes = spy(malicious=LIARS)
    played(ALL[name], attack, rounds=2)
    even, odd, *later = notes
    alone = played(Local(), None, rounds=1).models
    assert torch.equal(even.others, alone[[0, 4]])
    assert torch.equal(odd.others, alone[[1, 3]])
    assert torch.equal(torch.cat([even.own, odd.own]), alone[LIARS])
    assert all(torch.equal(seen.start, mlp().initial(0)[None]) for seen in (even, odd))
    assert not any(torch.equal(seen.start, mlp().initial(0)[None]) for seen in later)
    assert len(later) == 2


def test_training_in_the_second_round_begins_where_the_first_round_ended():
    attack, notes = spy(malicious=LIARS)
    after_one = played(FedAvg(), attack, rounds=1).state["theta"]
    played(FedAvg(), attack, rounds=2)
    assert [seen.round for seen in notes] == [0, 0, 0, 0, 1, 1]
    assert all(torch.equal(seen.start, after_one[None]) for seen in notes[4:])


@pytest.mark.parametrize("attack", [NoAttack, Truthful, SignFlip])
def test_what_is_published_in_an_exchange_reaches_nobody_before_the_next(attack):
    """Attackers listen like everybody; client 0 asks an honest one, client 1 an attacker."""
    with closing(fleet_of(attack(malicious=[0, 5]))) as fleet:
        fleet.answer(Ask(TALK.talk, torch.arange(8), shared={"budget": torch.zeros(1)}), Moment(0, 0))
        ask = Ask(TALK.listen_and_talk, torch.tensor([0, 1, 5]), peers=torch.tensor([[1], [5], [0]]))
        assert fleet.answer(ask, Moment(0, 0, 1))["heard"].tolist() == [11.0, 15.0, 10.0]
        assert fleet.answer(ask, Moment(0, 0, 2))["heard"].tolist() == [101.0, 105.0, 100.0]


# Silent and stale


@pytest.mark.parametrize("cohort", [range(8), [0, 1, 2, 6], [0, 3, 4], [1, 6]])
def test_the_silent_are_absent_without_being_refused_and_remember_what_they_did(cohort):
    honest = [client for client in cohort if client not in FOUR_LIARS]
    with closing(fleet_of(Silent(malicious=FOUR_LIARS))) as fleet:
        before = fleet.memory()["theta"].clone()
        talked = fleet.answer(Ask(TALK.talk, torch.tensor(cohort), shared={"budget": torch.zeros(1)}), Moment(0, 0))
        assert talked.clients.tolist() == honest
        assert talked.refused == {}
        for client in honest:
            ask = Ask(TALK.listen, torch.tensor([client]), peers=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]]))
            heard = fleet.answer(ask, Moment(0, 0, 1))["delivered"]
            assert heard.tolist() == [[other in honest for other in range(8)]]
        fleet.answer(Ask(TALK.forget, torch.tensor(cohort)), Moment(0, 0, 2))
        assert torch.equal(fleet.memory()["theta"][FOUR_LIARS], before[FOUR_LIARS])
        assert fleet.memory()["theta"][honest].tolist() == [[-1.0, -1.0]] * len(honest)


@pytest.mark.parametrize(
    "name", ["fedavg", "ifca", "oracle", "local", *(n for n in DEFENDED if n.startswith("fedavg"))]
)
def test_those_who_wait_for_nobody_end_as_if_the_silent_were_not_there(name):
    there = reference(name, Silent)
    without = played(ALL[name], None, SIX.only(torch.tensor(BENIGN)))
    assert torch.equal(there.benign, without.models)
    assert [record["silent"] for record in there.records] == [2, 2]
    assert [record["refused"] for record in there.records] == [{}, {}]
    if name in METHODS:  # a defence may end there anyhow
        assert torch.equal(reference(name, NoAttack).benign, without.models) == (name == "local")


def test_a_stale_attacker_sends_what_it_had_until_it_is_time_for_something_new():
    """Its model is the round's number, so that it can be told what was sent; it is away in the rounds 0 and 4."""
    said = []
    with closing(fleet_of(Stale(age=3, malicious=[2, 3]))) as fleet:
        for round in range(8):
            cohort = [1, 3] if round in (0, 4) else [1, 2, 3]
            mine = torch.full((len(cohort), 2), float(round + 1))
            replies = fleet.answer(Ask(Echo().echo, torch.tensor(cohort), each={"mine": mine}), Moment(0, round))
            said.append(dict(zip(replies.clients.tolist(), firsts(replies["theta"]), strict=True)))
    assert [one[1] for one in said] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one[3] for one in said] == [1, 1, 1, 4, 4, 4, 7, 7]
    assert [one.get(2) for one in said] == [None, 2, 2, 4, None, 4, 7, 7]


class Echo:
    @client_task
    def echo(self, clients, memory, given):
        return {}, {"theta": given["mine"]}


STALE = SMALL | {"rounds": 6, "participation": 0.8, "attack": {"name": "stale", "age": 5, "malicious": [1, 2, 4]}}


@pytest.mark.parametrize("method", [{"name": "fedcbo", "download": 2}, {"name": "fedavg"}], ids=lambda one: one["name"])
def test_a_stale_attack_goes_on_where_it_was_interrupted(tmp_path, method, monkeypatch):
    """After round 3 attackers still send the models of the first; a fleet that forgets them sends others."""
    tables = STALE | {"method": method}
    coterie.run(tables, out=tmp_path / "whole", display=Listener())
    assert not coterie.run(tables, out=tmp_path / "out", display=Listener(interrupt_after=3)).completed
    shutil.copytree(tmp_path / "out", tmp_path / "forgetful")
    listener = Listener()
    assert coterie.run(tmp_path / "out", resume=True, display=listener).completed
    assert listener.rounds == [4, 5, 6]
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    restore = AttackedFleet.restore
    monkeypatch.setattr(AttackedFleet, "restore", lambda fleet, memory: restore(fleet, without_sent(memory)))
    coterie.run(tmp_path / "forgetful", resume=True, display=Listener())
    assert results(tmp_path / "forgetful") != results(tmp_path / "whole")


def without_sent(memory: Tensors) -> Tensors:
    assert SENT in memory
    return {name: value for name, value in memory.items() if name != SENT}


def test_what_was_sent_is_remembered_by_those_who_need_it_and_forgotten_on_going_back_before_it():
    with closing(fleet_of(Stale(malicious=[2, 3]))) as fleet:
        before = {name: value.clone() for name, value in fleet.memory().items()}
        assert SENT not in before
        fleet.answer(Ask(TALK.send, torch.arange(8)), Moment(0, 0))
        assert fleet.memory()[SENT].tolist() == [[12.0, 12.0], [13.0, 13.0]]
        fleet.restore(before)
        assert SENT not in fleet.memory()
    with closing(fleet_of(SignFlip(malicious=[2, 3]))) as fleet:
        fleet.answer(Ask(TALK.send, torch.arange(8)), Moment(0, 0))
        assert SENT not in fleet.memory()
