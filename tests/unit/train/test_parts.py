"""Checkpoints of which each rank writes a part keep every promise of the others; and what ranks choose."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, DiskFull
from engine.machine.reading import Reading, absent, measured
from engine.plan.knobs import SHARDED_FROM_BYTES, choose_reshard, choose_sharded
from engine.runtime.parts import is_part, part_name, read_parts
from engine.runtime.ranks import Ranks
from engine.train.checkpoint import keeper as keep
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.keeper import Parts
from engine.train.checkpoint.manifest import verify
from engine.train.checkpoint.write import FileCalls
from engine.train.ranks.sharding import least_available

TENSORS = {
    "student/embed.weight": torch.arange(12, dtype=torch.float32).reshape(6, 2),
    "step/embed.weight": torch.tensor(3.0),
}
CPU = torch.device("cpu")


def _save(folder: Path, tensors: Mapping[str, Tensor] = TENSORS) -> Path:
    saved = checkpoint.save(folder, 3, {"state.json": b"{}\n"}, parts=Parts(tensors, Ranks(), CPU))
    return saved.path


def test_parts_are_published_with_the_rest_and_read_back_whole(tmp_path: Path) -> None:
    path = _save(tmp_path / "checkpoints")
    assert set(verify(path).files) == {part_name(0), "state.json"}
    found = read_parts(path, lambda name: True)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert read_parts(path, lambda name: name.startswith("step/")).keys() == {"step/embed.weight"}


def test_a_damaged_or_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    path = _save(tmp_path / "checkpoints")
    part = path / part_name(0)
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=part_name(0)):
        verify(path)
    part.unlink()
    with pytest.raises(CheckpointError, match=part_name(0)):
        verify(path)


def test_a_part_that_could_not_be_written_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: object, folder: object) -> None:
        raise OSError(errno.ENOSPC, "rank 1: No space left on device")

    monkeypatch.setattr(keep, "write_parts", refuse)
    with pytest.raises(DiskFull, match="rank 1"):
        _save(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []


class _Told(Ranks):
    """A rank that is told what the first says."""

    def tell(self, said: object) -> object:
        return None


def test_a_rank_whose_first_could_not_begin_says_so_and_writes_nothing() -> None:
    with pytest.raises(CheckpointError, match="the first rank could not begin"):
        Parts(TENSORS, _Told(), CPU).follow()


class _Heard(Ranks):
    """A first rank; what it says to the others is in `said`."""

    said: ClassVar[list[object]] = []

    def tell(self, said: object) -> object:
        self.said.append(said)
        return said


def test_the_others_are_let_go_when_the_first_could_not_begin_and_only_then(
    tmp_path: Path,
) -> None:
    _Heard.said.clear()
    refused = Parts(TENSORS, _Heard(), CPU)
    refused.give_up()
    assert _Heard.said == [None]
    written = Parts(TENSORS, _Heard(), CPU)
    written.write_into(tmp_path)
    written.give_up()
    assert _Heard.said == [None, str(tmp_path)]


def test_the_room_for_all_parts_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    class Full(FileCalls):
        def free_bytes(self, folder: Path) -> int:
            return 60  # enough for state.json alone

    written = Parts(TENSORS, Ranks(), CPU)
    with pytest.raises(DiskFull):
        checkpoint.save(
            tmp_path / "checkpoints", 3, {"state.json": b"{}\n"}, parts=written, calls=Full()
        )
    assert written.size_bytes == 12 * 4 + 4


def test_a_rank_file_is_known_by_its_name() -> None:
    assert is_part(part_name(0)) and is_part(part_name(12345))
    assert not any(map(is_part, ("student.safetensors", "shard-1.json", "rng.safetensors")))


def test_gathered_weights_are_kept_where_they_fit() -> None:
    sizes = dict(kept_bytes=30, given_bytes=20)
    assert choose_reshard("auto", **sizes, available_bytes=30).choice == "off"
    tight = choose_reshard("auto", **sizes, available_bytes=29)
    assert tight.choice == "on" and "29" in tight.reason
    assert choose_reshard("auto", **sizes, available_bytes=None).choice == "off"
    forced = choose_reshard("off", **sizes, available_bytes=10)
    assert forced.choice == "off" and forced.overridden


def test_large_checkpoints_are_written_in_parts() -> None:
    assert choose_sharded("auto", whole_bytes=SHARDED_FROM_BYTES).choice == "on"
    assert choose_sharded("auto", whole_bytes=SHARDED_FROM_BYTES - 1).choice == "off"
    for wanted in ("on", "off"):
        decision = choose_sharded(wanted, whole_bytes=1)
        assert decision.choice == wanted and decision.overridden and decision.rejected


class _Several(Ranks):
    def gather(self, values_N: Tensor) -> Tensor:
        return torch.stack([values_N, torch.tensor([-1.0 if self.local_rank else 70.0]).double()])


def test_every_rank_plans_with_the_least_memory_that_any_has() -> None:
    def least(own: Reading, blind: int = 0) -> Reading:
        return least_available(_Several(world=2, local_rank=blind), own, CPU)

    assert least(measured(100, "here")).number == 70
    assert least(measured(60, "here")) == measured(60, "here")
    assert least(measured(60, "here"), blind=1).number is None
    nothing = absent("not told", "here")
    assert least(nothing) == nothing and replace(nothing) == nothing
