"""What clients do with their data, through the loop kernel; the kernels themselves are compared in tests/kernels."""

import copy
import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coterie.clients import Peers
from coterie.core import NOBODY
from coterie.descent import Train
from coterie.federation import Examples, Federation
from coterie.kernels import choose_kernel
from coterie.model import Model
from coterie.randomness import Moment
from tiny import START, TRAIN, clients_of, federation, mlp, numbers, regression, starts


def numbered(counts: list[int]) -> Federation:
    """Clients whose examples carry the client's number and their own, and whose padding shows: it is -1."""
    x = torch.full((len(counts), max(counts), 2), -1.0)
    for client, count in enumerate(counts):
        x[client, :count, 0] = client
        x[client, :count, 1] = torch.arange(float(count))
    y = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    everybody = torch.arange(len(counts))
    one_test = ((x[0, :1], y[0, :1]),)
    return Federation(
        name="numbered", train=Examples(x, y, torch.tensor(counts)), validation=None, tests=one_test,
        test_of=torch.zeros_like(everybody), clusters=None, keys=everybody, num_classes=2,
    )  # fmt: skip


def seen_by(data: Federation, options: Train, moment: Moment = START) -> list[list[list[float]]]:
    """For each client the numbers of the examples in each of its batches."""
    clients = clients_of(data, choose_kernel("loop", Model(nn.Linear(2, 2))), options, moment)
    batches = clients._batches(clients.data.train, clients.rows, options, "")
    seen: list[list[list[float]]] = [[] for _ in range(data.num_clients)]
    for batch in batches:
        for place, length in enumerate(batch.length):
            client = int(batches.order[place])
            rows = batch.x[place, :length]
            assert (rows[:, 0] == client).all()  # its own examples, and no padding
            seen[client].append(rows[:, 1].tolist())
        assert batch.full == (set(batch.length) == {batch.x.shape[1]})
    return seen


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 10), st.integers(1, 3))
def test_every_epoch_visits_every_example_once_in_batches_of_the_right_size(counts, batch_size, epochs):
    seen = seen_by(numbered(counts), Train(epochs=epochs, batch_size=batch_size))
    for count, batches in zip(counts, seen, strict=True):
        steps = math.ceil(count / batch_size)
        assert len(batches) == epochs * steps
        for epoch in range(epochs):
            mine = batches[epoch * steps : (epoch + 1) * steps]
            assert sorted(chain.from_iterable(mine)) == list(range(count))
            assert [len(batch) for batch in mine[:-1]] == [batch_size] * (steps - 1)


def test_shuffles_differ_between_epochs_clients_and_moments_and_repeat_themselves():
    data, options = numbered([12, 12]), Train(epochs=2, batch_size=12)
    seen = seen_by(data, options)
    orders = [seen[0][0], seen[0][1], seen[1][0], seen[1][1]]
    later = seen_by(data, options, Moment(0, 1))[0][0]
    other_seed = seen_by(data, options, Moment(1, 0))[0][0]
    assert len({tuple(order) for order in [*orders, later, other_seed]}) == 6
    assert seen_by(data, options) == seen


def test_a_client_sees_the_same_batches_whoever_stands_beside_it_and_however_long_the_padding():
    options = Train(epochs=2, batch_size=3)
    assert seen_by(numbered([5, 4]), options)[0] == seen_by(numbered([5, 17]), options)[0]


def test_the_gradient_is_that_of_the_mean_loss_over_all_own_examples():
    data, model = federation(), mlp()
    theta = numbers(data.num_clients, model.layout.size)
    gradient = clients_of(data, choose_kernel("loop", model)).gradient(theta)
    for client, count in enumerate(data.train.count.tolist()):
        module = copy.deepcopy(model.module)
        nn.utils.vector_to_parameters(theta[client], module.parameters())
        F.cross_entropy(module(data.train.x[client, :count]), data.train.y[client, :count]).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])
        torch.testing.assert_close(gradient[client], expected, atol=1e-6, rtol=1e-5)  # the order of summing differs
    assert (gradient[0] - gradient[2]).abs().max() > 1e-2


