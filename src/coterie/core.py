"""The seam everything hangs on: a round is a generator of exchanges, and a fleet answers them.

Shapes, here and everywhere:

    N  clients of the federation      P  numbers in a model (parameters first, then float buffers)
    S  clients asked in an exchange   M  peers a client downloads
    R  clients that replied, R <= S   n  examples of a client, b of a batch
    C  clients of one process: a block of them in simulation, one on a device
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.randomness import Moment

if TYPE_CHECKING:
    from coterie.clients import Clients, Peers

Tensors = Mapping[str, Tensor]
State = Mapping[str, Tensor]  # what the coordinator remembers between rounds
Exchanges = Generator["Ask", "Replies", State]
NOBODY = -1  # stands where a client was asked for a peer and has none to name
MODELS = {"publish", "theta"}  # the names under which a reply may hold a client's model
LARGEST = 1e15  # no honest number of a model comes near; sums of squares of such still fit float32


@dataclass(frozen=True)
class Given:
    """What a task is handed beside the client's own memory."""

    each: Tensors  # [C, ...] a value per client
    shared: Tensors  # one value for all
    peers: "Peers | None" = None  # the published models this client asked for

    def __getitem__(self, name: str) -> Tensor:
        return self.each[name] if name in self.each else self.shared[name]

    @property
    def downloaded(self) -> "Peers":
        """The peers, for a task that is never asked without them."""
        assert self.peers is not None, "the exchange names no peers"
        return self.peers


Task = Callable[["Clients", Tensors, Given], tuple[Tensors, Tensors]]  # -> (new memory, reply)
AnyTask = TypeVar("AnyTask", bound=Callable[..., tuple[Tensors, Tensors]])


def client_task(task: AnyTask) -> AnyTask:
    """Marks what may be asked of a client: it runs where the data is, and only tensors go in and out.

    A reply named "publish" [C, P] goes to the fleet, which keeps it for the round and delivers it to the clients
    that ask for this peer; the coordinator's algorithm does not see it. Nor does it see "letters" [C, M, P], of which
    each is for one of the peers the client was asked about, and goes to this one only.
    """
    task.__client_task__ = True  # type: ignore[attr-defined]
    return task


def merging_task(task: AnyTask) -> AnyTask:
    """A client task that does nothing but merge the models which the clients downloaded; attackers who collude do that
    in a way of their own."""
    task.__merging_task__ = True  # type: ignore[attr-defined]
    return client_task(task)


def merges(task: Task) -> bool:
    """Whether it is marked @merging_task."""
    return getattr(task, "__merging_task__", False)


@dataclass(frozen=True)
class Ask:
    """One exchange: "these clients, do this"."""

    task: Task
    clients: Tensor  # [S] ids of those asked
    each: Tensors = field(default_factory=dict)  # [S, ...]
    shared: Tensors = field(default_factory=dict)
    peers: Tensor | None = None  # [S, M] ids whose published models are delivered to each client, or NOBODY
    letters: bool = False  # whether what these peers wrote to each client in this round is delivered too

    def __post_init__(self) -> None:
        if not getattr(self.task, "__client_task__", False):
            raise TypeError(f"{self.task} is not marked @client_task, so no client may be asked to do it")

    def only(self, chosen: Tensor) -> "Ask":
        """The same of some of the clients, `chosen` [S] bool."""
        peers = None if self.peers is None else self.peers[chosen]
        return replace(self, clients=self.clients[chosen], each=keep_rows(self.each, chosen), peers=peers)


class NobodyAnswered(Exception):
    """Every client asked was silent or refused; the round ends here and the state stays as it was."""


@dataclass(frozen=True)
class Replies:
    """What came back: a silent client is absent, a refused one is absent and named."""

    clients: Tensor  # [R]
    values: Tensors  # [R, ...]
    refused: Mapping[int, str] = field(default_factory=dict)  # client id: why
    weights: Tensor | None = (
        None  # [R, M] by which peers were mixed: a simulation shows it to who watches, not to methods
    )

    def __getitem__(self, name: str) -> Tensor:
        if not len(self.clients):
            raise NobodyAnswered
        return self.values[name]

    @staticmethod
    def joined(parts: "Sequence[Replies]") -> "Replies":
        """What different clients answered, as one."""
        if not parts:
            return Replies(torch.empty(0, dtype=torch.int64), {})
        answered = [part for part in parts if len(part.clients)] or parts[:1]
        values = {name: torch.cat([part.values[name] for part in answered]) for name in answered[0].values}
        refused = {client: why for part in parts for client, why in part.refused.items()}
        shown = [part.weights for part in answered if part.weights is not None]
        weights = torch.cat(shown) if len(shown) == len(answered) else None
        return Replies(torch.cat([part.clients for part in answered]), values, refused, weights)

    def in_order_of(self, clients: Tensor) -> "Replies":
        """The same in the order of those asked [S]."""
        order = (self.clients[:, None] == clients).int().argmax(1).argsort()
        weights = None if self.weights is None else self.weights[order]
        return replace(self, clients=self.clients[order], values=keep_rows(self.values, order), weights=weights)


