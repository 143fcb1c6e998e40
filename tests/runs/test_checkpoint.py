"""Whatever stops a run, the folder holds a whole checkpoint."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.errors import RunError
from coterie.runs import checkpoint

STATE = {
    "half": torch.tensor([1.5, -0.0, float("inf"), float("nan")], dtype=torch.float16),
    "brain": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "single": torch.tensor([[0.1, -0.0], [float("nan"), 1e-45]]),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "count": torch.tensor([2**62 + 1, -1]),
    "small": torch.tensor([-128, 127], dtype=torch.int8),
    "known": torch.tensor([[True, False]]),
    "scalar": torch.tensor(7),
    "nobody": torch.zeros(0, 5),
}


def no_warning(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return {name: _bits(tensor) for name, tensor in a.items()} == {name: _bits(tensor) for name, tensor in b.items()}


def _bits(tensor: Tensor) -> tuple[object, ...]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return tensor.dtype, tuple(tensor.shape), raw.tolist()


def state(round: int) -> dict[str, Tensor]:
    return {"theta": torch.full((4, 3), float(round))}


def saved(folder: Path, *rounds: int) -> list[Path]:
    return [checkpoint.save(folder, round, state(round)) for round in rounds]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 12, STATE)
    found = checkpoint.latest(tmp_path, no_warning)
    assert found is not None
    assert found.round == 12
    assert same_bits(found.tensors, STATE)
    assert not same_bits(found.tensors, {**STATE, "single": STATE["single"].abs()})  # -0.0 is not 0.0
    assert not same_bits(found.tensors, {**STATE, "scalar": torch.tensor([7])})
    assert not same_bits(found.tensors, {**STATE, "double": STATE["double"].float()})


def test_an_empty_state_is_a_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {})
    found = checkpoint.latest(tmp_path, no_warning)
    assert found is not None
    assert found.tensors == {}


def test_loaded_tensors_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    first = checkpoint.latest(tmp_path, no_warning)
    assert first is not None
    first.tensors["theta"].add_(1)
    again = checkpoint.latest(tmp_path, no_warning)
    assert again is not None
    assert torch.equal(again.tensors["theta"], state(1)["theta"])
    assert torch.equal(first.tensors["theta"], state(2)["theta"])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    paths = saved(tmp_path, 1, 2, 3)
    assert set(tmp_path.iterdir()) == set(paths[1:])
    assert paths[2].name.startswith("round-000003-")


@pytest.mark.parametrize("keep", [1, 3])
def test_the_number_kept_can_be_chosen(tmp_path: Path, keep: int) -> None:
    paths = [checkpoint.save(tmp_path, round, state(round), keep) for round in range(5)]
    assert set(tmp_path.iterdir()) == set(paths[-keep:])


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path, no_warning) is None
    assert checkpoint.latest(tmp_path / "absent", no_warning) is None


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    newest = saved(tmp_path, 4, 5)[1]
    newest.write_bytes(damage(newest.read_bytes()))
    warnings: list[str] = []
    found = checkpoint.latest(tmp_path, warnings.append)
    assert found is not None
    assert found.round == 4
    assert torch.equal(found.tensors["theta"], state(4)["theta"])
    assert len(warnings) == 1
    assert newest.name in warnings[0]


def test_all_damaged_is_none_and_the_run_can_start_over(tmp_path: Path) -> None:
    for path in saved(tmp_path, 7, 8):
        path.write_bytes(b"")
    warnings: list[str] = []
    assert checkpoint.latest(tmp_path, warnings.append) is None
    assert ["damaged" in text and "before" not in text for text in warnings] == [True, True]  # there is none
    saved(tmp_path, 1)  # must not be dropped in favour of the later, damaged ones
    found = checkpoint.latest(tmp_path, no_warning)
    assert found is not None
    assert found.round == 1


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / ".tmpAbCdEf").write_bytes(b"half a checkpoint")
    assert checkpoint.latest(tmp_path, no_warning) is None
    (path,) = saved(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_intact_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (path,) = saved(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError) as caught:
        checkpoint.save(tmp_path, 4, state(4))
    message = str(caught.value)
    assert "round 4" in message
    assert "No space left on device" in message
    assert "The checkpoint of round 3 is intact" in message
    assert "--resume" in message
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"none of an earlier round: .* --resume"):
        checkpoint.save(tmp_path / "checkpoints", 1, state(1))


WRITER = """
import sys
from pathlib import Path
import torch
from coterie.runs import checkpoint

torch.set_num_threads(1)
round = int(sys.argv[2])
while True:
    round += 1
    checkpoint.save(Path(sys.argv[1]), round, {"theta": torch.full((500_000,), float(round))})
    print(round, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    reached = 0
    for delay in (0.0, 0.003, 0.007):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(reached)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            reported = int(writer.stdout.readline())
            time.sleep(delay)  # a different moment of a later save each time
            writer.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, writer.stdout.read().split())])
        found = checkpoint.latest(tmp_path, no_warning)
        assert found is not None
        assert found.round in (reported, reported + 1)  # what was reported is durable
        assert torch.equal(found.tensors["theta"], torch.full((500_000,), float(found.round)))
        reached = found.round
