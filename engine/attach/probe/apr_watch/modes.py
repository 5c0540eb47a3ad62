"""Check that dropout and batch norm are in training mode in training steps and in eval mode in evaluations.

The modules around an optimizer's parameters are found once and their `training` flags are read; no hook is installed.
An evaluation in training mode is detected in two ways: a batch norm updates its running statistics on batches without a
backward pass, or dropout is in training mode while gradients are disabled and the process has no other model.
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

_SEEDED_STEPS = 4
"""Number of checked steps whose random states are compared."""
_IN_A_ROW = 2
"""Number of consecutive batches evaluated in training mode from which this is reported."""

_DROPOUT, _BATCH_NORM = "dropout", "batch norm"


class _ModeDependent:
    """A dropout or batch norm module, which behaves differently in training mode."""

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
        # Without running statistics it uses the statistics of the batch in both modes.
        return _BATCH_NORM if _statistics(module) is not None else None
    return None


def _statistics(module: Any) -> Any:
    return (vars(module).get("_buffers") or {}).get("running_mean")


def _is_training(module: Any) -> bool:
    return bool(vars(module).get("training", True))


class _NearbyModules:
    """Modules near the parameters of an optimizer: mode-dependent modules, and `holders`, which are other modules with
    trained parameters."""

    def __init__(self, torch: Any, modules: Modules, parameters: list[Any]) -> None:
        self._torch, self._trained = torch, {id(p) for p in parameters}
        self._holds: dict[int, bool] = {}
        self.mode_dependent: dict[int, _ModeDependent] = {}
        self.holders: dict[int, weakref.ref[Any]] = {}
        self.not_frozen: list[Line] = []
        """Verdict on modules that the script set `requires_grad = False` on, which freezes nothing."""
        for top in modules.tops(parameters):
            self._collect(top, "", True)
        names = [
            modules.path(module)[1] or type(module).__name__
            for module in modules.every
            if vars(module).get("requires_grad") is False and self._holds_any(module)
        ]
        if names:
            text = f"requires_grad is set to False on {listed(names)}, whose parameters are trained nevertheless"
            self.not_frozen = [("not_frozen", SUSPICION, text, {"modules": len(names)})]

    def _holds_any(self, module: Any) -> bool:
        """Return whether a module or one of its descendants has a trained parameter."""
        if id(module) not in self._holds:
            self._holds[id(module)] = False
            inside = [self._holds_any(one) for _, one in children_of(module)]
            self._holds[id(module)] = self._has_own(module) or any(inside)
        return self._holds[id(module)]

    def _has_own(self, module: Any) -> bool:
        return any(id(one) in self._trained for _, one in parameters_of(module))

    def _collect(self, module: Any, path: str, is_near: bool) -> None:
        """Collect mode-dependent modules and holders. `is_near`: the parent has trained parameters. Dropout inside a
        frozen module is left out, and so is a batch norm with frozen weights."""
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
    """Return whether the process has no model other than the one with these modules."""
    living = [module for dependent in acting if (module := dependent.module()) is not None]
    known = {id(modules.path(module)[0]) for module in living}
    every = {id(modules.path(module)[0]) for module in modules.every if parameters_of(module)}
    return bool(every) and every <= known


class Modes:
    """Check of training mode for the modules around one optimizer's parameters."""

    def __init__(self) -> None:
        self._mode_dependent: list[_ModeDependent] | None = None
        self._holders: list[Any] = []
        self._was_training = False
        self._lines: list[Line] = []
        self._random_states: list[int] = []

    def check(self, torch: Any, optimizer: Any, search: Search) -> list[Line]:
        """Return the verdict before a step, while the gradients exist."""
        if self._mode_dependent is None:
            trained = [one for one in held_by(optimizer) if one.grad is not None]
            if not trained:
                return []
            near = _NearbyModules(torch, search.modules, trained)
            self._mode_dependent, self._holders = (
                [*near.mode_dependent.values()],
                [*near.holders.values()],
            )
            self._lines = near.not_frozen
        lines, self._lines = self._lines, []
        living = [
            (dependent, module)
            for dependent in self._mode_dependent
            if (module := dependent.module()) is not None
        ]
        if not living:
            return lines
        in_eval = [dependent for dependent, module in living if not _is_training(module)]
        name = type(optimizer).__name__
        numbers = {"modules": len(living), "eval": len(in_eval)}
        in_training = [dependent for dependent, module in living if _is_training(module)]
        if in_training:
            self._was_training = True
            text = f"{name} trains {_counts_text(in_training)} in training mode"
            text += f", {len(in_eval)} in eval mode" if in_eval else ""
            lines += self._check_random_state(torch, optimizer, in_training)
            return [*lines, ("training_mode", PASS, text, numbers)]
        since = ", which they were not before" if self._was_training else ""
        self._was_training = False
        text = f"{name} steps a model with {_counts_text(in_eval)} in eval mode{since}: {_names_text(in_eval)}"
        # If other modules are in training mode, the script has set these to eval mode on purpose.
        chosen = any(_is_training(holder) for ref in self._holders if (holder := ref()) is not None)
        return [*lines, ("training_mode", FACT if chosen else SUSPICION, text, numbers)]

    def _check_random_state(
        self, torch: Any, optimizer: Any, in_training: list[_ModeDependent]
    ) -> list[Line]:
        """Judge whether dropout draws new numbers: the random state before a step differs from those before earlier
        steps, unless the script seeds again in each step."""
        device = held_by(optimizer)[0].device
        if device.type not in ("cpu", "cuda") or all(one.kind != _DROPOUT for one in in_training):
            return []
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        self._random_states.append(hash(bytes(state.tolist())))
        if len(self._random_states) < _SEEDED_STEPS:
            return []
        if len({*self._random_states}) == len(self._random_states):
            return [("seeded_again", PASS, "the random state differs from step to step", {})]
        if len({*self._random_states}) > 1:
            return []
        text = (
            f"{_counts_text(in_training)} in training mode, and the random state is the same before each of "
            f"{len(self._random_states)} steps: dropout repeats its mask"
        )
        return [("seeded_again", SUSPICION, text, {})]

    def left_training_mode(self) -> bool:
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
    """Check of eval mode for batches that no backward pass follows."""

    def __init__(self, torch: Any, search: Search) -> None:
        self._torch, self._search = torch, search
        self._pass: Pass | None = None
        self._decided: weakref.ref[Any] | None = None
        """First module of the model that was judged."""
        self._in_a_row = 0
        self._before: tuple[Any, list[tuple[_ModeDependent, int]], list[_ModeDependent]] | None = (
            None
        )
        self._all_in_eval: list[_ModeDependent] = []
        """All mode-dependent modules, if each was in eval mode when the newest batch was yielded; else empty."""

    def trained_on(self) -> None:
        """Record that a backward pass begins."""
        self._in_a_row, self._before, self._all_in_eval = 0, None, []

    def fetched(self, loader_pass: Pass, acting: Iterable[_ModeDependent]) -> None:
        """Record a yielded batch; `acting`: the mode-dependent modules of all trained models."""
        if loader_pass is not self._pass:
            self._pass, self._in_a_row = loader_pass, 0
        self._before, self._all_in_eval = None, []
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
            self._all_in_eval = [dependent for dependent, _ in living]
            return
        counts = [
            (dependent, version)
            for dependent, module in training
            if dependent.kind == _BATCH_NORM and (version := _version(module)) is not None
        ]
        # Require training mode of all modules: a script may freeze some in eval mode.
        without_grad = not self._torch.is_grad_enabled() and len(training) == len(living)
        drops = [one for one, _ in training if one.kind == _DROPOUT and without_grad]
        if counts or drops:
            self._before = living[0][0].module, counts, drops

    def asked_for(self, iterator: Any) -> list[Line]:
        """Return the verdict on the previous batch: it has been processed once the next one is requested."""
        if self._all_in_eval and self._pass is not None and self._pass.of() is iterator:
            all_in_eval, self._all_in_eval = self._all_in_eval, []
            if any(
                _is_training(module)
                for dependent in all_in_eval
                if (module := dependent.module()) is not None
            ):
                return []
            text = (
                f"on batches without a backward pass, {_counts_text(all_in_eval)} stay in eval mode"
            )
            return [("evaluation_mode", PASS, text, {"modules": len(all_in_eval)})]
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
            return []  # the batches may be for another model
        effect = (
            f"{_counts_text(moved)} updated statistics: {_names_text(moved)}"
            if moved
            else f"{_counts_text(drops)} in training mode: {_names_text(drops)}"
        )
        text = f"on batches without a backward pass, {effect}"
        return [("evaluation_mode", SUSPICION, text, {"modules": len(moved or drops)})]


def _version(module: Any) -> int | None:
    """Return the version of a batch norm's `num_batches_tracked` tensor, which rises with each update. The value itself
    may be on a GPU. None if the module has none."""
    count = (vars(module).get("_buffers") or {}).get("num_batches_tracked")
    return None if count is None or count.is_inference() else int(count._version)


def _is_cumulative(module: Any) -> bool:
    """Return whether a batch norm computes a cumulative mean, as in `update_bn`: this needs training mode."""
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
    """Verdicts found outside of a sampled step, with the same interface as `SampledStep`."""

    def __init__(self, lines: list[Line], step: int | None = None) -> None:
        """`step`: the step that the verdicts are about; None for the current step."""
        self._lines, self.step = lines, step

    def has_passed(self) -> bool:
        return True

    def lines(self) -> list[Line]:
        return self._lines
