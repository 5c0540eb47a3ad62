"""Every drill: a defect, the short run it is planted in, and what must name it. No torch.

A drill starts a run with the public command and has the supervisor start the trainer through
`engine.drills.plant`. Some defects need nothing planted: a plan that cannot fit is a setting, and a kill
comes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.drills.defects_training import BETWEEN_PARTS
from engine.drills.defects_training import DEFECTS as TRAINING
from engine.drills.naming import ALERT, CHECK, EXIT, REFUSAL, Expected
from engine.drills.planting import Defect
from engine.errors import BadInput

Need = Literal["gpu", "triton", "memory group", "kill counters"]
Act = Literal["none", "kill", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    id: str
    what: str
    happened: str
    expected: tuple[Expected, ...]
    """Accepted names; one is enough."""
    planted: bool = True
    """Whether the defect of this id is planted in the trainer."""
    act: Act = "none"
    """What is done from outside: the trainer is killed, or a healthy run is stopped and resumed with the
    defect."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run in addition to the common ones."""
    needs: tuple[Need, ...] = ()
    memory_limit_bytes: int = 0
    """Memory limit of a control group around the whole run; 0 for none."""
    stored: bool = False
    """Whether the teacher's outputs are stored first, by `engine prepare`, and read in the run."""
    from_step: int = 1
    """The first step that has the defect."""
    limit_s: float = 90.0
    """Seconds within which it must be named."""


