"""Faults that no other test plants: a machine that restarts, crashes, second signals, readers that stand
still, settings, versions and files that change between two sessions, and a machine without memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.data.corpus import open_corpus
from engine.errors import RunLogError
from engine.flips.arms import sum_up
from engine.flips.pair import equal
from engine.log import write as write_module
from engine.log.events import LauncherGone, Note, StepDone
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.log.read import BrokenLog, LogReader
from engine.log.view import SILENT_S, RunView
from engine.log.write import LogWriter, repair
from engine.machine.host import Host
from engine.machine.kill_counters import read_kill_counters
from engine.models.config import ModelConfig
from engine.models.load import new_decoder, save_decoder
from engine.spec import RunSpec, load_spec
from engine.teachers.build import build_teacher
from engine.train import run as trainer_module
from engine.train.checkpoint.continuing import versions_changed
from engine.train.checkpoint.manifest import newest
from engine.train.checkpoint.write import save
from engine.train.step import LaunchedStep
from engine.train.trainer import Trainer
from engine.verdict import Level
from engine.watch.exit_cause import ExitState, attribute_exit
from engine.watch.machine_guard import (
    GRACE_S,
    HELD_S,
    SUSPENDED,
    ClockWatch,
    MemoryGuard,
)
from engine.watch.start_and_stop import launch
from engine.watch.supervisor import _Supervisor
from tests.support.finished_runs import resumed_here
from tests.support.flip_pairs import outcome, plan
from tests.support.host_trees import MACHINE, write_tree
from tests.support.kit import Kit, tiny_config
from tests.support.lacks import skip_for
from tests.support.packed_models import lively, make_config, write
from tests.support.run_folders import Scene, started
from tests.support.running import (
    DEADLINE_S,
    engine_here,
    environment,
    start,
    wait_for,
    wait_until_ended,
)
from tests.support.streams import documents_of
from tests.support.terminals import Terminal

# Row 7: the machine restarts.


def lost(path: Path, monkeypatch: pytest.MonkeyPatch, **facts: str) -> RunFolder:
    """A run that was going on in another boot, and whose end nobody wrote."""
    with monkeypatch.context() as patched:
        patched.setattr(write_module, "read_boot_id", lambda: "another-boot")
        scene = Scene(path).open().begin(60).steps(1, 30)
    if facts:
        from engine.log.events import FactsRead

        scene.device(FactsRead(facts=dict(facts)))
    return scene.close().run


def test_a_run_that_ended_with_its_machine_is_host_lost_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lost(tmp_path / "kd", monkeypatch)
    follower = Follower(run)
    follower.read_all()
    assert follower.state == "host_lost"
    said = engine_here("tail", run.path)
    assert "HOST_LOST | step 30/60" in said.stdout and "stopped or restarted" in said.stdout
    assert "--resume" in said.stdout and "memory" not in said.stdout
    assert "ended: host_lost: the machine stopped" in engine_here("diagnose", run.path).stdout


def test_a_run_on_another_machine_goes_on_while_it_writes_and_is_lost_when_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes and the lock of its log cannot be seen through a mounted folder."""
    here = os.uname()
    there = os.uname_result((here.sysname, "gpu-7", here.release, here.version, here.machine))
    with monkeypatch.context() as patched:
        patched.setattr(write_module.os, "uname", lambda: there)
        run = lost(tmp_path / "kd", monkeypatch)
    follower = Follower(run)
    follower.read_all()
    assert follower.state == "running"
    for log in (run.events, run.watch, run.device):
        if log.exists():
            os.utime(log, (0, time.time() - 2 * SILENT_S))
    follower.read_all()
    assert follower.state == "host_lost"
    assert "it ran on gpu-7, and nothing was written for" in engine_here("tail", run.path).stdout


def test_on_unified_memory_a_lost_machine_may_have_run_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(tmp_path / "kd", monkeypatch, cuda0_integrated="yes")
    assert "that is not proved" in engine_here("tail", tmp_path / "kd").stdout


