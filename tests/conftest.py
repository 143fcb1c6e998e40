"""Settings shared by all tests."""

import pytest
import torch
from hypothesis import settings

# Examples come in the same order every time, and none is failed for being slow on a busy machine.
settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("coterie")

# Tensors here are tiny: several threads would only wait for each other, above all with several test processes.
torch.set_num_threads(1)

torch.manual_seed(0)  # for networks that a test file makes when it is read


@pytest.fixture(autouse=True)
def _the_same_networks_in_every_order_of_the_tests() -> None:
    """A module made by hand starts from torch's own random numbers."""
    torch.manual_seed(0)
