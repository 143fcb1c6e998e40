"""Every client for itself: what collaboration has to beat."""

from typing import Literal

from torch import Tensor

from coterie.clients import Clients
from coterie.core import Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.options import Options
from coterie.randomness import Moment


class Local(Options):
    """Each client trains alone on its own examples."""

    name: Literal["local"] = "local"

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {"theta": theta}

    def start(self, setting: Setting) -> State:
        return {}

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        return {"theta": clients.train(memory["theta"])}, {}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        yield Ask(self.local_update, cohort)
        return state

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return memory["theta"]
