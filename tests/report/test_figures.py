"""The figures show the numbers they are given."""

import numpy as np
import pytest

from coterie.report import figures


def test_a_single_seed_is_a_line_without_a_band() -> None:
    figure = figures.curves_by_round({"local": [{1: 0.5, 3: 0.75}]}, "accuracy")
    (line,) = figure.data
    assert (line.x, line.y, line.name) == ((1, 3), (0.5, 0.75), "local")
    assert figure.layout.yaxis.tickformat == ".0%"
    assert figures.curves_by_round({"local": [{1: 2.5}]}, "loss", percent=False).layout.yaxis.tickformat is None


def test_several_seeds_are_their_mean_with_a_band_of_one_standard_deviation() -> None:
    band, line = figures.curves_by_round({"ifca": [{1: 0.2, 2: 0.5}, {1: 0.4, 2: 0.5}]}, "accuracy").data
    assert line.y == pytest.approx((0.3, 0.5))
    spread = 0.02**0.5  # of 0.2 and 0.4: sqrt((0.1^2 + 0.1^2) / (2 - 1))
    assert band.x == (1, 2, 2, 1)
    assert band.y == pytest.approx((0.3 + spread, 0.5, 0.5, 0.3 - spread))


def test_a_round_that_one_seed_has_not_reached_is_the_mean_of_the_others() -> None:
    assert figures.mean_curve([{1: 0.2, 2: 0.6}, {1: 0.4}])[2] == (0.6, 0.0)


def test_lines_differ_in_more_than_colour() -> None:
    figure = figures.curves_by_round({str(i): [{1: 0.5}] for i in range(12)}, "accuracy")
    assert len({(line.line.color, line.marker.symbol) for line in figure.data}) == 12


def test_a_label_keeps_its_colour_where_others_have_no_curve() -> None:
    all_three = figures.curves_by_round({"local": [{1: 0.5}], "ifca": [{1: 0.5}], "fedcbo": [{1: 0.5}]}, "accuracy")
    (one,) = figures.curves_by_round({"local": [], "ifca": [], "fedcbo": [{1: 0.5}]}, "success").data
    (first,) = figures.curves_by_round({"fedcbo": [{1: 0.5}]}, "success").data
    assert (one.name, one.line.color) == ("fedcbo", all_three.data[2].line.color)
    assert first.line.color != one.line.color


def test_the_oracle_is_drawn_once_where_all_methods_share_it() -> None:
    curves = {"fedcbo": [{1: 0.2}], "other": [{1: 0.3}]}
    shared = figures.selection_by_round(curves, {"fedcbo": [{1: 0.75}], "other": [{1: 0.75}]})
    assert [line.name for line in shared.data] == ["fedcbo", "other", "an oracle's expectation"]
    assert shared.data[2].y == (0.75,)
    two = figures.selection_by_round(curves, {"fedcbo": [{1: 0.75}], "other": [{1: 0.5}]})
    assert [line.name for line in two.data][2:] == [
        "an oracle's expectation (fedcbo)",
        "an oracle's expectation (other)",
    ]


def test_each_client_is_a_point_of_its_group() -> None:
    figure = figures.accuracy_by_client({"cluster 0": [0.5, 0.6], "cluster 1": [0.9]})
    assert [(box.name, box.y, box.boxpoints) for box in figure.data] == [
        ("cluster 0", (0.5, 0.6), "all"),
        ("cluster 1", (0.9,), "all"),
    ]
    assert figures.accuracy_by_client({"many": [0.5] * 5001}).data[0].boxpoints == "outliers"


def test_the_matrix_is_ordered_by_cluster_with_lines_between_clusters() -> None:
    links = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]], dtype=np.float32)
    figure = figures.links_matrix(links, [1, 0, 1], "by true cluster")
    (heat,) = figure.data
    assert heat.x == ("client 1", "client 0", "client 2")
    assert np.array_equal(heat.z, [[4, 3, 5], [1, 0, 2], [7, 6, 8]])
    assert sorted((line.x0, line.y0) for line in figure.layout.shapes) == [(0, 0.5), (0.5, 0)]
    assert figure.layout.xaxis.ticktext == ("0", "1")
    assert figure.layout.xaxis.tickvals == (0, 1.5)


def test_without_clusters_the_matrix_is_in_the_order_of_numbers() -> None:
    links = np.arange(4, dtype=np.float32).reshape(2, 2)
    figure = figures.links_matrix(links, None, "by number")
    assert np.array_equal(figure.data[0].z, links)
    assert figure.layout.shapes == ()


