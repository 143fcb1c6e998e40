"""A causal language model that stays frozen, and the low-rank adapters that are trained in its place."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie import hub
from coterie.errors import ConfigError, ModelError, explain
from coterie.federation import Federation
from coterie.models.base import ModelOptions
from coterie.models.pretraining import Pretraining, pretrained

SMALL = 250_000  # numbers of a base below which computing clients side by side saves time: benchmarks/bench_llm.py


class NextToken(nn.Module):
    """A Hugging Face model that answers [n, vocabulary, T] to tokens [n, T]. What it knows of tokens beyond the
    vocabulary, with which some models are padded, is left out."""

    def __init__(self, language_model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.language_model = language_model
        self.side_by_side = sum(parameter.numel() for parameter in language_model.parameters()) < SMALL
        self._vocabulary = vocabulary

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.language_model(input_ids=tokens, use_cache=False).logits  # [n, T, ...]
        return scores[..., : self._vocabulary].mT


class Lora(ModelOptions):
    """A frozen causal language model with low-rank adapters on all linear maps of its attention and MLP; only they are
    trained and travel: Hu et al. 2022; cobo-neurips2024.txt, section 4.3. Takes text; needs the extra `llm`."""

    name: Literal["lora"] = "lora"
    base: str = ""
    """name or folder of a Hugging Face model; unset: a small GPT-2 is made here, with the keys that follow"""
    layers: int = Field(4, ge=1, le=1000)
    """blocks of attention and MLP of that GPT-2"""
    width: int = Field(128, ge=1, le=10**6)
    """its numbers for each token"""
    heads: int = Field(4, ge=1, le=10**4)
    """its attention heads"""
    pretraining_steps: int = Field(0, ge=0, le=10**9)
    """steps of AdamW on scenario.public before it is frozen; adapters can do little with random weights"""
    pretraining_batch: int = Field(32, ge=1, le=10**6)
    """sequences of such a step"""
    pretraining_lr: float = Field(2e-3, gt=0, le=1e6)
    """the largest step size of it"""
    base_seed: int = Field(0, ge=0, lt=2**63)
    """all its randomness: the base is the same for all seeds of a run, as a public one is"""
    rank: int = Field(4, ge=1, le=10**4)
    """rank of the adapters"""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """what an adapter answers is multiplied by alpha / rank"""
    dropout: float = Field(0.1, ge=0, lt=1)
    """share of what enters an adapter that is dropped in training, and the dropout of a GPT-2 made here"""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._adapted(self._base(shape[0], outputs, None), outputs)

    def maker(self, federation: Federation) -> Callable[[], nn.Module]:
        """Modules around one base, which is loaded or pre-trained once."""
        self._check(federation)
        outputs = federation.num_classes or 0
        public = None if federation.language is None else federation.language.public
        base = self._base(federation.input_shape[0], outputs, public)
        return lambda: self._adapted(copy.deepcopy(base), outputs)

    def _check(self, federation: Federation) -> None:
        if not federation.is_text:
            allowed = 'text, such as [scenario] name = "text"'
            raise ModelError(explain("model.name", "lora with other data", allowed, "Choose another model."))
        if self.base and federation.language is not None and federation.language.tokenizer != self.base:
            got, allowed = federation.language.tokenizer, f'"{self.base}", the only one that model.base understands'
            raise ConfigError(explain("scenario.tokenizer", got, allowed, "Set it."))

    def _base(self, length: int, vocabulary: int, public: Tensor | None) -> Any:
        """The language model that all clients share."""
        if not self.base:
            return self._pretrained(self._small_gpt2(length, vocabulary), public)
        model = _loaded(self.base)
        room = getattr(model.config, "max_position_embeddings", length)
        if length > room:
            allowed = f"2 to {room}, the context of {self.base}"
            raise ConfigError(explain("scenario.length", length, allowed, "Lower it."))
        if vocabulary > model.config.vocab_size:
            allowed = f"at most {model.config.vocab_size}, those that {self.base} knows"
            raise ConfigError(explain("the vocabulary of the data", vocabulary, allowed, "Use its own tokenizer."))
        return model

    def _pretrained(self, model: nn.Module, public: Tensor | None) -> nn.Module:
        if not self.pretraining_steps:
            return model
        if public is None:
            got, allowed = self.pretraining_steps, "0 without public text"
            raise ConfigError(explain("model.pretraining_steps", got, allowed, "Set scenario.public."))
        how = Pretraining(self.pretraining_steps, self.pretraining_batch, self.pretraining_lr, self.base_seed)
        return pretrained(model, public, how)

    def _small_gpt2(self, length: int, vocabulary: int) -> nn.Module:
        if self.width % self.heads:
            allowed = f"a multiple of model.heads, {self.heads}"
            raise ConfigError(explain("model.width", self.width, allowed, "Change one of them."))
        transformers = hub.extra("transformers")
        config = transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_layer=self.layers, n_embd=self.width, n_head=self.heads,
            embd_pdrop=self.dropout, resid_pdrop=self.dropout, attn_pdrop=self.dropout,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.base_seed)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model

    def _adapted(self, base: nn.Module, vocabulary: int) -> nn.Module:
        """The base frozen, with fresh adapters: they answer 0 at first."""
        peft = hub.extra("peft")
        transposed = any(type(part).__name__ == "Conv1D" for part in base.modules())  # GPT-2 stores its weights so
        adapters = peft.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules="all-linear",
            fan_in_fan_out=transposed,
        )  # fmt: skip
        with hub.quietly():
            return NextToken(peft.get_peft_model(base, adapters), vocabulary)


def _loaded(name: str) -> Any:
    """A causal language model by name or folder. No program that comes with it is run."""
    make = hub.extra("transformers").AutoModelForCausalLM.from_pretrained
    how = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": False}
    return hub.loaded("model.base", name, partial(make, **how))
