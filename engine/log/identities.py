"""Render the results of a watched script's identities (`engine/catalogue.py`) as lines. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.catalogue import BY_ID, About
from engine.log.events import FACT, FAIL, IDENTITY, LEVELS, PASS, SUSPICION, UNKNOWN, Judged
from engine.log.text import LEVEL_WORDS, UNSEEN_COMMAND, one_line
from engine.log.view import RunView

SIGNS = {
    FAIL: "x CONTRADICTION",
    SUSPICION: "! suspicion",
    UNKNOWN: "? unknown",
    FACT: "- fact",
    PASS: "+ pass",
}
"""Sign and word of each level, in the order of the listing."""


@dataclass(frozen=True)
class Outcome:
    """The result of an identity in one run."""

    id: str
    about: About | None
    """Catalogue entry; None if this version does not know the identity."""
    seen: Judged | None
    """Worst result; None if there is none."""

    @property
    def level(self) -> str:
        return self.seen.level if self.seen is not None and self.seen.level in SIGNS else UNKNOWN

    @property
    def text(self) -> str:
        if self.seen is not None:
            return one_line(f"{self.seen.text} (step {self.seen.step})")
        return f"not judged: {self.about.question if self.about is not None else ''}"

    @property
    def means(self) -> str:
        return self.about.means if self.about is not None else ""

    @property
    def remedy(self) -> str:
        framework = self.seen.framework if self.seen is not None else ""
        return self.about.remedy_with(framework) if self.about is not None else ""


def outcomes(view: RunView) -> list[Outcome]:
    """Return the outcome of each identity, in the order of `SIGNS`.

    The log has each level of an identity once, at the first step with it. The worst level counts, because a later
    step does not undo a contradiction.
    """
    worst: dict[str, Judged] = {}
    for judged in view.identities:
        if judged.id not in worst or _badness(judged) > _badness(worst[judged.id]):
            worst[judged.id] = judged
    ids = dict.fromkeys([*BY_ID[IDENTITY], *worst])
    results = [Outcome(id, BY_ID[IDENTITY].get(id), worst.get(id)) for id in ids]
    return sorted(results, key=lambda outcome: list(SIGNS).index(outcome.level))


def _badness(judged: Judged) -> int:
    return LEVELS.index(judged.level) if judged.level in LEVELS else -1


def identity_lines(view: RunView) -> list[str]:
    """Render each identity that was judged, with its level; below one that may be violated, what that means and what
    to do. The others are listed in one line."""
    if view.watched is None:
        return [UNSEEN_COMMAND]
    results = outcomes(view)
    lines = [
        ", ".join(
            f"{sum(outcome.level == level for outcome in results)} {LEVEL_WORDS.get((IDENTITY, level), level)}"
            for level in SIGNS
        )
    ]
    unseen = [outcome.id for outcome in results if outcome.seen is None]
    for outcome in results:
        if outcome.seen is None:
            continue
        lines.append(f"{SIGNS[outcome.level]} {outcome.id}: {outcome.text}")
        if outcome.level in (FAIL, SUSPICION) and outcome.about is not None:
            lines += [f"  means: {outcome.means}", f"  do: {outcome.remedy}"]
    if unseen:
        lines.append(
            f"? not judged, as the run has nothing of the kind or ended before: {', '.join(unseen)}"
        )
    return lines
