"""What malicious clients do, and the table of names. An attack changes their data (`poison`), what they send (`craft`),
or whether they answer at all; fleets/attacked.py carries it out, so that no method knows of it.

In what follows a malicious client's honest model is what it would have sent, and its start where its training began.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import ConfigError, explain
from coterie.federation import Examples, Federation, Targeted, shuffled
from coterie.options import Options
from coterie.randomness import fold, normal
from coterie.robust.aggregators import squared_distances

Role = Literal["lie", "honest", "absent"]  # what a method has attackers do: oracles take them out or make them honest


@dataclass(frozen=True)
class Seen:
    """What the attackers of one cluster know when they choose what to send."""

    own: Tensor  # [A, P] their honest models
    start: Tensor  # [A, P] where their training began
    others: Tensor  # [B, P] what honest clients of their cluster send, if the attack eavesdrops, else nobody's
    sent: Tensor  # [A, P] what they sent last, zeros where they have sent nothing yet
    keys: Tensor  # [A] for draws, one for each attacker and round
    round: int

    @property
    def around(self) -> Tensor:
        """[B, P]: the honest models to hide among; their own where they hear no others."""
        return self.others if len(self.others) else self.own


class Attack(Options):
    """What all attacks have in common."""

    name: str
    """which attack"""
    label: str = ""
    """what tables and figures call it; default: its name"""
    malicious_per_cluster: int = Field(3, ge=0, le=10**9)
    """how many clients of each true cluster are malicious, its last ones; without clusters: of all"""
    malicious: list[int] | None = None
    """the malicious clients by number, instead"""
    malicious_examples: int | None = Field(None, ge=1, le=10**9)
    """examples each of them holds, all for training; unset: as many as others"""
    collude: bool = False
    """whether attackers download from each other first, then from others of their cluster, and average by examples,
    instead of following the method, where it lets clients download: fedcb2o.txt, section 3.5"""

    @property
    def shown(self) -> str:
        """The name for tables and figures."""
        return self.label or self.name

    silent: ClassVar[bool] = False  # whether attackers answer nothing
    eavesdrops: ClassVar[bool] = False  # whether they must know what others send
    crafts: ClassVar[bool] = False  # whether they send something else than their honest models
    remembers: ClassVar[bool] = False  # whether they must know what they sent last

    def poison(self, federation: Federation, seed: int) -> Federation:
        """The federation with the malicious clients' data as the attack wants it."""
        return federation

    def targets(self, federation: Federation) -> tuple[Targeted, ...]:
        """What the attack aims at on each of the test sets; nothing if it only wants to harm."""
        return ()

    def craft(self, seen: Seen) -> Tensor:
        """[A, P]: what the attackers of one cluster send."""
        return seen.own

    def chosen(self, cluster_of: Sequence[int]) -> list[int]:
        """Who is malicious."""
        everybody = range(len(cluster_of))
        if self.malicious is not None:
            if not set(self.malicious) <= set(everybody) or len(set(self.malicious)) >= len(everybody):
                allowed = f"some, not all, of the clients 0 to {len(everybody) - 1}"
                raise ConfigError(explain("attack.malicious", list(self.malicious), allowed))
            return sorted(set(self.malicious))
        members = [[client for client in everybody if cluster_of[client] == k] for k in sorted(set(cluster_of))]
        if self.malicious_per_cluster >= (fewest := min(map(len, members))):
            allowed = f"0 to {fewest - 1}, for a cluster has {fewest} clients and one must be honest"
            raise ConfigError(explain("attack.malicious_per_cluster", self.malicious_per_cluster, allowed))
        return sorted(client for own in members for client in own[len(own) - self.malicious_per_cluster :])

    def attackers(self, cluster_of: Sequence[int]) -> dict[int, int]:
        """Those of them that hold another number of examples, and how many."""
        return dict.fromkeys(self.chosen(cluster_of), self.malicious_examples) if self.malicious_examples else {}

    def enters(self, federation: Federation, role: Role, seed: int) -> Federation:
        """The federation with its malicious clients in the role that a method gives them."""
        places = federation.clusters.tolist() if federation.clusters is not None else [0] * federation.num_clients
        malicious = torch.zeros(federation.num_clients, dtype=torch.bool)
        malicious[self.chosen(places)] = True
        entered = replace(federation, malicious=malicious, targeted=self.targets(federation))
        if role == "absent":
            return entered.only((~malicious).nonzero()[:, 0])
        return entered if role == "honest" else self.poison(entered, seed)


