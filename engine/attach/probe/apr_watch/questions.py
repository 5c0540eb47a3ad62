"""Repeat a call of the script's model with one thing changed, and check how the outputs change.

    nothing                       outputs of a model in eval mode, or of one that is not trained, are not random
    rows swapped                  outputs are swapped, too
    second row replaced           outputs of the first row stay nearly the same
    a token replaced              earlier outputs of a model that is trained on next tokens stay the same
    a row's padding cut off       outputs of the row's other positions stay the same
    first document replaced       outputs of the other documents of a packed row stay the same

The arguments of one call during the script's step are kept, at most two rows of them, and the call is repeated after
the step in a context that restores the script's state (`Untouched`). Outputs count as the same if they are bitwise
equal or differ by rounding of their dtype. A change between the two limits of `_ROUNDINGS` gives no verdict.

A teacher's outputs are compared with the teacher's probabilities in the loss. This shows whether the loss pairs
teacher and student at the same positions and token ids.
"""

# Shapes: B rows, T tokens, V vocabulary, N positions, R sampled positions

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .distillation import Divergence
from .losses import Loss
from .parameters import FACT, PASS, SUSPICION, UNKNOWN, Line
from .untouched import Untouched, tensors_in

ASKED_STEPS = (2, 16)
"""Steps of an optimizer after which its model's call is repeated."""
_MAX_BYTES = 1 << 28
"""Maximum size of the tensors of a kept call, in bytes."""
_MAX_MODELS, _MAX_TEACHERS = 32, 4
"""Maximum number of trained models tested in a process, and of teachers for each."""
_MAX_SECONDS, _MAX_SHARE = 5.0, 0.02
"""Maximum time for all repeated calls of a process in seconds; maximum share of the script's time, which applies after
the first test of a model."""
_ROUNDINGS = {False: (16.0, 1000.0), True: (1.0, 8.0)}
"""Limits of rounding, in units of the last place of the largest output: up to the first a change is rounding, above the
second it certainly is not. Keys: whether the model computes in 16 bits. Unchanged outputs are mostly bitwise equal."""
_MIN_MIXING = 0.1
"""Minimum relative change of one row's outputs, when another row is replaced, that is reported. Smaller changes may
come from a quantisation scale that the rows share."""
_SAME_ROW, _OTHER_ROW = 0.02, 0.05
"""Total variation distances, 0 to 1. First: maximum between probabilities in the loss and the teacher's output that
they were computed from. Second: how much larger the distance to every other output must be."""
_OUTPUTS, _MAX_ELEMENTS = 24, 1 << 24
"""Maximum number of positions of a teacher's output that are kept, and maximum number of their elements."""
_MIN_RUN = 4
"""Minimum number of equal tokens at the end of a row that may be padding."""
_MASKS = {"attention_mask": False, "src_key_padding_mask": True, "key_padding_mask": True}
"""Names of mask arguments, each with the mask value that marks padding."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class _CannotTest(Exception):
    """Reason why a model cannot be tested."""


class _Call:
    """A kept call of a model: its arguments (at most two rows), training modes and autocast state, and for a teacher
    its output."""

    def __init__(self, torch: Any, model: Any, args: Any, kwargs: Any) -> None:
        # A weak reference: the model holds the hook, which holds this call.
        self._torch, self._model = torch, weakref.ref(model)
        arguments = {**dict(enumerate(args)), **kwargs}
        first = next(iter(tensors_in(torch, arguments)), None)
        if first is None or not first.dim():
            raise _CannotTest("its call has no tensor with rows")
        self.rows = int(first.shape[0])
        self.is_square = first.dim() > 1 and first.shape[1] == self.rows
        """Whether the first two dimensions have the same size, so that rows and columns may be confused."""
        self._bytes = 0
        self.arguments: Any = _mapped(arguments, self._copy_of)
        """Arguments by position or name."""
        self._names = [*inspect.signature(model.forward).parameters]
        self._modes = [module.training for module in model.modules()]
        kind = first.device.type
        try:
            is_on = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if is_on else None
        except (TypeError, RuntimeError, AttributeError):  # older versions of torch
            is_on, dtype = torch.is_autocast_enabled(), None
        self._autocast = {"device_type": kind, "dtype": dtype, "enabled": is_on}
        halves = (torch.float16, torch.bfloat16)
        is_half = is_on or any(parameter.dtype in halves for parameter in model.parameters())
        eps = torch.finfo(torch.bfloat16 if is_half else torch.float32).eps
        self._limits = [units * eps for units in _ROUNDINGS[is_half]]
        self.output: Any = None
        """First positions of the first row of the output in the script's own call, (1, T, V)."""

    def _copy_of(self, value: Any) -> Any:
        torch = self._torch
        if isinstance(value, torch.Tensor):
            if value.dim() and value.shape[0] == self.rows:
                value = value[:2]
            self._bytes += value.numel() * value.element_size()
            if self._bytes > _MAX_BYTES:
                raise _CannotTest(f"the tensors of its call are more than {_MAX_BYTES >> 20} MiB")
            return value.detach().clone()
        if isinstance(value, (*_ATOMS, torch.dtype, torch.device)):
            return value
        raise _CannotTest(f"its call has an argument of type {type(value).__name__}")

    def run(self, arguments: Any = None, context: Untouched | None = None) -> list[Any]:
        """Repeat the call; return the floating-point tensors of the output, logits first."""
        arguments = arguments or self.arguments
        args = [argument for key, argument in arguments.items() if isinstance(key, int)]
        kwargs = {key: argument for key, argument in arguments.items() if isinstance(key, str)}
        with (
            context or Untouched(self._torch, self.model),
            self._torch.autocast(**self._autocast, cache_enabled=False),
        ):
            outputs = tensors_in(self._torch, _parts(self.model(*args, **kwargs)))
            return [output for output in outputs if output.is_floating_point()]

    @property
    def model(self) -> Any:
        model = self._model()
        if model is None:
            raise _CannotTest("the model is gone")
        return model

    @property
    def modes(self) -> list[tuple[Any, bool]]:
        """Pairs of a module and whether it was in training mode."""
        return list(zip(self.model.modules(), self._modes, strict=True))

    def limits(self, output: Any) -> tuple[float, float]:
        """Return the two limits of `_ROUNDINGS` for this output, as absolute changes."""
        scale = _largest(output)
        return self._limits[0] * scale, self._limits[1] * scale

    def _named(self, name: str) -> Any:
        """Return an argument by its name in the signature, however it was passed."""
        place: int | str = self._names.index(name) if name in self._names else name
        return self.arguments.get(name, self.arguments.get(place))

    def swapped(self) -> Any:
        return self._with(lambda rows: rows.flip(0))

    def repeated(self) -> Any:
        """Return the arguments with the second row replaced by the first."""
        return self._with(lambda rows: rows[[0, 0]])

    def _with(self, change: Callable[[Any], Any]) -> Any:
        def changed(value: Any) -> Any:
            is_rows = isinstance(value, self._torch.Tensor) and value.shape[:1] == (2,)
            return change(value) if is_rows else value

        return _mapped(self.arguments, changed)

    def tokens(self, loss_tokens_BT: Any = None) -> tuple[int | str, Any] | None:
        """Return the key (name or position) and value of the argument that holds token ids, (B, T). If there are
        several, choose the one equal to `loss_tokens_BT`. None if there is none."""
        torch = self._torch
        by_name = ("input_ids", self.arguments.get("input_ids"))
        tokens = {
            key: argument
            for key, argument in [by_name, *self.arguments.items()]
            if isinstance(argument, torch.Tensor)
            and argument.dim() == 2
            and argument.shape[1] > 2
            and argument.dtype in (torch.int64, torch.int32)
        }
        if loss_tokens_BT is not None:
            equal = {
                key: argument
                for key, argument in tokens.items()
                if torch.equal(argument, loss_tokens_BT[: len(argument)])
            }
            tokens = equal or (tokens if len(tokens) == 1 else {})
        return next(iter(tokens.items()), None)

    def padding(self, tokens_BT: Any) -> Any:
        """Return a mask of the padding, (B, T), from a mask among the arguments, or from runs of one token; all False
        if there is none."""
        for name, marks in _MASKS.items():
            if _is_like(mask := self._named(name), tokens_BT):
                return mask.bool() if marks else ~mask.bool()
        at_end_BT = _padding_at_end(tokens_BT)
        return at_end_BT if at_end_BT.any() else _padding_at_end(tokens_BT.flip(1)).flip(1)

    def cut(self, row: int, begin: int, end: int, length: int) -> Any:
        """Return the arguments for one row and the positions from `begin` to `end` of `length`; None if a tensor has
        positions on another axis than the second."""
        is_cut = [True]

        def changed(value: Any) -> Any:
            if not isinstance(value, self._torch.Tensor):
                return value
            is_rows, has_positions = (
                value.shape[:1] == (min(2, self.rows),),
                value.shape[1:2] == (length,),
            )
            if value.shape.count(length) != (is_rows and has_positions):
                is_cut.append(False)
            value = value[row : row + 1] if is_rows else value
            return value[:, begin:end] if is_rows and has_positions else value

        arguments = _mapped(self.arguments, changed)
        return arguments if all(is_cut) else None

    def positions(self, tokens_BT: Any) -> Any:
        """Return the `position_ids` argument, (B, T); None if there is none."""
        positions_BT = self._named("position_ids")
        return positions_BT if _is_like(positions_BT, tokens_BT) else None


