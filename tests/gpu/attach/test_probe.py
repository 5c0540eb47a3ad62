"""The probe in a process that trains on a GPU: the run is the same to the byte and waits for nothing that it did not
wait for; phases are the device's, and memory is the allocator's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.log.folder import RunFolder
from engine.log.held import ALLOCATOR, read_held
from tests.support.attached import run_twice

pytestmark = pytest.mark.gpu

PHASES = {"data", "forward", "backward", "optimizer", "rest"}

BEGIN = """
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
device = torch.device("cuda")
torch.cuda.manual_seed(7)
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)
rows = torch.utils.data.TensorDataset(torch.randn(%d, 1024))
loader = torch.utils.data.DataLoader(rows, 64, pin_memory=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, fused=True)
"""

PRINTS = (
    BEGIN % 768
    + """
for (x,) in loader:
    x = x.to(device, non_blocking=True)
    optimizer.zero_grad()
    loss = net(torch.nn.functional.dropout(x, 0.1)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    said = dict(loss=loss.item(), grad_norm=norm.item(), lr=0.001)
    optimizer.step()
    say(**said, rows=64, backwards=1)
save(net)
"""
)

NEVER_WAITS = (
    BEGIN % 5120
    + """
batches = [x.to(device) for (x,) in loader]
ends = [torch.cuda.Event(enable_timing=True) for _ in batches]
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
# No value is read inside the loop: the host runs ahead of the GPU.
for x, end in zip(batches, ends):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    end.record()
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
print(json.dumps([a.elapsed_time(b) / 1e3 for a, b in zip(ends, ends[1:])]), file=open("ends.json", "w"))
save(net)
"""
)

CAPTURES = (
    BEGIN % 64
    + """
x = torch.randn(64, 1024, device=device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def step():
    optimizer.zero_grad(set_to_none=False)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        say(loss=step().item())
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
print("captured", flush=True)
for _ in range(4):
    graph.replay()
    print("replayed", captured.item(), flush=True)
for _ in range(3):
    say(loss=step().item())
save(net)
"""
)


def test_a_loop_on_a_gpu_is_the_same_to_the_byte_and_each_loss_is_the_one_it_prints(
    tmp_path: Path,
) -> None:
    watched, _ = run_twice(tmp_path, PRINTS)
    assert len(watched.steps) == len(watched.said) == 12
    for step, said in zip(watched.steps, watched.said, strict=True):
        assert {name: step[name] for name in said} == said
        assert set(step["phases"]) == PHASES and min(step["phases"].values()) >= 0
        assert step["phases"]["backward"] > 0 and step["phases"]["optimizer"] > 0
    # The script waits for each step: in all, the host's seconds and the device's are the same.
    device_s = sum(sum(step["phases"].values()) for step in watched.steps)
    assert device_s == pytest.approx(sum(step["step_s"] for step in watched.steps), rel=0.2)
    assert not watched.of_kind("note")
    held = read_held(RunFolder(watched.folder / "run"))
    assert held is not None and held.source == ALLOCATOR and held.reserved_bytes
    # At least the weights, gradients and two moments of each parameter, in float32.
    assert 16 * 8 * 1024 * 1025 <= held.held_bytes <= held.peak_bytes <= held.reserved_bytes


def test_a_loop_that_never_waits_for_the_gpu_still_does_not(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, NEVER_WAITS)
    assert len(watched.steps) == 80 and not watched.of_kind("note")
    assert all(step["loss"] is not None for step in watched.steps)
    assert all(set(step["phases"]) == PHASES for step in watched.steps)
    ends = json.loads((watched.folder / "ends.json").read_text())
    # The script's own events lie a kernel or two beside ours, and what the host does between the two is seldom
    # anything but in the first steps and behind powers of two.
    device_s = sum(sum(step["phases"].values()) for step in watched.steps[40:60])
    assert device_s == pytest.approx(sum(ends[39:59]), rel=0.05)


def test_capturing_a_graph_is_not_disturbed_and_its_replays_are_no_steps(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, CAPTURES)
    assert "captured" in watched.stdout and not watched.of_kind("note")
    assert [step["loss"] for step in watched.steps] == [said["loss"] for said in watched.said]
    assert len(watched.steps) == 6
    phases = [bool(step["phases"]) for step in watched.steps]
    # The step behind the capture began before it, and on another stream.
    assert phases == [True, True, True, False, True, True]
