"""The one loop over rounds: cohorts, exchanges, evaluation, records. A method overrides none of it."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.clients import UNMEASURED, Clients
from coterie.core import (
    LARGEST,
    NOBODY,
    Ask,
    Fleet,
    Given,
    Method,
    Replies,
    Setting,
    State,
    Tensors,
    client_task,
    run_round,
)
from coterie.metrics import (
    best_selection_rate,
    exposure,
    links_from_groups,
    links_from_peers,
    selection_rate,
    shown_weights,
    spread,
    weights_from_peers,
    weights_within,
)
from coterie.peers import EpsilonGreedy, Selection
from coterie.randomness import Moment, fold, uniform

REMEMBER = 0.8  # how much of the earlier links counts when a new round's are added
Presence = Callable[[int], Tensor | None]  # which clients [N] are there in a round, counted from 1; None is all
EVERYBODY: Presence = lambda round: None  # noqa: E731


@runtime_checkable
class ChoosesPeers(Protocol):
    """A method whose clients choose whom to download."""

    @property
    def download(self) -> int: ...
    @property
    def selector(self) -> Selection: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round: with the fleet's memory, all that a checkpoint needs."""

    round: int  # rounds completed
    state: State
    links: Tensor  # [N, N] who learned from whom, later rounds counting more
    record: Mapping[str, Any]  # the line of metrics.jsonl
    per_client: Mapping[str, Tensor] | None = None  # what was measured [N], NaN for the silent and the malicious
    weights: Tensor | None = None  # [N, N] by which the row mixed the column's model, in the last round that shows it


@dataclass(frozen=True)
class Serving:
    """What every client can be asked about the model it predicts with."""

    method: Method

    @client_task
    def measure(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """Its loss and accuracy on its own test data, and how it does where an attack aims. The loss of a model gone
        astray counts as the largest number that may be answered."""
        theta = self.method.serving(clients, memory, given)
        score = clients.score(theta)
        loss = score.loss.nan_to_num(nan=LARGEST, posinf=LARGEST).clamp(max=LARGEST)
        aimed = clients.targeted(theta) if clients.data.targeted else {}
        return {}, {"loss": loss, "accuracy": score.accuracy, **aimed}

    @client_task
    def hand_over(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """The model itself, at the end of a simulation."""
        return {}, {"model": self.method.serving(clients, memory, given)}


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
    malicious: Tensor | None = None,
    present: Presence = EVERYBODY,
) -> Iterator[Progress]:
    """Play the rounds after `since` up to `last`, yielding after each. The generator may be left at any round.
    Who is malicious [N] is for the record, which speaks of the honest clients; nobody else is told."""
    progress = since
    while progress.round < last:
        number = progress.round + 1
        evaluated = number % evaluate_every == 0 or number == last
        moment = Moment(seed, number - 1)
        there = present(number)
        progress = play(method, fleet, setting, keys, progress, moment, participation, evaluated, malicious, there)
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
    malicious: Tensor | None = None,
    present: Tensor | None = None,
) -> Progress:
    """One round: a cohort, the method's exchanges, and the evaluation as one more exchange."""
    began = time.perf_counter()
    cohort = draw_cohort(keys, participation, moment, present)
    seen = _Watch(setting.num_clients, setting.clusters, malicious)
    state = run_round(method, fleet, before.state, cohort, moment, seen)
    links = links_from_groups(state["group"]) if "group" in state else seen.links
    record: dict[str, Any] = {
        "round": before.round + 1,
        "clients": len(cohort),
        "selection_rate": selection_rate(links, setting.clusters),
        "selection_oracle": _oracle_rate(method, moment.round, cohort, setting),
        "weights": seen.weights_record(with_matrix=evaluated),
        "refused": {str(client): reason for client, reason in sorted(seen.refused.items())},
        "silent": len(seen.silent),
    }
    per_client = evaluate(method, fleet, state, moment, malicious, present) if evaluated else None
    record["accuracy"] = spread(per_client["accuracy"]) if per_client else None
    record["loss"] = _mean(per_client, "loss")
    if malicious is not None:
        aimed = {name: _mean(per_client, name) for name in ("source_accuracy", "success_rate")}
        record["attack"] = {**aimed, "selected": seen.selected, "weight": seen.weight}
    record["seconds"] = time.perf_counter() - began
    weights = before.weights if seen.weights is None else seen.weights
    return Progress(before.round + 1, state, REMEMBER * before.links + links, record, per_client, weights)