def test_without_a_boot_id_nothing_is_said_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lost(tmp_path / "kd", monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr("engine.log.folder.read_boot_id", lambda: "unknown")
        follower = Follower(run)
        follower.read_all()
    assert follower.state == "vanished"


def test_a_hole_that_a_power_loss_left_in_a_log_is_named_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with LogWriter(path, writer="trainer") as log:
        for index in range(4):
            log.write(Note(level="info", text=str(index)))
    raw = path.read_bytes()
    begin = raw.index(b'"text":"1"')
    begin = raw.rindex(b"\n", 0, begin) + 1
    end = raw.index(b"\n", begin) + 20
    path.write_bytes(raw[: begin + 5] + bytes(end - begin - 5) + raw[end:])
    with pytest.raises(BrokenLog, match="had not reached the disk") as broken:
        LogReader(path).poll()
    assert broken.value.hole and len(broken.value.before) == 2
    said = repair(path)
    assert said is not None and f"from @{begin}, had not been written whole" in said
    assert repair(path) is None
    with LogWriter(path, writer="trainer") as log:
        log.write(Note(level="info", text="after"))
    texts = [e.text for e in LogReader(path).poll() if isinstance(e, Note)]
    assert texts == ["0", "after"]


# Row 8 and row 5: exceptions of the trainer.


def trained_here(kit: Kit, folder: Path, **changes: object) -> tuple[int, RunFolder]:
    """A run of the trainer in this process; its exit code and its folder."""
    spec, text = load_spec(kit.spec(folder, **changes), [])
    run = create_run(folder / "run", text, {"spec": spec.to_dict(), "spec_sha256": spec.sha256})
    code = trainer_module.run(run.path, resume=False, allow_fallback=False, keep_alive_fd=None)
    return code, run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("division by zero"), 70, "ZeroDivisionError: division by zero"),
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), 1, "the device allocator refused"),
        (MemoryError("a list"), 1, "the host allocator refused"),
    ],
)
def test_an_exception_in_a_step_is_told_and_keeps_the_checkpoint(
    kit: Kit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    said: str,
) -> None:
    real = Trainer.finish

    def fails_at_eight(self: Trainer, launched: LaunchedStep) -> StepDone:
        if launched.step == 8:
            raise error
        return real(self, launched)

    monkeypatch.setattr(Trainer, "finish", fails_at_eight)
    found, run = trained_here(kit, tmp_path)
    view = Follower(run).read_all()
    assert found == code and view.finished is not None
    assert (view.finished.state, view.finished.exit_code) == ("failed", code)
    assert said in view.finished.reason and view.finished.step == 7
    assert type(error).__name__ in capfd.readouterr().err
    kept = newest(run.checkpoints)
    assert kept is not None and kept.step == 5


