"""Whether each part of a step takes about what its arithmetic needs on this machine.

    needed = FLOPs / this machine's matmul rate + bytes / its copy rate + launches x LAUNCH_S

The rates are measured in the run's own dtype, once the run has warmed up (`engine.train.machine_rates`). A part of many
small operations takes some times its arithmetic. One that takes TIMES as long, or less but several times what the
other parts take of theirs, does something else than its arithmetic: another kernel, another device, a loop over rows, a
conversion of all weights. Fetching the rows of a step has no arithmetic: it is compared with how long other code takes
to read the same rows.

The machine is measured again before a part or the machine itself is accused, and where a part is, the lower rates
count: where somebody else uses it, the matmul is as slow as the part.
"""

# Shapes: N tokens of a step

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.log.events import DATA, PartsMeasured, StepDone
from engine.machine.accounts import Accounts, look
from engine.models.config import ModelConfig, count_parameters
from engine.plan.activations import linear_sizes, linear_weights, query_width
from engine.teachers.protocol import KnowsRows, Prefetches
from engine.teachers.store.teacher import CachedTeacher
from engine.train.machine_rates import ROUNDS, KeptRates, Rates, measure, others_want_the_cpus
from engine.train.trainer import Trainer

TIMES = 10.0
TIMES_BESIDE, OTHERS_TIMES = 4.0, 3.0
"""A part that takes less of its own is slow where it takes so many times what the others take of theirs."""
LEAST_SHARE, LEAST_S = 0.1, 0.02
"""Of the step: a smaller part is not worth fixing."""
DATA_TIMES, LEAST_DATA_SHARE = 5.0, 0.05
"""Rows should take almost nothing, and no others may delay them."""
EVALUATED_TIMES, EVALUATED_S = 4.0, 0.5
"""Times what a step takes for the same, and seconds more, that an evaluation may take: its batches are others."""
WINDOW = 8
"""Steps whose median is taken."""
SLOWER = 0.4
"""Share of the usual rates below which the machine is slow."""
OF_STUDENT = frozenset({"student", "loss", "backward", "optimizer"})
OF_MATMULS = frozenset({"student", "loss", "backward", "teacher"})
ALL_PARTS = OF_STUDENT | {"teacher"}
FIRST = 12
"""The step of a session after which it is looked for the first time; then after ten times as many."""
LAUNCH_S = {"cuda": 10e-6, "cpu": 20e-6}
LAUNCHES = 40
"""Operations of one layer's forward pass where none are fused, without its matmuls."""
OF_ATTENTION = 2
"""Matmuls of it, of which a kernel makes one operation."""
OF_MASK = 4
"""Times that each number of a mask is read or written."""
OF_SOFTMAX = 12
"""Times that each logit is read or written for a softmax, a loss and its gradient where none are fused."""
OF_ADAMW = 7
"""Numbers of 4 bytes that an update reads and writes for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a part needs of a step, at least."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: float = 0.0
    masked_flops: float = 0.0
    """Of attention to tokens that are masked, which a kernel may skip."""
    matmuls: float = 0.0
    mask_numbers: float = 0.0
    """Of the masks of attention, where no kernel makes them."""


def arithmetic(
    student: ModelConfig,
    teacher: ModelConfig | None,
    tokens: int,
    seq_len: int,
    passes: int,
    *,
    stored: bool = False,
    chunk_rows: int = 0,
) -> dict[str, Arithmetic]:
    """Return what each part of a step of N tokens needs; a step has `passes` micro-batches, of which the loss takes
    `chunk_rows` tokens at a time. A teacher whose outputs are `stored` is not run: at most its hidden states are read.
    """
    layers = forward_pass(student, tokens, seq_len, passes)
    head = 2.0 * student.vocab_size * student.hidden_size * tokens
    parameters = count_parameters(student)
    found = {
        "student": layers,
        # Two matmuls for each of the forward pass, which is made once more where activations are recomputed.
        "backward": Arithmetic(
            flops=3 * layers.flops,
            moved_bytes=2 * layers.moved_bytes + 4 * parameters,
            launches=3 * layers.launches,
            masked_flops=3 * layers.masked_flops,
            mask_numbers=3 * layers.mask_numbers,
            matmuls=3 * layers.matmuls,
        ),
        "optimizer": Arithmetic(moved_bytes=4.0 * OF_ADAMW * parameters, launches=LAUNCHES),
    }
    if teacher is not None:
        read = Arithmetic(
            moved_bytes=8.0 * tokens * teacher.hidden_size, launches=LAUNCHES * passes
        )
        found["teacher"] = read if stored else forward_pass(teacher, tokens, seq_len, passes)
        head += 2.0 * student.vocab_size * teacher.hidden_size * tokens / 3
    # Logits, and the gradients of hidden states and head; softmaxes of fp32 logits, each read and written.
    logits = 4.0 * tokens * student.vocab_size * (1 if teacher is None else 2)
    chunks = passes * -(-tokens // passes // chunk_rows) if chunk_rows else math.inf
    found["loss"] = Arithmetic(
        flops=3 * head,
        moved_bytes=OF_SOFTMAX * logits,
        launches=LAUNCHES * (chunks if chunk_rows else 4 * passes),
        matmuls=chunks * (3 if teacher is None else 4),
    )
    return found


def forward_pass(config: ModelConfig, tokens: int, seq_len: int, passes: int) -> Arithmetic:
    """Return what the layers of a model need for N tokens, in `passes` batches."""
    attention = 2.0 * seq_len * query_width(config) * config.num_hidden_layers
    weights = linear_weights(config)
    return Arithmetic(
        flops=tokens * (2.0 * weights + attention),
        moved_bytes=4.0 * weights * passes
        + 4.0 * LAUNCHES * tokens * config.hidden_size * config.num_hidden_layers,
        launches=LAUNCHES * config.num_hidden_layers * passes,
        masked_flops=tokens * attention,
        mask_numbers=float(OF_MASK * tokens * seq_len),
        matmuls=(len(linear_sizes(config)) + OF_ATTENTION) * config.num_hidden_layers * passes,
    )


class PartTimes:
    """Compares the parts of the newest steps with what they need."""

    def __init__(
        self,
        trainer: Trainer,
        student: ModelConfig,
        teacher: ModelConfig | None,
        seq_len: int,
        waits: frozenset[str] = frozenset(),
        read: Callable[[int, int], object] | None = None,
    ) -> None:
        """`waits` are the parts in which this rank waits for others: they are not judged. `read(position, rows)` reads
        the rows that a step trains on, by other code than the loader's."""
        # A teacher may be asked, or its outputs be read, as soon as the rows are there.
        self._read = None if isinstance(trainer.teacher, KnowsRows | Prefetches) else read
        self._trainer, self._begun_at, self._waits = trainer, trainer.step, waits
        self._models, self._seq_len = (student, teacher), seq_len
        self._next = FIRST
        self._steps: deque[StepDone] = deque(maxlen=WINDOW)
        self._since = look()
        """What was spent before the steps that are looked at."""

    def due(self, step: int) -> bool:
        return step - self._begun_at == self._next

    def look(self, step: StepDone) -> PartsMeasured | None:
        """Take note of a step, and after one that is due say what its parts take; None otherwise."""
        self._steps.append(step)
        if self.due(step.step + WINDOW):
            self._since = look()
        if not self.due(step.step):
            return None
        self._next *= 10
        seconds = {
            part: statistics.median(one.phases.get(part) or 0.0 for one in self._steps)
            for part in step.phases
        }
        step_s = statistics.median(one.step_s or 0.0 for one in self._steps)
        tokens = (step.tokens or 0) // self._trainer.ranks.world
        passes = self._trainer.train.accumulation
        arithmetics = {
            part: need
            for part, need in arithmetic(
                *self._models,
                tokens,
                self._seq_len,
                passes,
                stored=isinstance(self._trainer.teacher, CachedTeacher),
            ).items()
            if part not in self._waits
        }
        if not seconds or not tokens or not arithmetics:
            return None
        rates, usual = self._measured()
        reading_s = self._reading_s(step)

        def needed() -> dict[str, float]:
            found = {part: self._needed(need, rates) for part, need in arithmetics.items()}
            return found | ({} if reading_s is None else {DATA: reading_s})

        slow = _slow(needed(), seconds, step_s)
        if slow:
            rates = rates.lower(measure(self._trainer.device, self._trainer.dtype))
            slow = _slow(needed(), seconds, step_s)
        return PartsMeasured(
            step=step.step,
            seconds={part: seconds[part] for part in needed() if part in seconds},
            needed=needed(),
            slow=slow,
            matmul_flops_per_s=rates.flops,
            copy_bytes_per_s=rates.bytes,
            usual_flops_per_s=None if usual is None else usual.flops,
            usual_bytes_per_s=None if usual is None else usual.bytes,
        )

    def _measured(self) -> tuple[Rates, Rates | None]:
        """Measure the machine, twice where it is slower than usual, and keep what was measured. Return that and what is
        usual: None where others want the CPUs, and then nothing is kept."""
        device, dtype = self._trainer.device, self._trainer.dtype
        rates = measure(device, dtype)
        if device.type == "cpu" and others_want_the_cpus(self._since):
            return rates, None
        kept = KeptRates(device, dtype)
        usual = kept.usual
        if usual is not None and (
            rates.flops < SLOWER * usual.flops or rates.bytes < SLOWER * usual.bytes
        ):
            again = measure(device, dtype)
            rates = Rates(max(rates.flops, again.flops), max(rates.bytes, again.bytes))
        kept.add(rates)
        return rates, usual

    def _reading_s(self, step: StepDone) -> float | None:
        """Return the shortest time in which the rows of a step are read by other code, and what a few operations take
        for each pass; None where nobody reads them."""
        if self._read is None or step.position is None or step.rows is None:
            return None
        times, passes = [], self._trainer.train.accumulation
        for _ in range(ROUNDS):
            begun_s = time.perf_counter()
            self._read(step.position - step.rows, step.rows)
            times.append(time.perf_counter() - begun_s)
        return min(times) + LAUNCHES * LAUNCH_S[self._trainer.device.type] * passes

    def _needed(self, need: Arithmetic, rates: Rates) -> float:
        launching_s = need.launches * LAUNCH_S[self._trainer.device.type]
        return rates.seconds(need.flops, need.moved_bytes) + launching_s


