"""Problems of contract files as SARIF 2.1.0, the form that code hosts show beside the line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.catalogue import RULES
from engine.contracts.problems import Problem
from engine.version import VERSION

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(problems: Sequence[Problem]) -> dict[str, Any]:
    used = sorted({problem.rule for problem in problems})
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "engine contracts",
                        "version": VERSION,
                        "rules": [
                            {"id": id_, "shortDescription": {"text": RULES[id_].says}}
                            for id_ in used
                        ],
                    }
                },
                "results": [_result(problem, used) for problem in problems],
            }
        ],
    }


def _result(problem: Problem, rules: Sequence[str]) -> dict[str, Any]:
    where = f"{problem.path}: " if problem.path else ""
    return {
        "ruleId": problem.rule,
        "ruleIndex": rules.index(problem.rule),
        "level": problem.severity,
        "message": {"text": f"{where}{problem.text}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": problem.file},
                    "region": {"startLine": problem.line, "startColumn": problem.column},
                }
            }
        ],
    }
