"""Records what torch.compile compiled, from torch's own counters. Needs no triton.

    watch = CompileWatch()
    ...                              steps
    watch.counts()                   graphs, graph breaks and disk cache hits since then
    watch.drain()                    a record of each compilation, of the same type as our kernels'

A compilation is one Python frame, forward and backward counted separately. It passes these stages:

    guards fail -> Dynamo traces the frame -> AOTAutograd cache -> FX graph cache -> Inductor compiles

torch does not count a frame whose guards hold. So "hits" are those of the two caches on disk, which
are consulted when a compilation is new to the process. After warm-up any compilation is a stall,
and torch reports which guard failed.

torch keeps the last 64 compilations. They are also collected at the end of each compilation, if
torch has a callback for it, so that none is lost between two calls of `drain`. This module imports
nothing of torch's compiler: unless something else imported it, nothing was compiled.

torch keeps its counts in a table that returns 0 for any name. A count that torch does not keep must
not be mistaken for 0: if graphs were compiled and none of the cache's counts changed, its hits are
None.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any, NamedTuple

from engine.kernels.compile_record import CompileRecord


class CompileCounts(NamedTuple):
    """Counts of torch.compile; each is None if torch does not keep it."""

    graphs: int | None
    graph_breaks: int | None
    disk_hits: int | None
    """Graphs found in Inductor's cache on disk."""


class CompileWatch:
    """Reads torch's counts. `close` (or leaving a `with`) removes its callback from torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None
        self._names: dict[str, str] = {}
        self._records: list[CompileRecord] = []
        self._sealed = False
        self._attached: Any = None
        self._begun = _torch_counts()
        self._collect()

    def seal(self) -> None:
        """Mark the end of warm-up."""
        self._collect()
        self._sealed = True

    def drain(self) -> list[CompileRecord]:
        """Return the compilations since the last call, in order."""
        self._collect()
        with self._lock:
            records, self._records = self._records, []
        return records

    def counts(self) -> CompileCounts:
        """Return what torch counted since this watch was created."""
        self._collect()
        now = _torch_counts()
        if now is None or self._begun is None:
            return CompileCounts(None, None, None)
        graphs, breaks, hits, lookups = (
            new - old for new, old in zip(now, self._begun, strict=True)
        )
        return CompileCounts(graphs, breaks, None if graphs and not lookups else hits)

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
        """Copy what torch has recorded; torch also calls this at the end of each compilation."""
        utils = _utils()
        if utils is None:
            return
        self._attach()
        found = list(getattr(utils, "get_compilation_metrics", list)())
        with self._lock:
            places = [place for place, metrics in enumerate(found) if metrics is self._last]
            for metrics in found[places[-1] + 1 if places else 0 :]:
                self._records.append(self._record(metrics))
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
        def metric(name: str) -> Any:
            return getattr(metrics, name, None)

        compile_id = str(metric("compile_id"))
        frame = metric("co_name")
        if frame is not None:
            self._names[compile_id] = frame
        name = self._names.get(compile_id, "frame")
        if metric("is_forward") is False:
            name += " (backward)"
        if metric("is_runtime"):
            name += " (at run time)"
        seconds = metric("entire_frame_compile_time_s")
        if seconds is None:
            seconds = (metric("duration_us") or 0) / 1e6
        hits, misses = (
            sum(
                metric(f"{cache}_local_cache_{outcome}_count") or 0
                for cache in ("inductor_fx", "aotautograd")
            )
            for outcome in ("hit", "miss")
        )
        reason = metric("recompile_reason") or metric("fail_reason")
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


def import_compiler() -> None:
    """Import what torch.compile imports at its first use, 1,400 modules in 2 s, in favour of other threads."""
    interval = sys.getswitchinterval()
    # Another thread waits so long for the interpreter each time that it has released it.
    sys.setswitchinterval(1e-4)
    try:
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch._inductor.compile_fx")
    finally:
        sys.setswitchinterval(interval)


def _utils() -> Any:
    """Return torch._dynamo.utils if it was already imported, else None."""
    return sys.modules.get("torch._dynamo.utils")


def _torch_counts() -> tuple[int, int, int, int] | None:
    """Return graphs, graph breaks, and hits and total uses of the FX graph cache, in this process."""
    utils = _utils()
    if utils is None:
        return 0, 0, 0, 0
    counters = getattr(utils, "counters", None)
    if counters is None:
        return None
    cache = [counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass")]
    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, cache[0], sum(cache)