@pytest.mark.alone
@pytest.mark.gpu
def test_a_gpu_without_room_is_an_allocation_that_failed(kit: Kit, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    # Less than the smallest segment: what earlier tests of the process left in place is enough for much.
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        code, run = trained_here(
            kit, tmp_path, compute__device="cuda", memory__allocator="native", data__seq_len=64
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    view = Follower(run).read_all()
    assert code == 1 and view.finished is not None
    assert "the device allocator refused" in view.finished.reason


# Rows 19, 29, 30, 40: what a run that goes on does not depend on.


class Going:
    """A run that goes on, with a teacher of its own, and whose terminal was lost."""

    def __init__(self, kit: Kit, folder: Path) -> None:
        self.teacher = Path(shutil.copytree(kit.teacher, folder / "teacher"))
        self.path = folder / "run"
        spec = kit.spec(
            folder, teacher__path=str(self.teacher), train__steps=10**6, checkpoint__every=0
        )
        launched = start("distill", spec, "--out", self.path)
        pid = wait_for(self.path, lambda view: view.last_step >= 2).view.trainer_pid
        assert pid is not None
        self.pid = pid
        launched.send_signal(signal.SIGHUP)
        launched.communicate(timeout=DEADLINE_S)
        self.left = wait_for(self.path, lambda view: view.launcher_gone is not None).view.last_step

    def goes_on(self, steps: int = 30) -> RunView:
        """Wait for so many more steps."""
        done = Follower(RunFolder(self.path)).read_all().last_step
        return wait_for(self.path, lambda view: view.last_step >= done + steps).view


@pytest.fixture(scope="module")
def resting(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    run = Going(kit, tmp_path_factory.mktemp("going"))
    os.kill(run.pid, signal.SIGSTOP)
    yield run
    os.kill(run.pid, signal.SIGCONT)
    stopped = engine_here("stop", run.path)
    assert stopped.returncode == 0, stopped.stderr
    assert wait_until_ended(run.path).state == "stopped"


@pytest.fixture
def going(resting: Going) -> Iterator[Going]:
    """It goes on as long as a test looks, and leaves the processor to the others."""
    os.kill(resting.pid, signal.SIGCONT)
    yield resting
    os.kill(resting.pid, signal.SIGSTOP)


def test_a_lost_terminal_leaves_the_run_going_and_the_log_says_which_it_was(going: Going) -> None:
    view = going.goes_on(5)
    assert view.last_step >= going.left + 5 and view.launcher_gone == "hangup"
    assert [e.event.how for e in view.lines if isinstance(e.event, LauncherGone)] == ["hangup"]


def test_a_running_run_cannot_be_started_twice(going: Going) -> None:
    again = engine_here("distill", "--resume", going.path)
    assert again.returncode == 65 and "found a running one" in again.stderr


def test_a_trainer_has_no_worker_to_lose_and_no_shared_memory_to_fill(going: Going) -> None:
    tasks = Path(f"/proc/{going.pid}/task")
    children = [pid for t in tasks.iterdir() for pid in (t / "children").read_text().split()]
    assert children == []
    maps = Path(f"/proc/{going.pid}/maps").read_text().splitlines()
    # The cache of tokens is where the tests' files are.
    assert [one for one in maps if "/dev/shm" in one and "/tokens/" not in one] == []


# Two screens of a real terminal, and thirty steps; a lost terminal leaves the run alone above.
@pytest.mark.soak
def test_a_screen_that_is_killed_leaves_the_run_alone_and_the_next_shows_all_of_it(
    going: Going,
) -> None:
    first = Terminal(str(going.path))
    first.read_until("RUNNING")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    view = going.goes_on()
    assert view.steps.values("step", 0, 3) == [1.0, 2.0, 3.0]
    second = Terminal(str(going.path))
    second.read_until("RUNNING")
    second.press("q")
    assert second.wait() == 0


def test_a_reader_that_stands_still_never_holds_up_a_step_or_costs_a_line(going: Going) -> None:
    read, written = os.pipe()
    fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, 4096)
    tail = subprocess.Popen(
        [sys.executable, "-m", "engine", "tail", "-f", str(going.path)],
        stdout=written,
        env=environment(),
    )
    try:
        os.close(written)
        assert os.read(read, 1), "it prints, and nobody reads on"
        os.kill(tail.pid, signal.SIGSTOP)
        view = going.goes_on(90)
        steps = view.steps.values("step")
        assert steps == [float(i) for i in range(1, len(steps) + 1)]
    finally:
        tail.kill()
        tail.wait()
        os.close(read)


def test_a_model_file_that_is_emptied_while_a_run_goes_on_changes_nothing(going: Going) -> None:
    assert str(going.teacher) not in Path(f"/proc/{going.pid}/maps").read_text()
    (file,) = going.teacher.glob("*.safetensors")
    content = file.read_bytes()
    os.truncate(file, 0)
    going.goes_on()
    file.write_bytes(content)  # the run is for other tests, too


def test_a_teacher_in_blocks_keeps_no_mapping_of_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q4_K")
    teacher, _ = build_teacher(
        str(path),
        backend="quantized",
        precision="fp32",
        device=torch.device("cpu"),
        student_vocab=make_config().vocab_size,
    )
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, 0)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert teacher.hidden(tokens, torch.zeros_like(tokens)).isfinite().all()


# Rows 36, 37, 40: what may have changed when a run is resumed.


@dataclass
class Stopped:
    """A run of 100,000 steps with a teacher and a text of its own, which Ctrl-C ended after its first checkpoint."""

    folder: Path
    code: int | None
    """Of its launcher."""


@pytest.fixture(scope="module")
def stopped(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    teacher = shutil.copytree(kit.teacher, folder / "teacher")
    corpus = shutil.copytree(kit.corpus, folder / "corpus")
    own = {"teacher__path": str(teacher), "data__corpus": str(corpus)}
    launched = start(
        "distill", kit.spec(folder, train__steps=100000, **own), "--out", folder / "run"
    )
    wait_for(folder / "run", lambda view: bool(view.checkpoints))
    launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=DEADLINE_S)
    wait_until_ended(folder / "run")
    return Stopped(folder, launched.returncode)


@pytest.fixture
def run(stopped: Stopped, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped.folder / "run", tmp_path / "run"))


