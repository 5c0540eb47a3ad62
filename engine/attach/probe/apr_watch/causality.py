"""Check whether a language model sees the tokens that it must predict, by extra forward passes: only on request
(`engine watch --ask causality`), since no other check runs the script's model.

The first call of the model is kept. After the first step it is repeated twice, in eval mode and without a graph, the
second time with the token in the middle of each row changed: no logits before it may change. Modes, buffers and random
states are restored.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

from .parameters import PASS, SUSPICION, UNKNOWN, Line, Modules

_NAME = "causality"
_MAX_BYTES = 1 << 28
"""Maximum size of the tensors of a kept call, in bytes."""
_MAX_MODELS = 16
"""Maximum number of models of a process that are checked."""
_SHARE, _ROUNDINGS = 0.01, 16.0
"""Change of logits that counts as none: as a share of the largest change, and in units of the last place."""


class Causality:
    """Check of the model of each optimizer; of optimizers created together, only of the first one's."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._is_open, self._left = False, _MAX_MODELS
        self._hooks: list[Any] = []
        self._model: Any = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._why = ""

    def optimizer_made(self, optimizer: Any) -> None:
        """Hook the first call of any module around the largest trained embedding."""
        if self._is_open or not self._left:
            return
        self._is_open, self._left = True, self._left - 1
        self._why = "no call of the model was seen"
        torch = self._torch
        modules = Modules(torch, [p for group in optimizer.param_groups for p in group["params"]])
        chains = [modules.around(p) for group in optimizer.param_groups for p in group["params"]]
        found = [one for one in chains if one and isinstance(one[0], torch.nn.Embedding)]
        if not found:
            self._why = "no embedding is trained"
            return
        for module in max(found, key=lambda one: one[0].weight.numel())[1:]:
            self._hooks.append(module.register_forward_pre_hook(self._called, with_kwargs=True))

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An exception here would reach the script.
        try:
            if self._torch.is_grad_enabled() and self._call is None:
                self._keep(module, args, kwargs)
        except Exception as error:  # noqa: BLE001
            self._why = f"its call could not be kept ({type(error).__name__})"
            self._leave()

    def _keep(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch = self._torch
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if sum(one.numel() * one.element_size() for one in tensors) > _MAX_BYTES:
            self._why = f"the tensors of its call are more than {_MAX_BYTES >> 20} MiB"
            self._leave()
            return

        def copied(one: Any) -> Any:
            return one.detach().clone() if isinstance(one, torch.Tensor) else one

        self._model = module
        self._call = tuple(map(copied, args)), {name: copied(one) for name, one in kwargs.items()}
        self._leave()

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def step_ends(self, world: int) -> list[Line]:
        """Return the verdict after the first step."""
        if not self._is_open:
            return []
        self._is_open = False
        self._leave()
        model, call, self._model, self._call = self._model, self._call, None, None
        if world > 1:
            return [
                (_NAME, UNKNOWN, f"an extra forward pass would hang: there are {world} ranks", {})
            ]
        if call is None:
            return [(_NAME, UNKNOWN, self._why, {})]
        try:
            return [self._ask(model, *call)]
        except Exception as error:  # noqa: BLE001  a model may refuse a repeated call
            return [
                (
                    _NAME,
                    UNKNOWN,
                    f"the second call of the model failed: {type(error).__name__}: {error}",
                    {},
                )
            ]

    def _ask(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Line:
        torch = self._torch
        is_tokens = [
            isinstance(one, torch.Tensor)
            and one.dim() == 2
            and one.shape[1] > 2
            and one.dtype in (torch.int64, torch.int32)
            for one in (*args, *kwargs.values())
        ]
        if "input_ids" in kwargs:
            at: int | str = "input_ids"
        elif any(is_tokens[: len(args)]):
            at = is_tokens.index(True)
        else:
            names = [name for name, yes in zip(kwargs, is_tokens[len(args) :], strict=True) if yes]
            if not names:
                return (_NAME, UNKNOWN, "its call has no rows of tokens", {})
            at = names[0]
        tokens_BT = args[at] if isinstance(at, int) else kwargs[at]
        place = tokens_BT.shape[1] // 2
        other_B = (tokens_BT != tokens_BT[:, place : place + 1]).int().argmax(1)
        changed_BT = tokens_BT.clone()
        changed_BT[:, place] = tokens_BT.gather(1, other_B[:, None].long())[:, 0]
        before = self._logits(model, args, kwargs, tokens_BT)
        if isinstance(at, int):
            args = (*args[:at], changed_BT, *args[at + 1 :])
        else:
            kwargs = {**kwargs, at: changed_BT}
        after = self._logits(model, args, kwargs, tokens_BT)
        if before is None or after is None:
            return (
                _NAME,
                UNKNOWN,
                "the model returns no logits of shape (rows, tokens, vocabulary)",
                {},
            )
        difference_T = (after.double() - before.double()).abs().amax((0, 2))
        later = float(difference_T[place:].max())
        rounding = _ROUNDINGS * torch.finfo(before.dtype).eps * float(before.abs().max())
        least = max(_SHARE * later, rounding)
        early = difference_T[:place] > least
        numbers = {"place": place, "of": len(difference_T), "behind": later}
        if bool(early.any()):
            numbers["in_front"] = float(difference_T[:place].max())
            text = (
                f"another token at position {place} of {len(difference_T)} changes the logits of {int(early.sum())} "
                f"positions before it, by up to {numbers['in_front']:.3g}: the model sees what it must predict"
            )
            return (_NAME, SUSPICION, text, numbers)
        if later <= rounding:
            return (
                _NAME,
                UNKNOWN,
                f"another token at position {place} changes no logits at all",
                numbers,
            )
        text = (
            f"another token at position {place} of {len(difference_T)} changes no logits before it"
        )
        return (_NAME, PASS, text, numbers)

    def _logits(self, model: Any, args: Any, kwargs: Any, tokens_BT: Any) -> Any:
        """Return the logits of one call, (B, T, V); None where there are none."""
        with Untouched(self._torch, model):
            given = model(*args, **kwargs)
        return logits_of(self._torch, given, tokens_BT)


class Untouched:
    """Context with a model in eval mode, without a graph and uncompiled; restores modes, buffers and random states."""

    def __init__(self, torch: Any, model: Any) -> None:
        self._torch, self._modules = torch, list(model.modules())

    def __enter__(self) -> None:
        torch = self._torch
        self._modes = [(one, one.training) for one in self._modules]
        self._buffers = [
            (buffers, name, one, one.clone())
            for buffers in (vars(module)["_buffers"] for module in self._modules)
            for name, one in buffers.items()
            if one is not None
        ]
        self._generators = _Generators(torch)
        self._contexts = [torch.no_grad()]
        # Do not load the compiler just for this.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._contexts.append(torch.compiler.set_stance("force_eager"))
        for context in self._contexts:
            context.__enter__()
        # Not `eval()`, which a module may override: some merge adapters there, with rounding.
        for module in self._modules:
            module.training = False

    def __exit__(self, *raised: Any) -> None:
        for module, mode in self._modes:
            module.training = mode
        # Still under no_grad.
        for buffers, name, one, kept in self._buffers:
            buffers[name] = one
            if one.shape == kept.shape and not self._torch.equal(one, kept):
                one.copy_(kept)
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
        self._generators.restore()


def logits_of(torch: Any, given: Any, tokens_BT: Any) -> Any:
    """Return the logits in a model's output for tokens, (B, T, V); None where there are none."""
    for one in _parts(given):
        is_table = isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() == 3
        if is_table and one.shape[:2] == tokens_BT.shape:
            return one
    return None


def _parts(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return [given["logits"]] if "logits" in given else list(given.values())
    if hasattr(given, "logits"):
        return [given.logits]
    return list(given) if isinstance(given, (list, tuple)) else [given]


class _Generators:
    """States of all random generators, to be restored."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._host = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        self._torch.set_rng_state(self._host)
        if self._gpus is not None:
            self._torch.cuda.set_rng_state_all(self._gpus)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
