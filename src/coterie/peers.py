"""How a client chooses whom to ask, and what it remembers of those it met."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients, Peers
from coterie.core import NOBODY, Given, Setting, State, Tensors
from coterie.options import Options
from coterie.randomness import fold

LEAST = 1e-30  # likelihood of a peer that was met and found useless: 0 stands for "never met"


class Selection(Protocol):
    """Chooses peers by what is remembered of them, the liking [C, N]; nothing is known of anybody at first (0)."""

    def choose(self, clients: Clients, liking: Tensor, cohort: Tensor, budget: int) -> Tensor:
        """[C, M] ids of the cohort [S], never oneself; NOBODY at the end where there are fewer than M."""
        ...

    def learn(self, liking: Tensor, clients: Clients, theta: Tensor, peers: Peers, losses: Tensor) -> Tensor:
        """The liking after peers were met, whose models have these losses [C, M]; theta [C, P] is the client's own."""
        ...


@dataclass(frozen=True)
class EpsilonGreedy:
    """A share epsilon of the budget at random, the rest the peers liked best: fedcbo-jmlr.txt, Remark 6.

    epsilon(round) = max(first - decay * round, last), rounds counted from 0. Ties of liking are broken at random,
    so that nobody is favoured by their number.
    """

    first: float
    decay: float
    last: float

    def exploration(self, round: int) -> float:
        """The share chosen at random in a round."""
        return max(self.first - self.decay * round, self.last)

    def choose(self, clients: Clients, liking: Tensor, cohort: Tensor, budget: int) -> Tensor:
        """Differs from the paper: the random part is epsilon M rounded to the nearest number, not cut off as in the
        authors' program."""
        num_random = round(self.exploration(clients.moment.round) * budget)
        myself = clients.ids[:, None] == cohort  # [C, S]
        explore = _scores(clients, cohort, "explore").masked_fill(myself, torch.iinfo(torch.int64).max)
        random = explore.argsort(dim=1)[:, :num_random]  # places in the cohort
        shuffled = _scores(clients, cohort, "ties").argsort(dim=1)
        taken = myself.scatter(1, random, True)
        liked = liking[:, cohort].masked_fill(taken, -torch.inf).gather(1, shuffled)
        best = shuffled.gather(1, liked.argsort(dim=1, descending=True, stable=True))[:, : budget - num_random]
        places = torch.cat([random, best], dim=1)
        wanted = cohort[places].masked_fill(self._surplus(places, myself), NOBODY)
        return F.pad(wanted, (0, budget - wanted.shape[1]), value=NOBODY)

    def learn(self, liking: Tensor, clients: Clients, theta: Tensor, peers: Peers, losses: Tensor) -> Tensor:
        """P_i <- P_i + (L_own - L_i) for the peers met: fedcbo-slides-2024.txt (21), which favours low loss.

        Differs from the paper: fedcbo-jmlr.txt (23) prints the opposite sign, under which clients come to avoid their
        own cluster (accuracy 47 instead of 77 % in the authors' program). A gain that is not finite counts as 1e6, with
        the sign that favours low loss. A peer that was asked and is silent counts as bad as the worst that answered, or
        it would be asked for ever.
        """
        gained = torch.nan_to_num(clients.loss(theta)[:, None] - losses, nan=-1e6, neginf=-1e6, posinf=1e6)
        worst = gained.masked_fill(~peers.delivered, torch.inf).amin(1, keepdim=True).clamp(max=0.0)
        gained = torch.where(peers.delivered, gained, worst)
        return _added(liking, peers.asked, gained)

    def _surplus(self, places: Tensor, myself: Tensor) -> Tensor:
        """[C, M] bool: places that stand for oneself or repeat an earlier one, as happens if the cohort is small."""
        own = myself.gather(1, places)
        repeats = (places[:, :, None] == places[:, None, :]).tril(-1).any(2)
        return own | repeats


