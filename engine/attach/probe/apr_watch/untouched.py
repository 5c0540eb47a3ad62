"""Run a model of the script once more so that nothing of it changes.

Without a graph and uncompiled. What the call writes to (weights, buffers, any tensor that it did not make itself) is
copied before the first write and put back, as are modes, attributes of modules and of objects that they hold, global
variables of the script and random states. What it prints, logs or warns of is dropped. Files that it writes stay.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

_CONTAINERS = (list, dict, set, deque)
_MAX_CONTENTS = 1 << 16
"""Maximum number of elements of a container that is put back."""
_THREADS = ("apr_watch", "tqdm")
"""Packages whose threads write no global variables of the script."""


class Untouched:
    """Context for one call. `draws` tells what was drawn at random inside it, `has_changed` whether the call left
    attributes or tensors of the model changed, which were put back."""

    def __init__(
        self, torch: Any, model: Any, modes: list[tuple[Any, bool]] | None = None, seed: int = 0
    ) -> None:
        """`modes`: whether each module is in training mode; all in eval mode by default. With `seed` other random
        numbers are drawn than the script would draw next."""
        self._torch, self._modules = torch, list(model.modules())
        self._wanted, self._seed = modes or [(one, False) for one in self._modules], seed
        self.draws: set[str] = set()
        self.has_changed = False

    def __enter__(self) -> Untouched:
        torch = self._torch
        self._modes = [(one, one.training) for one in self._modules]
        self._attributes = _attributes(self._modules)
        self._contents = [
            (one, one.copy())
            for _, attributes in self._attributes
            for one in attributes.values()
            if (type(one) in _CONTAINERS or type(one).__name__ == "OrderedDict")
            and len(one) <= _MAX_CONTENTS
        ]
        self._generators = _Generators(torch, [each for _, each in self._attributes])
        self._stack = contextlib.ExitStack()
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            self._put_modes_back()
            self._generators.restore()
            raise
        return self

    def _put_modes_back(self) -> None:
        for module, mode in self._modes:
            module.training = mode

    def _enter(self) -> None:
        torch = self._torch
        self._stack.enter_context(torch.no_grad())
        # Do not load the compiler just for this.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(_silence())
        mha = getattr(torch.backends, "mha", None)
        if mha is not None:
            # Its fast path of inference computes other things for padding than training does.
            self._stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        # Not `eval()`, which a module may override: some merge adapters there, with rounding.
        for module, mode in self._wanted:
            module.training = mode
        if self._seed:
            torch.manual_seed(self._seed)
        self._writes = _watch_writes(torch, self.draws)
        self._stack.enter_context(self._writes)

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()
        with self._torch.no_grad():
            for storage, kept in self._writes.kept.values():
                storage.copy_(kept)
        self._put_modes_back()
        self.has_changed = bool(self._writes.kept)
        for now, before in self._contents:
            if len(now) != len(before) or not _is_same(now, before):
                self.has_changed = True
                now.clear()
                (now.extend if isinstance(now, (list, deque)) else now.update)(before)
        for values, names in self._attributes:
            changed = {n: one for n, one in names.items() if values.get(n, names) is not one}
            added = [name for name in values if name not in names]
            self.has_changed |= bool(changed or added)
            values.update(changed)
            for name in added:
                del values[name]
        self._generators.restore()


def _attributes(modules: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of modules, of objects of the script that they hold, and its global variables, each with a
    copy."""
    held = [vars(one) for one in modules]
    script = _script_modules()
    # Another thread may write global variables meanwhile.
    if all(_package(one) in _THREADS for one in threading.enumerate() if one is not _MAIN):
        held += script.values()
    seen = set(map(id, held))
    for values in list(held):
        for one in list(values.values()):
            inside = getattr(one, "__dict__", None)
            if type(inside) is dict and type(one).__module__ in script and id(inside) not in seen:
                seen.add(id(inside))
                held.append(inside)
    return [(values, dict(values)) for values in held]


_MAIN = threading.main_thread()


def _package(thread: Any) -> str:
    target = getattr(thread, "_target", None) or type(thread)
    return str(getattr(target, "__module__", "")).split(".")[0]


def _script_modules() -> dict[str, dict[str, Any]]:
    """Return the global variables of the script and of the modules that it brings, by module."""
    found = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        is_library = "-packages" in place or name.split(".")[0] in sys.stdlib_module_names
        if (place and not is_library and name.split(".")[0] not in _OWN) or name == "__main__":
            found[name] = vars(module)
    return found


_OWN = ("apr_watch", "sitecustomize", "engine", "workbench", "torch")


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return all(name in now and now[name] is one for name, one in before.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(one is other for one, other in zip(now, before, strict=True))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging, warnings = (sys.modules.get(name) for name in ("logging", "warnings"))
    disabled = logging.root.manager.disable if logging is not None else 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if warnings is not None:
            # Not `catch_warnings`, which makes Python forget the warnings that it has shown.
            filters, ignored = warnings.filters, ("ignore", None, Warning, None, 0)
            filters.insert(0, ignored)
            stack.callback(_remove, filters, ignored)
        if logging is not None:
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, disabled)
        yield


def _remove(filters: list[Any], ignored: Any) -> None:
    at = next((at for at, one in enumerate(filters) if one is ignored), None)
    if at is not None:
        del filters[at]


def _watch_writes(torch: Any, draws: set[str]) -> Any:
    """Return a context that copies the memory of each tensor from outside before an operation writes to it."""
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Writes(mode):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._own: set[int] = set()
            self.kept: dict[int, tuple[Any, Any]] = {}

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs, schema = kwargs or {}, function._schema
            given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)}
            given.update(kwargs)
            if schema.is_mutable:
                for one in schema.arguments:
                    if one.alias_info is not None and one.alias_info.is_write:
                        for tensor in tensors_in(torch, given.get(one.name)):
                            self._keep(tensor)
            if "dropout" in schema.name or "bernoulli" in schema.name or given.get("dropout_p"):
                draws.add("dropout")
            found = function(*args, **kwargs)
            before = {_address(one) for one in tensors_in(torch, given)}
            self._own.update(
                at for one in tensors_in(torch, found) if (at := _address(one)) not in before
            )
            return found

        def _keep(self, tensor: Any) -> None:
            at = _address(tensor)
            if at not in self._own and at not in self.kept:
                storage = tensor.untyped_storage()
                self.kept[at] = storage, storage.clone()

    return Writes()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def tensors_in(torch: Any, value: Any) -> list[Any]:
    """Return the tensors in a value: itself, or those in mappings, lists and tuples at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [one for part in value for one in tensors_in(torch, part)]


class _Generators:
    """States of all random generators, those in attributes of modules included, to be restored."""

    def __init__(self, torch: Any, attributes: list[dict[str, Any]]) -> None:
        self._torch = torch
        self._host = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        values = [one for each in attributes for one in each.values()]
        self._own = [(one, one.get_state()) for one in values if isinstance(one, torch.Generator)]
        self._of_numpy = [
            (one.bit_generator, one.bit_generator.state)
            for one in values
            if numpy is not None and isinstance(one, numpy.random.Generator)
        ]

    def restore(self) -> None:
        self._torch.set_rng_state(self._host)
        if self._gpus is not None:
            self._torch.cuda.set_rng_state_all(self._gpus)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._own:
            generator.set_state(state)
        for bits, state in self._of_numpy:
            bits.state = state
