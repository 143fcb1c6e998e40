"""Malicious clients: a fleet around another fleet, in which some clients hold or say what an attack wants.

They answer through the same exchanges as everybody. Where an attack has them do something else, they are asked apart,
with a task of the attack in place of the method's; what they then say passes the checks of the fleet inside.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.clients import Clients
from coterie.core import MODELS, NOBODY, Ask, Fleet, Given, Replies, Task, Tensors, client_task, merges
from coterie.descent import Pull
from coterie.federation import Federation
from coterie.randomness import Moment, fold
from coterie.robust.attacks import Attack, Seen

SENT, BEGAN = "attack.sent", "attack.began"  # among the memories: what attackers sent last, where they trained from
HEARD, START = "attack.heard", "attack.start"  # among the replies, which have names of the method's own
LETTERS = "attack.letters"


@dataclass(frozen=True)
class _Tapped(Clients):
    """Clients that note where their training began, the first if they train more than one model."""

    began: dict[str, Tensor] = field(default_factory=dict)

    def train(self, theta: Tensor, pull: Pull | None = None, *, name: str = "", epochs: int | None = None) -> Tensor:
        self.began.setdefault("start", theta)
        return super().train(theta, pull, name=name, epochs=epochs)


@dataclass(frozen=True)
class Lying:
    """What malicious clients do in place of a method's task."""

    task: Task

    @client_task
    def withhold(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """The task, but its model is kept back and handed to the other attackers, with where training began; or its
        letters are."""
        began: dict[str, Tensor] = {}
        memory, reply = self.task(_Tapped(**vars(clients), began=began), memory, given)
        kept_back = {f"attack.{name}": reply[name] for name in MODELS & reply.keys()}
        kept_back |= {LETTERS: reply["letters"]} if "letters" in reply else {}
        said = {name: value for name, value in reply.items() if name not in MODELS | {"letters"}}
        return memory, said | kept_back | ({START: began["start"]} if began else {})

    @client_task
    def be_overheard(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """The task of an honest client that attackers listen to."""
        memory, reply = self.task(clients, memory, given)
        return memory, {**reply, HEARD: reply["publish"]} if "publish" in reply else reply

    @client_task
    def average(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        """In place of judging peers: the mean of them and oneself by examples, fedcb2o.txt, section 3.5."""
        own, peers = clients.examples[:, None], given.downloaded
        examples = given["examples"] * peers.delivered
        share = examples / (examples.sum(1, keepdim=True) + own)
        kept = memory["theta"] * (1.0 - share.sum(1, keepdim=True))
        mixed = peers.mix(share, otherwise=torch.zeros_like(kept))
        return {"theta": kept + mixed}, {}


@client_task
def say(clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
    """Answer what the attack has prepared."""
    return {}, given.each


class AttackedFleet:
    """A fleet whose malicious clients carry out an attack. With none of them it is the fleet inside."""

    def __init__(self, inside: Fleet, attack: Attack, federation: Federation) -> None:
        assert federation.malicious is not None
        self.name = inside.name
        self.num_clients = inside.num_clients
        self._inside = inside
        self._attack = attack
        self._malicious = federation.malicious
        self._keys = federation.keys
        self._examples = federation.train.count
        everybody = torch.zeros_like(federation.keys)
        self._cluster = everybody if federation.clusters is None else federation.clusters
        self._place = self._malicious.cumsum(0) - 1  # of a malicious client among them
        self._kept: dict[str, Tensor] = {}  # [A, P] each, NaN where there is nothing yet

    def memory(self) -> Tensors:
        return {**self._inside.memory(), **self._kept}

    def restore(self, memory: Tensors) -> None:
        self._kept = {name: memory[name] for name in (SENT, BEGAN) if name in memory}
        self._inside.restore({name: value for name, value in memory.items() if name not in self._kept})

    def close(self) -> None:
        self._inside.close()

    def answer(self, ask: Ask, moment: Moment) -> Replies:
        """As the fleet inside does, but for the malicious clients."""
        lying = self._malicious[ask.clients].to(ask.clients.device)
        acts = self._attack.silent or self._attack.crafts or self._attack.collude
        if not acts or not lying.any():
            return self._inside.answer(ask, moment)
        liars = [] if self._attack.silent else [self._of_liars(ask.only(lying), moment)]
        honest = self._of_honest(ask.only(~lying), moment)  # after the liars, who must not read it yet
        said = [self._said(ask, replies, honest, moment) for replies in liars]
        unheard = [replace(part, values=_without(part.values, HEARD)) for part in honest]
        return Replies.joined([*unheard, *said]).in_order_of(ask.clients)

    def _of_honest(self, ask: Ask, moment: Moment) -> list[Replies]:
        if self._attack.eavesdrops:
            ask = replace(ask, task=Lying(ask.task).be_overheard)
        return [self._inside.answer(ask, moment)] if len(ask.clients) else []

    def _of_liars(self, ask: Ask, moment: Moment) -> Replies:
        """What they find, with the models that the attack replaces kept back."""
        if self._attack.collude and merges(ask.task):
            assert ask.peers is not None
            examples = self._examples[ask.peers.clamp(min=0)] * (ask.peers != NOBODY)
            ask = replace(ask, task=Lying(ask.task).average, each={"examples": examples})
        elif self._attack.crafts:
            ask = replace(ask, task=Lying(ask.task).withhold)
        return self._inside.answer(ask, moment)

    def _said(self, ask: Ask, replies: Replies, honest: list[Replies], moment: Moment) -> Replies:
        """What they say in its place."""
        if not len(replies.clients):
            return replies
        values = dict(replies.values)
        if self._attack.collude and "wanted" in values:
            present = torch.cat([part.clients for part in [*honest, replies]])
            values["wanted"] = self._accomplices(replies.clients, present, values["wanted"].shape[1], moment)
        if LETTERS in values:
            return self._written(ask, replies, moment)
        kept_back = {name: values.pop(f"attack.{name}") for name in MODELS if f"attack.{name}" in values}
        began = values.pop(START, None)
        if not kept_back:
            if began is not None:  # what is trained now is sent later
                self._keep(BEGAN, replies.clients, began)
            return replace(replies, values=values)
        ((name, own),) = kept_back.items()
        heard = self._overheard(honest, HEARD if name == "publish" else name)
        start = self._last(BEGAN, replies.clients, own) if began is None else began
        last = self._last(SENT, replies.clients, torch.zeros_like(own))
        values[name] = self._crafted(replies.clients, own, start, last, heard, moment)
        if self._attack.remembers:
            self._keep(SENT, replies.clients, values[name])
        said = self._inside.answer(Ask(say, replies.clients, each=values), moment)
        return replace(said, refused={**replies.refused, **said.refused})

    def _written(self, ask: Ask, replies: Replies, moment: Moment) -> Replies:
        """Letters hold gradients, so each is crafted as a model that was trained from zero; nobody overhears them."""
        assert ask.peers is not None
        clients, letters = replies.clients, replies.values[LETTERS].unbind(1)
        nothing = torch.zeros_like(letters[0])
        crafted = [self._crafted(clients, own, nothing, nothing, None, moment) for own in letters]
        values = {**_without(replies.values, LETTERS), "letters": torch.stack(crafted, dim=1)}
        peers = ask.peers[(clients[:, None] == ask.clients).int().argmax(1)]
        said = self._inside.answer(Ask(say, clients, each=values, peers=peers), moment)
        return replace(said, refused={**replies.refused, **said.refused})

    def _overheard(self, honest: list[Replies], name: str) -> tuple[Tensor, Tensor] | None:
        """What honest clients sent [B, P] and their clusters [B], if the attack eavesdrops on any."""
        if not honest or not self._attack.eavesdrops:
            return None
        (replies,) = honest
        return replies.values[name], self._cluster[replies.clients]

    def _accomplices(self, clients: Tensor, present: Tensor, budget: int, moment: Moment) -> Tensor:
        """[R, M] ids: other attackers of the own cluster in random order, then its honest clients, then NOBODY."""
        pairs = fold(fold(moment.key("accomplices"), self._keys[clients])[:, None], self._keys[present])
        shuffled = pairs.argsort(1)
        stranger = (self._cluster[clients][:, None] != self._cluster[present]) | (clients[:, None] == present)
        rank = torch.where(stranger, 2, (~self._malicious[present]).long()).gather(1, shuffled)
        order = shuffled.gather(1, rank.argsort(dim=1, stable=True))
        wanted = present[order].masked_fill(rank.sort(1).values == 2, NOBODY)[:, :budget]
        return F.pad(wanted, (0, budget - wanted.shape[1]), value=NOBODY)

    def _crafted(
        self,
        clients: Tensor,
        own: Tensor,
        start: Tensor,
        last: Tensor,
        heard: tuple[Tensor, Tensor] | None,
        moment: Moment,
    ) -> Tensor:
        """[R, ...]: what these attackers send, cluster by cluster."""
        keys = fold(moment.key("attack"), self._keys[clients])
        others, of_cluster = heard or (own[:0], self._cluster[:0])
        rows, crafted = [], []
        for cluster in self._cluster[clients].unique():
            mine = (self._cluster[clients] == cluster).nonzero()[:, 0]
            seen = Seen(own[mine], start[mine], others[of_cluster == cluster], last[mine], keys[mine], moment.round)
            rows.append(mine)
            crafted.append(self._attack.craft(seen))
        return torch.cat(crafted)[torch.cat(rows).argsort()]

    def _keep(self, name: str, clients: Tensor, models: Tensor) -> None:
        """Remember a model [R, P] of each of these attackers [R]."""
        nothing = models.new_full((int(self._malicious.sum()), models.shape[1]), torch.nan)
        self._kept[name] = self._kept.get(name, nothing).index_copy(0, self._place[clients], models)

    def _last(self, name: str, clients: Tensor, otherwise: Tensor) -> Tensor:
        """[R, P]: what is remembered of them, or `otherwise` [R, P]."""
        if name not in self._kept:
            return otherwise
        kept = self._kept[name][self._place[clients]]
        return torch.where(kept.isnan().any(1, keepdim=True), otherwise, kept)


def _without(values: Tensors, name: str) -> Tensors:
    return {key: value for key, value in values.items() if key != name}
