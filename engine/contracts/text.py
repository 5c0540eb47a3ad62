"""Format contracts as text: one line for each, or all lines about one."""

from __future__ import annotations

from collections.abc import Iterator

from engine.contracts.contract import Contract
from engine.contracts.status import Rank, Status
from engine.log.text import one_line
from engine.units import format_seconds
from engine.verdict import Level

SIGNS = {Level.PASS: "+", Level.FAIL: "!", Level.UNKNOWN: "?"}


def summary(status: Status) -> str:
    """Return one line, as `+ PASS kd-loss-v1: proven, 3h02m old`, with the reason if it does not pass."""
    level = status.answer.level
    why = "" if level is Level.PASS else f"; {one_line(str(status.answer))}"
    age = "never run" if status.age_s is None else f"{_age(status.age_s)} old"
    reached = status.reached.name.lower()
    return f"{SIGNS[level]} {level.name} {status.id}: {reached}, {age}{why}"


def contract_lines(status: Status) -> Iterator[str]:
    """Yield the lines about one contract: its result, equations, claims, and each check with its last result."""
    yield f"{status.id}: {status.answer.level.name}"
    yield f"  {one_line(str(status.answer))}"
    age = "no receipt yet" if status.age_s is None else f"oldest receipt {_age(status.age_s)} old"
    yield f"  level {status.reached.name.lower()}, {age}"
    for problem in status.problems:
        yield f"  {one_line(problem)}"
    contract = status.contract
    if contract is None:
        return
    yield f"  {one_line(contract.file.metadata.description)}"
    stale = [c.answer.text for c in status.checks if c.answer.rank is Rank.WITNESS_STALE]
    if stale:
        yield "stale"
        for text in dict.fromkeys(stale):
            yield f"  {text}; `engine contracts run {status.id}`"
        yield f"  bound: {', '.join(contract.file.binds)}"
    yield from _claims(contract)
    for kind, title in (("test", "falsifiers"), ("proof", "proofs"), ("planted", "planted bugs")):
        checks = [check for check in status.checks if check.kind == kind]
        if checks:
            yield title
        for check in checks:
            answer = check.answer
            age = "never run" if check.age_s is None else f"{_age(check.age_s)} ago"
            yield f"  {SIGNS[answer.level]} {check.id}: {answer.level.name.lower()}, {age}; {one_line(answer.text)}"
            yield from (f"      {one_line(text)}" for text in (check.says, *check.details))


def _claims(contract: Contract) -> Iterator[str]:
    yield "equations"
    for name, equation in contract.file.equations.items():
        yield f"  {name}: {one_line(equation.formula)}"
    yield "obligations"
    for one in contract.file.proof_obligations:
        by = "" if one.is_active else f" (demoted by {one.demoted_by})"
        yield f"  {one.id}: {one_line(one.property)}{by}"
    if contract.demoted_by:
        yield f"the whole contract is demoted by {contract.demoted_by}"


def _age(age_s: float) -> str:
    return format_seconds(float(int(age_s)))
