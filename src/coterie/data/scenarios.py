"""Scenarios: how one data set is dealt out to clients whose data differ.

A scenario makes a plan (which training examples each client holds, and which distribution it follows: what that one
does to images and labels, and which test examples it has); one function turns the plan into a federation. The clients
of a cluster stand together, cluster 0 first, and share one test set.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.data.partition import (
    deal,
    dirichlet,
    even_sizes,
    in_proportion,
    lognormal_weights,
    power_law_weights,
    skewed_sizes,
)
from coterie.data.sources import Source, SourceName, as_floats, load
from coterie.errors import ConfigError, explain
from coterie.federation import Examples, Federation, shuffled, split
from coterie.options import Options


def _same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Distribution:
    """What the clients of one distribution see of the source."""

    test: Tensor  # indices of its test examples
    images: Callable[[Tensor], Tensor] = _same  # on float images [n, c, h, w]
    labels: Callable[[Tensor], Tensor] = _same  # on int64 labels [n]


@dataclass(frozen=True)
class Plan:
    """Who holds what."""

    held: list[Tensor]  # indices of the training examples of each client
    distributions: list[Distribution]
    distribution_of: list[int]
    num_classes: int
    clusters_known: bool = True  # the distributions are the true clusters


class Scenario(Options):
    """What all scenarios have in common."""

    name: str
    """Which scenario."""

    @abstractmethod
    def build(self, seed: int, attackers: Mapping[int, int] | None = None) -> Federation:
        """The federation of this scenario; the same for the same seed. `attackers` are clients that hold another number
        of examples."""

    @abstractmethod
    def cluster_of(self) -> list[int]:
        """The true cluster of each client, all 0 where there are none."""


class Dealt(Scenario):
    """What scenarios that deal out one data set have in common."""

    data: SourceName = "digits"
    """Data set: digits, mnist, fashion-mnist, emnist, cifar10 or cifar100."""
    clients: int = Field(40, ge=1, le=10**7)
    """Number of clients."""
    examples_per_client: int = Field(100, ge=1, le=10**9)
    """Examples each client holds, those kept for validation included."""
    validation: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of each client's examples kept for judging peers; with 0 peers are judged on the training examples."""

    def build(self, seed: int, attackers: Mapping[int, int] | None = None) -> Federation:
        """The federation of this scenario; the same for the same seed. Attackers train on all their examples: what they
        judge peers by is a part of those."""
        attackers = attackers or {}
        if self.validation and self.examples_per_client < 2:
            allowed = "2 or more with scenario.validation, one to train on and one to keep"
            raise ConfigError(explain("scenario.examples_per_client", self.examples_per_client, allowed))
        self.check_sizes()
        source = load(self.data)
        sizes = [attackers.get(client, self.examples_per_client) for client in range(self.clients)]
        return self._assemble(source, self.plan(source, seed, sizes), seed, attackers)

    def cluster_of(self) -> list[int]:
        return [0] * self.clients

    def check_sizes(self) -> None:
        """Refuse what cannot be, as far as that is known before the data is."""

    @abstractmethod
    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        """Deal the source out, so many examples to each client."""

    def _assemble(self, source: Source, plan: Plan, seed: int, attackers: Mapping[int, int]) -> Federation:
        parts = [split(len(rows), self.validation, 0.0, seed, key)[:2] for key, rows in enumerate(plan.held)]
        for key in attackers:
            parts[key] = torch.arange(len(plan.held[key])), parts[key][1]
        following = torch.tensor(plan.distribution_of)

        def examples(part: int) -> Examples:
            def each() -> Iterator[tuple[Tensor, Tensor]]:
                for rows, chosen, place in zip(plan.held, parts, plan.distribution_of, strict=True):
                    taken = rows[chosen[part]]
                    yield _seen(source.train_x, source.train_y, taken, plan.distributions[place])

            return Examples.filled([len(chosen[part]) for chosen in parts], each())

        return Federation(
            name=self.name,
            train=examples(0),
            validation=examples(1) if self.validation else None,
            tests=tuple(_seen(source.test_x, source.test_y, each.test, each) for each in plan.distributions),
            test_of=following,
            clusters=following.clone() if plan.clusters_known else None,
            keys=torch.arange(self.clients),
            num_classes=plan.num_classes,
            source=source.title,
        )

    def _refuse_more_than_exist(self, available: int, sizes: Sequence[int], where: str) -> None:
        """Clients divide `available` examples, so many each, none given twice."""
        if sum(sizes) <= available:
            return
        sharers = len(sizes)
        if max(sizes) != self.examples_per_client and self.examples_per_client * sharers <= available:
            fewer = available - (sum(sizes) - sum(size for size in sizes if size == max(sizes)))
            allowed = f"at most {max(fewer, 0) // sizes.count(max(sizes))} here: {available} training examples {where}"
            raise ConfigError(explain("attack.malicious_examples", max(sizes), allowed, "Lower it."))
        if sharers > available:
            allowed = f"at most {available} clients to share {available} training examples {where}"
            raise ConfigError(explain("scenario.clients", self.clients, allowed, "Lower it."))
        allowed = f"1 to {available // sharers} ({sharers} clients share {available} training examples {where})"
        do = "Lower it or scenario.clients."
        raise ConfigError(explain("scenario.examples_per_client", self.examples_per_client, allowed, do))


