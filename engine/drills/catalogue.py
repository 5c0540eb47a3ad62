"""All drills: for each the incident, the short run in which it happens, and the alerts or checks that must name it.
Imports no torch.

A drill starts a run with the public command. Wrong files are made before it (`engine.drills.inputs`); for what
happens to a process, the supervisor starts the trainer through `engine.drills.planting`. Some need neither: a plan that
cannot fit is a setting, and a kill comes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.drills.naming import ALERT, CHECK, EXIT, REFUSAL, Expected
from engine.errors import BadInput

Need = Literal["gpu", "triton", "memory group", "kill counters"]
Act = Literal["none", "kill", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    id: str
    what: str
    happened: str
    """Where the incident was observed."""
    expected: tuple[Expected, ...]
    """Accepted names; one is enough."""
    planted: bool = False
    """Whether `engine.drills.planting` plants the fault of this id in the trainer."""
    altered: bool = False
    """Whether `engine.drills.inputs` alters files: after a store is filled, or a first session has stopped."""
    act: Act = "none"
    """Action from outside the trainer: it is killed, or the run is stopped and resumed."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run in addition to the common ones."""
    needs: tuple[Need, ...] = ()
    memory_limit_bytes: int = 0
    """Memory limit of a control group around the whole run; 0 for none."""
    stored: bool = False
    """Whether the teacher's outputs are stored first, by `engine prepare`."""
    limit_s: float = 90.0
    """Seconds within which the incident must be named."""


_ENDLESS = {"train.steps": 100_000, "checkpoint.every": 0}
_HANGS = _ENDLESS | {"watch.stall_seconds": 1}
_PACE = {"train.steps": 80, "checkpoint.every": 0}
_BACKEND = "--set teacher.backend=dequantized"
_QUANTIZED = {"teacher.path": "QUANTIZED", "teacher.backend": "quantized"}


