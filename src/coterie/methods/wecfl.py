"""WeCFL: the server sorts the clients' models into clusters by weighted k-means, and each cluster has its mean."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import mean_by_group
from coterie.core import NOBODY, Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.errors import ConfigError, explain
from coterie.options import Options
from coterie.randomness import Moment, fold, uniform

REPEATS = 100  # of k-means in one round: more than it ever takes


class WeCFL(Options):
    """Clients train the model of their cluster; the server sorts what they send by k-means weighted by examples, from
    the models of the round before (Ma et al. 2022).

    All begin with one model, and the first round decides much: nothing tells clients apart before they have trained.
    Meant for [train] epochs; with steps = 1 the noise of the first step decides. Who was never there trains the first
    model.

    Differs from the paper: k-means is repeated in each round until nobody changes, and begins with models of the first
    round drawn as by k-means++ instead of models of its own. Distances count batch statistics as parameters.
    """

    name: Literal["wecfl"] = "wecfl"
    clusters: int = Field(4, ge=1, le=10**9)
    """k: how many clusters; WeCFL has to be told"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        if self.clusters > setting.num_clients:
            allowed = f"1 to {setting.num_clients}, the number of clients"
            raise ConfigError(explain("method.clusters", self.clusters, allowed, "Lower it."))
        group = torch.full_like(setting.keys, NOBODY)
        return {"centres": setting.initial(0).repeat(self.clusters, 1), "group": group, "keys": setting.keys}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        return {}, {"theta": clients.train(self.serving(clients, memory, given)), "examples": clients.examples}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={name: state[name] for name in ("centres", "group")})
        models, weight, centres = trained["theta"], trained["examples"], state["centres"]
        if (state["group"] == NOBODY).all():
            chance = uniform(fold(moment.key("centres"), state["keys"][trained.clients]), len(centres))
            centres = spread_out(models, weight, chance)
        group = nearest(models, centres)
        for _ in range(REPEATS):
            before, centres = group, mean_by_group(models, group, weight, otherwise=centres)
            group = nearest(models, centres)
            if torch.equal(group, before):
                break
        return {**state, "centres": centres, "group": state["group"].index_put((trained.clients,), group)}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][given["group"][clients.ids].clamp(min=0)]


def nearest(models: Tensor, centres: Tensor) -> Tensor:
    """[R]: the centre [K, P] nearest to each model [R, P]."""
    return torch.cdist(models, centres, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)


def spread_out(models: Tensor, weight: Tensor, chance: Tensor) -> Tensor:
    """[K, P]: models drawn one after another, by weight [R] times the squared distance to those drawn before (Arthur
    and Vassilvitskii 2007); chance [R, K] uniform. The largest of log p + Gumbel noise is such a draw."""
    noise = -torch.log(-torch.log(chance.double().clamp(1e-12, 1 - 1e-12)))
    squares, chosen = torch.ones_like(noise[:, 0]), list[Tensor]()
    for turn in range(chance.shape[1]):
        drawn = models[((weight * squares).log() + noise[:, turn]).argmax()]
        chosen.append(drawn)
        distance = (models - drawn).double().norm(dim=1)
        squares = distance.square() if turn == 0 else torch.minimum(squares, distance.square())
    return torch.stack(chosen)
