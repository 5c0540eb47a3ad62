"""`Trainer(..., callbacks=[WatchCallback()])`: for the Trainer of transformers, and those of TRL.

The module imports transformers; nothing else of the probe does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback

import apr_watch

from .callback import Guard, logged, settings


class WatchCallback(TrainerCallback):
    """Callback that watches this process as `engine watch` does, and records the Trainer's settings and the values that
    it logs, `eval_loss` as the held-out loss."""

    def __init__(self, out: str = "") -> None:
        """Start watching. `out`: the run folder to create, in `runs` if empty."""
        apr_watch.start(out)
        self._guarded = Guard(type(self).__name__)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._guarded(lambda: settings(type(args).__name__, _changed(args)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self._guarded(logged, logs or {}, "eval_loss")


def _changed(arguments: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults; `to_dict` masks tokens of the hub."""
    arguments_by_name, missing = arguments.to_dict(), dataclasses.MISSING
    values = {}
    for field in dataclasses.fields(arguments):
        make = field.default_factory
        default = field.default if make is missing else make()
        if field.name in arguments_by_name and arguments_by_name[field.name] != default:
            values[field.name] = arguments_by_name[field.name]
    return values
