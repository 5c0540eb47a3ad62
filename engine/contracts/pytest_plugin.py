"""A pytest plugin for the processes that run the tests of contracts. It deselects all tests that were not requested,
and records the outcome of the others.

The environment configures it: `APR_CONTRACT_NODES` holds the requested nodes, one per line, and
`APR_CONTRACT_REPORT` the path of the report. A function's node includes all of its parameters, and a class's node all
of its tests. With `APR_CONTRACT_MUTATED`, the tests of a node are skipped after its first failure.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_DETAIL = 300
"""Maximum length of a detail, in characters."""
_nodes: list[str] = []
_outcomes: dict[str, dict[str, str]] = {}
_errors: list[str] = []


def _requested_node(nodeid: str) -> str | None:
    for node in _nodes:
        if nodeid == node or nodeid.startswith((f"{node}[", f"{node}::")):
            return node
    return None


def pytest_configure() -> None:
    _nodes[:] = os.environ["APR_CONTRACT_NODES"].splitlines()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _requested_node(item.nodeid) is not None]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    node = _requested_node(item.nodeid)
    if os.environ.get("APR_CONTRACT_MUTATED") and any(
        outcome["outcome"] == "failed" and _requested_node(id_) == node
        for id_, outcome in _outcomes.items()
    ):
        pytest.skip("this node has already failed with the planted bug")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome, known = _outcome(report), _outcomes.get(report.nodeid)
    # The outcome is that of the call, unless setup or teardown fails.
    if outcome is not None and (known is None or known["outcome"] == "passed"):
        _outcomes[report.nodeid] = {"outcome": outcome, "detail": _detail(report)}


def _outcome(report: pytest.TestReport) -> str | None:
    if report.failed:
        return "failed" if report.when == "call" else "errors"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return "passed" if report.when == "call" else None


def _detail(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_DETAIL]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    return " ".join(text.split())[:_DETAIL]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _errors.append(f"{report.nodeid}: {_detail(report)[-_DETAIL:]}")


def pytest_sessionfinish() -> None:
    by_node = {
        node: [value for id_, value in _outcomes.items() if _requested_node(id_) == node]
        for node in _nodes
    }
    text = json.dumps({"nodes": by_node, "errors": _errors})
    Path(os.environ["APR_CONTRACT_REPORT"]).write_text(text, encoding="utf-8")
