"""The probe of `engine watch`: records every optimizer step of a PyTorch script that does not know of it.

A script that does may say more; where it is not watched both do nothing:

    import apr_watch

    apr_watch.log(held_out=2.31, accuracy=0.7)      numbers, or tensors of one element; never raises
    with apr_watch.watch(optimizer):                the steps of this optimizer are a training of their own

Without `engine watch` it may have itself watched, by one of these lines:

    apr_watch.start()                               to the end of the process, or to apr_watch.stop()
    with apr_watch.watch(out="runs/first"):
    WatchCallback()                                 of apr_watch.transformers or apr_watch.lightning
    WatchLogger(), WatchTracker()                   of apr_watch.lightning, apr_watch.accelerate

Below `engine watch` it is started by the `sitecustomize` beside it and waits for the script to import torch. Until then
it costs one comparison for each import. Standard library only, Python 3.10 on; it never imports torch itself.

    __init__.py      waits for the import of torch
    line.py          how a line of the script starts the watch
    callback.py      what the callbacks of frameworks share: transformers.py, lightning.py,
                     accelerate.py
    hooks.py         what is hooked in torch, and how it is removed again
    step.py          what a step is: its time, its batches, when its line is written
    device_clock.py  the phases of a step by a GPU's own clock
    progress.py      how many steps there will be, and the batch of the running pass over the data
    identities.py    what has to hold in every training, looked at on a few steps
    gradients.py     whether gradients of the step before are still there
    parameters.py    which parameters backward passes reach and optimizers hold, and their names
    ranks.py         whether ranks have the same weights and read different data
    updates.py       the rows of weights, gradients and states in front of a step and behind it
    textbook.py      an update held against the textbook's
    compiles.py      what torch.compile compiled
    memory.py        what torch's allocator holds on a GPU
    settings.py      what an experiment changes without the script's help
    stacks.py        how the stacks of a process that hangs are taken from outside
    values.py        the values of tensors, read without making a GPU wait
    writer.py        the lines of the log

The run must never change: no random number is drawn, no stream is synchronised, no thread is started, and nothing
that fails here reaches the script. A probe that fails removes itself and says so in the log. What an experiment asks
for is the exception: APR_WATCH_STEPS ends the process after so many steps, APR_WATCH_SLOW_BY lengthens each step,
APR_WATCH_SET changes the settings that it names, and each change is in the log.
"""

from __future__ import annotations

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
"""Of this process, once it has imported torch and is watched."""
_begun: Begun | None = None
"""Where a line of the script started the watch."""


def log(**values: Any) -> None:
    """Record numbers of the script's own, at the optimizer step that was done last: `held_out` is drawn beside the
    loss, others are shown by their names; `prompt` and `sample` are texts, a beginning and what the model made of it. A
    value that is not one number is recorded as unknown. Of several ranks only rank 0 records. Nothing happens where the
    process is not watched, and nothing is raised."""
    if _hooks is not None:
        _hooks.log(values)


def note(text: str, level: str = "info") -> None:
    """Record a sentence; `level` is `info`, `warning` or `error`."""
    if _hooks is not None:
        _hooks.note(level, text)


def is_watching() -> bool:
    """Whether what is said is recorded: the process is watched, and has imported torch."""
    return _hooks is not None and _hooks.are_on


class watch:
    """`with apr_watch.watch(optimizer):` or `watch(model, optimizer)`: inside, the steps of this optimizer, and of no
    other, are steps of a training that begins and ends with the block. Nothing happens where it is not watched.

    `with apr_watch.watch(out="runs/first"):` has the block itself watched, as by `start` and `stop`."""

    def __init__(self, *parts: Any, out: str | None = None) -> None:
        """`parts`: the optimizer is the one that steps; others are taken and not looked at. `out`: the run folder to
        make, in `runs` if it is empty."""
        self._optimizer = next((part for part in parts if hasattr(part, "param_groups")), None)
        self._out, self._is_ours = out, False

    def __enter__(self) -> watch:
        if self._out is not None:
            was = _begun
            start(self._out)
            self._is_ours = _begun is not was
        if _hooks is not None and self._optimizer is not None:
            _hooks.choose(self._optimizer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours:
            stop(error)
        elif _hooks is not None and self._optimizer is not None:
            _hooks.end()


def start(out: str = "") -> None:
    """Have this process watched as `engine watch` does it, to its end: its optimizer steps, the machine, stalls, how it
    ends. `out` is the run folder to make (`out`-2, ... where it exists); empty: a new one in `runs`. Nothing happens
    where it is watched already, and nothing is raised."""
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
    """End what `start` began, `error` being what ended it. Nothing happens where `engine watch` began it, and nothing
    is raised."""
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
    """Record this process's training in the run folder `run`, if it trains. Calling it twice is fine."""
    global _started
    if _started:
        return
    _started = True
    torch = sys.modules.get("torch")
    if torch is not None:
        _hook(torch, run)
    else:
        sys.meta_path.insert(0, _TorchFinder(run))


def _hook(torch: ModuleType, run: str) -> None:
    global _hooks
    try:
        from .hooks import Hooks

        _hooks = Hooks(torch, run)
        _hooks.install()
        if _begun is not None and _begun.alone:
            note(f"nobody watches from outside: {_begun.alone}", "warning")
        from .stacks import register

        register(run)
    except Exception:  # noqa: BLE001  the script's own import of torch has succeeded
        pass


class _TorchFinder:
    """Finds torch as the other finders do, and has it hooked once it has been executed."""

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
        # On the instance: the loader keeps its type, and nothing of ours is left on it once torch is there.
        # A spec that is found and never loaded (transformers looks whether there is a torch) changes nothing.
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
            pass  # a loader of the user's that cannot be followed
