"""Measure what it costs to record the rows of every step: `python evidence/audit/row_records.py`.

Times a real `TrainedRows` on the host: hashes of the rows of a step, and their records in a file. They are to cost less
than 0.1 % of a step; on a GPU all of it happens while the device computes.
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
from engine.train.step import MicroBatch, TeacherOutput
from engine.train.trained_rows import TrainedRows

STEPS = 50


def measure(rows: int, length: int) -> dict[str, float]:
    tokens = (np.arange(STEPS * rows * length + 1) * 7919 % 151_936).astype(np.uint32)
    starts = np.append(np.arange(0, len(tokens), 700), len(tokens))
    stream = TokenStream(tokens=tokens, starts=starts, sha256="0" * 64)
    trainer = SimpleNamespace(ranks=Ranks(), step=0, observers=())
    batches = Batches(stream, seq_len=length, rows_per_batch=rows, seed=0)
    spent_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trained = TrainedRows(RunFolder(Path(folder)), cast(Any, trainer))
        for step in range(1, STEPS + 1):
            batch = batches.take((step - 1) * rows, rows)
            empty = torch.empty(0)
            micro = MicroBatch(batch, 0, empty, empty)
            begun = time.perf_counter()
            trained.begun(step)
            trained.forwarded(micro, empty, TeacherOutput())
            trained.record(StepDone(step=step))
            spent_s.append(time.perf_counter() - begun)
    return {"hash and record, ms": round(1e3 * statistics.median(spent_s), 3)}


if __name__ == "__main__":
    found = {f"{rows} x {length}": measure(rows, length) for rows, length in ((8, 1024), (32, 256))}
    print(json.dumps(found, indent=1))
