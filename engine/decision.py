"""A `Decision` is one automatic choice: what was chosen and why, what was rejected, and how to override it.

Every chooser (device, precision, teacher backend, attention, ...) returns one. The run logs it once and every
surface shows it in the same words:

    teacher.backend: dequantized
      because 10.6 MiB of weights fit in 22.9 GiB available
      not none: a teacher was given
      override: --set teacher.backend=none

A value set by the user reads `set by the user` in place of `because`, with what the chooser adds to that.
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
    """Rejected values that this run cannot have on this machine: setting one is refused, or changes nothing."""
    overridden: bool = False
    """True when the user set the value and nothing was decided automatically."""

    @property
    def override(self) -> str:
        """The command-line argument that selects the first rejected value, a possible one if there is one."""
        others = [value for value, _ in self.rejected]
        possible = [value for value in others if value not in self.impossible]
        other = next(iter((*possible, *others)), "VALUE")
        return f"--set {self.knob}={other}"

    def lines(self) -> list[str]:
        """Return the decision as every surface prints it."""
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
    """Whether a value leaves the choice to the engine: `auto`, or 0 where that means the same."""
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
    """Decide for what the user `wanted`, or `best` if that is `auto`.

    `reason` explains the choice, per value where it differs; `against` explains why each other value is not
    chosen, and its first rejected value is the one that the override names. A value in `refused` is
    impossible: requesting it raises BadInput with what was expected, what was found and a hint. With
    `explained`, the reason is also given for a value that the user set.
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
