"""The memory budget: its arithmetic against what torch holds, what it refuses, and how it says so."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import BadInput
from engine.machine.reading import absent, measured
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import new_decoder
from engine.plan.activations import Forward
from engine.plan.memory import MEMORY_PHASES
from engine.spec import parse_set
from engine.train import to_events
from tests.support.budgets import (
    DEMO_STUDENT,
    DEMO_TEACHER,
    SEVEN_B,
    SMALL,
    budget_of,
    config,
    item,
    spec_of,
)
from tests.support.driven_runs import drive

# Activations against autograd


def held_by_autograd(
    shape: ModelConfig, rows: int, seq_len: int, precision: str, device: str
) -> int:
    """Bytes of the storages that the graph of one forward pass keeps, the weights' own left out."""
    decoder = new_decoder(shape, 0).to(device)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    tokens_BT = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
    documents_BT = torch.arange(seq_len, device=device).expand(rows, -1) // max(seq_len // 2, 1)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if precision == "bf16":
        autocast = torch.autocast(device, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        hidden_BTD = decoder.hidden(tokens_BT, documents_BT)
    assert hidden_BTD.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def forward_of(
    shape: ModelConfig, rows: int, seq_len: int, precision: str, device: str, shares: bool
) -> Forward:
    return Forward(
        config=shape,
        rows=rows,
        seq_len=seq_len,
        matmul_bytes={"fp32": 4, "bf16": 2}[precision],
        residual_bytes=4,
        fused_norms=device == "cuda",
        shares_heads=shares,
    )


SHAPES = [
    config(),
    config(shared=4),
    config(128, 300, 3, 8, 1),
    config(family="llama"),
    config(family="olmo2"),
    config(family="mistral", sliding_window=40),
    config(family="phi3", partial_rotary_factor=0.75, sliding_window=40),
    config(family="gemma3_text", layers=3, layers_without_window=(2,), sliding_window=40),
    config(family="gemma3_text", head_dim=32, shared=4),
    config(family="qwen3"),
    config(family="qwen3", head_dim=32, shared=4),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: f"{c.family}-{c.num_key_value_heads}")
def test_autograd_holds_what_the_formula_says_to_the_byte(
    shape: ModelConfig, precision: str
) -> None:
    for rows, seq_len in ((2, 33), (1, 200), (5, 64)):
        held = held_by_autograd(shape, rows, seq_len, precision, "cpu")
        terms = forward_of(shape, rows, seq_len, precision, "cpu", True).kept()
        assert sum(terms.values()) == held, (rows, seq_len, terms)


# The whole of a step against every storage that is alive


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages alive after each operation, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0
        """Bytes of the storages in `_alive`, of which some may be gone."""
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        _, before = self._alive.get(storage._cdata, (None, 0))
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._at_most += storage.nbytes() - before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.add(value)
        # Asking each storage whether it is alive takes longer than an operation.
        if self._at_most > self.peak:
            self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
            self._at_most = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._at_most)
        return out


