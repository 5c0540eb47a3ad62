"""Call a model of the script without changing the script's state.

The call builds no autograd graph and is not compiled. These are restored after it: existing tensors that it writes to
(weights, buffers), training modes, attributes of modules and of objects that modules hold, the script's global
variables, and random states. Its output, log messages and warnings are dropped. Files that it writes remain.
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
"""Maximum number of elements of a container that is restored."""
_THREADS = ("apr_watch", "tqdm")
"""Packages whose threads do not write global variables of the script."""


class Untouched:
    """Context manager for one call. `draws`: names of the random operations in the call (dropout); `has_changed`:
    whether it changed attributes or tensors that were then restored."""

    def __init__(
        self, torch: Any, model: Any, modes: list[tuple[Any, bool]] | None = None, seed: int = 0
    ) -> None:
        """`modes`: training mode of each module during the call; all in eval mode by default. `seed`: seed of the
        random numbers; by default the call draws those that the script would draw next."""
        self._torch, self._modules = torch, list(model.modules())
        self._wanted, self._seed = modes or [(one, False) for one in self._modules], seed
        self.draws: set[str] = set()
        self.has_changed = False

    def __enter__(self) -> Untouched:
        torch = self._torch
        self._modes = [(module, module.training) for module in self._modules]
        self._attributes = _attributes(self._modules)
        self._contents = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if (type(value) in _CONTAINERS or type(value).__name__ == "OrderedDict")
            and len(value) <= _MAX_CONTENTS
        ]
        self._generators = _Generators(torch, [values for _, values in self._attributes])
        self._stack = contextlib.ExitStack()
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            self._restore_modes()
            self._generators.restore()
            raise
        return self

    def _restore_modes(self) -> None:
        for module, mode in self._modes:
            module.training = mode

    def _enter(self) -> None:
        torch = self._torch
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        self._stack.enter_context(torch.random.fork_rng(gpus))
        self._stack.enter_context(torch.no_grad())
        # Do not import the compiler if the script has not.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(_silence())
        mha = getattr(torch.backends, "mha", None)
        if mha is not None:
            # torch's inference fast path gives different outputs at padded positions than the training path.
            self._stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        # Do not call `eval()`, which a module may override: some merge adapters in it, which rounds weights.
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
        self._restore_modes()
        self.has_changed = bool(self._writes.kept)
        for current, original in self._contents:
            if len(current) != len(original) or not _is_same(current, original):
                self.has_changed = True
                current.clear()
                (current.extend if isinstance(current, (list, deque)) else current.update)(original)
        for values, names in self._attributes:
            changed = {n: one for n, one in names.items() if values.get(n, names) is not one}
            added = [name for name in values if name not in names]
            self.has_changed |= bool(changed or added)
            values.update(changed)
            for name in added:
                del values[name]
        self._generators.restore()


def _attributes(modules: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of modules and of the script's objects that they hold, and the script's global variables,
    each with a copy."""
    namespaces = [vars(module) for module in modules]
    script = _script_modules()
    # Leave out global variables if another thread may write them during the call.
    if all(_package(one) in _THREADS for one in threading.enumerate() if one is not _MAIN):
        namespaces += script.values()
    known = set(map(id, namespaces))
    for values in list(namespaces):
        for value in list(values.values()):
            inside = getattr(value, "__dict__", None)
            if (
                type(inside) is dict
                and type(value).__module__ in script
                and id(inside) not in known
            ):
                known.add(id(inside))
                namespaces.append(inside)
    return [(values, dict(values)) for values in namespaces]


_MAIN = threading.main_thread()


def _package(thread: Any) -> str:
    target = getattr(thread, "_target", None) or type(thread)
    return str(getattr(target, "__module__", "")).split(".")[0]


def _script_modules() -> dict[str, dict[str, Any]]:
    """Return the global variables of the script's own modules, by module."""
    namespaces = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        is_library = "-packages" in place or name.split(".")[0] in sys.stdlib_module_names
        if (
            place and not is_library and name.split(".")[0] not in _NOT_OF_SCRIPT
        ) or name == "__main__":
            namespaces[name] = vars(module)
    return namespaces


_NOT_OF_SCRIPT = ("apr_watch", "sitecustomize", "engine", "workbench", "torch")


def _is_same(current: Any, original: Any) -> bool:
    if isinstance(current, dict):
        return all(name in current and current[name] is value for name, value in original.items())
    if isinstance(current, set):
        return bool(current == original)
    return all(
        value is original_value for value, original_value in zip(current, original, strict=True)
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging, warnings = (sys.modules.get(name) for name in ("logging", "warnings"))
    disabled = logging.root.manager.disable if logging is not None else 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if warnings is not None:
            # Do not use `catch_warnings`: it makes Python repeat warnings that were already shown.
            filters, ignored = warnings.filters, ("ignore", None, Warning, None, 0)
            filters.insert(0, ignored)
            stack.callback(_remove, filters, ignored)
        if logging is not None:
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, disabled)
        yield


def _remove(filters: list[Any], ignored: Any) -> None:
    index = next((index for index, entry in enumerate(filters) if entry is ignored), None)
    if index is not None:
        del filters[index]


def _watch_writes(torch: Any, draws: set[str]) -> Any:
    """Return a context manager that copies the memory of each existing tensor before an operation writes to it."""
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
            arguments = {
                argument.name: value
                for argument, value in zip(schema.arguments, args, strict=False)
            }
            arguments.update(kwargs)
            if schema.is_mutable:
                for argument in schema.arguments:
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        for tensor in tensors_in(torch, arguments.get(argument.name)):
                            self._keep(tensor)
            if "dropout" in schema.name or "bernoulli" in schema.name or arguments.get("dropout_p"):
                draws.add("dropout")
            result = function(*args, **kwargs)
            inputs = {_address(tensor) for tensor in tensors_in(torch, arguments)}
            self._own.update(
                address
                for tensor in tensors_in(torch, result)
                if (address := _address(tensor)) not in inputs
            )
            return result

        def _keep(self, tensor: Any) -> None:
            address = _address(tensor)
            if address not in self._own and address not in self.kept:
                storage = tensor.untyped_storage()
                self.kept[address] = storage, storage.clone()

    return Writes()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def tensors_in(torch: Any, value: Any) -> list[Any]:
    """Return the tensors in a value: the value itself, or those in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [one for part in value for one in tensors_in(torch, part)]


class _Generators:
    """States of the random generators of Python, numpy and attributes of modules, to be restored."""

    def __init__(self, torch: Any, attributes: list[dict[str, Any]]) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        values = [value for namespace in attributes for value in namespace.values()]
        self._in_modules = [
            (value, value.get_state()) for value in values if isinstance(value, torch.Generator)
        ]
        self._of_numpy = [
            (value.bit_generator, value.bit_generator.state)
            for value in values
            if numpy is not None and isinstance(value, numpy.random.Generator)
        ]

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._in_modules:
            generator.set_state(state)
        for bits, state in self._of_numpy:
            bits.state = state
