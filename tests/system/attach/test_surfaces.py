"""What every surface says of a run of somebody's own script: what is known of it, and one plain line where something
does not apply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.log.events import Event, Phase, StepDone, TrainerExited, TrainerStarted, Watched
from engine.log.folder import RunFolder, create_run
from engine.log.text import OTHERS_CHECKS, OTHERS_KERNELS, OTHERS_RESULT
from engine.log.write import LogWriter
from tests.support.running import engine_here
from tests.support.screens import on_screen, press, text_of, texts_of, words_of
from workbench.feed import RunFeed
from workbench.notebook import Live
from workbench.panes import page_panes

LIMIT_S = 120.0
WATCHED = Watched(
    pid=7, python="3.11", executable="python", torch="2.13", device="cpu", optimizer="SGD", parameters=9
)  # fmt: skip


def write(path: Path, kind: str, *events: Event) -> None:
    with LogWriter(path, writer=kind) as log:
        for event in events:
            log.write(event)


def make(path: Path, *, steps: int = 3, code: int = 0) -> RunFolder:
    """A run whose tokens, rates of tokens and total steps are not known."""
    about = {
        "arguments": ["/usr/bin/python", "train.py", f"--lr={path.name}"],
        "folder": "/home/me",
        "commit": "abc123def456+",
    }
    run = create_run(path, "", {"spec": {}, "command": about})
    numbers = range(1, steps + 1)
    done = [StepDone(step=n, loss=3.0 / n, step_s=0.1, data_s=0.02) for n in numbers]
    if done:
        write(run.events, "probe", WATCHED, Phase(name="training"), *done)
    exit_ = TrainerExited(
        trainer_pid=7, returncode=code, state="FAILED" if code else "COMPLETED", signal=None,
        cause="", certainty="proved", sentence="It ended.",
    )  # fmt: skip
    write(run.watch, "supervisor", TrainerStarted(trainer_pid=7, supervisor_pid=8), exit_)
    return run


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_the_screen_names_the_command_and_the_state_of_its_files(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    (words,) = texts_of(make(tmp_path / "run").path, size)
    assert "python train.py --lr=run abc123def456+" in words
    assert "COMPLETED" in words and "loss 1.0000" in words
    assert "nats" not in words and "decisions" not in words


def test_panes_that_do_not_apply_say_why_in_one_line(tmp_path: Path) -> None:
    seen = texts_of(make(tmp_path / "run").path, (100, 30), *"467 8".replace(" ", ""))
    command, result, checks, kernels = (text for text in seen[1:])
    for line in (
        "command /usr/bin/python train.py",
        "folder /home/me",
        "SGD of 9 parameters on cpu",
    ):
        assert line in command
    assert "abc123def456+ (files differ)" in command
    assert OTHERS_RESULT in result
    assert OTHERS_CHECKS in checks
    assert OTHERS_KERNELS in kernels


def test_a_script_that_is_not_ours_has_no_key_for_a_flip_or_a_resume(tmp_path: Path) -> None:
    run = make(tmp_path / "run", code=1)

    async def script(pilot: Pilot[None]) -> None:
        last = text_of(pilot).rstrip().splitlines()[-1]
        assert "flip" not in last and "resume" not in last and "why" in last
        await press(pilot, "F")
        await press(pilot, "R")
        assert "COMMAND" not in words_of(pilot) and len(pilot.app.screen_stack) == 2

    on_screen([run.path], (140, 40), script)


def test_the_list_says_the_steps_and_a_resume_from_it_says_why_not(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "one", code=1)
    make(tmp_path / "runs" / "two", steps=0, code=1)

    async def script(pilot: Pilot[None]) -> None:
        rows = {
            line.split()[0]: line.split()
            for line in text_of(pilot).splitlines()
            if "failed" in line
        }
        assert rows["one"][2] == "3" and rows["two"][2] == "-"
        for key, what in (("R", "resumed"), ("N", "started again")):
            await press(pilot, key)
            said = [note.message for note in pilot.app._notifications][-1]
            assert said.startswith(f"not {what}: ") and "engine watch -- " in said
        assert len(pilot.app.screen_stack) == 2

    on_screen([tmp_path / "runs"], (120, 30), script)


def test_two_of_them_are_compared_by_their_commands_and_unknown_numbers_are_absent(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        make(tmp_path / "runs" / name)
    seen = texts_of(tmp_path / "runs", (140, 40), "space", "down", "space", "c")
    words = seen[-1]
    assert "--lr=one" in words and "--lr=two" in words and "no settings on record" not in words
    assert "tokens - -" in words and "not finite - -" in words


def test_commands_say_what_is_known_or_why_not(tmp_path: Path) -> None:
    run = str(make(tmp_path / "run").path)
    tail = engine_here("tail", run)
    assert tail.returncode == 0 and "decisions" not in tail.stdout
    assert "command\n  command    /usr/bin/python train.py --lr=run" in tail.stdout
    shown = json.loads(engine_here("tail", "--json", run).stdout)
    assert shown["tokens_per_second"] is None and shown["last"]["tokens"] is None
    said = engine_here("diagnose", "--all", run).stdout
    assert "the settings are the script's own" in said and "cannot be read" not in said
    page = tmp_path / "run.html"
    assert engine_here("report", run, "--out", str(page)).returncode == 0
    assert OTHERS_CHECKS in page.read_text() and "train.py --lr=run" in page.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("flip", "RUN", "--set", "train.lr=1"),
        ("distill", "--resume", "RUN"),
        ("gate", "RUN"),
        ("checks", "RUN"),
    ],
)
def test_what_needs_settings_refuses_it_with_the_command_to_change(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = str(make(tmp_path / "run").path)
    done = engine_here(*(run if word == "RUN" else word for word in words))
    assert done.returncode == 65
    assert "found a command that is watched, whose settings are its own" in done.stderr
    assert "engine watch -- /usr/bin/python train.py --lr=run" in done.stderr


def test_a_notebook_shows_the_command_in_the_place_of_decisions(tmp_path: Path) -> None:
    run = make(tmp_path / "run", code=1)
    panel = Live(run.path)
    panel.wait(LIMIT_S)
    _, lines = panel.still()
    assert panel._buttons["resume"].disabled
    panel.close()
    assert OTHERS_RESULT in lines
    shown = page_panes()["decisions"](RunFeed(run).read_all())
    assert shown[0].endswith("train.py --lr=run")
