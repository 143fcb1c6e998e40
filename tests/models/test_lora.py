"""Language models with adapters: what is trained, what stays, what it is built around, and what gets refused."""

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch import Tensor, nn

from coterie import hub
from coterie.data.text import federation_of_texts
from coterie.descent import Train
from coterie.errors import ConfigError, ModelError
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.models import MODELS, pretraining
from coterie.models.lora import Lora, NextToken
from language import text
from tiny import clients_of, furthest, starts
from tiny import federation as of_numbers

LENGTH = 6
SMALL: dict[str, Any] = {"layers": 1, "width": 8, "heads": 2, "rank": 2, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def data() -> Federation:
    """Two clients of different languages and sizes, with public text of both."""
    own = [text("aa", lines=6), text("bb", lines=8)]
    public = [text("aa", lines=40, seed=1), text("bb", lines=40, seed=1)]
    return federation_of_texts(own, own, length=LENGTH, vocabulary=270, public=public)


def lora(**options: Any) -> Lora:
    return Lora(**(SMALL | options))


def model(data: Federation, **options: Any) -> Model:
    return Model(lora(**options).maker(data))


def frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters() if not tensor.requires_grad}


def test_only_adapters_of_attention_and_mlp_are_trained(data: Federation) -> None:
    made = model(data)
    names = [piece.name for piece in made.layout.pieces]
    assert all("lora_" in name for name in names)
    for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert sum(part in name for name in names) == 2
    # rank times (inputs + outputs) of the four linear maps of a block of width 8
    assert made.layout.size == 2 * ((8 + 24) + (8 + 8) + (8 + 32) + (32 + 8))
    assert made.layout.buffers == ()


def test_adapters_answer_nothing_at_first_and_the_base_has_learned_nothing_yet(data: Federation) -> None:
    made = model(data)
    x, y = data.tests[0]
    with_adapters = made.module.eval()(x)
    inner = made.module.get_submodule("language_model")
    with inner.disable_adapter():  # type: ignore[operator]
        assert torch.allclose(made.module(x), with_adapters, atol=1e-6)
    assert with_adapters.shape == (len(x), 270, LENGTH)
    clients = clients_of(data, choose_kernel("loop", made))
    assert torch.allclose(clients.score(starts(made, data)).loss, torch.tensor(math.log(270)), atol=0.1)
    assert y.shape == (len(x), LENGTH)


def test_a_prediction_sees_no_later_token(data: Federation) -> None:
    made = model(data).module.eval()
    x = data.tests[0][0][:1]
    changed = x.index_fill(1, torch.tensor(3), 7)
    assert torch.allclose(made(x)[..., :3], made(changed)[..., :3], atol=1e-6)
    assert not torch.allclose(made(x)[..., 3:], made(changed)[..., 3:], atol=1e-6)


def test_the_base_is_the_same_for_all_seeds_and_clients_and_the_adapters_are_not(data: Federation) -> None:
    one, two, other = model(data), model(data), model(data, base_seed=1)
    assert all(torch.equal(tensor, frozen(two.module)[name]) for name, tensor in frozen(one.module).items())
    assert not all(torch.equal(tensor, frozen(other.module)[name]) for name, tensor in frozen(one.module).items())
    assert torch.equal(one.initial(0), two.initial(0))
    assert not torch.equal(one.initial(0), one.initial(1))
    assert not torch.equal(one.initial(0, 1), one.initial(0, 2))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kernels_train_adapters_alike_and_leave_the_base_alone(data: Federation, dropout: float) -> None:
    made = model(data, dropout=dropout)
    before, theta = frozen(made.module), starts(made, data)
    options = Train(epochs=2, batch_size=4, lr=0.01)  # small steps: large ones multiply what rounding differs by
    trained = [clients_of(data, choose_kernel(name, made), options).train(theta) for name in ("loop", "vmap")]
    assert furthest(trained[1], trained[0]) < 1e-4  # two orders of summation
    assert furthest(theta, trained[0]) > 0.01
    assert all(torch.equal(tensor, frozen(made.module)[name]) for name, tensor in before.items())


