"""CFL: a federation that has converged and whose clients still pull apart is split in two, again and again."""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import mean_by_group
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.options import Options
from coterie.randomness import Moment


class CFL(Options):
    """FedAvg inside clusters, of which there is one at first; a cluster is split when the mean update of its clients
    is small and the largest is not, into the halves whose updates are least alike (Sattler et al. 2020).

    Updates are what a round of training moves a model by, so with [train] steps = 1 the two bounds are about lr times
    the length of a gradient. Distances and angles count batch statistics as parameters.

    Differs from the paper: no check of how clean a split is, whose bound gamma nobody knows; a largest number of
    clusters; clients that take no part in the round of a split stay with the larger half, where the paper has all take
    part in all rounds.
    """

    name: Literal["cfl"] = "cfl"
    mean_below: float = Field(0.4, ge=0, le=1e9)
    """epsilon_1: a cluster may be split once its mean update is shorter; 0 never splits"""
    largest_above: float = Field(1.6, ge=0, le=1e9)
    """epsilon_2: and while the longest update of its clients is longer"""
    most_clusters: int = Field(10, ge=1, le=10**9)
    """how many clusters there may be; more than there are clients is as many as there are clients"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        centres = setting.initial(0).repeat(min(self.most_clusters, setting.num_clients), 1)
        return {"centres": centres, "group": torch.zeros_like(setting.keys)}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        return {}, {"theta": clients.train(self.serving(clients, memory, given)), "examples": clients.examples}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared=state)
        models, weight, centres, group = trained["theta"], trained["examples"], state["centres"], state["group"].clone()
        used = int(group.max()) + 1
        for cluster in range(used):
            mine = (group[trained.clients] == cluster).nonzero()[:, 0]
            updates = models[mine] - centres[cluster]
            if used < len(centres) and self.splits(updates, weight[mine]):
                group[trained.clients[mine[smaller_half(updates)]]] = used
                used += 1
        centres = mean_by_group(models, group[trained.clients], weight, otherwise=centres)
        return {"centres": centres, "group": group}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][given["group"][clients.ids]]

    def splits(self, updates: Tensor, weight: Tensor) -> bool:
        """Whether a cluster's updates [m, P] say so; weight [m]."""
        if len(updates) < 2:
            return False
        mean = (weight / weight.sum()).to(updates.dtype) @ updates
        return bool(mean.norm() < self.mean_below and updates.norm(dim=1).max() > self.largest_above)


def smaller_half(updates: Tensor) -> Tensor:
    """[m] bool: who goes where updates [m, P] are parted such that the greatest cosine between the halves is least: the
    most alike are joined until two halves remain. Of equal halves that without the first client."""
    from sklearn.cluster import AgglomerativeClustering  # here, because importing it takes more than a second

    direction = F.normalize(updates, dim=1)
    apart = (1.0 - direction @ direction.T).clamp(min=0.0).fill_diagonal_(0.0)
    joined = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="single").fit_predict(apart.cpu())
    other = torch.from_numpy(joined != joined[0]).to(updates.device)
    return other if 2 * other.sum() <= len(other) else ~other
