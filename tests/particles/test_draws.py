"""Every number is a function of (seed, purpose, run, step, place)."""

import math

import torch

from coterie.particles.draws import TILE, Draws

EVERY = slice(None)


def drawn(runs, shape, step, seed=3, purpose="noise", first=0):
    per_step = math.prod(shape)
    return Draws(seed, purpose, runs, per_step).normal(torch.empty(len(runs), *shape), EVERY, step, first)


def test_a_run_draws_the_same_whoever_is_beside_it():
    for shape in ((1, 3), (7, 3), (333, 7), (100, 20)):  # odd sizes too: vectorised loops have tails
        together = drawn(range(9), shape, step=4)
        for run in range(9):
            assert torch.equal(drawn([run], shape, step=4)[0], together[run])
        assert not torch.equal(together[0], together[1])


def test_another_seed_purpose_or_step_gives_other_numbers():
    reference = drawn([0], (50, 2), step=1)
    for other in (drawn([0], (50, 2), 1, seed=4), drawn([0], (50, 2), 1, purpose="start"), drawn([0], (50, 2), 2)):
        assert (other == reference).float().mean() < 0.01


def test_steps_drawn_ahead_are_those_drawn_one_by_one():
    draws = Draws(0, "noise", range(3), 40)
    ahead = draws.ahead(torch.empty(5, 3, 20, 2), step=6)
    for i in range(5):
        assert torch.equal(ahead[i], draws.normal(torch.empty(3, 20, 2), EVERY, 6 + i))
    assert not torch.equal(ahead[0], ahead[1])


def test_normals_are_normal():
    """Kolmogorov and Smirnov's distance and four moments; each alarm has a chance below 1e-4 for a seed at random."""
    count = TILE + 100_001  # more than a tile
    for values in (drawn([0], (count,), 0)[0], drawn(range(200), (2001,), 0).flatten()):
        ordered, size = values.double().sort().values, values.numel()
        place = torch.arange(1, size + 1, dtype=torch.float64) / size
        assert float((torch.special.ndtr(ordered) - place).abs().max()) * math.sqrt(size) < 2.3
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            error = float((values.double() ** power).mean()) - moment
            assert abs(error) < 4 * math.sqrt(variance / size), power
        neighbours = float((values[1:] * values[:-1]).double().mean()) * math.sqrt(size)
        assert abs(neighbours) < 4


def test_the_same_check_would_see_normals_that_are_a_little_too_wide():
    values = 1.01 * drawn([0], (TILE + 100_001,), 0)[0].double()
    assert abs(float((values**2).mean()) - 1) > 4 * math.sqrt(2 / values.numel())


def test_uniforms_fill_the_unit_interval_and_do_not_depend_on_the_batch():
    together = Draws(1, "start", range(4), 200_001).uniform(torch.empty(4, 200_001), EVERY, 0)
    alone = Draws(1, "start", [2], 200_001).uniform(torch.empty(1, 200_001), EVERY, 0)
    assert torch.equal(alone[0], together[2])
    assert not torch.equal(alone[0], together[1])
    assert float(together.min()) >= 0
    assert float(together.max()) < 1
    counts = torch.histc(together, bins=50, min=0, max=1)
    expected = together.numel() / 50
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 18 < chi_squared < 100  # 49 degrees of freedom: below or above it with a chance of less than 1e-4


def test_float64_ensembles_get_the_same_normals():
    draws = Draws(0, "noise", [5], 60)
    double = draws.normal(torch.empty(1, 30, 2, dtype=torch.float64), EVERY, 3)
    assert torch.equal(double, draws.normal(torch.empty(1, 30, 2), EVERY, 3).double())


def test_other_devices_draw_by_a_seed_of_run_step_and_place():
    draws = Draws(0, "noise", range(4), 60)
    together = draws.by_torch(torch.empty(4, 30, 2), EVERY, 3, 0)
    assert torch.equal(draws.by_torch(torch.empty(1, 30, 2), slice(2, 3), 3, 0)[0], together[2])
    assert not torch.equal(draws.by_torch(torch.empty(1, 30, 2), slice(2, 3), 4, 0)[0], together[2])


def test_no_normal_is_infinite():
    assert torch.isfinite(drawn(range(20), (100_000,), 0)).all()
