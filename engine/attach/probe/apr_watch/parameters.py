"""Find which parameters are trained (those that backward passes reach and optimizers hold) and their names.

The autograd graph of a backward pass shows what it reaches: no module is hooked, and it does not matter how the script
calls its model.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import weakref
from collections import Counter
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
"""Verdict: id of the identity, level, message, and its numbers."""
WITHDRAWN = "withdrawn"
"""Number of a pass that takes back the earlier suspicions of its identity."""

NAMED = 3
"""Maximum number of parameters that a message names."""
_CHECKED = 64
"""Maximum number of parameters without a gradient that are checked at each step."""
_MAX_NODES = 100_000
"""Maximum number of nodes that are read of a graph, about 0.1 s; a larger graph is read in part."""
_WARNED, _REGISTRY = "None of the inputs have requires_grad=True", "__warningregistry__"
"""Warning of a reentrant checkpoint that gives no gradients, and where Python records it."""
_MAX_SEARCHES = 32
"""Maximum number of searches for modules in a process, about 0.1 s each."""
_MAX_GRAPHS = 4
"""Maximum number of graphs that are read before one step, which may have any number of micro-batches."""
_MAX_SECONDS = 2.0
"""Time limit for reading all graphs of a process, in seconds."""


class Reached:
    """Leaves that backward passes reached."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.steps = 0
        """Number of optimizer steps of the process so far."""
        self._leaves: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._in_part = -1
        """Newest step before which a graph was read in part or not at all."""
        self._read = 0
        self._left_s = _MAX_SECONDS

    def step_ends(self) -> None:
        self.steps += 1
        self._read = 0

    def passed_by(self) -> None:
        """Record a backward pass whose graph is not read."""
        self._in_part = self.steps

    def look(self, tensors: Iterable[Any]) -> list[Any] | None:
        """Read the graph of a backward pass; return its embedding nodes, None where it is not read."""
        self._read += 1
        if self._read > _MAX_GRAPHS or self._left_s <= 0:
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
                # A reentrant checkpoint recomputes into a separate graph.
                self.passed_by()
            for after, _ in node.next_functions:
                if after is not None and after not in known:
                    known.add(after)
                    left.append(after)
            if len(known) > _MAX_NODES:
                self.passed_by()
                break
        return embeddings

    def since(self, step: int) -> tuple[dict[int, Any], bool]:
        """Return the leaves reached after `step` steps, by id, and whether they are all."""
        leaves = {at: (one(), when) for at, (one, when) in self._leaves.items()}
        self._leaves = {
            at: self._leaves[at] for at, (leaf, _) in leaves.items() if leaf is not None
        }
        found = {
            at: leaf for at, (leaf, when) in leaves.items() if leaf is not None and when >= step
        }
        return found, self._in_part < step


def labelled(optimizer: Any) -> list[tuple[Any, str]]:
    """Return the parameters of an optimizer with labels."""
    return [
        (one, f"group {at}, parameter {place}")
        for at, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    ]


