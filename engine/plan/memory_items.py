"""What a run will need on its device, item by item: the arithmetic of a `MemoryBudget`.

Letters: P student parameters, V and D its vocabulary and width, W and E the teacher's, N = B*T
tokens of one forward pass, C rows of one chunk of the loss.

Of the trainer: weights fp32, 4 P; AdamW's moments, 8 P, from the first step on; gradients, 4 P,
from the end of the backward pass to the start of the next step, so they are beside an evaluation
and not beside the activations, unless passes are accumulated. A tied embedding has two gradients,
of the head and of the lookup, which are summed last: 8 V D more then. The fused AdamW step and the
clipping work in place.

Of the loss: two buffers (C, V) in fp32, four with a teacher, and one in bf16 for the products; of the
fused form one, two with a teacher, and one in the dtype of the products for each of some chunks. The
gradients of the hidden states, 4 N D, and of the head, 4 V D, which becomes the weights' gradient.

Bytes are those asked for: torch rounds each tensor up to 512 bytes, and what is free may lie in
pieces that are too small.

Not covered: the host's memory of a run on a GPU; on a CPU, the interpreter, the libraries and the
corpus (a few hundred MiB); what loading a model holds for a moment, one tensor of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.models.config import ModelConfig, count_parameters
from engine.models.packed_size import SCRATCH_LIMIT_BYTES
from engine.plan.activations import (
    Forward,
    linear_sizes,
    linear_weights,
    query_width,
    shared_width,
)
from engine.plan.budget import PHASES, BudgetItem
from engine.plan.memory_plan import (
    EVAL_CHUNK_ROWS,
    EVAL_ROWS_AT_ONCE,
    FUSED_HELD,
    MemoryPlan,
)
from engine.plan.memory_ranks import rank_items, shared_teacher
from engine.spec.divergences import DIVERGENCES
from engine.teachers.store.manifest import HIDDEN, Identity
from engine.units import format_bytes, format_count

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""What torch gives cuBLAS in each thread that launches products: the main one and autograd's."""

_TEACHER_EVALUATION, _TEACHER, _LOSS, _BACKWARD, _LAST, _EVALUATION = PHASES
_STEP = (_TEACHER, _LOSS, _BACKWARD)


def items_of(plan: MemoryPlan) -> tuple[BudgetItem, ...]:
    """Every item that is not empty."""
    parts = (_teacher_items, _student_items, rank_items, _loss_items, _evaluation_items)
    return tuple(item for part in parts for item in part(plan) if item.bytes)


def total_bytes(plan: MemoryPlan) -> int:
    """What the phase that needs most needs."""
    items = items_of(plan)
    return max(sum(item.bytes for item in items if phase in item.phases) for phase in PHASES)


def _teacher_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    config, each = plan.teacher, plan.teacher_each
    if config is None:
        return
    if plan.stored is not None:
        yield from _stored_items(plan, config, plan.stored)
        return
    yield from shared_teacher(plan, config, _teacher_weights(plan, config))
    if plan.quantized:
        sizes = linear_sizes(config)
        largest = max(sizes["q"] + sizes["k"] + sizes["v"], sizes["gate"] + sizes["up"])
        yield BudgetItem(
            name="dequantisation scratch",
            bytes=min(each * max(largest, sizes["down"]), SCRATCH_LIMIT_BYTES),
            how=f"gate and up of a layer, {format_count(largest)} x {each} bytes, at most "
            f"{format_bytes(SCRATCH_LIMIT_BYTES)}",
            lasting=True,
        )
    if plan.teaching is None:
        return
    forward = plan.teacher_pass(config, plan.spec.train.rows)
    yield BudgetItem(
        name="teacher temporaries",
        bytes=forward.passing(),
        how=f"the widest moment of a layer, {format_count(plan.tokens)} tokens"
        + (", on a stream of its own" if plan.prefetches else ""),
        phases=PHASES[1:] if plan.prefetches else (_TEACHER,),
        # What one stream has freed, no other is given.
        lasting=plan.prefetches,
    )
    if plan.prefetches:
        yield BudgetItem(
            name="prefetched hidden states",
            bytes=each * plan.tokens * config.hidden_size,
            how="of the next batch, beside those of this one",
            phases=(_LAST, _EVALUATION),
        )
    yield BudgetItem(
        name="teacher hidden states",
        bytes=each * plan.tokens * config.hidden_size,
        how=f"{format_count(plan.tokens)} tokens x {config.hidden_size} x {each} bytes",
        phases=(_LOSS, _BACKWARD, _LAST),
    )


def _teacher_weights(plan: MemoryPlan, config: ModelConfig) -> BudgetItem:
    if plan.quantized:
        assert plan.teacher_packed_bytes is not None
        return BudgetItem(
            name="teacher weights",
            bytes=plan.teacher_packed_bytes,
            how="blocks as they are in the file, and the rest as floats",
            lasting=True,
        )
    if plan.teacher_precision == "fp8":
        return _fp8_weights(config, plan.teacher_each)
    parameters = count_parameters(config)
    return BudgetItem(
        name="teacher weights",
        bytes=plan.teacher_each * parameters,
        how=f"{format_count(parameters)} x {plan.teacher_each} bytes",
        lasting=True,
    )


