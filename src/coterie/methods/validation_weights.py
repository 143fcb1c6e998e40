"""Collaboration weights from validation: clients try all models on their own examples and mix what does well."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import gibbs
from coterie.core import NOBODY, Ask, Exchanges, Given, Setting, State, Tensors, client_task, merging_task
from coterie.options import Options
from coterie.randomness import Moment


class ValidationWeights(Options):
    """Clients train, then each becomes the mean of all models of the round, its own included, with weights
    softmax(-sharpness loss) on the examples it judges by (Wagner et al. 2024, by validation performance).

    Those are its validation examples, or its training examples where it has none: then its own model looks too good,
    and with sharp weights it learns alone. Costs n^2 evaluations a round. Batch statistics are averaged too.
    """

    name: Literal["validation_weights"] = "validation_weights"
    sharpness: float = Field(1.0, ge=0, le=1e6)
    """how sharply a lower loss counts; 0 is the plain mean of all models"""
    measure: Literal["loss", "perplexity"] = "loss"
    """what is compared: the mean loss, or its exponential, as in the program of cobo-neurips2024.txt, section 4.3"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    def start(self, setting: Setting) -> State:
        return {}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(memory["theta"])
        return {"theta": theta}, {"publish": theta}

    @merging_task
    def mix(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        losses = torch.cat([clients.loss(theta)[:, None], peers.losses(clients)], dim=1)  # [C, 1 + M], oneself first
        weights = gibbs(losses.exp() if self.measure == "perplexity" else losses, self.sharpness)
        own = weights[:, :1].where(weights.any(1, keepdim=True), 1.0)  # nobody's loss is finite: it stays as it is
        return {"theta": own * theta + peers.mix(weights[:, 1:], otherwise=torch.zeros_like(theta))}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        present = (yield Ask(self.local_update, cohort)).clients
        others = present.repeat(len(present), 1).fill_diagonal_(NOBODY)
        yield Ask(self.mix, present, peers=others)
        return state

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]
