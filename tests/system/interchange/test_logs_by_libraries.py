"""Logs that the libraries wrote themselves in small trainings (`evidence/interchange/by_libraries.py`): each fault is
named with the step where it began, and the healthy ones are left alone."""

from __future__ import annotations

import json
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.lacks import skip_for
from tests.support.paths import EVIDENCE
from tests.support.running import engine_here

ARCHIVE = EVIDENCE / "interchange" / "by_libraries.tar.xz"
WITHIN = 12
"""Number of steps by which the one that is named may differ."""
NAMED = {
    "tensorboard_rate_jumps": "loss_diverged",
    "tensorboard_overfits": "heldout_diverging",
    "wandb_nan": "non_finite",
    "wandb_memory": "logged_memory_grows",
    "mlflow_rate_ends": "rate_is_dead",
    "mlflow_guesses": "loss_flat_at_guessing",
    "lightning_sum": "heldout_below_training",
    "lightning_rate_too_high": "loss_rose_for_good",
    "trainer_nan": "non_finite",
    "trainer_spike": "loss_spike",
    "printed_out_of_memory": "DefaultCPUAllocator: can't allocate memory",
    "printed_diverges": "loss_diverged",
    "parquet_waits_for_data": "data_wait",
    "json_nan_recovers": "number loss",
    "json_stalls": "gap_in_time",
    "nanogpt_slow_steps": "slow_steps_recur",
    "tqdm_loader_killed": "a DataLoader worker was killed",
    "keras_overfits": "heldout_diverging",
}
"""The alert that names each fault, or words of the line on a crash."""


def index() -> list[dict[str, Any]]:
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile("index.json")
        assert file is not None
        return list(json.load(file)["logs"])


LOGS = {row["name"]: row for row in index()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("logs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_a_library_is_judged_as_its_training_was(name: str, folder: Path) -> None:
    row = LOGS[name]
    if row["kind"] in ("tensorboard", "wandb") and find_spec(row["kind"]) is None:
        skip_for("TensorBoard and W&B")
    if row["log"].endswith(".parquet") and find_spec("pyarrow") is None:
        skip_for("pyarrow and zstandard")
    found = json.loads(engine_here("diagnose", folder / row["log"], "--json").stdout)["verdict"]
    if not row["fault"]:
        assert found["level"] == "healthy", found["line"]
        return
    assert found["id"].removeprefix("alert ") == NAMED[name] or NAMED[name] in found["line"], found
    assert abs(found["since_step"] - row["step"]) <= WITHIN, (row["step"], found["line"])


def test_there_are_thirty_logs_of_ten_kinds() -> None:
    faulty = {name for name, row in LOGS.items() if row["fault"]}
    assert (len(LOGS), faulty) == (30, set(NAMED))
    assert len({row["kind"] for row in LOGS.values()}) == 10
