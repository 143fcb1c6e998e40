"""What the tables at the end say, and that they say it on a narrow terminal too."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from coterie import tables


def row(method: str, attack: str | None = None, **figures: float) -> dict[str, Any]:
    """A row of a comparison of three seeds, as `Comparison.rows` makes it; all deviations are 0.0123."""
    names = ("accuracy", "loss", "selection_rate", "adjusted_rand", "seconds", "source_accuracy", "success_rate",
             "selected_malicious", "weight_malicious", "improved", "within", "between")  # fmt: skip
    found: dict[str, Any] = {"method": method, "attack": attack, "seeds": 3}
    for name in names:
        found |= {name: figures.get(name), f"{name}_std": 0.0123 if name in figures else None}
    return found


def shown(found: Sequence[Table], width: int) -> str:
    screen = Console(file=io.StringIO(), width=width)
    for table in found:
        screen.print(table)
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


ATTACKED = [
    row("oracle-min", "label-flip", accuracy=0.679, source_accuracy=0.5718, success_rate=0.3282),
    row("fedcb2o", "label-flip", accuracy=0.6829, source_accuracy=0.54, success_rate=0.3711, weight_malicious=0.0483),
]


def test_a_row_holds_percentages_with_their_deviation_and_what_is_unknown_is_a_dash() -> None:
    lines = [line.split("│")[1:-1] for line in shown(tables.of_comparison(ATTACKED), 200).splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["oracle-min", "3", "67.90 ± 1.23", "57.18 ± 1.23", "32.82 ± 1.23", "–"],
        ["fedcb2o", "3", "68.29 ± 1.23", "54.00 ± 1.23", "37.11 ± 1.23", "4.83 ± 1.23"],
    ]


def test_without_attackers_nothing_is_said_of_them() -> None:
    quiet = shown(tables.of_comparison([row("local", accuracy=0.8, loss=0.5, seconds=2.0)]), 200)
    assert "success" not in quiet
    assert "80.00 ± 1.23" in quiet
    assert "success" in shown(tables.of_comparison(ATTACKED), 200)


def test_who_is_better_than_alone_and_how_weights_lie_is_said_where_it_is_known() -> None:
    cobo = row("cobo", accuracy=0.8, improved=0.75, within=0.95, between=0.16)
    lines = shown(tables.of_comparison([row("local", accuracy=0.7), cobo]), 200)
    assert "improved %" in lines
    assert "75.00 ± 1.23" in lines
    assert "seconds" not in lines
    _, weights = tables.of_comparison([row("local", accuracy=0.7), cobo])
    assert [[str(cell) for cell in column.cells] for column in weights.columns] == [
        ["cobo"], ["0.95 ± 0.01"], ["0.16 ± 0.01"],
    ]  # fmt: skip
    alone = tables.of_comparison([row("local", accuracy=0.7)])
    assert len(alone) == 1
    assert "improved" not in shown(alone, 200)
    assert "seconds" in shown(alone, 200)


@pytest.mark.parametrize("rows", [ATTACKED, [row("fedcbo, our defaults", accuracy=0.9, loss=1.0, selection_rate=0.9,
                                                 adjusted_rand=1.0, seconds=12.0, improved=1.0, within=1.0,
                                                 between=0.1)]])  # fmt: skip
def test_eighty_columns_cut_no_word_off(rows: list[dict[str, Any]]) -> None:
    narrow, wide = (shown(tables.of_comparison(rows), width) for width in (80, 200))
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    words = {word for word in wide.replace("│", " ").replace("┃", " ").split() if word[0].isalnum()}
    assert words <= set(narrow.replace("│", " ").replace("┃", " ").split())


def test_several_attacks_make_a_matrix_of_accuracy_and_one_of_success_where_there_is_an_aim() -> None:
    both = [*ATTACKED, row("oracle-min", "silent", accuracy=0.7), row("fedcb2o", "silent", accuracy=0.71)]
    accuracy, success = tables.of_comparison(both)
    assert [str(cell) for cell in accuracy.columns[0].cells] == ["label-flip", "silent"]
    assert [str(cell) for cell in accuracy.columns[2].cells] == ["68.3 ± 1.2", "71.0 ± 1.2"]
    assert [str(cell) for cell in success.columns[0].cells] == ["label-flip"]


def test_methods_that_meet_no_attack_stand_in_a_row_of_their_own() -> None:
    accuracy, _ = tables.of_comparison([*ATTACKED, row("local", accuracy=0.7)])
    assert [str(cell) for cell in accuracy.columns[0].cells] == ["label-flip", "–"]
    assert [str(cell) for cell in accuracy.columns[3].cells] == ["–", "70.0 ± 1.2"]


def test_a_pipe_gets_tables_in_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert tables.console().width == 200
    monkeypatch.setenv("COLUMNS", "90")
    assert tables.console().width == 90
