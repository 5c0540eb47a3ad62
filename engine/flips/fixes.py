"""Propose changes of one line of a watched script that would end the failure of an identity: a statement that holds in
every healthy training, such as "labels are the next tokens", which the probe checks in the script.

A fix is found in the script's syntax tree, at the lines that the probe saw (`Watched.places`) or at the only call in
the file that can be meant. Where neither names one line, there is no fix: testing a wrong guess would
waste a flip.
What is proposed is a hypothesis, which `engine flip RUN --ends "identity ID" --line FILE:N=TEXT` tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from engine.errors import BadInput
from engine.files import read_text
from engine.limits import SCRIPT
from engine.log.events import FAIL, IDENTITY, SUSPICION, Judged
from engine.log.folder import WatchedCommand
from engine.log.view import RunView


class Fix(NamedTuple):
    """One line to replace."""

    ends: str
    """Observation that it would end, as after `--ends`."""
    assignment: str
    """`FILE:N=TEXT`, as after `--line`."""
    change: str
    """Effect of the new line, in a few words."""
    seen: str
    """Message of the identity."""


def fixes_of(view: RunView, command: WatchedCommand) -> list[Fix]:
    """Return a fix for each identity that may be wrong and has one: contradictions before suspicions, then in the order
    in which they were seen. Files that cannot be read or parsed, or where no edit is found, give none."""
    if view.watched is None:
        return []
    wrong: dict[str, Judged] = {}
    for level in (FAIL, SUSPICION):
        for judged in view.identities:
            if judged.level == level:
                wrong.setdefault(judged.id, judged)
    fixes = []
    for id, seen in wrong.items():
        if id in _FIXES and (edit := _propose(_FIXES[id], seen, view, Path(command.folder))):
            fixes.append(Fix(f"{IDENTITY} {id}", *edit, seen.text))
    return fixes


def _propose(make: _Make, seen: Judged, view: RunView, folder: Path) -> tuple[str, str] | None:
    """Try the script's files in order; return the assignment and the effect of the first edit of `make` that parses and
    changes its line."""
    assert view.watched is not None, "the run is of a script"
    files: dict[str, dict[str, int]] = {}
    for key, place in view.watched.places.items():
        name, _, line = place.rpartition(":")
        lines = files.setdefault(name, {})
        if line.isdecimal():
            lines[key] = int(line)
    for name, lines in files.items():
        try:
            text = read_text(folder / name, "script", SCRIPT)
            script = _Script(text, lines, view.watched.names)
            if (edited := make(script, seen)) is None:
                continue
            number, text, change = edited
            before = script.lines[number - 1]
            ast.parse("\n".join([*script.lines[: number - 1], text, *script.lines[number:]]))
        except (BadInput, SyntaxError, ValueError, RecursionError):
            continue
        if text.strip() and text != before:
            return f"{name}:{number}={text.strip()}", change
    return None


class _Edited(NamedTuple):
    number: int
    """Number of the line."""
    text: str
    change: str


@dataclass(frozen=True)
class _Script:
    """A file of a script, with the places and names that the probe recorded."""

    text: str
    places: Mapping[str, int]
    names: Mapping[str, str]

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def innermost(
        self, kinds: tuple[type[ast.stmt], ...], line: int, within: ast.AST | None = None
    ) -> ast.stmt | None:
        """Return the innermost statement of some kinds on or around a line."""
        statements = [
            statement
            for statement in ast.walk(within or self.tree)
            if isinstance(statement, kinds)
            and statement.lineno <= line <= (statement.end_lineno or 0)
        ]
        return max(
            statements, key=lambda statement: (statement.lineno, statement.col_offset), default=None
        )

    def simple(self, line: int | None) -> ast.stmt | None:
        """Return the statement on a line if no other statement is inside it."""
        statement = self.innermost((ast.stmt,), line or 0)
        return None if hasattr(statement, "body") else statement

    def function(self, line: int) -> ast.AST:
        """Return the innermost function around a line, or the module."""
        return self.innermost((ast.FunctionDef, ast.AsyncFunctionDef), line) or self.tree

    def first_in_loop(self) -> ast.stmt | None:
        """Return the first statement of the loop around the backward pass, or of its function if there is no loop,
        inside any `with` and after a docstring; None if it is compound."""
        line = self.places.get("backward", 0)
        around = self.function(line)
        body = getattr(self.innermost((ast.For, ast.While), line, around) or around, "body", [])
        while body:
            first = body[0]
            if isinstance(first, ast.With):
                body = first.body
            elif isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                body = body[1:]
            else:
                return None if hasattr(first, "body") else first
        return None

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of a function or method of one of these names."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and _name(node.func) in names
        ]

    def method(self, name: str, inside: ast.AST | None) -> tuple[ast.Call, ast.expr] | None:
        """Return the first call of a method in a statement, and what it is called on."""
        for node in () if inside is None else ast.walk(inside):
            if isinstance(node, ast.Call) and (receiver := _receiver(node, name)) is not None:
                return node, receiver
        return None

    def source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    # Edits.

    def replaced(self, node: _Node, by: str, change: str) -> _Edited | None:
        """Put a text in the place of a node that is on one line."""
        if node.lineno != node.end_lineno:
            return None
        return self._spliced(node.lineno, node.col_offset, node.end_col_offset or 0, by, change)

    def before(self, node: _Node, text: str, change: str) -> _Edited:
        return self._spliced(node.lineno, node.col_offset, node.col_offset, text, change)

    def after(self, node: _Node, text: str, change: str) -> _Edited:
        end = node.end_col_offset or 0
        return self._spliced(node.end_lineno or node.lineno, end, end, text, change)

    def _spliced(self, number: int, begin: int, end: int, text: str, change: str) -> _Edited:
        # Columns count bytes.
        line = self.lines[number - 1].encode()
        return _Edited(number, (line[:begin] + text.encode() + line[end:]).decode(), change)


_Node: TypeAlias = ast.expr | ast.stmt
_Make: TypeAlias = Callable[[_Script, Judged], _Edited | None]


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _only(calls: list[ast.Call]) -> ast.Call | None:
    return calls[0] if len(calls) == 1 else None


def _step(script: _Script) -> tuple[ast.stmt, str] | None:
    """Return the statement that steps the optimizer, and the optimizer's name."""
    statement = script.simple(script.places.get("step"))
    found = script.method("step", statement)
    if statement is None or found is None:
        return None
    call, receiver = found
    # `GradScaler.step` takes the optimizer.
    return statement, script.source(call.args[0] if call.args and _name(call.args[0]) else receiver)


