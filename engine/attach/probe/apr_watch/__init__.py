"""The probe of `engine watch`: records every optimizer step of an unmodified PyTorch script.

A script may call it to record more values. In a process that is not watched, the calls do nothing:

    import apr_watch

    apr_watch.log(held_out=2.31, accuracy=0.7)      numbers, or tensors of one element; never raises

Without `engine watch` a script can watch itself by one of these lines:

    apr_watch.start()                               until the process ends, or until apr_watch.stop()
    with apr_watch.watch(out="runs/first"):
    WatchCallback()                                 of apr_watch.transformers
    WatchLogger(), WatchTracker()                   of apr_watch.lightning, apr_watch.accelerate

Under `engine watch` Python imports `sitecustomize.py` in the parent folder, which starts the probe. The probe waits for
the script to import torch; until then it costs one comparison for each import. It uses the standard library only, needs
Python 3.10 or later, and never imports torch itself.

    __init__.py      waits for the import of torch
    line.py          starts the watch from a line of the script
    callback.py      code shared by transformers.py, lightning.py and accelerate.py
    hooks.py         hooks in torch, and their removal
    step.py          time, batches and losses of each step
    device_clock.py  phases of a step on the GPU
    progress.py      remaining steps, and the current batch of the epoch
    identities.py    checks of identities that hold in every healthy training; its docstring lists their modules
    compiles.py      compilations of torch.compile
    memory.py        memory of torch's allocator on a GPU
    settings.py      settings that an experiment changes
    questions.py     repeated calls of the script's models; untouched.py restores the script's state after them
    stacks.py        stacks of a hanging process
    values.py        values of tensors, read without synchronising with a GPU
    work.py          batches and counters of each step, in a run of an experiment
    writer.py        lines of the log

The probe must never change a run: it draws no random number, synchronises no stream and starts no thread, and none of
its exceptions reaches the script. A probe that fails removes itself and logs a note. Experiments are the exception:
APR_WATCH_STEPS ends the process after a number of steps, APR_WATCH_SLOW_BY lengthens each step, APR_WATCH_SET changes
settings, and each change is logged.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # Importing typing would take as long as the rest of the probe's start.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

    from .hooks import Hooks
    from .line import Begun

_started = False
_hooks: Hooks | None = None
"""Hooks of this process; None until it has imported torch, or if it is not watched."""
_begun: Begun | None = None
"""Watch that was started by a line of the script."""


def log(**values: Any) -> None:
    """Record numbers at the last completed optimizer step. `held_out` is plotted with the loss, other numbers are shown
    by name. `prompt` and `sample` are strings: a prompt and the model's continuation. A value that is not a single
    number is recorded as unknown. Only rank 0 records. Does nothing if the process is not watched; raises nothing."""
    if _hooks is not None:
        _hooks.call_steps("logged", values)


def note(text: str, level: str = "info") -> None:
    """Record a sentence; `level` is `info`, `warning` or `error`."""
    if _hooks is not None:
        _hooks.call_steps("noted", level, text)


class watch:
    """Context manager that watches its block, like `start` and `stop`. Does nothing in a process that is watched."""

    def __init__(self, out: str = "") -> None:
        """`out`: the run folder to create; if empty, a new folder in `runs`."""
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
    """Watch this process until it ends, as `engine watch` does: optimizer steps, machine, stalls and exit. `out` is the
    run folder to create (`out`-2, ... if it exists); if empty, a new folder in `runs`. Does nothing if the process is
    already watched; raises nothing."""
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
    """End the watch that `start` began; `error`: the exception that ended it, if any. Does nothing under
    `engine watch`; raises nothing."""
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
    """Record this process's training, if there is one, in the run folder `run`. Only the first call has an effect."""
    global _started
    if _started:
        return
    _started = True
    torch = sys.modules.get("torch")
    if torch is not None:
        _hook(torch, run)
    else:
        sys.meta_path.insert(0, _TorchFinder(run))
        atexit.register(_record_failure, run)


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


def _record_failure(run: str) -> None:
    """Record the exception that ended the script before it imported torch."""
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
    """Import finder that finds torch by the other finders, and installs the hooks once torch is imported."""

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
        # A spec may be found and never loaded (transformers checks whether torch is installed): then nothing changes.
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
