"""FedCB²O against numbers worked out by hand, FedCBO as its limit, and peers that are not what they should be."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.config import parse
from coterie.core import NOBODY, Ask, Replies, run_round
from coterie.descent import Train
from coterie.errors import ConfigError, DataError
from coterie.federation import Examples, Federation
from coterie.methods import FedCB2O, FedCBO
from coterie.model import Model
from coterie.peers import LEAST
from coterie.randomness import Moment
from coterie.robust.criteria import CRITERIA
from coterie.training import beginning, rounds
from coterie.world import World
from tiny import Played, federation, fleet_of, furthest, mlp, play, setting_of

INF, NAN = float("inf"), float("nan")
STANDSTILL = Train(epochs=1, batch_size=10, lr=1e-30, momentum=0.0)

# Four clients who judge by one example of each of two classes. A model is (m, 0, 0, n); with r = e^-m and s = e^-n it
# has the losses log(1 + r) and log(1 + s), so that exponentials of losses are fractions.
X, Y = torch.eye(2), torch.tensor([0, 1])
ODDS = ((1, 1), (1 / 2, 1 / 3), (1 / 4, 3), (1, 1 / 5))  # r and s of the four clients' models
TWO = Federation.from_arrays([(X, Y)] * 4, (X, Y), clusters=[0, 0, 1, 1])


def matrix() -> Model:
    return Model(nn.Linear(2, 2, bias=False))


def model_of(odds: tuple[float, float]) -> list[float]:
    return [-log(odds[0]), 0.0, 0.0, -log(odds[1])]


MODELS = torch.tensor([model_of(odds) for odds in ODDS])


def round_of(
    method: Any, thetas: Tensor = MODELS, data: Federation = TWO, *, liking: Tensor | None = None, number: int = 0,
    cohort: Sequence[int] = (0, 1, 2, 3), options: Train = STANDSTILL, notes: list[tuple[Ask, Replies]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The models and likings after a round that begins with these."""
    model = matrix()
    watch = (lambda ask, replies: None) if notes is None else (lambda ask, replies: notes.append((ask, replies)))
    with closing(fleet_of(method, data, model, options=options)) as fleet:
        liking = torch.zeros(len(thetas), len(thetas)) if liking is None else liking
        fleet.restore({"theta": thetas.clone(), "liking": liking.clone()})
        state = method.start(setting_of(data, model))
        run_round(method, fleet, state, torch.tensor(cohort), Moment(0, number), watch)
        return fleet.memory()["theta"], fleet.memory()["liking"]


def mean_of(weights: dict[int, float]) -> Tensor:
    """The mean of the clients' models with these weights."""
    return sum(weight * MODELS[client] for client, weight in weights.items()) / sum(weights.values())


def close(found: Tensor, expected: Any) -> None:
    """float32 against Python's doubles."""
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=1e-5, rtol=1e-5)


def test_the_consensus_weighs_peers_by_the_largest_gap():
    """Gaps to client 0's log 2 and log 2: of client 1 max(log 3/4, log 2/3), of client 2 max(log 5/8, log 2) and of
    client 3 max(0, log 3/5)."""
    thetas, _ = round_of(FedCB2O(download=3, alpha=1.0))
    close(thetas[0], mean_of({1: 4 / 3, 2: 1 / 2, 3: 1}))
    sharper, _ = round_of(FedCB2O(download=3, alpha=2.0))
    close(sharper[0], mean_of({1: 16 / 9, 2: 1 / 4, 3: 1}))
    assert furthest(thetas[0], sharper[0]) > 1e-2


def test_gaps_are_to_the_judges_own_model():
    """To the losses log 5/4 and log 4 of client 2: log 8/5, log 6/5 and log 8/5."""
    thetas, _ = round_of(FedCB2O(download=3, alpha=1.0))
    close(thetas[2], mean_of({0: 5 / 8, 1: 5 / 6, 3: 5 / 8}))


