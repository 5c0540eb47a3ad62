"""The actions `stop` and `resume` of every screen with a current run.

Both ask for confirmation. The engine runs the command in a thread, and its message is shown; when it
refuses because the environment changes a setting of the run, the user may repeat the command with the
flag that the engine named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual.binding import Binding

from engine.log.folder import RunFolder
from workbench.engine_commands import command_text, resume_arguments, resume_run, stop_run
from workbench.feed import Target, command_of
from workbench.tui.screens.form import ChooseScreen
from workbench.tui.screens.polling import PollingScreen, Problem

STOP = Binding("x", "stop", "stop", tooltip="stop the run, after confirmation")
RESUME = Binding(
    "R", "resume", "resume", tooltip="continue a run that ended early, after confirmation"
)


def changes_to_allow(problem: Problem) -> list[str]:
    """Return the settings whose change a refused resume asks the user to allow, from the hint of the refusal."""
    return re.findall(r"--allow-change (\S+)", getattr(problem, "hint", None) or "")


def ask_to_stop(screen: PollingScreen, target: Target) -> None:
    """Stop a run, after confirmation."""
    run = target.run
    how = "finishes its step, saves a checkpoint and stops; R resumes it"
    if command_of(run) is not None:
        how = "is a watched script: it gets SIGTERM, and may save or not"
    question = f"{run.name} {how}.\n\nThis is `engine stop {run.path}`."

    def answered(answer: str | None) -> None:
        if answer == "y":
            screen.command("stop", lambda: stop_run(run) or "the run was asked to stop")

    answers = [("y", "stop it"), ("n", "keep it running")]
    screen.app.push_screen(ChooseScreen("stop this run", question, answers), answered)


def ask_to_resume(screen: PollingScreen, target: Target) -> None:
    """Continue a run that ended early, after confirmation."""
    run = target.run
    if (command := command_of(run)) is not None:
        kind = "an imported log, which has no command"
        if command.arguments:
            kind = f"a watched script; to start it again: engine watch -- {command.line}"
        screen.notify(f"not resumed: {run.name} is {kind}", markup=False)
        return
    question = (
        f"{run.name} ({target.state} at step {target.step}) continues from its newest checkpoint, "
        "in the background.\n\n"
        f"This is `{command_text([*resume_arguments(run), '--detach'])}`."
    )

    def answered(answer: str | None) -> None:
        if answer in ("y", "o"):
            _resume(screen, run, allow_fallback=answer == "o")

    answers = [
        ("y", "resume it"),
        ("o", "resume it, from an older checkpoint if the newest is damaged"),
        ("n", "leave it"),
    ]
    screen.app.push_screen(ChooseScreen("resume this run", question, answers), answered)


def _resume(
    screen: PollingScreen,
    run: RunFolder,
    *,
    allow_fallback: bool,
    allow_change: Sequence[str] = (),
) -> None:
    def call() -> str:
        resumed = resume_run(run, allow_fallback=allow_fallback, allow_change=allow_change)
        return f"resumed {resumed.name}"

    def refused(problem: Problem) -> bool:
        keys = changes_to_allow(problem)
        if not keys or allow_change:
            return False

        def answered(answer: str | None) -> None:
            if answer == "y":
                _resume(screen, run, allow_fallback=allow_fallback, allow_change=keys)

        answers = [("y", f"continue with the changed {', '.join(keys)}"), ("n", "leave it")]
        question = f"{problem}\n\nThe change would be written into effective.json."
        screen.app.push_screen(ChooseScreen("settings have changed", question, answers), answered)
        return True

    screen.command("resume", call, refused)
