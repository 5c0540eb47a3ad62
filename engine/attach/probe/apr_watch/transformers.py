"""`Trainer(..., callbacks=[WatchCallback()])`: for the Trainer of transformers, and those of TRL.

The module imports transformers; nothing else of the probe does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback

import apr_watch

from .callback import Ours, Prompt, logged, settings


class WatchCallback(TrainerCallback):
    """Watches this process as `engine watch` does, and adds what the Trainer says: its settings, the values that it
    logs, `eval_loss` as the held-out loss."""

    def __init__(
        self, out: str = "", *, prompt: str | None = None, tokens: int = 32, tokenizer: Any = None
    ) -> None:
        """`out`: the run folder to make, in `runs` if it is empty. A `prompt` is gone on with by so many `tokens` at
        each evaluation, by the most likely token each time, with the tokenizer of the Trainer if there is no other."""
        apr_watch.start(out)
        self._ours = Ours(type(self).__name__)
        self._prompt = Prompt(prompt, tokens, tokenizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._ours(lambda: settings(type(args).__name__, _set(args)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self._ours(self._log, logs or {})

    def _log(self, logs: dict[str, Any]) -> None:
        # The held-out loss comes once more with the evaluation, beside the text.
        logged({name: value for name, value in logs.items() if name != "eval_loss"}, "")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any
    ) -> None:
        self._ours(self._evaluated, metrics or {}, more)

    def _evaluated(self, metrics: dict[str, Any], more: dict[str, Any]) -> None:
        loss = {name: value for name, value in metrics.items() if name == "eval_loss"}
        tokenizer = more.get("processing_class") or more.get("tokenizer")
        logged({**loss, **self._prompt.of(more.get("model"), tokenizer)}, "eval_loss")


def _set(arguments: Any) -> dict[str, Any]:
    """Those that are not at their defaults; tokens of the hub are masked by `to_dict`."""
    found, made = arguments.to_dict(), dataclasses.MISSING
    values = {}
    for field in dataclasses.fields(arguments):
        make = field.default_factory
        default = field.default if make is made else make()
        if field.name in found and found[field.name] != default:
            values[field.name] = found[field.name]
    return values