@pytest.mark.parametrize(
    ("peak", "student", "teacher", "changes"),
    [
        (
            "loss",
            config(vocabulary=8000, tied=False),
            config(),
            dict(train__rows=2, train__accumulation=3, data__seq_len=64, eval__rows=1),
        ),
        (
            "backward",
            config(256, 700, 4),
            config(),
            dict(train__rows=8, data__seq_len=128, eval__rows=2),
        ),
        (
            "last gradients",
            config(256, 700, 4),
            None,
            dict(train__rows=1, data__seq_len=16, eval__rows=1),
        ),
        (
            "last gradients",
            config(vocabulary=20000),
            None,
            dict(train__rows=1, data__seq_len=16, eval__rows=1, loss__chunk_rows=16),
        ),
        pytest.param(
            "last gradients",
            config(vocabulary=20000),
            config(),
            dict(train__rows=1, train__accumulation=2, data__seq_len=16, eval__rows=1),
            marks=pytest.mark.soak,
        ),
        (
            "evaluation",
            config(vocabulary=4096),
            config(96, 200, 2),
            dict(train__rows=1, data__seq_len=32, eval__rows=40),
        ),
        pytest.param(
            "teacher evaluation",
            config(32, 48, 1, vocabulary=300),
            config(256, 2000, 4, tied=False),
            dict(train__rows=1, data__seq_len=64, eval__rows=32),
            marks=pytest.mark.soak,
        ),
        (
            "teacher forward",
            config(32, 48, 1, vocabulary=300),
            config(256, 2000, 4, tied=False),
            dict(train__rows=16, data__seq_len=64, eval__rows=1),
        ),
    ],
    ids=[
        "loss",
        "backward",
        "last-layer",
        "tied-embedding",
        "tied-accumulated",
        "evaluation",
        "teacher-evaluation",
        "teacher-forward",
    ],
)
def test_a_run_on_the_cpu_holds_what_was_predicted(
    peak: str, student: ModelConfig, teacher: ModelConfig | None, changes: dict[str, object]
) -> None:
    spec = spec_of(teacher is not None, **changes)
    if teacher is not None:
        teacher = replace(teacher, vocab_size=student.vocab_size)
    budget = budget_of(
        spec,
        student,
        teacher,
        compute__device="cpu",
        teacher__precision="fp32",
        student__precision="fp32",
    )
    student_model = new_decoder(student, 0)
    teacher_model = None if teacher is None else new_decoder(teacher, 1)
    with LiveBytes() as live:
        for model in (student_model, teacher_model):
            for parameter in model.parameters() if model else ():
                live.add(parameter)
        drive(spec, student_model, teacher_model, "cpu", "fp32")
    assert budget.peak_phase == peak, budget.lines()
    assert budget.total_bytes == pytest.approx(live.peak, rel=0.05), "\n".join(budget.lines())


# The table, and what it says


def test_what_lasts_is_counted_from_the_shapes() -> None:
    budget = budget_of(spec_of(), teacher__precision="bf16")
    student, teacher = new_decoder(DEMO_STUDENT, 0), new_decoder(DEMO_TEACHER, 0, torch.bfloat16)
    size = sum(p.nbytes for p in student.parameters())
    assert item(budget, "student weights") == item(budget, "gradients") == size
    assert item(budget, "AdamW moments") == 2 * size
    assert item(budget, "teacher weights") == sum(p.nbytes for p in teacher.parameters())


def test_the_peak_is_the_largest_phase_and_the_table_marks_what_is_alive_in_it() -> None:
    budget = budget_of(spec_of(train__rows=32, data__seq_len=128))
    sizes = {phase: budget.bytes_in(phase) for phase in MEMORY_PHASES}
    assert budget.total_bytes == max(sizes.values()) == sizes[budget.peak_phase]
    peak, lines = budget.peak_phase, budget.lines()
    assert lines[0].startswith("memory on cuda: ") and f"({peak})" in lines[0]
    for entry in budget.items:
        (line,) = (text for text in lines if text.startswith(f"  {entry.name}  "))
        assert entry.how in line and ("*" in line) == (peak in entry.phases)
    (head,) = (text for text in lines if "at peak" in text)
    marks = {text.index(" * ") for text in lines if "     *     " in text}
    assert len(marks) == 1 and marks.pop() in range(head.index("at peak"), head.index("how"))
    marked = sum(entry.bytes for entry in budget.items if peak in entry.phases)
    assert marked == budget.total_bytes


def test_the_event_has_every_number() -> None:
    budget = budget_of(spec_of(), available=absent("Not Supported", "cuMemGetInfo"))
    event = to_events.memory_plan(budget)
    assert event.available_bytes is None and event.available_source == "Not Supported"
    assert event.predicted_bytes == budget.total_bytes and event.peak_phase == budget.peak_phase
    assert [(name, size) for name, size, _ in event.items] == [
        (entry.name, entry.bytes) for entry in budget.items
    ]


def test_without_a_teacher_nothing_of_one_is_counted() -> None:
    budget = budget_of(spec_of(teacher=False), teacher=None)
    assert not any("teacher" in entry.name for entry in budget.items)
    assert item(budget, "loss workspace") < item(budget_of(spec_of()), "loss workspace")


