"""DFedAvgM: decentralised FedAvg with momentum; neighbours of a graph average their models, and no server is needed."""

from functools import lru_cache
from random import Random
from typing import Any, Literal

import networkx
import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.core import NOBODY, Ask, Exchanges, Given, Setting, State, Tensors, client_task, merging_task
from coterie.errors import ConfigError, explain
from coterie.randomness import Moment, derive
from coterie.robust.defence import Defended

GraphName = Literal["ring", "grid", "random-regular", "complete"]


class DFedAvgM(Defended):
    """Clients train with momentum, then average their model with those of their neighbours (Sun et al. 2022).

    Differs from the paper: the mean is by examples, as in fedcb2o.txt, section 3.5, and not by a doubly stochastic
    matrix; with equal clients on a regular graph both are the same. The graph is drawn once for a run. With sageflow
    each client judges by its own data, and with norm-clipping it clips how far its neighbours are from its own model.
    """

    name: Literal["dfedavgm"] = "dfedavgm"
    graph: GraphName = "random-regular"
    """who is whose neighbour: ring, grid (as square as the number of clients allows), random-regular, complete"""
    degree: int = Field(6, ge=1, le=10**9)
    """random-regular: neighbours of each client, 2 or more; one more if this and the number of clients are odd"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    def start(self, setting: Setting) -> State:
        others = setting.num_clients - 1
        if self.graph == "random-regular" and not min(2, others) <= self.degree <= others:
            allowed = f"{min(2, others)} to {others}, so that all {setting.num_clients} clients hang together"
            raise ConfigError(explain("method.degree", self.degree, allowed, "Change it, or choose another graph."))
        return {"clients": torch.tensor(setting.num_clients)}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(memory["theta"])  # with the momentum of [train]
        return {"theta": theta}, {"publish": theta, "examples": clients.examples}

    @merging_task
    def average(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        weight = torch.cat([clients.examples[:, None], given["examples"] * peers.delivered], dim=1)  # oneself first
        if self.aggregation == "mean":
            share = weight / weight.sum(1, keepdim=True)
            nobody = torch.zeros_like(theta)
            return {"theta": share[:, :1] * theta + peers.mix(share[:, 1:], otherwise=nobody)}, {}
        if self.aggregation == "sageflow":
            entropies = torch.cat([clients.entropy(theta)[:, None], peers.entropies(clients)], dim=1)
            losses = torch.cat([clients.loss(theta)[:, None], peers.losses(clients)], dim=1)
            weight = torch.stack([self.trusted(*row) for row in zip(entropies, losses, weight)])
        present = torch.cat([torch.ones_like(peers.delivered[:, :1]), peers.delivered], dim=1)
        averaged = [
            self.aggregate(torch.cat([theta[row, None], peers.of(row)]), weight[row][present[row]], theta[row])
            for row in range(len(theta))
        ]
        return {"theta": torch.stack(averaged)}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort)
        everybody = neighbours(self.graph, int(state["clients"]), self.degree, moment.seed).to(cohort.device)
        peers = everybody[trained.clients]
        peers = peers.where(torch.isin(peers, cohort), NOBODY)  # who takes no part is not asked
        examples = everybody.new_zeros(len(everybody)).index_copy(0, trained.clients, trained["examples"])
        yield Ask(self.average, trained.clients, each={"examples": examples[peers.clamp(min=0)]}, peers=peers)
        return state

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]


@lru_cache(maxsize=8)
def neighbours(graph: GraphName, num_clients: int, degree: int, seed: int) -> Tensor:
    """[N, M] ids of each client's neighbours, NOBODY where it has fewer than others."""
    if graph == "random-regular":
        drawn = _random_regular(degree + degree * num_clients % 2, num_clients, seed)
    elif graph == "grid":
        rows = next(rows for rows in range(int(num_clients**0.5), 0, -1) if num_clients % rows == 0)
        drawn = networkx.grid_2d_graph(rows, num_clients // rows)
        drawn = networkx.convert_node_labels_to_integers(drawn, ordering="sorted")
    else:
        drawn = networkx.cycle_graph(num_clients) if graph == "ring" else networkx.complete_graph(num_clients)
    lists = [sorted(set(drawn[client]) - {client}) for client in range(num_clients)]
    widest = max(1, *map(len, lists))
    return torch.tensor([own + [NOBODY] * (widest - len(own)) for own in lists])


def _random_regular(degree: int, num_clients: int, seed: int) -> Any:
    """The first connected one of several. One with many edges is drawn by those it lacks, which are found sooner."""
    chance, lacking = Random(derive(seed, "graph") % 2**32), num_clients - 1 - degree
    while True:
        drawn = networkx.random_regular_graph(min(degree, lacking), num_clients, seed=chance)
        drawn = networkx.complement(drawn) if lacking < degree else drawn
        if networkx.is_connected(drawn):
            return drawn
