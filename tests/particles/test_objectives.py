"""Every function of the suite at its optimum."""

import pytest
import torch

from coterie.particles.objectives import SUITE, rastrigin

NAMES = list(SUITE)


def at_optimum(name, dimension):
    known = SUITE[name]
    least = known.value * (dimension if len(known.coordinates) == 1 else 1)
    return known, known.minimiser(dimension), least


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_at_the_minimiser(name):
    for dimension in (SUITE[name].dimension,) if SUITE[name].dimension else (2, 3, 10):
        known, point, least = at_optimum(name, dimension)
        point.requires_grad_(known.smooth)
        value = known.function(point)
        assert float(value.detach()) == pytest.approx(least, abs=1e-9)
        if known.smooth:
            slope = torch.autograd.grad(value, point)[0]
            assert float(slope.abs().max()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_nothing_found_at_random_is_lower_and_a_step_aside_is_higher(name):
    known, point, least = at_optimum(name, SUITE[name].dimension or 3)
    low, high = known.within
    draw = torch.Generator().manual_seed(0)
    anywhere = low + (high - low) * torch.rand(20_000, len(point), generator=draw, dtype=torch.float64)
    near = point + 0.01 * torch.randn(20_000, len(point), generator=draw, dtype=torch.float64)
    for points in (anywhere, near):
        assert float(known.function(points).min()) > least
    assert float(known.function(point + 0.05)) > least + 1e-4
    assert low <= float(point.min()) <= float(point.max()) <= high


def test_ackley_has_a_kink_at_its_minimiser():
    """The gradient beside it does not vanish, which is why its own is not asked for."""
    beside = torch.full((3,), 1e-6, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(SUITE["ackley"].function(beside), beside)[0]
    assert float(slope.norm()) > 2


def test_himmelblau_has_four_minimisers():
    four = torch.tensor([[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]])
    assert float(SUITE["himmelblau"].function(four).max()) < 1e-8
    assert float(SUITE["himmelblau"].function(four + 0.1).min()) > 0.1


def test_many_points_have_the_values_of_few():
    """Large arrays take another way to the cosine."""
    points = torch.empty(3000, 20).uniform_(-5, 5, generator=torch.Generator().manual_seed(1))
    one_by_one = torch.stack([rastrigin(point) for point in points])
    torch.testing.assert_close(rastrigin(points), one_by_one, rtol=1e-5, atol=1e-3)  # float32 sums of 20 terms
    assert not torch.allclose(rastrigin(points + 0.1), one_by_one, rtol=1e-5, atol=1e-3)
