import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import parse
from coterie.errors import ConfigError
from coterie.federation import Federation
from coterie.robust.attacks import (
    ATTACKS,
    ALittleIsEnough,
    Backdoor,
    InnerProduct,
    LabelFlip,
    MinMax,
    MinSum,
    NoAttack,
    NonFinite,
    RandomModels,
    Scaling,
    Seen,
    SignFlip,
    Stale,
)
from coterie.world import unattacked
from tiny import federation, numbers, regression

SIX = federation((12, 5, 9, 20, 6, 7))  # clusters 0 1 0 1 0 1
IMAGES = federation((9, 4, 1, 7), shape=(1, 5, 5))


def seen(own, start=None, others=None, sent=None, keys=None, round=0):
    own = torch.as_tensor(own)
    start, sent = (torch.zeros_like(own) if one is None else torch.as_tensor(one) for one in (start, sent))
    others = own[:0] if others is None else torch.as_tensor(others)
    return Seen(own, start, others, sent, torch.arange(len(own)) if keys is None else keys, round)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, torch.as_tensor(expected).expand_as(found), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_listed_under_its_own_name_and_refuses_unknown_options(name):
    assert ATTACKS[name]().name == name
    with pytest.raises(ValueError, match="no_such_option"):
        ATTACKS[name](no_such_option=1)


# what is sent, by hand


def test_sign_flipping_and_scaling_by_hand():
    """The update is (2, -1)."""
    those = seen([[3.0, 1.0]], start=[[1.0, 2.0]])
    close(SignFlip().craft(those), [[-1.0, 3.0]])
    close(SignFlip(factor=2.0).craft(those), [[-3.0, 4.0]])
    close(Scaling().craft(those), [[21.0, -8.0]])
    close(Scaling(factor=1.0).craft(those), [[3.0, 1.0]])


@pytest.mark.parametrize(
    ("honest", "attackers", "share"),
    [
        (26, 24, 24 / 26),  # n = 50, m = 24 of the paper: s = floor(50 / 2 + 1) - 24 = 2 supporters
        (7, 3, 4 / 7),  # s = 6 - 3
        (8, 3, 5 / 8),  # n odd: s = floor(6.5) - 3
        (9, 1, 0.51),  # the rule gives 4 / 9, a step to the wrong side
        (3, 4, 0.99),  # more attackers than honest clients need no supporter: the rule has no bound
    ],
)
def test_a_little_is_enough_goes_as_far_as_the_papers_rule_allows(honest, attackers, share):
    """Phi(z) = (1 + erf(z / sqrt 2)) / 2 is the share of honest clients that may be nearer to the mean."""
    others = numbers(honest, 2)
    sent = ALittleIsEnough().craft(seen(numbers(attackers, 2, seed=1), others=others))
    assert sent.shape == (attackers, 2)
    z = (others.mean(0) - sent) / others.std(0, correction=0)
    for one in z.flatten().tolist():
        assert (1 + math.erf(one / math.sqrt(2))) / 2 == pytest.approx(share, abs=1e-5)


def test_a_little_is_enough_with_a_fixed_z():
    """Mean 2, deviation sqrt(8 / 3)."""
    sent = ALittleIsEnough(z=1.5).craft(seen([[9.0], [8.0]], others=[[0.0], [2.0], [4.0]]))
    close(sent, 2 - 1.5 * math.sqrt(8 / 3))


def test_inner_product_manipulation_by_hand():
    """The honest mean update is 6 - 2."""
    those = seen([[5.0], [9.0]], start=[[1.0], [3.0]], others=[[4.0], [8.0]])
    close(InnerProduct().craft(those), 0.0)
    close(InnerProduct(factor=2.0).craft(those), -6.0)


def test_attackers_that_hear_nobody_hide_among_themselves():
    close(InnerProduct().craft(seen([[5.0], [9.0]])), -3.5)
    close(MinMax().craft(seen([[5.0], [9.0]])), 5.0)
    assert InnerProduct().craft(seen([[5.0], [9.0]], others=[[4.0]]))[0] == -2.0