@dataclass(frozen=True)
class Setting:
    """What a method may know when it starts. Only the oracle looks at `clusters`."""

    num_clients: int
    initial: Callable[[int], Tensor]  # the i-th initial model [P]; 0 is the one all start from
    keys: Tensor  # [N] by which clients are told apart in draws, however they are numbered
    clusters: Tensor | None = None  # [N]


class Method(Protocol):
    """A frozen set of hyperparameters and what to do with them; nothing is remembered on self."""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        """What each client remembers at first [C, ...]; private, it never leaves the client. theta: [C, P]."""
        ...

    def start(self, setting: Setting) -> State:
        """What the coordinator remembers at first. An entry "group" [N] says whose models it averages together, and an
        entry "weights" [N, N] in [0, 1] how much each client is to learn from each: clusters are read from either."""
        ...

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        """One round with the clients of the cohort; returns the new state."""
        ...

    def serving(self, clients: "Clients", memory: Tensors, given: Given) -> Tensor:
        """The models the clients predict with [C, P]; `given` holds the coordinator's state."""
        ...


class Fleet(Protocol):
    """Answers exchanges. Fleets are the only difference between a simulation and a deployment."""

    name: str
    num_clients: int

    def answer(self, ask: Ask, moment: Moment) -> Replies: ...
    def memory(self) -> Tensors:
        """All clients' memories [N, ...] and whatever else a fleet must remember, for a checkpoint."""
        ...

    def restore(self, memory: Tensors) -> None: ...
    def close(self) -> None: ...


def run_round(
    method: Method,
    fleet: Fleet,
    state: State,
    cohort: Tensor,
    moment: Moment,
    watch: Callable[[Ask, Replies], Any] = lambda ask, replies: None,
) -> State:
    """Carry one round's exchanges between the method and the fleet."""
    exchanges = method.round(state, cohort, moment)
    try:
        ask = next(exchanges)
        for exchange in count():
            replies = fleet.answer(ask, replace(moment, exchange=exchange))
            watch(ask, replies)
            ask = exchanges.send(replies)
    except StopIteration as finished:
        new_state: State = finished.value
        return new_state
    except NobodyAnswered:
        return state
    raise AssertionError("unreachable: counting never ends")


def keep_rows(values: Tensors, rows: Tensor | slice) -> dict[str, Tensor]:
    """The same rows of every tensor."""
    return {name: value[rows] for name, value in values.items()}


def wrong_rows(memory: Tensors, reply: Tensors, size: int, count: int) -> dict[int, str]:
    """Which of `count` clients answered what may reach nobody, and why: a model that is not `size` numbers of float32,
    anything that is not finite or larger than LARGEST, a number of examples below 1."""
    for name in MODELS & reply.keys():
        if reply[name].shape[1:] != (size,) or reply[name].dtype != torch.float32:
            got = f"{tuple(reply[name].shape[1:])} of {str(reply[name].dtype).removeprefix('torch.')}"
            return dict.fromkeys(range(count), f"a model of the wrong shape: got {got}, allowed: ({size},) of float32")
    if "letters" in reply and reply["letters"].shape[2:] != (size,):
        wrong = f"letters of the wrong shape: got {tuple(reply['letters'].shape[1:])}, allowed: (peers, {size})"
        return dict.fromkeys(range(count), wrong)
    finite, small = torch.ones(2, count, dtype=torch.bool)
    for value in (*memory.values(), *reply.values()):
        if value.is_floating_point() and value.numel():
            if max(abs(extreme.item()) for extreme in value.aminmax()) <= LARGEST:  # all are sound: the fast way to see
                continue
            least, greatest = value.reshape(count, -1).aminmax(dim=1)  # each is NaN where any number of the row is
            extreme = torch.maximum(-least, greatest).cpu()
            finite &= torch.isfinite(extreme)
            small &= extreme <= LARGEST
    why = dict.fromkeys((~small).nonzero()[:, 0].tolist(), f"a number larger than {LARGEST:g}")
    if "examples" in reply:
        why |= dict.fromkeys((reply["examples"] < 1).nonzero()[:, 0].tolist(), "a number of examples below 1")
    return why | dict.fromkeys((~finite).nonzero()[:, 0].tolist(), "non-finite model or reply")
