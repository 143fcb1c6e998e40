"""The particle systems: CBO, CB²O, FedCBO (fedcbo-jmlr.txt (4)) and FedCB²O (fedcb2o.txt (3.10)) are one.

Shapes: R independent runs, N particles of which some may be malicious, d dimensions, K clusters, B particles that are
asked in a step (all of them unless there are batches), F functions (the K losses and then the upper ones).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.consensus import gibbs, in_quantile
from coterie.errors import ConfigError, DataError, explain
from coterie.particles.attackers import Attackers, Seen
from coterie.particles.draws import TILE, Draws
from coterie.particles.dynamics import Dynamics, Now
from coterie.particles.functions import Function, Objective, Takes
from coterie.particles.start import Start, beginning, box, numbered
from coterie.particles.tiles import Piece, Tile, tiles
from coterie.randomness import bits, derive, fold


class ClusteredSystem:
    """Particles of K clusters, each with a loss of its own, who move toward what minimises it among all particles.

    d theta = -lambda_1 (theta - m_k) dt - lambda_2 grad L_k dt + sigma_1 D(theta - m_k) dB + sigma_2 |grad L_k| dB',
    with m_k the mean of all particles under weights exp(-alpha L_k) (fedcbo-jmlr.txt (4)); with `upper` G and beta, of
    those in the quantile set of L_k under weights exp(-alpha G) (fedcb2o.txt (3.10)). One loss is plain CBO or CB²O.

    sizes: particles of each cluster. start: of all of them, bounds (lower, upper), a sampler, or an array. upper: one
    function, or one for each cluster. runs: how many independent runs, or their numbers. Further options: `Dynamics`.
    """

    def __init__(
        self,
        losses: Sequence[Function],
        start: Start,
        *,
        sizes: Sequence[int] | None = None,
        upper: Function | Sequence[Function] | None = None,
        gradients: Sequence[Function] | None = None,
        attackers: Attackers | None = None,
        bounds: tuple[Any, Any] | None = None,
        dimension: int | None = None,
        seed: int = 0,
        runs: int | Iterable[int] = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        takes: Takes | None = None,
        **how: Any,
    ) -> None:
        self.dynamics, self.seed, self.runs, self.steps, self.time = Dynamics.of(how), seed, numbered(runs), 0, 0.0
        self.functions, self.uppers = _objectives(losses, upper, gradients, takes)
        self.num_clusters = len(losses)
        total = None if sizes is None else sum(sizes)
        self.x = beginning(start, total, dimension, self.runs, seed, dtype, device)  # [R, N, d]
        sizes = sizes or [self.x.shape[1] // self.num_clusters] * self.num_clusters
        self.clusters = _slices(sizes, self.x.shape[1])
        self.honest = self.x.shape[1]
        self.attackers = attackers
        if attackers is not None:
            other = derive(seed, "attackers")
            malicious = beginning(attackers.start, attackers.count, self.x.shape[2], self.runs, other, dtype, device)
            self.x = torch.cat([self.x, malicious.to(self.x)], dim=1)
        self.bounds = None if bounds is None else [b.to(self.x) for b in box("bounds", bounds, self.x.shape[2])]
        self._check()
        self._draws = {p: Draws(seed, p, self.runs, self.x[0].numel()) for p in ("consensus", "gradient", "memory")}
        self._malice = Draws(seed, "attack", self.runs, self.x[0].numel())
        self._best: Tensor | None = None  # [R, N, d], where each particle has been best
        self._best_values: Tensor | None = None  # [F, R, N]
        self._order: tuple[int, Tensor] | None = None  # the epoch and its permutation [R, N]
        self._prepare()

    @property
    def asked(self) -> int:
        """How many points a loss or an upper function was asked about so far."""
        return sum(function.asked for function in self.functions)

    def positions(self, cluster: int = 0) -> Tensor:
        """[R, N_k, d]: the honest particles of a cluster."""
        return self.x[:, self.clusters[cluster]]

    @property
    def consensus(self) -> Tensor:
        """[K, R, d]: the consensus of the last step, NaN before the first. The next step writes over it."""
        return self._means[:, :, 0]

    def spread(self) -> Tensor:
        """[K, R]: mean squared distance of a cluster's particles from their consensus."""
        total = self.x.new_zeros(self.num_clusters, len(self.runs))
        for piece in (piece for tile in self._tiles for piece in tile.pieces):
            away = torch.sub(piece.x, piece.consensus, out=piece.away)
            total[piece.cluster, piece.runs] += away.square_().sum((1, 2))
        return total / total.new_tensor([part.stop - part.start for part in self.clusters])[:, None]

    def run(self, steps: int) -> "ClusteredSystem":
        """Make so many steps."""
        for _ in range(steps):
            self.tell(self.evaluate())
        return self

    def points(self) -> Tensor:
        """[R, B, d]: those to be asked next."""
        if self.dynamics.batch is None:
            return self.x
        return self.x.gather(1, self._heard()[..., None].expand(-1, -1, self.x.shape[2]))

    def evaluate(self) -> Tensor:
        """[F, R, B]: every function at the points to be asked next, in blocks that fit the cache."""
        points = self.points()
        blocks = [points[tile].flatten(0, 1) for tile in tiles(points.shape)] if points is not self.x else self._blocks
        found = [[function.values(block) for block in blocks] for function in self.functions]
        values = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in found]
        return (torch.stack(values) if len(values) > 1 else values[0]).view(-1, *points.shape[:2])

    def tell(self, values: Tensor) -> None:
        """One step, given the functions' values [F, R, B] at `points`."""
        self.agree(values)
        self.move(values=values)

    def agree(self, values: Tensor) -> None:
        """Find each cluster's consensus of the points that were asked."""
        points, alpha = self.points(), self.dynamics.at(self.steps).alpha
        if self.dynamics.remembers:
            points, values = self._remember(values)
        for k, mean in enumerate(self._mean_of):
            weights = self._weights(values, k, points, alpha)
            torch.bmm(weights[:, None], points, out=mean)
            if self.dynamics.diffusion == "covariance":
                self._roots[k] = _root(points, weights, mean)

    def move(self, consensus: Tensor | None = None, values: Tensor | None = None) -> None:
        """Move every particle by the consensus found, or by one that is given [K, R, d]; attackers see the values."""
        now = self.dynamics.at(self.steps)
        if consensus is not None:
            self._means.copy_(consensus[:, :, None])
        foes = None if self.attackers is None else self._malicious(self.attackers, now, values)
        moves = self._chosen() if self.dynamics.partial else None
        ahead = self._noise_ahead()
        for tile in self._tiles:
            if ahead is None:
                self._normal("consensus", tile.noise[0], tile.runs, tile.first)
            for piece in tile.pieces:
                self._move(piece, piece.noise[ahead or 0], now, moves)
        if foes is not None:
            self.x[:, self.honest :] = foes
        if self.bounds is not None:
            torch.clamp(self.x, *self.bounds, out=self.x)
        self.steps += 1
        self.time += now.dt

    def keep(self, runs: Tensor) -> None:
        """Go on with some of the runs [R] bool; what these do does not depend on it."""
        self.runs = [run for run, kept in zip(self.runs, runs.tolist(), strict=True) if kept]
        self.x, means = self.x[runs], self.consensus[:, runs]
        if self._best is not None and self._best_values is not None:
            self._best, self._best_values = self._best[runs], self._best_values[:, runs]
        for draws in (*self._draws.values(), self._malice):
            draws.keep(runs)
        self._order = None
        self._prepare()
        self.consensus.copy_(means)

    def _check(self) -> None:
        how, count = self.dynamics, self.x.shape[1]
        if count < 2:
            do = "One particle is its own consensus and does not move."
            raise ConfigError(explain("particles", count, "at least 2", do))
        if how.beta is not None and how.beta * (how.batch or count) < 1 - 1e-9:
            do = f"The quantile set of {how.batch or count} particles is empty below 1/{how.batch or count}."
            raise ConfigError(explain("beta", how.beta, f"{1 / (how.batch or count):.4g} to 1", do))
        if (how.beta is None) == bool(self.uppers):
            raise ConfigError(explain("beta", how.beta, "a number together with an upper function, else None"))
        if how.batch is not None and not 1 < how.batch <= count:
            raise ConfigError(explain("batch", how.batch, f"2 to {count}, the number of particles"))
        if how.batch is not None and self.attackers is not None:
            raise ConfigError(explain("batch", how.batch, "None together with attackers"))
        if how.partial and how.batch is None:
            raise ConfigError(explain("partial", True, "False without batch"))

    def _prepare(self) -> None:
        """Memory to work in, and views of it. Small ensembles have their noise drawn for many steps at once."""
        x, parts = self.x, list(tiles(self.x.shape))
        clusters = self.num_clusters, *x.shape[::2]
        self._means = x.new_full((*clusters[:2], 1, clusters[2]), torch.nan)  # m_k
        self._mean_of = list(self._means)
        self._roots = x.new_empty(*clusters, clusters[2]) if self.dynamics.diffusion == "covariance" else x.new_empty(0)
        small = x.device.type == "cpu" and x.dtype == torch.float32 and len(parts) == 1
        self._num_ahead = max(1, TILE // 2 // max(1, x.numel())) if small else 1
        self._first_ahead = -self._num_ahead  # the step for which the first of the noise ahead was drawn
        largest = max((x[tile].numel() for tile in parts), default=0)
        self._away, self._room = x.new_empty(largest), x.new_empty(self._num_ahead * largest)
        self._blocks = [x[tile].flatten(0, 1) for tile in parts]
        self._tiles = [self._cut(*tile) for tile in parts]

    def _cut(self, runs: slice, tile: slice) -> Tile:
        """A tile with the clusters' parts of it; the attackers' part is in no piece."""
        x = self.x[runs, tile]
        noise = self._room[: self._num_ahead * x.numel()].view(-1, *x.shape)
        pieces = []
        for k, cluster in enumerate(self.clusters):
            part = slice(max(cluster.start, tile.start), min(cluster.stop, tile.stop))
            if part.start < part.stop:
                within = slice(part.start - tile.start, part.stop - tile.start)
                away = self._away[: x[:, within].numel()].view(x[:, within].shape)
                drawn = [step[:, within] for step in noise]
                pieces.append(Piece(k, runs, part, x[:, within], away, self._means[k, runs], drawn))
        return Tile(runs, tile.start, noise, pieces)

    def _noise_ahead(self) -> int | None:
        """Where this step's noise is among that drawn ahead, if there is such."""
        if self._num_ahead == 1:
            return None
        if not 0 <= self.steps - self._first_ahead < self._num_ahead:
            self._draws["consensus"].ahead(self._room.view(self._num_ahead, *self.x.shape), self.steps)
            self._first_ahead = self.steps
        return self.steps - self._first_ahead

    def _normal(self, purpose: str, out: Tensor, runs: slice, first: int) -> Tensor:
        return self._draws[purpose].normal(out, runs, self.steps, first * self.x.shape[2])

    def _move(self, piece: Piece, noise: Tensor, now: Now, moves: Tensor | None) -> None:
        """In place and in few passes: this is where the time goes."""
        x, away = piece.x, torch.sub(piece.x, piece.consensus, out=piece.away)
        further = self._own_terms(piece, now)
        if moves is not None:
            away *= moves[piece.runs, piece.part]
        scale = now.noise * now.dt**0.5
        if self.dynamics.diffusion == "isotropic":
            x.addcmul_(noise, torch.linalg.vector_norm(away, dim=-1, keepdim=True), value=scale)
        elif self.dynamics.diffusion == "anisotropic":
            x.addcmul_(noise, away, value=scale)
        else:
            shaken = noise @ self._roots[piece.cluster, piece.runs]
            x.add_(shaken if moves is None else shaken * moves[piece.runs, piece.part], alpha=scale)
        x.add_(away, alpha=-self.dynamics.drift * now.dt)
        if further is not None:
            x.add_(further if moves is None else further * moves[piece.runs, piece.part])

    def _own_terms(self, piece: Piece, now: Now) -> Tensor | None:
        """What a particle's own gradient and memory add to its step, if anything."""
        how, x, added = self.dynamics, piece.x, None
        if how.descends:
            slope = self.functions[piece.cluster].gradients(x.flatten(0, 1)).view(x.shape)
            length = slope.norm(dim=-1, keepdim=True)
            added = self._term("gradient", piece, slope, length, how.gradient_drift, how.gradient_noise, now)
        if self._best is not None:
            away = x - self._best[piece.runs, piece.part]
            size = away if how.diffusion == "anisotropic" else away.norm(dim=-1, keepdim=True)
            back = self._term("memory", piece, away, size, how.memory_drift, how.memory_noise, now)
            added = back if added is None else added + back
        return added

    def _term(
        self, purpose: str, piece: Piece, push: Tensor, size: Tensor, drift: float, noise: float, now: Now
    ) -> Tensor:
        """-drift push dt + noise size dB."""
        added = push * (-drift * now.dt)
        if noise:
            drawn = self._normal(purpose, torch.empty_like(added), piece.runs, piece.part.start)
            added += noise * now.dt**0.5 * size * drawn
        return added

    def _weights(self, values: Tensor, k: int, points: Tensor, alpha: float) -> Tensor:
        """[R, B]: how much each point counts for a cluster."""
        if not self.uppers:
            weights = torch.softmax(-alpha * values[k], dim=-1)
            if math.isfinite(float(weights.sum())):
                return weights
            weights = gibbs(values[k], alpha)  # the same with care for values that are not finite, at twice the time
        else:
            how = self.dynamics
            losses = values[k]
            within = in_quantile(losses, how.beta or 1.0, how.delta_q, how.averaged)
            if how.radius is not None:
                within &= points.norm(dim=-1) <= how.radius
            weights = gibbs(values[self.uppers[k]].masked_fill(~within, torch.inf), alpha)
        if not bool(weights.any(-1).all()):
            self._complain(values, k, weights)
        return weights

    def _complain(self, values: Tensor, k: int, weights: Tensor) -> None:
        run = self.runs[int((weights.sum(-1) > 0).long().argmin())]
        where = f"step {self.steps}, run {run}, {self.functions[k].name}"
        if not self.uppers or not bool(torch.isfinite(values[k]).any(-1).all()):
            do = "If it was finite at first, the particles have flown apart: lower noise or dt, or set bounds."
            raise DataError(f"{where}: its value is NaN or infinite for every particle. {do}")
        do = "Widen radius or mend the upper function."
        raise DataError(f"{where}: no particle of the quantile set has a finite upper value within the radius. {do}")

    def _remember(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The best points so far [R, N, d] with their values, each by the loss of the particle's own cluster."""
        if self._best is None or self._best_values is None:
            self._best, self._best_values = self.x.clone(), values.clone()
            return self._best, self._best_values
        better = torch.ones_like(values[0], dtype=torch.bool)  # attackers are where they are
        for k, part in enumerate(self.clusters):
            held = self._best_values[k, :, part]
            better[:, part] = (values[k, :, part] < held) | ~torch.isfinite(held)
        torch.where(better[..., None], self.x, self._best, out=self._best)
        torch.where(better, values, self._best_values, out=self._best_values)
        return self._best, self._best_values

    def _heard(self) -> Tensor:
        """[R, B]: who is asked in this step. In an epoch of N // B steps nobody is asked twice."""
        size, count = self.dynamics.batch or 0, self.x.shape[1]
        epoch, place = divmod(self.steps, count // size)
        if self._order is None or self._order[0] != epoch:
            keys = torch.tensor([derive(self.seed, "batch", run) for run in self.runs])
            self._order = epoch, bits(fold(keys, epoch), count).argsort(dim=1).to(self.x.device)
        return self._order[1][:, place * size : (place + 1) * size]

    def _chosen(self) -> Tensor:
        """[R, N, 1]: 1 for those of the batch, 0 for others."""
        chosen = self.x.new_zeros(self.x.shape[:2])
        return chosen.scatter_(1, self._heard(), 1.0)[..., None]

    def _malicious(self, attackers: Attackers, now: Now, values: Tensor | None) -> Tensor:
        """[R, n, d]: where attackers go, from what was known before anybody moved."""
        x = self.x[:, self.honest :]
        losses = values[: self.num_clusters, :, self.honest :] if values is not None else x.new_empty(0)
        moved = attackers.move(x.clone(), Seen(self.steps, self.time, now.dt, losses, self._malice))
        if moved.shape != x.shape:
            raise DataError(explain("attackers, shape of what they move to", tuple(moved.shape), str(tuple(x.shape))))
        return moved


def _objectives(
    losses: Sequence[Function], upper: Any, gradients: Sequence[Function] | None, takes: Takes | None
) -> tuple[list[Objective], list[int]]:
    """The functions, each once, and for each cluster which of them is its upper one."""
    if not losses or (gradients is not None and len(gradients) != len(losses)):
        raise ConfigError(explain("losses", len(losses), "at least one, and as many as gradients"))
    slopes: Sequence[Function | None] = gradients or [None] * len(losses)
    only = "f" if upper is None else "L"
    names = [only if len(losses) == 1 else f"L_{k + 1}" for k in range(len(losses))]
    functions = [Objective(f, name, takes, slope) for f, name, slope in zip(losses, names, slopes, strict=True)]
    if upper is None:
        return functions, []
    wanted = list(upper) if isinstance(upper, Sequence) else [upper] * len(losses)
    if len(wanted) != len(losses):
        raise ConfigError(explain("upper", len(wanted), f"one function, or one for each of {len(losses)} clusters"))
    different = list({id(function): function for function in wanted}.values())
    functions += [Objective(function, "G", takes) for function in different]
    return functions, [len(losses) + [id(f) for f in different].index(id(function)) for function in wanted]


def _slices(sizes: Sequence[int], total: int) -> list[slice]:
    if sum(sizes) != total or min(sizes) < 1:
        raise ConfigError(explain("sizes", list(sizes), f"numbers of at least 1 that sum to {total}, the particles"))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _root(points: Tensor, weights: Tensor, mean: Tensor) -> Tensor:
    """[R, d, d]: the symmetric root of the weighted covariance."""
    away = points - mean[:, None]
    values, vectors = torch.linalg.eigh((weights[..., None] * away).mT @ away)
    root: Tensor = vectors @ (values.clamp(min=0.0).sqrt()[..., None] * vectors.mT)
    return root