def test_packed_weights_stay_packed() -> None:
    packed = 4_680_000_000
    dense = budget_of(spec_of(), SMALL, SEVEN_B)
    quantized = budget_of(
        spec_of(), SMALL, SEVEN_B, teacher__backend="quantized", teacher_packed_bytes=packed
    )
    assert item(quantized, "teacher weights") == packed < item(dense, "teacher weights") / 3
    assert item(quantized, "dequantisation scratch") == 2 * 2 * 3584 * 18944


def test_tf32_is_fp32_in_memory() -> None:
    for name in ("teacher weights", "teacher temporaries"):
        found = {
            p: item(budget_of(spec_of(), teacher__precision=p), name) for p in ("fp32", "tf32")
        }
        assert found["tf32"] == found["fp32"]


def test_nothing_is_refused_when_nobody_knows_what_is_there() -> None:
    budget = budget_of(spec_of(), available=absent("Not Supported", "cuMemGetInfo"))
    assert budget.fits is None and budget.savings == ()
    budget.refuse_if_too_big()
    assert "not measured (Not Supported)" in budget.lines()[0]


def test_a_run_that_just_fits_is_taken_and_one_byte_less_refuses_it() -> None:
    total = budget_of(spec_of()).total_bytes
    budget_of(spec_of(), available=measured(total, "a test")).refuse_if_too_big()
    with pytest.raises(BadInput, match="expected a run that fits in"):
        budget_of(spec_of(), available=measured(total - 1, "a test")).refuse_if_too_big()


@pytest.mark.parametrize("gib", [40, 24, 12])
def test_every_knob_does_what_the_refusal_says(gib: int) -> None:
    spec = spec_of(data__seq_len=2048, train__rows=12, train__accumulation=2)
    known = dict(teacher_packed_bytes=4_680_000_000)
    tight = measured(gib * 2**30, "cuMemGetInfo free")
    budget = budget_of(spec, SMALL, SEVEN_B, tight, **known)
    with pytest.raises(BadInput) as caught:
        budget.refuse_if_too_big()
    message = str(caught.value)
    assert "teacher weights" in message and "student activations" in message
    assert budget.savings
    for knob in budget.savings:
        assert knob.text in message
        found = dict(map(parse_set, knob.settings))
        settings = {key.replace(".", "__"): value for key, value in found.items()}
        rebuilt = budget_of(spec, SMALL, SEVEN_B, tight, **known, **settings)
        assert rebuilt.total_bytes == knob.total_bytes
        assert budget.total_bytes - rebuilt.total_bytes == knob.saved_bytes > 0
        assert rebuilt.fits is knob.fits
        changed = spec.with_values(found)
        assert changed.train.rows * changed.train.accumulation == 24
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("`--set") == any(knob.fits for knob in budget.savings)


ROWS_ALONE = ["train.rows", "train.accumulation"]


@given(st.integers(1, 24), st.integers(1, 4), st.integers(18, 60))
@settings(max_examples=40)
def test_the_rows_that_are_proposed_are_the_most_that_fit(
    rows: int, accumulation: int, gib: int
) -> None:
    spec = spec_of(data__seq_len=1024, train__rows=rows, train__accumulation=accumulation)
    available = measured(gib * 2**30, "a test")
    budget = budget_of(spec, SMALL, SEVEN_B, available)
    proposed = [
        k for k in budget.savings if [s.split("=")[0] for s in k.settings] == ROWS_ALONE and k.fits
    ]
    product = rows * accumulation
    fitting = []
    for fewer in range(1, rows):
        if budget.fits is False and product % fewer == 0:
            parts = (f"train.rows={fewer}", f"train.accumulation={product // fewer}")
            changed = spec.with_values(dict(map(parse_set, parts)))
            if budget_of(changed, SMALL, SEVEN_B, available).fits:
                fitting.append(parts)
    assert [knob.settings for knob in proposed] == fitting[-1:]


