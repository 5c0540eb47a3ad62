"""Lines that the probe writes, and hashes of the rows that it compares between training and evaluation."""

from __future__ import annotations

import math

from engine.log.events import Logged as ScriptLogged
from engine.log.read import decode_line
from tests.system.attach.test_pace import probed


def test_values_that_json_cannot_hold_are_read_as_they_were() -> None:
    code = r"""
import sys
from apr_watch.writer import encode
values = {"plain": 2.5, "a/b~c": float("nan"), "large": 1e16, "huge": -3e200, "\udcff": 1.0}
sys.stdout.write(encode("logged", {"step": 3, "values": values}, 7, 1.25).decode())
"""
    event = decode_line(probed(code).encode(), "events.jsonl")
    assert isinstance(event, ScriptLogged)
    assert math.isnan(event.values.pop("a/b~c"))
    assert event.values == {"plain": 2.5, "large": 1e16, "huge": -math.inf, "\\udcff": 1.0}


def test_rows_are_hashed_by_their_elements_in_any_dtype_and_layout() -> None:
    """Also where numpy has no such dtype; not rows of one repeated number, and none of other batches."""
    code = """
import torch
from apr_watch.held_out import _hashes
rows = torch.arange(60).reshape(3, 20) % 19
rows[1] = 7
for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float16):
    one = rows.to(dtype)
    found = _hashes(torch, {"x": one, "y": torch.zeros(3)})
    turned = _hashes(torch, [one.T.contiguous().T])
    print(len(found), len(set(found)), found == turned, found == _hashes(torch, one[[2, 1, 0]])[::-1])
for batch in (rows.float().requires_grad_(), [torch.zeros(4), "text"], rows[:, :1]):
    print(_hashes(torch, batch))
"""
    lines = probed(code).splitlines()
    assert lines == ["2 2 True True"] * 5 + ["[]"] * 3
