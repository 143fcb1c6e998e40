"""The steps by hand, what each option does, and that runs do not depend on each other."""

import math

import pytest
import torch

from coterie.particles import Attackers, ClusteredSystem, drifting, fixed, mimicking, scattered
from coterie.particles.draws import Draws
from coterie.particles.examples import clusters, from_normal, reached, ring, upper, valley
from coterie.particles.measured import decay
from coterie.particles.objectives import rastrigin, sphere
from coterie.particles.theory import Setting

START = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])  # sphere: 1, 4, 2
SOMEWHERE = ((-3.0, -3.0), (3.0, 3.0))


def stepped(**options):
    return ClusteredSystem([sphere], START, **{"alpha": math.log(2.0), "noise": 0.0, "dt": 0.1, **options}).run(1)


def normals(purpose, seed=0, size=6):
    return Draws(seed, purpose, [0], size).normal(torch.empty(1, size // 2, 2), slice(None), 0)


def test_a_step_without_noise_by_hand():
    """Weights 1/2, 1/16, 1/4, that is 8, 1 and 4 of 13: the consensus is (6, 12) / 13."""
    system = stepped(drift=2.0)
    consensus = torch.tensor([6.0, 12.0]) / 13
    torch.testing.assert_close(system.consensus[0, 0], consensus)
    torch.testing.assert_close(system.x[0], START - 0.2 * (START - consensus))
    assert system.asked == 6  # three particles, and three points to see how the function is called


def test_noise_by_hand():
    away = START - torch.tensor([6.0, 12.0]) / 13
    drawn = normals("consensus")[0]
    scale = 0.7 * math.sqrt(0.1)
    isotropic, anisotropic = stepped(noise=0.7), stepped(noise=0.7, diffusion="anisotropic")
    calm = START - 0.1 * away
    torch.testing.assert_close(isotropic.x[0], calm + scale * away.norm(dim=1, keepdim=True) * drawn)
    torch.testing.assert_close(anisotropic.x[0], calm + scale * away * drawn)
    assert not torch.allclose(isotropic.x, anisotropic.x)


def test_covariance_noise_by_hand():
    weights, mean = torch.tensor([8.0, 1.0, 4.0]) / 13, torch.tensor([6.0, 12.0]) / 13
    away = START - mean
    covariance = (weights[:, None] * away).T @ away
    shaken = (stepped(noise=0.7, diffusion="covariance").x[0] - (START - 0.1 * away)) / (0.7 * math.sqrt(0.1))
    root = torch.linalg.lstsq(normals("consensus")[0], shaken).solution
    torch.testing.assert_close(root @ root, covariance, atol=1e-4, rtol=1e-4)


def test_gradient_terms_by_hand():
    """Without the pull of the consensus it is gradient descent; the gradient of the sphere is 2 x."""
    system = stepped(drift=0.0, gradient_drift=0.5)
    torch.testing.assert_close(system.x[0], START - 0.1 * 0.5 * 2 * START)
    shaken = stepped(drift=0.0, gradient_drift=0.5, gradient_noise=0.3)
    noise = 0.3 * math.sqrt(0.1) * (2 * START).norm(dim=1, keepdim=True) * normals("gradient")[0]
    torch.testing.assert_close(shaken.x[0], 0.9 * START + noise)
    by_hand = ClusteredSystem(
        [lambda x: (x**2).sum(-1)], START, gradients=[lambda x: 2 * x], takes="numpy", noise=0.0, dt=0.1,
        drift=0.0, gradient_drift=0.5,
    ).run(1)  # fmt: skip
    torch.testing.assert_close(by_hand.x, system.x)


def test_memory_draws_particles_back_to_their_best_and_makes_these_the_consensus():
    system = ClusteredSystem([sphere], START, alpha=1e6, noise=0.0, drift=0.0, dt=0.1, memory_drift=1.0)
    system.run(1)
    assert torch.equal(system.x[0], START)  # everyone is where its best is
    system.x += 3.0  # all are worse now
    system.run(1)
    torch.testing.assert_close(system.x[0], START + 3.0 - 0.1 * 3.0)
    assert torch.equal(system.consensus[0, 0], START[0])  # the best point is remembered, though nobody is there
    forgetful = ClusteredSystem([sphere], START, alpha=1e6, noise=0.0, drift=0.0, dt=0.1)
    forgetful.x += 3.0
    assert torch.equal(forgetful.run(1).consensus[0, 0], START[0] + 3.0)


def test_in_an_epoch_nobody_is_asked_twice_and_only_the_batch_moves_if_updates_are_partial():
    system = ClusteredSystem([sphere], SOMEWHERE, sizes=[10], batch=3, partial=True, runs=2, alpha=1.0)
    seen = []
    for _ in range(3):
        asked, before = system.points().clone(), system.x.clone()
        system.run(1)
        moved = (system.x != before).any(-1)  # [R, N]
        assert moved.sum(1).tolist() == [3, 3]
        assert torch.equal(before[0][moved[0]].sort(0).values, asked[0].sort(0).values)
        seen.append(moved)
    assert int(torch.stack(seen).sum(0).max()) == 1
    whole = ClusteredSystem([sphere], SOMEWHERE, sizes=[10], batch=3, alpha=1.0)
    before = whole.x.clone()
    assert bool((whole.run(1).x != before).any(-1).all())
    assert whole.asked == 3 + 3


def test_sampling_by_covariance_noise_has_the_law_of_the_target():
    """exp(-x^2 / (2 s^2)) with s = 0.5: its variance .25 within 15 %, of which 2 % are from the step and 6 % chance
    (three standard deviations for 5,000 independent particles); with the optimising noise it vanishes."""
    wide = {"drift": 1.0, "alpha": 1.0, "dt": 0.02, "diffusion": "covariance"}

    def variance(noise):
        system = ClusteredSystem(
            [lambda x: 2 * x.square().sum(-1)], ((-2.0,), (2.0,)), sizes=[5000], noise=noise, **wide
        )
        return float(system.run(400).x.var())

    assert variance(math.sqrt(2 * (1 + 1.0))) == pytest.approx(0.25, rel=0.15)
    assert variance(math.sqrt(2)) < 0.05


def test_schedules_are_asked_for_every_step():
    cooled = ClusteredSystem([sphere], START, noise=lambda step: 0.5 if step < 3 else 0.0, dt=lambda step: 0.1 + step)
    cooled.run(3)
    assert cooled.time == pytest.approx(0.1 + 1.1 + 2.1)
    before, alike = cooled.x.clone(), cooled.run(1)
    torch.testing.assert_close(alike.x, before - 3.1 * (before - alike.consensus[0, :, None]))


def test_bounds_hold_and_without_them_particles_leave():
    inside = ClusteredSystem([sphere], SOMEWHERE, sizes=[50], noise=3.0, dt=0.5, bounds=(-3.0, 3.0)).run(5)
    assert float(inside.x.abs().max()) <= 3.0
    assert float(ClusteredSystem([sphere], SOMEWHERE, sizes=[50], noise=3.0, dt=0.5).run(5).x.abs().max()) > 3.0


@pytest.mark.parametrize("count", [30, 7000])  # several runs in a tile; several tiles in a run
@pytest.mark.parametrize("diffusion", ["isotropic", "anisotropic"])
def test_a_run_does_not_depend_on_those_beside_it(count, diffusion):
    options = {"sizes": [count], "dimension": 20, "noise": 0.4, "diffusion": diffusion, "seed": 5}
    together = ClusteredSystem([rastrigin], (-3.0, 3.0), runs=5, **options).run(6)
    for run in (0, 3):
        alone = ClusteredSystem([rastrigin], (-3.0, 3.0), runs=[run], **options).run(6)
        assert torch.equal(alone.x[0], together.x[run])
        assert torch.equal(alone.consensus[0, 0], together.consensus[0, run])
    again = ClusteredSystem([rastrigin], (-3.0, 3.0), runs=5, **options).run(6)
    assert torch.equal(again.x, together.x)
    other = ClusteredSystem([rastrigin], (-3.0, 3.0), runs=5, **(options | {"seed": 6})).run(6)
    assert not torch.equal(other.x, together.x)
    assert not torch.equal(together.x[0], together.x[3])


def test_going_on_with_some_runs_changes_nothing_for_them():
    make = {"sizes": [20], "runs": 4, "memory_drift": 0.5, "noise": 0.5}
    whole, fewer = (ClusteredSystem([sphere], SOMEWHERE, **make).run(3) for _ in range(2))
    fewer.keep(torch.tensor([False, True, False, True]))
    assert torch.equal(fewer.run(3).x, whole.run(3).x[[1, 3]])


@pytest.mark.parametrize("alpha", [20.0, 50.0, 200.0])
def test_two_clusters_find_their_minimisers_at_seven_tenths_of_the_rate_at_least(alpha):
    centers = [torch.tensor([1.5, 1.5]), torch.tensor([-1.5, -1.5])]
    system = clusters(centers, 200, alpha, dt=0.02)
    measured = decay(system, centers, 400)
    for k, center in enumerate(centers):
        assert reached(system.positions(k).mean(1), center) == 1.0
    predicted = Setting(2, 1.0, 0.3, 0.1, 0.05, lipschitz=1 + 0.1 / 2 * 4 * math.pi**2).rate
    assert predicted == pytest.approx(1.18, abs=0.005)
    assert float(measured.rate()[0]) >= 0.7 * predicted


def test_with_alpha_1_the_clusters_stay_apart_from_their_minimisers():
    system = clusters([(1.5, 1.5), (-1.5, -1.5)], 200, 1.0, dt=0.02).run(400)
    assert reached(system.positions(0).mean(1), (1.5, 1.5), within=0.5) == 0.0


@pytest.mark.parametrize("count", [3, 5])
def test_more_clusters_find_theirs(count):
    angles = 2 * math.pi * torch.arange(count) / count
    centers = 2.0 * torch.stack([angles.cos(), angles.sin()], dim=1)
    system = clusters(centers, 80, 50.0, dt=0.02).run(400)
    found = torch.stack([system.positions(k).mean(1)[0] for k in range(count)])
    assert reached(found, centers) == 1.0
    assert reached(found, centers.roll(1, 0)) == 0.0  # each its own


def test_clusters_with_two_levels_find_the_good_one_of_their_minimisers():
    """(3.10): two unit circles, of which the points highest up are wanted; with the other end wanted they go there."""
    centers = [torch.tensor([3.0, 0.0]), torch.tensor([-3.0, 0.0])]
    losses = [lambda x, c=center: (x - c.to(x)).norm(dim=-1).sub(1).square() for center in centers]
    for sign in (1.0, -1.0):
        system = ClusteredSystem(
            losses, ((-5.0, -3.0), (5.0, 3.0)), sizes=[150, 150], beta=0.05, alpha=50.0, noise=0.6, dt=0.05,
            gradient_drift=0.1, upper=lambda x, s=sign: -s * x[..., 1],
        ).run(300)  # fmt: skip
        for k, center in enumerate(centers):
            aim = center + torch.tensor([0.0, sign])
            assert reached(system.positions(k).mean(1), aim, within=0.2) == 1.0


def with_attackers(move, delta_q, beta=0.2, share=0.3, **options):
    count = round(share * 200)
    attackers = Attackers(torch.tensor([[-1.0, 0.0]]).repeat(count, 1), move)
    system = ClusteredSystem(
        [ring], ((-2.0, -2.0), (2.0, 2.0)), sizes=[200 - count], upper=upper, beta=beta, delta_q=delta_q,
        **{"alpha": 50.0, "noise": 0.5, "dt": 0.05, "runs": 5, **options}, attackers=attackers,
    )  # fmt: skip
    return system.run(250)


@pytest.mark.parametrize(("beta", "share"), [(0.05, 0.1), (0.2, 0.3), (0.4, 0.5)])
def test_without_delta_q_attackers_at_the_least_loss_win_unless_beta_exceeds_their_share(beta, share):
    assert reached(with_attackers(fixed, 0.0, beta, share).positions().mean(1), (1.0, 0.0)) == 0.0
    assert reached(with_attackers(fixed, 0.0, share + 0.1, share).positions().mean(1), (1.0, 0.0)) == 1.0


@pytest.mark.parametrize(("beta", "share"), [(0.02, 0.1), (0.02, 0.7), (0.2, 0.5), (0.8, 0.7)])
def test_with_delta_q_they_do_not(beta, share):
    assert reached(with_attackers(fixed, 0.01, beta, share).positions().mean(1), (1.0, 0.0)) == 1.0


def test_attackers_who_minimise_the_lower_loss_win_without_delta_q_only():
    """They stay near (-1, 0), which is as good as any by L."""
    won = with_attackers(mimicking(), 0.0)
    assert reached(won.x[:, 140:].mean(1), (-1.0, 0.0)) == 1.0
    assert reached(won.positions().mean(1), (1.0, 0.0)) == 0.0
    assert reached(with_attackers(mimicking(), 0.01).positions().mean(1), (1.0, 0.0)) == 1.0


def test_attackers_move_as_they_are_told():
    stay = with_attackers(fixed, 0.01).x[:, 140:]
    assert torch.equal(stay, torch.tensor([-1.0, 0.0]).expand_as(stay))
    system = with_attackers(drifting(lambda x, time: torch.full_like(x, 2.0)), 0.01)
    torch.testing.assert_close(system.x[:, 140:], stay + 2.0 * 0.05 * 250, rtol=1e-4, atol=1e-4)
    random = with_attackers(scattered(-2.0, -1.0), 0.01)
    thrown = random.x[:, 140:]
    assert -2 <= float(thrown.min()) < float(thrown.max()) <= -1
    assert float(thrown.std()) == pytest.approx(12**-0.5, rel=0.1)
    last = thrown.clone()
    assert not torch.equal(random.run(1).x[:, 140:], last)


def test_alphas_threshold_grows_with_the_attackers_share():
    """log(w_m / w_b) is -2.2 and 2.2; (2.23) has it over u, so the least alpha that works is higher."""
    success = [
        [
            reached(with_attackers(fixed, 0.01, share=s, alpha=a, runs=10).positions().mean(1), (1.0, 0.0))
            for s in (0.1, 0.9)
        ]
        for a in (2.0, 7.0, 30.0)
    ]
    assert success[0] == [0.0, 0.0]
    assert success[1][0] >= 0.7
    assert success[1][1] <= 0.3
    assert success[2] == [1.0, 1.0]


def test_float64_goes_on_where_float32_has_ended():
    """The same draws, so the same path at first; then distances that float32 cannot tell from 0 around (1, 1)."""
    make = {"sizes": [200], "noise": 0.3, "dt": 0.05}
    double, single = (
        ClusteredSystem([valley((1.0, 1.0))], from_normal, dtype=t, **make) for t in (torch.float64, None)
    )
    torch.testing.assert_close(double.run(3).x.float(), single.run(3).x, atol=1e-4, rtol=1e-4)
    assert 0 < float(double.run(900).spread()) < 1e-20
    assert float(single.run(900).spread()) == 0 or float(single.spread()) > 1e-16
