"""FedCBO: clients drift to a loss-weighted consensus of downloaded peers, and clusters appear by themselves."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import gibbs
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.options import Options
from coterie.peers import EpsilonGreedy
from coterie.randomness import Moment


class FedCBO(Options):
    """Clients drift to a loss-weighted consensus of downloaded peers: fedcbo-jmlr.txt, Algorithms 1 and 2.

    theta_j <- theta_j - lambda_1 gamma (theta_j - m_j),  m_j = sum_i w_i theta_i,  w_i ~ exp(-alpha L_j(theta_i)).

    Differs from the paper: the likelihood's sign (see peers.py); the defaults of alpha and of the exploration, which
    learn faster at equal rounds (docs/results.md shows both). The authors' program adds up the mean losses of two
    batches, so their alpha = 10 is about 20 on the mean loss used here.
    """

    name: Literal["fedcbo"] = "fedcbo"
    download: int = Field(10, ge=1)
    """M: how many peers each client downloads in a round"""
    alpha: float = Field(3.0, ge=0, allow_inf_nan=False)
    """how sharply a lower loss counts in the consensus, (21)"""
    consensus_step: float = Field(1.0, ge=0, le=1)
    """lambda_1 gamma: how far a client goes to the consensus, (22); 1 adopts it, 0 learns alone"""
    epsilon: float = Field(0.5, ge=0, le=1)
    """share of the downloads chosen at random in the first round, Remark 6"""
    epsilon_decay: float = Field(0.15, ge=0)
    """by how much that share falls each round; the paper's is 0.01"""
    epsilon_last: float = Field(0.1, ge=0, le=1)
    """where it stops falling"""
    noise: Literal["none", "isotropic", "anisotropic"] = "none"
    """noise of the consensus step: isotropic (70) or anisotropic (71)"""
    noise_level: float = Field(0.0, ge=0, allow_inf_nan=False)
    """sigma_1 sqrt(gamma) in (70) and (71)"""

    @property
    def selection(self) -> EpsilonGreedy:
        """How a client chooses whom to download."""
        return EpsilonGreedy(self.epsilon, self.epsilon_decay, self.epsilon_last)

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta, "liking": theta.new_zeros(len(theta), num_clients)}

    def start(self, setting: Setting) -> State:
        return {}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta = clients.train(memory["theta"])  # Algorithm 1, lines 6 to 8
        wanted = self.selection.choose(clients, memory["liking"], given["cohort"], self.download)
        return {**memory, "theta": theta}, {"publish": theta, "wanted": wanted}

    @client_task
    def move_to_consensus(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        losses = peers.losses(clients)  # [C, M]
        consensus = peers.mix(gibbs(losses, self.alpha), otherwise=theta)  # (21)
        gained = clients.loss(theta)[:, None] - losses
        liking = self.selection.learn(memory["liking"], peers.ids, gained)  # (23)
        away = theta - consensus
        theta = theta - self.consensus_step * away + self._noise(clients, away)  # (22)
        return {"theta": theta, "liking": liking}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"cohort": cohort})
        yield Ask(self.move_to_consensus, trained.clients, peers=trained["wanted"])
        return state

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]

    def _noise(self, clients: Clients, away: Tensor) -> Tensor | float:
        """(70): the length of the step times normals; (71): each coordinate's step times its own. Parameters only."""
        if self.noise == "none" or self.noise_level == 0.0:
            return 0.0
        drawn = away.new_zeros(away.shape)
        drawn[:, : clients.num_parameters] = clients.normal("consensus noise", clients.num_parameters)
        length = away if self.noise == "anisotropic" else away[:, : clients.num_parameters].norm(dim=1, keepdim=True)
        return drawn * length * self.noise_level
