"""torch.compile compiles for real, in two processes of its own: its counters begin at 0 there, and the
second finds the first one's caches. The graphs are products alone, which need no C++.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT

# Two real compilations and what they import take fifteen seconds.
pytestmark = pytest.mark.soak

PROGRAM = """
import dataclasses, json, os, sys, torch
# What a compilation imports takes longer than the compilation, and is imported once for both processes.
import torch._inductor.compile_fx, torch._inductor.fx_passes.joint_graph, torch._inductor.graph
from engine.kernels.inductor import CompileWatch

def cubed(x):
    return x @ x @ x

def broken(x):
    y = x @ x
    torch._dynamo.graph_break()
    return y @ x

for stages in (["many"], []):
    child = os.fork()
    if child == 0:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit("it failed")
else:
    sys.exit()

out = {}
watch = CompileWatch()
counting = CompileWatch()

def stage(name):
    global counting
    out[name] = {
        "counts": counting.counts()._asdict(),
        "records": [dataclasses.asdict(r) | {"lines": r.lines()} for r in watch.drain()],
    }
    counting.close()
    counting = CompileWatch()

stage("unused")
compiled = torch.compile(cubed, dynamic=False)
x = torch.ones(4, 4, requires_grad=True)
compiled(x).sum().backward()
stage("first")
watch.seal()
compiled(x).sum().backward()
stage("again")
compiled(torch.ones(5, 5, requires_grad=True)).sum().backward()
stage("late")
torch.compile(broken, dynamic=False)(torch.ones(4, 4))
stage("broken")
if "many" in stages:
    # More than torch remembers (64, and here 6), by a backend that keeps nothing on disk.
    torch._dynamo.utils.set_compilation_metrics_limit(6)
    torch._dynamo.config.recompile_limit = 100
    eager = torch.compile(cubed, dynamic=False, backend="eager")
    for size in range(6, 17):
        eager(torch.ones(size, size))
    stage("many")
counting.close()
watch.close()
torch._dynamo.reset()
torch.compile(cubed, backend="eager")(x)
out["closed"] = torch._dynamo.callback.callback_handler.end_callbacks == []
print(json.dumps(out), flush=True)
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a first and a second process saw; only the first compiles `many`."""
    cache = tmp_path_factory.mktemp("inductor")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    cold, warm = map(json.loads, done.stdout.splitlines())
    return cold, warm


def test_the_first_process_misses_and_the_second_is_served_from_disk(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    cold, warm = (seen["first"] for seen in stages)
    assert (cold["counts"]["disk_hits"], warm["counts"]["disk_hits"]) == (0, 2)
    assert [record["disk_hit"] for record in cold["records"]] == [False, False]
    assert [record["disk_hit"] for record in warm["records"]] == [True]


def test_forward_and_backward_are_records_with_their_seconds(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first = stages[0]["first"]
    names = [(record["source"], record["kernel"], record["digest"]) for record in first["records"]]
    assert names == [("inductor", "cubed", "0/0"), ("inductor", "cubed (backward)", "0/0")]
    assert all(record["seconds"] > 0 for record in first["records"])
    assert first["counts"]["graphs"] == 1


@pytest.mark.parametrize("stage", ["unused", "again"])
def test_where_nothing_was_compiled_nothing_is_counted(
    stages: tuple[dict[str, Any], dict[str, Any]], stage: str
) -> None:
    for seen in stages:
        assert set(seen[stage]["counts"].values()) == {0}
        assert seen[stage]["records"] == []


def test_a_compile_after_warm_up_says_which_guard_failed(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for seen, verb in zip(stages, ("compiled", "loaded from disk"), strict=True):
        record = seen["late"]["records"][0]
        assert record["after_warm_up"] is True
        assert record["lines"][0].startswith(f"{verb} after warm-up in ")
        assert "size mismatch at index 0. expected 4, actual 5" in record["lines"][1]
        assert seen["first"]["records"][0]["after_warm_up"] is False


def test_graph_breaks_are_counted(stages: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for seen in stages:
        assert seen["broken"]["counts"]["graph_breaks"] == 1
        assert seen["first"]["counts"]["graph_breaks"] == 0


def test_more_compilations_than_torch_keeps_are_all_recorded(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    many = stages[0]["many"]
    assert len(many["records"]) == 11


def test_a_count_that_torch_does_not_keep_is_absent_and_not_0(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    # The eager backend asks no cache: torch's table answers 0, as it would to a wrong name.
    counts = stages[0]["many"]["counts"]
    assert counts["graphs"] > 0 and counts["disk_hits"] is None
    assert stages[0]["many"]["records"][0]["disk_hit"] is None


def test_a_closed_watch_has_left_nothing_in_torch(
    stages: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert stages[0]["closed"] is True
