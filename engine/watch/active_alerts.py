"""Which alerts are active: the memory between one look at a run and the next.

A rule answers for one moment. `ActiveAlerts` makes that an alert which is raised once, stays active, and is
cleared once. It is raised at once, since every rule already asks for a window of evidence, and cleared
when the rule has seen nothing wrong for its `clear_after_s` on end. A rule that cannot judge changes
nothing. Each time the same alert comes back, the quiet it takes to clear it doubles, up to
LONGEST_QUIET_S: a number that hovers at its threshold gives a handful of lines and not a thousand. A
stall alone is over with the first line of the trainer, and the next one is another.

A rule that raises an error is named in a note, once, and not asked again: a fault in a rule must not
end the supervisor, and must not be silent either.

A new session of the trainer begins without any.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence

from engine.log.events import AlertCleared, AlertRaised, Note
from engine.watch.rules import RULES
from engine.watch.rules.rule import Alert, Case, Rule, Unknown

LONGEST_QUIET_S = 3600.0


class ActiveAlerts:
    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules = rules
        self.answers: dict[str, Alert | Unknown | None] = {}
        """What each rule said last."""
        self.broken: dict[str, str] = {}
        """Rules that raised an error, with it."""
        self._active_since: dict[str, float] = {}
        """Since when each alert is active."""
        self._quiet_since: dict[str, float] = {}
        self._times_raised: dict[str, int] = {}
        self._session = 0

    def look(
        self, case: Case, without: Collection[str] = ()
    ) -> list[AlertRaised | AlertCleared | Note]:
        """Ask every rule but `without`; what has to be written down."""
        if case.view.sessions != self._session:
            self._session = case.view.sessions
            self._active_since, self._quiet_since, self._times_raised = {}, {}, {}
        events: list[AlertRaised | AlertCleared | Note] = []
        for rule in self.rules:
            if rule.id in self.broken or rule.id in without:
                continue
            try:
                answer = rule.answer(case)
            except Exception as error:  # noqa: BLE001 - the rule is named and never asked again
                events.append(self._disable(rule, error))
                continue
            self.answers[rule.id] = answer
            events += self._change(rule, answer, case.now_unix_s)
        return events

    def _disable(self, rule: Rule, error: Exception) -> Note:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{type(error).__name__}: {error} ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})"
        )
        self.broken[rule.id] = said
        self.answers[rule.id] = Unknown(f"the rule failed: {said}")
        return Note(
            level="warning", text=f"diagnosis rule {rule.id} failed and is left out: {said}"
        )

    def _change(
        self, rule: Rule, answer: Alert | Unknown | None, now_s: float
    ) -> list[AlertRaised | AlertCleared | Note]:
        id = rule.id
        if isinstance(answer, Unknown):
            return []
        since_s = self._active_since.get(id)
        if answer is not None:
            self._quiet_since.pop(id, None)
            # Nobody looked while it was over: its evidence began after it had been raised.
            another = (
                rule.clear_after_s == 0 and since_s is not None and answer.from_unix_s > since_s
            )
            if since_s is not None and not another:
                return []
            self._active_since[id] = now_s
            self._times_raised[id] = self._times_raised.get(id, 0) + 1
            over = [AlertCleared(id=id, stood_s=now_s - since_s)] if since_s is not None else []
            return [*over, answer]
        if since_s is None:
            return []
        quiet_s = now_s - self._quiet_since.setdefault(id, now_s)
        # The power is bounded too: a count has no end, and a float has.
        doubled = 2.0 ** min(self._times_raised[id] - 1, 20)
        needed_s = min(rule.clear_after_s * doubled, LONGEST_QUIET_S)
        if quiet_s < needed_s:
            return []
        del self._active_since[id], self._quiet_since[id]
        return [AlertCleared(id=id, stood_s=now_s - since_s)]
