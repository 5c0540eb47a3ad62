"""Each setting of how layers run reaches its own model, for a GPU that is not here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.log.folder import RunFolder
from engine.log.write import LogWriter
from engine.machine.reading import measured
from engine.plan.device import ComputeDevice
from engine.plan.inputs import Inputs
from engine.plan.run_plan import RunFacts, choose_layer_execution, without_effect
from engine.runtime.managed import memory_scope
from engine.spec import spec_from_dict
from engine.train.to_events import write
from tests.support.packed_models import make_config

PLAIN = {
    "student.attention": "masked",
    "kernels.layers": "torch",
    "teacher.attention": "masked",
    "kernels.attention": "flash",
}
ON = ("on", "packed", "fused", "cudnn")


def layer_execution(
    folder: Path, settings: dict[str, Any], *, precision: str = "bf16", store: Any = None
) -> set[str]:
    """The settings of PLAIN that are on."""
    spec: dict[str, Any] = {
        "teacher": {"path": "teacher", "precision": precision},
        "student": {"config": "student.json", "precision": "bf16"},
        "data": {"seq_len": 32},
        "compute": {"device": "cuda"},
    }
    for name, value in settings.items():
        section, key = name.split(".")
        spec.setdefault(section, {})[key] = value
    inputs = Inputs(
        teacher=make_config(),
        teacher_size=None,
        student=make_config(),
        tokenizer=cast(Any, None),
        tokenizers={},
        notes=(),
    )
    compute = ComputeDevice(
        device=torch.device("cuda"),
        memory=memory_scope("native", torch.device("cpu")),
        available=measured(1 << 40, "a test"),
    )
    with LogWriter(RunFolder(folder).events, writer="trainer") as log:
        facts = RunFacts(
            spec=spec_from_dict(spec),
            inputs=inputs,
            compute=compute,
            store=store,
            log=partial(write, log),
        )
        facts.settle(without_effect(facts))
        choose_layer_execution(facts)
    return {key for key in PLAIN if facts.spec.value(key) in ON}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr("engine.plan.run_plan.has_triton", lambda: True)
    monkeypatch.setattr("engine.kernels.cudnn_attention.is_installed", lambda: True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("student.attention", "packed"),
        ("kernels.layers", "fused"),
        ("teacher.attention", "packed"),
        ("kernels.attention", "cudnn"),
    ],
)
def test_a_setting_turns_on_what_it_names_and_nothing_else(
    tmp_path: Path, setting: str, value: str
) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "on").mkdir()
    assert layer_execution(tmp_path / "off", PLAIN) == set()
    assert layer_execution(tmp_path / "on", PLAIN | {setting: value}) == {setting}


@pytest.mark.parametrize(
    ("lacking", "settings", "choice"),
    [
        (None, {}, "cudnn"),
        ("its package", {}, "flash"),
        ("an older GPU", {}, "flash"),
        (None, {"compute.deterministic": True}, "flash"),
    ],
)
def test_cudnn_attends_by_itself_where_its_package_and_a_gpu_of_capability_9_are(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lacking: str | None,
    settings: dict[str, Any],
    choice: str,
) -> None:
    if lacking == "its package":
        monkeypatch.setattr("engine.kernels.cudnn_attention.is_installed", lambda: False)
    if lacking == "an older GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    found = layer_execution(tmp_path, {"student.attention": "packed", **settings})
    assert ("kernels.attention" in found) == (choice == "cudnn")


def test_a_teacher_in_8_bits_attends_in_bf16(tmp_path: Path) -> None:
    wanted = PLAIN | {"teacher.attention": "packed"}
    assert layer_execution(tmp_path, wanted, precision="fp8") == {"teacher.attention"}