class Budget:
    """Remaining seconds and models for the repeated calls of a process."""

    seconds, models = _MAX_SECONDS, _MAX_MODELS


class Questions:
    """Tests of the models of one optimizer and of their teachers by repeated calls."""

    def __init__(self, torch: Any, budget: Budget) -> None:
        self._torch, self._budget = torch, budget
        self._hooks: list[Any] = []
        self._calls: dict[int, _Call] = {}
        self._teachers: dict[int, int] = {}
        """Id of the outermost module, by the id of each module inside a teacher."""
        self._why = ""
        self._has_asked = self._was_restored = False
        self._spent_s, self._begun_s = 0.0, time.monotonic()

    def begin(self, models: list[Any], teachers: list[Any], world: int) -> None:
        """Hook these models to keep their next call, if they can be tested."""
        elapsed_s = time.monotonic() - self._begun_s
        if self._was_restored or (self._has_asked and self._spent_s > _MAX_SHARE * elapsed_s):
            return
        if not self._has_asked:
            if self._budget.models <= 0:
                return
            self._budget.models -= 1
        self._why = self._reason_not_to_test([*models, *teachers], world)
        if self._why:
            return
        self._why = "no call of the model was seen"
        self._teachers = {}
        for top in [*models, *teachers[:_MAX_TEACHERS]]:
            for module in top.modules():
                # The script may call an inner module (the model may be in a container); one without children is a
                # single operation, no model.
                if module is not top and next(module.children(), None) is None:
                    continue
                hook = module.register_forward_pre_hook(self._called, with_kwargs=True)
                self._hooks.append(hook)
                if any(top is teacher for teacher in teachers):
                    self._teachers[id(module)] = id(top)
                    self._hooks.append(module.register_forward_hook(self._returned))

    def _reason_not_to_test(self, models: list[Any], world: int) -> str:
        if not models:
            return "no module holds the trained parameters"
        if world > 1:
            return f"an extra forward pass would hang: there are {world} ranks"
        if self._budget.seconds <= 0:
            return f"the time for questions, {_MAX_SECONDS:g} s, is spent"
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            return "parts of the script are compiled"
        registered = sys.modules.get("torch.nn.modules.module")
        if any(
            getattr(registered, f"_global_forward_{name}", None) for name in ("hooks", "pre_hooks")
        ):
            return "a forward hook of the script would run once more"
        for module in (module for top in models for module in top.modules()):
            inside = vars(module)
            for hook in (
                *inside["_forward_hooks"].values(),
                *inside["_forward_pre_hooks"].values(),
            ):
                if getattr(hook, "__module__", "").split(".")[0] not in _LIBRARIES:
                    return "a forward hook of the script would run once more"
            if any(
                type(one).__name__ in ("DTensor", "FlatParameter")
                for one in vars(module)["_parameters"].values()
            ):
                return "the model is sharded"
        return ""

    def _called(self, module: Any, args: Any, kwargs: Any) -> None:
        # This runs in a forward hook: an exception would reach the script.
        try:
            top = self._teachers.get(id(module))
            if any(self._teachers.get(at) == top for at in self._calls):
                return
            if top is not None or self._torch.is_grad_enabled():
                self._calls[id(module)] = _Call(self._torch, module, args, kwargs)
        except _CannotTest as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001
            self._why = f"its call could not be kept ({type(error).__name__})"

    def _returned(self, module: Any, _args: Any, output: Any) -> None:
        call = self._calls.get(id(module))
        try:
            if call is not None and call.output is None:
                tables = (
                    table for table in tensors_in(self._torch, [_parts(output)]) if table.dim() == 3
                )
                call.output = next(
                    table[:1, :_OUTPUTS].detach().clone()
                    for table in tables
                    if table.shape[2] * _OUTPUTS <= _MAX_ELEMENTS
                )
        except Exception:  # noqa: BLE001  the output has an unknown structure
            pass

    def ask(self, losses: list[Loss | Divergence], data_rows: int | None) -> list[Line]:
        """Repeat the kept calls after a step and return the verdicts. `data_rows`: number of rows of the newest batch
        of a data loader; None if unknown."""
        for hook in self._hooks:
            hook.remove()
        calls, why = self._calls, self._why
        self._hooks, self._calls, self._why = [], {}, ""
        if not calls:
            return (
                []
                if self._has_asked or not why
                else [("questions", UNKNOWN, f"not asked: {why}", {})]
            )
        self._has_asked = True
        begin_s, lines = time.monotonic(), []
        for model_id, call in calls.items():
            try:
                if model_id in self._teachers:
                    lines += self._ask_teacher(call, calls, losses)
                else:
                    lines += self._ask_model(call, losses, data_rows)
            except _CannotTest as error:
                lines.append(("questions", UNKNOWN, str(error), {}))
            except Exception as error:  # noqa: BLE001  a model may raise when its call is repeated
                text = f"the second call of the model failed: {type(error).__name__}: {error}"
                lines.append(("questions", UNKNOWN, text, {}))
        taken_s = time.monotonic() - begin_s
        self._spent_s += taken_s
        self._budget.seconds -= taken_s
        if self._was_restored:
            text = "a repeated call changed the model or global variables: they were restored, it is not called again"
            lines.append(("questions", FACT, text, {"seconds": taken_s}))
        return lines

    def _ask_model(
        self, call: _Call, losses: list[Loss | Divergence], data_rows: int | None
    ) -> list[Line]:
        torch, name = self._torch, type(call.model).__name__
        context = Untouched(torch, call.model)
        base = call.run(context=context)
        other_context = Untouched(torch, call.model, seed=1)
        repeated = call.run(context=other_context)
        self._was_restored = context.has_changed or other_context.has_changed
        if not base:
            raise _CannotTest(f"{name} gives no tensor of floats")
        if not _fits(torch, base):
            raise _CannotTest(f"two rows of {name} take more memory than the script has had free")
        if any(not output.isfinite().all() for output in base):
            raise _CannotTest(f"{name} gives NaN or infinite outputs")
        limits = [call.limits(output) for output in base]
        if _differ(torch, base, repeated, limits):
            if "dropout" in context.draws:
                text = f"{name} in eval mode gives other outputs for the same input: dropout is still active"
                return [("eval_is_random", SUSPICION, text, {})]
            return [("eval_is_random", FACT, f"{name} draws random numbers in eval mode, too", {})]
        text = f"{name} in eval mode gives the same outputs for the same input"
        lines: list[Line] = [("eval_is_random", PASS, text, {})]
        if self._was_restored:
            return lines
        if call.rows > 1 and data_rows == call.rows and not call.is_square:
            lines += self._swap(call, base, limits, name)
        lines += self._ask_decoder(call, base, losses)
        return lines

    def _swap(
        self, call: _Call, base: list[Any], limits: list[tuple[float, float]], name: str
    ) -> list[Line]:
        torch = self._torch
        alone: dict[
            int, bool
        ] = {}  # by index of the output: whether each row may depend on its own input row alone
        outputs = call.run(call.swapped())
        for index, (output, swapped_output) in enumerate(zip(base, outputs, strict=True)):
            if not output.dim() or output.shape[0] != 2 or output.shape != swapped_output.shape:
                continue
            swapped_output = swapped_output.flip(0)
            change = _largest_change(torch, output, swapped_output)
            alone[index] = change <= limits[index][0]
            if output.dim() == 2:
                # The output may be a matrix of similarities between all rows: then its columns are swapped too.
                pair = output.sort(1).values, swapped_output.sort(1).values
                change = min(change, _largest_change(torch, *pair))
            if change > limits[index][1]:
                text = f"two rows swapped in the input of {name} change its outputs by {change:.3g}, the swap apart"
                return [("rows_mixed", SUSPICION, text, {"apart": change})]
            if change > limits[index][0]:
                return []
        if not any(output.dim() and output.shape[0] == 2 for output in base):
            return []
        return self._repeat(call, base, alone, name) or [
            ("rows_mixed", PASS, "two rows swapped give the same outputs, swapped", {})
        ]

    def _repeat(
        self, call: _Call, base: list[Any], alone: dict[int, bool], name: str
    ) -> list[Line]:
        """Replace the second row by the first. This finds a softmax or a mean over rows, which a swap does not: it
        treats all rows alike."""
        if any(
            getattr(module, "track_running_stats", True) is False for module in call.model.modules()
        ):
            return []  # batch norm without running statistics depends on all rows by design
        outputs = call.run(call.repeated())
        for index, (output, repeated_output) in enumerate(zip(base, outputs, strict=True)):
            if not alone.get(index) or output.shape != repeated_output.shape:
                continue
            change = _largest_change(self._torch, output[:1], repeated_output[:1])
            if change > max(_MIN_MIXING * _largest(output[0]), call.limits(output)[1]):
                text = f"another second row in the input of {name} changes its outputs for the first, by {change:.3g}"
                return [("rows_mixed", SUSPICION, text, {"apart": change})]
        return []

    def _ask_decoder(
        self, call: _Call, base: list[Any], losses: list[Loss | Divergence]
    ) -> list[Line]:
        torch = self._torch
        tokens = call.tokens()
        if tokens is None:
            return []
        tokens_BT = tokens[1]
        padding_BT = call.padding(tokens_BT)
        lines = self._ask_padding(call, base, tokens_BT, padding_BT)
        logits_BTV = _logits_for(base, tokens_BT)
        if logits_BTV is None:
            return lines
        lines += self._ask_causality(call, logits_BTV, losses)
        positions_BT = call.positions(tokens_BT)
        if positions_BT is None:
            return lines
        # A document begins where the position is not the previous one plus 1.
        goes_on_BT = torch.ones_like(padding_BT)
        goes_on_BT[:, 1:] = positions_BT[:, 1:] == positions_BT[:, :-1] + 1
        is_first_BT = (~goes_on_BT).cumsum(1) == 0
        kept_BT = ~is_first_BT & goes_on_BT & ~padding_BT
        if kept_BT.any():
            apart, _, limits = self._change(
                call, tokens, logits_BTV, is_first_BT & ~padding_BT, kept_BT
            )
            wrong = (
                "other tokens in the first document of a packed row change the logits of those after it, by up to "
                f"{apart:.3g}: positions begin again, but attention goes across"
            )
            right = "the documents of a packed row do not see each other"
            lines += _verdict("documents_mixed", apart, limits, wrong, right)
        return lines

    def _ask_padding(
        self, call: _Call, base: list[Any], tokens_BT: Any, padding_BT: Any
    ) -> list[Line]:
        """Cut the padding off the row that has the most."""
        row = int(padding_BT.sum(1).argmax())
        kept = (~padding_BT[row]).nonzero().flatten().tolist()
        if not padding_BT.any() or not kept:
            return []
        begin, end = kept[0], kept[-1] + 1
        arguments = call.cut(row, begin, end, tokens_BT.shape[1])
        if len(kept) < end - begin or arguments is None:
            return []
        try:
            outputs = call.run(arguments)
        except Exception:  # noqa: BLE001  a model may need rows of one length
            return []
        largest: list[tuple[float, Any]] = []
        for output, cut_output in zip(base, outputs, strict=False):
            # Outputs with one value per token, or one per row as of a classifier.
            if output.shape[:2] == tokens_BT.shape:
                expected = output[row : row + 1, begin:end]
            elif output.dim() in (1, 2) and len(output) == len(tokens_BT):
                expected = output[row : row + 1]
            else:
                continue
            if cut_output.shape == expected.shape:
                largest.append((_largest_change(self._torch, cut_output, expected), output))
        if not largest:
            return []
        apart, output = largest[0]
        wrong = (
            f"a row without its {tokens_BT.shape[1] - len(kept)} positions of padding has other outputs, by up to "
            f"{apart:.3g}: the model reads the padding, or counts its positions"
        )
        right = "a row without its padding has the same outputs"
        return _verdict("padding_seen", apart, call.limits(output), wrong, right)

    def _ask_causality(
        self, call: _Call, logits_BTV: Any, losses: list[Loss | Divergence]
    ) -> list[Line]:
        pairs = [loss.tokens_before() for loss in losses if isinstance(loss, Loss)]
        like, labelled_BT = next((pair for pair in pairs if pair is not None), (None, None))
        tokens = call.tokens(like)
        if tokens is None or tokens[1].shape != logits_BTV.shape[:2]:
            return []
        tokens_BT = tokens[1]
        length = tokens_BT.shape[1]
        place_T = self._torch.arange(length, device=tokens_BT.device)
        place, kept = length // 2, place_T >= 0
        if labelled_BT is not None:
            # Attention within a prompt, which has no labels, may be bidirectional.
            columns = labelled_BT[:, :-1].any(0).nonzero().flatten().tolist()
            if not columns or labelled_BT.shape != tokens_BT.shape:
                return []
            place, kept = columns[len(columns) // 2] + 1, labelled_BT
        change_BT = (place_T == place).expand_as(tokens_BT)
        early, later, limits = self._change(
            call, tokens, logits_BTV, change_BT, kept & (place_T < place)
        )
        numbers = {"place": place, "of": length, "early": early, "later": later}
        if early > limits[1] and like is not None:
            text = (
                f"another token at position {place} of {length} changes logits before it, by up to {early:.3g}: the "
                "model sees what it must predict"
            )
            return [("causality", SUSPICION, text, numbers)]
        if early <= limits[0] < later:
            text = f"another token at position {place} of {length} changes no logits before it"
            return [("causality", PASS, text, numbers)]
        return []

    def _change(
        self, call: _Call, tokens: tuple[int | str, Any], logits_BTV: Any, change_BT: Any, kept: Any
    ) -> tuple[float, float, tuple[float, float]]:
        """Replace the tokens at `change_BT`. Return the largest change of logits at the positions `kept`, where they
        should stay the same, the largest change at other positions, and the limits of rounding."""
        key, tokens_BT = tokens
        other_BT = self._torch.where(change_BT, tokens_BT.roll(1, 1), tokens_BT)
        # If the previous token is the same, use the largest or smallest token id of the row.
        same_BT = change_BT & (other_BT == tokens_BT)
        other_BT = self._torch.where(same_BT, tokens_BT.amax(1, keepdim=True), other_BT)
        other_BT = self._torch.where(
            same_BT & (other_BT == tokens_BT), tokens_BT.amin(1, keepdim=True), other_BT
        )
        outputs = call.run({**call.arguments, key: other_BT})
        changed_BTV = _logits_for(outputs, tokens_BT)
        limits = call.limits(logits_BTV)
        if changed_BTV is None:
            return 0.0, 0.0, limits
        change_of_logits_BT = _change_by_position(self._torch, changed_BTV, logits_BTV)
        kept_BT = kept.expand_as(change_of_logits_BT)
        inside, outside = change_of_logits_BT[kept_BT], change_of_logits_BT[~kept_BT]
        return (
            float(inside.max()) if inside.numel() else 0.0,
            float(outside.max()) if outside.numel() else 0.0,
            limits,
        )

    def _ask_teacher(
        self, call: _Call, calls: dict[int, _Call], losses: list[Loss | Divergence]
    ) -> list[Line]:
        torch, name = self._torch, type(call.model).__name__
        lines: list[Line] = []
        divergences = [loss for loss in losses if isinstance(loss, Divergence)]
        students = [one.tokens() for id_, one in calls.items() if id_ not in self._teachers]
        teacher_tokens = call.tokens()
        # Ids of two vocabularies may differ by a constant, as where one begins with special tokens.
        differences = [
            teacher_tokens[1] - tokens[1]
            for tokens in students
            if tokens is not None
            and teacher_tokens is not None
            and tokens[1].shape == teacher_tokens[1].shape
        ]
        shared = [ids for ids in differences if bool((ids == ids[0, 0]).all())]
        if divergences and shared:
            lines += self._align(divergences[0], call, shared[0].shape[1], int(shared[0][0, 0]))
        contexts = [Untouched(torch, call.model, call.modes, seed) for seed in (1, 2)]
        outputs, repeated = (call.run(context=context) for context in contexts)
        if not outputs or not all(output.isfinite().all() for output in outputs):
            return lines
        if _differ(torch, outputs, repeated, [call.limits(output) for output in outputs]):
            text = f"{name}, which no optimizer trains, gives other outputs for the same input: it is random"
            return [*lines, ("teacher_mode", SUSPICION, text, {})]
        text = f"{name}, which no optimizer trains, gives the same outputs for the same input"
        return [*lines, ("teacher_mode", PASS, text, {})]

    def _align(self, divergence: Divergence, call: _Call, length: int, offset: int) -> list[Line]:
        """Compare the teacher's probabilities in the loss with the teacher's output at shifted positions and ids.
        `offset`: by how much the teacher's ids of the tokens are larger than the student's."""
        sample_RV, start, rows = divergence.sample(), divergence.start, call.output
        width, remainder = divmod(divergence.positions, call.rows)
        if start is None or rows is None or remainder or not length - 4 < width <= length:
            return []
        ids, known = sample_RV.shape[1], min(rows.shape[1], length)
        cut, place_R = rows.shape[2] - ids, self._torch.arange(min(len(sample_RV), width)) + start
        temperature = divergence.temperature
        pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
        for shift in (-2, -1, 0, 1, 2):
            for first_id in sorted({0, cut, min(max(0, offset), cut)}) if cut >= 0 else []:
                at_R = place_R + shift
                kept_R = (at_R >= 0) & (at_R < known)
                logits_RV = rows[0, at_R[kept_R].to(rows.device)][
                    :, first_id : first_id + ids
                ].double()
                p_RV = sample_RV[: len(kept_R)][kept_R.to(sample_RV.device)].to(rows.device)
                if len(p_RV):
                    pairs[shift, first_id] = logits_RV, p_RV
        distances = {
            pair_key: _total_variation(*pair, temperature) for pair_key, pair in pairs.items()
        }
        if not distances:
            return []
        best = min(distances, key=lambda pair_key: distances[pair_key])
        if distances[best] > _SAME_ROW and divergence.knows_temperature:
            pair = pairs.get((0, offset))
            return [] if pair is None else _other_temperature(temperature, *pair)
        others = [distance for pair_key, distance in distances.items() if pair_key != best]
        if distances[best] > _SAME_ROW or min(others, default=1.0) < distances[best] + _OTHER_ROW:
            return []
        shift, first_id = best
        numbers = {"positions": shift, "first_id": first_id}
        if shift:
            direction = f"{abs(shift)} position{'s' * (abs(shift) > 1)} {'after' if shift > 0 else 'before'}"
            text = f"the teacher's logits are those {direction} the student's in the divergence"
            return [("teacher_alignment", SUSPICION, text, numbers)]
        if first_id != offset:
            text = (
                f"id i of the student meets id i + {first_id} of the teacher's {rows.shape[2]} in the divergence, but "
                f"their inputs have ids that are {offset} apart"
            )
            return [("teacher_alignment", SUSPICION, text, numbers)]
        text = "positions and ids of the teacher are those of the student"
        lines: list[Line] = [("teacher_alignment", PASS, text, numbers)]
        if divergence.knows_temperature:
            text = f"teacher and student have the temperature {divergence.temperature:g} in the divergence"
            lines.append(("divergence_temperature", PASS, text, {}))
        return lines


def _total_variation(logits_RV: Any, p_RV: Any, temperature: float) -> float:
    """Return the mean total variation distance between the softmax of logits at a temperature, and `p_RV`."""
    return float(((logits_RV / temperature).softmax(-1) - p_RV).abs().sum(1).mean()) / 2


def _other_temperature(student_temperature: float, logits_RV: Any, p_RV: Any) -> list[Line]:
    """Return the verdict on a teacher's temperature T that differs from the student's. ln p is linear in the logits
    with slope 1 / T, which gives T. T below 1 is not reported: it sharpens the teacher on purpose."""
    # Use the two most likely tokens: small probabilities in 16 bits are too imprecise.
    two_R2 = p_RV.topk(2).indices
    slope_R = p_RV.gather(1, two_R2).log().diff(dim=1) / logits_RV.gather(1, two_R2).diff(dim=1)
    temperature = 1 / float(slope_R.nan_to_num(0.0, 0.0, 0.0).median() or 1.0)
    apart, ratio = _total_variation(logits_RV, p_RV, temperature), temperature / student_temperature
    if not (
        apart <= _SAME_ROW
        and min(temperature, student_temperature) > 0.99
        and abs(ratio - 1) > _OTHER_ROW
    ):
        return []
    text = (
        f"the teacher's probabilities in the divergence are at temperature {temperature:.3g}, the student's at "
        f"{student_temperature:g}"
    )
    numbers = {"teacher": temperature, "student": student_temperature}
    return [("divergence_temperature", SUSPICION, text, numbers)]


_LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "apr_watch",
)
"""Packages whose forward hooks may run in a repeated call."""