def held_by(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


class Modules:
    """Modules of the process, found by a search of all its objects, which takes as long as a garbage collection."""

    def __init__(self, torch: Any, objects: list[Any] | None = None) -> None:
        """`objects`: those among which the modules are; by default all of the process."""
        module_type, every = torch.nn.Module, gc.get_objects() if objects is None else objects
        # Not isinstance: it would call code of the script's proxy objects.
        self.every = [one for one in every if issubclass(type(one), module_type)]
        self._holders: dict[int, tuple[Any, str]] = {}
        """Holder and name of each parameter and each module, by its id."""
        for one in self.every:
            for name, part in [*parameters_of(one), *children_of(one)]:
                self._holders.setdefault(id(part), (one, name))

    def parent(self, one: Any) -> Any:
        return self._holders.get(id(one), (None, ""))[0]

    def path(self, one: Any) -> tuple[Any, str]:
        """Return the outermost module that holds a parameter or a module, and its name there."""
        names: list[str] = []
        passed = {id(one)}
        while id(one) in self._holders:
            holder, name = self._holders[id(one)]
            if id(holder) in passed:
                break
            one = holder
            passed.add(id(one))
            names.insert(0, name)
        return one, ".".join(names)

    def name(self, parameter: Any) -> str:
        """Return the parameter's name; empty where no module holds it."""
        return self.path(parameter)[1]

    def tops(self, parameters: list[Any]) -> list[Any]:
        """Return the outermost modules that hold these parameters."""
        found = (self.path(one) for one in parameters)
        return list({id(top): top for top, name in found if name}.values())

    def untrained(self, trained: Iterable[Any]) -> list[Any]:
        """Return the outermost modules with parameters none of which is trained, if they give logits."""
        held = {id(one) for one in trained}
        is_free = {
            id(one): not any(id(p) in held for p in one.parameters())
            for one in self.every
            if next(one.parameters(), None) is not None
        }
        return [
            one
            for one in self.every
            if is_free.get(id(one))
            and not is_free.get(id(self.parent(one)))
            and any(p.dim() == 2 for p in one.parameters())
            and next(one.children(), None) is not None
        ]

    def root(self, parameter: Any) -> int | None:
        """Return the id of the outermost module that holds a parameter; None where none does."""
        top, name = self.path(parameter)
        return id(top) if name else None


class Search:
    """Limited number of searches for the modules of the process; what is asked between two backward passes shares one,
    as there may be an optimizer for each parameter."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._left = torch, _MAX_SEARCHES
        self._found: Modules | None = None

    @property
    def modules(self) -> Modules:
        """All modules of the process; none if there were too many searches."""
        if self._found is None:
            self._left -= 1
            self._found = Modules(self._torch, None if self._left >= 0 else [])
        return self._found

    def forget(self) -> None:
        self._found = None


def parameters_of(module: Any) -> list[tuple[str, Any]]:
    """Return the parameters of a module itself with their names, without calling code of the script."""
    found = (vars(module).get("_parameters") or {}).items()
    return [(name, one) for name, one in found if one is not None]


def children_of(module: Any) -> list[tuple[str, Any]]:
    found = (vars(module).get("_modules") or {}).items()
    return [(name, one) for name, one in found if one is not None]


def listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def named(modules: Modules, found: Iterable[tuple[Any, str]]) -> str:
    """Return the names of the first parameters, each given with a label for the case that no module holds it."""
    return listed([modules.name(one) or label for one, label in found])


class Held:
    """Gradients of one optimizer's parameters at its sampled steps."""

    def __init__(self) -> None:
        self._sampled_steps = 0
        self._without: dict[int, weakref.ref[Any]] = {}
        """Parameters without a gradient at all sampled steps."""
        self.is_suspected = False
        """Whether some of those are suspected."""
        self._lost = 0
        """Number of steps without a single gradient, although a backward pass had reached some parameters."""
        self._got = False

    def look(
        self,
        torch: Any,
        optimizer: Any,
        reached: dict[int, Any],
        are_all: bool,
        others: Iterable[Any],
    ) -> list[Line]:
        """Return the verdicts at a step. `reached`: leaves of the backward passes since the previous step; `others`:
        the parameters of all optimizers."""
        self._sampled_steps += 1
        name = type(optimizer).__name__
        mine = [(one, label) for one, label in labelled(optimizer) if one.requires_grad]
        labels = {id(one): label for one, label in mine}
        without = {id(one): one for one, _ in mine if one.grad is None}
        self._got = self._got or len(without) < len(mine)
        hit = [one for one, _ in mine if id(one) in reached]
        if hit and len(without) == len(mine):
            self._lost += 1
        if self._sampled_steps == 1:
            self._without = {at: weakref.ref(one) for at, one in without.items()}
        self._without = {at: one for at, one in self._without.items() if at in without}
        if self._lost >= 2 and not self._got:
            numbers = {"parameters": len(mine), "reached": len(hit)}
            text = (
                f"{name} has stepped {self._sampled_steps} times without a single gradient, although backward "
                f"passes reached {len(hit)} of its {len(mine)} parameters"
            )
            return [("lost_gradients", FAIL, text, numbers)]
        if self._sampled_steps < 3:
            return []
        if not mine and not any(p.grad is not None for p in held_by(optimizer)):
            text = f"no parameter of {name} requires a gradient: its steps train nothing"
            return [("no_gradient", SUSPICION, text, {"parameters": 0})]
        idle = [one for one, _ in mine if id(one) in self._without]
        owned = {id(one) for one in others} | set(labels)
        # A custom autograd function may give no gradient to a parameter that it reads.
        loose = [
            one
            for at, one in reached.items()
            if at not in owned and type(one) is torch.nn.Parameter and one.grad is not None
        ]
        given = [one for one, _ in mine if one.grad is not None and id(one) not in reached]
        self.is_suspected = self.is_suspected or bool(idle)
        if not idle and not loose:
            if not are_all:
                text = "not every backward pass could be read"
                return [("stale_parameters", UNKNOWN, text, {})]
            text = f"{len(mine)} parameters of {name}: each gets a gradient, and no others do"
            about = {"parameters": len(mine)}
            held = ("stale_parameters", "no_gradient", "unowned_parameters", "lost_gradients")
            return [(id, PASS, text, about) for id in held]
        return self._stray(torch, name, idle, loose, reached, labels, bool(given))

    def has_caught_up(self) -> bool:
        """Return whether the suspicion falls: a gradient has come since for each of its parameters."""
        if not self.is_suspected:
            return False
        for at in list(itertools.islice(self._without, _CHECKED)):
            ref = self._without.pop(at)
            one = ref()
            if one is not None and one.grad is None:
                self._without[at] = ref  # at the end: the next step checks others
        self.is_suspected = bool(self._without)
        return not self.is_suspected

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
        """Judge parameters of the optimizer without gradients (`idle`) and those with gradients in no optimizer
        (`loose`)."""
        modules = Modules(torch)

        def names(found: list[Any]) -> str:
            return named(modules, [(one, labels.get(id(one), "a parameter")) for one in found])

        loose = sorted(filter(modules.name, loose), key=modules.name)
        trained = {modules.root(one) for one in reached.values()}
        # Stale: held by no module, or by one of which no parameter was reached.
        stale = [one for one in idle if modules.root(one) not in trained - {None}]
        numbers = {"idle": len(idle), "loose": len(loose), "stale": len(stale)}
        if stale and loose and (_hold_all(loose, stale) or _replaced(modules, stale)):
            text = (
                f"{name} holds {len(stale)} parameters that no backward pass reaches "
                f"({names(stale)}), and {len(loose)} that get gradients are in no optimizer "
                f"({names(loose)})"
            )
            return [("stale_parameters", FAIL, text, numbers)]
        found: list[Line] = []
        if idle:
            text = (
                f"{len(idle)} of {len(labels)} parameters of {name} had no gradient at any of {self._sampled_steps} "
                f"sampled steps: {names(idle)}"
            )
            checkpoint = sys.modules.get("torch.utils.checkpoint")
            if _WARNED in str(getattr(checkpoint, _REGISTRY, "")):
                text += "; torch warns that no input of a checkpointed layer requires a gradient"
            found.append(("no_gradient", SUSPICION, text, numbers))
        # A script that sets gradients itself (master weights) trains copies: the originals are in no optimizer.
        if loose and not are_given:
            text = f"{len(loose)} parameters get gradients and are in no optimizer: {names(loose)}"
            found.append(("unowned_parameters", SUSPICION, text, numbers))
        return found


def _hold_all(loose: list[Any], stale: list[Any]) -> bool:
    """Return whether each stale parameter has a counterpart of its shape."""
    return not Counter(one.shape for one in stale) - Counter(one.shape for one in loose)


def _replaced(modules: Modules, stale: list[Any]) -> bool:
    """Return whether a matrix is left that no module holds any more."""
    return any(one.dim() > 1 and modules.root(one) is None for one in stale)