def evaluated_slowly(
    step: StepDone | None, subject: str, seconds: float, tokens: int, since: Accounts | None = None
) -> str:
    """Say that evaluating `tokens` takes much longer than a step takes for model and loss of as many; empty
    when it does not, when no step is known, or while others want the CPUs, as `since` the evaluation began."""
    model = "teacher" if subject == "teacher" else "student"
    if step is None or not step.tokens or not step.phases.get(model):
        return ""
    each_s = (step.phases[model] + step.phases.get("loss", 0.0)) / step.tokens
    if seconds < EVALUATED_TIMES * each_s * tokens + EVALUATED_S or others_want_the_cpus(since):
        return ""
    return (
        f"{subject}: evaluating {tokens:,} tokens took {seconds:.2f} s, a step takes {each_s * tokens:.2f} s for the "
        "forward pass and loss of as many: something else is done there"
    )


def _slow(needed: dict[str, float], seconds: dict[str, float], step_s: float) -> list[str]:
    """Return the parts that take many times what they need, alone or beside the others, and a share of the step that is
    worth fixing."""
    least_s = {DATA: LEAST_DATA_SHARE * step_s}
    usual_s = max(LEAST_S, LEAST_SHARE * step_s)
    times = {part: seconds.get(part, 0.0) / max(need_s, 1e-9) for part, need_s in needed.items()}

    def allowed(part: str) -> float:
        if part == DATA:
            return DATA_TIMES
        # What slows the machine slows all parts.
        others = [times[one] for one in times.keys() & OF_MATMULS - {part}]
        if len(others) < 2:
            return TIMES
        return min(TIMES, max(TIMES_BESIDE, OTHERS_TIMES * statistics.median(others)))

    return [
        part
        for part in needed
        if seconds.get(part, 0.0) >= least_s.get(part, usual_s) and times[part] >= allowed(part)
    ]
