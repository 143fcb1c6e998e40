"""Small made-up runs to draw: the numbers are simple enough to be known."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.runs.folder import RunFolder

CLUSTERS = [0, 1, 0, 1, 0, 1]
MakeRun = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(method="fedcbo", seed=0, **changes of the summary)`: six clients who learn from their own cluster."""

    def make(method: str = "fedcbo", seed: int = 0, **changes: Any) -> RunFolder:
        scenario = {"name": "rotated", "data": "digits", "clients": 6}
        config = {"seed": seed, "rounds": 3, "scenario": scenario, "method": {"name": method}}
        path = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        with RunFolder.create(path, config, {"python": "3.11", "data_fingerprint": "0123"}) as folder:
            for round in (1, 2, 3):
                folder.append(_record(round, seed))
            folder.write_links((torch.tensor(CLUSTERS)[:, None] == torch.tensor(CLUSTERS)).float() / 3)
            folder.write_summary(_summary(method, seed) | changes)
        return folder

    return make


def _accuracy(round: int, seed: int) -> dict[str, float]:
    mean = 0.5 + 0.1 * round + 0.02 * seed
    return {"mean": mean, "std": 0.05, "min": mean - 0.1, "max": mean + 0.1}


def _record(round: int, seed: int) -> dict[str, Any]:
    selection = {"selection_rate": 0.2 * round, "selection_oracle": 0.75}
    result = {"accuracy": _accuracy(round, seed), "loss": 1 / round}
    return {"round": round, "seconds": 0.5, "clients": 6, "refused": {}, "silent": 0, **selection, **result}


def _summary(method: str, seed: int) -> dict[str, Any]:
    accuracy = _accuracy(3, seed)
    per_client = [accuracy["mean"] + 0.01 * (client - 2.5) for client in range(6)]
    return {
        "method": method,
        "label": method,
        "scenario": "rotated",
        "data": "the digits",
        "seed": seed,
        "rounds": 3,
        "rounds_completed": 3,
        "accuracy": {**accuracy, "per_client": per_client},
        "loss": 0.25,
        "selection_rate": 0.6,
        "clusters": {"adjusted_rand": 0.875, "true": CLUSTERS, "found": CLUSTERS},
        "seconds": 1.5,
        "refused": {},
        "attack": None,
    }


@pytest.fixture
def mixing(make_run: MakeRun) -> Callable[..., RunFolder]:
    """`mixing(matrices, **changes)`: these weights were recorded in rounds 10, 20, ..."""

    def make(matrices: Sequence[Any], **changes: Any) -> RunFolder:
        folder = make_run(changes.pop("method", "cobo"), **changes)
        folder.keep_rounds(0, pytest.fail)
        folder.write_links(torch.ones(len(matrices[0]), len(matrices[0])))  # all equal
        for index, matrix in enumerate(matrices, start=1):
            folder.append(_record(10 * index, 0) | {"weights": {"within": 0.9, "between": 0.2, "matrix": matrix}})
        return folder

    return make


@pytest.fixture
def attacked(make_run: MakeRun) -> Callable[..., RunFolder]:
    """`attacked(method, attack, **changes)`: the last two of the six clients are malicious."""

    def make(method: str, attack: str, **changes: Any) -> RunFolder:
        aims = attack == "label-flip"
        result = {"source_accuracy": 0.75 if aims else None, "success_rate": 0.125 if aims else None}
        shares = {"own_honest": 0.5, "own_malicious": 0.25, "other_honest": 0.125, "other_malicious": 0.125}
        found = {"name": attack, "label": attack, "malicious": [4, 5], "selected": shares, "weight": None}
        found |= {**result, "selected_malicious": 0.375, "weight_malicious": None}
        return make_run(method, attack=found, **changes)

    return make
