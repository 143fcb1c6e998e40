"""All clients in this process: exchanges are answered in blocks of clients, side by side on the machine's cores."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.clients import OPTIMISER, Clients, Peers
from coterie.core import NOBODY, Ask, Given, Replies, Tensors, keep_rows, wrong_rows
from coterie.descent import Train
from coterie.federation import Federation
from coterie.kernels import Kernel
from coterie.randomness import Moment

Publish = Callable[[Tensor, Tensor], None]  # takes in the models [R, P] of clients [R]

BLOCK_BYTES = 256 << 20  # of models in one block: bounds what a thread holds besides the clients' memories


@dataclass(frozen=True)
class _Published:
    """What clients published; only accepted rows are there."""

    models: Tensor  # [N, P]
    there: Tensor  # [N] bool

    @staticmethod
    def none(size: int, like: Tensor) -> "_Published":
        """Room for all clients' models of this size."""
        return _Published(torch.zeros(len(like), size, device=like.device), torch.zeros_like(like))

    def add(self, ids: Tensor, models: Tensor) -> None:
        """Take in the models [R, P] of these clients [R]."""
        self.models[ids] = models
        self.there[ids] = True


class SimulatedFleet:
    """The default fleet. Results never depend on `threads`. With the loop kernel they do not depend on `block` (clients
    of a block) either, to the last bit; with the other kernels, to the rounding of float32.

    A client whose new memory or reply is refused (core.py, `wrong_rows`) is absent from the replies, what it published
    reaches nobody, and its memory stays as it was before the exchange.
    """

    name = "simulated"

    def __init__(
        self,
        federation: Federation,
        kernel: Kernel,
        options: Train,
        memory: Tensors,
        *,
        block: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.num_clients = federation.num_clients
        self._federation = federation
        self._kernel = kernel
        self._options = options
        self._memory = {name: value.clone(memory_format=torch.contiguous_format) for name, value in memory.items()}
        self._block = block
        self._round = -1
        self._published = _Published.none(kernel.layout.size, federation.keys.bool())
        self._letters: dict[tuple[int, int], Tensor] = {}  # (from, to): [P], of this round
        self._growing = threading.Lock()
        self._pool = ThreadPoolExecutor(threads or available_cores(), initializer=torch.set_num_threads, initargs=(1,))

    def memory(self) -> Tensors:
        """All clients' memories [N, ...]; not a copy."""
        return self._memory

    def restore(self, memory: Tensors) -> None:
        """Go on from a checkpoint."""
        self._memory = dict(memory)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def answer(self, ask: Ask, moment: Moment) -> Replies:
        """Do the task for all clients asked; what they publish is seen from the next exchange on."""
        if self._round != moment.round:  # what was published lives for one round
            self._round = moment.round
            self._published.there.zero_()
            self._letters.clear()
        models, later = self._published.models, list[tuple[Tensor, Tensor]]()
        judged = models if ask.peers is None else self._kernel.evaluation_copy(models)
        publish: Publish = self._published.add if ask.peers is None else lambda ids, models: later.append((ids, models))
        blocks = self._blocks(len(ask.clients))
        answers = list(self._pool.map(lambda rows: self._answer_block(ask, moment, rows, judged, publish), blocks))
        for ids, models in later:
            self._published.add(ids, models)
        return Replies.joined(answers)

    def _blocks(self, asked: int) -> Iterator[slice]:
        """An eighth of the clients a block, so that cores end together, and no more than fit the memory."""
        fitting = max(1, BLOCK_BYTES // (4 * self._kernel.layout.size))
        size = self._block or min(fitting, 64, max(1, math.ceil(asked / 8)))
        return (slice(begin, begin + size) for begin in range(0, asked, size))

    def _answer_block(self, ask: Ask, moment: Moment, rows: slice, judged: Tensor, publish: Publish) -> Replies:
        ids = ask.clients[rows]
        with self._growing:
            known = dict(self._memory)
        memory = keep_rows(known, _as_slice(ids))
        carried = {name: memory.pop(name) for name in known if name.startswith(OPTIMISER)}
        data, keys = self._federation, self._federation.keys
        clients = Clients(ids, ids, data, keys, self._kernel, self._options, moment, carried)
        peers = None if ask.peers is None else self._peers(ask.peers[rows], judged, ask.letters)
        given = Given({name: value[rows] for name, value in ask.each.items()}, ask.shared, peers)
        with torch.no_grad():
            new_memory, reply = ask.task(clients, memory, given)
        new_memory = {**new_memory, **clients.optimiser}
        refused = wrong_rows(new_memory, reply, self._kernel.layout.size, len(ids))
        accepted = torch.tensor([row not in refused for row in range(len(ids))], device=ids.device)
        whole = slice(None) if not refused else accepted  # a view is faster than the same rows picked out
        replies = {name: _apart_from(known, value[whole]) for name, value in reply.items()}
        for name, value in new_memory.items():
            self._memory_of(name, value)[_as_slice(ids[accepted])] = value[whole]
        if (models := replies.pop("publish", None)) is not None and accepted.any():
            publish(ids[accepted], models)
        if (letters := replies.pop("letters", None)) is not None and ask.peers is not None:
            self._post(ids[accepted], ask.peers[rows][accepted], letters)
        weights = None if peers is None or peers.weights is None else peers.weights[accepted]
        return Replies(ids[accepted], replies, {int(ids[row]): why for row, why in refused.items()}, weights)

    def _memory_of(self, name: str, like: Tensor) -> Tensor:
        """[N, ...]: the memory of this name; what an optimiser carries is there from its first step on."""
        with self._growing:
            if name not in self._memory:
                self._memory[name] = like.new_zeros(self.num_clients, *like.shape[1:])
            return self._memory[name]

    def _post(self, senders: Tensor, peers: Tensor, letters: Tensor) -> None:
        """Letters [R, M, P] of these senders [R] to their peers [R, M]; there is no reading them before the next
        exchange, since those asked for letters write none."""
        for sender, recipients, written in zip(senders.tolist(), peers.tolist(), letters, strict=True):
            for recipient, letter in zip(recipients, written, strict=True):
                if recipient != NOBODY:
                    self._letters[sender, recipient] = letter

    def _peers(self, ids: Tensor, judged: Tensor, letters: bool) -> Peers:
        rows = ids.clamp(min=0)
        there = (ids != NOBODY) & self._published.there[rows]
        post = self._letters if letters else None
        return Peers(ids, there, rows, self._published.models, judged, self._kernel, post)


def _as_slice(ids: Tensor) -> Tensor | slice:
    """The same rows as a slice where they follow one another: a view instead of a copy."""
    first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
    follow = last - first == len(ids) - 1 and bool((ids[1:] > ids[:-1]).all())
    return slice(first, last + 1) if follow else ids


def _apart_from(memory: Tensors, value: Tensor) -> Tensor:
    """The value; a copy if it is a view of what clients remember, which is about to change."""
    homes = {kept.untyped_storage().data_ptr() for kept in memory.values()}
    return value.clone() if value.untyped_storage().data_ptr() in homes else value


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
