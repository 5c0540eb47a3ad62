"""`Trainer(logger=WatchLogger())`: for the Trainer of Lightning."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import apr_watch

from .callback import Guard, logged, settings

# The package that the script imports: the classes of the two packages are not compatible.
if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning.loggers import Logger
else:
    from lightning.pytorch.loggers import Logger


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
