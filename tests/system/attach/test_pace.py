"""What a watched script says of its pace: what it compiled, how far it is, and what its allocator holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.log.folder import RunFolder
from engine.log.held import ALLOCATOR, Held, read_held
from tests.support.attached import PROBE, run_watched

PROBED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace as Of
from apr_watch.progress import steps_left_of_lightning, steps_left_of_trainer
"""


def probed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBED + code, str(PROBE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lightning_says_what_is_left_of_its_steps_or_of_its_passes() -> None:
    """By the attributes of its Trainer; `inf` is a stream, -1 no end."""
    code = """
def left(**attributes):
    given = dict(lightning_module=Of(automatic_optimization=True), global_step=3, max_steps=-1, max_epochs=2,
                 num_training_batches=7, accumulate_grad_batches=2)
    return steps_left_of_lightning(Of(**given | attributes))

print(left(), left(max_steps=6), left(max_steps=100), left(max_epochs=-1), left(max_epochs=None, max_steps=5))
print(left(num_training_batches=float("inf")), left(num_training_batches=float("inf"), max_steps=9))
manual = left(lightning_module=Of(automatic_optimization=False))
print(manual, steps_left_of_lightning(Of()), steps_left_of_trainer(Of()))
"""
    assert probed(code).splitlines() == ["5 3 5 None 2", "None 6", "None None None"]


def test_what_the_allocator_holds_is_read_as_that_of_our_own_runs(tmp_path: Path) -> None:
    """At most once a second; with an allocator that keeps no counts, nothing."""
    code = f"""
import apr_watch.memory as memory
counts = {{"allocated_bytes": {{"all": {{"current": 7, "peak": 9}}}}, "reserved_bytes": {{"all": {{"current": 12}}}}}}
asked, now = [], [10.0]
cuda = Of(memory_stats_as_nested_dict=lambda device: asked.append(device) or counts)
memory.time = Of(monotonic=lambda: now[0])
held = memory.HeldMemory(Of(cuda=cuda))
for step, device in ((1, "cpu"), (2, "cuda"), (3, "cuda")):
    held.record({str(tmp_path)!r}, step, Of(type=device))
now[0] = 11.5
counts = {{}}
held.record({str(tmp_path)!r}, 4, Of(type="cuda"))
memory.HeldMemory(Of(cuda=Of())).record({str(tmp_path)!r}, 5, Of(type="cuda"))
print(len(asked))
"""
    assert probed(code) == "2\n"
    assert read_held(RunFolder(tmp_path)) == Held(
        source=ALLOCATOR, held_bytes=7, reserved_bytes=12, peak_bytes=9, step=2
    )


def test_the_device_clock_reads_no_step_whose_boundaries_were_not_all_seen() -> None:
    """On a stand-in for a GPU: while a graph is captured, on another stream, or before CUDA is there."""
    code = """
from apr_watch.device_clock import DeviceClock

class Event:
    made = 0
    def __init__(self, enable_timing):
        Event.made += 1
    def record(self, stream):
        gpu.now += 1.0
        self.at = gpu.now
    def query(self):
        return gpu.passed >= self.at
    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3

one, two = Of(device="gpu", name=1), Of(device="gpu", name=2)
gpu = Of(now=0.0, passed=1e9, there=True, capturing=False, stream=one)
cuda = Of(Event=Event, is_initialized=lambda: gpu.there, current_stream=lambda: gpu.stream,
          is_current_stream_capturing=lambda: gpu.capturing)

def steps(*changes):
    clock, found = DeviceClock(Of(cuda=cuda), ("data", "rest")), []
    vars(gpu).update(there=True, capturing=False, stream=one)
    clock.mark("rest")
    for change in changes:
        vars(gpu).update(change)
        clock.mark("data")
        vars(gpu).update(there=True, capturing=False)
        clock.mark("rest")
        lap = clock.lap("gpu")
        assert clock.has_passed(lap)
        found.append(list(lap.seconds.values()))
    print(found)

steps({}, {}, {})
print(Event.made)
steps({}, dict(capturing=True), {})
steps({}, dict(stream=two), {})
steps(dict(there=False), {})
clock = DeviceClock(Of(cuda=cuda), ("data", "rest"))
clock.mark("rest"), clock.mark("data")
vars(gpu).update(capturing=True), clock.mark("rest")
first = clock.lap("gpu")
vars(gpu).update(capturing=False), clock.mark("data"), clock.mark("rest")
second = clock.lap("gpu")
gpu.passed = gpu.now - 0.5
print(clock.has_passed(first), first.seconds, clock.has_passed(second))
print(DeviceClock(Of(cuda=cuda), ()).lap("gpu").is_whole)
"""
    assert probed(code).splitlines() == [
        "[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]",
        "3",
        "[[1.0, 1.0], [], [1.0, 1.0]]",
        "[[1.0, 1.0], [], [1.0, 1.0]]",
        "[[], [1.0, 1.0]]",
        "True {} False",
        "False",
    ]


def test_the_start_of_workers_is_no_wait_for_data(tmp_path: Path) -> None:
    script = """
import time

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, at):
        return torch.ones(4)

net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
start = lambda worker: time.sleep(0.4)
for epoch in range(2):
    for rows in torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=1, worker_init_fn=start):
        net(rows).sum().backward()
        optimizer.step()
"""
    steps = run_watched(tmp_path, script).steps
    assert len(steps) == 6
    second_epoch = steps[3]["phases"]
    assert second_epoch["rest"] >= 0.4 > second_epoch["data"]
