"""How a client chooses whom to ask."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.clients import Clients
from coterie.core import NOBODY
from coterie.randomness import fold


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
        """[C, M] ids of the cohort [S], never oneself; NOBODY at the end where the cohort is too small.

        Differs from the paper: the random part is round(epsilon M) rather than its integer part.
        """
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

    def learn(self, liking: Tensor, peers: Tensor, gained: Tensor) -> Tensor:
        """P_i <- P_i + (L_own - L_i) for the peers met: fedcbo-slides-2024.txt (21), which favours low loss.

        Differs from the paper: fedcbo-jmlr.txt (23) prints the opposite sign, under which clients come to avoid their
        own cluster (accuracy 47 instead of 77 % in the authors' program). Losses that are not finite count as -1e6.
        """
        met = peers != NOBODY
        gained = torch.where(met, torch.nan_to_num(gained, nan=-1e6, neginf=-1e6, posinf=1e6), 0.0)
        return liking.scatter_add(1, peers.clamp(min=0), gained)

    def _surplus(self, places: Tensor, myself: Tensor) -> Tensor:
        """[C, M] bool: places that stand for oneself or repeat an earlier one, as happens if the cohort is small."""
        own = myself.gather(1, places)
        repeats = (places[:, :, None] == places[:, None, :]).tril(-1).any(2)
        return own | repeats


def _scores(clients: Clients, cohort: Tensor, purpose: str) -> Tensor:
    """[C, S] int64: a function of the pair's two keys, so that it does not depend on how clients are numbered."""
    return fold(clients.keys(purpose)[:, None], clients.population[cohort])
