"""What a run sets in torch for its whole process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine.plan.device import set_up_device
from engine.spec import build_spec
from engine.train import to_events


def test_the_threads_are_those_of_the_spec_and_nothing_is_left_on() -> None:
    tree: dict[str, Any] = {
        "student": {"config": "student.json"},
        "loss": {"alpha": 1.0},
        "compute": {"device": "cpu"},
    }
    before = torch.get_num_threads()
    spec = build_spec(tree, check_paths=False)
    try:
        for threads in (2, 1):
            asked = dataclasses.replace(spec.compute, threads=threads)
            set_up_device(dataclasses.replace(spec, compute=asked), to_events.discard)
            assert torch.get_num_threads() == threads
            assert not torch.is_anomaly_enabled() and not torch.is_autocast_enabled("cpu")
            assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_num_threads(before)
