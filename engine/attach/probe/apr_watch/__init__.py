"""The probe of `engine watch`: records every optimizer step of a PyTorch script that does not know of it.

A script that does may say more; without `engine watch` both do nothing:

    import apr_watch

    apr_watch.log(held_out=2.31, accuracy=0.7)      numbers, or tensors of one element; never raises
    with apr_watch.watch(optimizer):                the steps of this optimizer are a training of their own

It is started by the `sitecustomize` beside it and waits for the script to import torch. Until then it costs one
comparison for each import. Standard library only, Python 3.10 on; it never imports torch itself.

    __init__.py      waits for the import of torch
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
    stacks.py        how the stacks of a process that hangs are taken from outside
    values.py        the values of tensors, read without making a GPU wait
    writer.py        the lines of the log

The run must never change: no random number is drawn, no stream is synchronised, no thread is started, and nothing
that fails here reaches the script. A probe that fails removes itself and says so in the log. What an experiment asks
for is the exception: APR_WATCH_STEPS ends the process after so many steps, APR_WATCH_SLOW_BY lengthens each step.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # Importing typing would cost as much as all the rest of the start.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

    from .hooks import Hooks

_started = False
_hooks: Hooks | None = None
"""Of this process, once it has imported torch below `engine watch`."""


def log(**values: Any) -> None:
    """Record numbers of the script's own, at the optimizer step that was done last: `held_out` is drawn beside the
    loss, others are shown by their names. A value that is not one number is recorded as unknown. Of several ranks
    only rank 0 records. Nothing happens without `engine watch`, and nothing is raised."""
    if _hooks is not None:
        _hooks.log(values)


class watch:
    """`with apr_watch.watch(optimizer):` or `watch(model, optimizer)`: inside, the steps of this optimizer, and of no
    other, are steps of a training that begins and ends with the block. Nothing happens without `engine watch`."""

    def __init__(self, *parts: Any) -> None:
        """`parts`: the optimizer is the one that steps; others are taken and not looked at."""
        self._optimizer = next((part for part in parts if hasattr(part, "param_groups")), None)

    def __enter__(self) -> watch:
        if _hooks is not None and self._optimizer is not None:
            _hooks.choose(self._optimizer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _hooks is not None and self._optimizer is not None:
            _hooks.end()


def start(run: str) -> None:
    """Record this process's training in the run folder `run`, if it trains. Starting twice is fine."""
    global _started
    if not _started:
        _started = True
        sys.meta_path.insert(0, _TorchFinder(run))


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
            self._hook(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        except AttributeError:
            pass  # a loader of the user's that cannot be followed

    def _hook(self, torch: ModuleType) -> None:
        global _hooks
        try:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                from .hooks import Hooks

                _hooks = Hooks(torch, self._run)
                _hooks.install()
                from .stacks import register

                register(self._run)
        except Exception:  # noqa: BLE001  the script's own import of torch has succeeded
            pass
