"""The actions `stop` and `resume` of every screen with a current run.

Both ask for confirmation. The engine runs the command in a thread, and its message is shown.
"""

from __future__ import annotations

from textual.binding import Binding

from workbench.engine_commands import command_text, resume_arguments, resume_run, stop_run
from workbench.feed import Target, command_of
from workbench.tui.screens.form import ChooseScreen
from workbench.tui.screens.polling import PollingScreen

STOP = Binding("x", "stop", "stop", tooltip="stop the run, after confirmation")
RESUME = Binding(
    "R", "resume", "resume", tooltip="continue a run that ended early, after confirmation"
)


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
        if answer == "y":
            screen.command("resume", lambda: f"resumed {resume_run(run).name}")

    answers = [("y", "resume it"), ("n", "leave it")]
    screen.app.push_screen(ChooseScreen("resume this run", question, answers), answered)
