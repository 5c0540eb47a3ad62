"""Whether a language model sees the tokens that it is to predict, by a forward pass of its own: only where it is asked
for (`engine watch --ask causality`), since no other look of ours runs the script's model.

The first call of the model is kept. Behind the first step it is made twice more, in eval mode and without a graph, the
second time with one token in the middle of each row changed: no place in front of it may notice. Modes, buffers and
random numbers are then what they were.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

from .parameters import PASS, SUSPICION, UNKNOWN, Line, Modules

_NAME = "causality"
_BYTES = 1 << 28
"""Tensors of a call that are kept."""
_MODELS = 16
"""Of a process that are asked."""
_SHARE, _ROUNDINGS = 0.01, 16.0
"""A place that changes by less than this share of what changes most, or by less than its rounding, does not notice."""


class Causality:
    """One question, about the model of each optimizer; of several that are made together, of the first."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._is_open, self._left = False, _MODELS
        self._hooks: list[Any] = []
        self._model: Any = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._why = ""

    def optimizer_made(self, optimizer: Any) -> None:
        """Wait for the first call of any module around the largest embedding that it trains."""
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
        # Whatever it raises would be the script's.
        try:
            if self._torch.is_grad_enabled() and self._call is None:
                self._keep(module, args, kwargs)
        except Exception as error:  # noqa: BLE001
            self._why = f"its call could not be kept ({type(error).__name__})"
            self._leave()

    def _keep(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch = self._torch
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if sum(one.numel() * one.element_size() for one in tensors) > _BYTES:
            self._why = f"the tensors of its call are more than {_BYTES >> 20} MiB"
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
        """The first step has ended."""
        if not self._is_open:
            return []
        self._is_open = False
        self._leave()
        model, call, self._model, self._call = self._model, self._call, None, None
        if world > 1:
            return [(_NAME, UNKNOWN, f"a call of its own would hang: there are {world} ranks", {})]
        if call is None:
            return [(_NAME, UNKNOWN, self._why, {})]
        try:
            return [self._ask(model, *call)]
        except Exception as error:  # noqa: BLE001  a model may refuse a call that it has had before
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
                "what it gives has no logits of shape (rows, tokens, vocabulary)",
                {},
            )
        difference_T = (after.double() - before.double()).abs().amax((0, 2))
        behind = float(difference_T[place:].max())
        rounding = _ROUNDINGS * torch.finfo(before.dtype).eps * float(before.abs().max())
        least = max(_SHARE * behind, rounding)
        early = difference_T[:place] > least
        numbers = {"place": place, "of": len(difference_T), "behind": behind}
        if bool(early.any()):
            numbers["in_front"] = float(difference_T[:place].max())
            text = (
                f"another token at place {place} of {len(difference_T)} changes the logits of {int(early.sum())} "
                f"places in front of it, by up to {numbers['in_front']:.3g}: the model sees what it is to predict"
            )
            return (_NAME, SUSPICION, text, numbers)
        if behind <= rounding:
            return (
                _NAME,
                UNKNOWN,
                f"another token at place {place} changes no logits at all",
                numbers,
            )
        text = f"another token at place {place} of {len(difference_T)} changes no logits in front of it"
        return (_NAME, PASS, text, numbers)

    def _logits(self, model: Any, args: Any, kwargs: Any, tokens_BT: Any) -> Any:
        """Of one call, (B, T, V); None where it gives none."""
        with Untouched(self._torch, model):
            given = model(*args, **kwargs)
        return logits_of(self._torch, given, tokens_BT)


class Untouched:
    """Inside, a model is in eval mode, without a graph and uncompiled; behind it modes, buffers and random numbers are
    what they were."""

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
        # Where nothing has been compiled, the compiler is not loaded for this.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._contexts.append(torch.compiler.set_stance("force_eager"))
        for context in self._contexts:
            context.__enter__()
        # Not by `eval()`, which a module may have made its own: some merge adapters there, and round.
        for module in self._modules:
            module.training = False

    def __exit__(self, *raised: Any) -> None:
        for module, mode in self._modes:
            module.training = mode
        # Without a graph, still.
        for buffers, name, one, kept in self._buffers:
            buffers[name] = one
            if one.shape == kept.shape and not self._torch.equal(one, kept):
                one.copy_(kept)
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
        self._generators.restore()


def logits_of(torch: Any, given: Any, tokens_BT: Any) -> Any:
    """The logits in what a model gives for tokens, (B, T, V); None where there are none."""
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
    """The states of all generators of random numbers, to be put back."""

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