def _zero_gradients(script: _Script, seen: Judged) -> _Edited | None:
    step = _step(script)
    if step is None:
        return None
    return script.after(step[0], f"; {step[1]}.zero_grad()", "zero the gradients after each step")


def _set_mode(name: str, mode: str, change: str, script: _Script, seen: Judged) -> _Edited | None:
    model, first = script.names.get(name, ""), script.first_in_loop()
    step, backward = script.places.get("step"), script.places.get("backward")
    if not model or first is None or step is None or backward is None:
        return None
    # The recorded name belongs to the function that steps.
    if script.function(step) is not script.function(backward):
        return None
    return script.before(first, f"{model}.{mode}(); ", change)


def _schedule(script: _Script, seen: Judged) -> _Edited | None:
    """Leave out the call of the schedule's `step` that is the most lines away from the optimizer's."""
    schedule, step = script.names.get("schedule", ""), script.places.get("step", 0)
    steps = [
        call
        for call in script.calls("step")
        if isinstance(call.func, ast.Attribute) and script.source(call.func.value) == schedule
    ]
    if not schedule or "times for each step" not in seen.text or len(steps) < 2:
        return None
    extra = max(steps, key=lambda call: abs(call.lineno - step))
    statement = script.simple(extra.lineno)
    if not isinstance(statement, ast.Expr) or statement.value is not extra:
        return None
    return script.replaced(
        extra, "pass", f"call {schedule}.step() once for each step of the optimizer"
    )


def _divide_loss(script: _Script, seen: Judged) -> _Edited | None:
    passes = seen.numbers.get("passes")
    found = script.method("backward", script.simple(script.places.get("backward")))
    if found is None or not passes or "nothing divides them" not in seen.text:
        return None
    loss = f"({script.source(found[1])} / {passes:g})"
    return script.replaced(found[1], loss, f"divide each loss by {passes:g}")


def _clip_before(script: _Script, seen: Judged) -> _Edited | None:
    step = _step(script)
    clip = _only(script.calls("clip_grad_norm_"))
    if step is None or clip is None:
        return None
    statement, optimizer = step
    if "unscaled" not in seen.text:
        return script.before(
            statement, f"{script.source(clip)}; ", "clip before the optimizer steps"
        )
    clip_statement, scaler = script.simple(clip.lineno), script.method("step", statement)
    if clip_statement is None or scaler is None or not scaler[0].args:
        return None
    unscale = f"{script.source(scaler[1])}.unscale_({optimizer}); "
    return script.before(clip_statement, unscale, "unscale the gradients before they are clipped")