_PROCESS, _LATE = "defects_process", "defects_late"
_SAVING, _RESUMING = "defects_saving", "defects_resuming"
_PACE = "defects_pace"
OTHERS: tuple[Defect, ...] = tuple(
    Defect(id=id, module=module, what=what, happened=happened, named_by=named_by)
    for id, module, named_by, what, happened in (
        (
            "host_operators",
            "defects_host",
            "stalled_at_start",
            "the operators of a quantized teacher run on the host",
            "aprender PMAT-701: no step in 1.5 h, GPU 0 %, CPU 1320 %",
        ),
        (
            "rows_dropped_later",
            _LATE,
            "step_gradients",
            "rows leave the gradient, and not the loss, at step 24",
            "aprender S-R6: rows in the log that were not trained on; here not from the start",
        ),
        (
            "gradient_scaled_later",
            _LATE,
            "step_gradients",
            "gradients are four times those of the loss, from step 24 on",
            "Soup #720: a gradient four times too large; here not from the start",
        ),
        *(
            (id, "defects_rows", "step_rows", what, happened)
            for id, what, happened in (
                (
                    "batch_met_again",
                    "the loader hands out a batch of three steps before, from step 24 on",
                    "prefetching buffers that are read before they are filled again",
                ),
                (
                    "row_left_out",
                    "the sampler leaves out one row in the middle of an epoch",
                    "aprender #2252: one row of each batch was trained on; here one is missing",
                ),
                (
                    "row_altered",
                    "one token of one row is another one, from step 24 on",
                    "augmentation and masking that is left on; arrays that are changed in place",
                ),
                (
                    "labels_swapped",
                    "a row's labels stand in the reverse order; their number is right",
                    "collators that flip or pad labels on the other side than tokens",
                ),
                (
                    "heldout_row_trained",
                    "a held-out row is trained on, from step 24 on",
                    "splits by index that are made anew in a worker with another seed",
                ),
                (
                    "epochs_alike",
                    "every epoch has the order of the first one",
                    "DistributedSampler without set_epoch",
                ),
            )
        ),
        *(
            (id, "defects_rows", "documents_in_rows", what, happened)
            for id, what, happened in (
                (
                    "document_in_place_of_another",
                    "every second document stands in the rows twice, in the place of its neighbour",
                    "worker processes that all read the first shard",
                ),
                (
                    "documents_cut",
                    "of each document the first 256 tokens are in the rows",
                    "a tokenizer.json whose truncation is left on",
                ),
            )
        ),
        (
            "stored_rows_turned",
            "defects_store",
            "stored_outputs",
            "each row of a batch gets the stored outputs of the row before it",
            "caches that are filled in another order than they are read",
        ),
        (
            "stored_rows_turned_later",
            "defects_store",
            "step_teacher",
            "each row of a batch gets the stored outputs of the row before it, from batch 24 on",
            "a store that was proved at the start, and is read wrongly later",
        ),
        (
            "stored_outputs_scaled",
            "defects_store",
            "stored_outputs",
            "stored hidden states are read half as large, at a cosine of 1",
            "a norm that was applied when outputs were stored, and not when they are read",
        ),
        (
            "saved_untrained",
            _SAVING,
            "artefact",
            "the saved student is the one before the first step",
            "files that are written from another object than the one that was trained",
        ),
        (
            "saved_one_of_start",
            _SAVING,
            "artefact",
            "one tensor of the saved student is that of the start",
            "a name that was missed when the state to save was gathered",
        ),
        (
            "saved_through_fp8",
            _SAVING,
            "artefact",
            "the student is saved as floats of 8 bits that were widened again",
            "casts on the way to a file, in which the header has the right type",
        ),
        (
            "saved_head_untied",
            _SAVING,
            "artefact",
            "a tied student is saved with a head of its own, and a config.json that says so",
            "exports that untie the head: whoever trains on has another model",
        ),
        *(
            (id, _RESUMING, "resume_continues", what, happened)
            for id, what, happened in (
                (
                    "layer_not_restored",
                    "a resumed run has one layer's weights of the start",
                    "load_state_dict(strict=False) with names that did not fit",
                ),
                (
                    "moment_zeroed",
                    "a resumed run has one second moment of AdamW at zero",
                    "states that are keyed by position, after a parameter was added",
                ),
                (
                    "counters_reset",
                    "a resumed run counts AdamW's updates from the first one",
                    "step counters that were kept outside of the optimizer's state",
                ),
                (
                    "random_not_restored",
                    "a resumed run has drawn a random number that the run had not",
                    "generators that are seeded anew by every start",
                ),
                (
                    "position_off",
                    "a resumed run goes on one step further in the data",
                    "loaders that count what was fetched and not what was trained on",
                ),
            )
        ),
        (
            "load_hangs",
            _PROCESS,
            "stalled_at_start",
            "the read of the teacher's weights does not come back",
            "runs that hang in a load from a network file system that went away",
        ),
        (
            "rows_slow_ahead",
            _PACE,
            "data_wait",
            "the rows of the next step are gathered slowly, while its batch is fetched ahead",
            "loaders that keep up only as long as nobody looks: the wait was in no step's time",
        ),
        (
            "observer_slow",
            _PACE,
            "unaccounted",
            "something that is called after every step takes longer than the step",
            "callbacks that sync, plot or upload after each step",
        ),
        (
            "log_slow",
            _PACE,
            "unaccounted",
            "every line of the log takes longer to write than its step",
            "run folders on a network file system",
        ),
        (
            "evaluation_slow",
            _PACE,
            "seldom_training",
            "an evaluation takes as long as ten steps, and comes after every fourth",
            "evaluations that were set up for a short run, or that generate token by token",
        ),
        (
            "loader_stalls",
            _PROCESS,
            "stalled",
            "the loader waits for a worker that has hung",
            "loaders whose worker hangs or died, with their pipe still open",
        ),
        (
            "deadlock",
            _PROCESS,
            "stalled",
            "two threads wait for each other's lock",
            "aprender #2249: a deadlock in training",
        ),
        (
            "cuda_wait",
            _PROCESS,
            "stalled",
            "the host waits for a kernel that does not end",
            "hung collectives and kernels; GPU 100 % busy and no step",
        ),
        (
            "memory_leak",
            _PROCESS,
            "OOM_MEMCG",
            "something of each step is kept until the control group is full",
            "the OOM kill that aprender #1869 took an exit 137 for",
        ),
        (
            "kernel_key_deaf",
            "defects_kernels",
            "teacher_knows_text",
            "a kernel's key ignores one of its arguments",
            "aprender #1820: the epsilon was in the code and not in the key",
        ),
        (
            "stale_body",
            "defects_kernels",
            "kernel",
            "the cache holds a kernel that was compiled for another constant",
            "aprender: a body of 1e-5 under the key of 1e-6; every count was right",
        ),
    )
)
_DEFECTS = {one.id: one for one in (*TRAINING, *BETWEEN_PARTS, *OTHERS)}

