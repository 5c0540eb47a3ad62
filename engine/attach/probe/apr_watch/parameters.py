"""Find the names of parameters, and check that each trained parameter gets a gradient and is in an optimizer.

The parameters that a backward pass reaches are read from its autograd graph: no module is hooked, and it does not
matter how the script calls its model.
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
"""Key in a passing verdict's numbers: the verdict withdraws earlier suspicions of its identity."""

NAMED = 3
"""Maximum number of parameters that a message names."""
_CHECKED = 64
"""Maximum number of parameters without a gradient that are checked at each step."""
_MAX_NODES = 100_000
"""Maximum number of nodes of a graph that are read, which takes about 0.1 s; a larger graph is read partly."""
_WARNED, _REGISTRY = "None of the inputs have requires_grad=True", "__warningregistry__"
"""torch's warning about a reentrant checkpoint that gives no gradients; attribute in which Python records warnings."""
_MAX_SEARCHES = 32
"""Maximum number of searches for modules in a process, about 0.1 s each."""
_MAX_GRAPHS = 4
"""Maximum number of graphs that are read for one step: a step may have many micro-batches."""
_MAX_SECONDS = 2.0
"""Time limit for reading all graphs of a process, in seconds."""


class ReachedLeaves:
    """Leaf tensors that backward passes reached."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.steps = 0
        """Number of optimizer steps of the process so far."""
        self._leaves: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._newest_unread = -1
        """Value of `steps` when a graph was last read partly or not at all."""
        self._read = 0
        self._left_s = _MAX_SECONDS

    def step_ends(self) -> None:
        self.steps += 1
        self._read = 0

    def not_read(self) -> None:
        """Record a backward pass whose graph is not read."""
        self._newest_unread = self.steps

    def read(self, tensors: Iterable[Any]) -> list[Any] | None:
        """Read the graph of a backward pass; return its embedding nodes, or None if the graph is not read."""
        self._read += 1
        if self._read > _MAX_GRAPHS or self._left_s <= 0:
            self.not_read()
            return None
        begin_s = time.monotonic()
        embeddings = self._walk(tensors)
        self._left_s -= time.monotonic() - begin_s
        return embeddings

    def _walk(self, tensors: Iterable[Any]) -> list[Any]:
        embeddings: list[Any] = []
        torch = self._torch
        roots = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        pending = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
        known = set(pending)
        while pending:
            node = pending.pop()
            kind = type(node).__name__
            if kind == "AccumulateGrad":
                leaf = node.variable
                self._leaves[id(leaf)] = weakref.ref(leaf), self.steps
            elif kind == "EmbeddingBackward0":
                embeddings.append(node)
            elif kind == "CheckpointFunctionBackward":
                # A reentrant checkpoint recomputes into a separate graph.
                self.not_read()
            for child, _ in node.next_functions:
                if child is not None and child not in known:
                    known.add(child)
                    pending.append(child)
            if len(known) > _MAX_NODES:
                self.not_read()
                break
        return embeddings

    def since(self, step: int) -> tuple[dict[int, Any], bool]:
        """Return the leaves reached since `steps` was `step`, by id, and whether all graphs were read completely."""
        leaves = {
            leaf_id: (reference(), reached_at)
            for leaf_id, (reference, reached_at) in self._leaves.items()
        }
        self._leaves = {
            leaf_id: self._leaves[leaf_id]
            for leaf_id, (leaf, _) in leaves.items()
            if leaf is not None
        }
        recent = {
            leaf_id: leaf
            for leaf_id, (leaf, reached_at) in leaves.items()
            if leaf is not None and reached_at >= step
        }
        return recent, self._newest_unread < step


def labelled(optimizer: Any) -> list[tuple[Any, str]]:
    """Return the parameters of an optimizer, each with its group and index as a label."""
    return [
        (parameter, f"group {index}, parameter {place}")
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def held_by(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def decay_of(torch: Any, optimizer: Any) -> list[Line]:
    """Judge which parameters of an optimizer decay: usually its matrices, and not its biases and norms."""
    decays: dict[bool, set[bool]] = {True: set(), False: set()}
    for group in optimizer.param_groups:
        rate = group.get("weight_decay", 0.0)
        if type(rate) not in (int, float):
            return []
        for parameter in group["params"]:
            if type(parameter) is not torch.nn.Parameter:
                return []  # sharded parameters may be flat
            decays[parameter.dim() > 1].add(rate > 0)
    name = type(optimizer).__name__
    if decays[True] == {False} and decays[False] == {True}:
        text = f"the weight decay of {name} is for biases and norms alone, and for none of its matrices"
        return [("decay_groups", SUSPICION, text, {})]
    if True in decays[True]:
        return [("decay_groups", PASS, f"the weight decay of {name} is for matrices", {})]
    return []


class Modules:
    """Modules of the process, found by a search of all its objects, which takes as long as a garbage collection."""

    def __init__(self, torch: Any, objects: list[Any] | None = None) -> None:
        """`objects`: the objects to search; by default all objects of the process."""
        module_type, every = torch.nn.Module, gc.get_objects() if objects is None else objects
        # Not isinstance: it would call code of the script's proxy objects.
        self.every = [module for module in every if issubclass(type(module), module_type)]
        self._holders: dict[int, tuple[Any, str]] = {}
        """Holder and name of each parameter and each module, by its id."""
        for module in self.every:
            for name, child in [*parameters_of(module), *children_of(module)]:
                self._holders.setdefault(id(child), (module, name))

    def parent(self, member: Any) -> Any:
        return self._holders.get(id(member), (None, ""))[0]

    def path(self, member: Any) -> tuple[Any, str]:
        """Return the outermost module that holds a parameter or a module, and its name there."""
        names: list[str] = []
        passed = {id(member)}
        while id(member) in self._holders:
            holder, name = self._holders[id(member)]
            if id(holder) in passed:
                break
            member = holder
            passed.add(id(member))
            names.insert(0, name)
        return member, ".".join(names)

    def name(self, parameter: Any) -> str:
        """Return the parameter's name; empty where no module holds it."""
        return self.path(parameter)[1]

    def tops(self, parameters: list[Any]) -> list[Any]:
        """Return the outermost modules that hold these parameters."""
        paths = (self.path(one) for one in parameters)
        return list({id(top): top for top, name in paths if name}.values())

    def untrained(self, trained: Iterable[Any]) -> list[Any]:
        """Return the outermost modules with parameters none of which is trained, if they give logits."""
        trained_ids = {id(module) for module in trained}
        is_free = {
            id(module): not any(id(p) in trained_ids for p in module.parameters())
            for module in self.every
            if next(module.parameters(), None) is not None
        }
        return [
            module
            for module in self.every
            if is_free.get(id(module))
            and not is_free.get(id(self.parent(module)))
            and any(p.dim() == 2 for p in module.parameters())
            and next(module.children(), None) is not None
        ]

    def root(self, parameter: Any) -> int | None:
        """Return the id of the outermost module that holds a parameter; None where none does."""
        top, name = self.path(parameter)
        return id(top) if name else None


