"""Define a `Decision`: one automatic choice with its reason, the rejected values, and the argument that overrides it.

Every chooser (device, precision, teacher backend, attention, ...) returns a Decision. The run logs it once, and
commands and screens show it in the same words:

    teacher.backend: dequantized
      because 10.6 MiB of weights fit in 22.9 GiB available
      not none: a teacher was given
      override: --set teacher.backend=none

For a value set by the user, `set by the user` takes the place of `because`, followed by any remark of the chooser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import BadInput

SET_BY_USER = "set by the user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    knob: str
    """The setting that is decided, as a dotted RunSpec key: `teacher.backend`."""
    choice: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """Each allowed value that was not chosen, with the reason."""
    impossible: tuple[str, ...] = ()
    """Rejected values that are impossible for this run on this machine: setting such a value is refused, or changes
    nothing."""
    overridden: bool = False
    """Whether the user set the value, so that nothing was decided automatically."""

    @property
    def override(self) -> str:
        """The command-line argument that selects a rejected value: the first possible one, or the first if none is
        possible."""
        others = [value for value, _ in self.rejected]
        possible = [value for value in others if value not in self.impossible]
        other = next(iter((*possible, *others)), "VALUE")
        return f"--set {self.knob}={other}"

    def lines(self) -> list[str]:
        """Return the decision as printed lines."""
        if not self.overridden:
            why = f"because {self.reason}"
        elif self.reason in ("", SET_BY_USER):
            why = SET_BY_USER
        else:
            why = f"{SET_BY_USER}: {self.reason}"
        return [
            f"{self.knob}: {self.choice}",
            f"  {why}",
            *(f"  not {value}: {reason}" for value, reason in self.rejected),
            f"  override: {self.override}",
        ]


def is_choice_of_the_engine(value: Any) -> bool:
    """Return whether a value leaves the choice to the engine: `auto`, or 0 for numbers."""
    return value == "auto" or (value == 0 and not isinstance(value, bool))


def as_choice(value: Any) -> str:
    """Format a value as a Decision writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def decide(
    knob: str,
    wanted: str,
    best: str,
    reason: str | Mapping[str, str],
    *,
    against: Mapping[str, str],
    refused: Mapping[str, tuple[str, str, str]] | None = None,
    explained: bool = False,
) -> Decision:
    """Decide for the value that the user `wanted`, or for `best` if `wanted` is `auto`.

    `reason` explains the choice, for all values or by value. `against` has the reason against each other value; the
    override names its first rejected value. A value in `refused` is impossible: requesting it raises BadInput with
    what was expected, what was found and a hint. With `explained`, the reason is also given if the user set the
    value.
    """
    if refused is not None and wanted in refused:
        expected, found, hint = refused[wanted]
        raise BadInput.expected(knob, wanted, expected, found, hint=hint)
    choice = best if wanted == "auto" else wanted
    because = reason if isinstance(reason, str) else reason[choice]
    return Decision(
        knob=knob,
        choice=choice,
        reason=because if wanted == "auto" or explained else SET_BY_USER,
        rejected=tuple((value, why) for value, why in against.items() if value != choice),
        impossible=tuple(value for value in against if value in (refused or ())),
        overridden=wanted != "auto",
    )