def test_the_consensus_weighs_peers_by_the_entropy_of_their_class_losses():
    def suspicion(odds: tuple[float, float]) -> float:
        losses = [log(1 + odd) for odd in odds]
        return -sum(log(loss / (sum(losses) / 2)) for loss in losses) / 2

    expected = {peer: exp(-3 * suspicion(ODDS[peer])) for peer in (1, 2, 3)}
    close(round_of(FedCB2O(download=3, alpha=3.0, criterion="class_entropy"))[0][0], mean_of(expected))


def test_the_average_loss_stands_for_the_criterion_before_round_t_g():
    """With alpha 2 a weight is 1 / ((1 + r) (1 + s)): 1/2, 1/5 and 5/12."""
    by_loss, by_gap = mean_of({1: 1 / 2, 2: 1 / 5, 3: 5 / 12}), mean_of({1: 16 / 9, 2: 1 / 4, 3: 1})
    assert furthest(by_loss, by_gap) > 1e-2
    late = FedCB2O(download=3, alpha=2.0, criterion_from=2)
    for number, expected in enumerate((by_loss, by_loss, by_gap, by_gap)):
        close(round_of(late, number=number)[0][0], expected)
    close(round_of(FedCB2O(download=3, alpha=2.0, criterion="average_loss"), number=9)[0][0], by_loss)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("number", [0, 5])
def test_whatever_the_criterion_the_likelihood_follows_the_average_loss(criterion, number):
    """(3.12) with zeta = 1/4: 3/4 of what it was and 1/4 of e^(-2 L) = 1 / ((1 + r) (1 + s))."""
    reward = torch.tensor([1 / 4, 1 / 2, 1 / 5, 5 / 12])
    method = FedCB2O(download=3, kappa=2.0, zeta=0.25, criterion=criterion, criterion_from=3)
    _, unmet = round_of(method, number=number)
    close(unmet, (reward / 4).expand(4, 4).clone().fill_diagonal_(0.0))
    before = torch.full((4, 4), 0.8)
    _, liking = round_of(method, liking=before, number=number)
    close(liking, (0.6 + reward / 4).expand(4, 4).clone().fill_diagonal_(0.8))
    _, sharper = round_of(method.model_copy(update={"kappa": 4.0}), number=number)
    close(sharper[0, 1:], reward[1:].square() / 4)


def test_only_strangers_are_met_while_there_are_any():
    liking = torch.tensor([[0, 0.3, 0, 0.5], [0.2, 0, 0.2, 0], [0.1, 0, 0, 0], [0.4, 0.4, 0.4, 0]])
    thetas, learned = round_of(FedCB2O(download=3, alpha=1.0), liking=liking)
    close(thetas[:2], MODELS[[2, 3]])
    close(learned[0], [0.0, 0.3, 0.5 / 5, 0.5])
    close(thetas[3], mean_of({0: 3 / 5, 1: 9 / 10, 2: 3 / 10}))  # gaps log 5/3, log 10/9, log 10/3; it knows all


@pytest.mark.parametrize(
    ("quantile", "slack", "inside"),
    [(0.3, 0.0, {1}), (1 / 3, 0.0, {1}), (0.34, 0.0, {1, 3}), (1 / 3, 0.08, {1}), (1 / 3, 0.1, {1, 3}),
     (1 / 3, 0.45, {1, 3}), (1 / 3, 0.47, {1, 2, 3}), (0.7, 0.0, {1, 2, 3}), (1.0, 0.0, {1, 2, 3})],
)  # fmt: skip
@pytest.mark.parametrize("criterion", ["max_class_gap", "average_loss"])
def test_only_the_quantile_of_the_least_losses_takes_part(quantile, slack, inside, criterion):
    """The losses of clients 1, 3 and 2 are half of log 2, log 12/5 and log 5: 0.091 and 0.458 above the least."""
    method = FedCB2O(download=3, alpha=2.0, quantile=quantile, quantile_slack=slack, criterion=criterion)
    weights = {1: 16 / 9, 2: 1 / 4, 3: 1} if criterion == "max_class_gap" else {1: 1 / 2, 2: 1 / 5, 3: 5 / 12}
    thetas, liking = round_of(method)
    close(thetas[0], mean_of({peer: weights[peer] for peer in inside}))
    assert (liking[0, 1:] > 0).all()  # those outside were met as well


