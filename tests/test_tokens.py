"""Sequences of tokens as examples: how they are taken, trained on, judged and tested."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.descent import Train
from coterie.errors import ConfigError, DataError, ModelError
from coterie.federation import Federation
from coterie.kernels import base, choose_kernel
from coterie.metrics import perplexities
from coterie.model import Model, loss_per_example
from coterie.robust.attacks import ATTACKS
from language import VOCABULARY, Bigram, token_federation, tokens
from tiny import clients_of, furthest, starts


def test_whole_number_sequences_stay_whole_numbers() -> None:
    federation = token_federation(3, 2)
    assert (federation.train.x.dtype, federation.train.y.dtype) == (torch.int64, torch.int64)
    assert (federation.is_text, federation.num_classes, federation.input_shape) == (True, VOCABULARY, (5,))
    assert torch.equal(federation.train.x[0, :, 1:], federation.train.y[0, :, :-1])


def test_whole_numbers_with_one_label_each_are_still_features() -> None:
    x = np.arange(10).reshape(5, 2)
    federation = Federation.from_arrays([(x, np.zeros(5, int))])
    assert (federation.train.x.dtype, federation.is_text, federation.num_classes) == (torch.float32, False, 1)


def test_without_a_vocabulary_it_is_one_more_than_the_largest_token() -> None:
    x = torch.tensor([[1, 2], [3, 9]])
    assert Federation.from_arrays([(x, x - 1)], (x, x - 1)).num_classes == 10


def test_a_vocabulary_of_other_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary: got 9; allowed: nothing: these examples are no tokens"):
        Federation.from_arrays([(np.ones((5, 2)), np.zeros(5, int))], vocabulary=9)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0, 1], [2, 7]], [[1, 1], [1, 1]], r"client 0: x: got 7; allowed: tokens 0 to 6"),
        ([[0, 1], [2, 3]], [[1, -1], [1, 1]], r"client 0: y: got -1; allowed: tokens 0 to 6"),
        ([[0.0, 1.0]], [[1, 2]], r"client 0: y: got 'shape \(1, 2\)'; allowed: one label per example"),
    ],
)
def test_what_is_no_token_is_refused(x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_arrays([(x, y)], tokens(2, 2), vocabulary=VOCABULARY)


def test_a_model_must_answer_a_score_for_every_token_of_the_vocabulary() -> None:
    x, y = tokens(2)
    Model(Bigram).check_fits(x, y, VOCABULARY)
    with pytest.raises(ModelError, match=r"output for one example is \(7, 5\); the labels need \(8, 5\)"):
        Model(Bigram).check_fits(x, y, VOCABULARY + 1)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity() -> None:
    federation = token_federation(3, 2)
    kernel = choose_kernel("loop", Model(Bigram))
    score = clients_of(federation, kernel).score(torch.zeros(2, VOCABULARY**2))
    assert perplexities(score.loss).tolist() == pytest.approx([VOCABULARY] * 2, rel=1e-5)
    _, y = federation.tests[0]
    always_0 = float((y == 0).float().mean())
    assert score.accuracy.tolist() == pytest.approx([always_0] * 2)


def test_perplexity_is_that_of_the_right_tokens_by_hand() -> None:
    losses = torch.tensor([math.log(4.0), 0.0, 1e15])
    assert perplexities(losses)[:2].tolist() == pytest.approx([4.0, 1.0])
    assert math.isfinite(float(perplexities(losses)[2].square()))


@pytest.mark.parametrize("kernel", ["loop", "vmap"])
def test_a_long_test_is_taken_in_parts_that_give_the_same(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, model = token_federation(9, 5), Model(Bigram)
    theta = starts(model, federation) + torch.arange(VOCABULARY**2) % 3
    at_once = clients_of(federation, choose_kernel(kernel, model))
    whole, judged = at_once.score(theta), at_once.loss(theta)
    monkeypatch.setattr(base, "CHUNK", 10)  # two sequences of five tokens
    in_parts = clients_of(federation, choose_kernel(kernel, model))
    assert base.at_once(federation.train.x[0]) == 2
    assert torch.allclose(in_parts.score(theta).loss, whole.loss, atol=1e-6)  # sums in another order
    assert torch.allclose(in_parts.score(theta).accuracy, whole.accuracy)
    assert torch.allclose(in_parts.loss(theta), judged, atol=1e-6)
    assert not torch.allclose(in_parts.loss(theta + torch.arange(VOCABULARY**2) % 2), judged, atol=1e-6)


def test_kernels_train_alike_on_tokens() -> None:
    federation, model = token_federation(9, 5), Model(Bigram)
    theta = starts(model, federation)
    options = Train(epochs=2, batch_size=4, lr=0.5)
    by_loop, by_vmap = (
        clients_of(federation, choose_kernel(name, model), options).train(theta) for name in ("loop", "vmap")
    )
    assert furthest(by_vmap, by_loop) < 1e-4
    assert furthest(theta, by_loop) > 0.1


def test_the_loss_of_a_sequence_is_the_mean_over_its_tokens() -> None:
    scores = torch.tensor([[[0.0, 2.0], [0.0, 0.0]]])  # [1, vocabulary 2, T 2]
    wanted = (math.log(2.0) + math.log(1 + math.exp(-2.0))) / 2
    assert float(loss_per_example("cross_entropy", scores, torch.tensor([[1, 0]]))) == pytest.approx(wanted)


def test_text_counts_as_one_class() -> None:
    federation, model = token_federation(9, 5), Model(Bigram)
    clients, theta = clients_of(federation, choose_kernel("loop", model)), starts(model, federation)
    assert torch.allclose(clients.class_loss(theta).average[:, 0], clients.loss(theta))


@pytest.mark.parametrize("attack", ["label-flip", "backdoor"])
def test_attacks_on_labels_are_refused(attack: str) -> None:
    with pytest.raises(ConfigError, match=r"attack\.\w+: got \d; allowed: nothing: text has none"):
        ATTACKS[attack](name=attack, malicious=[0]).enters(token_federation(3, 3), "lie", 0)
    entered = ATTACKS["sign-flip"](name="sign-flip", malicious=[0]).enters(token_federation(3, 3), "lie", 0)
    assert entered.malicious is not None


class WithConstants(nn.Module):
    """One buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("constant", torch.ones(5), persistent=False)


def test_buffers_that_are_not_saved_do_not_travel() -> None:
    assert [piece.name for piece in Model(WithConstants).layout.pieces] == ["weight", "kept"]


def test_clients_of_text_keep_it_when_some_are_chosen() -> None:
    federation = token_federation(3, 2, 4)
    some = federation.only(torch.tensor([2, 0]))
    assert some.train.x.dtype == torch.int64
    assert torch.equal(some.train.x[0, :4], federation.train.x[2, :4])
    with pytest.raises(DataError, match=r"x: got .*; allowed: tokens 0 to 1"):
        replace(federation, num_classes=2, train=replace(federation.train, y=federation.train.y * 0))