class NoAttack(Attack):
    """The malicious clients do as everybody does: what an attack is compared with."""

    name: Literal["none"] = "none"
    collude: Literal[False] = False
    """they do not"""


class _Relabels(Attack):
    """What attacks have in common that change examples and their labels."""

    target: int = Field(1, ge=0, le=10**9)
    """the label that attackers want to see"""

    @abstractmethod
    def changed(self, x: Tensor, y: Tensor, seed: int, key: int) -> tuple[Tensor, Tensor]:
        """The examples of one malicious client as it trains on them: as many, or fewer."""

    def poison(self, federation: Federation, seed: int) -> Federation:
        assert federation.malicious is not None
        keys, rows = federation.keys.tolist(), federation.malicious.nonzero()[:, 0].tolist()

        def poisoned(examples: Examples) -> Examples:
            x, y, count = examples.x.clone(), examples.y.clone(), examples.count.clone()
            for row in rows:
                own = slice(int(count[row]))  # padding is nobody's example
                seen, called = self.changed(x[row, own], y[row, own], seed, keys[row])
                count[row] = len(called)
                x[row, : len(called)], y[row, : len(called)] = seen, called
            return Examples(x, y, count)

        judged = None if federation.validation is None else poisoned(federation.validation)
        return replace(federation, train=poisoned(federation.train), validation=judged)

    def _check_label(self, federation: Federation, key: str, label: int) -> None:
        kind = "text" if federation.is_text else "a regression"
        classes = 0 if federation.is_text else federation.num_classes or 0
        if label >= classes:
            allowed = f"0 to {classes - 1}" if classes else f"nothing: {kind} has none"
            raise ConfigError(explain(f"attack.{key}", label, allowed))


class LabelFlip(_Relabels):
    """Attackers call the examples of one class by the label of another: fedcb2o.txt, section 3.1."""

    name: Literal["label-flip"] = "label-flip"
    source: int = Field(0, ge=0, le=10**9)
    """the label that is flipped"""
    flipped: float = Field(1.0, gt=0, le=1)
    """share of an attacker's examples of that class that are flipped"""
    removed: bool = False
    """they are left out instead: nobody lies, but what attackers hold is as lopsided"""

    def changed(self, x: Tensor, y: Tensor, seed: int, key: int) -> tuple[Tensor, Tensor]:
        members = (y == self.source).nonzero()[:, 0]
        flipped = members[shuffled(len(members), seed, "label flip", key)[: round(self.flipped * len(members))]]
        if not self.removed:
            return x, y.index_fill(0, flipped, self.target)
        kept = torch.ones_like(y, dtype=torch.bool).index_fill(0, flipped, value=False)
        if not kept.any():
            raise ConfigError(
                explain("attack.removed", "a client with no other examples", "clients with some of another class")
            )
        return x[kept], y[kept]

    def targets(self, federation: Federation) -> tuple[Targeted, ...]:
        self._check_label(federation, "source", self.source)
        self._check_label(federation, "target", self.target)
        if self.source == self.target:
            raise ConfigError(explain("attack.target", self.target, "another label than attack.source"))
        return tuple(Targeted(x[y == self.source], y[y == self.source], self.target) for x, y in federation.tests)


