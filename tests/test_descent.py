"""The local loop: steps instead of epochs, optimisers that go on from round to round, and the pull."""

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core import Ask, run_round
from coterie.descent import Pull
from coterie.federation import Federation
from coterie.kernels import choose_kernel
from coterie.methods import FedAvg, Local
from coterie.model import Model
from coterie.randomness import Moment
from parabolas import PLAIN, parabolas, point
from tiny import TRAIN, clients_of, federation, fleet_of, furthest, mlp, numbers, play, starts

ADAM = {"optimiser": "adamw", "lr": 0.05, "momentum": 0.8, "second_momentum": 0.9, "weight_decay": 0.1}
WHOLE = {"steps": 1, "batch_size": 100}  # a step is of all examples, so that torch's optimisers see the same


def by_torch(data: Federation, model: Model, client: int, steps: int, make: type, **options: float) -> torch.Tensor:
    """The vector after so many steps of one of torch's own optimisers on all of a client's examples."""
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.utils.vector_to_parameters(model.initial(0), module.parameters())
    optimiser = make(module.parameters(), **options)
    x, y = (part[client, : data.train.count[client]] for part in (data.train.x, data.train.y))
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("kernel", ["loop", "batched"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_with_steps_the_optimiser_goes_on_as_torchs_own_does(name, kernel):
    """Five rounds of one step are five steps of torch's optimiser; begun anew in each round they are not."""
    data, model = federation(), mlp()
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    options = TRAIN.model_copy(update=WHOLE | (ADAM if name == "adamw" else sgd))
    played = play(Local(), data, model, kernel=kernel, options=options, last=5)
    for client in range(data.num_clients):
        if name == "adamw":
            of_torch = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}
            theirs = by_torch(data, model, client, 5, torch.optim.AdamW, **of_torch)
        else:
            theirs = by_torch(data, model, client, 5, torch.optim.SGD, **sgd)
        torch.testing.assert_close(played.models[client], theirs, atol=2e-6, rtol=1e-5)  # roundings of five steps
    anew = play(
        Local(), data, model, kernel=kernel, options=options.model_copy(update={"steps": None, "epochs": 1}), last=5
    )
    assert furthest(anew.models, played.models) > 1e-3


def test_steps_are_as_many_for_all_clients_on_batches_drawn_anew():
    data, options = federation((7, 5, 6, 8)), TRAIN.model_copy(update={"steps": 3, "batch_size": 3})
    clients = clients_of(data, choose_kernel("loop", mlp()), options)
    batches = clients._batches(data.train, clients.rows, options, "")
    seen = [[batch.places[client, :length].tolist() for client, length in enumerate(batch.length)] for batch in batches]
    assert len(seen) == 3
    assert [len(places) for places in seen[2]] == [1, 3, 3, 2]  # 7 and 8 end an epoch, 5 and 6 begin one
    assert sorted(place for batch in seen for place in batch[0]) == list(range(7))
    later = clients_of(data, choose_kernel("loop", mlp()), options, Moment(0, 1))
    again = next(iter(later._batches(data.train, later.rows, options, "")))
    assert again.places.tolist() != [[*places] for places in seen[0]]


def test_a_method_may_train_in_any_exchange_and_sees_the_same_batches():
    data, model = federation(), mlp()
    first, third = (
        clients_of(data, choose_kernel("loop", model), TRAIN, Moment(0, 0, exchange)).train(starts(model, data))
        for exchange in (0, 2)
    )
    assert torch.equal(first, third)
    named = clients_of(data, choose_kernel("loop", model)).train(starts(model, data), name="beside")
    assert furthest(named, first) > 1e-3


def test_the_optimiser_of_a_client_rests_with_it():
    """Who takes no part in a round keeps its momentum as it was."""
    data, options = parabolas(1.0, 1.0), PLAIN.model_copy(update={"steps": 1, "momentum": 0.5})
    with closing(fleet_of(Local(), data, point(), options=options)) as fleet:
        for round, cohort in enumerate(([0, 1], [0], [0, 1])):
            run_round(Local(), fleet, {}, torch.tensor(cohort), Moment(0, round))
        theta = fleet.memory()["theta"][:, 0].tolist()
        velocity = fleet.memory()["optimiser..velocity"][:, 0].tolist()
    # gradient 2 (theta - 1): velocities -2, -2.6, -2.38 and -2, -2.6; theta 0.2, 0.46, 0.698 and 0.2, 0.46
    assert theta == pytest.approx([0.698, 0.46], abs=1e-6)
    assert velocity == pytest.approx([-2.38, -2.6], abs=1e-6)


def test_a_refused_client_keeps_its_optimiser_too():
    data, options = parabolas(1.0, 1.0), PLAIN.model_copy(update={"steps": 1, "momentum": 0.5})
    with closing(fleet_of(Local(), data, point(), options=options)) as fleet:
        run_round(Local(), fleet, {}, torch.arange(2), Moment(0, 0))
        before = {name: value.clone() for name, value in fleet.memory().items()}
        fleet.memory()["theta"][1] = 1e20  # so that what it makes of it is refused
        replies = fleet.answer(Ask(Local().local_update, torch.arange(2)), Moment(0, 1))
        assert list(replies.refused) == [1]
        after = fleet.memory()["optimiser..velocity"]
    assert torch.equal(after[1], before["optimiser..velocity"][1])
    assert not torch.equal(after[0], before["optimiser..velocity"][0])


@pytest.mark.parametrize("kernel", ["loop", "batched"])
def test_a_pull_is_beside_the_momentum_and_of_the_same_point(kernel):
    """Goals 1 and 5, pulled to 3 with strengths 0.5 and 2; lr 0.1, momentum 0.5, two steps by hand."""
    data = parabolas(1.0, 5.0)
    options = PLAIN.model_copy(update={"steps": 2, "momentum": 0.5})
    pull = Pull(torch.full((2, 1), 3.0), torch.tensor([[0.5], [2.0]]))
    trained = clients_of(data, choose_kernel(kernel, point()), options).train(torch.zeros(2, 1), pull)
    expected = []
    for goal, strength in ((1.0, 0.5), (5.0, 2.0)):
        theta = velocity = 0.0
        for _ in range(2):
            velocity = 0.5 * velocity + 2.0 * (theta - goal)
            theta = theta - 0.1 * (velocity + strength * (theta - 3.0))
        expected.append(theta)
    assert trained[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    unpulled = clients_of(data, choose_kernel(kernel, point()), options).train(torch.zeros(2, 1))
    assert (trained - unpulled).abs().min() > 0.1


def test_a_pull_moves_parameters_and_leaves_batch_statistics_alone():
    model = Model(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    data, theta = federation(), starts(model, federation())
    options = TRAIN.model_copy(update={"steps": 1})  # one step, so that the pull cannot act through the next batch
    clients = clients_of(data, choose_kernel("loop", model), options)
    pulled = clients.train(theta, Pull(theta + 1.0, torch.ones(4, 1)))
    free, size = clients_of(data, choose_kernel("loop", model), options).train(theta), model.layout.num_parameters
    torch.testing.assert_close(pulled[:, :size], free[:, :size] + 0.1, atol=1e-6, rtol=0)
    assert torch.equal(pulled[:, size:], free[:, size:])


def test_a_gradient_of_a_batch_is_that_of_the_examples_its_keys_choose():
    data, model = federation(), mlp()
    theta = numbers(data.num_clients, model.layout.size)
    clients = clients_of(data, choose_kernel("loop", model))
    keys = torch.arange(4)
    small = clients.gradient(theta, keys, 2)
    assert torch.equal(small, clients.gradient(theta, keys, 2))
    assert furthest(clients.gradient(theta, keys + 1, 2), small) > 1e-3
    torch.testing.assert_close(clients.gradient(theta, keys, 99), clients.gradient(theta), atol=1e-6, rtol=1e-5)
    twice = clients.at(torch.tensor([2, 0, 2]))
    torch.testing.assert_close(twice.gradient(theta[[2, 0, 2]], keys[[2, 0, 2]], 2), small[[2, 0, 2]], atol=0, rtol=0)


def test_training_for_a_while_leaves_the_kept_optimiser_alone():
    data, options = federation(), TRAIN.model_copy(update={"steps": 2})
    tuned, plain = (play(FedAvg(fine_tuning=tuning), data, mlp(), options=options, last=3) for tuning in (2, 0))
    assert torch.equal(tuned.last.state["theta"], plain.last.state["theta"])
    assert tuned.memory.keys() == plain.memory.keys() == {"optimiser..velocity"}
    assert furthest(tuned.models, plain.models) > 1e-3
