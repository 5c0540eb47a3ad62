"""Reading a long log fast: steps as the numbers that become columns, and nothing else of them.

Almost every line of a long log is a step, and of a step that two thousand later lines follow only the
columns are ever looked at again. `StepRow` holds just those. It is decoded by the same library from the
same line, three times as fast as the whole event; a number that is not finite is put back as everywhere.
Lines of other kinds, and the newest lines, are decoded whole.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeAlias, get_args

import msgspec

from engine.files import depth_of
from engine.limits import JSON_DEPTH
from engine.log.envelope import Count, Elapsed, Number
from engine.log.events import NON_FINITE, AnyEvent, FactsRead, Known, LogOpened, StepDone

LINES_KEPT = 2000
"""So many of the newest lines of a log are kept whole."""


class StepRow(msgspec.Struct, kw_only=True, gc=False, tag_field="kind", tag="step"):
    """The columns of a `StepDone`, under its names. `phases` is JSON, decoded for the newest step only."""

    seq: Count = -1
    t_s: Elapsed = -1.0
    nf: dict[str, str] | None = None
    step: Count
    loss: Number | None
    ce: Number | None
    kd: Number | None
    agreement: Number | None
    lr: Number | None
    grad_norm: Number | None
    rows: Count
    tokens: Count
    labelled: Count
    step_s: Number | None
    data_s: Number | None
    teacher_s: Number | None
    position: Count
    phases: msgspec.Raw = msgspec.Raw(b"{}")


Skimmed: TypeAlias = AnyEvent | StepRow
"""What a skimming reader returns: any event, or the columns of a step."""

_others: Any = StepRow
for _kind in get_args(Known):
    if _kind is not StepDone:
        _others = _others | _kind
_whole = msgspec.json.Decoder(Known)
_skimming = msgspec.json.Decoder(_others)
_nf_of = attrgetter("nf")
_phases = msgspec.json.Decoder(dict[str, Number])


def phases_of(phases: dict[str, float] | msgspec.Raw | bytes) -> dict[str, float]:
    """Seconds of each phase of a step; none where they are not numbers."""
    if isinstance(phases, dict):
        return phases
    try:
        return _phases.decode(phases)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def decode_block(lines: bytes, *, skim: bool) -> list[Skimmed]:
    """Every event of whole lines. With `skim` steps that LINES_KEPT later lines follow are StepRows.

    Raises msgspec.DecodeError or UnicodeDecodeError when one is not as expected, ValueError or
    LookupError when a number that is not finite cannot be put back: then each line wants a closer look.
    """
    cut = _last_lines(lines) if skim else 0
    if not cut:
        return _with_numbers(_whole.decode_lines(lines))
    events = decode_rows(lines[:cut]) + _with_numbers(_whole.decode_lines(lines[cut:]))
    # The lines of an earlier session may be the newest by the clock: then none may be skimmed.
    if LogOpened in set(map(type, events[1:])):
        return _with_numbers(_whole.decode_lines(lines))
    return events


def decode_rows(lines: bytes) -> list[Skimmed]:
    """Every event of whole lines, all steps as StepRows; raises as `decode_block`."""
    return _with_numbers(_skimming.decode_lines(lines))


def _with_numbers(events: list[Skimmed]) -> list[Skimmed]:
    """The events with the numbers that are not finite put back."""
    if FactsRead in set(map(type, events)):
        facts = (event.facts for event in events if type(event) is FactsRead)
        # One less: the facts lie in a record.
        if any(depth_of(one) >= JSON_DEPTH.most for one in facts):
            raise ValueError("facts are nested too deep")
    # Every kind the decoders know has `nf`.
    if any(map(_nf_of, events)):
        events = [_put_back(event) if event.nf else event for event in events]  # type: ignore[union-attr]
    return events


def _last_lines(lines: bytes) -> int:
    """Where the last LINES_KEPT lines begin."""
    end = len(lines) - 1
    for _ in range(LINES_KEPT):
        end = lines.rfind(b"\n", 0, end)
        if end < 0:
            return 0
    return end + 1


def _put_back(event: Skimmed) -> Skimmed:
    """A step with the values named under `nf` in its fields; ValueError for what is nested or no step."""
    if not isinstance(event, StepDone | StepRow) or event.nf is None:
        raise ValueError("only the numbers of steps are put back here")
    values = {name: NON_FINITE[text] for name, text in event.nf.items()}
    if any(getattr(event, name, 0.0) is not None for name in values):
        raise ValueError("`nf` names what is not null")
    return msgspec.structs.replace(event, nf=None, **values)