def test_the_own_model_is_trusted_as_the_best_peers_by_the_criterion_and_by_its_own_loss_before():
    """Client 1 has the least gap; by loss the own model has the weight 1/4."""
    method = FedCB2O(download=3, alpha=2.0, own_model="included", criterion_from=1)
    close(round_of(method, number=1)[0][0], mean_of({0: 16 / 9, 1: 16 / 9, 2: 1 / 4, 3: 1}))
    close(round_of(method, number=0)[0][0], mean_of({0: 1 / 4, 1: 1 / 2, 2: 1 / 5, 3: 5 / 12}))
    filtered = method.model_copy(update={"quantile": 0.3})
    close(round_of(filtered, number=1)[0][0], mean_of({0: 1, 1: 1}))


def test_a_client_goes_a_part_of_the_way_to_the_consensus():
    consensus = mean_of({1: 4 / 3, 2: 1 / 2, 3: 1})
    for step in (0.04, 0.6):
        thetas, _ = round_of(FedCB2O(download=3, alpha=1.0, consensus_step=step))
        close(thetas[0], (1 - step) * MODELS[0] + step * consensus)


# A whole round with training, in Python's own floats

ANGLES = [
    [(1.0, 0.5), (-0.5, 1.0), (0.2, -1.0)],
    [(0.8, 0.1), (0.1, 0.9)],
    [(1.0, 1.0), (-1.0, 0.5)],
    [(0.3, -0.7)] * 2,
]
ANSWERS = [[0, 1, 0], [0, 1], [1, 0], [1, 0]]
JUDGED, JUDGED_ANSWERS = [[(0.5, 0.2), (0.4, -0.3), (-0.2, 0.8)]] * 4, [[0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1]]


def losses(theta: list[float], examples: Sequence[tuple[float, float]], answers: Sequence[int]) -> list[float]:
    found = []
    for (x, z), answer in zip(examples, answers, strict=True):
        logits = theta[0] * x + theta[1] * z, theta[2] * x + theta[3] * z
        found.append(log(exp(logits[0]) + exp(logits[1])) - logits[answer])
    return found


def stepped(theta: list[float], examples: Sequence[tuple[float, float]], answers: Sequence[int]) -> list[float]:
    """One step of length 1/2 down the gradient of the mean loss."""
    moved = list(theta)
    for (x, z), answer in zip(examples, answers, strict=True):
        exponentials = [exp(theta[2 * k] * x + theta[2 * k + 1] * z) for k in (0, 1)]
        for k in (0, 1):
            error = exponentials[k] / sum(exponentials) - (answer == k)
            moved[2 * k] -= 0.5 * error * x / len(answers)
            moved[2 * k + 1] -= 0.5 * error * z / len(answers)
    return moved


