"""FedAvg: one model for all, the mean of what clients make of it; or, where some may lie, a robust kind of mean."""

from typing import Literal

import torch
from torch import Tensor

from coterie.clients import Clients
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.randomness import Moment, bits
from coterie.robust.defence import Defended, middle

JURY = 5  # clients that judge all models for sageflow


class FedAvg(Defended):
    """The clients of a round train the common model; the next is their mean by examples (McMahan et al. 2017).

    Differs from the paper of sageflow: the server has no data of its own; a few clients, drawn anew each round, judge
    the models by theirs, and the median of what they say counts.
    """

    name: Literal["fedavg"] = "fedavg"

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        return {"theta": setting.initial(0), "group": torch.zeros(setting.num_clients, dtype=torch.int64)}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(given["theta"].expand(len(clients), -1))
        return {}, {"theta": theta, "examples": clients.examples}

    @client_task
    def judge(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        models = clients.kernel.evaluation_copy(given["models"])
        every = torch.arange(len(models), device=models.device).expand(len(clients), -1)
        losses, entropies = clients.losses(models, every), clients.entropies(models, every)
        return {}, {"losses": losses.nan_to_num(nan=1e9).clamp(max=1e9), "entropies": entropies.nan_to_num(nan=1e9)}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"theta": state["theta"]})
        models, weight = trained["theta"], trained["examples"]
        if self.aggregation == "sageflow":
            jury = trained.clients[bits(torch.tensor(moment.key("jury")), len(models)).argsort()[:JURY]].sort().values
            verdict = yield Ask(self.judge, jury, shared={"models": models})
            weight = self.trusted(middle(verdict["entropies"]), middle(verdict["losses"]), weight)
        return {**state, "theta": self.aggregate(models, weight, state["theta"])}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["theta"].expand(len(clients), -1)
