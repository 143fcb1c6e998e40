import math
from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.randomness import Moment, bits, derive, fold, normal, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FALSE_ALARM = 1e-6  # the chance that a correct generator fails one of the tests of distribution below
any_integer = st.integers(-(1 << 70), 1 << 70)


def finalised(z: int) -> int:
    """SplitMix64's finaliser, written down once more from the paper with Python's own integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def chained(key: int, *parts: int) -> int:
    for part in parts:
        key = finalised((key + GOLDEN * (part + 1)) & MASK)
    return key


def unsigned(values: Tensor) -> list[int]:
    return [value & MASK for value in values.reshape(-1).tolist()]


def distance_from(cdf: Tensor) -> float:
    """Kolmogorov and Smirnov's distance of these values of the distribution function from the uniform law."""
    ordered = cdf.double().sort().values
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float(torch.maximum((ordered - steps[:-1]).abs(), (steps[1:] - ordered).abs()).max())


def allowed_distance(count: int) -> float:
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * count))


def standard_normal_cdf(values: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(values.double() / math.sqrt(2.0)))


def test_words_are_those_of_the_published_splitmix64_generator():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert unsigned(bits(torch.tensor(1234567), 5)) == published
    assert unsigned(bits(torch.tensor(1234568), 5)) != published


@given(seed=any_integer, purpose=st.text(max_size=8), parts=st.lists(any_integer, max_size=4))
def test_derive_is_the_specified_hash_of_any_integers(seed, purpose, parts):
    word = int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")
    derived = derive(seed, purpose, *parts)
    assert derived == chained(finalised((seed ^ word) & MASK), *parts) >> 1
    assert 0 <= derived < 1 << 63


@given(key=st.integers(0, (1 << 63) - 1), parts=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_fold_chains_as_derive_does(key, parts):
    assert unsigned(fold(key, torch.tensor(parts))) == [chained(key, part) for part in parts]
    first = fold(key, torch.tensor(parts))
    assert unsigned(fold(first, torch.tensor(7))) == [chained(key, part, 7) for part in parts]


def test_every_part_of_a_key_counts_and_so_does_their_order():
    derived = [
        derive(0, "a"), derive(1, "a"), derive(0, "b"), derive(0, "a", 0), derive(0, "a", 1), derive(0, "a", 0, 0),
        derive(0, "a", 0, 1), derive(0, "a", 1, 0), derive(0, "a", -1),
    ]  # fmt: skip
    assert len(set(derived)) == len(derived)
    moments = [Moment(0, 0), Moment(1, 0), Moment(0, 1), Moment(0, 0, 1)]
    keys = [moment.key(purpose) for moment in moments for purpose in ("shuffle", "dropout")]
    assert len(set(keys)) == len(keys)
    assert Moment(3, 4, 5).key("x", 6) == derive(3, "x", 4, 5, 6)


def test_clients_with_neighbouring_keys_have_unrelated_numbers():
    drawn = uniform(fold(derive(0, "test"), torch.arange(20_000)), 1)[:, 0]
    assert distance_from(drawn) < allowed_distance(len(drawn))
    pairs = torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1]
    assert abs(pairs) < 4.9 / math.sqrt(len(drawn))  # 4.9 deviations: one in a million


@pytest.mark.parametrize(("draw", "cdf"), [(uniform, lambda x: x), (normal, standard_normal_cdf)])
def test_draws_follow_their_law(draw, cdf):
    drawn = draw(torch.tensor([derive(1, "law")]), 60_000)[0]
    assert drawn.dtype == torch.float32
    assert distance_from(cdf(drawn)) < allowed_distance(len(drawn))
    assert distance_from(cdf(drawn + 0.03)) > allowed_distance(len(drawn))  # the test would notice a small shift
    halves = torch.corrcoef(torch.stack(drawn.split(30_000)))[0, 1]  # the two numbers made of one word
    assert abs(halves) < 4.9 / math.sqrt(30_000)


def test_uniform_numbers_are_multiples_of_two_to_the_minus_24_below_one():
    drawn = uniform(torch.tensor([5]), 4096)
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    assert torch.equal((drawn * 2**24).round(), drawn * 2**24)


@pytest.mark.parametrize("draw", [bits, uniform, normal])
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_what_a_key_draws_does_not_depend_on_its_neighbours(draw, count):
    keys = fold(derive(2, "clients"), torch.arange(6).reshape(2, 3))
    together = draw(keys, count)
    assert together.shape == (2, 3, count)
    assert torch.equal(together[1, 2], draw(keys[1, 2], count))
    assert torch.equal(together.flatten(0, 1)[torch.tensor([4, 0])], draw(keys.flatten()[torch.tensor([4, 0])], count))
    assert not torch.equal(together[0, 0], together[0, 1])


@pytest.mark.parametrize("draw", [bits, uniform])
def test_fewer_numbers_are_the_first_of_more(draw):
    keys = torch.tensor([3, 4])
    assert torch.equal(draw(keys, 9)[:, :5], draw(keys, 5))


def test_drawing_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    normal(torch.tensor([1]), 5)
    assert torch.equal(torch.get_rng_state(), before)