def test_a_whole_round_is_what_one_works_out_in_pythons_own_floats():
    """Trains on some examples, judges by others."""
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(ANGLES, ANSWERS, strict=True)]
    kept = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(JUDGED, JUDGED_ANSWERS, strict=True)]
    data = replace(Federation.from_arrays(pairs, (X, Y)), validation=Examples.of(kept))
    trained = [stepped(MODELS[c].tolist(), ANGLES[c], ANSWERS[c]) for c in range(4)]
    expected, liked = [], []
    for judge in range(4):
        of = {c: losses(trained[c], JUDGED[judge], JUDGED_ANSWERS[judge]) for c in range(4)}
        classes = [[place for place in range(3) if JUDGED_ANSWERS[judge][place] == k] for k in (0, 1)]
        by_class = {c: [sum(of[c][place] for place in own) / len(own) for own in classes] for c in range(4)}
        gap = {c: max(theirs - mine for theirs, mine in zip(by_class[c], by_class[judge])) for c in range(4)}
        weight = {c: exp(-1.5 * gap[c]) for c in range(4) if c != judge}
        consensus = [sum(weight[c] * trained[c][i] for c in weight) / sum(weight.values()) for i in range(4)]
        expected.append([mine - 0.7 * (mine - theirs) for mine, theirs in zip(trained[judge], consensus)])
        liked.append([0.4 * exp(-3 * sum(of[c]) / 3) if c != judge else 0.0 for c in range(4)])
    method = FedCB2O(download=3, alpha=1.5, consensus_step=0.7, kappa=3.0, zeta=0.4)
    step = Train(epochs=1, batch_size=10, lr=0.5, momentum=0.0)
    thetas, liking = round_of(method, data=data, options=step)
    close(thetas, expected)
    close(liking, liked)
    assert furthest(round_of(method, data=replace(data, validation=None), options=step)[0], thetas) > 1e-2


# FedCBO is FedCB²O by the average loss

DATA, MODEL = federation((7, 5, 6, 8, 9, 6, 7), validation_share=0.3), mlp()
ALIKE: dict[str, Any] = {"download": 3, "alpha": 3.0, "zeta": 0.3, "kappa": 1.5, "consensus_step": 0.8}
SHORT = Train(epochs=1, batch_size=4)


def run(method: Any, data: Federation = DATA, last: int = 6, **more: Any) -> Played:
    return play(method, data, MODEL, options=SHORT, last=last, evaluate_every=last, **more)


def same(mine: Played, theirs: Played) -> bool:
    memories = all(torch.equal(mine.memory[name], theirs.memory[name]) for name in ("theta", "liking"))
    links = all(torch.equal(one.links, other.links) for one, other in zip(mine.progress, theirs.progress, strict=True))
    return memories and links and torch.equal(mine.models, theirs.models)


@pytest.mark.parametrize("own_model", ["excluded", "included"])
@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_by_the_average_loss_it_is_fedcbo_with_prob_sampling(own_model, participation):
    """Some rounds meet the strangers, the others choose by likelihood."""
    alike = ALIKE | {"own_model": own_model}
    fedcbo = run(FedCBO(selection="likelihood", **alike), participation=participation)
    by_loss = FedCB2O(criterion="average_loss", **alike)
    assert same(run(by_loss, participation=participation), fedcbo)
    by_gap = run(FedCB2O(criterion="max_class_gap", **alike), participation=participation)
    assert furthest(by_gap.models, fedcbo.models) > 1e-3


@pytest.mark.parametrize("change", [{"zeta": 0.9}, {"alpha": 2.0}, {"kappa": 6.0}, {"quantile": 0.5}])
def test_with_any_other_option_it_is_another_method_than_that_fedcbo(change):
    fedcbo = run(FedCBO(selection="likelihood", **ALIKE))
    other = run(FedCB2O(criterion="average_loss", **ALIKE | change))
    assert furthest(other.models, fedcbo.models) > 1e-3
    assert furthest(other.memory["liking"], fedcbo.memory["liking"]) > 1e-3


@pytest.mark.parametrize("criterion", ["max_class_gap", "class_entropy"])
def test_until_the_criterion_counts_it_is_fedcbo(criterion):
    fedcbo = run(FedCBO(selection="likelihood", **ALIKE), last=4)
    assert same(run(FedCB2O(criterion=criterion, criterion_from=4, **ALIKE), last=4), fedcbo)
    one_round = run(FedCB2O(criterion=criterion, criterion_from=3, **ALIKE), last=4)
    assert torch.equal(one_round.last.links, fedcbo.last.links)
    torch.testing.assert_close(one_round.memory["liking"], fedcbo.memory["liking"])  # the same loss, added up by class
    assert furthest(one_round.models, fedcbo.models) > 1e-3
    assert not same(run(FedCB2O(criterion=criterion, **ALIKE), last=4), fedcbo)


