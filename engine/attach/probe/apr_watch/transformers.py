"""`Trainer(..., callbacks=[WatchCallback()])`: for the Trainer of transformers, and those of TRL.

The module imports transformers; nothing else of the probe does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback

import apr_watch

from .callback import Guard, Prompt, logged, settings


class WatchCallback(TrainerCallback):
    """Callback that watches this process as `engine watch` does, and records the Trainer's settings and the values that
    it logs, `eval_loss` as the held-out loss."""

    def __init__(
        self, out: str = "", *, prompt: str | None = None, tokens: int = 32, tokenizer: Any = None
    ) -> None:
        """Start watching. `out`: the run folder to create, in `runs` if empty. At each evaluation the model continues
        `prompt` by up to `tokens` greedy tokens, with `tokenizer` or else the Trainer's."""
        apr_watch.start(out)
        self._guarded = Guard(type(self).__name__)
        self._prompt = Prompt(prompt, tokens, tokenizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._guarded(lambda: settings(type(args).__name__, _changed(args)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self._guarded(self._log, logs or {})

    def _log(self, logs: dict[str, Any]) -> None:
        # `on_evaluate` logs the held-out loss, together with the sample.
        logged({name: value for name, value in logs.items() if name != "eval_loss"}, "")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any
    ) -> None:
        self._guarded(self._evaluated, metrics or {}, others)

    def _evaluated(self, metrics: dict[str, Any], others: dict[str, Any]) -> None:
        loss = {name: value for name, value in metrics.items() if name == "eval_loss"}
        tokenizer = others.get("processing_class") or others.get("tokenizer")
        logged({**loss, **self._prompt.of(others.get("model"), tokenizer)}, "eval_loss")


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
