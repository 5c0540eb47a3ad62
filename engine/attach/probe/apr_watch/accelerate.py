"""`Accelerator(log_with=WatchTracker())`: a tracker for a loop on Accelerate."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

import apr_watch

from .callback import Guard, logged, settings


class WatchTracker(GeneralTracker):  # type: ignore[misc]
    """Tracker that watches this process as `engine watch` does, and records the script's configuration and the values
    that it logs, `eval_loss` as the held-out loss. Values belong to the last completed optimizer step; the script's own
    `step` is ignored."""

    name = "apr_watch"
    requires_logging_directory = False

    def __init__(self, out: str = "", *, held_out: str = "eval_loss") -> None:
        """Start watching. `out`: the run folder to create, in `runs` if empty. `held_out`: the name of the held-out
        loss."""
        apr_watch.start(out)
        self._guarded = Guard(type(self).__name__)
        self._held_out = held_out
        super().__init__()

    @property
    def tracker(self) -> Any:
        return apr_watch

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._guarded(settings, "the script", values)

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self._guarded(logged, values, self._held_out)