_SETS: dict[str, dict[str, Any]] = {
    "identical_teacher": {"student.config": "TEACHER"},
    "denominator_per_pass": {"train.accumulation": 2},
    **{one.id: {"train.accumulation": 2, "checks.every": 1} for one in BETWEEN_PARTS},
    # Long enough for a row of two documents.
    "documents_merged_in_step": {"data.seq_len": 512},
    "document_mask_missing": {"data.seq_len": 512},
}
_AT_START = dict.fromkeys(("labels_unshifted", "labels_shifted_twice"), "teacher_knows_text")
"""Defects that a check before the first step ends the run by, though a stage of the audit says what they are."""
_RESUMED = ("optimizer_lost", "position_lost")
_ENDLESS = {"train.steps": 100_000, "checkpoint.every": 0}
_HANGS = _ENDLESS | {"watch.stall_seconds": 1}


def _of_training(defect: Defect) -> Drill:
    resumed = defect.id in _RESUMED
    return Drill(
        id=defect.id,
        what=defect.what,
        happened=defect.happened,
        expected=(Expected(kind=CHECK, id=_AT_START.get(defect.id, defect.named_by)),),
        act="resume" if resumed else "none",
        sets=_ENDLESS if resumed else _SETS.get(defect.id, {}),
    )


def _other(id: str, *expected: Expected, **fields: Any) -> Drill:
    defect = _DEFECTS[id]
    return Drill(id=id, what=defect.what, happened=defect.happened, expected=expected, **fields)


_BACKEND = "--set teacher.backend=dequantized"

