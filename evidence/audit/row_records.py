"""Measure what it costs to record and check the rows of every step: `python evidence/audit/row_records.py`.

Times a real `TrainedRows` on the host: hashes of the rows of a step, their records in a file, and the comparison with
the prescribed rows. The first two are to cost less than 0.1 % of a step; on a GPU all of it happens while the device
computes.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from engine.data.batches import Batches
from engine.data.tokens import TokenStream
from engine.log.events import StepDone
from engine.log.folder import RunFolder
from engine.runtime.ranks import Ranks
from engine.spec import build_spec
from engine.train.step import MicroBatch, TeacherOutput
from engine.train.trained_rows import TrainedRows

STEPS = 50


def measure(rows: int, length: int) -> dict[str, float]:
    tokens = (np.arange(STEPS * rows * length + 1) * 7919 % 151_936).astype(np.uint32)
    starts = np.append(np.arange(0, len(tokens), 700), len(tokens))
    stream = TokenStream(tokens=tokens, starts=starts, sha256="0" * 64)
    spec = build_spec(
        {
            "student": {"config": "student.json"},
            "data": {"seq_len": length},
            "loss": {"alpha": 1.0},
            "train": {"steps": STEPS, "rows": rows},
        },
        check_paths=False,
    )
    trainer = SimpleNamespace(ranks=Ranks(), step=0, observers=())
    batches = Batches(stream, seq_len=length, rows_per_batch=rows, seed=spec.train.seed)
    spent: dict[str, list[float]] = {"hash and record": [], "judge": []}
    with tempfile.TemporaryDirectory() as folder:
        trained = TrainedRows(RunFolder(Path(folder)), cast(Any, trainer), spec, batches, [])
        for step in range(1, STEPS + 1):
            batch = batches.take((step - 1) * rows, rows)
            empty = torch.empty(0)
            micro = MicroBatch(batch, 0, empty, empty)
            begun = time.perf_counter()
            trained.begun(step)
            trained.forwarded(micro, empty, TeacherOutput())
            done = trained.record(StepDone(step=step))
            recorded = time.perf_counter()
            assert not list(trained.after(done))
            spent["hash and record"].append(recorded - begun)
            spent["judge"].append(time.perf_counter() - recorded)
    return {f"{name}, ms": round(1e3 * statistics.median(s), 3) for name, s in spent.items()}


if __name__ == "__main__":
    found = {f"{rows} x {length}": measure(rows, length) for rows, length in ((8, 1024), (32, 256))}
    print(json.dumps(found, indent=1))
