"""Whether torch.compile has a compiler here."""

from __future__ import annotations

import pytest

from engine.plan import device
from engine.plan.device import has_compiler


def test_a_gpu_without_triton_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert has_compiler("cpu") and not has_compiler("cuda")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert not has_compiler("cpu")
