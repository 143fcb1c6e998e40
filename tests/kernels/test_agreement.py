"""The loop kernel is torch's own SGD; the others agree with the loop."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.clients import Clients
from coterie.descent import Train
from coterie.errors import ConfigError, ModelError
from coterie.federation import Federation
from coterie.kernels import Batch, Kernel, choose_kernel
from coterie.kernels.base import Precision
from coterie.kernels.batched import SPARSE_BELOW, BatchedKernel
from coterie.kernels.loop import LoopKernel
from coterie.kernels.vmap import VmapKernel
from coterie.model import Layout, Model
from tiny import CLASSES, FEATURES, clients_of, federation, furthest, labels, mlp, numbers, regression, starts

KERNELS = {"loop": LoopKernel, "vmap": VmapKernel, "batched": BatchedKernel}
UNEQUAL = (7, 5, 9, 4, 1, 8)
OPTIONS = Train(epochs=2, batch_size=3, lr=0.1, momentum=0.9)


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES))


def network(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def trained_by_torch(clients: Clients, client: int, model: Model) -> Tensor:
    """One client trained with torch.optim.SGD on the same batches."""
    module = copy.deepcopy(model.module).train()
    options, alone = clients.options, clients._part(slice(client, client + 1))
    optimiser = torch.optim.SGD(
        module.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    for batch in alone._batches(alone.data.train, alone.rows, options, ""):
        optimiser.zero_grad()
        outputs, y = module(batch.x[0]), batch.y[0]
        (F.mse_loss(outputs, y) if model.loss == "mse" else F.cross_entropy(outputs, y)).backward()
        optimiser.step()
    return Layout.of(module).flatten(module)


@pytest.mark.parametrize(
    ("data", "module"),
    [
        (federation(UNEQUAL), network(FEATURES, 6, CLASSES)),
        (federation(UNEQUAL, (1, 8, 8)), small_cnn()),
        (federation((6, 6, 6)), nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))),
    ],
    ids=["mlp", "cnn", "batch normalisation"],
)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_the_loop_kernel_is_torchs_own_sgd(data, module, momentum, decay):
    """Bit for bit; with weight decay to rounding, for the three terms of the velocity are added in another order."""
    model = Model(module)
    options = OPTIONS.model_copy(update={"momentum": momentum, "weight_decay": decay})
    clients = clients_of(data, LoopKernel(model), options)
    trained = clients.train(starts(model, data))
    expected = torch.stack([trained_by_torch(clients, client, model) for client in range(data.num_clients)])
    if decay:
        torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(trained, expected)
    other = clients_of(data, LoopKernel(model), options.model_copy(update={"lr": 0.1001})).train(starts(model, data))
    assert furthest(other, expected) > 1e-5


def test_layers_that_share_their_weights_are_trained_as_torch_does():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.second = nn.Linear(FEATURES, FEATURES)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    data, model = federation(), Model(Tied())
    assert model.layout.size == 9 + 3 + 3
    clients = clients_of(data, LoopKernel(model), OPTIONS)
    trained = clients.train(starts(model, data))
    assert torch.equal(trained[1], trained_by_torch(clients, 1, model))
    assert furthest(clients_of(data, VmapKernel(model), OPTIONS).train(starts(model, data)), trained) < 1e-4


ANY_MODEL = {
    "linear": network(FEATURES, CLASSES),
    "deep relu": network(FEATURES, 7, 6, 5, CLASSES),
    "tanh": network(FEATURES, 6, CLASSES, activation=nn.Tanh),
    "sigmoid": network(FEATURES, 6, 5, CLASSES, activation=nn.Sigmoid),
    "no activation": network(FEATURES, 6, CLASSES, activation=nn.Identity),
    "no bias": network(FEATURES, 6, CLASSES, bias=False),
    "nested": nn.Sequential(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), nn.Linear(4, CLASSES)),
    "bare": nn.Linear(FEATURES, CLASSES),
}
CASES = {
    "equal sizes, momentum": ((6, 6, 6, 6), Train(epochs=1, batch_size=4, momentum=0.9)),
    "unequal sizes, momentum": (UNEQUAL, OPTIONS),
    "unequal sizes, weight decay": (UNEQUAL[:4], Train(epochs=1, batch_size=4, momentum=0.0, weight_decay=0.05)),
}


@pytest.mark.parametrize("kernel", ["vmap", "batched"])
@pytest.mark.parametrize("module", ANY_MODEL.values(), ids=ANY_MODEL)
@pytest.mark.parametrize(("counts", "options"), CASES.values(), ids=CASES)
def test_every_kernel_trains_and_judges_as_the_loop_does(kernel, module, counts, options):
    data, model = federation(counts), Model(module)
    loop, mine = (clients_of(data, choose_kernel(name, model), options) for name in ("loop", kernel))
    expected, trained = (clients.train(starts(model, data)) for clients in (loop, mine))
    tolerance = mine.kernel.agrees_to
    assert furthest(trained, expected) < tolerance
    rows = torch.arange(len(counts)).repeat(len(counts), 1)
    assert furthest(mine.losses(expected, rows), loop.losses(expected, rows)) < tolerance
    assert furthest(mine.gradient(expected), loop.gradient(expected)) < tolerance
    changed = clients_of(data, loop.kernel, options.model_copy(update={"lr": options.lr * 1.01}))
    assert furthest(changed.train(starts(model, data)), expected) > tolerance


@pytest.mark.parametrize("kernel", ["vmap", "batched"])
@pytest.mark.parametrize("module", [network(FEATURES, 2), network(FEATURES, 6, 2)])
def test_every_kernel_does_regression_as_the_loop_does(kernel, module):
    data, model = regression(UNEQUAL), Model(module, "mse")
    loop, mine = (clients_of(data, choose_kernel(name, model), OPTIONS) for name in ("loop", kernel))
    expected = loop.train(starts(model, data))
    assert furthest(mine.train(starts(model, data)), expected) < mine.kernel.agrees_to
    assert furthest(mine.loss(expected), loop.loss(expected)) < mine.kernel.agrees_to
    assert furthest(loop.train(2 * starts(model, data)), expected) > 0.01


def test_vmap_computes_convolutions_as_the_loop_does():
    data, model = federation(UNEQUAL, (1, 8, 8)), Model(small_cnn())
    loop, mine = (clients_of(data, choose_kernel(name, model), OPTIONS) for name in ("loop", "vmap"))
    expected = loop.train(starts(model, data))
    assert furthest(mine.train(starts(model, data)), expected) < mine.kernel.agrees_to
    assert furthest(expected, starts(model, data)) > 0.01


FEW_OF_MANY = (6, 2, 5, 1)  # examples, of 40 features: worth the coordinates of the examples
WIDE = {
    "relu": network(40, 8, CLASSES),
    "deep": network(40, 7, 6, 5, CLASSES, activation=nn.Tanh),
    "no bias": network(40, 6, CLASSES, bias=False),
    "no activation": network(40, 6, 4, CLASSES, activation=nn.Identity),
}


@pytest.mark.parametrize("module", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("counts", [FEW_OF_MANY, (6,), (6, 6)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_few_examples_of_many_features_are_trained_in_their_own_coordinates(module, counts, momentum):
    data, model = federation(counts, (40,)), Model(module)
    options = OPTIONS.model_copy(update={"momentum": momentum, "lr": 0.03, "epochs": 3})
    loop, batched = (clients_of(data, choose_kernel(name, model), options) for name in ("loop", "batched"))
    begin = torch.stack([model.initial(0, number) for number in range(len(counts))])
    assert batched.kernel.shortened(begin, data.train.x, batched.rows, options.epochs) is not None
    expected = loop.train(begin)
    assert furthest(batched.train(begin), expected) < batched.kernel.agrees_to
    assert furthest(expected, begin) > 10 * batched.kernel.agrees_to
    other = clients_of(data, loop.kernel, options.model_copy(update={"lr": 0.0301})).train(begin)
    assert furthest(other, expected) > batched.kernel.agrees_to


@pytest.mark.parametrize(
    ("module", "count", "epochs"),
    [(network(40, 8, CLASSES), 60, 3), (network(40, 8, CLASSES), 6, 1), (network(40, CLASSES), 6, 3)],
    ids=["many examples", "one epoch of a narrow layer", "a single layer"],
)
def test_other_descents_keep_the_coordinates_of_the_features(module, count, epochs):
    data, kernel = federation((count,), (40,)), BatchedKernel(Model(module))
    assert kernel.shortened(starts(kernel.model, data), data.train.x, torch.tensor([0]), epochs) is None


@settings(max_examples=30)
@given(
    hidden=st.lists(st.integers(1, 6), max_size=3),
    activation=st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity]),
    bias=st.booleans(),
    length=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    outputs=st.integers(2, 4),
    loss=st.sampled_from(["cross_entropy", "mse"]),
    keep=st.sampled_from([0.0, 0.9, 1.0]),
    times=st.sampled_from([1.0, -0.1]),
)
def test_explicit_gradients_are_those_of_autograd(hidden, activation, bias, length, outputs, loss, keep, times):
    model = Model(network(4, *hidden, outputs, activation=activation, bias=bias), loss)
    clients, longest = len(length), max(length)
    y = numbers(clients, longest, outputs) if loss == "mse" else labels(clients * longest, classes=outputs)
    batch = Batch(
        numbers(clients, longest, 4),
        y.reshape(clients, longest, outputs) if loss == "mse" else y.reshape(clients, longest),
        length,
        full=min(length) == longest,
        places=torch.arange(longest).expand(clients, -1),
        keys=torch.zeros(clients, dtype=torch.int64),
        step=0,
    )
    theta = 0.5 * numbers(clients, model.layout.size, seed=1)
    into = numbers(clients, model.layout.size, seed=2)
    results = []
    for kernel in (LoopKernel(model), BatchedKernel(model)):
        mine = into.clone()
        kernel.bind(theta.clone(), mine)(batch, keep, times)
        results.append(mine)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)  # sums of at most 25 float32 products
    assert not torch.equal(results[0], into)


@pytest.mark.parametrize("kernel", KERNELS)
def test_judging_in_bfloat16_comes_close_and_leaves_training_alone(kernel):
    """bfloat16 keeps 8 bits: 0.4 % for each number, a few of them for each loss."""
    data, model = federation(UNEQUAL), Model(network(FEATURES, 16, CLASSES))
    rough, exact = (clients_of(data, choose_kernel(kernel, model, precision=p), OPTIONS) for p in ("bf16", "float32"))
    theta = exact.train(starts(model, data))
    assert torch.equal(rough.train(starts(model, data)), theta)
    losses = rough.loss(theta)
    assert losses.dtype == torch.float32
    assert 0.0 < furthest(losses, exact.loss(theta)) < 0.02
    assert furthest(rough.score(theta).loss, exact.score(theta).loss) < 0.02


PLAIN = network(FEATURES, 5, CLASSES)


@pytest.mark.parametrize("kernel", KERNELS.values())
@pytest.mark.parametrize("num_models", [5, 200])
def test_mixing_is_a_weighted_sum(kernel, num_models):
    """Five models are mixed by a dense product in the batched kernel, 200 by a sparse one."""
    model = Model(PLAIN)
    models = numbers(num_models, model.layout.size)
    rows = torch.tensor([[0, 3, 4], [2, 2, 1], [1, 0, 0]])
    assert (rows.shape[1] < SPARSE_BELOW * num_models) == (num_models == 200)
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
    mixed = kernel(model).mix(models, rows, weights)
    expected = torch.stack([
        0.5 * models[0] + 0.25 * models[3] + 0.25 * models[4], 0.8 * models[2] + 0.2 * models[1], models[0],
    ])  # fmt: skip
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-6)  # the order of three float32 terms
    assert torch.equal(mixed[2], models[0])


@pytest.mark.parametrize(
    ("module", "accepted"),
    [
        (network(4, 3, 2), True),
        (nn.Linear(4, 2), True),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(3, 2)), True),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), True),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Tanh(), nn.Linear(3, 2)), False),  # two activations
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), False),  # begins with one
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), False),  # ends with one
        (nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), False),  # unknown
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(3, 2)), False),  # flattens late
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)), False),  # flattens another axis
        (small_cnn(), False),
    ],
)
def test_the_batched_kernel_accepts_stacks_of_linear_layers_only(module, accepted):
    assert BatchedKernel.accepts(Model(module)) == accepted


def test_a_layer_used_twice_or_made_by_a_subclass_is_not_for_the_batched_kernel():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    twice = nn.Linear(4, 4)
    assert not BatchedKernel.accepts(Model(nn.Sequential(twice, nn.ReLU(), twice)))
    assert not BatchedKernel.accepts(Model(nn.Sequential(Scaled(4, 2))))


NORMALISED = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


@pytest.mark.parametrize(
    ("module", "device", "equal_sizes", "chosen"),
    [
        (PLAIN, "cpu", True, "batched"),
        (PLAIN, "cpu", False, "batched"),
        (PLAIN, "cuda", True, "batched"),
        (small_cnn(), "cpu", True, "loop"),
        (small_cnn(), "cuda", False, "vmap"),
        (NORMALISED, "cuda", True, "vmap"),
        (NORMALISED, "cuda", False, "loop"),
    ],
)
def test_auto_chooses_by_model_device_and_sizes(module, device, equal_sizes, chosen):
    assert choose_kernel("auto", Model(module), device, equal_sizes=equal_sizes).name == chosen


def test_a_kernel_that_cannot_be_right_is_refused():
    with pytest.raises(ConfigError, match=r"kernel: got 'batched with another model'.*Use kernel = \"auto\""):
        choose_kernel("batched", Model(small_cnn()))
    with pytest.raises(ConfigError, match="loop, for a model with batch normalisation and clients of unequal sizes"):
        choose_kernel("vmap", Model(NORMALISED), equal_sizes=False)


@pytest.mark.parametrize("kernel", [LoopKernel, VmapKernel])
def test_batch_statistics_travel_with_the_model_and_are_used_in_evaluation(kernel):
    data, model = federation((6, 6, 6)), Model(NORMALISED)
    clients = clients_of(data, kernel(model), OPTIONS)
    trained = clients.train(starts(model, data))
    expected = torch.stack([trained_by_torch(clients, client, model) for client in range(3)])
    assert furthest(trained, expected) <= max(clients.kernel.agrees_to, 1e-9)
    statistics = trained[:, model.layout.num_parameters :]
    assert (statistics - starts(model, data)[:, model.layout.num_parameters :]).abs().min() > 1e-4
    module, x = copy.deepcopy(NORMALISED).eval(), data.tests[0][0]
    for piece in model.layout.pieces:
        module.state_dict()[piece.name].copy_(piece.of(trained[1]))
    torch.testing.assert_close(clients.kernel.outputs(trained[1], x), module(x).detach(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(clients.kernel.outputs(trained[1], x), clients.kernel.outputs(trained[0], x))
    assert (clients.gradient(trained)[:, model.layout.num_parameters :] == 0).all()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_many_examples_are_evaluated_in_chunks_that_change_nothing(precision: Precision, monkeypatch):
    model = Model(small_cnn())
    kernel: Kernel = LoopKernel(model, precision)
    vector, x = kernel.evaluation_copy(model.initial(0)), numbers(20, 1, 8, 8)
    whole = kernel.outputs(vector, x.to(vector.dtype))
    monkeypatch.setattr("coterie.kernels.base.CHUNK", 8)
    torch.testing.assert_close(kernel.outputs(vector, x.to(vector.dtype)), whole)


def test_a_parameter_that_takes_no_part_is_left_alone():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    data, model = federation(), Model(Spare())
    for kernel in (LoopKernel, VmapKernel):
        change = clients_of(data, kernel(model), OPTIONS).train(starts(model, data)) - starts(model, data)
        assert (change[:, -6:] == 0).all()
        assert (change[:, :-6].abs().amax(1) > 0).all()


def test_one_client_of_one_example_is_enough():
    data = Federation.from_arrays([(numbers(1, FEATURES), labels(1))], (numbers(3, FEATURES), torch.arange(3)))
    model = mlp()
    trained = [clients_of(data, kernel(model), OPTIONS).train(starts(model, data)) for kernel in KERNELS.values()]
    assert furthest(trained[1], trained[0]) < 1e-4
    assert furthest(trained[2], trained[0]) < 1e-4
    assert furthest(trained[0], starts(model, data)) > 1e-3


def test_an_activation_used_in_several_places_counts_in_each():
    again = nn.ReLU()
    model = Model(nn.Sequential(nn.Linear(FEATURES, 6), again, nn.Linear(6, 6), again, nn.Linear(6, CLASSES)))
    x = numbers(8, FEATURES)
    vector = model.initial(0)
    torch.testing.assert_close(choose_kernel("auto", model).outputs(vector, x), LoopKernel(model).outputs(vector, x))


def test_linear_layers_along_the_last_of_several_axes_are_computed_as_the_module_does():
    """Such as one output per position of a sequence: whatever `auto` chooses must be right."""
    data = Federation.from_arrays([(numbers(6, 3, 8, seed=i), numbers(6, 3, 4, seed=9 + i)) for i in range(2)])
    model = Model(nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4)), "mse")
    model.check_fits(data.train.x[0], data.train.y[0], None)
    kernel = choose_kernel("auto", model, example_axes=2)
    assert kernel.name == "loop"
    chosen = clients_of(data, kernel, OPTIONS).train(starts(model, data))
    assert furthest(chosen, starts(model, data)) > 1e-3


def test_cumulative_batch_statistics_are_refused():
    """nn.BatchNorm with momentum = None averages over the batches it counted, and a counter is nobody's own."""
    with pytest.raises(ModelError, match="momentum"):
        Model(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, CLASSES)))


def test_a_batch_of_one_example_leaves_batch_statistics_alone():
    """It has no variance of its own: it is normalised by what the model has seen so far."""
    data, model = federation((1,)), Model(NORMALISED)
    trained = clients_of(data, LoopKernel(model), OPTIONS).train(starts(model, data))
    statistics = model.layout.num_parameters
    assert torch.equal(trained[:, statistics:], starts(model, data)[:, statistics:])
    assert furthest(trained[:, :statistics], starts(model, data)[:, :statistics]) > 1e-3
