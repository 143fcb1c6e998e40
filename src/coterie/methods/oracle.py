"""The oracles: FedAvg inside the true clusters, which they are told."""

from typing import ClassVar, Literal

from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import mean_by_group
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.errors import ConfigError, explain
from coterie.options import Options
from coterie.randomness import Moment
from coterie.robust.attacks import Role


class _InsideClusters(Options):
    """FedAvg inside each true cluster."""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        if setting.clusters is None:
            allowed = "a scenario whose clusters are known (rotated, permuted, disjoint-classes)"
            raise ConfigError(
                explain("method.name", getattr(self, "name", ""), allowed, "Use another method or scenario.")
            )
        number_of_clusters = int(setting.clusters.max()) + 1
        return {"centres": setting.initial(0).repeat(number_of_clusters, 1), "group": setting.clusters}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(given["centres"][given["group"][clients.ids]])
        return {}, {"theta": theta, "examples": clients.examples}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared=state)
        group = state["group"][trained.clients]
        centres = mean_by_group(trained["theta"], group, trained["examples"], otherwise=state["centres"])
        return {**state, "centres": centres}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][given["group"][clients.ids]]


class Oracle(_InsideClusters):
    """FedAvg inside each true cluster: what knowing the clusters would give."""

    name: Literal["oracle"] = "oracle"


class OracleMin(_InsideClusters):
    """The oracle in a federation without its attackers, and so without their examples: fedcb2o.txt, section 3.5.

    Differs from the paper: the mean of the whole cluster, which the paper's DFedAvgM in one cluster approaches.
    """

    name: Literal["oracle-min"] = "oracle-min"
    attackers: ClassVar[Role] = "absent"


class OracleMax(_InsideClusters):
    """The oracle in a federation whose attackers are honest: the most that could be learned.

    Differs from the paper as OracleMin does.
    """

    name: Literal["oracle-max"] = "oracle-max"
    attackers: ClassVar[Role] = "honest"
