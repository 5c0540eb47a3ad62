"""Messages to the receivers of a run: it ended, its verdict got worse, it stalls. Each is sent once a run; the end,
once a session.

    observer.tick ------> Notices.tick: the verdict of the view, every LOOK_S; the outcomes of earlier messages
    the end recorded ---> Notices.close: the last message, and LIMIT_S at most for what is still being sent

A child process sends them (`engine.notify.send`). A record `notified` in the watch log says who got a message and
who did not, so a resumed run does not repeat one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.errors import RunLogError
from engine.log.events import ALERT, Event, Note, Notified
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.read import LogReader
from engine.log.view import RunView
from engine.notify.message import ENDED, STALLED, WORSE, Message
from engine.notify.receivers import Receiver
from engine.notify.send import Delivery
from engine.redact import Redactor
from engine.watch.verdict_line import SUSPECT, WRONG, RunVerdict, verdict_of
from engine.watch.watcher import LOOK_S, STALLS

READ = 0.99
"""Share of the logs that must have been read: what a view says in the middle of them may be over."""


class Notices:
    def __init__(
        self,
        run: RunFolder,
        receivers: Sequence[Receiver],
        write: Callable[[Event], None],
        terminal: int | None = None,
    ) -> None:
        self._run, self._receivers, self._write = run, receivers, write
        self._terminal = terminal
        self._open: list[tuple[str, Delivery]] = []
        self._next_s = 0.0
        self._sent = _sent_before(run)
        """Keys of the messages of this run: `stalled`, or `worse WRONG`."""

    def tick(self, follower: Follower) -> None:
        self._collect()
        now_s = time.monotonic()
        if now_s < self._next_s or follower.share_read < READ:
            return
        self._next_s = now_s + LOOK_S
        found = verdict_of(follower.view, "running", self._run.path.absolute())
        if any(stall in follower.view.alerts for stall in STALLS):
            self._tell(STALLED, STALLED, follower.view, found)
        # A stall is a verdict too, and one message is enough.
        if found.level in (SUSPECT, WRONG) and found.id not in {f"{ALERT} {s}" for s in STALLS}:
            self._tell(WORSE, f"{WORSE} {found.level}", follower.view, found)

    def close(self, follower: Follower, *, ended: bool = True) -> None:
        """Send that the run ended, as its log says now, and wait for what is being sent."""
        if ended:
            with suppress(RunLogError):
                follower.read_all()
            found = verdict_of(follower.view, follower.state, self._run.path.absolute())
            self._tell(ENDED, ENDED, follower.view, found)
        for key, delivery in self._open:
            delivery.wait()
            self._record(key, delivery)

    def _tell(self, event: str, key: str, view: RunView, found: RunVerdict) -> None:
        if key in self._sent:
            return
        self._sent.add(key)
        path = self._run.path.absolute()
        clean = Redactor()
        message = Message(
            event=event,
            run=self._run.name,
            host=socket.gethostname(),
            step=view.last_step if len(view.steps) else None,
            level=found.level,
            verdict=clean.text(found.line).text,
            do=clean.text(found.action).text,
            folder=str(path),
            look=f"apr-workbench {path}",
        )
        try:
            delivery = Delivery(message, self._receivers, terminal=self._terminal)
        except OSError as error:
            self._write(Note(level="warning", text=f"no message was sent: {error.strerror}"))
            return
        self._open.append((key, delivery))

    def _collect(self) -> None:
        for key, delivery in self._open:
            if delivery.poll() is not None:
                self._record(key, delivery)
        self._open = [one for one in self._open if one[1].outcomes is None]

    def _record(self, key: str, delivery: Delivery) -> None:
        outcomes = delivery.outcomes or []
        self._write(
            Notified(
                message=key,
                sent=[one.receiver.name for one in outcomes if one.sent],
                failed={
                    one.receiver.name: f"{one.receiver.where}: {one.text}"
                    for one in outcomes
                    if not one.sent
                },
            )
        )


def _sent_before(run: RunFolder) -> set[str]:
    """Return the messages of earlier sessions, other than those of their ends."""
    reader, found = LogReader(run.watch), set[str]()
    with suppress(RunLogError):
        while events := reader.poll():
            found |= {one.message for one in events if isinstance(one, Notified)}
    return found - {ENDED}
