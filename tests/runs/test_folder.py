"""A run folder holds what was asked, what happened and what came out."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.errors import ModelError, RunError
from coterie.runs import folder as runs_folder
from coterie.runs.folder import RunFolder, environment

CONFIG = {"seed": 0, "scenario": {"name": "rotated"}, "method": {"name": "fedcbo", "alpha": 10.0}}
ENVIRONMENT = {"python": "3.11", "data_fingerprint": "0123"}


def refuse(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_warning(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with RunFolder.create(tmp_path / "run", CONFIG, ENVIRONMENT) as created:
        yield created


# Creation and the lock


def test_a_run_is_created_with_its_parents_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert not RunFolder.holds_a_run(path)
    RunFolder.create(path, CONFIG, ENVIRONMENT).close()
    assert RunFolder.holds_a_run(path)
    assert RunFolder(path).config == CONFIG
    assert RunFolder(path).environment == ENVIRONMENT
    assert RunFolder(path).summary() is None
    assert RunFolder(path).clients() is None
    assert RunFolder(path).links() is None


def test_a_folder_with_a_run_is_refused(folder: RunFolder) -> None:
    folder.close()
    with pytest.raises(RunError, match=r"already holds a run.*--resume.*--out"):
        RunFolder.create(folder.path, {"seed": 1}, {})
    assert folder.config == CONFIG


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match=r"other files.*--out"):
        RunFolder.create(tmp_path, CONFIG, {})
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="is a file"):
        RunFolder.create(tmp_path / "run", CONFIG, {})


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(RunError, match="No space left"):
            RunFolder.create(tmp_path / "run", CONFIG, {})
    assert os.listdir(tmp_path) == []
    RunFolder.create(tmp_path / "run", CONFIG, {}).close()


def test_a_process_that_was_faster_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = runs_folder._locked

    def beaten(path: Path) -> Any:
        monkeypatch.setattr(runs_folder, "_locked", lock)
        RunFolder.create(path, CONFIG | {"seed": 1}, {}).close()
        return lock(path)

    monkeypatch.setattr(runs_folder, "_locked", beaten)
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", {"seed": 2}, {})
    assert RunFolder(tmp_path / "run").config == CONFIG | {"seed": 1}


def test_a_creation_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    for name in (".lock", "environment.json", "config.json.tmp"):
        (tmp_path / name).write_text("")
    RunFolder.create(tmp_path, CONFIG, {}).close()
    assert RunFolder(tmp_path).config == CONFIG


def test_a_folder_without_a_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        RunFolder.open(tmp_path)
    assert os.listdir(tmp_path) == []


def test_two_processes_cannot_run_in_one_folder_but_any_may_read(folder: RunFolder) -> None:
    with pytest.raises(RunError, match="another process"):
        RunFolder.open(folder.path)
    assert RunFolder(folder.path).config == CONFIG
    folder.close()
    RunFolder.open(folder.path).close()


HOLDER = """
import sys, time
from coterie.runs.folder import RunFolder
folder = RunFolder.open(sys.argv[1])
print("locked", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_does_not_block(folder: RunFolder) -> None:
    folder.close()
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another process"):
            RunFolder.open(folder.path)
        holder.send_signal(signal.SIGKILL)
    RunFolder.open(folder.path).close()


# Records


def test_records_come_back_in_order(folder: RunFolder) -> None:
    for round in (1, 2):
        folder.append({"round": round, "loss": 0.5 / round})
    assert folder.records(no_warning) == [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]


def test_what_is_written_is_strict_json(folder: RunFolder) -> None:
    odd = {"nan": float("nan"), "inf": [float("inf"), (-float("inf"), 1)], "tensor": torch.tensor([1.0, float("nan")])}
    keys: dict[Any, Any] = {7: np.float64(0.5)}
    folder.append({"round": 1, **keys, "path": Path("a"), "line": "a\u2028b\n", "on": True, **odd})
    expected = {"nan": None, "inf": [None, [None, 1]], "tensor": [1.0, None]}
    (record,) = folder.records(no_warning)
    assert record == {"round": 1, "7": 0.5, "path": "a", "line": "a\u2028b\n", "on": True, **expected}
    json.loads((folder.path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)


def test_a_torn_line_is_left_out_with_a_warning(folder: RunFolder) -> None:
    folder.append({"round": 1})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "lo')
    warnings: list[str] = []
    assert folder.records(warnings.append) == [{"round": 1}]
    assert len(warnings) == 1
    assert "line 2" in warnings[0]


def test_a_line_after_a_torn_one_is_whole(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"round": 1}\n{"rou')
    folder.close()
    with RunFolder.open(folder.path) as opened:
        opened.append({"round": 2})
        warnings: list[str] = []
        assert opened.records(warnings.append) == [{"round": 1}, {"round": 2}]
        assert len(warnings) == 1
        opened.keep_rounds(2, no_warning)
        assert opened.records(no_warning) == [{"round": 1}, {"round": 2}]


def test_later_rounds_are_dropped_when_a_run_goes_back(folder: RunFolder) -> None:
    for round in (1, 2, 3):
        folder.append({"round": round})
    folder.keep_rounds(2, no_warning)
    folder.append({"round": 3, "again": True})
    assert folder.records(no_warning) == [{"round": 1}, {"round": 2}, {"round": 3, "again": True}]
    folder.keep_rounds(0, no_warning)
    assert folder.records(no_warning) == []


def test_rounds_whose_lines_are_lost_are_named(folder: RunFolder) -> None:
    lines = ['{"round": 1}', "garbled", '{"x": 1}', '{"round": "4"}', "[5]", '{"round": 6}', '{"round": 7']
    (folder.path / "metrics.jsonl").write_text("\n".join(lines))
    warnings: list[str] = []
    folder.keep_rounds(6, warnings.append)
    assert folder.records(no_warning) == [{"round": 1}, {"round": 6}]
    (folder.path / "metrics.jsonl").unlink()
    folder.keep_rounds(7, warnings.append)
    assert [text.partition("lost")[2] for text in warnings] == [
        " and in no sum or figure: 2, 3, 4, 5.", " and in no sum or figure: 1, 2, 3, 4, 5 and 2 more.",
    ]  # fmt: skip


def test_a_full_disk_is_one_clear_message(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(RunError, match=r"No space left on device.*--resume"):
            folder.append({"round": 1})
        with pytest.raises(RunError, match=r"No space left on device.*--resume"):
            folder.write_links(torch.eye(2))


def test_notes_are_kept(folder: RunFolder) -> None:
    assert folder.notes() == []
    folder.add_note("resumed after round 3")
    folder.add_note("and after round 5")
    assert RunFolder(folder.path).notes() == ["resumed after round 3", "and after round 5"]


# Results


SUMMARY = {
    "label": "fedcbo", "scenario": "rotated", "data": "digits", "rounds_completed": 3, "accuracy": None, "loss": 0.5,
    "selection_rate": None, "clusters": {}, "refused": {}, "attack": None, "seconds": 1.5,
}  # fmt: skip


def test_results_come_back(folder: RunFolder) -> None:
    folder.write_summary(SUMMARY | {"loss": float("nan")})
    folder.write_clients([{"client": 0, "accuracy": 0.5}])
    folder.write_links(torch.eye(3))
    assert folder.summary() == SUMMARY | {"loss": None}
    assert folder.clients() == [{"client": 0, "accuracy": 0.5}]
    links = folder.links()
    assert links is not None
    assert torch.equal(links, torch.eye(3))
    assert not torch.equal(links, torch.zeros(3, 3))


def test_a_damaged_file_is_one_clear_message(folder: RunFolder) -> None:
    (folder.path / "links.safetensors").write_bytes(b"torn")
    with pytest.raises(RunError, match=r"links.safetensors is damaged.*--resume"):
        folder.links()


@pytest.mark.parametrize("content", ["", "{", "[1]", "[]", "{}", '[["scenario", 1]]', "null"])
@pytest.mark.parametrize(
    ("name", "read", "what_to_do"),
    [
        ("config.json", lambda folder: folder.config, "another folder"),
        ("environment.json", lambda folder: folder.environment, "another folder"),
        ("summary.json", lambda folder: folder.summary(), "--resume writes all"),
        ("clients.json", lambda folder: folder.clients(), "--resume writes all"),
    ],
)
def test_a_file_without_what_must_be_in_it_is_one_clear_message(
    folder: RunFolder, name: str, read: Callable[[RunFolder], Any], what_to_do: str, content: str
) -> None:
    (folder.path / name).write_text(content)
    with pytest.raises(RunError, match=rf"{name} is damaged \(.+\).*{what_to_do}"):
        read(folder)


class Network(nn.Module):
    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, 3)
        self.norm = nn.BatchNorm1d(3)


LAYOUT = [("dense.weight", (3, 2)), ("dense.bias", (3,)), ("norm.weight", (3,)), ("norm.bias", (3,))]
LAYOUT += [("norm.running_mean", (3,)), ("norm.running_var", (3,))]


@pytest.fixture
def models(folder: RunFolder) -> RunFolder:
    """Two clients, numbered 5 and 9; the numbers of the first are 0 to 20, those of the second 100 to 120."""
    folder.write_models(torch.stack([torch.arange(21.0), 100 + torch.arange(21.0)]), LAYOUT, [5, 9])
    return folder


def test_a_clients_model_is_loaded_into_a_module(models: RunFolder) -> None:
    module = Network()
    counter = module.norm.num_batches_tracked
    assert isinstance(counter, torch.Tensor)
    counter.fill_(3)
    assert models.load_model(9, module) is module
    expected = {"dense.weight": [[100.0, 101.0], [102.0, 103.0], [104.0, 105.0]], "dense.bias": [106.0, 107.0, 108.0]}
    expected |= {"norm.running_mean": [115.0, 116.0, 117.0], "norm.running_var": [118.0, 119.0, 120.0]}
    state = module.state_dict()
    assert {name: state[name].tolist() for name in expected} == expected
    assert state["norm.num_batches_tracked"] == 3
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert models.load_model(5, module).state_dict()["dense.bias"].tolist() == [6.0, 7.0, 8.0]


def test_the_order_of_the_layout_does_not_matter(folder: RunFolder) -> None:
    folder.write_models(torch.tensor([[1.0, 2.0, 3.0]]), [("bias", (1,)), ("weight", (1, 2))], [0])
    module = folder.load_model(0, nn.Linear(2, 1))
    assert module.state_dict()["bias"].tolist() == [1.0]
    assert module.state_dict()["weight"].tolist() == [[2.0, 3.0]]


def test_a_tensor_of_two_names_is_saved_once(folder: RunFolder) -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    module[1].weight = module[0].weight
    folder.write_models(torch.tensor([[4.0]]), [("0.weight", (1, 1))], [0])
    folder.load_model(0, module)
    assert module.state_dict()["1.weight"].tolist() == [[4.0]]


def test_a_buffer_outside_the_state_dict_is_loaded(folder: RunFolder) -> None:
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("scale", torch.zeros(2), persistent=False)
    folder.write_models(torch.tensor([[4.0, 5.0, 6.0]]), [("weight", (1, 1)), ("scale", (2,))], [0])
    folder.load_model(0, module)
    assert dict(module.named_buffers())["scale"].tolist() == [5.0, 6.0]


def test_a_module_that_does_not_fit_is_named_and_left_as_it_was(models: RunFolder) -> None:
    module = Network(inputs=4)
    before = module.dense.bias.tolist()
    with pytest.raises(ModelError, match=r"dense.weight: saved \(3, 2\), your module \(3, 4\)"):
        models.load_model(5, module)
    assert module.dense.bias.tolist() == before
    with pytest.raises(ModelError, match=r"norm.weight: saved \(3,\), your module nothing"):
        models.load_model(5, nn.ModuleDict({"dense": nn.Linear(2, 3)}))
    module = Network()
    module.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ModelError, match=r"more: saved nothing, your module \(1,\)"):
        models.load_model(5, module)


def test_an_unknown_client_is_refused(models: RunFolder) -> None:
    with pytest.raises(RunError, match="got 7; allowed: one of the 2 from 5 to 9"):
        models.load_model(7, Network())


def test_models_that_were_not_written_yet_are_said_to_be_so(folder: RunFolder) -> None:
    with pytest.raises(RunError, match="when a run ends"):
        folder.load_model(0, Network())


def test_models_that_do_not_fit_their_layout_are_refused(folder: RunFolder) -> None:
    with pytest.raises(ModelError, match=r"got shape \(1, 20\); allowed: \(1, 21\)"):
        folder.write_models(torch.zeros(1, 20), LAYOUT, [0])


# The environment


def test_the_environment_names_versions_but_nobody() -> None:
    found = environment()
    assert found["python"] == platform.python_version()
    assert found["torch"].startswith("2.")
    assert found["threads"] == torch.get_num_threads()
    text = json.dumps(found)
    assert str(Path.home()) not in text
    assert str(Path(__file__).parents[1]) not in text


def test_code_that_is_installed_in_somebody_elses_repository_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "0123abcd", "status": " M folder.py"}
    monkeypatch.setattr(runs_folder, "_git", lambda command, *rest: answers.get(command))
    assert environment()["code"] is None
    answers["ls-files"] = "folder.py"
    assert environment()["code"] == {"commit": "0123abcd", "dirty": True}
    answers["status"] = ""
    assert environment()["code"] == {"commit": "0123abcd", "dirty": False}
