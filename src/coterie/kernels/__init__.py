"""How the models of C clients are computed at once: the only place that knows.

loop     one client after another through torch's autograd: the reference, and the fastest for convolutions on CPUs
vmap     torch.func over the clients' axis: for GPUs, where many small models would leave the device idle
batched  explicit gradients of stacks of linear layers, updated in place in blocks that fit the cache
"""

from typing import Literal

from coterie.errors import ConfigError, explain
from coterie.kernels.base import Batch, Kernel, Precision, at_once
from coterie.kernels.batched import BatchedKernel
from coterie.kernels.loop import LoopKernel
from coterie.kernels.vmap import VmapKernel
from coterie.model import Model

KernelName = Literal["auto", "loop", "vmap", "batched"]
__all__ = ["Batch", "Kernel", "KernelName", "Precision", "at_once", "choose_kernel"]


def choose_kernel(
    name: KernelName,
    model: Model,
    device: str = "cpu",
    precision: Precision = "float32",
    *,
    equal_sizes: bool = True,
    example_axes: int = 1,
) -> Kernel:
    """`auto` follows what benchmarks/bench_kernels.py and bench_llm.py measured: batched wherever the model is a stack
    of linear layers, else vmap on a GPU or where the module says that it is better `side_by_side`, else loop. Batch
    statistics of padded batches would be wrong, so they need `loop`."""
    stack = BatchedKernel.accepts(model, example_axes)
    vmap_is_right = not model.uses_batch_statistics or equal_sizes
    if name == "auto":
        vmap_is_faster = device != "cpu" or getattr(model.module, "side_by_side", False)
        name = "batched" if stack else "vmap" if vmap_is_faster and vmap_is_right else "loop"
    if name == "batched":
        if not stack:
            allowed = "a torch.nn.Sequential of Flatten (unless examples are vectors), Linear, ReLU, Tanh and Sigmoid"
            raise ConfigError(explain("kernel", "batched with another model", allowed, 'Use kernel = "auto".'))
        return BatchedKernel(model, precision)
    if name == "vmap":
        if not vmap_is_right:
            allowed = "loop, for a model with batch normalisation and clients of unequal sizes"
            raise ConfigError(explain("kernel", name, allowed, 'Use kernel = "auto".'))
        return VmapKernel(model, precision)
    return LoopKernel(model, precision)
