"""What every surface says of a run of somebody's own script: what is known of it, and one plain line where something
does not apply."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from engine.attach.summary import summary_lines
from engine.catalogue import IDENTITIES
from engine.errors import BadInput
from engine.log.events import (
    FACT,
    FAIL,
    PASS,
    SUSPICION,
    UNKNOWN,
    DecisionMade,
    Event,
    Judged,
    Phase,
    StepDone,
    TrainerExited,
    TrainerStarted,
    Watched,
)
from engine.log.folder import RunFolder, create_run
from engine.log.observed import observation, observations
from engine.log.text import OTHERS_KERNELS, OTHERS_RESULT, UNSEEN_COMMAND
from engine.log.write import LogWriter
from engine.watch.runs_feed import RunsFeed
from tests.support.judged import identity_event
from tests.support.running import engine_here
from tests.support.screens import on_screen, press, shows, text_of, texts_of, words_of
from workbench.feed import RunFeed
from workbench.notebook import Live
from workbench.panes import page_panes
from workbench.tui.screens.flip import FlipScreen

LIMIT_S = 120.0
WATCHED = Watched(
    pid=7, python="3.11", executable="python", torch="2.13", device="cpu", optimizer="SGD", parameters=9
)  # fmt: skip


def write(path: Path, kind: str, *events: Event) -> None:
    with LogWriter(path, writer=kind) as log:
        for event in events:
            log.write(event)


def make(
    path: Path,
    *seen: Judged,
    steps: int = 3,
    code: int = 0,
    folder: Path = Path("/home/me"),
    waits: float = 0.02,
    program: str = "/usr/bin/python",
) -> RunFolder:
    """A run whose tokens, rates of tokens and total steps are not known; each step of 0.1 s `waits` for data."""
    about = {
        "arguments": [program, "train.py", f"--lr={path.name}"],
        "folder": str(folder),
        "commit": "abc123def456+",
    }
    run = create_run(path, "", {"spec": {}, "command": about})
    numbers = range(1, steps + 1)
    done = [StepDone(step=n, loss=3.0 / n, step_s=0.1, data_s=waits) for n in numbers]
    if done:
        write(run.events, "probe", WATCHED, Phase(name="training"), *done, *seen)
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
    assert f"{len(IDENTITIES)} unknown" in checks
    assert OTHERS_KERNELS in kernels


def test_a_script_that_is_not_ours_has_no_key_for_a_resume(tmp_path: Path) -> None:
    run = make(tmp_path / "run", code=1)

    async def script(pilot: Pilot[None]) -> None:
        last = text_of(pilot).rstrip().splitlines()[-1]
        assert "flip" in last and "resume" not in last and "why" in last
        await press(pilot, "R")
        assert "COMMAND" not in words_of(pilot) and len(pilot.app.screen_stack) == 2

    on_screen([run.path], (140, 40), script)


def test_the_key_of_a_flip_proposes_what_the_script_may_be_tried_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "run", folder=tmp_path, waits=0.06, program=sys.executable)
    changed = DecisionMade(knob="cudnn.benchmark", choice="on", reason="the watch changed it")
    write(tmp_path / "run" / "events.jsonl", "probe", changed)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "4")
        assert "changed cudnn.benchmark=on: the watch changed it" in words_of(pilot)
        await press(pilot, "F")
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        first, *_ = screen.query_one(OptionList).options
        assert "loader.workers=4   can be tried with any script" in str(first.prompt)
        assert screen.query_one("#assignment", Input).value == "loader.workers=4"
        assert await shows(pilot, "device: the CPU"), words_of(pilot)
        words = words_of(pilot)
        assert "in a copy of" in words and "the script's own" in words
        for assignment, said in (("X=1", "flip: X: unset -> 1"), ("--lr=2", "--lr=run -> --lr=2")):
            screen.query_one("#assignment", Input).value = assignment
            assert await shows(pilot, said), words_of(pilot)
        screen.query_one("#assignment", Input).value = "loader.workers=many"
        assert await shows(pilot, "expected a number from 0 to"), words_of(pilot)

    on_screen([run.path], (160, 50), script)


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
        await press(pilot, "R")
        said = [note.message for note in pilot.app._notifications][-1]
        assert said.startswith("not resumed: ") and "engine watch -- " in said
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
    assert "not finite alerts sessions A two - 0 1 B one - 0 1" in words


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
    assert "train.py --lr=run" in page.read_text()


def test_a_flip_of_it_takes_settings_of_a_script_and_none_of_a_spec(tmp_path: Path) -> None:
    run = str(make(tmp_path / "run").path)
    done = engine_here("flip", run, "--set", "train.lr=1")
    assert done.returncode == 64 and "one of loader.workers" in done.stderr
    done = engine_here("flip", run)
    assert done.returncode == 64 and f"engine flip {run} --propose" in done.stderr
    proposed = engine_here("flip", run, "--propose", "--json")
    assert "loader.workers=4" in [one["assignment"] for one in json.loads(proposed.stdout)]


@pytest.mark.parametrize(
    "words",
    [
        ("distill", "--resume", "RUN"),
        ("gate", "RUN"),
    ],
)
def test_what_needs_settings_refuses_it_with_the_command_to_change(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = str(make(tmp_path / "run").path)
    done = engine_here(*(run if word == "RUN" else word for word in words))
    assert done.returncode == 65
    assert "found a watched or imported run, which has no spec" in done.stderr
    assert "engine watch -- /usr/bin/python train.py --lr=run" in done.stderr


def test_a_finding_begins_with_what_is_suspected_of_a_script(tmp_path: Path) -> None:
    seen = [
        identity_event(id="weights_move", level=PASS, step=1, text="each has changed"),
        identity_event(id="lost_gradients", level=SUSPICION, step=2, text="4 of 9 got none"),
        identity_event(id="weights_move", level=FAIL, step=2, text="w did not change"),
    ]
    run = make(tmp_path / "runs" / "run", *seen)
    found = observations(run)
    names = ["identity weights_move", "identity lost_gradients"]
    assert [one.name for one in found] == names
    assert found[0].text == "w did not change"
    with pytest.raises(BadInput, match="identity lost_gradients"):
        observation(run, "identity no_gradient")


def test_a_notebook_shows_the_command_in_the_place_of_decisions(tmp_path: Path) -> None:
    run = make(tmp_path / "run", code=1)
    panel = Live(run.path)
    panel.wait(LIMIT_S)
    _, lines = panel.still()
    assert panel._buttons["resume"].disabled
    panel.close()
    assert OTHERS_RESULT in lines
    shown = page_panes()["decisions"].lines(RunFeed(run).read_all(), False, 100)
    assert shown[0].endswith("train.py --lr=run")


SHIFT = identity_event(
    id="label_shift", level=SUSPICION, step=1, text="the labels are shifted twice"
)
HELD = identity_event(
    id="weights_move", level=PASS, step=1, text="9 tensors have changed", numbers={"of": 9}
)
KEPT = identity_event(
    id="kept_gradients", level=FAIL, step=2, text="nothing zeroed them",
    framework="transformers",
)  # fmt: skip


def test_every_surface_lists_all_identities_with_what_is_wrong_first_and_what_to_do(
    tmp_path: Path,
) -> None:
    fact = identity_event(id="label_coverage", level=FACT, step=1, text="9 of 9 places")
    # A later step at which it holds does not undo a contradiction.
    later = identity_event(
        id="kept_gradients", level=PASS, step=4, text="nothing of the step before"
    )
    other = identity_event(id="of_another_version", level="marvel", step=1, text="who knows")
    run = make(tmp_path / "run", HELD, fact, SHIFT, KEPT, later, other)
    done = engine_here("checks", run.path)
    assert done.returncode == 1 and "settings" not in done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith("1 contradiction, 1 suspicion, ") and "1 fact, 1 pass" in head
    rest = " ".join(lines[next(at for at, line in enumerate(lines) if "not judged" in line) :])
    heads = [line for line in lines if line[0] in "x!?-+" and "not judged" not in line]
    names = {line.split()[2].rstrip(":") for line in heads}
    names |= set("".join(rest.partition(": ")[2].split()).split(","))
    assert names == {row.id for row in IDENTITIES} | {"of_another_version"}
    assert heads[0] == "x CONTRADICTION kept_gradients: nothing zeroed them (step 2)"
    assert (
        lines[1].startswith("  means: Each step follows the sum")
        and "leave zero_grad() to" in lines[2]
    )
    signs = [line[0] for line in heads]
    assert signs == sorted(signs, key="x!?-+".index)
    assert heads[-1] == "+ pass weights_move: 9 tensors have changed (step 1)"

    page, tail = tmp_path / "run.html", engine_here("tail", run.path).stdout
    assert engine_here("report", run.path, "--out", page).returncode == 0
    *_, pane = texts_of(run.path, (160, 120), "7", "z")
    for shown in (tail, page.read_text(), pane):
        assert "x CONTRADICTION kept_gradients: nothing zeroed them (step 2)" in shown
        assert "+ pass weights_move: 9 tensors have changed" in shown
    assert "7 identities" in pane and "7 checks" not in pane
    shown = page_panes()["checks"].lines(RunFeed(run).read_all(), False, 100)
    assert shown[1].startswith("x CONTRADICTION kept_gradients")


def test_the_exit_code_and_json_of_identities_say_what_could_be_judged(tmp_path: Path) -> None:
    fact = identity_event(id="label_coverage", level=FACT, step=1, text="9 of 9 places")
    unknown = identity_event(id="weights_move", level=UNKNOWN, step=1, text="sharded")
    for name, seen, code, level in (
        ("holds", (HELD, SHIFT), 0, "pass"),
        ("wrong", (HELD, KEPT), 1, "fail"),
        ("unseen", (fact, unknown), 2, "unknown"),
    ):
        done = engine_here("checks", make(tmp_path / name, *seen).path, "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["level"]) == (code, level)
        rows = {row["id"]: row for row in found["identities"]}
        assert list(rows) != [] and rows.keys() == {row.id for row in IDENTITIES}
        assert rows["lost_gradients"]["level"] == UNKNOWN and rows["lost_gradients"]["step"] is None
        keys = ("id", "level", "text", "numbers", "step", "means", "remedy")
        assert tuple(found["identities"][0]) == keys
    assert rows["weights_move"]["text"] == "sharded (step 1)"


def test_the_list_and_the_summary_have_the_same_verdict(
    tmp_path: Path,
) -> None:
    runs = {
        "healthy": make(tmp_path / "healthy", HELD),
        "doubted": make(tmp_path / "doubted", HELD, SHIFT),
        "wrong": make(tmp_path / "wrong", SHIFT, KEPT),
        "failed": make(tmp_path / "failed", SHIFT, code=1),
    }
    suspicion = "SUSPECT since step 1: labels are not the tokens that follow"
    wrong = "WRONG since step 2: gradients are not zeroed between steps (and 1 more)"
    rows = {row.name: row for row in RunsFeed([tmp_path], budget_s=LIMIT_S).poll().rows}
    lines = {name: row.verdict for name, row in rows.items()}
    assert lines.pop("healthy").startswith("HEALTHY: ")
    assert lines.pop("failed").startswith("ENDED at step 3: ")
    assert lines == {"doubted": suspicion, "wrong": wrong}
    for name, line in lines.items():
        assert line in " ".join(" ".join(summary_lines(runs[name])).split())
    (screen,) = texts_of(tmp_path, (200, 40))
    assert suspicion in screen and "gradients are not zeroed" in screen


def test_a_command_without_a_probe_has_no_identities_and_says_so(tmp_path: Path) -> None:
    done = engine_here("checks", make(tmp_path / "run", steps=0).path)
    assert (done.returncode, done.stdout) == (2, f"{UNSEEN_COMMAND}\n")
