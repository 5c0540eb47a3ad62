"""The probe of `engine watch`: records every optimizer step of an unmodified PyTorch script.

A script may call it to record more; where it is not watched this does nothing:

    import apr_watch

    apr_watch.log(held_out=2.31, accuracy=0.7)      numbers, or tensors of one element; never raises

Without `engine watch` a script starts its own watch by one of these lines:

    apr_watch.start()                               to the end of the process, or to apr_watch.stop()
    with apr_watch.watch(out="runs/first"):
    WatchCallback()                                 of apr_watch.transformers
    WatchLogger(), WatchTracker()                   of apr_watch.lightning, apr_watch.accelerate

Under `engine watch` the neighbouring `sitecustomize` starts it; it waits for the script to import torch. Until then it
costs one comparison for each import. Standard library only, Python 3.10 or later; it never imports torch itself.

    __init__.py      waits for the import of torch
    line.py          how a line of the script starts the watch
    callback.py      shared parts of transformers.py, lightning.py and accelerate.py
    hooks.py         hooks in torch, and their removal
    step.py          time, batches and losses of each step
    device_clock.py  phases of a step on the GPU
    progress.py      steps left, and the batch of the current epoch
    identities.py    checks of what holds in every healthy training, and the list of their modules
    compiles.py      compilations of torch.compile
    memory.py        memory of torch's allocator on a GPU
    settings.py      settings that an experiment changes
    questions.py     additional calls of the script's models, which change nothing (untouched.py)
    stacks.py        stacks of a hanging process
    values.py        values of tensors, read without making a GPU wait
    work.py          batches and counters of each step, in a run of an experiment about a failure
    writer.py        lines of the log

The run must never change: no random number is drawn, no stream is synchronised, no thread is started, and no failure
here reaches the script. A probe that fails removes itself and logs a note. Experiments are the exception:
APR_WATCH_STEPS ends the process after a number of steps, APR_WATCH_SLOW_BY lengthens each step, APR_WATCH_SET changes
settings, and each change is logged.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # Importing typing would cost as much as all the rest of the start.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

    from .hooks import Hooks
    from .line import Begun

_started = False
_hooks: Hooks | None = None
"""Hooks of this process, once it has imported torch and is watched."""
_begun: Begun | None = None
"""Watch that a line of the script started."""


def log(**values: Any) -> None:
    """Record numbers at the last completed optimizer step: `held_out` is plotted with the loss, others are shown by
    their names; `prompt` and `sample` are texts, a beginning and the model's continuation. A value that is not one
    number is recorded as unknown. Only rank 0 records. Does nothing if the process is not watched; raises nothing."""
    if _hooks is not None:
        _hooks.tell("logged", values)


def note(text: str, level: str = "info") -> None:
    """Record a sentence; `level` is `info`, `warning` or `error`."""
    if _hooks is not None:
        _hooks.tell("noted", level, text)


class watch:
    """Context that watches its block, as by `start` and `stop`. Does nothing where the process is watched already."""

    def __init__(self, out: str = "") -> None:
        """`out`: the run folder to create, in `runs` if empty."""
        self._out, self._has_started = out, False

    def __enter__(self) -> watch:
        before = _begun
        start(self._out)
        self._has_started = _begun is not before
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._has_started:
            stop(error)


def start(out: str = "") -> None:
    """Watch this process to its end as `engine watch` does: its optimizer steps, the machine, stalls and its exit.
    `out` is the run folder to create (`out`-2, ... where it exists), if empty a new one in `runs`. Does nothing where
    the process is watched already; raises nothing."""
    global _begun
    if _started:
        return
    try:
        run = os.environ.get("APR_WATCH_RUN")
        if not run:
            from .line import begin

            _begun = begin(os.fspath(out))
            if _begun is None:
                return
            run = _begun.run
            print(f"apr_watch: watched, apr-workbench {os.path.relpath(run)}", file=sys.stderr)
        follow(run)
    except Exception as error:  # noqa: BLE001  the script goes on
        print(f"apr_watch: not watched: {type(error).__name__}: {error}", file=sys.stderr)


def stop(error: BaseException | None = None) -> None:
    """End the watch that `start` began; `error` is what ended it. Does nothing under `engine watch`; raises nothing."""
    global _started, _hooks, _begun
    if _begun is None:
        return
    begun, hooks, _begun, _hooks, _started = _begun, _hooks, None, None, False
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _TorchFinder)]
    try:
        if hooks is not None:
            from .stacks import unregister

            hooks.stop(error)
            unregister()
        begun.end()
    except Exception:  # noqa: BLE001  the script goes on
        pass


def follow(run: str) -> None:
    """Record this process's training, if any, in the run folder `run`. Further calls do nothing."""
    global _started
    if _started:
        return
    _started = True
    torch = sys.modules.get("torch")
    if torch is not None:
        _hook(torch, run)
    else:
        sys.meta_path.insert(0, _TorchFinder(run))
        atexit.register(_say_failed, run)


def _hook(torch: ModuleType, run: str) -> None:
    global _hooks
    try:
        from .hooks import Hooks

        _hooks = Hooks(torch, run)
        _hooks.install()
        from .stacks import register

        register(run)
    except Exception:  # noqa: BLE001  the script's own import of torch has succeeded
        pass


def _say_failed(run: str) -> None:
    """Record the exception that ended the command before it had torch."""
    error = getattr(sys, "last_value", None)
    if _hooks is not None or not _started or error is None:
        return
    try:
        from .folders import claim_failed
        from .step import how_it_ended
        from .writer import Log

        if claim_failed(run):
            Log(run).write("script_ended", **how_it_ended(error))
    except Exception:  # noqa: BLE001  the script's exit code is not ours to change
        pass


class _TorchFinder:
    """Import finder that finds torch as the other finders do, and hooks it once it has been executed."""

    def __init__(self, run: str) -> None:
        self._run = run

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or finder is self:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        # Patch the instance: the loader keeps its type, and the patch is removed once torch is imported.
        # A spec that is found and never loaded (transformers checks whether torch is installed) changes nothing.
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _hook(module, self._run)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        except AttributeError:
            pass  # a custom loader that cannot be patched
