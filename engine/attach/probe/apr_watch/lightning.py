"""`Trainer(callbacks=[WatchCallback()])` or `Trainer(logger=WatchLogger())`: for the Trainer of Lightning.

The callback records the values of each validation, the logger everything that the module logs; together they record
nothing twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import apr_watch

from .callback import Guard, Prompt, logged, settings

# The package that the script imports: the classes of the two packages are not compatible.
if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import Logger
else:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger


class WatchCallback(Callback):  # type: ignore[misc]
    """Callback that watches this process as `engine watch` does, and records the values of each validation, `val_loss`
    as the held-out loss."""

    def __init__(
        self,
        out: str = "",
        *,
        held_out: str = "val_loss",
        prompt: str | None = None,
        tokens: int = 32,
        tokenizer: Any = None,
    ) -> None:
        """Start watching. `out`: the run folder to create, in `runs` if empty. `held_out`: the name of the held-out
        loss. At each validation the first language model of transformers in the module, or else the module, continues
        `prompt` by up to `tokens` greedy tokens."""
        apr_watch.start(out)
        self._guarded = Guard(type(self).__name__)
        self._held_out, self._prompt = held_out, Prompt(prompt, tokens, tokenizer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not _has_logger(trainer):
            self._guarded(lambda: settings(type(pl_module).__name__, dict(pl_module.hparams)))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._guarded(self._validated, trainer, pl_module)

    def _validated(self, trainer: Any, module: Any) -> None:
        models = (value for value in module.modules() if hasattr(value, "get_output_embeddings"))
        texts = self._prompt.of(next(models, module)) if trainer.is_global_zero else {}
        metrics = dict(trainer.callback_metrics)
        if _has_logger(trainer):
            # The logger records all values; a sample is logged with the loss of its evaluation.
            metrics = {n: value for n, value in metrics.items() if texts and n == self._held_out}
        logged({**metrics, **texts}, self._held_out)


class WatchLogger(Logger):  # type: ignore[misc]
    """Logger that watches this process as `engine watch` does, and records the module's hyperparameters and the values
    that it logs, `val_loss` as the held-out loss."""

    def __init__(self, out: str = "", *, held_out: str = "val_loss") -> None:
        """Start watching. `out`: the run folder to create, in `runs` if empty. `held_out`: the name of the held-out
        loss."""
        super().__init__()
        apr_watch.start(out)
        self._guarded = Guard(type(self).__name__)
        self._held_out = held_out

    @property
    def name(self) -> str:
        return "apr_watch"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        values = params if isinstance(params, Mapping) else vars(params)
        self._guarded(settings, "the module", values)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._guarded(logged, metrics, self._held_out)


def _has_logger(trainer: Any) -> bool:
    return any(isinstance(logger, WatchLogger) for logger in trainer.loggers)