def test_min_max_and_min_sum_by_hand():
    """Honest 0, 1, 5. As far as 5 is from 0: at 0. Sums of squares: (x - 2)^2 3 + 14 <= 25 + 16, that of 5: at -1."""
    those = seen([[7.0], [8.0]], others=[[0.0], [1.0], [5.0]])
    close(MinMax().craft(those), 0.0)
    close(MinSum().craft(those), -1.0)


def test_the_directions_of_min_max_by_hand():
    """Honest (0, 0), (2, 0). Against the update (0, 1): 1 + g^2 = 4. Against the signs of (3, 1): (1 + g)^2 + g^2 = 4.
    Min-sum has the same bound here for (0, 1): 2 + 2 g^2 = 4."""
    others = [[0.0, 0.0], [2.0, 0.0]]
    along = seen([[9.0, 9.0]], start=[[1.0, -1.0]], others=others)
    close(MinMax(direction="unit").craft(along), [[1.0, -math.sqrt(3)]])
    close(MinSum(direction="unit").craft(along), [[1.0, -1.0]])
    close(MinMax(direction="deviation").craft(along), [[0.0, 0.0]])
    gamma = (math.sqrt(7) - 1) / 2
    close(
        MinMax(direction="sign").craft(seen([[9.0, 9.0]], start=[[-2.0, -1.0]], others=others)), [[1 - gamma, -gamma]]
    )


@pytest.mark.parametrize("kind", [MinMax, MinSum])
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 6), st.sampled_from(["deviation", "unit", "sign"]))
def test_min_max_and_min_sum_reach_their_bound_and_not_further(kind, seed, honest, size, direction):
    """Float32 models a hundred times further from the origin than from each other: 1e-3 of the bound."""
    others = 100 + numbers(honest, size, seed=seed)
    (sent,) = kind(direction=direction).craft(seen(numbers(1, size, seed=seed + 1), others=others))
    pairs = (others[:, None].double() - others.double()).square().sum(2)
    summed = {MinMax: lambda squares: squares.amax(-1), MinSum: lambda squares: squares.sum(-1)}[kind]
    bound = float(summed(pairs).max())

    def measured(gamma):
        model = others.mean(0) + gamma * (sent - others.mean(0))
        return float(summed((model - others).double().square().sum(1)))

    assert measured(1.0) == pytest.approx(bound, rel=1e-3)
    assert measured(1.01) > bound * 1.001


@pytest.mark.parametrize("kind", [ALittleIsEnough, MinMax, MinSum])
def test_among_equal_models_there_is_nowhere_to_hide_but_with_them(kind):
    close(kind().craft(seen([[9.0, 9.0]], start=[[0.0, 1.0]], others=[[1.0, 2.0]])), [[1.0, 2.0]])
    close(kind().craft(seen([[9.0, 9.0]], start=[[0.0, 1.0]], others=[[1.0, 2.0]] * 3)), [[1.0, 2.0]])


def test_random_models_are_normal_independent_and_a_function_of_the_key():
    """Mean, deviation and correlation each within 5 of their standard errors: false alarms below 1e-6 each."""
    count, spread = 20_000, 3.0
    sent = RandomModels(spread=spread).craft(seen(torch.ones(2, count), start=torch.ones(2, count)))
    assert float(sent.mean().abs()) < 5 * spread / math.sqrt(2 * count)
    assert float((sent.std() / spread - 1).abs()) < 5 / math.sqrt(4 * count)
    assert float((sent[0] * sent[1]).mean().abs()) < 5 * spread**2 / math.sqrt(count)
    swapped = RandomModels(spread=spread).craft(seen(torch.zeros(2, count), keys=torch.tensor([1, 0])))
    assert torch.equal(swapped, sent.flip(0))
    assert not torch.equal(sent[0], sent[1])


