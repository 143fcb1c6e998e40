"""Scenarios: who holds what, seen how, tested on what."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import IDX_NAMES, idx_bytes, write
from pydantic import ValidationError
from torch import Tensor

from coterie.data.scenarios import DEALT, rotate
from coterie.data.sources import load
from coterie.errors import ConfigError
from coterie.federation import Federation


def build(scenario: str, seed: int = 0, **options: Any) -> Federation:
    return DEALT[scenario](name=scenario, **options).build(seed)


@pytest.fixture
def numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MNIST of 120 + 40 images in which pixel (0, 0) is the number of the image and its class is number % 10."""
    train_x, train_y, test_x, test_y = IDX_NAMES
    for x, y, count in ((train_x, train_y, 120), (test_x, test_y, 40)):
        images = np.zeros((count, 3, 3), np.uint8)
        images[:, 0, 0] = np.arange(count)
        write(tmp_path / "mnist" / x, idx_bytes(images))
        write(tmp_path / "mnist" / y, idx_bytes(np.arange(count) % 10))
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))


def numbers(x: Tensor) -> list[int]:
    """The numbers of images, however they are rotated by quarters."""
    return (x.flatten(1).sum(1) * 255).round().int().tolist()


def held(federation: Federation) -> list[list[int]]:
    """The numbers of the training images of each client."""
    return [numbers(x[:count]) for x, count in zip(federation.train.x, federation.train.count.tolist(), strict=True)]


@pytest.mark.parametrize("scenario", DEALT)
def test_every_scenario_builds_from_its_defaults_alike_for_the_same_seed(scenario: str) -> None:
    first, again, other = build(scenario), build(scenario), build(scenario, seed=1)
    assert first.num_clients == 40
    assert first.name == scenario
    assert "digits" in first.source
    assert first.keys.tolist() == list(range(40))
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.tests[-1][0], again.tests[-1][0])
    assert first.train.x.shape != other.train.x.shape or not torch.equal(first.train.x, other.train.x)


@pytest.mark.parametrize("scenario", DEALT)
def test_validation_is_taken_from_each_clients_own_examples(scenario: str) -> None:
    whole, split = build(scenario), build(scenario, validation=0.2)
    assert whole.validation is None
    assert split.validation is not None
    assert torch.equal(split.train.count + split.validation.count, whole.train.count)
    for client in (0, 39):
        parts = torch.cat([part.x[client, : part.count[client]] for part in (split.train, split.validation)])
        mine = whole.train.x[client, : whole.train.count[client]]
        assert sorted(parts.flatten(1).tolist()) == sorted(mine.flatten(1).tolist())


@pytest.mark.usefixtures("numbered")
@pytest.mark.parametrize("scenario", ["rotated", "permuted"])
def test_every_cluster_deals_all_images_in_an_order_of_its_own(scenario: str) -> None:
    federation = build(scenario, data="mnist", clients=12, clusters=4, examples_per_client=40)
    of_clients = held(federation)
    assert federation.clusters is not None
    assert federation.clusters.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for cluster in range(4):
        assert sorted(chain(*of_clients[3 * cluster : 3 * cluster + 3])) == list(range(120))
    assert of_clients[0] != of_clients[3]


@pytest.mark.usefixtures("numbered")
@pytest.mark.parametrize("scenario", ["disjoint-classes", "dirichlet", "quantity-skew", "iid"])
def test_no_image_is_held_twice(scenario: str) -> None:
    together = list(chain(*held(build(scenario, data="mnist", clients=4, examples_per_client=24))))
    assert len(together) == len(set(together)) == 96


@pytest.mark.usefixtures("numbered")
def test_clients_spread_over_clusters_as_evenly_as_possible() -> None:
    clusters = build("rotated", data="mnist", clients=10, clusters=4, examples_per_client=10).clusters
    assert clusters is not None
    assert clusters.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.usefixtures("numbered")
