"""The budget of a run's memory, and which settings would make a smaller one.

`available` must be read when CUDA has begun on the device: its context, some hundred MiB, is then no
longer in what is free, and is no item of the budget.

Each knob has a ladder of settings, from the mildest change to the strongest. Fewer rows go with more
accumulation, so that the optimizer sees the same batch; it has to keep its gradients between passes
then, which can cost more than it saves. No knob changes what is learned but for rounding, except
`eval.rows`, which changes how well the result is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.machine.reading import Reading
from engine.models.config import ModelConfig
from engine.plan.budget import Knob, MemoryBudget
from engine.plan.memory_items import items_of, total_bytes
from engine.plan.memory_plan import EVAL_ROWS_AT_ONCE, SMALLEST_CHUNK_ROWS, MemoryPlan
from engine.spec import RunSpec
from engine.teachers.store.manifest import Identity

_Settings = tuple[str, ...]


def predict(
    spec: RunSpec,
    *,
    teacher: ModelConfig | None,
    teacher_packed_bytes: int | None,
    backend: str,
    teacher_precision: str,
    student_precision: str,
    student: ModelConfig,
    device: str,
    available: Reading,
    shares_heads: bool = True,
    compiled: bool = False,
    packed: bool = False,
    teacher_packed: bool = False,
    checkpointing: bool = False,
    prefetches: bool = False,
    reshard: bool = True,
    teacher_shard: bool = False,
    teacher_packed_layers: tuple[int, ...] = (),
    stored: Identity | None = None,
    fused_loss: bool = False,
    graphs: bool = False,
) -> MemoryBudget:
    """The budget of a run on `device`, `cpu` or `cuda`, in precisions already chosen.

    `teacher_packed_bytes` is what the weights of a quantized teacher take, without its scratch;
    given beside the dequantized backend, it is what the other one would need. `shares_heads`:
    whether bf16 attention with a mask takes fewer key/value heads than query heads on this GPU
    (`engine.models.decoder`: capability 9), without copying them. The last four say how layers are
    run (`engine.models.running`). `reshard`: whether ranks give gathered layers back before their
    backward pass. `teacher_shard`: whether they share the teacher's layers, of which those in blocks take
    `teacher_packed_layers` bytes each.
    """
    plan = MemoryPlan(
        spec=spec,
        teacher=teacher if backend != "none" else None,
        teacher_packed_bytes=teacher_packed_bytes,
        quantized=backend == "quantized",
        teacher_precision=teacher_precision,
        student_precision=student_precision,
        student=student,
        device=device,
        shares_heads=shares_heads,
        compiled=compiled,
        packed=packed,
        teacher_packed=teacher_packed,
        checkpointing=checkpointing,
        graphs=graphs,
        fused_loss=fused_loss,
        prefetches=prefetches,
        ranks=spec.compute.gpus,
        reshard=reshard,
        teacher_shard=teacher_shard,
        teacher_packed_layers=teacher_packed_layers,
        stored=stored if backend == "cached" else None,
    )
    budget = MemoryBudget(device=device, items=items_of(plan), available=available)
    if budget.fits is not False or available.number is None:
        return budget
    return replace(budget, knobs=_knobs(plan, available.number))


def _knobs(plan: MemoryPlan, available: float) -> tuple[Knob, ...]:
    """Single changes that need less, those that fit first; where none fits, several at once."""
    total = total_bytes(plan)

    def knob(settings: _Settings, needed: int) -> Knob:
        return Knob(
            settings=settings,
            total_bytes=needed,
            saved_bytes=total - needed,
            fits=needed <= available,
        )

    singles = [knob(*_mildest(plan, ladder, available)) for ladder in _ladders(plan) if len(ladder)]
    singles = [single for single in singles if single.saved_bytes > 0]
    singles.sort(key=lambda single: (not single.fits, -single.saved_bytes))
    if len(singles) < 2 or singles[0].fits:
        return tuple(singles)
    together: _Settings = ()
    needed = total
    for ladder in _ladders(plan):
        if needed <= available or not ladder:
            continue
        settings, less = _mildest(_changed(plan, together), ladder, available)
        if less < needed:
            together, needed = (*together, *settings), less
    return (*singles, knob(together, needed))


def _mildest(plan: MemoryPlan, ladder: list[_Settings], available: float) -> tuple[_Settings, int]:
    """The first step that fits and what it needs; where none does, the step that needs least."""
    steps = [(settings, total_bytes(_changed(plan, settings))) for settings in ladder]
    least = min(steps, key=lambda step: step[1])
    return next((step for step in steps if step[1] <= available), least)


def _ladders(plan: MemoryPlan) -> Iterator[list[_Settings]]:
    spec = plan.spec
    loaded = plan.teacher is not None and plan.stored is None
    if loaded and not plan.quantized and plan.teacher_precision != "fp8":
        if plan.teacher_packed_bytes is not None:
            yield [("teacher.backend=quantized",)]
        if plan.teacher_precision != "bf16":
            yield [("teacher.precision=bf16",)]
    if loaded and plan.ranks > 1 and not plan.teacher_shard:
        yield [("teacher.shard=on",)]
    batch = spec.train.rows * spec.train.accumulation
    yield [
        (f"train.rows={rows}", f"train.accumulation={batch // rows}")
        for rows in range(spec.train.rows - 1, 0, -1)
        if batch % rows == 0
    ]
    powers = [1 << power for power in range(plan.chunk_rows.bit_length(), 0, -1)]
    yield [
        (f"loss.chunk_rows={rows}",)
        for rows in powers
        if SMALLEST_CHUNK_ROWS <= rows < plan.chunk_rows
    ]
    if plan.student_precision != "bf16":
        yield [("student.precision=bf16",)]
    if not plan.checkpointing:
        yield [("student.checkpointing=on",)]
    at_once = min(spec.eval.rows, EVAL_ROWS_AT_ONCE)
    yield [(f"eval.rows={rows}",) for rows in (8, 4, 2, 1) if rows < at_once]


def _changed(plan: MemoryPlan, settings: _Settings) -> MemoryPlan:
    """The plan with other settings, each as on the command line."""
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        match key:
            case "teacher.backend":
                plan = replace(plan, quantized=True)
            case "teacher.precision":
                plan = replace(plan, teacher_precision=value)
            case "teacher.shard":
                plan = replace(plan, teacher_shard=True)
            case "student.precision":
                plan = replace(plan, student_precision=value)
            case "student.checkpointing":
                plan = replace(plan, checkpointing=True)
            case _:
                changed = replace(getattr(plan.spec, section), **{name: int(value)})
                plan = replace(plan, spec=replace(plan.spec, **{section: changed}))
    return plan
