"""Ranks that hang in a collective of NCCL are asked for it from outside, and say which rank is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.watch.flight_recorder import FOLDER, ask, has_answered, read, sentence, variables
from tests.support.lacks import skip_for

pytestmark = pytest.mark.gpu

HANGS = """
import os, pathlib, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1000, device="cuda")
for _ in range(3):
    dist.all_reduce(x)
torch.cuda.synchronize()
pathlib.Path(sys.argv[1], str(rank)).touch()
if rank == 1:
    sys.stdin.read()
dist.all_reduce(x)
torch.cuda.synchronize()
"""


def test_the_rank_that_did_not_enter_a_collective_is_named(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        skip_for("two CUDA GPUs", f"torch sees {torch.cuda.device_count()}")
    (tmp_path / FOLDER).mkdir()
    environment = {**os.environ, **variables(tmp_path, {}), "TORCH_FR_BUFFER_SIZE": "100"}
    environment |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": "29533", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS, str(tmp_path)],
            env=environment | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            assert all(one.poll() is None for one in ranks) and time.monotonic() < deadline
        asked = ask(tmp_path)
        assert asked is not None
        while not has_answered(tmp_path, asked):
            assert time.monotonic() < deadline
        traces, refused = read(tmp_path, asked)
        assert refused == []
        said = sentence(traces)
        assert said.startswith(
            "rank 1 has not entered all_reduce(Float [1000]), number 4, in which rank 0"
        )
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