def test_ctrl_c_exits_130(stopped: Stopped) -> None:
    follower = Follower(RunFolder(stopped.folder / "run"))
    follower.read_all()
    assert stopped.code == 130 and follower.state == "stopped"


def test_a_setting_changed_on_resume_is_refused_with_both_values(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / "effective.json").read_bytes()
    asked = engine_here("distill", "--resume", run, "--set", "train.lr=0.001")
    assert asked.returncode == 65 and "train.lr = 0.001 (was 0.0003)" in asked.stderr
    assert "--allow-change train.lr" in asked.stderr
    other = ("--set", "train.rows=3", "--allow-change", "train.rows")
    asked = engine_here("distill", "--resume", run, *other)
    assert asked.returncode == 65 and "rows in a step" in asked.stderr
    monkeypatch.setenv("MANAGED_MEMORY", "1")
    asked = engine_here("distill", "--resume", run)
    assert asked.returncode == 65 and "memory.allocator = 'managed' (was 'auto')" in asked.stderr
    unknown = engine_here("distill", "--resume", run, "--allow-change", "train.loss_rate")
    assert unknown.returncode == 64 and "train.loss_rate" in unknown.stderr
    assert (run / "effective.json").read_bytes() == before


@pytest.mark.usefixtures("trainer_here")
def test_a_change_that_is_allowed_is_made_and_written_down_and_so_are_other_versions(
    run: Path,
) -> None:
    log = (run / "events.jsonl").read_bytes()
    ours = f'"torch":"{torch.__version__}"'.encode()
    assert ours in log
    (run / "events.jsonl").write_bytes(log.replace(ours, b'"torch":"2.0.0"'))
    step = Follower(RunFolder(run)).read_all().last_step
    changed = ["--set", f"train.steps={step + 4}", "--allow-change", "train.steps"]
    changed += ["--set", "train.lr=0.0001", "--allow-change", "train.lr"]
    done = engine_here("distill", "--resume", run, *changed)
    assert done.returncode == 0, done.stderr
    follower = Follower(RunFolder(run))
    view = follower.read_all()
    assert follower.state == "completed" and view.last_step == step + 4
    notes = "\n".join(note.text for note in view.notes)
    assert f"as allowed: train.steps 100000 -> {step + 4}" in notes
    assert "torch 2.0.0 -> " in notes and "may differ in their last bits" in notes
    changes = json.loads((run / "effective.json").read_text())["changes"]
    found = {change["key"]: (change["was"], change["is"]) for change in changes}
    assert found == {"train.steps": (100000, step + 4), "train.lr": (0.0003, 0.0001)}


@pytest.mark.usefixtures("trainer_here")
def test_a_change_that_was_written_down_but_not_made_is_refused(run: Path) -> None:
    effective = json.loads((run / "effective.json").read_text())
    made = {"key": "train.lr", "was": 0.0003, "is": 0.0001, "spec_sha256": effective["spec_sha256"]}
    (run / "effective.json").write_text(json.dumps(effective | {"changes": [made]}))
    done = engine_here("distill", "--resume", run)
    assert (
        done.returncode == 65 and "train.lr = 0.0001, to which a resume changed it" in done.stderr
    )


def test_versions_that_are_the_same_are_not_worth_a_word() -> None:
    now = started("kd", 60)
    assert versions_changed(None, now) == ""
    assert versions_changed(RunView(started=now), now) == ""


def test_a_teacher_replaced_between_two_sessions_is_refused(
    kit: Kit, stopped: Stopped, run: Path
) -> None:
    kept, teacher = stopped.folder / "kept", stopped.folder / "teacher"
    teacher.rename(kept)
    try:
        config = ModelConfig.from_dict(tiny_config(hidden_size=48), "other")
        tokenizer = kit.teacher / "tokenizer.json"
        save_decoder(new_decoder(config, seed=8), teacher, torch.float32, extra_files=[tokenizer])
        asked = resumed_here(run)
    finally:
        shutil.rmtree(teacher)
        kept.rename(teacher)
    assert asked.returncode == 65, asked.stderr
    assert "expected the weights this run began with" in asked.stderr
    assert str(teacher) in asked.stderr