def test_epsilon_greedy_can_choose_for_it_as_for_fedcbo():
    greedy = run(FedCBO(selection="epsilon-greedy", **ALIKE), last=3)
    assert same(run(FedCB2O(selection="epsilon-greedy", criterion="average_loss", **ALIKE), last=3), greedy)
    assert not same(run(FedCB2O(criterion="average_loss", **ALIKE), last=3), greedy)


# A criterion of one's own


def second_class(peers: Any, own: Any) -> Tensor:
    return peers.each[..., 1]


def named(criterion: Any) -> Any:
    return parse({"method": {"name": "fedcb2o", "download": 3, "alpha": 1.0, "criterion": criterion}}, own_data=True)


def test_a_criterion_of_ones_own_is_registered_and_named_in_a_configuration(monkeypatch):
    monkeypatch.setitem(CRITERIA, "second-class", second_class)
    thetas, _ = round_of(named("second-class").method)
    close(thetas[0], mean_of({1: 3 / 4, 2: 1 / 4, 3: 5 / 6}))
    assert furthest(round_of(named("max_class_gap").method)[0][0], thetas[0]) > 1e-2


def test_an_unknown_criterion_is_refused_with_those_there_are(monkeypatch):
    unknown = "method.criterion: got 'second-class'; allowed: one of max_class_gap, class_entropy, average_loss"
    with pytest.raises(ConfigError, match=unknown) as refused:
        named("second-class")
    assert "\n" not in str(refused.value)
    monkeypatch.setitem(CRITERIA, "third-class", second_class)
    with pytest.raises(ConfigError, match=f"{unknown}, third-class"):
        named("second-class")
    with pytest.raises(ConfigError, match="criterion: got 3"):
        named(3)


@pytest.mark.parametrize("said", [0.0, -1.0, INF, -INF, NAN])
def test_whatever_a_criterion_says_of_peers_that_are_not_there_they_have_no_part(monkeypatch, said):
    """Client 3 takes no part in the round and client 1 is refused: their models are not numbers to reckon with."""

    def careless(peers: Any, own: Any) -> Tensor:
        return torch.full_like(peers.average, said).where(torch.isinf(peers.average), peers.average)

    monkeypatch.setitem(CRITERIA, "careless", careless)
    thetas, _ = round_of(named("careless").method, spoiled(1), cohort=(0, 1, 2))
    close(thetas[[0, 2]], MODELS[[2, 0]])
    close(thetas[3], MODELS[3])


# Peers and data that are not what they should be


def spoiled(*clients: int) -> Tensor:
    """The clients' models with these not a number, so that what they publish is refused."""
    models = MODELS.clone()
    models[list(clients)] = NAN
    return models


def judging(*rows: tuple[Tensor, Tensor]) -> Federation:
    """The four clients with these validation examples."""
    return replace(TWO, validation=Examples.of(rows))


def test_a_class_without_validation_examples_decides_nothing():
    """Client 0 judges by the first class: gaps log 3/4, log 5/8 and 0; client 3 by the second, of which it has two:
    gaps log 5/3, log 10/9 and log 10/3."""
    first, second = (X[:1], Y[:1]), (X[1:].repeat(2, 1), Y[1:].repeat(2))
    thetas, liking = round_of(FedCB2O(download=3, alpha=1.0), data=judging(first, (X, Y), (X, Y), second))
    close(thetas[0], mean_of({1: 4 / 3, 2: 8 / 5, 3: 1}))
    close(thetas[3], mean_of({0: 3 / 5, 1: 9 / 10, 2: 3 / 10}))
    close(liking[0], [0.0, 0.5 * (2 / 3) ** 2, 0.5 * (4 / 5) ** 2, 0.5 / 4])
    close(thetas[1:3], round_of(FedCB2O(download=3, alpha=1.0))[0][1:3])  # they have both classes


