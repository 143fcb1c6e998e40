import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.robust import aggregators
from coterie.robust.aggregators import AGGREGATORS, sageflow_weights

INF, NAN = math.inf, math.nan
UNWEIGHTED = ["median", "trimmed-mean", "krum", "multi-krum"]
ROBUST = sorted(set(AGGREGATORS) - {"mean"})
EVERY = pytest.mark.parametrize("name", AGGREGATORS)


def aggregate(name, models, weight=None, start=None, malicious=0.0):
    models = torch.as_tensor(models, dtype=torch.float32)
    weight = torch.ones(len(models)) if weight is None else torch.as_tensor(weight)
    start = torch.zeros(models.shape[1]) if start is None else torch.as_tensor(start)
    return AGGREGATORS[name](models, weight, start, malicious)


def normals(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def column(*values):
    return torch.tensor(values)[:, None]


def close(found, expected, tolerance=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# by hand


def test_mean_by_hand():
    models = [[1.0, 0.0], [3.0, 4.0]]
    close(aggregate("mean", models, [1, 3]), [2.5, 3.0])
    close(aggregate("mean", models), [2.0, 2.0])


def test_median_by_hand():
    close(aggregate("median", [[5.0, 1.0], [1.0, 9.0], [2.0, 7.0]], [1, 1, 50]), [2.0, 7.0])  # the weight is ignored
    close(aggregate("median", [[4.0], [1.0], [90.0], [2.0]]), [3.0])  # the mean of 2 and 4; torch.median says 2
    assert column(4.0, 1.0, 90.0, 2.0).median(0).values == 2.0


def test_trimmed_mean_by_hand():
    models = [[0.0, 8.0], [1.0, 6.0], [2.0, 0.0], [6.0, 1.0], [90.0, -70.0]]
    close(aggregate("trimmed-mean", models, [1, 1, 1, 1, 50], malicious=0.2), [3.0, 7 / 3])  # 1 2 6 and 0 1 6
    close(aggregate("trimmed-mean", models, malicious=0.39), [3.0, 7 / 3])  # floor(1.95) = 1
    close(aggregate("trimmed-mean", models, malicious=0.4), [2.0, 1.0])  # one remains: the median


def test_the_number_assumed_malicious_does_not_suffer_from_rounding():
    """The squares of 29 to 70 remain: (70 * 71 * 141 - 28 * 29 * 57) / 6 over 42; 28 to 71 have another mean."""
    assert int(0.29 * 100) == 28
    squares = torch.arange(100.0).square()[:, None]
    close(aggregate("trimmed-mean", squares, malicious=0.29), [654486 / 6 / 42])
    assert aggregate("trimmed-mean", squares, malicious=0.28) > 654486 / 6 / 42 + 1


@pytest.mark.parametrize("number", [1, 2, 9, 10])
def test_something_remains_however_near_a_half_the_share_is(number):
    models = normals(19, number, 3)
    close(aggregate("trimmed-mean", models, malicious=math.nextafter(0.5, 0.0)), aggregate("median", models))
    assert torch.isfinite(aggregate("multi-krum", models, malicious=math.nextafter(0.5, 0.0))).all()


def test_norm_clipping_by_hand():
    """Updates (3, 4), (0, 2), (0, 20) of lengths 5, 2, 20; the median 5 leaves the third (0, 5)."""
    models = [[4.0, 5.0], [1.0, 3.0], [1.0, 21.0]]
    close(aggregate("norm-clipping", models, start=[1.0, 1.0]), [1 + 3 / 3, 1 + (4 + 2 + 5) / 3])
    close(aggregate("norm-clipping", models, [2, 1, 1], [1.0, 1.0]), [1 + 6 / 4, 1 + (8 + 2 + 5) / 4])
    # Seen from the origin the lengths are sqrt(41), sqrt(10), sqrt(442): another bound, another result.
    third = 41**0.5 / 442**0.5
    close(aggregate("norm-clipping", models), [(5 + third) / 3, (8 + 21 * third) / 3])


def test_krum_by_hand():
    """f = 1: the two nearest others; scores 1 + 6.25, 1 + 2.25, 2.25 + 2.25, 2.25 + 9 and 96^2 + 97.5^2."""
    models = column(0.0, 1.0, 2.5, 4.0, 100.0)
    close(aggregate("krum", models, [1, 1, 1, 1, 50], malicious=0.2), [1.0])
    close(aggregate("multi-krum", models, [1, 1, 1, 1, 50], malicious=0.2), [7.5 / 4])


def test_of_equal_scores_krum_takes_the_first():
    """f = 2: the nearest other; scores 1, 1, 2.25, 2.25, 96^2. multi-krum takes three: 0, 1 and the first of 2.5, 4."""
    models = column(0.0, 1.0, 2.5, 4.0, 100.0)
    assert aggregate("krum", models, malicious=0.4) == 0.0
    assert aggregate("krum", models.flip(0), malicious=0.4) == 1.0
    close(aggregate("multi-krum", models, malicious=0.4), [3.5 / 3])
    close(aggregate("multi-krum", models.flip(0), malicious=0.4), [5 / 3])


def test_with_too_few_models_krum_still_looks_at_the_nearest_other():
    assert aggregate("krum", column(9.0, 1.0, 2.0), malicious=0.4) == 1.0  # K - f - 2 = 0
    assert aggregate("krum", column(9.0, 2.0, 1.0), malicious=0.4) == 2.0


# the geometric median


def test_the_geometric_median_of_an_equilateral_triangle_is_its_centroid():
    height = 3**0.5
    triangle = torch.tensor([[10.0, 5.0], [12.0, 5.0], [11.0, 5.0 + height]])
    close(aggregate("geometric-median", triangle), [11.0, 5.0 + height / 3])
    assert (aggregate("median", triangle) - torch.tensor([11.0, 5.0 + height / 3])).norm() > 0.5


def test_the_geometric_median_of_a_convex_quadrangle_is_where_the_diagonals_cross():
    """From (0, 0) to (4, 4) and from (4, 0) to (1, 3): both lie on x + y = 4 at (2, 2)."""
    close(aggregate("geometric-median", [[0.0, 0.0], [4.0, 0.0], [4.0, 4.0], [1.0, 3.0]]), [2.0, 2.0])


@given(st.integers(0, 1000), st.integers(2, 8), st.floats(0.55, 0.95))
def test_a_model_with_more_than_half_the_weight_is_the_geometric_median(seed, number, share):
    models = 100 + normals(seed, number, 4)
    weight = torch.cat([torch.full((number - 1,), (1 - share) / (number - 1)), torch.tensor([share])])
    found = aggregate("geometric-median", models, weight)
    close(found, models[-1], tolerance=1e-5)  # smoothing keeps a millionth of the spread away, float32 an 8e-6
    assert (aggregate("mean", models, weight) - models[-1]).norm() > 1e-3


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5)), min_size=1, max_size=9, unique_by=lambda x: x[0]))
def test_in_one_dimension_the_geometric_median_is_the_weighted_median(points):
    points.sort()
    repeated = sorted(value for value, times in points for _ in range(times))
    lower, upper = repeated[(len(repeated) - 1) // 2], repeated[len(repeated) // 2]
    models, weight = column(*[float(value) for value, _ in points]), [times for _, times in points]
    found = float(aggregate("geometric-median", models, weight))
    assert lower - 1e-4 <= found <= upper + 1e-4  # every point between two middle values is one


@given(st.integers(0, 10_000), st.integers(3, 9), st.integers(2, 6), st.booleans())
def test_no_step_from_the_geometric_median_lowers_the_sum_of_distances(seed, number, size, corner):
    models = normals(seed, number, size) * (10.0 if corner else 1.0)
    weight = normals(seed + 1, number).exp()

    def total(points):  # [S, P] -> [S]
        return torch.cdist(points.double(), models.double()) @ weight.double()

    found = aggregate("geometric-median", models, weight)
    ways = torch.nn.functional.normalize(normals(seed + 2, 200, size), dim=1)
    steps = torch.cat(
        [found + length * ways for length in (1e-3, 1e-2, 0.1, 1.0)] + [models]
    )  # convex: no other minimum
    assert total(steps).min() >= total(found[None]) * (1 - 1e-6)
    assert total(steps).min() < total(aggregate("mean", models, weight)[None])


def test_half_the_models_in_one_place_are_the_geometric_median_though_nothing_is_left_to_scale_by():
    models = torch.tensor([[1.0, 2.0]] * 3 + [[5.0, 5.0], [-7.0, 0.0]])
    close(aggregate("geometric-median", models), [1.0, 2.0])
    heavy = [1.0, 1.0, 1.0, 9.0, 1.0]  # the majority by number is not one by weight
    close(aggregate("geometric-median", models, heavy), [5.0, 5.0], tolerance=1e-5)


# what all have in common


@EVERY
def test_one_model_is_its_own_aggregate(name):
    model = normals(0, 1, 5)
    close(aggregate(name, model, malicious=0.4), model[0])
    close(aggregate(name, model, [7], normals(1, 5), 0.0), model[0])


TWO = {
    "mean": [0.5, 1.5],
    "median": [0.5, 1.5],
    "trimmed-mean": [0.5, 1.5],
    "geometric-median": [0.5, 1.5],  # each point between is one; the middle is what symmetry asks for
    "krum": [1.0, 0.0],  # the first of equals
    "multi-krum": [0.5, 1.5],
    "norm-clipping": [0.5, 1.0],  # lengths 1 and 3, median 2: (1, 0) and (0, 2)
}


@EVERY
@pytest.mark.parametrize("malicious", [0.0, 0.49])
def test_two_models(name, malicious):
    close(aggregate(name, [[1.0, 0.0], [0.0, 3.0]], malicious=malicious), TWO[name])


@EVERY
def test_equal_models_are_their_aggregate(name):
    model = normals(2, 6)
    close(aggregate(name, model.repeat(4, 1), [1, 2, 3, 4], model, 0.25), model)
    close(aggregate(name, model.repeat(4, 1), [1, 2, 3, 4], model + 1, 0.25), model)


@EVERY
def test_an_aggregate_is_a_new_tensor_of_the_models_type_and_the_models_stay_as_they_were(name):
    models, start, weight = normals(3, 7, 5), normals(4, 5), torch.arange(7)
    before = models.clone(), start.clone(), weight.clone()
    found = AGGREGATORS[name](models, weight, start, 0.2)
    assert found.dtype == torch.float32
    assert found.shape == (5,)
    found += 1.0
    for now, then in zip((models, start, weight), before):
        assert torch.equal(now, then)


@EVERY
@given(st.integers(0, 10_000), st.integers(5, 9), st.sampled_from([0.0, 0.1, 0.2]), st.randoms(use_true_random=False))
def test_the_order_of_the_models_does_not_matter(name, seed, number, malicious, random):
    """At least five models and one assumed liar, so that Krum adds up two distances: the nearest pair would tie."""
    order = list(range(number))
    random.shuffle(order)
    models, weight, start = normals(seed, number, 7), normals(seed + 1, number).exp(), normals(seed + 2, 7)
    found = AGGREGATORS[name](models, weight, start, malicious)
    again = AGGREGATORS[name](models[order], weight[order], start, malicious)
    close(again, found, tolerance=1e-5)


def test_weights_go_with_their_models():
    """Otherwise the test above would pass whatever became of the weights."""
    models, weight = normals(5, 6, 7), torch.tensor([1.0, 1, 1, 1, 1, 9])
    for name in AGGREGATORS:
        other = aggregate(name, models, weight.flip(0), malicious=0.1)
        assert torch.equal(other, aggregate(name, models, weight, malicious=0.1)) == (name in UNWEIGHTED)


@EVERY
def test_numbers_of_examples_may_be_integers_and_only_their_ratio_counts(name):
    models = normals(6, 5, 4)
    close(aggregate(name, models, [2, 4, 6, 8, 10]), aggregate(name, models, [0.1, 0.2, 0.3, 0.4, 0.5]), tolerance=1e-5)


@pytest.mark.parametrize("name", ["mean", "geometric-median", "norm-clipping"])
def test_a_model_without_weight_does_not_count_unless_all_are_without(name):
    models = normals(7, 5, 4)
    without = aggregate(name, models, [1, 1, 1, 1, 0])
    if name != "norm-clipping":  # whose bound is a median of all lengths
        close(without, aggregate(name, models[:4]), tolerance=1e-5)
    assert (without - aggregate(name, models)).norm() > 1e-3
    close(aggregate(name, models, [0] * 5), aggregate(name, models))


@EVERY
def test_chunks_of_columns_do_not_change_the_result(name, monkeypatch):
    models, weight, start = normals(8, 9, 10), torch.arange(1, 10), normals(9, 10)
    whole = AGGREGATORS[name](models, weight, start, 0.2)
    monkeypatch.setattr(aggregators, "COLUMNS", 3)
    assert len(list(aggregators._centred(models, start))) == 4
    close(AGGREGATORS[name](models, weight, start, 0.2), whole)


def test_more_columns_than_one_chunk():
    models = normals(10, 3, aggregators.COLUMNS + 5)
    close(aggregate("median", models), models.median(0).values, tolerance=0)
    assert not torch.equal(aggregate("median", models)[-5:], models.median(0).values[:5])


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_a_mean_trimmed_by_nothing_is_the_mean(seed, number):
    models = normals(seed, number, 5)
    close(aggregate("trimmed-mean", models), aggregate("mean", models))
    if number >= 3:
        assert (aggregate("trimmed-mean", models, malicious=0.49) - aggregate("mean", models)).norm() > 1e-5


# liars


def in_the_box(found, honest, number, start):
    return bool(((found >= honest.min(0).values) & (found <= honest.max(0).values)).all())


def in_the_ball(found, honest, number, start):
    """C r around the honest mean, r its distance to the furthest honest model, C = (1 - a) / sqrt(1 - 2 a) for a share
    a < 1/2 of liars: Minsker 2015, Lemma 2.1."""
    share, centre = 1 - len(honest) / number, honest.mean(0)
    radius = (honest - centre).norm(dim=1).max() * (1 - share) / max(1 - 2 * share, 1e-9) ** 0.5
    return bool((found - centre).norm() <= radius * (1 + 1e-4))


def near_the_honest(found, honest, number, start):
    """An honest score is at most (K - f - 2) d^2, d the honest diameter, and a liar's contains a distance to an honest
    model; so all that is chosen is within sqrt(K - f - 2) d of one, and a mean of such within that and d of each."""
    diameter = torch.cdist(honest, honest).max()
    return bool((found - honest[0]).norm() <= diameter * (1 + max(len(honest) - 2, 1) ** 0.5) * (1 + 1e-4))


def no_further_than_the_honest(found, honest, number, start):
    return bool((found - start).norm() <= (honest - start).norm(dim=1).max() * (1 + 1e-4))


BOUNDS = {
    "median": in_the_box,
    "trimmed-mean": in_the_box,
    "geometric-median": in_the_ball,
    "krum": near_the_honest,
    "multi-krum": near_the_honest,
    "norm-clipping": no_further_than_the_honest,
}


@st.composite
def attacked(draw, least_honest):
    """(models, honest, start): honest models around a point, liars at up to 1e15 in any direction or all in one."""
    seed, liars, size = draw(st.integers(0, 10_000)), draw(st.integers(0, 4)), draw(st.integers(2, 6))
    number = least_honest(liars) + draw(st.integers(0, 3))
    honest = draw(st.sampled_from([0.0, 100.0])) + normals(seed, number, size)
    exponents = draw(st.lists(st.integers(0, 15), min_size=liars, max_size=liars))
    ways = normals(seed + 1, 1 if draw(st.booleans()) else max(liars, 1), size)
    lies = (
        torch.tensor([10.0**exponent for exponent in exponents]).reshape(-1, 1)
        * ways.expand(max(liars, 1), size)[:liars]
    )
    order = torch.randperm(number + liars, generator=torch.Generator().manual_seed(seed))
    return torch.cat([honest, lies])[order], honest, honest.mean(0) + normals(seed + 2, size)


def withstands(name, attack):
    models, honest, start = attack
    found = aggregate(name, models, start=start, malicious=1 - len(honest) / len(models))
    return BOUNDS[name](found, honest, len(models), start)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median", "norm-clipping"])
@given(attacked(lambda liars: liars + 1))
def test_less_than_half_of_liars_are_withstood(name, attack):
    assert withstands(name, attack)


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
@given(attacked(lambda liars: liars + 3))  # 2 f + 2 < K
def test_krum_withstands_less_than_half_of_liars_less_one(name, attack):
    assert withstands(name, attack)


@pytest.mark.parametrize("name", ROBUST)
def test_a_single_liar_carries_the_mean_out_of_every_bound(name):
    honest, start = normals(11, 6, 4), normals(12, 4)
    models = torch.cat([honest, torch.full((1, 4), 1e15)])
    assert withstands(name, (models, honest, start))
    assert not BOUNDS[name](aggregate("mean", models), honest, 7, start)


@pytest.mark.parametrize("name", ROBUST)
def test_a_majority_of_liars_is_not_withstood(name):
    honest, start = normals(13, 3, 4), normals(14, 4)
    lies = 1e15 * torch.ones(6, 4) + 1e10 * normals(15, 6, 4)
    found = aggregate(name, torch.cat([honest, lies]), start=start, malicious=0.3)
    assert not BOUNDS[name](found, honest, 9, start)


def test_liars_that_assume_too_little_of_them_are_not_trimmed():
    models = torch.cat([normals(16, 7, 4), torch.full((2, 4), 1e15)])
    assert not in_the_box(aggregate("trimmed-mean", models, malicious=1 / 9), models[:7], 9, None)
    assert in_the_box(aggregate("trimmed-mean", models, malicious=2 / 9), models[:7], 9, None)


def test_the_geometric_median_withstands_many_liars_of_little_weight():
    honest = 100 + normals(17, 3, 4)
    models, weight = torch.cat([honest, 1e15 * normals(18, 5, 4)]), [10.0, 10, 10, 1, 1, 1, 1, 1]
    found = aggregate("geometric-median", models, weight)
    radius = (honest - honest.mean(0)).norm(dim=1).max() * (30 / 35) / (1 - 2 * 5 / 35) ** 0.5
    assert (found - honest.mean(0)).norm() <= radius
    assert (aggregate("geometric-median", models) - honest.mean(0)).norm() > 1e6  # by number they are the majority


def test_huge_liars_do_not_round_the_honest_away():
    """Two opposite liars pull nowhere along the plane of the triangle, whose centroid is the result. Krum's three
    nearest of 0, 1, 2.5, 4 are each other: 1 + 6.25 + 16, 1 + 2.25 + 9, 6.25 + 2.25 + 2.25, 16 + 9 + 2.25."""
    triangle = torch.tensor([[0.0, 0, 0], [2.0, 0, 0], [1.0, 3**0.5, 0]])
    liars = torch.tensor([[1.0, 3**-0.5, 1e15], [1.0, 3**-0.5, -1e15]])
    close(aggregate("geometric-median", torch.cat([triangle, liars])), [1.0, 3**-0.5, 0.0], tolerance=1e-5)
    models = column(0.0, 1.0, 1e15, 2.5, 4.0, 1e15)
    assert aggregate("krum", models, malicious=0.2) == 2.5
    centred = models.double() - models.double().mean()
    gram = centred @ centred.T  # seen from the mean, 1e15 / 3 away, all honest models are in one place
    assert gram[0, 0] + gram[1, 1] - 2 * gram[0, 1] != 1.0


# sageflow


def test_sageflow_weights_by_hand():
    """weight / loss^2 = 1 / 0.25, 2 / 1, 4 / 4; the fourth is too unsure of itself, however low its loss."""
    entropies, losses = torch.tensor([0.2, 0.5, 1.0, 1.1]), torch.tensor([0.5, 1.0, 2.0, 0.01])
    weights = sageflow_weights(entropies, losses, torch.tensor([1, 2, 4, 9]), threshold=1.0, sharpness=2.0)
    assert weights.dtype == torch.float32
    close(weights, [4 / 7, 2 / 7, 1 / 7, 0.0])
    unfiltered = sageflow_weights(entropies, losses, torch.tensor([1, 2, 4, 9]), threshold=2.0, sharpness=2.0)
    assert unfiltered[3] > 0.99


def test_with_sharpness_zero_sageflow_weighs_by_examples():
    weights = sageflow_weights(torch.zeros(3), torch.tensor([0.1, 5.0, 0.0]), torch.tensor([1, 2, 1]), 1.0, 0.0)
    close(weights, [0.25, 0.5, 0.25])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_entropy_or_a_loss_that_is_not_finite_is_filtered(bad):
    ones = torch.ones(3)
    close(sageflow_weights(torch.tensor([bad, 0.5, 0.5]), ones, ones, 1.0, 2.0), [0.0, 0.5, 0.5])
    close(sageflow_weights(torch.full((3,), 0.5), torch.tensor([bad, 1.0, 1.0]), ones, 1.0, 2.0), [0.0, 0.5, 0.5])


def test_if_all_models_are_filtered_all_weights_are_zero():
    ones = torch.ones(2)
    assert sageflow_weights(torch.tensor([2.0, NAN]), ones, ones, 1.0, 2.0).tolist() == [0.0, 0.0]
    assert sageflow_weights(ones, ones, torch.zeros(2), 1.0, 2.0).tolist() == [0.0, 0.0]
    assert sageflow_weights(ones, ones, ones, 1.0, 2.0).tolist() == [0.5, 0.5]


def test_tiny_losses_do_not_overflow():
    losses = torch.tensor([1e-30, 2e-30, 1.0])
    assert (losses**-20.0)[0] == INF  # the formula as printed gives inf / inf
    weights = sageflow_weights(torch.zeros(3), losses, torch.ones(3), 1.0, 2.0)
    close(weights, [0.8, 0.2, 0.0])
    assert sageflow_weights(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.ones(2), 1.0, 50.0).tolist() == [1.0, 0.0]
    assert sageflow_weights(torch.zeros(2), torch.zeros(2), torch.ones(2), 1.0, 50.0).tolist() == [0.5, 0.5]


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1e4), st.integers(1, 99)), min_size=1, max_size=8),
    st.floats(0, 20),
)
def test_sageflow_weights_sum_to_one_or_are_all_zero(models, sharpness):
    entropies, losses, weight = (torch.tensor(values) for values in zip(*models))
    weights = sageflow_weights(entropies, losses, weight, 1.5, sharpness)
    assert bool((weights[entropies > 1.5] == 0).all())
    assert float(weights.sum()) == pytest.approx(1.0 if (entropies <= 1.5).any() else 0.0)