def test_where_nothing_fits_each_knob_saves_what_it_can() -> None:
    spec = spec_of(data__seq_len=2048, train__rows=12)
    none = measured(1, "a test")
    needed = {}
    for rows in (6, 4, 3, 2, 1):
        settings_of = (f"train.rows={rows}", f"train.accumulation={12 // rows}")
        changed = spec.with_values(dict(map(parse_set, settings_of)))
        needed[settings_of] = budget_of(changed, SMALL, SEVEN_B, none).total_bytes
    found = {knob.settings: knob for knob in budget_of(spec, SMALL, SEVEN_B, none).savings}
    best = min(needed, key=lambda settings_of: needed[settings_of])
    assert found[best].total_bytes == needed[best] and not found[best].fits
    together = list(found)[-1]
    assert len(together) > 2 and found[together].total_bytes < min(needed.values())


# Lengths that no kernel pads: one more token can save a mask for each layer.
@given(
    st.integers(1, 32), st.integers(1, 128).map(lambda n: 32 * n), st.sampled_from(["bf16", "fp32"])
)
@settings(max_examples=40)
def test_more_of_anything_never_needs_less(rows: int, seq_len: int, precision: str) -> None:
    def total(**changes: Any) -> int:
        shape = {"train__rows": rows, "data__seq_len": seq_len}
        return budget_of(spec_of(**(shape | changes)), student__precision=precision).total_bytes

    here = total()
    assert total(train__rows=rows + 1) >= here
    assert total(data__seq_len=seq_len + 32) >= here
    assert total(train__accumulation=2) >= here
    assert total(eval__rows=128) >= here


# On a GPU


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: f"{c.family}-{c.num_key_value_heads}")
def test_autograd_on_the_gpu_holds_what_the_formula_says(
    shape: ModelConfig, precision: str
) -> None:
    major, _ = torch.cuda.get_device_capability()
    shares = precision == "bf16" and major == 9
    # A length that is a multiple of nothing makes the kernels pad.
    for rows, seq_len in ((2, 101), (4, 256)):
        held = held_by_autograd(shape, rows, seq_len, precision, "cuda")
        terms = forward_of(shape, rows, seq_len, precision, "cuda", shares).kept()
        assert sum(terms.values()) == pytest.approx(held, rel=0.02), (rows, seq_len, terms)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("student", "teacher", "precision", "changes"),
    [
        (DEMO_STUDENT, DEMO_TEACHER, "bf16", dict(train__rows=16, data__seq_len=128)),
        (DEMO_STUDENT, DEMO_TEACHER, "fp32", dict(train__rows=16, data__seq_len=512)),
        (DEMO_STUDENT, None, "bf16", dict(train__rows=32, data__seq_len=256, eval__rows=8)),
        (SMALL, replace(SEVEN_B, num_hidden_layers=2), "bf16", dict(train__rows=4)),
        (
            SMALL,
            replace(SEVEN_B, num_hidden_layers=2),
            "bf16",
            dict(train__rows=1, train__accumulation=2, data__seq_len=2048, eval__rows=8),
        ),
        (
            config(1024, 3072, 6, 16, 8, 32000, "qwen3", 128),
            config(2048, 6144, 4, 16, 8, 32000, "qwen3", 128, tied=False),
            "bf16",
            dict(train__rows=8, data__seq_len=1000, loss__chunk_rows=256, eval__rows=8),
        ),
    ],
    ids=["demo", "demo-fp32", "demo-ce", "0.5B-7B-wide", "0.5B-accumulated", "qwen3-chunks"],
)
def test_a_run_on_the_gpu_takes_what_was_predicted(
    student: ModelConfig,
    teacher: ModelConfig | None,
    precision: str,
    changes: dict[str, object],
) -> None:
    spec = spec_of(teacher is not None, **changes)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    drive(
        spec,
        _on_gpu(student, torch.float32),
        None if teacher is None else _on_gpu(teacher, dtype),
        "cuda",
        precision,
    )
    peak = torch.cuda.max_memory_allocated() - before
    major, _ = torch.cuda.get_device_capability()
    budget = budget_of(
        spec,
        student,
        teacher,
        teacher__precision=precision,
        student__precision=precision,
        shares_heads=major == 9,
    )
    assert budget.total_bytes == pytest.approx(peak, rel=0.1), "\n".join(budget.lines())


def _on_gpu(shape: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Random weights made on the device: at these sizes the host's generator takes a minute."""
    with torch.device("meta"):
        decoder = Decoder(shape).to(dtype)
    decoder.to_empty(device="cuda")
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
    return decoder