def _shift_labels(script: _Script, seen: Judged) -> _Edited | None:
    """Compare predictions with the next tokens in the one cross entropy that reshapes both."""
    call = _only(script.calls("cross_entropy"))
    if call is None or len(call.args) < 2 or call.lineno != call.end_lineno:
        return None
    # `shift_N` is the share of labels that are the tokens N positions later; at 0 they are not shifted.
    if max(seen.numbers, key=lambda name: seen.numbers[name] or 0, default="") != "shift_0":
        return None
    predictions, labels = (_reshaped(one) for one in call.args[:2])
    if predictions is None or labels is None:
        return None
    text = script.source(call)
    for part, cut in ((predictions, "[:, :-1]"), (labels, "[:, 1:]")):
        text = text.replace(script.source(part), f"{script.source(part)}{cut}", 1)
    # A slice is not contiguous, which `view` asks for.
    text = text.replace(".view(", ".reshape(")
    return script.replaced(call, text, "compare each prediction with the next token")


def _receiver(node: ast.expr, *methods: str) -> ast.expr | None:
    """Return what one of these methods is called on; None for another expression."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if node.func.attr in methods else None


def _reshaped(node: ast.expr) -> ast.expr | None:
    """Return the name of the tensor that is reshaped."""
    receiver = _receiver(node, "view", "reshape", "flatten")
    return receiver if isinstance(receiver, ast.Name) else None


def _times_squared(script: _Script, seen: Judged) -> _Edited | None:
    call = _only(script.calls("kl_div"))
    temperature = seen.numbers.get("temperature")
    if call is None or not temperature:
        return None
    by = f"{temperature:g} ** 2"
    return script.after(call, f" * {by}", f"multiply the divergence by T^2 = {by}")


def _unwrapped(
    functions: Mapping[str, str], what: str, script: _Script, seen: Judged
) -> _Edited | None:
    """Leave out the script's only call of one of these functions; if it calls none, the only module of one of their
    classes that it makes. Whether the loss takes the result is not checked."""
    calls = script.calls(*functions)
    call = _only(calls)
    if call is not None:
        logits = call.args[0] if call.args else None
        if isinstance(call.func, ast.Attribute) and not _is_library(call.func.value):
            logits = call.func.value
        if logits is None:
            return None
        return script.replaced(call, script.source(logits), what)
    module = _only(script.calls(*functions.values())) if not calls else None
    if module is None or not isinstance(module.func, ast.Attribute):
        return None
    identity = f"{script.source(module.func.value)}.Identity()"
    return script.replaced(module, identity, what)


def _is_library(node: ast.expr) -> bool:
    return _name(node) in ("torch", "F", "functional", "nn", "special")


def _all_parameters(script: _Script, seen: Judged) -> _Edited | None:
    model = script.names.get("optimizer_model", "")
    statement = script.simple(script.places.get("optimizer"))
    if not model or statement is None:
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.args and node.lineno == script.places["optimizer"]:
            text = f"{model}.parameters()"
            return script.replaced(node.args[0], text, f"give the optimizer all of {model}")
    return None


_SOFTMAX = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}
_BOUNDED = {"relu": "ReLU", "sigmoid": "Sigmoid", "tanh": "Tanh", "softmax": "Softmax"}

_FIXES: dict[str, _Make] = {
    "kept_gradients": _zero_gradients,
    "training_mode": partial(
        _set_mode, "model", "train", "put the model into training mode before each step"
    ),
    "teacher_mode": partial(_set_mode, "teacher", "eval", "put the teacher into eval mode"),
    "schedule": _schedule,
    "accumulated_mean": _divide_loss,
    "clipping": _clip_before,
    "label_shift": _shift_labels,
    "temperature_squared": _times_squared,
    "double_softmax": partial(_unwrapped, _SOFTMAX, "give the cross entropy the logits"),
    "bounded_logits": partial(_unwrapped, _BOUNDED, "give the cross entropy the logits"),
    "unowned_parameters": _all_parameters,
}
"""Functions by the identity that one line can fix. A healthy run must pass the identity: otherwise no run could show
that the line fixes it."""