def test_weights_are_a_matrix_for_each_round_without_the_diagonal_of_which_the_last_is_shown() -> None:
    early = np.array([[0, 0.5, 1], [0.25, 0, 0], [0.75, 0, 0]], dtype=np.float32)
    figure = figures.weights_by_round({10: early, 30: early / 2}, [1, 0, 1], "by true cluster")
    first, last = figure.data
    assert np.array_equal(first.z, [[np.nan, 0.25, 0], [0.5, np.nan, 1], [0, 0.75, np.nan]], equal_nan=True)
    assert np.array_equal(last.z, first.z / 2, equal_nan=True)
    assert (first.name, first.meta, first.visible) == ("10", 0, False)
    assert (last.name, last.meta, last.visible) == ("30", 1, True)
    assert first.zmax == last.zmax == 1  # so that colours mean the same in every round
    assert last.x == last.y == ("client 1", "client 0", "client 2")
    assert sorted((line.x0, line.y0) for line in figure.layout.shapes) == [(0, 0.5), (0.5, 0)]


def test_weights_of_a_client_are_means_over_the_others_of_a_line() -> None:
    weights = np.arange(9, dtype=np.float32).reshape(3, 3)
    figure = figures.weights_of_each_client({10: weights, 30: 10 * weights}, {"a": [0, 2], "b": [1]})
    shown = [(line.meta, line.name, list(line.y), line.visible) for line in figure.data]
    assert shown == [
        (0, "a", [2, 20], True), (0, "b", [1, 10], True), (1, "a", [4, 40], False),
        (2, "a", [6, 60], False), (2, "b", [7, 70], False),
    ]  # fmt: skip
    assert all(list(line.x) == [10, 30] for line in figure.data)
    assert figure.data[0].line.color == figure.data[2].line.color != figure.data[1].line.color


def test_bars_stand_in_groups_and_what_is_not_known_has_none() -> None:
    first, second = figures.grouped_bars({"clusters 2": {"a": 0.5, "b": 0.25}, "clusters 4": {"a": 0.75}}, "share").data
    assert first.x == second.x == ("clusters 2", "clusters 4")
    assert (first.name, first.y) == ("a", (0.5, 0.75))
    assert (second.name, second.y) == ("b", (0.25, None))


def test_a_large_matrix_is_averaged_within_clusters() -> None:
    clusters = np.arange(601) % 2  # 301 clients in cluster 0 and 300 in cluster 1
    links = np.where(clusters[:, None] == clusters, 0.5, 0.25).astype(np.float32)
    links[0, 2] = 9.5  # clients 0 and 2 lie in the first block, of three
    figure = figures.links_matrix(links, clusters.tolist(), "by true cluster")
    (heat,) = figure.data
    assert heat.z.shape == (201, 201)  # blocks of at most ceil(601 / 300) = 3 clients: 101 and 100
    assert heat.x[0] == "clients 0 … 4"
    assert heat.z[0, 0] == pytest.approx((8 * 0.5 + 9.5) / 9)
    assert heat.z[0, 100] == pytest.approx(0.5)
    assert heat.z[0, 101] == pytest.approx(0.25)
    assert {line.x0 for line in figure.layout.shapes} == {0, 100.5}


def test_the_colour_for_good_is_on_the_other_end_where_less_is_better() -> None:
    accuracy, success = (figures.heat_map([[0.2, None]], ["flip"], ["a", "b"], good).data[0] for good in (True, False))
    assert accuracy.colorscale[0][1] == success.colorscale[1][1] != accuracy.colorscale[1][1]
    assert accuracy.colorscale[1][1] == success.colorscale[0][1]
    assert np.array_equal(accuracy.text, [["20.0", ""]])


def test_black_numbers_are_read_on_every_colour_of_a_heat_map() -> None:
    """At least 7 to 1, the contrast that the accessibility guidelines (WCAG 2.2) ask for at their strictest."""
    colours = figures.heat_map([[0.5]], ["flip"], ["a"], True).data[0].colorscale
    for share in np.linspace(0, 1, 11):
        ends = [np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for _, colour in colours]
        assert luminance((1 - share) * ends[0] + share * ends[1]) + 0.05 > 7 * 0.05
    assert luminance(np.array([0.49, 0.49, 0.47])) + 0.05 < 7 * 0.05  # the middle of the scale Cividis


def luminance(colour: np.ndarray) -> float:
    """Relative luminance of an sRGB colour, as the guidelines define it."""
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_names_are_harmless() -> None:
    name = "<a href='javascript:alert(1)'>"
    for figure in (
        figures.curves_by_round({name: [{1: 0.5}]}, "accuracy"),
        figures.selection_by_round({}, {name: [{1: 0.5}], "b": [{1: 0.4}]}),
        figures.accuracy_by_client({name: [0.5]}),
    ):
        assert "<" not in figure.data[0].name
        assert "&lt;a href" in figure.data[0].name