DRILLS: tuple[Drill, ...] = (
    # Wrong files
    Drill(
        id="identical_teacher",
        what="student and teacher are one model, in files of two dtypes",
        happened="aprender: a smoke default that ran for 25 and 5 hours",
        expected=(Expected(kind=REFUSAL, id="student.path", text="the same values"),),
        altered=True,
        sets={"student.path": "INPUTS/student", "student.config": ""},
    ),
    Drill(
        id="random_teacher",
        what="the teacher has fresh weights",
        happened="Megatron-Bridge #1422: training ran",
        expected=(Expected(CHECK, "teacher_knows_text"),),
        altered=True,
    ),
    Drill(
        id="zero_teacher",
        what="the teacher's matrices are zero",
        happened="Megatron-Bridge #1422: weights that were never read",
        expected=(Expected(CHECK, "weights_alive"),),
        altered=True,
    ),
    Drill(
        id="swapped_tokenizer",
        what="the tokenizer in the teacher's folder is another one with as many tokens",
        happened="trl #4562, unsloth-zoo PR #965: equal width is not sufficient",
        expected=(Expected(CHECK, "teacher_knows_text"),),
        altered=True,
    ),
    Drill(
        id="degenerate_corpus",
        what="each document of the corpus is one word, over and over",
        happened="aprender: the synthetic batches that a first end-to-end run was proved with",
        expected=(Expected(CHECK, "batch_not_degenerate"),),
        altered=True,
        sets={"data.corpus": "INPUTS/corpus"},
    ),
    Drill(
        id="teacher_after_prepare",
        what="the teacher's files are replaced after its outputs were stored",
        happened="caches that are keyed by a path",
        expected=(Expected(kind=REFUSAL, id="teacher.cache"),),
        altered=True,
        stored=True,
    ),
    Drill(
        id="altered_checkpoint",
        what="one bit of the checkpoint that a run is resumed from is flipped",
        happened="aprender #1856: a checkpoint of 200 bytes was what a run of 25 hours left",
        expected=(Expected(REFUSAL, "checkpoint", text="expected sha256"),),
        altered=True,
        act="resume",
        sets=_ENDLESS,
    ),
    # Slow parts, and a process that hangs
    Drill(
        id="slow_first_step",
        what="the first step has more of the teacher's work than the machine does in a minute",
        happened="aprender PMAT-701: no step in 1.5 h, GPU 0 %, CPU 1320 %",
        expected=(
            Expected(ALERT, "cpu_bound_teacher", text=", at ", flip=_BACKEND),
            Expected(ALERT, "stalled_at_start", text="computing at ", flip=_BACKEND),
        ),
        sets={
            **_QUANTIZED,
            "data.seq_len": 1024,
            "data.max_bytes": 1_000_000,
            "train.rows": 96,
            "watch.stall_seconds": 2,
        },
    ),
    Drill(
        # Uses the default limits and no setting, because a load may take minutes.
        id="load_hangs",
        what="the read of the teacher's weights does not come back",
        happened="runs that hang in a load from a network file system that went away",
        expected=(Expected(ALERT, "stalled_at_start", text="waiting to read"),),
        planted=True,
        limit_s=180.0,
    ),
    Drill(
        id="rows_slow_ahead",
        what="the rows of the next step are gathered slowly, while its batch is fetched ahead",
        happened="loaders that are too slow, whose wait was in no step's time",
        expected=(Expected(ALERT, "data_wait", text="waiting for data"),),
        planted=True,
        sets=_PACE,
    ),
    Drill(
        id="log_slow",
        what="every line of the log takes longer to write than its step",
        happened="run folders on a network file system",
        expected=(Expected(ALERT, "unaccounted", text="most in: log"),),
        planted=True,
        sets=_PACE,
    ),
    Drill(
        id="evaluation_slow",
        what="an evaluation takes as long as ten steps, and comes after every fourth",
        happened="evaluations that were set up for a short run, or that generate token by token",
        expected=(Expected(ALERT, "seldom_training", text="most of it into evaluations"),),
        sets=_PACE | {"eval.every": 4, "eval.rows": 2000, "data.heldout_fraction": 0.5, "data.max_bytes": 1_000_000},
        limit_s=180.0,
    ),
    Drill(
        id="loader_stalls",
        what="the loader waits for a worker that has hung",
        happened="loaders whose worker hangs or died, with their pipe still open",
        expected=(Expected(ALERT, "stalled", text="waiting to read"),),
        planted=True,
        sets=_HANGS,
    ),
    Drill(
        id="deadlock",
        what="two threads wait for each other's lock",
        happened="aprender #2249: a deadlock in training",
        expected=(Expected(ALERT, "stalled", text="waiting for a lock"),),
        planted=True,
        sets=_HANGS,
    ),
    Drill(
        id="cuda_wait",
        what="the host waits for a kernel that does not end",
        happened="hung collectives and kernels; GPU 100 % busy and no step",
        expected=(Expected(ALERT, "stalled", text="waiting for the GPU"),),
        planted=True,
        sets=_HANGS,
        needs=("gpu",),
    ),
    # Kills, memory, caches
    Drill(
        id="killed_from_outside",
        what="SIGKILL from outside",
        happened="aprender #1869: a `timeout` sent it, and the report said out of memory",
        expected=(Expected(EXIT, "KILLED_EXTERNAL", text="not the kernel's OOM killer"),),
        act="kill",
        sets=_ENDLESS,
        needs=("kill counters",),
    ),
    Drill(
        id="memory_leak",
        what="something of each step is kept until the control group is full",
        happened="the OOM kill that aprender #1869 took an exit 137 for",
        expected=(
            Expected(EXIT, "OOM_MEMCG", text="because its control group ran out of memory"
            ),
        ),
        planted=True,
        sets=_ENDLESS,
        needs=("memory group", "kill counters"),
        memory_limit_bytes=3 << 29,
    ),
    Drill(
        id="plan_that_cannot_fit",
        what="a run that needs more memory than there is",
        happened="aprender SPEC-BLACKWELL-FIX-001: 60 GB of workspace a block, met at upload",
        expected=(Expected(REFUSAL, "memory", text="expected a run that fits in"),),
        sets={"train.rows": 2_000_000},
    ),
    Drill(
        id="stale_body",
        what="the cache on disk holds a kernel that was compiled for another constant",
        happened="aprender: a body of 1e-5 under the key of 1e-6; every count was right",
        expected=(Expected(REFUSAL, "kernel", text="found another"),),
        planted=True,
        sets=_QUANTIZED,
        needs=("gpu", "triton"),
    ),
)  # fmt: skip


def drill(id: str) -> Drill:
    """Return the drill of that id. Raises BadInput."""
    by_id = {drill.id: drill for drill in DRILLS}
    if id not in by_id:
        import difflib

        near = difflib.get_close_matches(id, by_id, n=1)
        raise BadInput.expected(
            "drill",
            id,
            "an id of `engine drill --list`",
            "no drill with this id" + (f"; did you mean {near[0]}?" if near else ""),
        )
    return by_id[id]
