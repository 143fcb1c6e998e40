"""FedCB²O: FedCBO with a second objective, which keeps poisoned peers out of the consensus."""

from typing import Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from coterie.clients import Clients, Peers
from coterie.consensus import gibbs, in_quantile
from coterie.core import Ask, Exchanges, Given, State, Tensors, client_task, merging_task
from coterie.errors import ConfigError, explain
from coterie.peers import MeetsPeers
from coterie.randomness import Moment
from coterie.robust.criteria import CRITERIA


class FedCB2O(MeetsPeers):
    """FedCBO with a robustness criterion G in the weights: fedcb2o.txt, Algorithms 1 and 2.

    theta_j <- theta_j - lambda_1 gamma (theta_j - m_j),  m_j = sum_i w_i theta_i,  w_i ~ exp(-alpha G_j(theta_i)).
    The loss decides who is met: by a sampling likelihood, or as the quantile set of the slides, or by both.

    Differs from the paper: alpha is 2 instead of 10 and the consensus step whole instead of 0.04, as in the program
    that made its numbers.
    """

    name: Literal["fedcb2o"] = "fedcb2o"
    alpha: float = Field(2.0, ge=0, le=1e6)
    """how sharply a lower value of the criterion counts in the consensus, (3.13)"""
    selection: Literal["epsilon-greedy", "likelihood"] = "likelihood"
    """how a client chooses peers: by a sampling likelihood, Algorithm 2, or epsilon-greedy as in fedcbo-jmlr.txt"""
    criterion: str = "max_class_gap"
    """G, what makes a model suspicious: max_class_gap (3.15), class_entropy (the slides), average_loss (FedCBO)"""
    criterion_from: int = Field(0, ge=0, le=10**9)
    """T_G of Remark 3.7: in the rounds before, counted from 0, the average loss stands for G"""
    quantile: float | None = Field(None, gt=0, le=1)
    """beta: only this share of the downloaded models, those with the least loss, take part; unset: all of them"""
    quantile_slack: float = Field(0.0, ge=0, le=1e6)
    """delta_q in (1.4): how far above the quantile a loss may be"""

    @field_validator("criterion")
    @classmethod
    def _refuse_unknown(cls, criterion: str) -> str:
        if criterion not in CRITERIA:
            raise PydanticCustomError("unknown_criterion", "one of {names}", {"names": ", ".join(CRITERIA)})
        return criterion

    @model_validator(mode="after")
    def _refuse_slack_without_quantile(self) -> Self:
        if self.quantile is None and self.quantile_slack:
            allowed = "0 without method.quantile, which it widens"
            raise ConfigError(explain("method.quantile_slack", self.quantile_slack, allowed, "Set both, or none."))
        return self

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(memory["theta"])  # Algorithm 1, LocalUpdate
        wanted = self.selector.choose(clients, memory["liking"], given["cohort"], self.download)
        return {**memory, "theta": theta}, {"publish": theta, "wanted": wanted}

    @merging_task
    def move_to_consensus(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        losses, against = self._judge(clients, theta, peers)
        liking = self.selector.learn(memory["liking"], clients, theta, peers, losses)  # (3.12)
        away = self.away(theta, peers, gibbs(against, self.alpha))  # (3.13)
        return {"theta": theta - self.consensus_step * away, "liking": liking}, {}  # (3.14)

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"cohort": cohort})
        yield Ask(self.move_to_consensus, trained.clients, peers=trained["wanted"])
        return state

    def _judge(self, clients: Clients, theta: Tensor, peers: Peers) -> tuple[Tensor, Tensor]:
        """The peers' losses [C, M], and what speaks against the own model and theirs [C, 1 + M]."""
        if self.criterion == "average_loss" or clients.moment.round < self.criterion_from:
            losses = peers.losses(clients)
            against = self.with_own(self._filtered(losses, losses), lambda: clients.loss(theta))
            return losses, against
        by_class, own = peers.class_losses(clients), clients.class_loss(theta)
        losses = by_class.average
        suspicion = self._filtered(CRITERIA[self.criterion](by_class, own), losses)
        usable = torch.isfinite(suspicion) & torch.isfinite(losses)  # whatever G says of a peer that is not there
        suspicion = suspicion.where(usable, torch.inf)
        return losses, self.with_own(suspicion, lambda: suspicion.amin(1))  # the own model trusted as the best peer's

    def _filtered(self, against: Tensor, losses: Tensor) -> Tensor:
        """Infinite for those outside the quantile set."""
        if self.quantile is None:
            return against
        return against.masked_fill(~in_quantile(losses, self.quantile, self.quantile_slack), torch.inf)
