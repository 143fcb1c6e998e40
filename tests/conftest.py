"""Settings shared by all tests."""

import torch
from hypothesis import settings

# Examples come in the same order every time, and none is failed for being slow on a busy machine.
settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("coterie")

# Tensors here are tiny: several threads would only wait for each other, above all with several test processes.
torch.set_num_threads(1)
