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
from engine.plan.run_plan import LayerExecution, RunFacts, choose_layer_execution
from engine.runtime.managed import memory_scope
from engine.spec import spec_from_dict
from engine.train.record import write
from tests.support.packed_models import make_config

PLAIN = {
    "student.compile": "off",
    "student.attention": "masked",
    "teacher.compile": "off",
    "teacher.attention": "masked",
    "teacher.prefetch": "off",
}


def layer_execution(
    folder: Path, settings: dict[str, str], *, precision: str = "bf16", store: Any = None
) -> LayerExecution:
    spec: dict[str, Any] = {
        "teacher": {"path": "teacher"},
        "student": {"config": "student.json"},
        "data": {"seq_len": 32},
    }
    for name, value in settings.items():
        section, key = name.split(".")
        spec[section][key] = value
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
        precision="bf16",
        memory=memory_scope("native", torch.device("cpu")),
        available=measured(1 << 40, "a test"),
        threads=1,
    )
    with LogWriter(RunFolder(folder).events, writer="trainer") as log:
        facts = RunFacts(
            spec=spec_from_dict(spec),
            inputs=inputs,
            compute=compute,
            teacher_precision=precision,
            store=store,
        )
        return choose_layer_execution(facts, partial(write, log))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr("engine.plan.run_plan.has_compiler", lambda _device: True)


@pytest.mark.parametrize(
    ("setting", "value", "field"),
    [
        ("student.compile", "on", "compiled"),
        ("student.attention", "packed", "packed"),
        ("teacher.compile", "on", "teacher_compiled"),
        ("teacher.attention", "packed", "teacher_packed"),
        ("teacher.prefetch", "on", "prefetches"),
    ],
)
def test_a_setting_turns_on_what_it_names_and_nothing_else(
    tmp_path: Path, setting: str, value: str, field: str
) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "on").mkdir()
    off = layer_execution(tmp_path / "off", PLAIN)
    on = layer_execution(tmp_path / "on", PLAIN | {setting: value})
    names = LayerExecution.__dataclass_fields__
    assert not any(getattr(off, name) for name in names)
    assert {name for name in names if getattr(on, name)} == {field}


def test_of_a_teacher_whose_answers_are_stored_nothing_is_compiled_or_begun_ahead(
    tmp_path: Path,
) -> None:
    wanted = PLAIN | {"teacher.compile": "on", "teacher.prefetch": "on"}
    found = layer_execution(tmp_path, wanted, store=object())
    assert not found.teacher_compiled and not found.prefetches


def test_a_teacher_in_8_bits_attends_in_bf16(tmp_path: Path) -> None:
    assert layer_execution(
        tmp_path, PLAIN | {"teacher.attention": "packed"}, precision="fp8"
    ).teacher_packed
