"""Training a small base model on public text before it is frozen: a stand-in for public pre-trained weights."""

import hashlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pooch
import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coterie.errors import DataError, ModelError
from coterie.federation import shuffled
from coterie.model import loss_per_example


@dataclass(frozen=True)
class Pretraining:
    """AdamW without dropout on batches of public text, every sequence once before any comes again. The step size rises
    over a tenth of the steps and falls to zero along a cosine."""

    steps: int
    batch_size: int
    lr: float  # the largest
    seed: int

    def rate(self, step: int) -> float:
        """The step size of a step, counted from 0."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def batches(self, public: Tensor) -> list[Tensor]:
        """For each step the rows of its sequences."""
        wanted = self.steps * self.batch_size
        epochs = range(-(-wanted // len(public)))
        order = torch.cat([shuffled(len(public), self.seed, "pre-training", epoch) for epoch in epochs])
        return list(order[:wanted].split(self.batch_size))


def pretrained(model: nn.Module, public: Tensor, how: Pretraining) -> nn.Module:
    """The model trained on the public text [n, T + 1]; the user's cache keeps it from the first time on."""
    file = Path(pooch.os_cache("coterie")) / "bases" / f"{_checksum(model, public, how)}.safetensors"
    if not _restored(model, file):
        _train(model, public, how)
        _keep(model, file)
    return model


def _checksum(model: nn.Module, public: Tensor, how: Pretraining) -> str:
    """Of all that the result follows from: the first weights, the text, and how it is trained."""
    digest = hashlib.sha256(f"{model.__class__.__name__} {how!r}".encode())
    for tensor in (*(parameter.detach() for parameter in model.parameters()), public):
        digest.update(repr(tensor.shape).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()[:32]


def _train(model: nn.Module, public: Tensor, how: Pretraining) -> None:
    model.eval()
    optimiser = torch.optim.AdamW(model.parameters())
    shown = {"console": Console(stderr=True), "disable": not sys.stderr.isatty()}
    for step, rows in enumerate(track(how.batches(public), "pre-training the base model", **shown)):  # type: ignore[arg-type]
        batch = public[rows]
        scores = model(input_ids=batch[:, :-1], use_cache=False).logits  # [n, T, vocabulary]
        optimiser.zero_grad()
        loss_per_example("cross_entropy", scores.mT, batch[:, 1:]).mean().backward()
        optimiser.param_groups[0]["lr"] = how.rate(step)
        optimiser.step()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ModelError("model: the base went astray while it was pre-trained. Lower model.pretraining_lr.")
    optimiser.zero_grad()


def _restored(model: nn.Module, file: Path) -> bool:
    """Take the weights from a file; a missing or damaged one is of no use."""
    try:
        saved = load_file(file)
    except (OSError, SafetensorError):
        return False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    return True


def _keep(model: nn.Module, file: Path) -> None:
    """Under a temporary name first: another run may look for the same base."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, new)
        os.replace(new, file)
    except OSError as error:
        raise DataError(
            f"model: the pre-trained base cannot be kept in {file.parent} ({error}). Make room there, or point "
            "XDG_CACHE_HOME at another folder."
        ) from None
