"""`engine watch --set`: what the probe changes in a script that does not know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from apr_watch import settings

from tests.support.attached import run_watched

LOADERS = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(16, 8))

rows = torch.randn(64, 8)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
made = [
    torch.utils.data.DataLoader(rows, 8),
    torch.utils.data.DataLoader(rows, 8, False, None, None, 1, prefetch_factor=3, persistent_workers=True),
    torch.utils.data.DataLoader(Stream(), 8),
]
for loader in made[:1]:
    for x in loader:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
say(workers=[one.num_workers for one in made], kept=[one.persistent_workers for one in made],
    attention=[torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
    precision=torch.get_float32_matmul_precision(), sure=torch.are_deterministic_algorithms_enabled())
"""


@dataclass(frozen=True)
class Found:
    said: dict[str, Any]
    changes: dict[str, str]
    notes: list[str]
    losses: list[float]


RunWith: TypeAlias = Callable[..., Found]


@pytest.fixture
def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWith:
    def run(*asked: str) -> Found:
        monkeypatch.setenv(settings.VARIABLE, ";".join(asked))
        ran = run_watched(tmp_path / f"with {len(asked)}", LOADERS)
        assert ran.returncode == 0, ran.stderr
        return Found(
            said=ran.said[0],
            changes={one["knob"]: one["reason"] for one in ran.lines if one["kind"] == "decision"},
            notes=[one["text"] for one in ran.lines if one["kind"] == "note"],
            losses=[one["loss"] for one in ran.lines if one["kind"] == "step"],
        )

    return run


def test_loaders_get_workers_and_a_stream_is_left_alone(run_with: RunWith) -> None:
    found = run_with("loader.workers=2")
    assert found.said["workers"] == [2, 2, 0] and found.said["kept"] == [False, True, False]
    assert found.changes["loader.workers"].startswith("--set changed num_workers of DataLoader")
    assert any("was not applied to a stream" in text for text in found.notes)


def test_a_loader_without_workers_loses_what_needs_them(run_with: RunWith) -> None:
    found = run_with("loader.workers=0", "attention.backend=math")
    assert found.said["workers"] == [0, 0, 0] and found.said["kept"] == [False, False, False]
    assert "num_workers of DataLoader from 1 to 0" in found.changes["loader.workers"]
    assert found.said["attention"] == [False, True] and "attention.backend" in found.changes


def test_switches_of_torch_are_set_and_one_that_is_so_already_is_said(run_with: RunWith) -> None:
    found = run_with("torch.deterministic=on", "matmul.precision=high", "cudnn.benchmark=off")
    assert (found.said["precision"], found.said["sure"]) == ("high", True)
    assert set(found.changes) == {"torch.deterministic", "matmul.precision"}
    assert any("cudnn.benchmark=off changes nothing" in text for text in found.notes)


def test_workers_that_are_asked_for_hand_out_the_same_batches(run_with: RunWith) -> None:
    assert run_with().losses == run_with("loader.workers=2").losses != []
