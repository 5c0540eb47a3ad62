"""Check that dropout and batch norm are in training mode in training steps and in eval mode in evaluations.

Modules are found once for each optimizer, from the parameters that it steps; their flags are read and nothing is
hooked. An evaluation in training mode is recognised by batch norms that updated their statistics, or by gradients that
are off while dropout is in training mode, where there is no other model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from .data import Pass
from .parameters import (
    FACT,
    PASS,
    SUSPICION,
    Line,
    Modules,
    Search,
    children_of,
    held_by,
    listed,
    parameters_of,
)

_IN_A_ROW = 2
"""Number of consecutive batches of an evaluation in training mode, from which it is reported."""

_DROPOUT, _BATCH_NORM = "dropout", "batch norm"


class _ModeDependent:
    """A module that behaves differently in training mode."""

    def __init__(self, module: Any, path: str, kind: str) -> None:
        self.module = weakref.ref(module)
        self.path, self.kind = path, kind


def _kind(torch: Any, module: Any) -> str | None:
    nn = torch.nn.modules
    kind, inside = type(module), vars(module)
    if issubclass(kind, nn.dropout._DropoutNd):
        return _DROPOUT if inside.get("p") else None
    if issubclass(kind, (nn.rnn.RNNBase, nn.activation.MultiheadAttention)):
        return _DROPOUT if inside.get("dropout") else None
    if issubclass(kind, nn.batchnorm._BatchNorm):
        # Without running statistics it uses those of the batch in either mode.
        return _BATCH_NORM if _statistics(module) is not None else None
    return None


def _statistics(module: Any) -> Any:
    return (vars(module).get("_buffers") or {}).get("running_mean")


def _is_training(module: Any) -> bool:
    return bool(vars(module).get("training", True))


class _NearbyModules:
    """Modules near the parameters of an optimizer: the mode-dependent ones, and the others that hold parameters."""

    def __init__(self, torch: Any, modules: Modules, parameters: list[Any]) -> None:
        self._torch, self._trained = torch, {id(p) for p in parameters}
        self._holds: dict[int, bool] = {}
        self.mode_dependent: dict[int, _ModeDependent] = {}
        self.holders: dict[int, weakref.ref[Any]] = {}
        for top in modules.tops(parameters):
            self._collect(top, "", True)

    def _holds_any(self, module: Any) -> bool:
        """Return whether a module or one inside it has one of the trained parameters."""
        if id(module) not in self._holds:
            self._holds[id(module)] = False
            inside = [self._holds_any(one) for _, one in children_of(module)]
            self._holds[id(module)] = self._has_own(module) or any(inside)
        return self._holds[id(module)]

    def _has_own(self, module: Any) -> bool:
        return any(id(one) in self._trained for _, one in parameters_of(module))

    def _collect(self, module: Any, path: str, is_near: bool) -> None:
        """Collect mode-dependent modules and holders. `is_near`: the parent has trained parameters. Dropout inside a
        frozen part does not count, nor does a batch norm with frozen weights."""
        kind = _kind(self._torch, module)
        if kind is not None and (self._has_own(module) if parameters_of(module) else is_near):
            self.mode_dependent.setdefault(id(module), _ModeDependent(module, path, kind))
        elif kind is None and self._has_own(module):
            self.holders.setdefault(id(module), weakref.ref(module))
        for name, child in children_of(module):
            if id(child) not in self.mode_dependent and id(child) not in self.holders:
                child_path = f"{path}.{name}" if path else name
                self._collect(child, child_path, self._holds_any(module))


def _is_alone(acting: list[_ModeDependent], modules: Modules) -> bool:
    """Return whether the model of these modules is the only one in the process."""
    living = [module for dependent in acting if (module := dependent.module()) is not None]
    known = {id(modules.path(module)[0]) for module in living}
    every = {id(modules.path(module)[0]) for module in modules.every if parameters_of(module)}
    return bool(every) and every <= known


class Modes:
    """Modes of the modules that hold one optimizer's parameters."""

    def __init__(self) -> None:
        self._mode_dependent: list[_ModeDependent] | None = None
        self._holders: list[Any] = []
        self._was_training = False

    def check(self, torch: Any, optimizer: Any, search: Search) -> list[Line]:
        """Return the verdict at a step, while its gradients exist."""
        if self._mode_dependent is None:
            trained = [one for one in held_by(optimizer) if one.grad is not None]
            if not trained:
                return []
            near = _NearbyModules(torch, search.modules, trained)
            self._mode_dependent, self._holders = (
                [*near.mode_dependent.values()],
                [*near.holders.values()],
            )
        living = [
            (dependent, module)
            for dependent in self._mode_dependent
            if (module := dependent.module()) is not None
        ]
        if not living:
            return []
        in_eval = [dependent for dependent, module in living if not _is_training(module)]
        name = type(optimizer).__name__
        numbers = {"modules": len(living), "eval": len(in_eval)}
        in_training = [dependent for dependent, module in living if _is_training(module)]
        if in_training:
            self._was_training = True
            text = f"{name} trains {_counts_text(in_training)} in training mode"
            text += f", {len(in_eval)} in eval mode" if in_eval else ""
            return [("training_mode", PASS, text, numbers)]
        since = ", which they were not before" if self._was_training else ""
        self._was_training = False
        text = f"{name} steps a model with {_counts_text(in_eval)} in eval mode{since}: {_names_text(in_eval)}"
        # If modules around these are in training mode, the script has chosen eval mode for these alone.
        chosen = any(_is_training(holder) for ref in self._holders if (holder := ref()) is not None)
        return [("training_mode", FACT if chosen else SUSPICION, text, numbers)]

    def have_turned(self) -> bool:
        """Return whether all mode-dependent modules have left training mode since the last check."""
        return self._was_training and not any(
            _is_training(module)
            for dependent in self._mode_dependent or ()
            if (module := dependent.module()) is not None
        )

    @property
    def are_in_eval(self) -> bool:
        """Whether no module with trained parameters is in training mode."""
        living = [holder for ref in self._holders if (holder := ref()) is not None]
        return bool(living) and not any(map(_is_training, living))

    @property
    def mode_dependent(self) -> list[_ModeDependent]:
        return self._mode_dependent or []


