"""FedAvg: one model for all, the mean of what clients make of it."""

from typing import Literal

import torch
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import mean_by_group
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.options import Options
from coterie.randomness import Moment


class FedAvg(Options):
    """The clients of a round train the common model; the next is their mean by examples (McMahan et al. 2017)."""

    name: Literal["fedavg"] = "fedavg"

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        return {"theta": setting.initial(0), "group": torch.zeros(setting.num_clients, dtype=torch.int64)}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(given["theta"].expand(len(clients), -1))
        return {}, {"theta": theta, "examples": clients.examples}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"theta": state["theta"]})
        group = torch.zeros_like(trained["examples"])
        mean = mean_by_group(trained["theta"], group, trained["examples"], otherwise=state["theta"][None])
        return {**state, "theta": mean[0]}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["theta"].expand(len(clients), -1)
