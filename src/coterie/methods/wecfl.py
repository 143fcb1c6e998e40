"""WeCFL: the server sorts the clients' models into clusters by weighted k-means, and each cluster has its mean."""

from collections.abc import Iterator
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

BEGINNINGS = 10  # of k-means in the first round, of which the best counts
REPEATS = 100  # of its steps: more than it ever takes


class WeCFL(Options):
    """Clients train the model of their cluster; the server sorts what they send by k-means weighted by examples, from
    the models of the round before (Ma et al. 2022).

    All begin with one model, and the first round decides much: nothing tells clients apart before they have trained.
    Meant for [train] epochs; with steps = 1 the noise of the first step decides. Who was never there trains the first
    model.

    Differs from the paper: k-means is repeated in each round until nobody changes, and begins with models of the first
    round drawn as by k-means++, the best of ten drawings, not with models of its own. Distances count batch statistics
    as parameters.
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
        first = bool((state["group"] == NOBODY).all())
        begin = self._drawn(state, trained.clients, models, moment) if first else [centres]
        centres, group, _ = min((sorted_into(models, weight, start) for start in begin), key=lambda found: found[2])
        return {**state, "centres": centres, "group": state["group"].index_put((trained.clients,), group)}

    def _drawn(self, state: State, clients: Tensor, models: Tensor, moment: Moment) -> Iterator[Tensor]:
        """Where k-means may begin in the first round."""
        keys = fold(moment.key("centres"), state["keys"][clients])
        chances = uniform(keys, BEGINNINGS * self.clusters).view(len(keys), BEGINNINGS, self.clusters)
        return (spread_out(models, chance) for chance in chances.unbind(1))

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][given["group"][clients.ids].clamp(min=0)]


def sorted_into(models: Tensor, weight: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, float]:
    """k-means of models [R, P] with weights [R] from centres [K, P]: the new ones, the nearest [R] to each model, and
    the weighted sum of squared distances to them."""
    group = torch.full_like(weight, NOBODY)
    for _ in range(REPEATS):
        apart = torch.cdist(models, centres, compute_mode="donot_use_mm_for_euclid_dist")
        before, group = group, apart.argmin(1)
        if torch.equal(group, before):
            break
        centres = mean_by_group(models, group, weight, otherwise=centres)
    return centres, group, float(weight.double() @ apart.amin(1).double().square())


def spread_out(models: Tensor, chance: Tensor) -> Tensor:
    """[K, P]: models drawn one after another, by the squared distance to those drawn before (Arthur and Vassilvitskii
    2007); chance [R, K] uniform. The largest of log p + Gumbel noise is such a draw."""
    noise = -torch.log(-torch.log(chance.double().clamp(1e-12, 1 - 1e-12)))
    squares, chosen = torch.ones_like(noise[:, 0]), list[Tensor]()
    for turn in range(chance.shape[1]):
        drawn = models[(squares.log() + noise[:, turn]).argmax()]
        chosen.append(drawn)
        distance = (models - drawn).norm(dim=1).double().square()
        squares = distance if turn == 0 else torch.minimum(squares, distance)
    return torch.stack(chosen)
