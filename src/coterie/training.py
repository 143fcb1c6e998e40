"""The one loop over rounds: cohorts, exchanges, evaluation, records. A method overrides none of it."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.clients import Clients
from coterie.core import Ask, Fleet, Given, Method, Replies, Setting, State, Tensors, client_task, run_round
from coterie.metrics import best_selection_rate, links_from_groups, links_from_peers, selection_rate, spread
from coterie.peers import EpsilonGreedy
from coterie.randomness import Moment, fold, uniform

REMEMBER = 0.8  # how much of the earlier links counts when a new round's are added


@runtime_checkable
class ChoosesPeers(Protocol):
    """A method whose clients explore and exploit, so that an oracle's selection rate can be named."""

    @property
    def download(self) -> int: ...
    @property
    def selection(self) -> EpsilonGreedy: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round: with the fleet's memory, all that a checkpoint needs."""

    round: int  # rounds completed
    state: State
    links: Tensor  # [N, N] who learned from whom, later rounds counting more
    record: Mapping[str, Any]  # the line of metrics.jsonl
    per_client: Mapping[str, Tensor] | None = None  # accuracy and loss [N], NaN where a client did not answer


@dataclass(frozen=True)
class Serving:
    """What every client can be asked about the model it predicts with."""

    method: Method

    @client_task
    def measure(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """Its loss and accuracy on its own test data."""
        score = clients.score(self.method.serving(clients, memory, given))
        return {}, {"loss": score.loss, "accuracy": score.accuracy}

    @client_task
    def hand_over(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """The model itself, at the end of a simulation."""
        return {}, {"theta": self.method.serving(clients, memory, given)}


def beginning(method: Method, setting: Setting) -> Progress:
    """Before the first round."""
    links = torch.zeros(setting.num_clients, setting.num_clients)
    return Progress(0, method.start(setting), links, {})


def rounds(
    method: Method,
    fleet: Fleet,
    setting: Setting,
    keys: Tensor,
    since: Progress,
    *,
    seed: int,
    last: int,
    evaluate_every: int = 1,
    participation: float = 1.0,
) -> Iterator[Progress]:
    """Play the rounds after `since` up to `last`, yielding after each. The generator may be left at any round."""
    progress = since
    while progress.round < last:
        number = progress.round + 1
        evaluated = number % evaluate_every == 0 or number == last
        progress = play(method, fleet, setting, keys, progress, Moment(seed, number - 1), participation, evaluated)
        yield progress


def play(
    method: Method,
    fleet: Fleet,
    setting: Setting,
    keys: Tensor,
    before: Progress,
    moment: Moment,
    participation: float,
    evaluated: bool,
) -> Progress:
    """One round: a cohort, the method's exchanges, and the evaluation as one more exchange."""
    began = time.perf_counter()
    cohort = draw_cohort(keys, participation, moment)
    seen = _Watch(setting.num_clients)
    state = run_round(method, fleet, before.state, cohort, moment, seen)
    links = links_from_groups(state["group"]) if "group" in state else seen.links
    record = {
        "round": before.round + 1,
        "clients": len(cohort),
        "selection_rate": selection_rate(links, setting.clusters),
        "selection_oracle": _oracle_rate(method, moment.round, cohort, setting),
        "refused": {str(client): reason for client, reason in sorted(seen.refused.items())},
        "silent": len(seen.silent),
    }
    per_client = evaluate(method, fleet, state, moment) if evaluated else None
    record["accuracy"] = spread(per_client["accuracy"]) if per_client else None
    record["loss"] = (spread(per_client["loss"]) or {}).get("mean") if per_client else None
    record["seconds"] = time.perf_counter() - began
    return Progress(before.round + 1, state, REMEMBER * before.links + links, record, per_client)


def evaluate(method: Method, fleet: Fleet, state: State, moment: Moment) -> dict[str, Tensor]:
    """Ask every client how its model does; [N] each, NaN for those who did not answer."""
    everyone = torch.arange(fleet.num_clients)
    replies = fleet.answer(Ask(Serving(method).measure, everyone, shared=state), moment)
    measured = {name: torch.full((fleet.num_clients,), torch.nan) for name in ("accuracy", "loss")}
    for name, values in measured.items():
        if len(replies.clients):
            values[replies.clients] = replies[name].cpu()
    return measured


def collect_models(method: Method, fleet: Fleet, state: State, moment: Moment, size: int) -> Tensor:
    """[N, P]: the models the clients predict with, a few clients at a time."""
    models = torch.zeros(fleet.num_clients, size)
    for clients in torch.arange(fleet.num_clients).split(64):
        replies = fleet.answer(Ask(Serving(method).hand_over, clients, shared=state), moment)
        if len(replies.clients):
            models[replies.clients] = replies["theta"].cpu()
    return models


def draw_cohort(keys: Tensor, participation: float, moment: Moment) -> Tensor:
    """The clients of a round: a random share, at least one, in the order of their numbers."""
    size = max(1, round(participation * len(keys)))
    scores = uniform(fold(moment.key("cohort"), keys), 1)[:, 0]
    return scores.argsort(stable=True)[:size].sort().values


class _Watch:
    """Notes what passes between the method and the fleet: ids only, as the coordinator may."""

    def __init__(self, num_clients: int) -> None:
        self.links = torch.zeros(num_clients, num_clients)
        self.refused: dict[int, str] = {}
        self.silent: set[int] = set()

    def __call__(self, ask: Ask, replies: Replies) -> None:
        if ask.peers is not None:
            links = links_from_peers(ask.clients, ask.peers, len(self.links))
            links[:, [*self.refused, *self.silent]] = 0.0  # what they might have published was not delivered
            self.links = torch.maximum(self.links, links)
        self.refused.update(replies.refused)
        self.silent |= set(ask.clients.tolist()) - set(replies.clients.tolist()) - set(replies.refused)


def _oracle_rate(method: Method, round: int, cohort: Tensor, setting: Setting) -> float | None:
    if not isinstance(method, ChoosesPeers):
        return None
    return best_selection_rate(method.selection.exploration(round), method.download, cohort, setting.clusters)
