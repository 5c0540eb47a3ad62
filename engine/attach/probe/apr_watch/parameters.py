"""Which parameters are trained: those that backward passes reach, those that optimizers hold, and their names.

What a backward pass reaches is read from the graph behind the tensor it is called on: no module is hooked, and it
does not matter how the script calls its model.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from typing import Any

PASS, UNKNOWN, FACT, SUSPICION, FAIL = (
    "pass",
    "unknown",
    "fact",
    "suspicion",
    "fail",
)
Line = tuple[str, str, str, dict[str, Any]]
"""The id of an identity, its degree, what was seen, and the numbers behind it."""

NAMED = 3
"""So many parameters of a finding are named."""
_NODES = 100_000
"""Of a graph, a tenth of a second; a larger one is read in part."""
_EACH = 4
"""Graphs that are read in front of one step, which may have any number of micro-batches."""
_SECONDS = 2.0
"""For all graphs of a process."""


class Reached:
    """The leaves that backward passes reached."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.steps = 0
        """Optimizer steps of the process so far."""
        self._leaves: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._in_part = -1
        """The newest step in front of which a graph was read in part or not at all."""
        self._read = 0
        self._left_s = _SECONDS

    def step_ends(self) -> None:
        self.steps += 1
        self._read = 0

    def passed_by(self) -> None:
        """A backward pass whose graph is not read."""
        self._in_part = self.steps

    def look(self, tensors: Iterable[Any]) -> list[Any] | None:
        """A backward pass begins at these tensors: the nodes of embeddings behind them; None where it is not read."""
        self._read += 1
        if self._read > _EACH or self._left_s <= 0:
            self.passed_by()
            return None
        begin_s = time.monotonic()
        embeddings = self._walk(tensors)
        self._left_s -= time.monotonic() - begin_s
        return embeddings

    def _walk(self, tensors: Iterable[Any]) -> list[Any]:
        embeddings: list[Any] = []
        torch = self._torch
        roots = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        left = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
        known = set(left)
        while left:
            node = left.pop()
            kind = type(node).__name__
            if kind == "AccumulateGrad":
                leaf = node.variable
                self._leaves[id(leaf)] = weakref.ref(leaf), self.steps
            elif kind == "EmbeddingBackward0":
                embeddings.append(node)
            elif kind == "CheckpointFunctionBackward":
                # What a reentrant checkpoint computes again has a graph of its own.
                self.passed_by()
            for after, _ in node.next_functions:
                if after is not None and after not in known:
                    known.add(after)
                    left.append(after)
            if len(known) > _NODES:
                self.passed_by()
                break
        return embeddings

    def since(self, step: int) -> tuple[dict[int, Any], bool]:
        """The leaves that were reached after `step` steps, by id, and whether they are all."""
        leaves = {at: (one(), when) for at, (one, when) in self._leaves.items()}
        self._leaves = {
            at: self._leaves[at] for at, (leaf, _) in leaves.items() if leaf is not None
        }
        found = {
            at: leaf for at, (leaf, when) in leaves.items() if leaf is not None and when >= step
        }
        return found, self._in_part < step


