"""The answers of `--json`: one row of `ANSWERS` for each kind of object, and the one function that prints them.

Every object on stdout begins with `schema`, `apr-workbench/NAME-VERSION`, and its fields follow. An answer that is a
list has it in each entry, and a stream in each line, so that an entry can be kept alone. A version grows when a field
is removed or changes its type or meaning; a new field leaves it as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from engine import limits
from engine.terminal import clipped, put


class Answer(NamedTuple):
    commands: str
    """The commands that print it, separated by commas; each may have an option."""
    what: str
    version: int = 1


ANSWERS = {
    # Runs
    "run": Answer(
        "runs, tail", "a run as far as it has logged; `engine runs` prints a list of them"
    ),
    "log-line": Answer(
        "tail --follow", "a new line of the logs of a run, between two objects `run`"
    ),
    "diagnosis": Answer("diagnose", "the verdict on a run or a log, with its evidence"),
    "diagnoses": Answer("diagnose", "the verdicts on a folder of logs"),
    "verdict": Answer("diagnose --follow", "a verdict that differs from the one before"),
    "rule": Answer("diagnose --list", "an alert rule"),
    "tag": Answer("tag", "the tags and the note of a run"),
    "stop": Answer("stop", "what a run was asked to do"),
    "checks": Answer("checks", "the results of the checks of a run of the engine"),
    "identities": Answer("checks", "the results of the identities of a watched script"),
    "check": Answer("checks --list", "a check"),
    "verify": Answer("verify", "the result of a replay"),
    "report": Answer("report", "where the report is"),
    "import": Answer("import", "the run that was imported"),
    "export": Answer("export", "the file that was written"),
    "notify": Answer("notify", "the receivers, and with --test what they answered"),
    "doctor": Answer("doctor", "what this machine can do"),
    # Experiments and findings
    "proposal": Answer("flip --propose", "a change that would test a suspicion"),
    "plan": Answer("flip --dry-run, why test --dry-run", "the plan of a flip"),
    "flip": Answer("flip, flips", "the verdict of a flip; `engine flips` prints a list of them"),
    "finding": Answer(
        "why new, why cause, why test, why withdraw, why note, why show, why close, why export",
        "a finding, after what the command did to it",
    ),
    "finding-check": Answer("why check", "whether a finding is as it was sealed"),
    "evidence": Answer("evidence list", "a finding in one line"),
    "receipt": Answer("evidence receipt", "the receipt of a run, compared with its files"),
    # Training
    "spec": Answer("spec", "every setting, by section"),
    "init": Answer("init", "the spec that was written, and what was found"),
    "distill": Answer("distill", "the receipt of a run, its speed and its end"),
    "distill-check": Answer("distill --check", "what a run would read and need"),
    "projection": Answer("distill --smoke", "what a whole run would take, from its first steps"),
    "data": Answer("data", "what the data of a spec consists of"),
    "step": Answer("data --step", "the rows of one step"),
    "prepare-plan": Answer("prepare --dry-run", "what a store of teacher outputs would take"),
    "prepare": Answer("prepare", "the store that was written"),
    # Models
    "weights": Answer("inspect", "a weight file"),
    "convert": Answer("convert", "the file that was written"),
    "unpickle": Answer("convert --from-pickle", "the file that was written"),
    "generate": Answer("generate", "generated text"),
    "perplexity": Answer("eval ppl", "the perplexity of a model on documents"),
    "problems": Answer("eval humaneval, eval mbpp", "the programming problems that a model solves"),
    "gate": Answer("gate", "which gates a distillation passes"),
    "publish": Answer("publish", "the folder that was published"),
    "publish-verify": Answer(
        "publish --verify", "whether a published folder gives the same answers"
    ),
    # The workbench itself
    "drill": Answer("drill --list", "a drill"),
    "drills": Answer("drill", "which incidents were named"),
    "bench": Answer("bench", "measured times, compared with the roofline"),
    "contract-problems": Answer("contracts validate", "what is wrong in contract files"),
    "contracts": Answer("contracts run, contracts status", "the state of every contract"),
    "contract": Answer(
        "contracts list, contracts show", "a contract; `list` prints a list of them"
    ),
}
"""Every kind of object, in the order of the reference page."""
OF_LOGS = frozenset(
    {"run", "log-line", "diagnosis", "diagnoses", "verdict", "checks", "identities"}
)
"""Answers with texts out of logs, of which each is cut at `limits.LOG_TEXT`."""


def schema_of(name: str) -> str:
    return f"apr-workbench/{name}-{ANSWERS[name].version}"


def put_json(name: str, value: Mapping[str, Any] | Sequence[Any], *, flush: bool = False) -> None:
    """Write an answer to stdout as one line: an object, or a list of objects, each with its schema first."""
    head, longest = {"schema": schema_of(name)}, limits.LOG_TEXT.most if name in OF_LOGS else None
    if isinstance(value, Mapping):
        document: Any = head | plain(value, longest)
    else:
        document = [head | plain(entry, longest) for entry in value]
    put(json.dumps(document, allow_nan=False), exact=True, flush=flush)


def plain(value: Any, longest: int | None = limits.LOG_TEXT.most) -> Any:
    """Return a value for JSON: events and dataclasses as objects, paths as text, levels and non-finite numbers by
    name, texts of more than `longest` characters cut."""
    import msgspec

    from engine.log.events import name_of_non_finite

    if isinstance(value, str):
        return value if longest is None else clipped(value, longest)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return name_of_non_finite(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(k, longest): plain(v, longest) for k, v in value.items()}
    return [plain(v, longest) for v in value] if isinstance(value, list | tuple) else value