def _fp8_weights(config: ModelConfig, each: int) -> BudgetItem:
    """Matrices of the layers: a byte a number, and a scale in fp32 a row; all else as it is computed."""
    matrices = linear_weights(config)
    rest = count_parameters(config) - matrices
    query, shared = query_width(config), shared_width(config)
    rows = query + 2 * shared + 2 * config.hidden_size + 2 * config.intermediate_size
    return BudgetItem(
        name="teacher weights",
        bytes=matrices + 4 * config.num_hidden_layers * rows + each * rest,
        how=f"{format_count(matrices)} x 1 byte in the layers, with a scale a row, "
        f"{format_count(rest)} x {each} bytes beside them",
        lasting=True,
    )


def _stored_items(plan: MemoryPlan, config: ModelConfig, stored: Identity) -> Iterator[BudgetItem]:
    """No body: it is loaded for a row that is not stored, and is not in the plan."""
    head = config.vocab_size * config.hidden_size
    if stored.form == HIDDEN:
        yield BudgetItem(
            name="teacher head",
            bytes=plan.teacher_each * head,
            how=f"{format_count(head)} x {plan.teacher_each} bytes; in blocks, less",
            lasting=True,
        )
    # On a GPU those of the next batch arrive meanwhile, in memory that nothing else is given.
    yield BudgetItem(
        name="teacher outputs",
        bytes=round(stored.token_bytes * plan.tokens) * (2 if plan.on_gpu else 1),
        how=f"{format_count(plan.tokens)} tokens x {stored.token_bytes:,.0f} bytes: {stored.words}"
        + (", and the next batch's" if plan.on_gpu else ""),
        phases=PHASES[1:] if plan.on_gpu else (_LOSS, _BACKWARD, _LAST),
        lasting=plan.on_gpu,
    )


def _student_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    parameters, layers = count_parameters(plan.student), plan.student.num_hidden_layers
    count, tokens = format_count(parameters), plan.tokens
    of_all = f", shared by {plan.ranks} GPUs" if plan.ranks > 1 else ""
    yield BudgetItem(
        name="student weights",
        bytes=plan.share(4 * parameters),
        how=f"{count} x 4 bytes{of_all}",
        lasting=True,
    )
    yield BudgetItem(
        name="AdamW moments",
        bytes=plan.share(8 * parameters),
        how=f"{count} x 2 x 4 bytes{of_all}, from the first step on",
        phases=PHASES[1:],
        lasting=True,
    )
    accumulated = plan.spec.train.accumulation > 1
    yield BudgetItem(
        name="gradients",
        bytes=plan.share(4 * parameters),
        how=f"{count} x 4 bytes{of_all}, "
        + ("kept between passes" if accumulated else "from the backward pass on"),
        phases=(*_STEP, _LAST, _EVALUATION) if accumulated else (_LAST, _EVALUATION),
    )
    kept = plan.student_pass(plan.spec.train.rows).kept()
    largest = sorted(kept.items(), key=lambda term: -term[1])[:3]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    yield BudgetItem(
        name="student activations",
        bytes=sum(kept.values()),
        how=f"{format_count(tokens)} tokens, {layers} layers: {words}, ...",
        phases=PHASES[1:] if plan.graphs else (_LOSS, _BACKWARD),
        lasting=plan.graphs,
    )
    if plan.graphs:
        ends = 1 if plan.student.tie_word_embeddings else 2
        inside = parameters - ends * plan.student.vocab_size * plan.student.hidden_size
        yield BudgetItem(
            name="gradients in the graph",
            bytes=4 * inside,
            how=f"{format_count(inside)} x 4 bytes, kept from step to step",
            phases=_STEP,
        )
    yield BudgetItem(
        name="tokens of a pass",
        bytes=3 * 8 * tokens,
        how=f"ids, documents and labels of {format_count(tokens)} tokens, 8 bytes each",
        phases=(*_STEP, _LAST),
    )
    if plan.on_gpu:
        yield BudgetItem(
            name="cuBLAS workspaces",
            bytes=2 * CUBLAS_WORKSPACE_BYTES,
            how=f"{format_bytes(CUBLAS_WORKSPACE_BYTES)} for each of the two threads",
            lasting=True,
        )