class Modules:
    """The modules of the process, looked for among all its objects: that takes as long as a collection of garbage."""

    def __init__(self, torch: Any, parameters: Iterable[Any]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        module_type = torch.nn.Module
        self._holders: dict[int, tuple[Any, str]] = {}
        self._parents: dict[int, tuple[Any, str]] = {}
        for one in gc.get_objects():
            # Not isinstance, which asks proxies of the script's what they are.
            if not issubclass(type(one), module_type):
                continue
            inside = vars(one)
            for name, parameter in (inside.get("_parameters") or {}).items():
                if id(parameter) in wanted:
                    self._holders.setdefault(id(parameter), (one, name))
            for name, child in (inside.get("_modules") or {}).items():
                self._parents.setdefault(id(child), (one, name))

    def _path(self, parameter: Any) -> tuple[Any, str]:
        """The outermost module that holds it, and its name there."""
        if id(parameter) not in self._holders:
            return None, ""
        module, name = self._holders[id(parameter)]
        path, passed = [name], {id(module)}
        while id(module) in self._parents:
            parent, name = self._parents[id(module)]
            if id(parent) in passed:
                break
            module = parent
            passed.add(id(module))
            path.append(name)
        return module, ".".join(reversed(path))

    def around(self, parameter: Any) -> list[Any]:
        """The module that holds it, the one around that, ...: to the outermost; none where none does."""
        if id(parameter) not in self._holders:
            return []
        chain = [self._holders[id(parameter)][0]]
        while id(chain[-1]) in self._parents:
            parent = self._parents[id(chain[-1])][0]
            if any(one is parent for one in chain):
                break
            chain.append(parent)
        return chain

    def name(self, parameter: Any) -> str:
        """Empty where no module holds it."""
        return self._path(parameter)[1]

    def top(self, parameter: Any) -> Any:
        """The outermost module that holds it; None where none does."""
        return self._path(parameter)[0]

    def root(self, parameter: Any) -> int | None:
        """The id of that module."""
        top = self.top(parameter)
        return None if top is None else id(top)


def named(modules: Modules, parameters: list[Any], labels: dict[int, str]) -> str:
    """The names of the first; `labels` of those that no module holds."""
    names = [modules.name(one) or labels.get(id(one), "a parameter") for one in parameters[:NAMED]]
    return ", ".join(names) + ", ..." * (len(parameters) > NAMED)


class Held:
    """What is known of the parameters of one optimizer, from all its steps that were looked at."""

    def __init__(self) -> None:
        self._looks = 0
        self._without: dict[int, weakref.ref[Any]] = {}
        """Those that had no gradient at any of these steps."""
        self._lost = 0
        """Steps without a single gradient, although a backward pass had reached some of its parameters."""
        self._got = False

    def look(
        self,
        torch: Any,
        optimizer: Any,
        reached: dict[int, Any],
        are_all: bool,
        others: Iterable[Any],
    ) -> list[Line]:
        """At a step, with its gradients: what was found. `reached` are the leaves of the backward passes since the
        step before, `others` the parameters of all optimizers."""
        self._looks += 1
        name = type(optimizer).__name__
        mine = [
            (one, f"group {at}, parameter {place}")
            for at, group in enumerate(optimizer.param_groups)
            for place, one in enumerate(group["params"])
            if one.requires_grad
        ]
        labels = {id(one): label for one, label in mine}
        without = {id(one): one for one, _ in mine if one.grad is None}
        self._got = self._got or len(without) < len(mine)
        hit = [one for one, _ in mine if id(one) in reached]
        if hit and len(without) == len(mine):
            self._lost += 1
        if self._looks == 1:
            self._without = {at: weakref.ref(one) for at, one in without.items()}
        self._without = {at: one for at, one in self._without.items() if at in without}
        if self._lost >= 2 and not self._got:
            numbers = {"parameters": len(mine), "reached": len(hit)}
            text = (
                f"{name} has stepped {self._looks} times without a single gradient, although backward passes reached "
                f"{len(hit)} of its {len(mine)} parameters"
            )
            return [("lost_gradients", FAIL, text, numbers)]
        if self._looks < 3:
            return []
        idle = [one for one, _ in mine if id(one) in self._without]
        owned = {id(one) for one in others} | set(labels)
        # A function of the script's, or of a library, may give no gradient to what it reads.
        loose = [
            one
            for at, one in reached.items()
            if at not in owned and type(one) is torch.nn.Parameter and one.grad is not None
        ]
        given = [one for one, _ in mine if one.grad is not None and id(one) not in reached]
        if not idle and not loose:
            if not are_all:
                text = "not every backward pass could be read"
                return [("stale_parameters", UNKNOWN, text, {})]
            text = f"{len(mine)} parameters of {name}: each gets a gradient, and no others do"
            about = {"parameters": len(mine)}
            held = ("stale_parameters", "no_gradient", "unowned_parameters", "lost_gradients")
            return [(id, PASS, text, about) for id in held]
        return self._stray(torch, name, idle, loose, reached, labels, bool(given))

    def _stray(
        self,
        torch: Any,
        name: str,
        idle: list[Any],
        loose: list[Any],
        reached: dict[int, Any],
        labels: dict[int, str],
        are_given: bool,
    ) -> list[Line]:
        """`idle` are the optimizer's and get no gradient; `loose` get one and are no optimizer's."""
        modules = Modules(torch, [*idle, *reached.values()])
        loose = sorted(filter(modules.name, loose), key=modules.name)
        trained = {modules.root(one) for one in reached.values()}
        # Of no module, or of one of which nothing was reached.
        stale = [one for one in idle if modules.root(one) not in trained - {None}]
        numbers = {"idle": len(idle), "loose": len(loose), "stale": len(stale)}
        if stale and loose and (_hold_all(loose, stale) or _replaced(modules, stale)):
            text = (
                f"{name} holds {len(stale)} parameters that no backward pass reaches "
                f"({named(modules, stale, labels)}), and {len(loose)} that get gradients are in no optimizer "
                f"({named(modules, loose, labels)})"
            )
            return [("stale_parameters", FAIL, text, numbers)]
        found: list[Line] = []
        if idle:
            text = (
                f"{len(idle)} of {len(labels)} parameters of {name} had no gradient at any of {self._looks} steps that "
                f"were looked at: {named(modules, idle, labels)}"
            )
            found.append(("no_gradient", SUSPICION, text, numbers))
        # Gradients that the script sets itself are those of copies, and what they are copies of is nobody's.
        if loose and not are_given:
            text = (
                f"{len(loose)} parameters get gradients and are in no optimizer: "
                f"{named(modules, loose, labels)}"
            )
            found.append(("unowned_parameters", SUSPICION, text, numbers))
        return found


def _hold_all(loose: list[Any], stale: list[Any]) -> bool:
    """Whether each stale parameter has a counterpart of its shape."""
    shapes = [tuple(one.shape) for one in loose]
    for one in stale:
        if tuple(one.shape) not in shapes:
            return False
        shapes.remove(tuple(one.shape))
    return True


def _replaced(modules: Modules, stale: list[Any]) -> bool:
    """Whether a matrix is left that no module holds any more."""
    return any(one.dim() > 1 and modules.root(one) is None for one in stale)