@pytest.mark.parametrize("criterion", CRITERIA)
def test_classes_that_some_clients_lack_leave_no_trace_that_is_not_a_number(criterion):
    run_of_few = run(FedCB2O(criterion=criterion, **ALIKE), federation((3, 2, 4, 2, 9), validation_share=0.3), last=4)
    assert torch.isfinite(run_of_few.models).all()
    assert not any(progress.record["refused"] for progress in run_of_few.progress)


def test_without_validation_examples_clients_judge_by_those_they_train_on():
    method = FedCB2O(download=3, alpha=1.0)
    only_first = Federation.from_arrays([(X[:1], Y[:1]), *[(X, Y)] * 3], (X, Y))
    assert only_first.validation is None
    close(round_of(method, data=only_first)[0][0], mean_of({1: 4 / 3, 2: 8 / 5, 3: 1}))
    judged = judging(*[(X, Y)] * 4).validation
    close(round_of(method, data=replace(only_first, validation=judged))[0][0], mean_of({1: 4 / 3, 2: 1 / 2, 3: 1}))


def test_a_client_without_any_validation_example_is_refused_by_name():
    with pytest.raises(DataError, match=r"client 2 \(validation\): got '0 examples'; allowed: at least one"):
        judging((X, Y), (X, Y), (X[:0], Y[:0]), (X, Y))


@pytest.mark.parametrize("own_model", ["excluded", "included"])
def test_a_peer_that_was_not_delivered_has_no_weight_and_counts_as_met(own_model):
    method = FedCB2O(download=3, alpha=1.0, own_model=own_model)
    thetas, liking = round_of(method, spoiled(2))
    close(thetas[0], mean_of({1: 4 / 3, 3: 1} | ({0: 4 / 3} if own_model == "included" else {})))
    assert thetas[2].isnan().all()
    close(liking[0], [0.0, 1 / 4, 0.5 * LEAST, 5 / 24])
    assert liking[0, 2] > 0


ALONE = pytest.mark.parametrize(
    ("own_model", "options"),
    [("excluded", {}), ("included", {}), ("excluded", {"criterion": "average_loss"}),
     ("included", {"criterion": "average_loss"}), ("included", {"criterion_from": 9}), ("included", {"quantile": 0.5})],
)  # fmt: skip


@ALONE
@pytest.mark.parametrize("cohort", [(0, 1, 2, 3), (3,)])
def test_who_has_nobody_to_learn_from_keeps_its_model(cohort, own_model, options):
    """The others are refused, or take no part."""
    method = FedCB2O(download=3, own_model=own_model, **options)
    thetas, liking = round_of(method, spoiled(0, 1, 2), cohort=cohort)
    close(thetas[3], MODELS[3])
    assert liking[3].tolist() == pytest.approx([0.5 * LEAST * (len(cohort) > 1)] * 3 + [0.0], abs=1e-33)
    assert furthest(round_of(method)[0][3], MODELS[3]) > 1e-2


@ALONE
def test_who_gets_models_that_make_no_numbers_of_its_examples_keeps_its_own(own_model, options):
    """They answer 1e38 with infinities, and client 3's model with 0."""
    models = 10 + MODELS.abs()
    models[3] = 0.0
    method = FedCB2O(download=3, own_model=own_model, **options)
    thetas, liking = round_of(method, models, judging((X, Y), (X, Y), (X, Y), (1e38 * X, Y)))
    close(thetas[3], torch.zeros(4))
    assert liking[3].tolist() == pytest.approx([0.5 * LEAST] * 3 + [0.0], abs=1e-33)
    assert furthest(round_of(method, models)[0][3], torch.zeros(4)) > 1.0


def test_a_budget_larger_than_the_cohort_meets_everybody_once():
    three, nine = (round_of(FedCB2O(download=number)) for number in (3, 9))
    close(nine[0], three[0])
    close(nine[1], three[1])
    notes: list[tuple[Ask, Replies]] = []
    thetas, _ = round_of(FedCB2O(download=9, alpha=1.0), cohort=(0, 1, 3), notes=notes)
    peers = notes[1][0].peers
    assert peers is not None
    assert [sorted(row) for row in peers.tolist()] == [[NOBODY] * 7 + both for both in ([1, 3], [0, 3], [0, 1])]
    close(thetas[0], mean_of({1: 4 / 3, 3: 1}))
    two = round_of(FedCB2O(download=1))
    assert furthest(two[0], three[0]) > 1e-2


