"""`Accelerator(log_with=WatchTracker())`: a tracker for a loop on Accelerate."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

import apr_watch

from .callback import Ours, logged, settings


class WatchTracker(GeneralTracker):  # type: ignore[misc]
    """Watches this process as `engine watch` does, and adds what the script gives to its trackers: its configuration
    and the values that it logs, `eval_loss` as the held-out loss. What is logged stands at the optimizer step that was
    done last; the `step` that the script gives is its own count."""

    name = "apr_watch"
    requires_logging_directory = False

    def __init__(self, out: str = "", *, held_out: str = "eval_loss") -> None:
        """`out`: the run folder to make, in `runs` if it is empty. `held_out`: the value that is the held-out loss."""
        apr_watch.start(out)
        self._ours = Ours(type(self).__name__)
        self._held_out = held_out
        super().__init__()

    @property
    def tracker(self) -> Any:
        return apr_watch

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._ours(settings, "the script", values)

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self._ours(logged, values, self._held_out)