@dataclass(frozen=True)
class ByLikelihood:
    """ProbSampling of fedcb2o.txt, Algorithm 2: whoever was never met first, then at random by likelihood P."""

    sharpness: float  # kappa
    memory: float  # zeta, how much the newest meeting counts

    def choose(self, clients: Clients, liking: Tensor, cohort: Tensor, budget: int) -> Tensor:
        """Those never met if there are any, uniformly and only them; else without replacement, by P normalised.

        Gumbel's trick: the M largest of log P_i + g_i, with g_i = -log(-log(u_i)), are such a draw.
        """
        known = liking[:, cohort].masked_fill(clients.ids[:, None] == cohort, torch.nan)  # [C, S], NaN is oneself
        strange = known == 0.0
        some_strange = strange.any(1, keepdim=True)
        allowed = torch.where(some_strange, strange, ~known.isnan())
        chance = (_scores(clients, cohort, "sample").double() * 2.0**-64 + 0.5).clamp(2.0**-60, 1.0 - 2.0**-53)
        score = torch.where(some_strange, 0.0, known.double().log()) - torch.log(-torch.log(chance))
        score = torch.where(allowed, score, -torch.inf)
        best = score.topk(min(budget, len(cohort)), dim=1)
        wanted = cohort[best.indices].masked_fill(best.values == -torch.inf, NOBODY)
        return F.pad(wanted, (0, budget - wanted.shape[1]), value=NOBODY)

    def learn(self, liking: Tensor, clients: Clients, theta: Tensor, peers: Peers, losses: Tensor) -> Tensor:
        """(3.12): P_i <- (1 - zeta) P_i + zeta exp(-kappa L_i) for the peers met.

        Differs from the paper: never quite 0, for those whose loss is huge or not finite and those who were asked and
        are silent; they would count as never met and be asked first in every round.
        """
        reward = torch.exp(-self.sharpness * losses).nan_to_num(nan=0.0, posinf=0.0).clamp(min=LEAST)
        known = liking.gather(1, peers.asked.clamp(min=0))
        learned = _added(liking, peers.asked, self.memory * (reward - known))
        return torch.where(liking > 0, learned.clamp(min=LEAST), learned)  # with zeta = 1 rounding would make it 0


def _added(liking: Tensor, peers: Tensor, change: Tensor) -> Tensor:
    """The liking [C, N] with a change [C, M] for the peers [C, M] that are somebody."""
    return liking.scatter_add(1, peers.clamp(min=0), torch.where(peers != NOBODY, change, 0.0))


def _scores(clients: Clients, cohort: Tensor, purpose: str) -> Tensor:
    """[C, S] int64: a function of the pair's two keys, so that it does not depend on how clients are numbered."""
    return fold(clients.keys(purpose)[:, None], clients.population[cohort])


class MeetsPeers(Options):
    """What methods have in common whose clients download some peers' models and step toward a mean of them."""

    download: int = Field(10, ge=1, le=10**9)
    """M: how many peers each client downloads in a round"""
    consensus_step: float = Field(1.0, ge=0, le=1)
    """lambda_1 gamma: how far a client goes to the consensus; 1 adopts it, 0 learns alone"""
    own_model: Literal["excluded", "included"] = "excluded"
    """whether a client's own model takes part in its consensus; the papers say no, the program of FedCB²O does it"""
    epsilon: float = Field(0.5, ge=0, le=1)
    """epsilon-greedy: share of the downloads chosen at random in the first round, fedcbo-jmlr.txt, Remark 6"""
    epsilon_decay: float = Field(0.15, ge=0, le=1)
    """epsilon-greedy: by how much that share falls each round; the paper's is 0.01"""
    epsilon_last: float = Field(0.1, ge=0, le=1)
    """epsilon-greedy: where it stops falling"""
    kappa: float = Field(2.0, ge=0, le=1e6)
    """likelihood: how sharply a lower loss makes a peer more likely to be met again, fedcb2o.txt (3.12)"""
    zeta: float = Field(0.5, gt=0, le=1)
    """likelihood: how much the newest meeting counts in what is remembered, fedcb2o.txt (3.12)"""

    selection: Literal["epsilon-greedy", "likelihood"]
    """how a client chooses peers: epsilon-greedy (FedCBO) or by a sampling likelihood (FedCB²O, ProbSampling)"""

    @property
    def selector(self) -> Selection:
        """How a client chooses whom to download."""
        if self.selection == "likelihood":
            return ByLikelihood(self.kappa, self.zeta)
        return EpsilonGreedy(self.epsilon, self.epsilon_decay, self.epsilon_last)

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta, "liking": theta.new_zeros(len(theta), num_clients)}

    def start(self, setting: Setting) -> State:
        return {}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]

    def away(self, theta: Tensor, peers: Peers, weights: Tensor) -> Tensor:
        """[C, P]: from the consensus to the models theta [C, P]. weights: [C, 1 + M], of the own model and then of the
        peers'; where they are all zero, because nobody's model can be used, the consensus is the own model."""
        own = weights[:, :1]
        return theta - (peers.mix(weights[:, 1:], otherwise=theta * (1.0 - own)) + own * theta)

    def with_own(self, of_peers: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """[C, 1 + M]: what speaks against each model [C, M], before it the own model's [C], infinite if it takes no
        part; `own` is asked for only if it does."""
        mine = own()[:, None] if self.own_model == "included" else torch.full_like(of_peers[:, :1], torch.inf)
        return torch.cat([mine, of_peers], dim=1)