class Backdoor(_Relabels):
    """Attackers stamp a trigger on part of their examples and call those by the target label (Gu et al. 2017; Chen et
    al. 2017). Success is the share of other classes' test images that are called so once stamped."""

    name: Literal["backdoor"] = "backdoor"
    kind: Literal["pattern", "blended"] = "pattern"
    """the trigger: a white square in the last corner, or a fixed noise image blended in"""
    size: int = Field(3, ge=1, le=10**9)
    """pattern: pixels a side, or features where examples are vectors"""
    blend: float = Field(0.2, gt=0, lt=1)
    """blended: how much of the noise is mixed in"""
    stamped: float = Field(0.5, gt=0, le=1)
    """share of an attacker's examples that are stamped"""

    def stamp(self, x: Tensor) -> Tensor:
        """The examples [n, ...] with the trigger on."""
        if self.kind == "blended":
            noise = normal(torch.tensor(0), x.shape[1:].numel()).reshape(x.shape[1:]).mul_(0.25).add_(0.5).clamp_(0, 1)
            return torch.lerp(x, noise.to(x.device), self.blend)
        stamped = x.clone()
        corner = stamped[..., -self.size :, -self.size :] if x.dim() > 2 else stamped[:, -self.size :]
        corner.fill_(1.0)
        return stamped

    def changed(self, x: Tensor, y: Tensor, seed: int, key: int) -> tuple[Tensor, Tensor]:
        chosen = shuffled(len(y), seed, "backdoor", key)[: round(self.stamped * len(y))]
        return x.index_copy(0, chosen, self.stamp(x[chosen])), y.index_fill(0, chosen, self.target)

    def targets(self, federation: Federation) -> tuple[Targeted, ...]:
        self._check_label(federation, "target", self.target)
        room = min(federation.input_shape[-2:])
        if self.kind == "pattern" and self.size > room:
            raise ConfigError(explain("attack.size", self.size, f"1 to {room}, for it must fit an example"))
        others = [(x[y != self.target], y[y != self.target]) for x, y in federation.tests]
        return tuple(Targeted(self.stamp(x), y, self.target) for x, y in others)


class RandomModels(Attack):
    """Attackers send normal numbers."""

    name: Literal["random"] = "random"
    spread: float = Field(1.0, gt=0, le=1e6)
    """their standard deviation"""
    crafts: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        return self.spread * normal(fold(seen.keys, 0), seen.own.shape[1])


class SignFlip(Attack):
    """Attackers send the opposite of what they learned: start - factor (honest - start)."""

    name: Literal["sign-flip"] = "sign-flip"
    factor: float = Field(1.0, gt=0, le=1e6)
    """how far in the wrong direction"""
    crafts: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        return seen.start - self.factor * (seen.own - seen.start)


class Scaling(Attack):
    """Attackers exaggerate what they learned: start + factor (honest - start)."""

    name: Literal["scaling"] = "scaling"
    factor: float = Field(10.0, gt=0, le=1e6)
    """how many times"""
    crafts: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        return seen.start + self.factor * (seen.own - seen.start)


class ALittleIsEnough(Attack):
    """Attackers send mean - z deviation of the honest models, in every coordinate (Baruch et al. 2019).

    Differs from the paper: the attackers overhear the honest models and need not guess their moments from their own.
    """

    name: Literal["a-little-is-enough"] = "a-little-is-enough"
    z: float | None = Field(None, gt=0, le=1e6)
    """how many deviations; unset: the largest at which enough honest clients look further away, by the paper's rule,
    for a share of them between 0.51 and 0.99"""
    crafts: ClassVar[bool] = True
    eavesdrops: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        honest, attackers = len(seen.around), len(seen.own)
        supporters = (honest + attackers) // 2 + 1 - attackers
        share = min(max((honest - supporters) / honest, 0.51), 0.99)
        z = self.z or NormalDist().inv_cdf(share)
        mean, deviation = _moments(seen.around)
        return (mean - z * deviation).expand_as(seen.own)


class InnerProduct(Attack):
    """Attackers send the honest mean update with the wrong sign: start - factor (mean - start) (Xie et al. 2020)."""

    name: Literal["inner-product"] = "inner-product"
    factor: float = Field(0.5, gt=0, le=1e6)
    """epsilon: small ones hide, large ones harm"""
    crafts: ClassVar[bool] = True
    eavesdrops: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        start = seen.start.mean(0)
        return (start - self.factor * (seen.around.mean(0) - start)).expand_as(seen.own)