def test_training_with_one_whole_batch_is_one_step_down_the_gradient():
    data, model = federation(), mlp()
    theta = starts(model, data)
    options = Train(epochs=1, batch_size=100, lr=0.25, momentum=0.0)
    clients = clients_of(data, choose_kernel("loop", model), options)
    trained = clients.train(theta)
    torch.testing.assert_close(trained, theta - 0.25 * clients.gradient(theta), atol=1e-6, rtol=0)
    assert torch.equal(theta, starts(model, data))  # what it was given stays
    assert (trained - theta).abs().max() > 1e-2


def test_the_step_size_shrinks_by_the_same_factor_after_each_round():
    data, model = federation(), mlp()
    theta = starts(model, data)
    shrinking = Train(epochs=1, batch_size=4, lr=0.2, lr_decay=0.5)
    for round, lr in enumerate((0.2, 0.1, 0.05)):
        fixed, moment = shrinking.model_copy(update={"lr": lr, "lr_decay": 1.0}), Moment(0, round)
        by_decay, by_hand, undecayed = (
            clients_of(data, choose_kernel("loop", model), options, moment).train(theta)
            for options in (shrinking, fixed, fixed.model_copy(update={"lr": 0.2}))
        )
        assert torch.equal(by_decay, by_hand)
        assert torch.equal(by_decay, undecayed) == (round == 0)


def line(weight: float) -> torch.Tensor:
    return torch.tensor([[weight]])


def one_line() -> Federation:
    """y = 2 x at x = 1, 2 for one client and x = 3 for the other."""
    pairs = [
        (torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])),
        (torch.tensor([[3.0]]), torch.tensor([[6.0]])),
    ]
    return Federation.from_arrays(pairs, (torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [1.0]])))


def test_losses_and_gradients_of_a_line_by_hand():
    model = Model(nn.Linear(1, 1, bias=False), "mse")
    clients = clients_of(one_line(), choose_kernel("loop", model))
    theta = torch.cat([line(1.0), line(4.0)])
    assert clients.loss(theta).tolist() == [(1.0 + 4.0) / 2, 36.0]  # errors 1, 2 and 6
    assert clients.gradient(theta).tolist() == [[2 * (-1.0 - 4.0) / 2], [2 * 6.0 * 3.0]]
    rows = torch.tensor([[0, 1], [0, 1]])
    assert clients.losses(theta, rows).tolist() == [[2.5, (4.0 + 16.0) / 2], [9.0, 36.0]]
    score = clients.score(theta)
    assert score.loss.tolist() == [(1.0 + 16.0) / 2, (16.0 + 361.0) / 2]
    assert score.accuracy.tolist() == [0.0, 0.0]  # a regression has none


def test_accuracy_is_the_share_of_right_answers_on_the_clients_own_test_set():
    model = Model(nn.Linear(1, 2, bias=False))
    x = torch.tensor([[1.0], [1.0], [-1.0], [2.0]])
    own = [(x, torch.tensor([0, 0, 0, 0])), (x, torch.tensor([1, 1, 1, 1]))]
    data = Federation.from_arrays([(x, torch.tensor([0, 1, 0, 1]))] * 2, own)
    prefers_zero = torch.tensor([[1.0, 0.0]]).repeat(2, 1)  # answers 0 where x > 0
    score = clients_of(data, choose_kernel("loop", model)).score(prefers_zero)
    assert score.accuracy.tolist() == [0.75, 0.25]