@pytest.mark.parametrize("split", ["training", "held-out"])
def test_changed_text_is_refused_on_resume(stopped: Stopped, run: Path, split: str) -> None:
    corpus, kept = stopped.folder / "corpus", stopped.folder / "kept"
    fraction = load_spec(run / "spec.toml")[0].data.heldout_fraction
    found = open_corpus(str(corpus), heldout_fraction=fraction)
    documents = documents_of(found.train if split == "training" else found.heldout)
    shutil.copytree(corpus, kept)
    try:
        for one in documents:
            (corpus / one.name).write_text(one.text.replace("return", "yield "))
        refused = resumed_here(run)
    finally:
        shutil.rmtree(corpus)
        kept.rename(corpus)
    assert refused.returncode == 65
    assert f"expected the {split} tokens this run began with" in refused.stderr


def test_a_run_whose_output_cannot_be_kept_is_refused_in_words(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", "", {"spec": RunSpec().to_dict()})
    run.stderr.mkdir()
    with pytest.raises(
        RunLogError, match=r"stderr\.txt — expected to open it for writing, found Is"
    ):
        launch(run)


# Row 25: leases of processes that are no more.


def test_a_folder_left_by_a_dead_process_is_swept_though_its_pid_lives_again(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, {"state.json": b"{}"})
    other = subprocess.Popen(["sleep", "60"])
    try:
        partial = tmp_path / f"step-00000002.partial-{other.pid}"
        partial.mkdir()
        save(tmp_path, 3, {"state.json": b"{}"})
        assert not partial.exists(), "one process at a time writes into the folder"
    finally:
        other.kill()
        other.wait()


# Rows 6 and 35: the machine itself.


def proc(root: Path, available_kib: int, full_pct: float) -> Host:
    texts = MACHINE | {
        "proc/meminfo": f"MemTotal: 125829120 kB\nMemAvailable: {available_kib} kB\n",
        "proc/pressure/memory": f"some avg10={full_pct} avg60=0\nfull avg10={full_pct:.2f} avg60=0\n",
    }
    return write_tree(root, texts)


def test_a_machine_about_to_hang_has_its_run_stopped_and_then_ended(tmp_path: Path) -> None:
    now = [0.0]
    host = proc(tmp_path, 500_000, 65.0)
    guard = MemoryGuard(host, monotonic=lambda: now[0])
    seen = []
    for _ in range(int(HELD_S + GRACE_S) + 3):
        found = guard.check()
        assert found.low
        seen.append((found.stop, found.end))
        now[0] += 1.0
    assert seen.index((True, False)) == HELD_S and seen.index((False, True)) == HELD_S + GRACE_S
    assert seen.count((True, False)) == seen.count((False, True)) == 1


@pytest.mark.parametrize(
    ("available_kib", "full_pct", "low"),
    [(500_000, 3.0, True), (60_000_000, 90.0, False), (60_000_000, 0.0, False)],
)
def test_little_memory_or_pressure_alone_stops_nothing(
    tmp_path: Path, available_kib: int, full_pct: float, low: bool
) -> None:
    now = [0.0]
    guard = MemoryGuard(proc(tmp_path, available_kib, full_pct), monotonic=lambda: now[0])
    for _ in range(60):
        found = guard.check()
        assert (found.low, found.stop, found.end) == (low, False, False)
        now[0] += 1.0


def test_a_kernel_without_pressure_readings_is_not_guarded_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    host = proc(tmp_path, 500_000, 65.0)
    (tmp_path / "proc/pressure/memory").unlink()
    guard = MemoryGuard(host)
    assert "not guarded" in guard.check().why and guard.check().why == ""


@pytest.mark.parametrize(("asked", "returncode"), [("stop", -signal.SIGTERM), ("report", None)])
def test_the_supervisor_does_what_the_guard_finds_and_says_why(
    tmp_path: Path, asked: str, returncode: int | None
) -> None:
    run = create_run(tmp_path / "run", "", {})
    now = [0.0]
    child = subprocess.Popen(["sleep", "60"])
    with (
        LogWriter(run.watch, writer="supervisor") as watch,
        LogWriter(run.device, writer="sampler") as device,
    ):
        supervisor = _Supervisor(run, watch, device, None)
        guard = MemoryGuard(proc(tmp_path, 500_000, 65.0), monotonic=lambda: now[0])
        settings = SimpleNamespace(watch=SimpleNamespace(on_thrash=asked))
        observer: Any = SimpleNamespace(
            watcher=SimpleNamespace(settings=settings), write_watch=watch.write
        )
        supervisor.observer = observer
        for _ in range(8):
            supervisor._act_on_memory(child, guard.check())
            now[0] += 1.0
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=None if returncode is not None else 0.0)
        assert child.poll() == returncode
        notes = [e.text for e in LogReader(run.watch).poll() if isinstance(e, Note)]
        assert len(notes) == 1 and "all processes wait for memory 65 %" in notes[0]
        if asked == "stop":
            assert supervisor.stop_signal == "SIGTERM, watch.on_thrash = stop"
            assert notes[0].startswith("SIGTERM to the trainer: ")
    finally:
        child.kill()
        child.wait()