class Clustered(Dealt):
    """What scenarios with true clusters have in common."""

    clusters: int = Field(4, ge=1, le=10_000)
    """Number of true clusters; clients are spread over them as evenly as possible."""
    cluster_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """Clients of each cluster, instead."""

    def check_sizes(self) -> None:
        sizes = self.cluster_sizes
        if sizes is not None and (len(sizes) != self.clusters or sum(sizes) != self.clients):
            allowed = f"{self.clusters} numbers, one for each of scenario.clusters, with the sum {self.clients}"
            raise ConfigError(explain("scenario.cluster_sizes", sizes, allowed, "Change it or scenario.clients."))
        if self.clients < self.clusters:
            allowed = f"{self.clusters} or more, one for each of scenario.clusters"
            raise ConfigError(
                explain("scenario.clients", self.clients, allowed, "Raise it or lower scenario.clusters.")
            )

    def cluster_of(self) -> list[int]:
        return [cluster for cluster, size in enumerate(self._sizes()) for _ in range(size)]

    def _sizes(self) -> list[int]:
        return self.cluster_sizes or even_sizes(self.clients, self.clusters)

    def _members_sizes(self, sizes: Sequence[int]) -> Iterator[Sequence[int]]:
        """Those of each cluster's clients."""
        ends = list(itertools.accumulate(self._sizes()))
        return (sizes[begin:end] for begin, end in zip([0, *ends], ends, strict=False))

    def _every_cluster_deals_all(self, source: Source, seed: int, sizes: Sequence[int]) -> list[Tensor]:
        """Each cluster cuts its own permutation of all training examples into its clients' pieces."""
        everything = torch.arange(len(source.train_y))
        held: list[Tensor] = []
        for cluster, of_members in enumerate(self._members_sizes(sizes)):
            self._refuse_more_than_exist(len(everything), of_members, f"of {source.title} in a cluster")
            held += deal(everything, of_members, seed, "deal", cluster)
        return held


class Rotated(Clustered):
    """Clusters that see the same images, each rotated by an angle of its own."""

    name: Literal["rotated"] = "rotated"
    """Which scenario."""
    angles: list[float] | None = None
    """Angle of each cluster in degrees, counter-clockwise; by default spread evenly over the circle from 0. Multiples
    of 90 are exact, others interpolate between pixels."""

    def check_sizes(self) -> None:
        super().check_sizes()
        if self.angles is not None and len(self.angles) != self.clusters:
            allowed = f"{self.clusters} angles, one for each of scenario.clusters"
            raise ConfigError(explain("scenario.angles", list(self.angles), allowed))
        if not all(math.isfinite(angle) for angle in self.angles or ()):
            raise ConfigError(explain("scenario.angles", list(self.angles or ()), "finite numbers of degrees"))

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        angles = self.angles or tuple(360 / self.clusters * cluster for cluster in range(self.clusters))
        everything = torch.arange(len(source.test_y))
        views = [Distribution(everything, images=partial(rotate, angle=angle)) for angle in angles]
        held = self._every_cluster_deals_all(source, seed, sizes)
        return Plan(held, views, self.cluster_of(), source.num_classes)