def test_models_are_judged_on_validation_examples_where_there_are_some():
    data, model = federation(validation_share=0.4), mlp()
    theta = starts(model, data)
    clients = clients_of(data, choose_kernel("loop", model))
    judged = data.validation
    assert judged is not None
    losses, module = clients.loss(theta), copy.deepcopy(model.module)
    nn.utils.vector_to_parameters(theta[0], module.parameters())
    for client, (judging, training) in enumerate(zip(judged.count.tolist(), data.train.count.tolist(), strict=True)):
        outputs = module(torch.cat([judged.x[client, :judging], data.train.x[client, :training]])).detach()
        expected = F.cross_entropy(outputs[:judging], judged.y[client, :judging])
        torch.testing.assert_close(losses[client], expected)
        on_training = F.cross_entropy(outputs[judging:], data.train.y[client, :training])
        assert abs(on_training - expected) > 1e-3


def test_numbers_in_the_padding_change_nothing():
    data, model = federation(), mlp()
    theta = starts(model, data)
    spoiled_x = data.train.x.clone()
    for client, count in enumerate(data.train.count.tolist()):
        spoiled_x[client, count:] = 1e9
    spoiled_data = replace(data, train=replace(data.train, x=spoiled_x))
    for kernel in ("loop", "vmap", "batched"):
        clean = clients_of(data, choose_kernel(kernel, model))
        spoiled = clients_of(spoiled_data, choose_kernel(kernel, model))
        assert torch.equal(spoiled.train(theta), clean.train(theta))
        assert torch.equal(spoiled.loss(theta), clean.loss(theta))
        assert torch.equal(spoiled.gradient(theta), clean.gradient(theta))


def test_a_client_trains_alike_alone_and_in_any_company():
    data, model = federation(), mlp()
    together = clients_of(data, choose_kernel("loop", model)).train(starts(model, data))
    for client in range(data.num_clients):
        alone = clients_of(data, choose_kernel("loop", model), ids=torch.tensor([client]))
        assert torch.equal(alone.train(model.initial(0)[None])[0], together[client])
    assert not torch.equal(together[0], together[2])


def test_draws_of_a_client_follow_its_key_and_not_its_place():
    data, model = federation(), mlp()
    order = torch.tensor([2, 0, 3, 1])
    clients = clients_of(data, choose_kernel("loop", model))
    moved = clients_of(data.renumbered(order), choose_kernel("loop", model))
    for draw in ("uniform", "normal"):
        drawn = getattr(clients, draw)("purpose", 5)
        assert torch.equal(getattr(moved, draw)("purpose", 5), drawn[order])
        assert not torch.equal(getattr(clients, draw)("another", 5), drawn)
    assert torch.equal(moved.examples, clients.examples[order])


def peers_of(ids, published, kernel) -> Peers:
    ids = torch.tensor(ids)
    return Peers(ids, ids != NOBODY, ids.clamp(min=0), published, published, kernel)


def test_peers_losses_are_infinite_and_their_weights_nothing_where_they_were_not_delivered():
    model = Model(nn.Linear(1, 1, bias=False), "mse")
    kernel = choose_kernel("loop", model)
    peers = peers_of([[1, NOBODY], [NOBODY, NOBODY]], torch.cat([line(1.0), line(4.0)]), kernel)
    assert peers.losses(clients_of(one_line(), kernel)).tolist() == [[10.0, math.inf], [math.inf, math.inf]]
    mixed = peers.mix(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), otherwise=torch.tensor([[7.0], [8.0]]))
    assert mixed.tolist() == [[2.0], [8.0]]
    assert peers.weights is not None
    assert peers.weights.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert peers.of(0).tolist() == [[4.0]]
    assert peers.of(1).tolist() == []


def test_real_targets_have_losses_too():
    data = regression()
    model = Model(lambda: nn.Linear(3, 2), "mse")
    clients = clients_of(data, choose_kernel("loop", model), TRAIN)
    before = starts(model, data)
    assert (clients.loss(clients.train(before)) < clients.loss(before)).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("epochs", 0), ("batch_size", 0), ("lr", 0.0), ("lr", math.inf), ("momentum", 1.0), ("weight_decay", -1.0)],
)
def test_impossible_training_options_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Train(**{field: value})
