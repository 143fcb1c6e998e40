"""The oracles under attack: without the attackers, and with attackers who are honest."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.config import Config, parse
from coterie.federation import Federation
from coterie.methods import METHODS, Oracle, OracleMax, OracleMin
from coterie.randomness import Moment
from coterie.training import Progress, collect_models, rounds
from coterie.world import World
from tiny import CLASSES, FEATURES, TRAIN, federation, furthest

EIGHT = federation((7, 5, 6, 8, 9, 4, 10, 12))  # clusters 0 1 0 1 0 1 0 1
LIARS, HONEST = [1, 6, 7], torch.tensor([0, 2, 3, 4, 5])
ATTACKS: dict[str, dict[str, Any]] = {
    "label-flip": {"source": 0, "target": 1},
    "sign-flip": {},
    "scaling": {"factor": 2.0},
    "silent": {},
    "random": {},
}


@dataclass(frozen=True)
class Ended:
    """What is left of a run."""

    models: Tensor  # [N, P]
    last: Progress
    federation: Federation  # as the run had it


def settings(method: str, attack: str | None, liars: list[int], **more: Any) -> Config:
    tables: dict[str, Any] = {"method": {"name": method}, "train": TRAIN, "rounds": 3, "threads": 1, **more}
    if attack is not None:
        tables["attack"] = {"name": attack, "malicious": liars, **ATTACKS[attack]}
    return parse(tables, own_data=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def ended(
    method: str, attack: str | None = None, data: Federation = EIGHT, liars: list[int] = LIARS, **more: Any
) -> Ended:
    """A short run."""
    config = settings(method, attack, liars, **more)
    with World.of(config, data, network) as world:
        *_, last = rounds(
            world.method, world.fleet, world.setting, world.federation.keys, world.before, seed=config.seed,
            last=config.rounds, participation=config.participation, malicious=world.federation.malicious,
        )  # fmt: skip
        moment = Moment(config.seed, config.rounds - 1)
        models = collect_models(world.method, world.fleet, last.state, moment, world.model.layout.size)
        return Ended(models, last, world.federation)


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "silent"])
def test_oracle_min_is_the_oracle_of_a_federation_without_the_attackers(attack, participation):
    least = ended("oracle-min", attack, participation=participation)
    without = ended("oracle", None, EIGHT.only(HONEST), participation=participation)
    assert torch.equal(least.models, without.models)
    assert least.last.record["accuracy"] == without.last.record["accuracy"]
    assert torch.equal(least.last.links, without.last.links)
    assert furthest(ended("oracle", attack, participation=participation).models[HONEST], without.models) > 1e-3
    assert furthest(ended("oracle-max", attack, participation=participation).models[HONEST], without.models) > 1e-3


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("attack", ATTACKS)
def test_oracle_max_is_the_oracle_of_a_federation_in_which_nobody_attacks(attack, participation):
    most, peaceful = (
        ended(name, which, participation=participation) for name, which in (("oracle-max", attack), ("oracle", None))
    )
    assert torch.equal(most.models, peaceful.models)
    assert torch.equal(most.last.links, peaceful.last.links)
    assert furthest(ended("oracle", attack, participation=participation).models, peaceful.models) > 1e-3


def test_attackers_who_are_silent_leave_the_oracle_what_oracle_min_has():
    silent = ended("oracle", "silent").models
    assert torch.equal(ended("oracle-min", "silent").models, silent[HONEST])
    assert torch.equal(ended("oracle-min", "sign-flip").models, silent[HONEST])
    assert furthest(ended("oracle", "sign-flip").models, silent) > 1e-3


def test_oracle_min_is_the_mean_of_the_honest_by_hand():
    """One round; the trained models are those of clients who learn alone."""
    alone, counts = ended("local", rounds=1).models, EIGHT.train.count.float()
    least = ended("oracle-min", "sign-flip", rounds=1).models
    for place, client in enumerate(HONEST.tolist()):
        mates = torch.tensor([mate for mate in HONEST.tolist() if mate % 2 == client % 2])
        mean = (counts[mates] @ alone[mates]) / counts[mates].sum()
        torch.testing.assert_close(least[place], mean, atol=1e-6, rtol=1e-5)
    all_mates = torch.arange(0, 8, 2)
    assert furthest(least[0], (counts[all_mates] @ alone[all_mates]) / counts[all_mates].sum()) > 1e-2


def test_without_an_attack_the_three_are_one():
    oracle = ended("oracle").models
    for name in ("oracle-min", "oracle-max"):
        assert torch.equal(ended(name).models, oracle)
        assert furthest(ended(name, seed=1).models, oracle) > 1e-2


def test_the_record_speaks_of_those_who_would_be_honest_in_any_case():
    """Oracle-max has models for attackers, but they are not measured; oracle-min has no attackers."""
    measured = ended("oracle").last.per_client
    most, least = ended("oracle-max", "label-flip"), ended("oracle-min", "label-flip")
    assert torch.equal(most.last.per_client["accuracy"][HONEST], measured["accuracy"][HONEST])
    assert most.last.per_client["accuracy"][LIARS].isnan().all()
    honest = [measured["accuracy"][client].item() for client in HONEST]
    assert most.last.record["accuracy"]["mean"] == pytest.approx(sum(honest) / 5)
    assert measured["accuracy"].mean().item() != pytest.approx(sum(honest) / 5)
    assert not least.last.per_client["accuracy"].isnan().any()
    for run in (most, least):
        attack = run.last.record["attack"]
        assert 0.0 <= attack["source_accuracy"] + attack["success_rate"] <= 1.0
        assert attack["selected"] is attack["weight"] is None  # nobody chooses peers


def test_a_cluster_of_liars_only_may_be_taken_out():
    for liars, rest in (([0, 2, 4, 6], [1, 3, 5, 7]), ([1, 3, 5, 7], [0, 2, 4, 6])):
        without = ended("oracle", data=EIGHT.only(torch.tensor(rest)))
        assert torch.equal(ended("oracle-min", "sign-flip", liars=liars).models, without.models)
        assert furthest(ended("oracle-min", "sign-flip").models[:1], without.models[:1]) > 1e-3


def test_oracle_max_learns_from_all_examples_that_attackers_hold():
    """Of a scenario, in which they may hold more than others."""

    def ended_with(method: str, attack: str, examples: int) -> Tensor:
        config = parse({
            "method": {"name": method}, "rounds": 1, "threads": 1, "train": {"epochs": 1},
            "attack": {"name": attack, "malicious_per_cluster": 1, "malicious_examples": examples},
            "scenario": {"name": "rotated", "data": "digits", "clusters": 2, "clients": 6, "examples_per_client": 20},
        })  # fmt: skip
        with World.of(config, None, None) as world:
            *_, last = rounds(
                world.method, world.fleet, world.setting, world.federation.keys, world.before, seed=0, last=1
            )
            return last.state["centres"]

    peaceful = ended_with("oracle", "none", 60)
    assert torch.equal(ended_with("oracle-max", "label-flip", 60), peaceful)
    assert furthest(ended_with("oracle-max", "label-flip", 30), peaceful) > 1e-3
    assert furthest(ended_with("oracle", "label-flip", 60), peaceful) > 1e-3


def test_only_the_oracles_are_spared_attackers():
    roles = {name: getattr(method, "attackers", "lie") for name, method in METHODS.items()}
    assert {name: role for name, role in roles.items() if role != "lie"} == {
        "oracle-min": "absent",
        "oracle-max": "honest",
    }
    assert (OracleMin.attackers, OracleMax.attackers) == ("absent", "honest")
    assert not hasattr(Oracle, "attackers")
    for name, there in (("oracle", 8), ("oracle-max", 8), ("oracle-min", 5)):
        run = ended(name, "label-flip", rounds=1)
        assert run.federation.num_clients == there
        assert int(run.federation.malicious.sum()) == there - 5
        poisoned = (run.federation.train.y != EIGHT.train.y[run.federation.keys]).any(1).nonzero()[:, 0].tolist()
        assert poisoned == (LIARS if name == "oracle" else [])