def _loss_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    student, tokens = plan.student, plan.tokens
    width, head = student.hidden_size, student.vocab_size * student.hidden_size
    chunk, buffers = plan.chunk_rows, _loss_buffers(plan)
    # For the products: a copy of the eager form's, and the fused form's own.
    narrow = plan.each if plan.fused_loss or (plan.on_gpu and plan.each == 2) else 0
    held = min(FUSED_HELD * chunk, tokens) if plan.fused_loss else chunk
    yield BudgetItem(
        name="loss workspace",
        bytes=student.vocab_size * (4 * buffers * chunk + narrow * held),
        how=f"{buffers} x {format_count(chunk)} rows x {student.vocab_size} x 4 bytes"
        + (f", and {format_count(held)} rows x {narrow} bytes" if narrow else ""),
        phases=(_LOSS,),
    )
    yield BudgetItem(
        name="operands of the loss",
        bytes=_operands(plan),
        how="labelled hidden states and heads in the dtype of the products",
        phases=(_LOSS,),
    )
    yield BudgetItem(
        name="student hidden states",
        bytes=4 * tokens * width,
        how=f"{format_count(tokens)} tokens x {width} x 4 bytes",
        phases=(_LOSS, _BACKWARD, _LAST),
    )
    yield BudgetItem(
        name="gradients of the loss",
        bytes=4 * (head + tokens * width),
        how=f"4 bytes x (head {format_count(head)} + hidden {format_count(tokens * width)})",
        phases=(_LOSS, _BACKWARD),
    )
    narrow_each = plan.each if plan.each < 4 else 0
    scaled = tokens * width * (4 + narrow_each)
    # One layer: two gradients of feed-forward width, the residual's, and a matrix's in both
    # dtypes. The hidden states' gradient is gone by then.
    matrix = linear_sizes(student)["down"] * (4 + narrow_each)
    forward = plan.student_pass(plan.spec.train.rows)
    inside = 2 * plan.each * tokens * student.intermediate_size + matrix + forward.again()
    yield BudgetItem(
        name="backward temporaries",
        bytes=max(scaled, inside + plan.each * tokens * width),
        how="the larger of a second gradient of the hidden states and a layer's gradients",
        phases=(_BACKWARD,),
    )
    # Tied: the head's and the lookup's, beside their sum, which is the gradient or is added to it.
    again = 2 * student.tie_word_embeddings + (plan.spec.train.accumulation > 1)
    kept = sum(forward.kept().values())
    first = inside + (4 + plan.each) * tokens * width + kept // student.num_hidden_layers
    yield BudgetItem(
        name="end of backward",
        bytes=max(4 * head * again + 4 * tokens * width, first),
        how="the larger of the embedding's gradients not yet summed and the first layer's",
        phases=(_LAST,),
    )


def _loss_buffers(plan: MemoryPlan) -> int:
    """Of logits' size in fp32, as the forms of the loss have them (`engine.loss.types`)."""
    sparse = plan.stored is not None and plan.stored.form != HIDDEN
    if plan.fused_loss:
        return 1 if plan.teaching is None or sparse else 2
    if plan.teaching is None:
        return 2
    if sparse:
        return 3
    return DIVERGENCES[plan.spec.loss.divergence].buffers


def _operands(plan: MemoryPlan) -> int:
    """Hidden states, with and without those that have no label, and copies of the heads.

    On a CPU, products are in fp32 whatever the dtype of what is multiplied.
    """
    vocabulary, tokens, width = plan.student.vocab_size, plan.tokens, plan.student.hidden_size
    each = plan.each
    total = tokens * width * (each if each == 4 else 2 * each)
    if plan.on_gpu and each < 4:
        total += each * vocabulary * width
    elif each < 4:
        total += 4 * tokens * width
    if (teacher := plan.teaching) is not None:
        total += plan.teacher_each * tokens * teacher.hidden_size
        if not plan.on_gpu and plan.teacher_each < 4:
            total += 4 * (vocabulary + tokens) * teacher.hidden_size
    return total


def _evaluation_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    rows = min(EVAL_ROWS_AT_ONCE, plan.spec.eval.rows)
    how = f"{rows} rows at once, logits of {EVAL_CHUNK_ROWS} tokens in fp32, twice"
    # Autocast keeps no copies when there is nothing to differentiate: one weight at a time.
    cast = plan.each * max(linear_sizes(plan.student).values()) if plan.each < 4 else 0
    yield BudgetItem(
        name="evaluation workspace",
        bytes=_workspace(plan, plan.student_pass(rows)) + cast,
        how=how,
        phases=(_EVALUATION,),
    )
    if plan.teacher is None or plan.stored is not None:
        return
    yield BudgetItem(
        name="teacher evaluation workspace",
        bytes=_workspace(plan, plan.teacher_pass(plan.teacher, rows)),
        how=how,
        phases=(_TEACHER_EVALUATION,),
    )
    if plan.teacher_each < 4 and not plan.on_gpu and not plan.quantized:
        head = plan.teacher.vocab_size * plan.teacher.hidden_size
        yield BudgetItem(
            name="teacher head in fp32",
            bytes=4 * head,
            how=f"{format_count(head)} x 4 bytes: a CPU has no product of bf16 with fp32 sums",
            phases=(_TEACHER_EVALUATION,),
        )


def _workspace(plan: MemoryPlan, forward: Forward) -> int:
    """The larger of the forward pass, beside what the batch before it left, and the logits."""
    config = forward.config
    logits = 4 * min(EVAL_CHUNK_ROWS, forward.tokens) * config.vocab_size
    # Of every token, and of those with a label; a CPU has these in fp32.
    each = forward.residual_bytes
    hidden = forward.tokens * config.hidden_size * (2 * each if plan.on_gpu else each + 4)
    left = hidden + logits if plan.spec.eval.rows > EVAL_ROWS_AT_ONCE else 0
    return max(forward.passing() + left, hidden + 2 * logits)