def test_clients_of_a_cluster_share_one_full_test_set_seen_as_theirs() -> None:
    federation = build("rotated", data="mnist", clients=8, clusters=4, examples_per_client=10)
    assert len(federation.tests) == 4
    assert federation.test_of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for x, y in federation.tests:
        assert numbers(x) == list(range(40))
        assert y.tolist() == [number % 10 for number in range(40)]
    corners = [(0, 0), (2, 0), (2, 2), (0, 2)]  # counter-clockwise from the upper left
    for (row, column), (x, _) in zip(corners, federation.tests, strict=True):
        assert (x[:, 0, row, column] * 255).round().tolist() == list(range(40))
    for client, count in enumerate(federation.train.count.tolist()):
        row, column = corners[client // 2]
        pixels = federation.train.x[client, :count, 0, row, column] * 255
        assert [int(pixel) % 10 for pixel in pixels.round()] == federation.train.y[client, :count].tolist()


def test_a_quarter_turn_is_counter_clockwise_by_hand() -> None:
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert rotate(image, 90)[0, 0].tolist() == [[2, 4], [1, 3]]
    assert rotate(image, 180)[0, 0].tolist() == [[4, 3], [2, 1]]
    assert rotate(image, -90)[0, 0].tolist() == rotate(image, 270)[0, 0].tolist() == [[3, 1], [4, 2]]


def test_a_full_turn_changes_nothing_and_a_part_of_one_does() -> None:
    images = load("digits").test_x[:5]
    assert torch.equal(rotate(images, 0), images)
    assert torch.equal(rotate(images, 360), images)
    assert torch.equal(rotate(images, 720), images)
    assert not torch.equal(rotate(images, 350), images)


def test_other_angles_interpolate_and_meet_the_exact_ones() -> None:
    images = load("digits").test_x[:5]
    for angle in (90, 180, 270):
        near = rotate(images, angle + 1e-4)
        assert (near - rotate(images, angle)).abs().max() < 1e-4  # 1e-4 degrees move a pixel by 1e-5
        assert (near - images).abs().max() > 0.5


def test_a_ramp_to_the_right_turned_by_30_degrees_rises_in_that_direction() -> None:
    right = torch.arange(9.0) - 4
    up = -right[:, None]
    turned = rotate(right.expand(1, 1, 9, 9), 30)[0, 0]
    expected = right * np.cos(np.pi / 6) + up * np.sin(np.pi / 6)
    inside = right**2 + up**2 <= 9  # nothing from outside comes in here
    assert (turned - expected)[inside].abs().max() < 1e-5
    assert (turned - (right * np.cos(np.pi / 6) - up * np.sin(np.pi / 6)))[inside].abs().max() > 1


def test_the_corner_of_an_image_turned_by_45_degrees_is_empty_and_its_middle_is_kept() -> None:
    turned = rotate(torch.ones(1, 1, 9, 9), 45)[0, 0]
    assert turned[0, 0] == 0
    assert turned[4, 4] == pytest.approx(1.0)


def test_own_angles_are_taken() -> None:
    federation = build("rotated", clusters=2, clients=4, angles=[0, 30])
    images = load("digits").test_x
    assert torch.equal(federation.tests[0][0], images)
    assert torch.equal(federation.tests[1][0], rotate(images, 30))


@pytest.mark.usefixtures("numbered")
def test_a_shift_renames_label_by_label() -> None:
    federation = build("permuted", data="mnist", shift=3, clients=4, examples_per_client=20)
    for cluster, (x, y) in enumerate(federation.tests):
        assert y.tolist() == [(number + 3 * cluster) % 10 for number in numbers(x)]
    for cluster, mine in enumerate(held(federation)):
        assert federation.train.y[cluster].tolist() == [(number + 3 * cluster) % 10 for number in mine]


@pytest.mark.usefixtures("numbered")
def test_a_permutation_renames_each_class_to_another_and_leaves_cluster_0() -> None:
    federation = build("permuted", data="mnist", clients=4, examples_per_client=20)
    names = [y[:10].tolist() for _, y in federation.tests]
    assert names[0] == list(range(10))
    assert all(sorted(of_cluster) == list(range(10)) for of_cluster in names)
    assert len({tuple(of_cluster) for of_cluster in names}) == 4
    for cluster, mine in enumerate(held(federation)):
        assert federation.train.y[cluster].tolist() == [names[cluster][number % 10] for number in mine]


@pytest.mark.usefixtures("numbered")
def test_clusters_of_disjoint_classes_split_the_classes_and_may_number_them_anew() -> None:
    plain = build("disjoint-classes", data="mnist", clients=4, examples_per_client=20)
    anew = build("disjoint-classes", data="mnist", clients=4, examples_per_client=20, relabel=True)
    classes = [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]
    assert [set(y.tolist()) for _, y in plain.tests] == [set(y.tolist()) for y in plain.train.y] == classes
    assert [set(y.tolist()) for _, y in anew.tests] == [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}]
    assert (plain.num_classes, anew.num_classes) == (10, 3)
    assert sum(len(y) for _, y in plain.tests) == 40