def _verdict(
    id: str, apart: float, limits: tuple[float, float], wrong: str, right: str
) -> list[Line]:
    """Return the verdict on outputs that should stay the same, by their change `apart`: wrong above the second limit,
    right up to the first, none between."""
    if apart > limits[1]:
        return [(id, SUSPICION, wrong, {"apart": apart})]
    return [(id, PASS, right, {})] if apart <= limits[0] else []


def _differ(torch: Any, one: list[Any], two: list[Any], limits: list[tuple[float, float]]) -> bool:
    return any(
        a.shape == b.shape and _largest_change(torch, a, b) > limit[1]
        for a, b, limit in zip(one, two, limits, strict=False)
    )


_POSITIONS_PER_CHUNK = 128
"""Number of positions compared at a time: a copy of the logits of all positions may take gigabytes."""


def _largest_change(torch: Any, first: Any, second: Any) -> float:
    """Return the largest absolute difference of two tensors."""
    return float(_change_by_position(torch, first, second).max()) if first.numel() else 0.0


def _largest(output: Any) -> float:
    return max(map(abs, map(float, output.aminmax()))) if output.numel() else 0.0


def _change_by_position(torch: Any, first: Any, second: Any) -> Any:
    """Return the largest absolute difference at each position, (B, T). Outputs with fewer than 3 dimensions give the
    difference of each element."""
    if first.dim() < 3:
        return (first.double() - second.double()).abs()
    rows = [
        [
            (p.double() - q.double()).abs().amax(-1)
            for p, q in zip(
                a.split(_POSITIONS_PER_CHUNK), b.split(_POSITIONS_PER_CHUNK), strict=True
            )
        ]
        for a, b in zip(first, second, strict=True)
    ]
    return torch.stack([torch.cat(first) for first in rows])


