"""What torch.compile compiled, read from torch's own counters. Needs no triton.

    watch = CompileWatch()
    mark = watch.mark()
    ...                              steps
    watch.since(mark)                counts of this stretch, as Readings
    watch.drain()                    a record of each compilation, of one type with our kernels'

A compilation is one frame of Python, forward and backward apart. What happens on the way to it:

    guards fail -> Dynamo traces the frame -> AOTAutograd cache -> FX graph cache -> Inductor compiles

A frame whose guards hold is not counted by torch; so "hits" are those of the two caches on disk,
which a compilation asks when it is new to the process. After warm-up any compilation is a stall, and
torch says which guard failed.

torch keeps the last 64 compilations. They are also collected at the end of each, where torch offers
that, so that none is lost between two calls of `drain`. Nothing of torch's compiler is imported
here: as long as nobody else did, nothing was compiled.

torch keeps its counts in a table that answers 0 to any name. A count that it does not keep must not
pass for 0: where frames were compiled and none of a cache's counts moved, they are absent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from engine.kernels.record import CompileRecord
from engine.machine.reading import Reading, absent, measured

Mark: TypeAlias = Mapping[str, float]
"""The counts at one moment."""

_SOURCE = "torch._dynamo.utils.counters"
_CACHES = {
    "fxgraph": ("inductor", "fxgraph_cache"),
    "autograd": ("aot_autograd", "autograd_cache"),
}
"""Each cache with torch's group of counters and the stem of their names."""
_OUTCOMES = ("hit", "miss", "bypass")


class CompileWatch:
    """Reads torch's counts; `close` (or leaving a `with`) takes its callback out of torch again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None
        self._names: dict[str, str] = {}
        self._records: list[CompileRecord] = []
        self._seconds = 0.0
        self._sealed = False
        self._attached: Any = None

    def seal(self) -> None:
        """Says that warm-up is over."""
        self._collect()
        self._sealed = True

    def drain(self) -> list[CompileRecord]:
        """The compilations since the last call, in order."""
        self._collect()
        with self._lock:
            records, self._records = self._records, []
        return records

    def mark(self) -> Mark:
        """The counts of this process now."""
        self._collect()
        utils = _utils()
        counters = getattr(utils, "counters", None)
        if counters is None:
            return {}
        found: dict[str, float] = {
            "frames": counters["frames"]["total"],
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "seconds": self._seconds,
        }
        for cache, (group, stem) in _CACHES.items():
            for outcome in _OUTCOMES:
                found[f"{cache}_{outcome}"] = counters[group][f"{stem}_{outcome}"]
        return found

    def since(self, mark: Mark) -> dict[str, Reading]:
        """What was counted since `mark`: frames, graphs, graph_breaks, seconds, and for the caches
        fxgraph and autograd `_hit`, `_miss` and `_bypass` (a graph that cannot be kept)."""
        lookups = (f"{cache}_{outcome}" for cache in _CACHES for outcome in _OUTCOMES)
        names = ("frames", "graphs", "graph_breaks", "seconds", *lookups)
        if _utils() is None:
            return {name: measured(0, "torch._dynamo is not loaded") for name in names}
        now = self.mark()
        if not now:
            return {
                name: absent(f"torch {torch.__version__} has no such table", _SOURCE)
                for name in names
            }
        counts = {name: now[name] - mark.get(name, 0) for name in names}
        readings = {name: measured(count, _SOURCE) for name, count in counts.items()}
        for cache in _CACHES:
            mine = [f"{cache}_{outcome}" for outcome in _OUTCOMES]
            if counts["graphs"] and not any(counts[name] for name in mine):
                reason = f"torch {torch.__version__} counted no use of this cache"
                readings |= {name: absent(reason, _SOURCE) for name in mine}
        return readings

    def close(self) -> None:
        with self._lock:
            handler, self._attached = self._attached, None
        if handler is not None:
            handler.remove_end_callback(self._collect)

    def __enter__(self) -> CompileWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, _: object = None) -> None:
        """Takes over what torch has recorded; also called by torch when a compilation ends."""
        utils = _utils()
        if utils is None:
            return
        self._attach()
        found = list(getattr(utils, "get_compilation_metrics", list)())
        with self._lock:
            places = [place for place, metrics in enumerate(found) if metrics is self._last]
            for metrics in found[places[-1] + 1 if places else 0 :]:
                record = self._record(metrics)
                self._seconds += record.seconds
                self._records.append(record)
            self._last = found[-1] if found else None

    def _attach(self) -> None:
        callback = sys.modules.get("torch._dynamo.callback")
        handler = getattr(callback, "callback_handler", None)
        with self._lock:
            if self._attached is not None or not hasattr(handler, "remove_end_callback"):
                return
            self._attached = handler
        self._attached.register_end_callback(self._collect)

    def _record(self, metrics: Any) -> CompileRecord:
        def told(name: str) -> Any:
            return getattr(metrics, name, None)

        compile_id = str(told("compile_id"))
        frame = told("co_name")
        if frame is not None:
            self._names[compile_id] = frame
        name = self._names.get(compile_id, "frame")
        if told("is_forward") is False:
            name += " (backward)"
        if told("is_runtime"):
            name += " (at run time)"
        seconds = told("entire_frame_compile_time_s")
        if seconds is None:
            seconds = (told("duration_us") or 0) / 1e6
        hits, misses = (
            sum(
                told(f"{cache}_local_cache_{outcome}_count") or 0
                for cache in ("inductor_fx", "aotautograd")
            )
            for outcome in ("hit", "miss")
        )
        reason = told("recompile_reason") or told("fail_reason")
        return CompileRecord(
            source="inductor",
            kernel=name,
            key=f"{name} {compile_id}",
            digest=compile_id,
            seconds=seconds,
            disk_hit=None if hits + misses == 0 else misses == 0,
            after_warm_up=self._sealed,
            reason=None if reason is None else str(reason),
        )


def _utils() -> Any:
    """torch._dynamo.utils, if anybody has loaded it."""
    return sys.modules.get("torch._dynamo.utils")