def test_a_suspended_machine_and_a_set_clock_are_told_apart() -> None:
    times = {"monotonic": 100.0, "boot": 150.0, "wall": 1000.0}
    clocks = ClockWatch(*(lambda name=name: times[name] for name in times))  # type: ignore[misc]
    for name in times:
        times[name] += 1.0
    assert clocks.check() == []
    times |= {"boot": times["boot"] + 300.0, "wall": times["wall"] + 300.0}
    assert clocks.check() == [f"{SUSPENDED} 300 s; durations do not count it"]
    times["wall"] -= 3600.0
    assert clocks.check() == ["the wall clock was set by -3600 s; durations do not count it"]
    times["wall"] += 0.4
    assert clocks.check() == []


def test_a_pair_in_which_the_machine_slept_proves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(20).steps(1, 10)
    scene.watch(Note(level="warning", text=f"{SUSPENDED} 300 s; durations do not count it"))
    scene.steps(11, 20)
    view = Follower(scene.close().run).read_all()
    slept = sum_up(
        plan(), "B", RunFolder(tmp_path / "arms" / "01-b"), view, "completed", 10.0, over=False
    )
    assert slept.suspended
    said = equal(plan(), outcome("A"), outcome("B", suspended=True))
    assert said.level == Level.FAIL and "slept during B" in said.reason


def test_a_clock_that_is_set_back_changes_no_duration_in_a_log(tmp_path: Path) -> None:
    wall = iter([5000.0, 1000.0])
    mono = iter([10.0, 10.0, 12.5])
    path = tmp_path / "events.jsonl"
    with LogWriter(
        path, writer="trainer", wall=lambda: next(wall), monotonic=lambda: next(mono)
    ) as log:
        log.write(Note(level="info", text="later"))
    assert [event.t_s for event in LogReader(path).poll()] == [0.0, 2.5]


# Row 2: a real control group that runs out of memory.

EATER = "b = []\nwhile True: b.append(bytearray(1 << 20))"


@pytest.mark.soak  # it moves /proc/vmstat oom_kill, from which tests beside it would conclude
def test_a_child_beyond_the_limit_of_a_real_control_group_is_oom_memcg(tmp_path: Path) -> None:
    found = Host().find_cgroup("memory")
    if not hasattr(found, "mount"):
        skip_for("a memory control group", found)
    group = found.mount / f"apr-oom-{os.getpid()}"
    limit = "memory.max" if found.version == 2 else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        skip_for("a memory control group", error)
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.stdin.read(1)\n{EATER}"], stdin=subprocess.PIPE
        )
        (group / "cgroup.procs").write_text(str(child.pid))
        before = read_kill_counters(pid=child.pid)
        child.communicate(b"x", timeout=240)
        after = read_kill_counters(cgroup=before.cgroup)
    finally:
        deadline = time.monotonic() + 120.0
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                group.rmdir()
    said = attribute_exit(
        child.returncode, before, after, stop_requested=None, kernel_line=None, finished=False
    )
    assert child.returncode == -signal.SIGKILL
    assert said.state is ExitState.OOM_MEMCG, said.sentence
    assert "control group ran out of memory" in said.sentence