def _fits(torch: Any, outputs: list[Any]) -> bool:
    """Return whether two more copies of these outputs stay below the script's own peak GPU memory."""
    if not any(output.is_cuda for output in outputs):
        return True
    free = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return bool(2 * sum(output.numel() * output.element_size() for output in outputs) <= free)


def _padding_at_end(tokens_BT: Any) -> Any:
    """Return a mask of the padding, (B, T): runs of one token at the end of the rows, of different lengths and at least
    `_MIN_RUN`, if the token is nowhere else. The first token of a run may be the end of the text, which is kept."""
    last_B = tokens_BT[:, -1]
    runs_BT = (tokens_BT == last_B[:, None]).flip(1).long().cumprod(1).flip(1)
    runs_B = runs_BT.sum(1)
    token = last_B[runs_B.argmax()]
    run_BT = runs_BT.bool() & (last_B == token)[:, None]
    is_padding = (
        int(runs_B.max()) >= _MIN_RUN
        and int(runs_B.min()) < int(runs_B.max()) < tokens_BT.shape[1]
        and bool((run_BT == (tokens_BT == token)).all())
    )
    return (run_BT & run_BT.roll(1, 1)) & is_padding


def _is_like(value: Any, tokens_BT: Any) -> bool:
    return bool(getattr(value, "shape", None) == tokens_BT.shape)


def _logits_for(found: list[Any], tokens_BT: Any) -> Any:
    """Return the first output with shape (B, T, V), or else (B, V, T), as (B, T, V); None if there is none."""
    tables = [output for output in found if output.dim() == 3]
    tables += [output.transpose(1, 2) for output in tables]
    return next((table for table in tables if table.shape[:2] == tokens_BT.shape), None)


def _parts(output: Any) -> Any:
    """Return the items of a model's output, logits first."""
    if isinstance(output, Mapping):
        names = sorted(output, key=lambda name: name != "logits")
        return [_parts(output[name]) for name in names]
    if hasattr(output, "logits"):
        return [output.logits]
    return [_parts(one) for one in output] if isinstance(output, (list, tuple)) else output


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a call's argument with `change` applied to each leaf of its dicts, lists and tuples."""
    if type(value) is dict:
        return {name: _mapped(one, change) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change) for one in value)
    return change(value)