def test_a_stale_model_is_sent_until_it_is_replaced_by_the_newest():
    attack, sent, said = Stale(age=3), torch.zeros(1, 1), []
    for round in range(7):
        sent = attack.craft(seen([[10.0 + round]], sent=sent, round=round))
        said.append(float(sent))
    assert said == [10.0, 10.0, 10.0, 13.0, 13.0, 13.0, 16.0]


def test_a_stale_attacker_that_has_sent_nothing_yet_begins_with_what_it_has():
    sent = Stale(age=3).craft(seen([[7.0, 7.0], [8.0, 8.0]], sent=[[0.0, 0.0], [5.0, 0.0]], round=1))
    close(sent, [[7.0, 7.0], [5.0, 0.0]])


def test_payloads_by_hand():
    those = seen([[1.0, 2.0]])
    assert NonFinite(payload="nan").craft(those).isnan().all()
    assert (NonFinite(payload="infinity").craft(those) == math.inf).all()
    assert (NonFinite(payload="huge").craft(those) == torch.tensor(1e30)).all()
    assert NonFinite(payload="shape").craft(those).shape == (1, 3)


# what is learned from


def own(data: Federation, client: int, part: str = "train"):
    """A client's examples (x, y), without padding."""
    examples = getattr(data, part)
    count = int(examples.count[client])
    return examples.x[client, :count], examples.y[client, :count]