def test_dropout_is_drawn_from_the_clients_keys(data: Federation) -> None:
    made, options = model(data, dropout=0.3), Train(epochs=1, batch_size=4, lr=0.5)
    theta, kernel = starts(made, data), choose_kernel("loop", made)
    first, again = (clients_of(data, kernel, options).train(theta) for _ in range(2))
    assert torch.equal(first, again)
    plain = model(data)
    assert not torch.allclose(first, clients_of(data, choose_kernel("loop", plain), options).train(theta))
    made.check_fits(*data.tests[0], 270)


def test_training_an_adapter_lowers_the_loss(data: Federation) -> None:
    made = model(data, pretraining_steps=60, pretraining_batch=8, pretraining_lr=0.02)
    clients = clients_of(data, choose_kernel("loop", made), Train(steps=60, batch_size=4, optimiser="adamw", lr=0.02))
    theta = starts(made, data)
    assert (clients.loss(clients.train(theta)) < clients.loss(theta) - 0.02).all()


def test_a_base_trained_on_public_text_knows_the_languages(data: Federation) -> None:
    fresh, trained = (
        clients_of(data, choose_kernel("loop", made)).loss(starts(made, data))
        for made in (model(data), model(data, pretraining_steps=60, pretraining_batch=8, pretraining_lr=0.02))
    )
    assert (trained < fresh - 1.0).all()


def _refuse(*_: Any) -> None:
    raise AssertionError("it was trained again")


def _refuse(*_: Any) -> None:
    raise AssertionError("it was trained again")


def test_a_trained_base_is_kept_and_taken_again(
    data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"pretraining_steps": 2, "pretraining_batch": 4}
    first = frozen(model(data, **options).module)
    (kept,) = (tmp_path / "cache" / "coterie" / "bases").iterdir()
    monkeypatch.setattr(pretraining, "_train", _refuse)
    again = frozen(model(data, **options).module)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    with pytest.raises(AssertionError, match="it was trained again"):
        model(data, **options, base_seed=1)
    kept.write_bytes(b"spoiled")
    with pytest.raises(AssertionError, match="it was trained again"):
        model(data, **options)


def test_training_the_base_gives_the_same_weights_again(data: Federation, tmp_path: Path) -> None:
    made = []
    for seed in (0, 0, 1):
        made.append(frozen(model(data, pretraining_steps=3, pretraining_batch=4, base_seed=seed).module))
        for file in (tmp_path / "cache" / "coterie" / "bases").iterdir():
            file.unlink()
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
    assert not all(torch.equal(tensor, made[2][name]) for name, tensor in made[0].items())