def evaluate(
    method: Method,
    fleet: Fleet,
    state: State,
    moment: Moment,
    malicious: Tensor | None = None,
    present: Tensor | None = None,
) -> dict[str, Tensor]:
    """Ask every honest client that is there how its model does; [N] each, NaN for all others and the silent."""
    wanted = torch.ones(fleet.num_clients, dtype=torch.bool)
    wanted &= ~malicious.cpu() if malicious is not None else True
    wanted &= present.cpu() if present is not None else True
    asked = wanted.nonzero()[:, 0]
    replies = fleet.answer(Ask(Serving(method).measure, asked, shared=state), moment)
    measured = {}
    for name in {"accuracy", "loss", *replies.values}:
        measured[name] = torch.full((fleet.num_clients,), torch.nan)
        if len(replies.clients):
            answered = replies[name].cpu()
            measured[name][replies.clients] = answered.where(answered != UNMEASURED, torch.nan)
    return measured


def collect_models(method: Method, fleet: Fleet, state: State, moment: Moment, size: int) -> Tensor:
    """[N, P]: the models the clients predict with, a few clients at a time."""
    models = torch.zeros(fleet.num_clients, size)
    for clients in torch.arange(fleet.num_clients).split(64):
        replies = fleet.answer(Ask(Serving(method).hand_over, clients, shared=state), moment)
        if len(replies.clients):
            models[replies.clients] = replies["model"].cpu()
    return models


def draw_cohort(keys: Tensor, participation: float, moment: Moment, present: Tensor | None = None) -> Tensor:
    """The clients of a round: a random share of those present [N], at least one, in the order of their numbers."""
    there = torch.ones_like(keys, dtype=torch.bool) if present is None else present
    size = max(1, round(participation * int(there.sum())))
    scores = uniform(fold(moment.key("cohort"), keys), 1)[:, 0].masked_fill(~there, torch.inf)
    return scores.argsort(stable=True)[:size].sort().values


class _Watch:
    """Notes what passes between the method and the fleet: ids, as the coordinator may, and what only a simulation can
    show, how much weight clients give whom; who did not mix gives 0, and who published nothing gets 0."""

    def __init__(self, num_clients: int, clusters: Tensor | None, malicious: Tensor | None) -> None:
        self.selected: dict[str, float] | None = None
        self.weight: dict[str, float] | None = None
        self._clusters = clusters
        self._malicious = malicious
        self.links = torch.zeros(num_clients, num_clients)
        self.weights: Tensor | None = None  # [N, N]; of several exchanges the last in which a client mixed
        self._mixed = torch.zeros(num_clients, dtype=torch.bool)
        self.refused: dict[int, str] = {}
        self.silent: set[int] = set()

    def __call__(self, ask: Ask, replies: Replies) -> None:
        if ask.peers is not None:
            links = links_from_peers(ask.clients, ask.peers, len(self.links))
            links[:, [*self.refused, *self.silent]] = 0.0  # what they might have published was not delivered
            self.links = torch.maximum(self.links, links)
            if replies.weights is not None:
                self._note_weights(ask, replies, replies.weights)
            if self._malicious is not None:
                self._note_exposure(ask, replies)
        self.refused.update(replies.refused)
        self.silent |= set(ask.clients.tolist()) - set(replies.clients.tolist()) - set(replies.refused)

    def weights_record(self, with_matrix: bool) -> dict[str, Any] | None:
        """What a line of metrics.jsonl says of the weights, None if nobody mixed peers."""
        if self.weights is None:
            return None
        matrix = shown_weights(self.weights) if with_matrix else None
        record = weights_within(self.weights, self._mixed, self._clusters)
        return {**record, **({} if matrix is None else {"matrix": matrix})}

    def _note_weights(self, ask: Ask, replies: Replies, weights: Tensor) -> None:
        assert ask.peers is not None
        peers, rows = ask.peers[torch.isin(ask.clients, replies.clients)], replies.clients.cpu()
        if self.weights is None:
            self.weights = torch.zeros_like(self.links)
        self.weights[rows] = weights_from_peers(peers, weights, len(self.links))
        self._mixed[rows] = True

    def _note_exposure(self, ask: Ask, replies: Replies) -> None:
        assert ask.peers is not None
        assert self._malicious is not None
        asked = (ask.peers != NOBODY).float()
        self.selected = exposure(ask.clients, ask.peers, asked, self._malicious, self._clusters) or self.selected
        if replies.weights is not None:
            answered = torch.isin(ask.clients, replies.clients)
            given = exposure(replies.clients, ask.peers[answered], replies.weights, self._malicious, self._clusters)
            self.weight = given or self.weight


def _mean(per_client: Mapping[str, Tensor] | None, name: str) -> float | None:
    """The mean of the clients that were measured."""
    if per_client is None or name not in per_client:
        return None
    return (spread(per_client[name]) or {}).get("mean")


def _oracle_rate(method: Method, round: int, cohort: Tensor, setting: Setting) -> float | None:
    if not isinstance(method, ChoosesPeers) or not isinstance(method.selector, EpsilonGreedy):
        return None
    return best_selection_rate(method.selector.exploration(round), method.download, cohort, setting.clusters)