class Permuted(Clustered):
    """Clusters that see the same images and name the classes differently; cluster 0 keeps the true labels."""

    name: Literal["permuted"] = "permuted"
    """Which scenario."""
    shift: int | None = Field(None, ge=1, le=10**9)
    """Cluster k calls class c (c + shift * k) modulo the classes; unset, each has a random permutation of its own."""

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        names = [self._names(cluster, source.num_classes, seed) for cluster in range(self.clusters)]
        if self.shift and len({int(of_zero[0]) for of_zero in names}) < self.clusters:
            allowed = f"a step that shifts {self.clusters} clusters differently, modulo {source.num_classes} classes"
            raise ConfigError(explain("scenario.shift", self.shift, allowed, "Change it or lower scenario.clusters."))
        everything = torch.arange(len(source.test_y))
        views = [Distribution(everything, labels=new.__getitem__) for new in names]
        held = self._every_cluster_deals_all(source, seed, sizes)
        return Plan(held, views, self.cluster_of(), source.num_classes)

    def _names(self, cluster: int, num_classes: int, seed: int) -> Tensor:
        """[classes] int64: what this cluster calls each class."""
        if self.shift:
            return (torch.arange(num_classes) + self.shift * cluster) % num_classes
        return shuffled(num_classes, seed, "label names", cluster) if cluster else torch.arange(num_classes)


class DisjointClasses(Clustered):
    """Clusters that each see classes of their own; no example is held twice."""

    name: Literal["disjoint-classes"] = "disjoint-classes"
    """Which scenario."""
    examples_per_client: int = Field(25, ge=1, le=10**9)
    """Examples each client holds, those kept for validation included."""
    relabel: bool = False
    """Number the classes of every cluster from 0, so that clusters disagree about what an output means."""

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        if self.clusters > source.num_classes:
            allowed = f"1 to {source.num_classes}, the classes of {source.title}"
            raise ConfigError(explain("scenario.clusters", self.clusters, allowed, "Lower it."))
        widths = even_sizes(source.num_classes, self.clusters)
        held, views, first = [], [], 0
        for cluster, (width, of_members) in enumerate(zip(widths, self._members_sizes(sizes), strict=True)):
            mine = _labelled(source.train_y, first, width)
            self._refuse_more_than_exist(len(mine), of_members, f"of {source.title} in cluster {cluster}")
            held += deal(mine, of_members, seed, "deal", cluster)
            renamed = partial(torch.sub, other=first) if self.relabel else _same
            views.append(Distribution(_labelled(source.test_y, first, width), labels=renamed))
            first += width
        return Plan(held, views, self.cluster_of(), widths[0] if self.relabel else source.num_classes)


class DirichletSkew(Dealt):
    """Clients whose label proportions are drawn from a Dirichlet law; no clusters, and no example is held twice.

    The test set of a client is drawn from the source's, without repeats and as large as its size allows, so that the
    classes occur in it as in the client's own examples.
    """

    name: Literal["dirichlet"] = "dirichlet"
    """Which scenario."""
    examples_per_client: int = Field(25, ge=1, le=10**9)
    """Examples each client holds, those kept for validation included."""
    beta: float = Field(0.5, gt=0.0, le=1e6)
    """Concentration of each class: near 0 a client has one class, above 10 it has all about equally."""
    test_examples: int = Field(500, ge=1, le=10**9)
    """Test examples of a client, at most: every client has a test set of its own, and this bounds their memory."""

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        self._refuse_more_than_exist(len(source.train_y), sizes, f"of {source.title}")
        held = dirichlet(source.train_y, source.num_classes, sizes, self.beta, seed)
        tests = [
            in_proportion(source.train_y[rows], source.test_y, self.test_examples, source.num_classes, seed, client)
            for client, rows in enumerate(held)
        ]
        views = [Distribution(rows) for rows in tests]
        return Plan(held, views, list(range(self.clients)), source.num_classes, clusters_known=False)


