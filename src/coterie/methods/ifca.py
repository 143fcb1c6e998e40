"""IFCA: as many models as there are clusters, each client trains the one that suits it best."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.clients import Clients
from coterie.consensus import mean_by_group
from coterie.core import NOBODY, Ask, Exchanges, Given, Setting, State, Tensors, client_task
from coterie.errors import ConfigError, explain
from coterie.options import Options
from coterie.randomness import Moment


class IFCA(Options):
    """The coordinator holds k models; a client trains the one with the smallest loss on its own examples, and each
    model becomes the mean of those trained from it (Ghosh et al. 2020, model averaging).

    Differs from fedcbo-jmlr.txt, section 2.4: a client predicts with the model that is best on its own examples, not
    with the best on the test data.
    """

    name: Literal["ifca"] = "ifca"
    clusters: int = Field(4, ge=1, le=10**9)
    """k: how many models; IFCA has to be told"""
    choice_batch: int | None = Field(None, ge=1, le=10**9)
    """a client that trains chooses its model by so many of its examples, drawn anew; unset: by all, as when it
    predicts. With [train] steps = 1 all would cost far more than the step"""

    def client_memory(self, theta: Tensor, num_clients: int) -> Tensors:
        return {}

    def start(self, setting: Setting) -> State:
        if self.clusters > setting.num_clients:
            allowed = f"1 to {setting.num_clients}, the number of clients"
            raise ConfigError(explain("method.clusters", self.clusters, allowed, "Lower it."))
        centres = torch.stack([setting.initial(number) for number in range(self.clusters)])
        return {"centres": centres, "group": torch.full((setting.num_clients,), NOBODY, device=centres.device)}

    def nearest(self, clients: Clients, centres: Tensor, most: int | None = None) -> Tensor:
        """[C]: the model with the smallest loss for each client."""
        every = torch.arange(len(centres), device=centres.device).expand(len(clients), -1)
        losses = clients.losses(clients.kernel.evaluation_copy(centres), every, most)
        return losses.nan_to_num(nan=torch.inf).argmin(1)  # argmin would choose a NaN

    @client_task
    def local_update(self, clients: Clients, memory: Tensors, given: Given) -> tuple[Tensors, Tensors]:
        choice = self.nearest(clients, given["centres"], self.choice_batch)
        theta = clients.train(given["centres"][choice])
        return {}, {"theta": theta, "choice": choice, "examples": clients.examples}

    def round(self, state: State, cohort: Tensor, moment: Moment) -> Exchanges:
        trained = yield Ask(self.local_update, cohort, shared={"centres": state["centres"]})
        choice = trained["choice"]
        centres = mean_by_group(trained["theta"], choice, trained["examples"], otherwise=state["centres"])
        return {"centres": centres, "group": state["group"].index_put((trained.clients,), choice)}

    def serving(self, clients: Clients, memory: Tensors, given: Given) -> Tensor:
        return given["centres"][self.nearest(clients, given["centres"])]
