"""Track which alerts are active between one evaluation of the rules and the next.

A rule judges one moment. `ActiveAlerts` turns its results into an alert that is raised once, stays active, and is
cleared once. It is raised at once, since every rule already needs a window of evidence, and cleared when the rule has
found nothing for `clear_after_s` without interruption. A rule that cannot judge changes nothing. Each time the same
alert returns, the quiet time needed to clear it doubles, up to LONGEST_QUIET_S: a number that hovers at its threshold
gives a few log lines and not a thousand. Stalls are the exception: a stall is over when the trainer writes a line,
and the next stall is a new alert.

A rule that raises an error is reported in a note, once, and not evaluated again: a bug in a rule must neither
end the supervisor nor go unnoticed.

A new session of the trainer begins without active alerts.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence

from engine.log.events import Judged, Note, alert_over
from engine.watch.rules import RULES
from engine.watch.rules.rule import Case, Rule, Unknown

LONGEST_QUIET_S = 3600.0
"""Maximum time without a symptom, in seconds, after which an alert is cleared."""


class ActiveAlerts:
    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules = rules
        self.answers: dict[str, Judged | Unknown | None] = {}
        """The newest result of each rule."""
        self.broken: dict[str, str] = {}
        """Rules that raised an error, with the error."""
        self._active_since: dict[str, float] = {}
        """Time at which each active alert was raised."""
        self._quiet_since: dict[str, float] = {}
        self._times_raised: dict[str, int] = {}
        self._session = 0

    def evaluate(self, case: Case, without: Collection[str] = ()) -> list[Judged | Note]:
        """Evaluate every rule except `without`, and return the events to be logged."""
        if case.view.sessions != self._session:
            self._session = case.view.sessions
            self._active_since, self._quiet_since, self._times_raised = {}, {}, {}
        events: list[Judged | Note] = []
        for rule in self.rules:
            if rule.id in self.broken or rule.id in without:
                continue
            try:
                answer = rule.answer(case)
            except Exception as error:  # noqa: BLE001 - the rule is reported and disabled
                events.append(self._disable(rule, error))
                continue
            self.answers[rule.id] = answer
            events += self._change(rule, answer, case)
        return events

    def _disable(self, rule: Rule, error: Exception) -> Note:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = (
            f"{type(error).__name__}: {error} ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})"
        )
        self.broken[rule.id] = problem
        self.answers[rule.id] = Unknown(f"the rule failed: {problem}")
        return Note(
            level="warning", text=f"diagnosis rule {rule.id} failed and is left out: {problem}"
        )

    def _change(
        self, rule: Rule, answer: Judged | Unknown | None, case: Case
    ) -> list[Judged | Note]:
        id, now_s = rule.id, case.now_unix_s
        if isinstance(answer, Unknown):
            return []
        since_s = self._active_since.get(id)
        if answer is not None:
            self._quiet_since.pop(id, None)
            # The first alert ended unobserved: the new evidence begins after it was raised.
            is_new_stall = (
                rule.clear_after_s == 0 and since_s is not None and answer.from_unix_s > since_s
            )
            if since_s is not None and not is_new_stall:
                return []
            self._active_since[id] = now_s
            self._times_raised[id] = self._times_raised.get(id, 0) + 1
            over = (
                [alert_over(id, active_s=now_s - since_s, step=case.view.last_step)]
                if since_s is not None
                else []
            )
            return [*over, answer]
        if since_s is None:
            return []
        quiet_s = now_s - self._quiet_since.setdefault(id, now_s)
        # The exponent is bounded because counts are not, and a float would overflow.
        doubled = 2.0 ** min(self._times_raised[id] - 1, 20)
        needed_s = min(rule.clear_after_s * doubled, LONGEST_QUIET_S)
        if quiet_s < needed_s:
            return []
        del self._active_since[id], self._quiet_since[id]
        return [alert_over(id, active_s=now_s - since_s, step=case.view.last_step)]