def test_a_configuration_may_not_ask_for_more_peers_than_there_are():
    settings = parse({"method": {"name": "fedcb2o", "download": 4}}, own_data=True)
    with pytest.raises(ConfigError, match=r"method.download: got 4; allowed: 1 to 3"):
        World.of(settings, TWO, nn.Linear(2, 2))


# Blocks and numbering. The same of the table's defaults is in fleets/test_simulated.py

EVERYTHING = FedCB2O(download=3, criterion="class_entropy", criterion_from=1, quantile=0.7, own_model="included")


def test_blocks_and_threads_change_no_bit():
    whole = run(EVERYTHING, last=3, participation=0.9)
    for block, threads in ((1, 2), (3, 1), (7, 2)):
        assert same(run(EVERYTHING, last=3, participation=0.9, block=block, threads=threads), whole)
    assert not same(run(EVERYTHING, last=3, participation=0.9, seed=1), whole)


def test_renumbered_clients_get_the_permuted_result():
    """Consensus points add up in another order: a few float32 roundings, grown over three rounds of training."""
    order = torch.tensor([3, 5, 0, 2, 1, 6, 4])
    whole, moved = run(EVERYTHING, last=3), run(EVERYTHING, DATA.renumbered(order), last=3)
    assert furthest(moved.models, whole.models[order]) < 1e-4
    assert furthest(moved.memory["liking"], whole.memory["liking"][order][:, order]) < 1e-4
    assert torch.equal(moved.last.links, whole.last.links[order][:, order])
    assert furthest(moved.models, whole.models) > 1e-2


# What a run records of it


def test_the_record_says_how_often_and_with_what_weight_honest_clients_took_whom():
    """By loss, with alpha 2, the models weigh 1/4, 1/2, 1/5 and 5/12. Client 2 is malicious; its cluster is 3's."""
    malicious = torch.tensor([False, False, True, False])
    method, setting = FedCB2O(download=3, criterion="average_loss"), setting_of(TWO, matrix())
    with closing(fleet_of(method, TWO, matrix(), options=STANDSTILL)) as fleet:
        fleet.restore({"theta": MODELS.clone(), "liking": torch.zeros(4, 4)})
        (progress,) = rounds(
            method, fleet, setting, TWO.keys, beginning(method, setting), seed=0, last=1, malicious=malicious
        )
    attack = progress.record["attack"]
    third = {"own_honest": 1 / 3 + 1 / 3 + 0, "own_malicious": 0 + 0 + 1 / 3, "other_honest": 1 / 3 + 1 / 3 + 2 / 3}
    third["other_malicious"] = 1 / 3 + 1 / 3 + 0
    weight = {"own_honest": 30 / 67 + 15 / 52, "own_malicious": 4 / 19, "other_honest": 25 / 67 + 25 / 52 + 15 / 19}
    weight["other_malicious"] = 12 / 67 + 12 / 52
    assert attack["selected"] == pytest.approx({name: share / 3 for name, share in third.items()})
    assert attack["weight"] == pytest.approx({name: share / 3 for name, share in weight.items()}, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("download", 0), ("alpha", -1.0), ("alpha", INF), ("quantile", 0.0), ("quantile", 1.1), ("quantile_slack", -0.1),
     ("quantile_slack", INF), ("criterion_from", -1), ("zeta", 0.0), ("zeta", 1.1), ("kappa", -1.0), ("kappa", NAN),
     ("consensus_step", 1.5), ("own_model", "perhaps"), ("selection", "random"), ("criterion", "mood")],
)  # fmt: skip
def test_impossible_options_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        FedCB2O(**{field: value})