class Search:
    """Searches for the modules of the process, limited in number. All callers between two backward passes share one
    search: there may be as many optimizers as parameters."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._searches_left = torch, _MAX_SEARCHES
        self._modules: Modules | None = None

    @property
    def modules(self) -> Modules:
        """All modules of the process; empty once _MAX_SEARCHES is reached."""
        if self._modules is None:
            self._searches_left -= 1
            self._modules = Modules(self._torch, None if self._searches_left >= 0 else [])
        return self._modules

    def forget(self) -> None:
        self._modules = None


def parameters_of(module: Any) -> list[tuple[str, Any]]:
    """Return names and parameters of a module without its children, without calling code of the script."""
    members = (vars(module).get("_parameters") or {}).items()
    return [(name, one) for name, one in members if one is not None]


def children_of(module: Any) -> list[tuple[str, Any]]:
    members = (vars(module).get("_modules") or {}).items()
    return [(name, one) for name, one in members if one is not None]


def listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def named(modules: Modules, parameters: Iterable[tuple[Any, str]]) -> str:
    """Return the names of the first parameters. A parameter that no module holds is named by its label."""
    return listed([modules.name(one) or label for one, label in parameters])


class MissingGradients:
    """Check at sampled steps that all parameters of one optimizer get gradients, and parameters outside of optimizers
    get none."""

    def __init__(self) -> None:
        self._sampled_steps = 0
        self._without: dict[int, weakref.ref[Any]] = {}
        """Parameters that had no gradient at any sampled step."""
        self.is_suspected = False
        """Whether parameters without gradients were reported."""
        self._lost = 0
        """Number of steps at which no parameter had a gradient although a backward pass had reached some."""
        self._got = False

    def check(
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
        trainable = [
            (parameter, label)
            for parameter, label in labelled(optimizer)
            if parameter.requires_grad
        ]
        labels = {id(parameter): label for parameter, label in trainable}
        without = {id(parameter): parameter for parameter, _ in trainable if parameter.grad is None}
        self._got = self._got or len(without) < len(trainable)
        hit = [parameter for parameter, _ in trainable if id(parameter) in reached]
        if hit and len(without) == len(trainable):
            self._lost += 1
        if self._sampled_steps == 1:
            self._without = {id_: weakref.ref(parameter) for id_, parameter in without.items()}
        self._without = {id_: ref for id_, ref in self._without.items() if id_ in without}
        if self._lost >= 2 and not self._got:
            numbers = {"parameters": len(trainable), "reached": len(hit)}
            text = (
                f"{name} has stepped {self._sampled_steps} times without a single gradient, although backward "
                f"passes reached {len(hit)} of its {len(trainable)} parameters"
            )
            return [("lost_gradients", FAIL, text, numbers)]
        if self._sampled_steps < 3:
            return []
        if not trainable and not any(p.grad is not None for p in held_by(optimizer)):
            text = f"no parameter of {name} requires a gradient: its steps train nothing"
            return [("no_gradient", SUSPICION, text, {"parameters": 0})]
        idle = [parameter for parameter, _ in trainable if id(parameter) in self._without]
        owned = {id(parameter) for parameter in others} | set(labels)
        # A custom autograd function may return no gradient for a parameter: then `grad` is None.
        unowned = [
            parameter
            for id_, parameter in reached.items()
            if id_ not in owned
            and type(parameter) is torch.nn.Parameter
            and parameter.grad is not None
        ]
        set_by_script = [
            parameter
            for parameter, _ in trainable
            if parameter.grad is not None and id(parameter) not in reached
        ]
        self.is_suspected = self.is_suspected or bool(idle)
        if not idle and not unowned:
            if not are_all:
                text = "not every backward pass could be read"
                return [("stale_parameters", UNKNOWN, text, {})]
            text = f"{len(trainable)} parameters of {name}: each gets a gradient, and no others do"
            about = {"parameters": len(trainable)}
            identities = ("stale_parameters", "no_gradient", "unowned_parameters", "lost_gradients")
            return [(id, PASS, text, about) for id in identities]
        return self._judge_missing(torch, name, idle, unowned, reached, labels, bool(set_by_script))

    def has_caught_up(self) -> bool:
        """Return whether to withdraw the suspicion: by now each of its parameters has had a gradient."""
        if not self.is_suspected:
            return False
        for id_ in list(itertools.islice(self._without, _CHECKED)):
            ref = self._without.pop(id_)
            parameter = ref()
            if parameter is not None and parameter.grad is None:
                self._without[id_] = (
                    ref  # to the end of the queue: the next call checks other parameters
                )
        self.is_suspected = bool(self._without)
        return not self.is_suspected

    def _judge_missing(
        self,
        torch: Any,
        name: str,
        idle: list[Any],
        unowned: list[Any],
        reached: dict[int, Any],
        labels: dict[int, str],
        are_set_by_script: bool,
    ) -> list[Line]:
        """Judge parameters of the optimizer that get no gradient (`idle`), and parameters that get gradients and are in
        no optimizer (`unowned`)."""
        modules = Modules(torch)

        def names(parameters: list[Any]) -> str:
            return named(
                modules,
                [(parameter, labels.get(id(parameter), "a parameter")) for parameter in parameters],
            )

        unowned = sorted(filter(modules.name, unowned), key=modules.name)
        trained = {modules.root(parameter) for parameter in reached.values()}
        # Stale: in no module, or in a model none of whose parameters was reached.
        stale = [parameter for parameter in idle if modules.root(parameter) not in trained - {None}]
        numbers = {"idle": len(idle), "loose": len(unowned), "stale": len(stale)}
        if (
            stale
            and unowned
            and (_match_shapes(unowned, stale) or _have_lost_matrix(modules, stale))
        ):
            text = (
                f"{name} holds {len(stale)} parameters that no backward pass reaches "
                f"({names(stale)}), and {len(unowned)} that get gradients are in no optimizer "
                f"({names(unowned)})"
            )
            return [("stale_parameters", FAIL, text, numbers)]
        lines: list[Line] = []
        if idle:
            text = (
                f"{len(idle)} of {len(labels)} parameters of {name} had no gradient at any of {self._sampled_steps} "
                f"sampled steps: {names(idle)}"
            )
            checkpoint = sys.modules.get("torch.utils.checkpoint")
            if _WARNED in str(getattr(checkpoint, _REGISTRY, "")):
                text += "; torch warns that no input of a checkpointed layer requires a gradient"
            lines.append(("no_gradient", SUSPICION, text, numbers))
        # A script that sets gradients itself trains copies (fp32 master weights): the originals are in no optimizer.
        if unowned and not are_set_by_script:
            text = (
                f"{len(unowned)} parameters get gradients and are in no optimizer: {names(unowned)}"
            )
            lines.append(("unowned_parameters", SUSPICION, text, numbers))
        return lines


def _match_shapes(unowned: list[Any], stale: list[Any]) -> bool:
    """Return whether each stale parameter has an unowned counterpart of the same shape."""
    return not Counter(one.shape for one in stale) - Counter(one.shape for one in unowned)


def _have_lost_matrix(modules: Modules, stale: list[Any]) -> bool:
    """Return whether one of the stale matrices is in no module: the script replaced it."""
    return any(one.dim() > 1 and modules.root(one) is None for one in stale)