DRILLS: tuple[Drill, ...] = (
    *map(_of_training, (*TRAINING, *BETWEEN_PARTS)),
    _other(
        "host_operators",
        Expected(kind=ALERT, id="cpu_bound_teacher", text=", at ", flip=_BACKEND),
        Expected(kind=ALERT, id="stalled_at_start", text="computing at ", flip=_BACKEND),
        sets={
            "teacher.path": "QUANTIZED",
            "teacher.backend": "quantized",
            # The teacher's pass over the first batch takes some twenty seconds.
            "data.seq_len": 1024,
            "data.max_bytes": 1_000_000,
            "train.rows": 96,
            "watch.stall_seconds": 2,
        },
    ),
    *(
        _other(
            id,
            Expected(kind=CHECK, id=_DEFECTS[id].named_by),
            sets={"train.steps": 60, "checkpoint.every": 0, "checks.every": 10},
            from_step=24,
        )
        for id in ("rows_dropped_later", "gradient_scaled_later")
    ),
    *(
        _other(
            id,
            Expected(kind=CHECK, id="step_rows"),
            sets={"train.steps": 100, "checkpoint.every": 0},
            from_step=24,
        )
        for id in (
            "batch_met_again",
            "row_left_out",
            "row_altered",
            "labels_swapped",
            "heldout_row_trained",
        )
    ),
    _other(
        "epochs_alike",
        Expected(kind=CHECK, id="step_rows"),
        sets={"train.steps": 200, "checkpoint.every": 0, "data.max_bytes": 40_000},
    ),
    *(
        _other(id, Expected(kind=CHECK, id="documents_in_rows"))
        for id in ("document_in_place_of_another", "documents_cut")
    ),
    *(
        _other(id, Expected(kind=CHECK, id="stored_outputs"), stored=True)
        for id in ("stored_rows_turned", "stored_outputs_scaled")
    ),
    _other(
        "stored_rows_turned_later",
        Expected(kind=CHECK, id="step_teacher"),
        sets={"train.steps": 60, "checkpoint.every": 0, "checks.every": 10},
        stored=True,
        from_step=20,
    ),
    *(
        _other(
            one.id,
            Expected(kind=CHECK, id=one.named_by),
            sets={"train.steps": 3, "checkpoint.every": 1, "checkpoint.at_end": True},
        )
        for one in OTHERS
        if one.module == _SAVING
    ),
    *(
        _other(
            one.id, Expected(kind=CHECK, id=one.named_by), act="resume", sets=_ENDLESS
        )
        for one in OTHERS
        if one.module == _RESUMING
    ),
    _other(
        # Uses the default limits and no setting, because a load may take minutes.
        "load_hangs",
        Expected(kind=ALERT, id="stalled_at_start", text="waiting to read"),
        limit_s=180.0,
    ),
    *(
        _other(
            id,
            Expected(kind=ALERT, id=_DEFECTS[id].named_by, text=text),
            sets={"train.steps": 80, "checkpoint.every": 0},
        )
        for id, text in (
            ("rows_slow_ahead", "waiting for data"),
            ("observer_slow", "most in: observers"),
            ("log_slow", "most in: log"),
        )
    ),
    _other(
        "evaluation_slow",
        Expected(kind=ALERT, id="seldom_training", text="most of it into evaluations"),
        sets={"train.steps": 80, "checkpoint.every": 0, "eval.every": 4},
    ),
    _other(
        "loader_stalls",
        Expected(kind=ALERT, id="stalled", text="waiting to read"),
        sets=_HANGS,
    ),
    _other(
        "deadlock", Expected(kind=ALERT, id="stalled", text="waiting for a lock"), sets=_HANGS
    ),
    _other(
        "cuda_wait",
        Expected(kind=ALERT, id="stalled", text="waiting for the GPU"),
        sets=_HANGS,
        needs=("gpu",),
    ),
    Drill(
        id="killed_from_outside",
        what="SIGKILL from outside",
        happened="aprender #1869: a `timeout` sent it, and the report said out of memory",
        expected=(
            Expected(kind=EXIT, id="KILLED_EXTERNAL", text="not the kernel's OOM killer"),
        ),
        planted=False,
        act="kill",
        sets=_ENDLESS,
        needs=("kill counters",),
    ),
    _other(
        "memory_leak",
        Expected(kind=EXIT, id="OOM_MEMCG", text="because its control group ran out of memory"),
        sets=_ENDLESS,
        needs=("memory group", "kill counters"),
        memory_limit_bytes=3 << 29,
    ),
    Drill(
        id="plan_that_cannot_fit",
        what="a run that needs more memory than there is",
        happened="aprender SPEC-BLACKWELL-FIX-001: 60 GB of workspace a block, met at upload",
        expected=(Expected(kind=REFUSAL, id="memory", text="expected a run that fits in"),),
        planted=False,
        sets={"train.rows": 2_000_000},
    ),
    _other(
        "kernel_key_deaf",
        Expected(kind=CHECK, id="teacher_knows_text"),
        Expected(kind=CHECK, id="step_teacher"),
        Expected(kind=REFUSAL, id="kernel", text="found another"),
        sets={
            "teacher.path": "QUANTIZED",
            "teacher.backend": "quantized",
            "teacher.kernel": "fused",
            "train.rows": 1,
            "eval.rows": 1,
        },
        needs=("gpu", "triton"),
    ),
    _other(
        "stale_body",
        Expected(kind=REFUSAL, id="kernel", text="found another"),
        sets={"teacher.path": "QUANTIZED", "teacher.backend": "quantized"},
        needs=("gpu", "triton"),
    ),
)  # fmt: skip


def planted(id: str) -> Defect:
    """Return the defect of that id. Raises BadInput."""
    if id not in _DEFECTS:
        raise BadInput.expected("defect", id, f"one of {', '.join(_DEFECTS)}", "another")
    return _DEFECTS[id]


def drill(id: str) -> Drill:
    """Return the drill of that id. Raises BadInput."""
    known = {one.id: one for one in DRILLS}
    if id not in known:
        import difflib

        near = difflib.get_close_matches(id, known, n=1)
        raise BadInput.expected(
            "drill",
            id,
            "one of `engine drill --list`",
            "another" + (f"; did you mean {near[0]}?" if near else ""),
        )
    return known[id]