class Evaluations:
    """Passes over data loaders without a backward pass, while modules are in training mode."""

    def __init__(self, torch: Any, search: Search) -> None:
        self._torch, self._search = torch, search
        self._pass: Pass | None = None
        self._decided: weakref.ref[Any] | None = None
        """First module of a model that has its verdict."""
        self._in_a_row = 0
        self._before: tuple[Any, list[tuple[_ModeDependent, int]], list[_ModeDependent]] | None = (
            None
        )
        self._calm: list[_ModeDependent] = []
        """Modules that were all in eval mode when the newest batch was yielded."""

    def trained_on(self) -> None:
        """Record the begin of a backward pass or of a step."""
        self._in_a_row, self._before, self._calm = 0, None, []

    def fetched(self, loader_pass: Pass, acting: Iterable[_ModeDependent]) -> None:
        """Record a yielded batch; `acting` are the mode-dependent modules of all trained models."""
        if loader_pass is not self._pass:
            self._pass, self._in_a_row = loader_pass, 0
        self._before, self._calm = None, []
        if loader_pass.feeds:
            return
        living = [
            (dependent, module)
            for dependent in acting
            if (module := dependent.module()) is not None
        ]
        if not living or (self._decided is not None and self._decided() is living[0][1]):
            return
        if any(_is_cumulative(module) for _, module in living):
            return
        training = [(dependent, module) for dependent, module in living if _is_training(module)]
        if not training:
            self._calm = [dependent for dependent, _ in living]
            return
        counts = [
            (dependent, version)
            for dependent, module in training
            if dependent.kind == _BATCH_NORM and (version := _version(module)) is not None
        ]
        # All must be in training mode, as parts of a model may be frozen.
        without_grad = not self._torch.is_grad_enabled() and len(training) == len(living)
        drops = [one for one, _ in training if one.kind == _DROPOUT and without_grad]
        if counts or drops:
            self._before = living[0][0].module, counts, drops

    def asked_for(self, iterator: Any) -> list[Line]:
        """Return the verdict on the previous batch, which was processed when the next one is requested."""
        if self._calm and self._pass is not None and self._pass.of() is iterator:
            calm, self._calm = self._calm, []
            if any(
                _is_training(module)
                for dependent in calm
                if (module := dependent.module()) is not None
            ):
                return []
            text = f"on batches without a backward pass, {_counts_text(calm)} stay in eval mode"
            return [("evaluation_mode", PASS, text, {"modules": len(calm)})]
        if self._before is None or self._pass is None or self._pass.of() is not iterator:
            return []
        first, counts, drops = self._before
        self._before = None
        moved = [
            dependent
            for dependent, version in counts
            if (module := dependent.module()) is not None
            and _is_training(module)
            and _version(module) not in (None, version)
        ]
        self._in_a_row = self._in_a_row + 1 if moved or drops else 0
        if self._in_a_row < _IN_A_ROW:
            return []
        self._decided = first
        if not moved and not _is_alone(drops, self._search.modules):
            return []  # another model may be evaluated
        effect = (
            f"{_counts_text(moved)} updated statistics: {_names_text(moved)}"
            if moved
            else f"{_counts_text(drops)} in training mode: {_names_text(drops)}"
        )
        text = f"on batches without a backward pass, {effect}"
        return [("evaluation_mode", SUSPICION, text, {"modules": len(moved or drops)})]


def _version(module: Any) -> int | None:
    """Return the version of a batch norm's counter, which each update raises, without reading it from the GPU; None
    where it has none."""
    count = (vars(module).get("_buffers") or {}).get("num_batches_tracked")
    return None if count is None or count.is_inference() else int(count._version)


def _is_cumulative(module: Any) -> bool:
    """Return whether a batch norm computes a cumulative mean, which needs training mode, as in `update_bn`."""
    return _statistics(module) is not None and vars(module).get("momentum", 0.1) is None


def _counts_text(acting: list[_ModeDependent]) -> str:
    kinds = [dependent.kind for dependent in acting]
    counts = {kind: kinds.count(kind) for kind in (_DROPOUT, _BATCH_NORM)}
    return " and ".join(
        f"{count} {kind} layer{'s' * (count > 1)}" for kind, count in counts.items() if count
    )


def _names_text(acting: list[_ModeDependent]) -> str:
    return listed([dependent.path or "the module itself" for dependent in acting])


class Verdicts:
    """Verdicts found between two steps, with the interface of a sampled step."""

    def __init__(self, lines: list[Line], step: int | None = None) -> None:
        """`step`: the step that the verdicts are about, if not the current one."""
        self._lines, self.step = lines, step

    def has_passed(self) -> bool:
        return True

    def lines(self) -> list[Line]:
        return self._lines