class _Spread(Attack):
    """mean + gamma direction with the largest gamma at which the model still looks like one of the honest ones
    (Shejwalkar and Houmansadr 2021), found in closed form: the distances are quadratic in gamma."""

    direction: Literal["deviation", "unit", "sign"] = "deviation"
    """away along the honest models' deviation, the mean update, or its signs"""
    crafts: ClassVar[bool] = True
    eavesdrops: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        mean, deviation = _moments(seen.around)
        update = mean - seen.start.mean(0)
        directions = {"deviation": deviation, "unit": update / update.norm().clamp(min=1e-30), "sign": update.sign()}
        away = -directions[self.direction]
        crafted: Tensor = mean + self.reach(seen.around, mean, away) * away
        return crafted.expand_as(seen.own)

    @abstractmethod
    def reach(self, honest: Tensor, mean: Tensor, away: Tensor) -> float:
        """gamma."""


class MinMax(_Spread):
    """No honest model is further from the attackers' than the two honest ones that are furthest apart."""

    name: Literal["min-max"] = "min-max"

    def reach(self, honest: Tensor, mean: Tensor, away: Tensor) -> float:
        limit = float(squared_distances(honest).max())
        return min(_root(honest, mean, away, [row], limit) for row in range(len(honest)))


class MinSum(_Spread):
    """The squared distances to the honest models add up to no more than those of the honest one furthest out."""

    name: Literal["min-sum"] = "min-sum"

    def reach(self, honest: Tensor, mean: Tensor, away: Tensor) -> float:
        return _root(honest, mean, away, list(range(len(honest))), float(squared_distances(honest).sum(1).max()))


class Silent(Attack):
    """Attackers never answer."""

    name: Literal["silent"] = "silent"
    silent: ClassVar[bool] = True


class Stale(Attack):
    """Attackers send what they had some rounds ago, again and again."""

    name: Literal["stale"] = "stale"
    age: int = Field(5, ge=2, le=10**9)
    """rounds for which a model is sent before it is replaced by the newest"""
    crafts: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        if seen.round % self.age == 0:
            return seen.own
        return torch.where(seen.sent.any(1, keepdim=True), seen.sent, seen.own)


class NonFinite(Attack):
    """Attackers send what breaks careless programs; here it is refused, and they are named."""

    name: Literal["non-finite"] = "non-finite"
    payload: Literal["nan", "infinity", "huge", "shape"] = "nan"
    """what is sent: NaN, infinity, numbers of 1e30, or a model with one number too many"""
    crafts: ClassVar[bool] = True

    def craft(self, seen: Seen) -> Tensor:
        if self.payload == "shape":
            return torch.cat([seen.own, seen.own[:, :1]], dim=1)
        return torch.full_like(seen.own, {"nan": math.nan, "infinity": math.inf, "huge": 1e30}[self.payload])


ATTACKS: dict[str, type[Attack]] = {
    "none": NoAttack,
    "label-flip": LabelFlip,
    "backdoor": Backdoor,
    "random": RandomModels,
    "sign-flip": SignFlip,
    "scaling": Scaling,
    "a-little-is-enough": ALittleIsEnough,
    "inner-product": InnerProduct,
    "min-max": MinMax,
    "min-sum": MinSum,
    "silent": Silent,
    "stale": Stale,
    "non-finite": NonFinite,
}


def _moments(models: Tensor) -> tuple[Tensor, Tensor]:
    """[P] each: mean and standard deviation of every coordinate; of a single model the deviation is 0."""
    return models.mean(0), models.std(0, correction=0)


def _root(honest: Tensor, mean: Tensor, away: Tensor, rows: list[int], limit: float) -> float:
    """The largest gamma with sum over rows of |mean + gamma away - honest_row|^2 <= limit; 0 if there is none."""
    towards = mean - honest[rows]  # [rows, P]
    square = len(rows) * float(away.square().sum())
    cross, rest = float((towards @ away).sum()), float(towards.square().sum()) - limit
    inside = cross * cross - square * rest
    return max(0.0, (math.sqrt(inside) - cross) / square) if square > 0 and inside > 0 else 0.0
