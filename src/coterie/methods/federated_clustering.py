"""Federated clustering: everybody's gradient at everybody's model, and clients follow those that are like their own."""

from itertools import islice
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import in_quantile
from coterie.core import NOBODY, Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.options import Options
from coterie.randomness import Moment


class FederatedClustering(Options):
    """All clients answer each client's model with their gradient there; the client clusters these around its own and
    steps along the centre (Werner et al. 2023, Federated-Clustering with Threshold-Clustering).

    Repeated from v = own gradient:  v <- mean over j of (g_j if |g_j - v| <= tau, else v).

    A round is one step on one batch of each client, of the optimiser in [train], whatever its epochs and steps; with
    `steps` set, momentum goes on from round to round. It costs n^2 gradients, and their letters fill n^2 P numbers of
    memory: 1.7 GB for 8 clients with a ResNet-9. Batch statistics stay each client's own.

    Differs from the paper: tau is a quantile of the distances, own gradient included, as in the program of the authors
    of CoBo; theirs has client i's examples pushed through all models, here all clients' examples go through model i.
    """

    name: Literal["federated_clustering"] = "federated_clustering"
    quantile: float = Field(0.2, ge=0, le=1)
    """which share of all gradients is inside tau; 0 is the own alone, and 1 / clusters suits equal clusters"""
    clustering_rounds: int = Field(10, ge=1, le=10_000)
    """how often the centre moves in a round"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    def start(self, setting: Setting) -> State:
        return {}

    @client_task
    def show(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        return {}, {"publish": memory["theta"]}

    @client_task
    def answer(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """Its gradient at each of the others' models."""
        peers = given.downloaded
        place, _ = peers.delivered.nonzero().unbind(1)
        letters = memory["theta"].new_zeros(*peers.delivered.shape, memory["theta"].shape[1])
        letters[peers.delivered] = clients.at(place).first_gradient(peers.each)
        return {}, {"letters": letters}

    @client_task
    def step(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        theta, peers = memory["theta"], given.downloaded
        own, wrote = clients.first_gradient(theta, statistics=True), peers.wrote(clients)
        letters = iter(peers.letters(clients))
        centres, inside = own.clone(), torch.zeros_like(wrote)
        for row in range(len(theta)):
            points = torch.stack([own[row], *islice(letters, int(wrote[row].sum()))])
            centres[row], near = clustered(points, self.quantile, self.clustering_rounds)
            inside[row, wrote[row]] = near[1:]
        peers.weights = inside.to(theta.dtype)  # who watches shall see whom it follows
        return {"theta": clients.step(theta, centres)}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        present = (yield Ask(self.show, cohort)).clients
        others = present.repeat(len(present), 1).fill_diagonal_(NOBODY)
        if len(present) > 1:
            yield Ask(self.answer, present, peers=others)
        yield Ask(self.step, present, peers=others, letters=True)
        return state

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]


def clustered(points: Tensor, quantile: float, rounds: int) -> tuple[Tensor, Tensor]:
    """[P]: the centre around the first of these points [m, P] after so many rounds, and which [m] were inside last."""
    centre = points[0]
    for _ in range(rounds):
        inside = in_quantile((points - centre).norm(dim=1), quantile)
        share = inside.to(points.dtype) / len(points)
        centre = share @ points + (1.0 - share.sum()) * centre
    return centre, inside
