"""A teacher in 8-bit floats: what rounding costs is measured on real rows, and a run is held to it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checks.context import Context
from engine.checks.teacher import teacher_fp8_within_noise_floor
from engine.data.batches import Batch, gather_rows
from engine.data.corpus import Document
from engine.decision import Decision
from engine.errors import BadInput
from engine.formats.tokenizer import open_tokenizer
from engine.models.decoder import Decoder
from engine.models.fp8 import fp8_linear
from engine.models.frozen import freeze
from engine.models.load import load_decoder, save_decoder
from engine.models.load_fp8 import load_fp8_decoder
from engine.models.packed import head_of
from engine.spec import RunSpec
from engine.teachers.backend import choose_backend, choose_teacher_precision
from engine.teachers.fp8 import (
    NOISE_FLOOR_KL,
    Fp8Teacher,
    Rounding,
    RoundingProbe,
    compare,
    rounding_of,
)
from engine.teachers.truncating import TruncatingTeacher
from engine.verdict import Answer
from tests.support.packed_models import lively, make_batch, make_config
from tests.support.paths import DEMO, SUPPORT
from tests.support.streams import tokenize

CPU = torch.device("cpu")
GOOD = Rounding(kl=0.004, agreement=0.96, relative_rms=0.05, tokens=500)


def real_rows() -> Batch:
    """Python source: text that the demo's teacher can predict, and that never changes."""
    text = (SUPPORT / "python_source.txt").read_text()
    tokenizer = open_tokenizer(DEMO / "teacher")
    stream = tokenize([Document(name="models", text=text)], tokenizer)
    return gather_rows(stream, 128, np.arange(8))


def measured(device: torch.device, dtype: torch.dtype, path: Path) -> Rounding:
    probe = RoundingProbe(real_rows(), device, rows=8)
    return probe.result(load_fp8_decoder(path, dtype, device, watcher=probe))


@pytest.mark.parametrize("path", ["teacher", "teacher.gguf"])
def test_the_demo_teacher_is_within_the_noise_floor_on_real_rows(path: str) -> None:
    found = measured(CPU, torch.float32, DEMO / path)
    assert 1e-4 < found.kl < NOISE_FLOOR_KL
    assert 0.9 < found.agreement < 1 and 0.01 < found.relative_rms < 0.15
    assert found.tokens > 900


@pytest.mark.gpu
def test_the_gpu_costs_what_the_oracle_says() -> None:
    found = measured(torch.device("cuda"), torch.bfloat16, DEMO / "teacher")
    wanted = measured(CPU, torch.float32, DEMO / "teacher")
    assert found.kl < NOISE_FLOOR_KL
    assert found.kl == pytest.approx(wanted.kl, rel=0.15)


def test_what_the_watcher_measures_is_two_models_compared(tmp_path: Path) -> None:
    config = make_config(num_hidden_layers=3)
    save_decoder(lively(config), tmp_path / "model", torch.float32)
    batch = make_batch(3, 20)
    probe = RoundingProbe(batch, CPU, rows=2)
    decoder = load_fp8_decoder(tmp_path / "model", torch.float32, "cpu", watcher=probe)
    found = probe.result(decoder)
    exact = freeze(load_decoder(tmp_path / "model"))
    tokens_BT, documents_BT, labels_BT = (t[:2] for t in batch.to_torch(CPU))
    kept_BT = labels_BT >= 0
    with torch.no_grad():
        p_NV, q_NV = (
            d.logits(tokens_BT, documents_BT)[kept_BT].log_softmax(-1) for d in (exact, decoder)
        )
    kl = float((p_NV.exp() * (p_NV - q_NV)).sum(1).mean())
    assert found.kl == pytest.approx(kl, rel=1e-3)
    same = p_NV.argmax(1) == q_NV.argmax(1)
    assert found.agreement == pytest.approx(float(same.float().mean()))
    assert found.tokens == int(kept_BT.sum()) == 38


def test_equal_teachers_are_at_no_distance_and_no_tokens_at_none_known() -> None:
    decoder = freeze(lively(make_config()))
    hidden_NE, head = torch.randn(700, 256), head_of(decoder)
    same = compare(hidden_NE, head, hidden_NE.clone(), head)
    assert abs(same.kl) < 1e-6 and same.agreement == 1 and same.relative_rms == 0
    nothing = compare(hidden_NE[:0], head, hidden_NE[:0], head)
    assert math.isnan(nothing.kl) and nothing.tokens == 0


def fp8_decoder() -> Decoder:
    decoder = freeze(lively(make_config()))
    for layer in decoder.layers:
        layer.attention.o = fp8_linear(layer.attention.o.weight, None)
    return decoder


def answer(rounding: Rounding | None, precision: str = "fp8") -> Answer:
    spec = RunSpec()
    spec = dataclasses.replace(spec, teacher=dataclasses.replace(spec.teacher, precision=precision))
    teacher = None
    if rounding is not None:
        teacher = TruncatingTeacher(Fp8Teacher(fp8_decoder(), rounding), 99)
        assert rounding_of(teacher) is rounding
    fields = {f.name: None for f in dataclasses.fields(Context)}
    return teacher_fp8_within_noise_floor(
        Context(**(fields | {"spec": spec, "teacher": teacher}))  # type: ignore[arg-type]
    )


def test_the_check_holds_a_teacher_to_the_noise_floor() -> None:
    assert answer(GOOD).verdict.level.name == "PASS"
    assert answer(GOOD).numbers["noise_floor"] == NOISE_FLOOR_KL
    for kl in (1.01 * NOISE_FLOOR_KL, 3.0, math.nan, math.inf):
        found = answer(dataclasses.replace(GOOD, kl=kl))
        assert found.verdict.level.name == "FAIL", kl
    assert "KL of 0.013 nats" in answer(dataclasses.replace(GOOD, kl=0.0131)).verdict.reason
    assert answer(None).verdict.level.name == "UNKNOWN"
    assert answer(None, "bf16").verdict.level.name == "PASS"


@pytest.mark.parametrize(
    ("device", "capability"), [("cpu", None), ("cuda", (8, 0)), ("cuda", (8, 6))]
)
def test_fp8_is_refused_where_there_are_no_such_products(
    device: str, capability: tuple[int, int] | None
) -> None:
    with pytest.raises(BadInput, match=r"capability 8\.9 or later, found") as caught:
        choose_teacher_precision("fp8", device=device, capability=capability)
    assert "fp32" in str(caught.value)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 1)])
def test_fp8_is_taken_when_it_is_asked_for_and_says_that_it_is_checked(
    capability: tuple[int, int],
) -> None:
    found = choose_teacher_precision("fp8", device="cuda", capability=capability)
    assert found is not None and found.choice == "fp8" and found.overridden
    assert "teacher_fp8_within_noise_floor" in found.reason
    assert found.rejected[0][0] == "bf16"


def backend(wanted: str) -> Decision:
    return choose_backend(
        wanted,
        config=make_config(),
        quantised_blocks=True,
        dense_bytes=7 * 2**30,
        packed_bytes=5 * 2**30,
        available_bytes=6 * 2**30,
        precision="fp8",
    )


def test_fp8_takes_dense_weights_of_a_byte_and_excludes_blocks() -> None:
    found = backend("auto")
    assert found.choice == "dequantized" and "a byte a weight" in found.reason
    with pytest.raises(BadInput, match="would stay in their blocks"):
        backend("quantized")
