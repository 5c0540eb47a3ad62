"""Send messages about a run: it ended, its verdict got worse, it stalls. Each message is sent once per run; the
message about the end, once per session.

    observer.tick      -> Notices.tick: check the verdict every EVALUATE_EVERY_S; record the results of messages
    end of the run     -> Notices.close: send the last message, and wait some seconds for unfinished ones

Threads send them (`engine.notify.send`). An event `notified` in the watch log records which receivers got a message
and which did not, so that a resumed run does not repeat it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.errors import RunLogError
from engine.log.events import ALERT, Event, Notified
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import events_of
from engine.log.view import RunView
from engine.notify.message import ENDED, STALLED, WORSE, Message
from engine.notify.receivers import Receiver
from engine.notify.send import Delivery, Outcome
from engine.redact import Redactor
from engine.watch.verdict_line import SUSPECT, WRONG, RunVerdict, verdict_of
from engine.watch.watcher import EVALUATE_EVERY_S, STALLS

READ_SHARE = 0.99
"""Share of the logs, 0 to 1, that must have been read before a message is sent: an alert in the middle of a log may
be over by its end."""


class Notices:
    def __init__(
        self,
        run: RunFolder,
        receivers: Sequence[Receiver],
        write: Callable[[Event], None],
    ) -> None:
        self._run, self._receivers, self._write = run, receivers, write
        self._deliveries: list[tuple[str, Delivery]] = []
        self._next_s = 0.0
        self._sent = _sent_earlier(run)
        """Keys of the messages of this run: `stalled`, `worse SUSPECT`, `worse WRONG`, `ended`."""

    def tick(self, follower: Follower) -> None:
        self._collect()
        now_s = time.monotonic()
        if now_s < self._next_s or follower.share_read < READ_SHARE:
            return
        self._next_s = now_s + EVALUATE_EVERY_S
        verdict = verdict_of(follower.view, "running", self._run.path.absolute())
        if any(stall in follower.view.alerts for stall in STALLS):
            self._send(STALLED, STALLED, follower.view, verdict)
        # A stall also makes the verdict worse, and one message is enough.
        if verdict.level in (SUSPECT, WRONG) and verdict.id not in {f"{ALERT} {s}" for s in STALLS}:
            self._send(WORSE, f"{WORSE} {verdict.level}", follower.view, verdict)

    def close(self, follower: Follower, *, ended: bool = True) -> None:
        """Send the message that the run ended, if `ended`, and wait for unfinished messages."""
        if ended:
            with suppress(RunLogError):
                follower.read_all()
            verdict = verdict_of(follower.view, follower.state, self._run.path.absolute())
            self._send(ENDED, ENDED, follower.view, verdict)
        for key, delivery in self._deliveries:
            self._record(key, delivery.wait())

    def _send(self, event: str, key: str, view: RunView, verdict: RunVerdict) -> None:
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
            level=verdict.level,
            verdict=clean.text(verdict.line).text,
            do=clean.text(verdict.action).text,
            folder=str(path),
            look=f"apr-workbench {path}",
        )
        delivery = Delivery(message, self._receivers)
        self._deliveries.append((key, delivery))

    def _collect(self) -> None:
        sending, self._deliveries = self._deliveries, []
        for key, delivery in sending:
            if (outcomes := delivery.poll()) is None:
                self._deliveries.append((key, delivery))
            else:
                self._record(key, outcomes)

    def _record(self, key: str, outcomes: Sequence[Outcome]) -> None:
        self._write(
            Notified(
                message=key,
                sent=[outcome.receiver.name for outcome in outcomes if outcome.sent],
                failed={
                    outcome.receiver.name: f"{outcome.receiver.where}: {outcome.text}"
                    for outcome in outcomes
                    if not outcome.sent
                },
            )
        )


def _sent_earlier(run: RunFolder) -> set[str]:
    """Return the keys of the messages of earlier sessions, except messages about the end of a session."""
    sent: set[str] = set()
    with suppress(RunLogError):
        for event in events_of(run.watch):
            if isinstance(event, Notified):
                sent.add(event.message)
    return sent - {ENDED}
