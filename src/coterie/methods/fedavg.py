"""FedAvg: one model for all, the mean of what clients make of it; or, where some may lie, a robust kind of mean.

FedProx holds the clients' training back at the common model; Ditto trains a personal model beside it.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.descent import Pull
from coterie.randomness import Moment, bits
from coterie.robust.defence import Defended, middle

JURY = 5  # clients that judge all models for sageflow


class _CommonModel(Defended):
    """The server holds one model, the mean by examples of what the clients of the round made of it."""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        return {"theta": setting.initial(0), "group": torch.zeros(setting.num_clients, dtype=torch.int64)}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        common = given["theta"].expand(len(clients), -1)
        return {}, {"theta": clients.train(common, self.hold(common)), "examples": clients.examples}

    def hold(self, common: Tensor) -> Pull | None:
        """What keeps the training near the common model [C, P]."""
        return None

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


class FedAvg(_CommonModel):
    """The clients of a round train the common model; the next is their mean by examples (McMahan et al. 2017).

    With [train] steps = 1 they average after every step, each with a momentum of its own. Differs from the paper of
    sageflow: the server has no data of its own; a few clients, drawn anew each round, judge the models by theirs, and
    the median of what they say counts.
    """

    name: Literal["fedavg"] = "fedavg"
    fine_tuning: int = Field(0, ge=0, le=10_000)
    """epochs for which a client trains the common model on its own examples before it predicts with it, and forgets
    the result: costs each client that training at every evaluation"""

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        common = super().serving(clients, memory, given)
        return clients.train(common, name="fine-tuning", epochs=self.fine_tuning) if self.fine_tuning else common


class FedProx(_CommonModel):
    """FedAvg whose clients minimise their loss plus mu/2 |theta - common|^2 (Li et al. 2020).

    Does nothing in the first step of a round, so with [train] steps = 1 it is FedAvg. Differs from the paper: with
    momentum the pull stays outside of it.
    """

    name: Literal["fedprox"] = "fedprox"
    attraction: float = Field(0.1, ge=0, le=1e6)
    """mu: how strongly the training is pulled to where it began; above 1 / train.lr it overshoots"""

    def hold(self, common: Tensor) -> Pull | None:
        return attracted(common, self.attraction)


class Ditto(_CommonModel):
    """Beside the common model of FedAvg each client trains a model of its own, pulled toward the common one as it was
    when the round began (Li et al. 2021, Algorithm 2): it minimises its loss plus lambda/2 |theta - common|^2.

    Differs from the paper: with momentum the pull stays outside of it. Differs from cobo-neurips2024.txt, whose program
    moves the common model by the gradients of a few clients at their personal models; here, as in the paper of Ditto,
    by what all clients of the round make of the common model itself.
    """

    name: Literal["ditto"] = "ditto"
    attraction: float = Field(0.1, ge=0, le=1e6)
    """lambda: how strongly the personal model is pulled toward the common one; 0 is local training, and above
    1 / train.lr it overshoots"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        common = given["theta"].expand(len(clients), -1)
        sent = clients.train(common, name="common")  # before the personal model: it is what attackers replace
        theta = clients.train(memory["theta"], attracted(common, self.attraction))
        return {"theta": theta}, {"theta": sent, "examples": clients.examples}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]


def attracted(toward: Tensor, attraction: float) -> Pull | None:
    """A pull of this strength toward models [C, P]; none of strength 0, which leaves the plainer loop."""
    return Pull(toward, toward.new_full((len(toward), 1), attraction)) if attraction else None
