"""The summary of a watched command: verdict, why, evidence and next step on one screen, from its folder alone."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.attach.summary import (
    LET_IN,
    LET_STEP,
    MOST_LINES,
    NO_OPTIMIZER,
    NO_STEP,
    START_AGAIN,
    WIDTH,
    summary_lines,
)
from engine.catalogue import BY_ID
from engine.log.events import (
    Event,
    Note,
    Phase,
    StackDump,
    StepDone,
    TrainerExited,
    TrainerStarted,
    Watched,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.log.write import LogWriter
from tests.support.judged import alert_event, identity_event
from tests.support.paths import ROOT
from tests.support.running import engine, engine_here

LOOP = """
import sys, torch
torch.manual_seed(0)
how = sys.argv[1]
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.randn(16)
net = torch.nn.Linear(16, 1)
if how != "none":
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for x in torch.utils.data.DataLoader(Rows(), batch_size=8):
    if how in ("never", "none"):
        break
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), optimizer.param_groups[0]["lr"])
if how == "raises":
    raise ValueError("planted")
"""


def watch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return engine("watch", "--runs", folder, "--name", "run", "--", *words)


def parts(lines: list[str]) -> dict[str, str]:
    """The text of each part by its name; fails where the summary is not one screen of plain lines."""
    assert len(lines) <= MOST_LINES and all(len(line) <= WIDTH for line in lines), lines
    found: dict[str, str] = {}
    for line in lines:
        name, text = line[:11].strip(), line[11:]
        if name:
            found[name] = text
        else:
            last = next(reversed(found))
            found[last] += f" {text}"
    assert list(found) == ["verdict", "why", "evidence", "next step"]
    return found


def run_loop(folder: Path, how: str) -> tuple[dict[str, str], str]:
    """Watch the loop; returns its summary, and what it printed."""
    script = folder / "train.py"
    script.write_text(LOOP)
    done = watch(folder, sys.executable, str(script), how)
    lines = summary_lines(RunFolder(folder / "run"))
    # What the terminal shows is a function of the folder.
    assert done.stderr.endswith("\n".join([*lines, ""]))
    return parts(lines), done.stdout


@dataclass(frozen=True)
class Finished:
    folder: Path
    summary: dict[str, str]
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    return Finished(folder, *run_loop(folder, "finishes"))


def test_a_plain_loop_is_read_as_a_run_with_every_step_that_it_prints(finished: Finished) -> None:
    printed = [tuple(map(float, line.split())) for line in finished.printed.splitlines()]
    run = RunFolder(finished.folder / "run")
    view = Follower(run).read_all()
    assert view.steps.values("step") == [1, 2, 3, 4, 5]
    columns = (view.steps.values(name) for name in ("loss", "lr"))
    assert list(zip(*columns, strict=True)) == printed and len(printed) == 5
    assert view.watched is not None and view.watched.optimizer == "AdamW"
    assert {"forward", "backward", "optimizer"} <= view.phases.keys()
    assert view.state(run.liveness()) == "completed"
    # What the log does not hold is absent, and never 0.
    assert view.steps.values("tokens") == [None] * 5 and view.total_steps is None
    shown = engine_here("tail", run.path, "-n", "40")
    assert f"command: {sys.executable} {finished.folder / 'train.py'} finishes" in shown.stdout


def test_a_run_that_finished_says_its_steps_losses_and_rate(finished: Finished) -> None:
    found = finished.summary
    assert "run: finished (exit code 0); after 5 steps" in found["verdict"]
    assert "backward" in found["why"] and "waiting for data" in found["why"]
    for words in ("5 steps", "(median)", "rows/s", "loss", " -> ", "learning rate 0.01"):
        assert words in found["evidence"]
    assert "AdamW of 17 parameters on cpu" in found["evidence"]
    assert "tokens" not in found["evidence"], "nothing counted tokens"
    assert found["next step"].endswith(f"apr-workbench {finished.folder / 'run'}")


def test_a_run_that_failed_names_its_exception_and_the_line_that_raised_it(tmp_path: Path) -> None:
    found, _ = run_loop(tmp_path, "raises")
    assert "run: failed with exit code 1; after 5 steps" in found["verdict"]
    line = LOOP.splitlines().index('    raise ValueError("planted")') + 1
    where = f"{tmp_path / 'train.py'}:{line} in <module>"
    assert found["why"].startswith(f"the script ended with ValueError at {where}: planted")
    assert found["next step"] == f"apr-workbench {tmp_path / 'run'}"


@pytest.mark.parametrize("torch", ["import torch\n", ""])
def test_an_exception_before_the_first_step_is_all_that_is_said(tmp_path: Path, torch: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'{torch}raise ValueError("planted")\n')
    watch(tmp_path, sys.executable, str(script))
    found = parts(summary_lines(RunFolder(tmp_path / "run")))
    assert found["why"].startswith(f"the script ended with ValueError at {script}:")
    assert found["why"].endswith(": planted")
    assert found["next step"] == f"apr-workbench {tmp_path / 'run'}"


def test_a_run_that_was_killed_is_out_of_memory_only_with_proof(tmp_path: Path) -> None:
    watch(tmp_path, "sh", "-c", "kill -9 $$")
    found = parts(summary_lines(RunFolder(tmp_path / "run")))
    assert "run: ended by SIGKILL; observed from outside only" in found["verdict"]
    assert "SIGKILL" in found["why"] and "out of memory" not in found["verdict"]
    assert found["next step"] == LET_IN


def test_a_script_that_never_stepped_is_told_from_one_without_a_probe(tmp_path: Path) -> None:
    for name in ("never", "none", "outside"):
        (tmp_path / name).mkdir()
    found, printed = run_loop(tmp_path / "never", "never")
    assert printed == ""
    assert "ended with exit code 0; observed from outside only" in found["verdict"]
    assert found["why"] == NO_STEP
    assert found["next step"] == LET_STEP
    found, _ = run_loop(tmp_path / "none", "none")
    assert found["why"] == NO_OPTIMIZER
    assert "optimizer step," not in found["next step"]
    # Exit code 70 is one of the engine's own; of a command it says nothing.
    watch(tmp_path / "outside", "sh", "-c", "exit 70")
    found = parts(summary_lines(RunFolder(tmp_path / "outside" / "run")))
    assert "run: failed with exit code 70; observed from outside only" in found["verdict"]
    assert "PYTHONPATH did not reach it" in found["why"] and "engine broke" not in found["why"]
    assert found["next step"] == START_AGAIN


@pytest.mark.soak  # a Trainer of transformers is watched in test_callbacks, and by `make frameworks`
def test_the_script_of_the_demo_is_seen_step_by_step_and_changed_in_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.py").write_text("print('hello')\n" * 1000)
    script = ROOT / "notebooks" / "watch_demo.py"
    words = ("--steps", "4", "--text", str(text), "--output", str(tmp_path / "out"))
    done = watch(tmp_path, sys.executable, str(script), *words)
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout
    found = parts(summary_lines(RunFolder(tmp_path / "run")))
    assert "run: finished (exit code 0); after 4 steps" in found["verdict"]
    assert "tokens/s" in found["evidence"] and "AdamW of 133.4k" in found["evidence"]
    # The mistake in it is named at the first step, with what to do in a script of transformers.
    shifted = (
        "suspicion label_shift at step 1: the labels are the tokens after the next: shifted twice"
    )
    assert shifted in found["evidence"]
    assert found["next step"].startswith("unless label_shift is meant: pass labels = input_ids")


WATCHED = Watched(
    pid=7,
    python="3.11",
    executable="python",
    torch="2.13",
    device="cuda:0",
    optimizer="SGD",
    parameters=9,
)


def ended(**fields: object) -> TrainerExited:
    about = {
        "trainer_pid": 7, "returncode": -15, "state": "TERMINATED", "signal": "SIGTERM", "cause": "",
        "certainty": "proved", "sentence": "said",
    }  # fmt: skip
    return TrainerExited(**(about | fields))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run", "", {"spec": {}, "command": {"arguments": ["sh"]}})


def write(run: RunFolder, steps: list[StepDone], *watch_events: Event) -> dict[str, str]:
    if steps:
        with LogWriter(run.events, writer="probe") as log:
            for event in (WATCHED, Phase(name="training"), *steps):
                log.write(event)
    with LogWriter(run.watch, writer="supervisor") as log:
        for event in (TrainerStarted(trainer_pid=7, supervisor_pid=8), *watch_events):
            log.write(event)
    return parts(summary_lines(run))


def test_a_stall_that_was_stopped_shows_where_it_stood(run: RunFolder) -> None:
    alert = alert_event(id="stalled", level="fail", text="no step after step 2 for 9m")
    dump = StackDump(
        path="stacks/007.txt", state="waiting for a lock", summary="waits",
        python_frame="train.py:12 in load", native_frame="",
    )  # fmt: skip
    found = write(run, [StepDone(step=1), StepDone(step=2)], dump, alert, ended())
    assert "run: stalled, then ended by SIGTERM; after 2 steps" in found["verdict"]
    assert "who sent it is not recorded" in found["why"] and alert.text in found["why"]
    assert "stack: train.py:12 in load (stacks/007.txt)" in found["evidence"]
    # What the log does not hold is unknown, never 0.
    assert "loss unknown; learning rate unknown" in found["evidence"]
    assert "peak memory: unknown" in found["evidence"] and "a step is" not in found["why"]
    assert found["next step"].startswith("engine diagnose")


def test_out_of_memory_with_proof_is_said_with_it(run: RunFolder) -> None:
    proof = "The kernel's OOM killer ended the process because the machine ran out of memory"
    exit_ = ended(returncode=-9, state="OOM_GLOBAL", signal="SIGKILL", sentence=proof)
    found = write(run, [StepDone(step=1, loss=2.0)], exit_)
    assert "out of memory: ended by SIGKILL; after 1 step," in found["verdict"]
    assert proof in found["why"]


def test_a_loss_that_is_not_finite_is_named_with_its_first_step(run: RunFolder) -> None:
    losses = [1.0, math.nan, 2.0, math.inf, math.nan]
    steps = [StepDone(step=n, loss=loss) for n, loss in enumerate(losses, 1)]
    found = write(run, steps, ended(returncode=0, state="COMPLETED", signal=None))
    assert "the loss is not finite from step 4 on" in found["why"]
    assert "loss 1.0000 -> NaN" in found["evidence"]
    assert found["next step"].startswith("engine diagnose")


def test_a_contradiction_is_the_verdict_with_its_numbers_and_what_to_do(run: RunFolder) -> None:
    steps = [StepDone(step=1, loss=1.0), StepDone(step=2, loss=0.5)]
    with LogWriter(run.events, writer="probe") as log:
        about = {"id": "weights_move", "numbers": {}, "framework": "transformers"}
        seen = [("pass", 1, "held"), ("fail", 2, "net.weight: SGD made 3 of 1")]
        identities = [
            identity_event(level=degree, step=step, text=text, **about)  # type: ignore[arg-type]
            for degree, step, text in seen
        ]
        for event in (WATCHED, Phase(name="training"), *steps, *identities):
            log.write(event)
    found = write(run, [], ended(returncode=0, state="COMPLETED", signal=None))
    assert found["verdict"].startswith("WRONG since step 2: weights do not move")
    assert found["why"].startswith(
        "contradiction weights_move at step 2: net.weight: SGD made 3 of 1"
    )
    # What passed is in `engine checks` alone.
    assert "pass" not in found["evidence"]
    remedy = BY_ID["identity"]["weights_move"].transformers
    assert remedy and found["next step"].startswith(f"{remedy}; then apr-workbench")


def test_a_run_that_waits_for_its_data_is_told_to_load_with_more_workers(run: RunFolder) -> None:
    phases = {"data": 0.5, "forward": 0.25, "backward": 0.125, "optimizer": 0.125, "rest": 0.0}
    steps = [StepDone(step=n, step_s=1.0, data_s=0.5, phases=phases, rows=4) for n in (1, 2, 3)]
    killed = ended(returncode=-9, state="KILLED", signal="SIGKILL")
    found = write(run, steps, killed)
    assert "run: ended by SIGKILL; after 3 steps" in found["verdict"]
    assert "a step is waiting for data 50 %" in found["why"]
    assert found["next step"] == f"engine diagnose {run.path}"
    found = write(
        create_run(
            run.path.parent / "finished", "", {"spec": {}, "command": {"arguments": ["sh"]}}
        ),
        steps,
        ended(returncode=0, state="COMPLETED", signal=None),
    )
    assert found["why"].startswith("a step is waiting for data 50 %, forward 25 %")
    assert " --set loader.workers=4 tests more loader workers" in found["next step"]


def test_what_is_wrong_has_its_fix_as_the_next_step_beside_an_alert(run: RunFolder) -> None:
    steps = [StepDone(step=n, loss=1.0) for n in (1, 2, 3)]
    advice = "set a learning rate 10 times lower in the script"
    alert = alert_event(id="loss_spikes", level="suspicion", text="a spike", no_flip=advice)
    finished = ended(returncode=0, state="COMPLETED", signal=None)
    found = write(run, steps, finished, alert)
    assert found["next step"] == f"{advice}; evidence: engine diagnose {run.path}"
    other = create_run(
        run.path.parent / "other", "", {"spec": {}, "command": {"arguments": ["sh"]}}
    )
    with LogWriter(other.events, writer="probe") as log:
        leak = identity_event("held_out", "suspicion", 2, "96 of 96 samples")
        for event in (WATCHED, Phase(name="training"), *steps, leak):
            log.write(event)
    found = write(other, [], finished, alert)
    remedy = BY_ID["identity"]["held_out"].remedy
    assert found["next step"].startswith(f"unless held_out is meant: {remedy}")


def test_what_is_wrong_with_a_later_training_is_the_verdict(run: RunFolder) -> None:
    finished = ended(returncode=0, state="COMPLETED", signal=None)
    for name, level in (("two", "suspicion"), ("three", "pass")):
        command = {"arguments": ["sh"], "part_of": run.name}
        later = create_run(run.path.parent / name, "", {"spec": {}, "command": command})
        with LogWriter(later.events, writer="probe") as log:
            log.write(WATCHED)
            log.write(Phase(name="training"))
        judged = identity_event("label_shift", level, 1, "shifted twice")
        write(later, [StepDone(step=1, loss=1.0)], finished, judged)
    found = write(run, [StepDone(step=1, loss=1.0)], finished)
    assert found["verdict"].startswith("two: SUSPECT since step 1: labels are not the tokens")
    assert "run: finished" in found["verdict"]
    assert found["evidence"].startswith("suspicion label_shift")
    assert found["next step"].startswith("unless label_shift is meant")
    assert str(run.path.parent / "two") in found["next step"]


def test_rows_and_tokens_a_second_are_those_of_the_steps(run: RunFolder) -> None:
    steps = [StepDone(step=n, step_s=1.0, rows=4, tokens=400) for n in (1, 2, 3)]
    found = write(run, steps, ended(returncode=0, state="COMPLETED", signal=None))
    assert "4 rows/s, 400 tokens/s" in found["evidence"]


def test_much_to_say_stays_on_one_screen_with_the_next_step(run: RunFolder) -> None:
    alerts = [
        alert_event(id=f"rule_{n}", level="suspicion", text=f"{n} " + "many words " * 40)
        for n in range(9)
    ]
    gone = Note(level="warning", text="the probe removed itself: ValueError")
    found = write(run, [StepDone(step=1)], gone, *alerts)
    assert "its end was not recorded" in found["verdict"]
    assert "the probe removed itself" in found["why"] and "rule_0" in found["why"]
    assert "1 step" in found["evidence"]
    assert found["next step"] == f"apr-workbench {run.path}"


KEEPS = """
import os, sys, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_what_is_wrong_is_printed_once_while_the_script_runs(tmp_path: Path, quiet: bool) -> None:
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(KEEPS)
    options = ["--quiet"] * quiet
    command = [sys.executable, "-m", "engine", "watch", "--runs", str(tmp_path / "runs"), *options]
    words = [*command, "--", sys.executable, str(script), str(told)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = ""
        if not quiet:
            first = next(line for line in process.stderr if "WRONG" in line)
            assert process.poll() is None
        told.touch()
        rest = process.stderr.read()
    if quiet:
        assert "WRONG" not in rest and "verdict" not in rest
        return
    line = "WRONG since step 3: gradients are not zeroed between steps"
    assert first == f"engine watch: ✗ {line}\n" and rest.startswith("engine watch:   the gradients")
    assert rest.count("engine watch: ✗") == 0 and line in rest
