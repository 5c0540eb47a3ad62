"""The table of names: for each value of a step, the names that other tools use for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.errors import BadInput
from engine.interchange.series import Series
from engine.log.events import Count, StepDone
from engine.log.table import STEP_FIELDS

HELD_OUT = {"held_out": "student", "held_out/teacher": "teacher", "held_out/untrained": "untrained"}
"""Subject of the loss (`student`, `teacher`, ...), by the engine's name of a held-out loss."""
COUNTS = frozenset(
    field.name for field in msgspec.structs.fields(StepDone) if field.type == Count | None
)
"""The values of a step that are integers."""
OF_STEP = tuple(
    name for name in STEP_FIELDS if name in StepDone.__struct_fields__ and name != "step"
)

_TABLE = """
loss        train_loss loss_train training_loss train_loss_step loss_step loss_train_loss epoch_loss
loss        train_epoch_loss train_loss_epoch batch_loss train_batch_loss lm_loss
held_out    held_out_loss heldout_loss eval_loss loss_eval val_loss loss_val valid_loss validation_loss
held_out    loss_validation loss_valid dev_loss test_loss loss_test validation_epoch_loss val_loss_epoch
held_out    loss_val_loss loss_validation_loss loss_test_loss
lr          learning_rate current_lr train_lr train_learning_rate lr_adamw lr_adam lr_sgd
grad_norm   train_grad_norm gradient_norm gradnorm global_grad_norm total_norm
step_s      step_time step_time_s train_step_time time_per_step seconds_per_step iter_time iteration_time step_duration
data_s      data_time data_time_s data_loading_time data_load_time dataloader_time loader_time data_wait_time
tokens      tokens_per_step step_tokens batch_tokens tokens_in_step
ce          ce_loss cross_entropy train_ce train_ce_loss loss_ce task_loss
kd          kd_loss distill_loss distillation_loss train_kd_loss loss_kd
"""
NAMES: dict[str, list[str]] = {}
for _engine_name, *_log_names in map(str.split, _TABLE.strip().splitlines()):
    NAMES.setdefault(_engine_name, []).extend(_log_names)
"""Other tools' names by the engine's name of a value, in the form of `plain`; the engine's names are not listed. Tokens
are counts of one step, so names of running sums are not in the table."""
TIMES = frozenset({"step_s", "data_s"})
"""Values whose names may have a prefix: `perf/step_time`, `profile/data_time`."""
STEP = ("global_step", "train_global_step", "trainer_global_step", "step", "iteration", "iter")
"""Names of a column with the step, by priority. W&B's `_step` comes after a step that the script logs, because it
counts calls of `log`."""
TIME = ("unix_s", "wall_time", "timestamp")
"""Names of a column with unix seconds."""
ENGINE_NAMES = (*OF_STEP, *HELD_OUT)
MAPPED = (*ENGINE_NAMES, "step", "time")
"""Names that `--map` accepts."""
_SHOWN = 12


def plain(name: str) -> str:
    """Return a name in the form of the table, in lower case with `_` for every character other than a letter or digit:
    `loss_train` for `Loss/train`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def find(candidates: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the name whose plain form equals a candidate, for the first candidate that any name equals; None if no
    name equals one."""
    # Of several names with the same plain form, take the shortest: `step`, not `_step`.
    by_plain_name = {plain(name): name for name in sorted(names, key=len, reverse=True)}
    return next(
        (by_plain_name[candidate] for candidate in candidates if candidate in by_plain_name), None
    )


def engine_names(series: Mapping[str, Series], given: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the series for each of ENGINE_NAMES that has one: the name given by `--map`, otherwise, of
    the series with a name in the table, the one with the most values. Raises BadInput if `--map` gives a name that no
    series has."""
    for engine_name, log_name in given.items():
        if engine_name in ENGINE_NAMES and log_name not in series:
            shown = ", ".join([*sorted(series)[:_SHOWN], *["..."] * (len(series) > _SHOWN)])
            raise BadInput.expected(
                "--map", f"{engine_name}={log_name}", "a name in the files", shown
            )
    chosen = {
        engine_name: log_name
        for engine_name, log_name in given.items()
        if engine_name in ENGINE_NAMES
    }
    for engine_name in ENGINE_NAMES:
        also = [plain(engine_name), *NAMES.get(engine_name, [])]
        places = {
            name: also.index(known)
            for name in series
            if name not in given.values()
            and (known := _table_name(name, also, engine_name in TIMES))
        }
        if engine_name not in chosen and places:
            chosen[engine_name] = max(
                places, key=lambda name: (len(series[name].steps), -places[name])
            )
    return {
        engine_name: chosen[engine_name] for engine_name in ENGINE_NAMES if engine_name in chosen
    }


def _table_name(name: str, among: Sequence[str], after_a_word: bool) -> str:
    """Return the plain form of `name` if it is in `among`, or the plain form without its first word if that is; empty
    if neither is."""
    plain_name = plain(name)
    shorter = plain_name.partition("_")[2] if after_a_word else ""
    return next((candidate for candidate in (plain_name, shorter) if candidate in among), "")