def test_a_base_that_goes_astray_is_not_kept(data: Federation, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"went astray while it was pre-trained\. Lower model\.pretraining_lr"):
        model(data, pretraining_steps=3, pretraining_batch=4, pretraining_lr=1e6)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_pretraining_sees_every_sequence_before_any_again() -> None:
    how = pretraining.Pretraining(steps=4, batch_size=3, lr=1.0, seed=0)
    order = torch.cat(how.batches(torch.zeros(6, 2)))
    assert sorted(order[:6].tolist()) == sorted(order[6:].tolist()) == list(range(6))
    assert how.rate(0) == 1.0
    longer = pretraining.Pretraining(steps=20, batch_size=1, lr=1.0, seed=0)
    assert [longer.rate(step) for step in (0, 1, 2, 11)] == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a public kind, saved with its tokenizer: GPT-2 with 40 tokens of padding and a context of 16."""
    transformers = hub.extra("transformers")
    path = tmp_path_factory.mktemp("models") / "small"
    made = federation_of_texts([text("aa")], text("aa"), length=LENGTH, vocabulary=260)
    assert made.num_classes == 260
    config = transformers.GPT2Config(vocab_size=300, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    bpe = hub.extra("coterie.data.text").ByteLevelBPE([text("aa")], 260)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._model).save_pretrained(path)
    return path


def read_with(folder: Path, length: int = LENGTH) -> Federation:
    return federation_of_texts([text("aa")], text("aa", seed=1), length=length, tokenizer=str(folder))


def test_a_saved_model_is_a_base_and_its_tokenizer_reads_the_texts(folder: Path) -> None:
    data = read_with(folder)
    assert data.num_classes == 260
    made = model(data, base=str(folder))
    x, y = data.tests[0]
    made.check_fits(x, y, 260)
    inner = made.module.eval().get_submodule("language_model")
    assert torch.equal(made.module(x), inner(input_ids=x).logits[..., :260].mT)
    saved = hub.extra("transformers").AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(made.module(x), saved(input_ids=x).logits[..., :260].mT, atol=1e-5)
    assert not torch.allclose(made.module(x), model(data).module.eval()(x), atol=1e-5)


def test_a_base_of_another_family_gets_adapters_too(tmp_path: Path, data: Federation) -> None:
    transformers = hub.extra("transformers")
    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    anybodys = replace(data, language=None)
    made = model(anybodys, base=str(tmp_path / "llama"))
    names = {piece.name.split(".")[-4] for piece in made.layout.pieces}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert made.layout.buffers == ()
    theta, options = starts(made, data), Train(epochs=1, batch_size=8, lr=0.5)
    trained = [clients_of(data, choose_kernel(name, made), options).train(theta) for name in ("loop", "vmap")]
    assert furthest(trained[1], trained[0]) < 1e-3
    assert furthest(theta, trained[0]) > 0.01


def test_what_does_not_fit_a_base_is_refused(folder: Path, data: Federation) -> None:
    with pytest.raises(ConfigError, match=r'scenario\.tokenizer: got .*; allowed: ".*small", the only one that'):
        model(data, base=str(folder))
    with pytest.raises(ConfigError, match=r"scenario\.length: got 20; allowed: 2 to 16, the context of .*small"):
        model(read_with(folder, length=20), base=str(folder))
    larger = replace(data, language=None, num_classes=301)
    with pytest.raises(ConfigError, match=r"the vocabulary of the data: got 301; allowed: at most 300"):
        model(larger, base=str(folder))
    with pytest.raises(ConfigError, match=r"model\.pretraining_steps: got 5; allowed: 0 without public text"):
        model(read_with(folder), pretraining_steps=5)
    with pytest.raises(ConfigError, match=r"model\.width: got 9; allowed: a multiple of model\.heads, 2"):
        model(data, width=9)
    with pytest.raises(ModelError, match=r"model\.name: got 'lora with other data'; allowed: text"):
        model(of_numbers())


def test_names_that_cannot_be_had_are_refused_in_a_sentence(
    data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.extra("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    anybodys = replace(data, language=None)
    for name in ("gpt3", "no/such-model"):
        with pytest.raises(ConfigError, match=rf"^model\.base: got '{name}'; allowed: the name of .* HF_HUB_OFFLINE "):
            model(anybodys, base=name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^model\.base: got '.*empty'; .* This folder cannot be read: "):
        model(anybodys, base=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"^scenario\.tokenizer: got 'gpt3'; allowed: the name of"):
        federation_of_texts([text("aa")], text("aa"), tokenizer="gpt3")


def test_a_hub_that_does_not_answer_is_not_waited_for(data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(hub.extra("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(requests, "head", refuse)
    with pytest.raises(ConfigError, match=r"got 'gpt3'; .* not in the local cache and https://\S+ does not answer"):
        model(replace(data, language=None), base="gpt3")


def test_without_the_extra_it_says_what_to_install(data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"language models need transformers, .*\. Run: pip install 'coterie\[llm\]'"):
        model(data)


def test_tokens_beyond_the_vocabulary_are_left_out() -> None:
    class Scores(nn.Module):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            return type("Answer", (), {"logits": torch.arange(5.0).expand(*input_ids.shape, 5)})

    answer = NextToken(Scores(), 3)(torch.zeros(2, 4, dtype=torch.int64))
    assert answer.tolist() == [[[0.0] * 4, [1.0] * 4, [2.0] * 4]] * 2


def test_small_bases_are_computed_side_by_side_and_large_ones_in_turn(data: Federation) -> None:
    assert choose_kernel("auto", model(data)).name == "vmap"
    assert choose_kernel("auto", model(data, width=160)).name == "loop"
    assert choose_kernel("loop", model(data)).name == "loop"


def test_it_is_in_the_table_of_models() -> None:
    assert MODELS["lora"] is Lora
    assert copy.deepcopy(lora()) == lora()