@given(st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_exactly_the_share_of_the_source_class_is_flipped(flipped, seed):
    """Client 1 has 5 examples and 15 rows of padding, whose zeros are nobody's label."""
    poisoned = LabelFlip(source=0, target=2, flipped=flipped, malicious=[1, 3]).enters(SIX, "lie", seed)
    for client in range(6):
        (x, before), (x_after, after) = own(SIX, client), own(poisoned, client)
        changed = before != after
        members = int((before == 0).sum())
        assert int(changed.sum()) == (round(flipped * members) if client in (1, 3) else 0)
        assert before[changed].tolist() == [0] * int(changed.sum())
        assert after[changed].tolist() == [2] * int(changed.sum())
        assert torch.equal(x, x_after)


@given(st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_the_same_examples_are_left_out_instead(flipped, seed):
    attack = LabelFlip(source=0, target=2, flipped=flipped, malicious=[1, 3])
    lied, left_out = (
        attack.enters(SIX, "lie", seed),
        attack.model_copy(update={"removed": True}).enters(SIX, "lie", seed),
    )
    for client in range(6):
        (x, y), (_, called), (x_after, y_after) = own(SIX, client), own(lied, client), own(left_out, client)
        assert torch.equal(x_after, x[y == called])
        assert torch.equal(y_after, y[y == called])


def test_somebody_left_with_nothing_is_refused():
    alone = replace(SIX, train=replace(SIX.train, y=torch.zeros_like(SIX.train.y)))
    with pytest.raises(ConfigError, match=r"attack\.removed"):
        LabelFlip(removed=True, malicious=[1]).enters(alone, "lie", 0)


def test_which_labels_are_flipped_depends_on_seed_and_identity_and_not_on_the_place():
    order = torch.tensor([3, 5, 0, 2, 1, 4])
    half = LabelFlip(target=2, flipped=0.5, malicious=[1, 3])
    moved = LabelFlip(target=2, flipped=0.5, malicious=[0, 4]).enters(SIX.renumbered(order), "lie", 0)
    poisoned = half.enters(SIX, "lie", 0)
    assert torch.equal(moved.train.y, poisoned.renumbered(order).train.y)
    assert torch.equal(half.enters(SIX, "lie", 0).train.y, poisoned.train.y)
    assert not all(torch.equal(half.enters(SIX, "lie", seed).train.y, poisoned.train.y) for seed in range(1, 9))


@pytest.mark.parametrize("attack", [LabelFlip(malicious=[3]), Backdoor(malicious=[3], stamped=1.0)])
def test_attackers_judge_peers_as_they_train(attack):
    data = federation((12, 12, 12, 30), validation_share=0.4)
    poisoned = attack.enters(data, "lie", 0)
    assert (own(data, 3, "validation")[1] == 0).any()
    assert (own(poisoned, 3, "validation")[1] != 0).all()
    assert torch.equal(poisoned.validation.y[:3], data.validation.y[:3])


def test_label_flipping_aims_at_the_source_class_of_every_test_set():
    data = LabelFlip(source=2, target=0, malicious=[1]).enters(SIX, "lie", 0)
    assert len(data.targeted) == len(SIX.tests)
    for aim, (x, y) in zip(data.targeted, SIX.tests, strict=True):
        assert torch.equal(aim.x, x[y == 2])
        assert aim.y.tolist() == [2] * int((y == 2).sum())
        assert aim.label == 0


def stamped_by_hand(x, kind):
    """White in the last 2 x 2 pixels, the last 2 features, or 20 % of what a black image becomes by blending."""
    if kind == "blended":
        return 0.8 * x + Backdoor(kind=kind).stamp(torch.zeros_like(x))
    white = torch.zeros(x.shape[1:])
    (white if x.dim() == 2 else white[0, 3:])[..., -2:] = 1.0
    return torch.where(white.bool(), 1.0, x)


@pytest.mark.parametrize("kind", ["pattern", "blended"])
@pytest.mark.parametrize("data", [IMAGES, SIX], ids=["images", "vectors"])
def test_a_backdoor_stamps_its_share_and_calls_it_by_the_target(kind, data):
    poisoned = Backdoor(kind=kind, size=2, stamped=0.5, malicious=[0, 1]).enters(data, "lie", 0)
    for client in (0, 1):
        (x, y), (x_after, y_after) = own(data, client), own(poisoned, client)
        changed = (x != x_after).flatten(1).any(1)
        assert int(changed.sum()) == round(0.5 * len(y))
        close(x_after[changed], stamped_by_hand(x[changed], kind))
        assert torch.equal(y_after, torch.where(changed, 1, y))
    assert torch.equal(poisoned.train.x[2:], data.train.x[2:])
    assert torch.equal(poisoned.train.y[2:], data.train.y[2:])


@pytest.mark.parametrize("kind", ["pattern", "blended"])
def test_a_backdoor_aims_at_the_stamped_images_of_all_classes_but_the_target(kind):
    poisoned = Backdoor(kind=kind, size=2, target=2, malicious=[0]).enters(IMAGES, "lie", 0)
    for aim, (x, y) in zip(poisoned.targeted, IMAGES.tests, strict=True):
        assert (y == 2).any()
        assert torch.equal(aim.y, y[y != 2])
        close(aim.x, stamped_by_hand(x[y != 2], kind))
        assert aim.label == 2


def test_the_blended_image_is_one_of_grey_noise():
    """Normal with mean 0.5 and deviation 0.25, cut at 0 and 1: deviation 0.2399 after the cut (by integration); 10 000
    pixels, bounds at 5 standard errors, false alarms below 1e-6 each."""
    trigger = Backdoor(kind="blended", blend=0.5).stamp(torch.zeros(2, 1, 100, 100)) / 0.5
    assert torch.equal(trigger[0], trigger[1])
    assert trigger.min() == 0.0
    assert trigger.max() == 1.0
    assert abs(float(trigger[0].mean()) - 0.5) < 5 * 0.24 / 100
    assert abs(float(trigger[0].std()) - 0.2399) < 5 * 0.24 / math.sqrt(2 * 10_000)


@pytest.mark.parametrize("kind", ["pattern", "blended"])
def test_a_backdoor_passes_by_what_has_nothing_to_stamp(kind):
    """Client 2 has one example, of which half is none; one test set has the target class only."""
    x, _ = IMAGES.tests[0]
    data = replace(IMAGES, tests=((x, torch.ones(len(x), dtype=torch.int64)), *IMAGES.tests[1:]))
    poisoned = Backdoor(kind=kind, stamped=0.5, malicious=[2]).enters(data, "lie", 0)
    assert torch.equal(poisoned.train.x, IMAGES.train.x)
    assert poisoned.targeted[0].x.shape == (0, 1, 5, 5)


# who attacks


def test_the_last_clients_of_each_cluster_are_malicious_or_those_that_are_named():
    assert NoAttack(malicious_per_cluster=2).chosen([0, 1, 0, 1, 0, 1]) == [2, 3, 4, 5]
    assert NoAttack(malicious_per_cluster=2).chosen([5, 5, 5, 5, 2, 2, 2]) == [2, 3, 5, 6]
    assert NoAttack(malicious_per_cluster=0).chosen([0, 1]) == []
    assert NoAttack(malicious=[4, 1, 4]).chosen([0] * 6) == [1, 4]
    without = replace(SIX, clusters=None)
    assert NoAttack(malicious_per_cluster=2).enters(without, "lie", 0).malicious.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("options", [{"malicious_per_cluster": 3}, {"malicious": [6]}, {"malicious": [-1]},
                                     {"malicious": list(range(6))}])  # fmt: skip
def test_somebody_must_be_honest_and_attackers_exist(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        NoAttack(**options).enters(SIX, "lie", 0)


@pytest.mark.parametrize("data", [SIX, regression()], ids=["three classes", "regression"])
@pytest.mark.parametrize(
    "attack",
    [LabelFlip(target=3, malicious=[1]), LabelFlip(source=3, malicious=[1]), Backdoor(target=3, malicious=[1])],
)
def test_labels_that_do_not_exist_are_refused(attack, data):
    with pytest.raises(ConfigError, match=r"attack\.(source|target)"):
        attack.enters(data, "lie", 0)


def test_flipping_a_label_to_itself_is_refused():
    with pytest.raises(ConfigError, match=r"attack\.target"):
        LabelFlip(source=1, target=1, malicious=[1]).enters(SIX, "lie", 0)


def test_an_attacker_lies_or_is_made_honest_or_is_taken_out():
    attack = LabelFlip(target=2, malicious=[1, 3])
    lying, honest, absent = (attack.enters(SIX, role, 0) for role in ("lie", "honest", "absent"))
    assert not torch.equal(lying.train.y, SIX.train.y)
    assert torch.equal(honest.train.y, SIX.train.y)
    assert lying.malicious.tolist() == honest.malicious.tolist() == [False, True, False, True, False, False]
    assert absent.keys.tolist() == [0, 2, 4, 5]
    assert torch.equal(absent.train.y, SIX.train.y[[0, 2, 4, 5]])
    assert not absent.malicious.any()
    assert len(lying.targeted) == len(honest.targeted) == len(absent.targeted) == len(SIX.tests)


@pytest.mark.parametrize("examples", [None, 60])
def test_attackers_may_hold_more_examples_and_train_on_all_of_them(examples):
    """Of 20 examples 5 are kept for validation; attackers train on theirs too."""
    config = parse({
        "scenario": {"name": "rotated", "data": "digits", "clusters": 2, "clients": 6, "examples_per_client": 20,
                     "validation": 0.25},
        "method": {"name": "fedcbo"},
        "attack": {"name": "label-flip", "malicious_per_cluster": 1, "malicious_examples": examples},
    })  # fmt: skip
    data = config.attack.enters(unattacked(config), "lie", config.seed)
    assert data.malicious.tolist() == [False, False, True] * 2
    assert data.train.count.tolist() == [15, 15, examples or 15] * 2
    assert data.validation.count.tolist() == [5, 5, (examples or 20) // 4] * 2
