"""Stopping and resuming a run, on every screen that has a run at hand.

Both ask first. The engine does it, in a thread of its own, and what it answers is shown in its words;
when it refuses because the environment changes a setting of the run, it is asked again with the flag
that it named, if that is wanted.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import on
from textual.binding import Binding
from textual.message import Message

from engine.errors import EngineError
from engine.log.folder import RunFolder
from engine.log.text import has_ended
from workbench.feed import READING, UNREADABLE
from workbench.launch import command_text, resume_arguments, resume_run, stop_run
from workbench.tui.messages import CommandEnded
from workbench.tui.screens.choose import ChooseScreen
from workbench.tui.screens.polling import PollingScreen

STOP = Binding("x", "stop", "stop", tooltip="ask the run to stop, after a question")
RESUME = Binding(
    "R", "resume", "resume", tooltip="continue a run that ended early, after a question"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The run that the keys act on, as it was last seen."""

    run: RunFolder
    state: str
    alive: bool
    """Whether a process of it exists."""
    step: int

    @property
    def can_stop(self) -> bool:
        return self.alive

    @property
    def can_resume(self) -> bool:
        ended = self.state != READING and has_ended(self.state)
        return ended and not self.alive and self.state not in ("completed", UNREADABLE)


def changes_to_allow(problem: EngineError) -> list[str]:
    """The settings that a refused resume would be allowed to change, by the hint of the refusal."""
    return re.findall(r"--allow-change (\S+)", problem.hint or "")


class ActingScreen(PollingScreen):
    """Has the actions `stop` and `resume`; its BINDINGS name STOP and RESUME."""

    class Refused(Message):
        """The engine refused a command; `answer` says whether it has dealt with that."""

        def __init__(self, problem: EngineError, answer: Callable[[EngineError], bool]) -> None:
            super().__init__()
            self.problem, self.answer = problem, answer

    ACTING = frozenset({"stop", "resume"})

    @abstractmethod
    def target(self) -> Target | None:
        """The run at hand; None where there is none."""

    def may_act(self, action: str) -> bool:
        """Whether `stop` or `resume` does something now."""
        target = self.target()
        if target is None:
            return False
        return target.can_stop if action == "stop" else target.can_resume

    def action_stop(self) -> None:
        target = self.target()
        if target is None:
            return
        run = target.run
        question = (
            f"{run.name} finishes its step, saves a checkpoint and stops; R resumes it.\n\n"
            f"This is `engine stop {run.path}`."
        )

        def answered(answer: str | None) -> None:
            if answer == "y":
                self.command("stop", lambda: stop_run(run) or "the run was asked to stop")

        answers = [("y", "stop it"), ("n", "let it go on")]
        self.app.push_screen(ChooseScreen("stop this run", question, answers), answered)

    def action_resume(self) -> None:
        target = self.target()
        if target is None:
            return
        run = target.run
        question = (
            f"{run.name} ({target.state} at step {target.step}) goes on from its newest checkpoint, "
            "in the background.\n\n"
            f"This is `{command_text([*resume_arguments(run), '--detach'])}`."
        )

        def answered(answer: str | None) -> None:
            if answer in ("y", "o"):
                self._resume(run, allow_fallback=answer == "o")

        answers = [
            ("y", "resume it"),
            ("o", "resume it, from an older checkpoint if the newest is damaged"),
            ("n", "leave it"),
        ]
        self.app.push_screen(ChooseScreen("resume this run", question, answers), answered)

    def _resume(
        self, run: RunFolder, *, allow_fallback: bool, allow_change: Sequence[str] = ()
    ) -> None:
        def call() -> str:
            resumed = resume_run(run, allow_fallback=allow_fallback, allow_change=allow_change)
            return f"resumed {resumed.name}"

        def refused(problem: EngineError) -> bool:
            keys = changes_to_allow(problem)
            if not keys or allow_change:
                return False

            def answered(answer: str | None) -> None:
                if answer == "y":
                    self._resume(run, allow_fallback=allow_fallback, allow_change=keys)

            answers = [("y", f"go on with the changed {', '.join(keys)}"), ("n", "leave it")]
            question = f"{problem}\n\nThe change would be written into effective.json."
            self.app.push_screen(ChooseScreen("settings have changed", question, answers), answered)
            return True

        self.command("resume", call, refused)

    def command(
        self,
        name: str,
        call: Callable[[], str],
        refused: Callable[[EngineError], bool] = lambda problem: False,
    ) -> None:
        """Have the engine do something; `refused` may answer a refusal itself."""

        def work() -> None:
            try:
                self.post_message(CommandEnded(call(), failed=False))
            except EngineError as problem:
                self.post_message(self.Refused(problem, refused))

        self.notify(f"{name}: asking the engine", markup=False)
        # A daemon, not a worker: quitting must not wait for the command, and the command does not
        # need us.
        threading.Thread(target=work, name=f"engine-{name}", daemon=True).start()

    @on(CommandEnded)
    def say(self, message: CommandEnded) -> None:
        """What the engine answered."""
        self.notify(message.text, markup=False)
        self.tick()

    @on(Refused)
    def say_why(self, message: Refused) -> None:
        """Why the engine did not do it, unless that is a question."""
        if not message.answer(message.problem):
            self.notify(
                str(message.problem),
                title="the engine refused",
                severity="error",
                timeout=15,
                markup=False,
            )
        self.tick()
