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

    An update is what a round of training moves a model by; lengths and angles count batch statistics as parameters.
    Meant for [train] epochs: of a single step most is noise, and clusters are split by it or not found.

    Differs from the paper: epsilon_1 is relative to the largest update, so that it fits models of all sizes; gamma_max
    is given and not estimated; there is a largest number of clusters; and clients that take no part in the round of a
    split stay with the larger half, where the paper has all take part in all rounds.
    """

    name: Literal["cfl"] = "cfl"
    mean_below: float = Field(0.4, ge=0, le=1)
    """epsilon_1: a cluster may be split when its mean update is below this share of the longest; 0 never splits"""
    largest_above: float = Field(0.0, ge=0, le=1e9)
    """epsilon_2: and while the longest update of its clients is longer than this"""
    separation: float = Field(0.7, ge=0, le=1)
    """gamma_max: and if sqrt((1 - c) / 2) is larger, c the greatest cosine between the halves; noise alone has 0.707"""
    most_clusters: int = Field(10, ge=1, le=10**9)
    """how many clusters there may be; never more than there are clients"""

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
            if used == len(centres):
                break
            mine = (group[trained.clients] == cluster).nonzero()[:, 0]
            half = self.smaller_half(models[mine] - centres[cluster], weight[mine])
            group[trained.clients[mine[half]]] = used
            used += int(half.any())
        means = mean_by_group(models, group[trained.clients], weight, otherwise=centres[:used])
        return {"centres": torch.cat([means, centres[used:]]), "group": group}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][given["group"][clients.ids]]

    def smaller_half(self, updates: Tensor, weight: Tensor) -> Tensor:
        """[m] bool: who leaves a cluster with these updates [m, P] and weights [m]; nobody where it is not split."""
        lengths, stay = updates.norm(dim=1), torch.zeros_like(weight, dtype=torch.bool)
        mean = (weight / weight.sum()).to(updates.dtype) @ updates
        if len(updates) < 2 or lengths.max() <= self.largest_above or mean.norm() >= self.mean_below * lengths.max():
            return stay
        direction = F.normalize(updates, dim=1)
        cosine = direction @ direction.T
        other = parted(cosine)
        across = cosine[other][:, ~other].max()
        if ((1.0 - across) / 2.0).sqrt() <= self.separation:
            return stay
        return other if 2 * other.sum() <= len(other) else ~other


def parted(cosine: Tensor) -> Tensor:
    """[m] bool: who is not with the first, of two parts between which the greatest cosine [m, m] is least: those most
    alike are joined until two parts remain."""
    from sklearn.cluster import AgglomerativeClustering  # here, because importing it takes more than a second

    apart = (1.0 - cosine).clamp(min=0.0).fill_diagonal_(0.0).cpu()
    joined = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="single").fit_predict(apart)
    return torch.from_numpy(joined != joined[0]).to(cosine.device)
