"""The saved folder holds the student, its settings, tokenizer and chat template as they were trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from engine.data.chat_template import ChatTemplate
from engine.formats.tokenizer import open_tokenizer
from engine.log.folder import RunFolder
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import new_decoder
from engine.spec.sections import StudentSection
from engine.train.finish import save_student
from tests.support.kit import Kit, tiny_config

TEMPLATES = {"a_tool": "{{ tools }}", "default": "{{ messages }}"}


@pytest.fixture
def student() -> Decoder:
    return new_decoder(ModelConfig.from_dict(tiny_config(), "student"), seed=0)


def saved(student: Decoder, kit: Kit, folder: Path, save_as: str) -> RunFolder:
    run = RunFolder(folder)
    inputs: Any = SimpleNamespace(
        tokenizer=open_tokenizer(kit.teacher),
        template=ChatTemplate(texts=TEMPLATES, special_tokens={}, where="here"),
    )
    save_student(run, student, inputs, StudentSection(save_as=save_as))
    return run


@pytest.mark.parametrize("save_as", ["fp32", "bf16"])
def test_every_tensor_is_the_student_s_in_the_dtype_that_was_asked_for(
    student: Decoder, kit: Kit, tmp_path: Path, save_as: str
) -> None:
    run = saved(student, kit, tmp_path, save_as)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[save_as]
    with safe_open(run.student / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    live = [parameter.detach().to(dtype).double() for parameter in student.parameters()]
    assert len(tensors) == len(live)
    whole = float(sum(one.sum() for one in live))
    assert sum(float(one.double().sum()) for one in tensors.values()) == pytest.approx(whole)


def test_the_settings_are_those_that_the_student_was_made_from(
    student: Decoder, kit: Kit, tmp_path: Path
) -> None:
    run = saved(student, kit, tmp_path, "fp32")
    said = json.loads((run.student / "config.json").read_text())
    asked = tiny_config()
    assert {name: said.get(name) for name in asked} == asked
    assert ModelConfig.from_dict(said, "saved") == student.config


def test_the_tokenizer_and_the_default_template_are_the_run_s(
    student: Decoder, kit: Kit, tmp_path: Path
) -> None:
    run = saved(student, kit, tmp_path, "fp32")
    assert (run.student / "tokenizer.json").read_bytes() == open_tokenizer(kit.teacher).raw
    assert (run.student / "chat_template.jinja").read_text() == TEMPLATES["default"]