class QuantitySkew(Dealt):
    """Clients of one distribution that hold very different numbers of examples; no example is held twice."""

    name: Literal["quantity-skew"] = "quantity-skew"
    """Which scenario."""
    examples_per_client: int = Field(25, ge=2, le=10**9)
    """Average number of examples of a client, those kept for validation included; every client has 2 or more."""
    kind: Literal["log-normal", "power-law"] = "log-normal"
    """Law of the sizes."""
    spread: float = Field(1.0, ge=0.0, le=10.0)
    """Standard deviation of the logarithm (log-normal), or exponent of the rank (power-law); 0 gives equal sizes."""
    largest: float = Field(8.0, ge=1.0, le=1e6)
    """No client holds more than this many times the average: memory grows with the largest client."""

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        if set(sizes) != {self.examples_per_client}:
            raise ConfigError(explain("attack.malicious_examples", max(sizes), "nothing, as sizes are drawn here"))
        self._refuse_more_than_exist(len(source.train_y), sizes, f"of {source.title}")
        draw = lognormal_weights if self.kind == "log-normal" else power_law_weights
        most = int(self.largest * self.examples_per_client)
        total = self.clients * self.examples_per_client
        skewed = skewed_sizes(draw(self.clients, self.spread, seed), total, least=2, most=most)
        return _one_distribution(source, skewed, seed)


class Iid(Dealt):
    """Clients of one distribution and one size: nothing to find out, a check that nothing is lost."""

    name: Literal["iid"] = "iid"
    """Which scenario."""
    examples_per_client: int = Field(25, ge=1, le=10**9)
    """Examples each client holds, those kept for validation included."""

    def plan(self, source: Source, seed: int, sizes: Sequence[int]) -> Plan:
        self._refuse_more_than_exist(len(source.train_y), sizes, f"of {source.title}")
        return _one_distribution(source, sizes, seed)


DEALT: dict[str, type[Dealt]] = {
    "rotated": Rotated,
    "permuted": Permuted,
    "disjoint-classes": DisjointClasses,
    "dirichlet": DirichletSkew,
    "quantity-skew": QuantitySkew,
    "iid": Iid,
}


def _one_distribution(source: Source, sizes: Sequence[int], seed: int) -> Plan:
    """All clients in one cluster, no example held twice."""
    held = deal(torch.arange(len(source.train_y)), sizes, seed, "deal")
    return Plan(held, [Distribution(torch.arange(len(source.test_y)))], [0] * len(sizes), source.num_classes)


def _labelled(labels: Tensor, first: int, width: int) -> Tensor:
    """Indices of the examples of `width` classes from `first` on."""
    return ((labels >= first) & (labels < first + width)).nonzero().flatten()


def _seen(x: Tensor, y: Tensor, rows: Tensor, view: Distribution) -> tuple[Tensor, Tensor]:
    """These examples as a distribution sees them."""
    return view.images(as_floats(x[rows])), view.labels(y[rows])


def rotate(images: Tensor, angle: float) -> Tensor:
    """Float images [n, c, h, w] turned counter-clockwise; what comes in from outside is 0."""
    quarters, rest = divmod(angle % 360, 90)
    if rest == 0:
        return images.rot90(int(quarters), dims=(2, 3))
    turn = math.radians(angle)
    cosine, sine = math.cos(turn), math.sin(turn)
    # where in the input each output pixel comes from: x to the right, y downwards, from the middle
    back = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]]).expand(len(images), 2, 3)
    grid = torch.nn.functional.affine_grid(back, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", align_corners=False)
