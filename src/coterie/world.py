"""The parts of a run, assembled from a configuration and seen to fit together."""

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.config import Config
from coterie.core import Fleet, Method, Setting
from coterie.data import Scenario
from coterie.errors import ConfigError, explain
from coterie.federation import Federation
from coterie.fleets.attacked import AttackedFleet
from coterie.fleets.simulated import SimulatedFleet
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.models.base import ModelOptions
from coterie.robust.attacks import Attack, Role
from coterie.training import ChoosesPeers, beginning

Network = nn.Module | Callable[[], nn.Module]  # a user's network, or a function that makes one


class World:
    """The assembled parts of a run."""

    def __init__(self, config: Config, federation: Federation, model: Model) -> None:
        self.config = config
        self.federation = federation.to(config.device)
        self.model = model
        model.module.to(config.device)  # whose frozen part is no client's
        self.method = cast(Method, config.method)
        sizes = self.federation.train.count
        equal = bool((sizes == sizes[0]).all())
        axes = len(federation.input_shape)
        self.kernel = choose_kernel(
            config.kernel, model, config.device, config.precision, equal_sizes=equal, example_axes=axes
        )
        initial = lambda number: model.initial(config.seed, number).to(config.device)  # noqa: E731
        self.setting = Setting(federation.num_clients, initial, self.federation.keys, self.federation.clusters)
        _check_presence(config, federation.num_clients)
        _check_budget(self.method, config, self._fewest())
        self.before = beginning(self.method, self.setting)
        memory = self.method.client_memory(self._starts(), federation.num_clients)
        self.fleet: Fleet = SimulatedFleet(
            self.federation,
            self.kernel,
            config.train,
            memory,
            block=config.block,
            threads=config.threads,
        )
        if config.attack is not None and _role(config) == "lie":
            self.fleet = AttackedFleet(self.fleet, cast(Attack, config.attack), self.federation)

    @staticmethod
    def of(config: Config, federation: Federation | None, module: Network | None) -> "World":
        """Build what the configuration names, or take what was given, and see that it fits together."""
        _check_device(config.device)
        if not isinstance(federation, Federation | None):
            raise ConfigError(
                explain("federation", type(federation).__name__, "a Federation", "Make one by Federation.from_arrays.")
            )
        federation = unattacked(config) if federation is None else federation
        if config.attack is not None:
            _check_own_examples(config)
            federation = cast(Attack, config.attack).enters(federation, _role(config), config.seed)
        if module is None:
            module = cast(ModelOptions, config.model).maker(federation)
        model = Model(module, "cross_entropy" if federation.num_classes else "mse")
        model.check_fits(federation.train.x[0, :2], federation.train.y[0, :2], federation.num_classes)
        return World(config, federation, model)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exception: object) -> None:
        self.fleet.close()

    def present(self, round: int) -> Tensor | None:
        """[N] bool: who is there in a round, counted from 1; None if everybody is."""
        if not self.config.presence:
            return None
        there = torch.ones_like(self.federation.keys, dtype=torch.bool)
        for stay in self.config.presence:
            there[stay.clients] = stay.joins <= round < (stay.leaves or round + 1)
        return there

    def _fewest(self) -> int:
        """The clients of the round in which fewest are there; a round without any is refused."""
        changes = {1, *(stay.joins for stay in self.config.presence), *(s.leaves or 1 for s in self.config.presence)}
        counts = {}
        for round in sorted(change for change in changes if change <= self.config.rounds):
            there = self.present(round)
            counts[round] = self.federation.num_clients if there is None else int(there.sum())
        if not min(counts.values()):
            empty = min(counts, key=counts.__getitem__)
            raise ConfigError(explain("presence", f"nobody in round {empty}", "at least one client in every round"))
        return min(counts.values())

    def description(self) -> dict[str, Any]:
        """The resolved configuration, with names for what was given as objects."""
        tables = self.config.model_dump(mode="json")
        tables["scenario"] = tables["scenario"] or {
            "name": self.federation.name,
            "clients": self.federation.num_clients,
        }
        tables["model"] = tables["model"] or {"name": type(self.model.module).__name__}
        return tables

    def fingerprint(self) -> str:
        """A checksum of what is learned from, of the model's shape and its frozen part: a run is resumed with nothing
        else."""
        digest = hashlib.sha256(repr(self.model.layout).encode())
        for parameter in self.model.module.parameters():
            if not parameter.requires_grad:
                digest.update(parameter.detach().cpu().contiguous().numpy().data)
        for examples in filter(None, (self.federation.train, self.federation.validation)):
            for tensor in (examples.x, examples.y, examples.count):
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _starts(self) -> Tensor:
        """[N, P]: the clients' initial models."""
        if self.config.initial == "common":
            return self.setting.initial(0).expand(self.federation.num_clients, -1)
        return torch.stack([self.setting.initial(1 + key) for key in self.federation.keys.tolist()])


def unattacked(config: Config) -> Federation:
    """The data of the scenario, as it is before an attacker touches it."""
    scenario = cast(Scenario, config.scenario)
    attackers = cast(Attack, config.attack).attackers(scenario.cluster_of()) if config.attack is not None else {}
    return scenario.build(config.seed, attackers)


def _role(config: Config) -> Role:
    """What attackers do under this method: the oracles take them out or make them honest."""
    role: Role = getattr(config.method, "attackers", "lie")
    return role


def _check_own_examples(config: Config) -> None:
    """Only a scenario can give malicious clients another number of examples."""
    examples = cast(Attack, config.attack).malicious_examples
    if config.scenario is None and examples is not None:
        do = "Give those clients as many in the data, and name them in attack.malicious."
        raise ConfigError(explain("attack.malicious_examples", examples, "nothing with data of your own", do))


def _check_device(device: str) -> None:
    """See that torch can compute there."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # torch has many kinds for this
        raise ConfigError(explain("device", device, "a torch device of this machine, such as cpu or cuda")) from None


def _check_presence(config: Config, num_clients: int) -> None:
    """Only clients that exist join and leave, each in one table."""
    named = [client for stay in config.presence for client in stay.clients]
    for client in named:
        if client >= num_clients or named.count(client) > 1:
            raise ConfigError(explain("presence.clients", client, f"0 to {num_clients - 1}, each in one table only"))


def _check_budget(method: Method, config: Config, num_clients: int) -> None:
    """Nobody can download more peers than take part in a round."""
    cohort = max(1, round(config.participation * num_clients))
    if isinstance(method, ChoosesPeers) and method.download > cohort - 1:
        allowed = f"1 to {cohort - 1}" if cohort > 1 else "nothing here"
        allowed += f" ({cohort} of the clients take part in a round, and nobody downloads itself)"
        do = "Lower it, or raise scenario.clients or participation."
        raise ConfigError(explain("method.download", method.download, allowed, do))
