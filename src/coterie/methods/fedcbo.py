"""FedCBO: clients drift to a loss-weighted consensus of downloaded peers, and clusters appear by themselves."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import gibbs
from coterie.core import Ask, Exchanges, Given, State, Tensors, client_task, merging_task
from coterie.errors import ConfigError, explain
from coterie.peers import MeetsPeers
from coterie.randomness import Moment


class FedCBO(MeetsPeers):
    """Clients drift to a loss-weighted consensus of downloaded peers: fedcbo-jmlr.txt, Algorithms 1 and 2.

    theta_j <- theta_j - lambda_1 gamma (theta_j - m_j),  m_j = sum_i w_i theta_i,  w_i ~ exp(-alpha L_j(theta_i)).

    Differs from the paper: the likelihood's sign (see peers.py); the defaults of alpha and of the exploration, which
    learn faster at equal rounds (docs/results.md shows both). The authors' program adds up the mean losses of two
    batches, so their alpha = 10 is about 20 on the mean loss used here.
    """

    name: Literal["fedcbo"] = "fedcbo"
    alpha: float = Field(3.0, ge=0, le=1e6)
    """how sharply a lower loss counts in the consensus, (21)"""
    selection: Literal["epsilon-greedy", "likelihood"] = "epsilon-greedy"
    """how a client chooses peers: epsilon-greedy, Remark 6, or by a sampling likelihood as in fedcb2o.txt"""
    noise: Literal["none", "isotropic", "anisotropic"] = "none"
    """noise of the consensus step: isotropic (70) or anisotropic (71)"""
    noise_level: float = Field(0.0, ge=0, le=1e6)
    """sigma_1 sqrt(gamma) in (70) and (71)"""

    @model_validator(mode="after")
    def _refuse_noise_without_level(self) -> Self:
        if self.noise != "none" and self.noise_level == 0.0:
            allowed = f"above 0 with {self.noise} noise"
            raise ConfigError(explain("method.noise_level", self.noise_level, allowed))
        return self

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(memory["theta"])  # Algorithm 1, lines 6 to 8
        wanted = self.selector.choose(clients, memory["liking"], given["cohort"], self.download)
        return {**memory, "theta": theta}, {"publish": theta, "wanted": wanted}

    @merging_task
    def move_to_consensus(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        losses = peers.losses(clients)  # [C, M]
        liking = self.selector.learn(memory["liking"], clients, theta, peers, losses)  # (23)
        weights = gibbs(self.with_own(losses, lambda: clients.loss(theta)), self.alpha)  # (21)
        away = self.away(theta, peers, weights)
        return {"theta": theta - self.consensus_step * away + self._noise(clients, away), "liking": liking}, {}  # (22)

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"cohort": cohort})
        yield Ask(self.move_to_consensus, trained.clients, peers=trained["wanted"])
        return state

    def _noise(self, clients: Clients, away: Tensor) -> Tensor | float:
        """(70): the length of the step times normals; (71): each coordinate's step times its own. Parameters only."""
        if self.noise == "none" or self.noise_level == 0.0:
            return 0.0
        drawn = away.new_zeros(away.shape)
        drawn[:, : clients.num_parameters] = clients.normal("consensus noise", clients.num_parameters)
        length = away if self.noise == "anisotropic" else away[:, : clients.num_parameters].norm(dim=1, keepdim=True)
        return drawn * length * self.noise_level
