"""The probe of `engine watch`: records every optimizer step of a PyTorch script that does not know of it.

It is started by the `sitecustomize` beside it and waits for the script to import torch. Until then it costs one
comparison for each import. Standard library only, Python 3.10 on; it never imports torch itself.

    __init__.py      waits for the import of torch
    hooks.py         what is hooked in torch, and how it is removed again
    step.py          what a step is: its time, its batches, when its line is written
    device_clock.py  the phases of a step by a GPU's own clock
    progress.py      how many steps there will be, and the batch of the running pass over the data
    compiles.py      what torch.compile compiled
    memory.py        what torch's allocator holds on a GPU
    stacks.py        how the stacks of a process that hangs are taken from outside
    values.py        the values of tensors, read without making a GPU wait
    writer.py        the lines of the log

The run must never change: no random number is drawn, no stream is synchronised, no thread is started, and nothing
that fails here reaches the script. A probe that fails removes itself and says so in the log.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # Importing typing would cost as much as all the rest of the start.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_started = False


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
        try:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                from .hooks import Hooks

                Hooks(torch, self._run).install()
                from .stacks import register

                register(self._run)
        except Exception:  # noqa: BLE001  the script's own import of torch has succeeded
            pass
