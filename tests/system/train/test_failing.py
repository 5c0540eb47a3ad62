"""How a run ends by an error says which class of error it was, in its log and by its exit code."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from engine.errors import TrainingFailed
from engine.log.fold import Follower
from engine.train.loop import TrainingLoop
from engine.train.run import why_failed
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit


def of_torch() -> BaseException:
    """The error of a tensor that fits no memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (MemoryError("8 PiB"), "the host allocator refused", 1),
        (of_torch(), "the host allocator refused", 1),
        (torch.OutOfMemoryError("CUDA out of memory"), "the device allocator refused", 1),
        (torch.AcceleratorError("CUDA error: launch failure"), "the device failed", 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "the device failed", 1),
        (torch.distributed.DistBackendError("NCCL error in a.cpp"), "the device failed", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "disk: x", 65),
        (OSError(errno.ENOSPC, "No space left on device"), "disk: one that was being written", 65),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "file: x", 65),
        (ModuleNotFoundError("No module named 'x'"), "ModuleNotFoundError: No module", 70),
        (KeyboardInterrupt(), "KeyboardInterrupt: raised by code", 130),
        (SystemExit(0), "SystemExit: 0: raised by code outside the engine", 70),
        (TrainingFailed("check x"), "check x", 1),
        (KeyError("x"), "KeyError: 'x'", 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_each_error_has_its_class(error: BaseException, said: str, code: int) -> None:
    reason, found = why_failed(error)
    assert reason.startswith(said) and found == code


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(0), OSError(errno.ENOSPC, "full")]
)
def test_what_is_no_exception_of_ours_is_recorded_as_the_end_too(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrainingLoop, "check", fails)
    run, code = carried_out(kit, tmp_path)
    view = Follower(run).read_all()
    reason, expected = why_failed(error)
    assert view.finished is not None and code == expected
    assert (view.finished.state, view.finished.reason) == ("failed", reason)
    assert not run.reserve.exists()
