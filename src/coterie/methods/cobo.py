"""CoBo: pairs of clients find out whether their gradients agree, and those that do are drawn together."""

from collections.abc import Generator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients, Peers
from coterie.consensus import onto_simplex
from coterie.core import NOBODY, Ask, Exchanges, Given, Replies, Setting, State, Tensors, client_task
from coterie.descent import Pull
from coterie.options import Options
from coterie.randomness import Moment, fold, uniform


class CoBo(Options):
    """Collaboration weights from the agreement of gradients: cobo-neurips2024.txt, Algorithm 1.

    w_ij <- Proj(w_ij + gamma <grad f_i(z_ij), grad f_j(z_ij)>),  z_ij = (x_i + x_j) / 2,                            (4)
    x_i <- x_i - lr (g_i + rho sum_k w_ik (x_i - x_k)).                                                              (3)

    Meant for [train] steps = 1, which is the paper's iteration; with more steps the x_k of (3) stay where they were.
    Batch statistics are averaged in z_ij, forgotten after it, and otherwise stay each client's own.

    Differs from the paper: with [train] momentum, heavy-ball momentum takes the place of g_i in (3), as in the authors'
    program, and the pull stays outside of it; momentum = 0 is the paper's text. The authors' rho = 0.05 belongs to
    lr = 0.1 and averaged momentum; with lr = 0.01 and momentum = 0.9 the same is rho = 0.5. Gradients at midpoints are
    of fewer examples than a step, unless `pair_batch` says otherwise.
    """

    name: Literal["cobo"] = "cobo"
    attraction: float = Field(0.5, ge=0, le=1e6)
    """rho: how strongly collaborators are drawn together, (3)"""
    weight_step: float = Field(0.02, ge=0, le=1e6)
    """gamma: step of the weights, (4)"""
    pairs: Literal["all", "constant", "time", "mixed"] = "constant"
    """which pairs are looked at in round t: all, each with chance 1/n (constant) or 1/t (time), or mixed"""
    mixed_until: int = Field(80, ge=0, le=10**9)
    """mixed: rounds with constant chance, after which it is 1/t; the paper's are 0.2 % of 40,000"""
    pair_batch: int | None = Field(None, ge=1, le=10**9)
    """examples of a gradient at a midpoint; default: a quarter of train.batch_size"""
    weights: Literal["box", "simplex"] = "box"
    """each weight in [0, 1], or each client's weights non-negative with sum 1, as in section 4.3"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    def start(self, setting: Setting) -> State:
        weights = 1.0 - torch.eye(setting.num_clients, device=setting.keys.device)
        return {"weights": self._projected(weights), "keys": setting.keys}

    @client_task
    def show(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        return {}, {"publish": memory["theta"]}

    @client_task
    def write(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """One of each pair sends the other its gradient at the midpoint."""
        there = given.downloaded.delivered
        letters = memory["theta"].new_zeros(*there.shape, memory["theta"].shape[1])
        letters[there] = self._at_midpoints(clients, memory["theta"], given.downloaded)
        return {}, {"letters": letters}

    @client_task
    def compare(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """The other multiplies it with its own; pairs without both gradients agree by 0."""
        peers, mine = given.downloaded, self._at_midpoints(clients, memory["theta"], given.downloaded)
        wrote = peers.wrote(clients) & peers.delivered
        agreement = torch.zeros_like(wrote, dtype=mine.dtype)
        products = [torch.dot(*both) for both in zip(mine[wrote[peers.delivered]], peers.letters(clients), strict=True)]
        if products:
            agreement[wrote] = torch.stack(products)
        return {}, {"agreement": agreement}

    @client_task
    def step(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """(3), the sum over k as a pull toward the weighted mean of those that are there."""
        theta, peers = memory["theta"], given.downloaded
        weights = given["weights"] * peers.delivered
        degree = weights.sum(1, keepdim=True)
        mean = peers.mix(weights / degree.clamp(min=1e-38), otherwise=theta)
        peers.weights = weights  # who watches shall see the w_ik
        pull = Pull(mean, self.attraction * degree) if self.attraction else None
        return {"theta": clients.train(theta, pull)}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        shown = yield Ask(self.show, cohort)
        present = shown.clients
        pairs = self._chosen(present, state["keys"], moment)
        weights = yield from self._select(state["weights"], pairs, max(1, len(present)))
        among = self._projected(weights[present][:, present])  # of those who are there
        others = present.expand(len(present), -1).where(among > 0, NOBODY)
        yield Ask(self.step, present, each={"weights": among}, peers=others)
        return {**state, "weights": weights}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]

    def _select(self, weights: Tensor, pairs: Tensor, at_once: int) -> Generator[Ask, Replies, Tensor]:
        """Client-Selection of Algorithm 1 for these pairs [E, 2]: the new weights. So many pairs at once bound the
        memory for letters."""
        if not len(pairs):
            return weights
        agreement = torch.zeros_like(weights)
        for part in pairs.split(at_once):
            judges, of_judges = grouped(part)
            writers, of_writers = grouped(part.flip(1))
            yield Ask(self.write, writers, peers=of_writers)
            compared = yield Ask(self.compare, judges, peers=of_judges, letters=True)
            if len(compared.clients):
                named = of_judges[torch.searchsorted(judges, compared.clients)]
                row = compared.clients[:, None].expand_as(named)
                agreement[row[named != NOBODY], named[named != NOBODY]] = compared["agreement"][named != NOBODY]
        return self._projected(weights + self.weight_step * (agreement + agreement.T))

    def _at_midpoints(self, clients: Clients, theta: Tensor, peers: Peers) -> Tensor:
        """[K, P]: a stochastic gradient at the midpoint with each peer delivered."""
        place, _ = peers.delivered.nonzero().unbind(1)
        pair = clients.at(place)
        draws = fold(pair.round_keys("pair"), clients.population[peers.ids[peers.delivered]])
        size = self.pair_batch or max(1, clients.options.batch_size // 4)
        return pair.gradient(peers.each.add_(theta[place]).div_(2), draws, size)

    def _projected(self, weights: Tensor) -> Tensor:
        """Onto [0, 1], or each row onto the simplex; nobody has a weight of its own."""
        if self.weights == "box":
            return weights.clamp(0.0, 1.0).fill_diagonal_(0.0)
        return onto_simplex(weights.clone().fill_diagonal_(-torch.inf))

    def _chosen(self, present: Tensor, keys: Tensor, moment: Moment) -> Tensor:
        """[E, 2]: each pair of those present by the chance of this round, a function of their two keys."""
        n, t = len(present), moment.round + 1
        constant = self.pairs == "constant" or (self.pairs == "mixed" and t <= self.mixed_until)
        chance = 1.0 if self.pairs == "all" else 1.0 / max(n, 1) if constant else 1.0 / t
        first, second = torch.triu_indices(n, n, 1, device=present.device).unbind()
        mine, theirs = keys[present[first]], keys[present[second]]
        low, high = torch.minimum(mine, theirs), torch.maximum(mine, theirs)
        drawn = uniform(fold(fold(moment.key("pairs"), low), high), 1)[:, 0] < chance
        pairs = torch.stack([present[first], present[second]], dim=1)[drawn]
        pairs = pairs[(second - first)[drawn].argsort(stable=True)]  # neighbours in this order share few clients
        turned = (pairs.sum(1) % 2 == 1)[:, None]  # so that everybody judges and writes about as often
        return torch.where(turned, pairs.flip(1), pairs)


def grouped(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the pairs [E, 2], each once [S], and the second of each of their pairs [S, M], then NOBODY."""
    owners, place, count = pairs[:, 0].unique(return_inverse=True, return_counts=True)
    order = place.argsort(stable=True)
    rank = torch.arange(len(pairs), device=pairs.device) - (count.cumsum(0) - count)[place[order]]
    others = pairs.new_full((len(owners), int(count.max())), NOBODY)
    others[place[order], rank] = pairs[order, 1]
    return owners, others