def test_a_dirichlet_client_is_tested_in_the_proportions_it_trains_in() -> None:
    federation = build("dirichlet", beta=0.3)
    assert federation.clusters is None
    for client in range(federation.num_clients):
        own = torch.bincount(federation.train.y[client], minlength=10) / 25
        labels = federation.tests[int(federation.test_of[client])][1]
        tested = torch.bincount(labels, minlength=10) / len(labels)
        assert (own - tested).abs().max() <= 1 / len(labels) + 1e-6
    assert max(len(y) for _, y in build("dirichlet", test_examples=7).tests) == 7


def test_quantity_skew_keeps_the_sum_and_the_bounds() -> None:
    for kind in ("log-normal", "power-law"):
        count = build("quantity-skew", kind=kind, largest=3.0).train.count
        assert int(count.sum()) == 40 * 25
        assert int(count.min()) >= 2
        assert int(count.max()) <= 75
        assert len(set(count.tolist())) > 5


def test_scenarios_of_one_distribution_have_one_cluster_and_one_test_set() -> None:
    for scenario in ("iid", "quantity-skew"):
        federation = build(scenario)
        assert len(federation.tests) == 1
        assert federation.clusters is not None
        assert set(federation.clusters.tolist()) == {0}


@pytest.mark.parametrize(
    ("scenario", "options", "message"),
    [
        (
            "rotated",
            {"examples_per_client": 144},
            r"scenario.examples_per_client: got 144; allowed: 1 to 143 \(10 clients",
        ),
        ("rotated", {"clients": 8000}, r"scenario.clients: got 8000; allowed: at most 1438 clients"),
        ("rotated", {"clients": 3}, r"scenario.clients: got 3; allowed: 4 or more, one for each of scenario.clusters"),
        ("rotated", {"angles": (0, 90)}, r"scenario.angles: got \[0.0, 90.0\]; allowed: 4 angles"),
        ("rotated", {"angles": (0, 90, 180, float("nan"))}, r"scenario.angles: .* finite"),
        ("permuted", {"clusters": 3, "shift": 5}, r"scenario.shift: got 5; allowed: a step"),
        ("disjoint-classes", {"clusters": 11}, r"scenario.clusters: got 11; allowed: 1 to 10, the classes of digits"),
        ("disjoint-classes", {"examples_per_client": 50}, r"scenario.examples_per_client: got 50; .* in cluster 0"),
        ("dirichlet", {"examples_per_client": 36}, r"scenario.examples_per_client: got 36; allowed: 1 to 35"),
        ("quantity-skew", {"examples_per_client": 36}, r"scenario.examples_per_client: got 36"),
        ("iid", {"examples_per_client": 36}, r"scenario.examples_per_client: got 36"),
        (
            "iid",
            {"examples_per_client": 1, "validation": 0.1},
            r"scenario.examples_per_client: got 1; allowed: 2 or more",
        ),
    ],
)
def test_impossible_sizes_are_refused_by_key(scenario: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(scenario, **options)


@pytest.mark.parametrize(
    "options", [{"validation": 1.0}, {"validation": -0.1}, {"clients": 0}, {"clusters": 0}, {"data": "x"}, {"angle": 1}]
)
def test_values_out_of_range_and_unknown_keys_are_refused_when_set(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        DEALT["rotated"](name="rotated", **options)


def test_every_option_is_described() -> None:
    for name, scenario in DEALT.items():
        assert scenario.__doc__
        assert scenario.model_fields["name"].default == name
        assert all(field.description for field in scenario.model_fields.values())
