"""`Trainer(callbacks=[WatchCallback()])` or `Trainer(logger=WatchLogger())`: for the Trainer of Lightning.

The callback adds what an evaluation found, the logger everything that the module logs; both together say nothing twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import apr_watch

from .callback import Ours, Prompt, logged, settings

# The package by whose name the script imports it: its classes are of another make in the other one.
if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import Logger
else:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger


class WatchCallback(Callback):  # type: ignore[misc]
    """Watches this process as `engine watch` does, and adds the values of each validation, `val_loss` as the held-out
    loss."""

    def __init__(
        self,
        out: str = "",
        *,
        held_out: str = "val_loss",
        prompt: str | None = None,
        tokens: int = 32,
        tokenizer: Any = None,
    ) -> None:
        """`out`: the run folder to make, in `runs` if it is empty. `held_out`: the value that is the held-out loss. A
        `prompt` is gone on with by so many `tokens` at each validation, by the most likely token each time: by the
        module's first part that is a language model of transformers, or by the module itself."""
        apr_watch.start(out)
        self._ours = Ours(type(self).__name__)
        self._held_out, self._prompt = held_out, Prompt(prompt, tokens, tokenizer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not _has_logger(trainer):
            self._ours(lambda: settings(type(pl_module).__name__, dict(pl_module.hparams)))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._ours(self._validated, trainer, pl_module)

    def _validated(self, trainer: Any, module: Any) -> None:
        parts = (one for one in module.modules() if hasattr(one, "get_output_embeddings"))
        said = self._prompt.of(next(parts, module)) if trainer.is_global_zero else {}
        metrics = dict(trainer.callback_metrics)
        if _has_logger(trainer):
            # It has them all; a text stands beside the loss of its evaluation.
            metrics = {n: one for n, one in metrics.items() if said and n == self._held_out}
        logged({**metrics, **said}, self._held_out)


class WatchLogger(Logger):  # type: ignore[misc]
    """Watches this process as `engine watch` does, and adds what the module logs, `val_loss` as the held-out loss, and
    its hyperparameters."""

    def __init__(self, out: str = "", *, held_out: str = "val_loss") -> None:
        """`out`: the run folder to make, in `runs` if it is empty. `held_out`: the value that is the held-out loss."""
        super().__init__()
        apr_watch.start(out)
        self._ours = Ours(type(self).__name__)
        self._held_out = held_out

    @property
    def name(self) -> str:
        return "apr_watch"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        values = params if isinstance(params, Mapping) else vars(params)
        self._ours(settings, "the module", values)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._ours(logged, metrics, self._held_out)


def _has_logger(trainer: Any) -> bool:
    return any(isinstance(one, WatchLogger) for one in trainer.loggers)
