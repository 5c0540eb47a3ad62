"""How several GPUs share a student, and why. Pure: facts come in, Decisions go out.

    student.reshard       whether a layer's weights are gathered twice a step, or kept in between
    checkpoint.sharded    whether each rank writes its own part of a checkpoint, or the first all of it

Neither is asked of a run of one process.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.units import format_bytes

SHARDED_FROM_BYTES = 16 * 2**30
"""Of one checkpoint: 12 bytes a parameter. Under it, gathering it on the first rank takes seconds."""


def choose_reshard(
    wanted: str, *, kept_bytes: int, given_bytes: int, available_bytes: int | None
) -> Decision:
    """Whether layers give their gathered weights back between forward and backward. `kept_bytes` and
    `given_bytes` are what the whole run needs on this GPU if they keep them, and if not.
    """
    room = "" if available_bytes is None else f" of {format_bytes(available_bytes)} available"
    kept = f"kept, the run needs {format_bytes(kept_bytes)}{room}"
    fits = available_bytes is None or kept_bytes <= available_bytes
    choice = wanted if wanted != "auto" else ("off" if fits else "on")
    twice = f"gathers every layer twice a step, to need {format_bytes(given_bytes)}"
    reason = f"{kept}, and each layer is gathered once a step" if choice == "off" else kept
    return Decision(
        knob="student.reshard",
        choice=choice,
        reason=reason if wanted == "auto" else SET_BY_USER,
        rejected=(("on", twice),) if choice == "off" else (("off", kept),),
        overridden=wanted != "auto",
    )


def choose_sharded(wanted: str, *, whole_bytes: int) -> Decision:
    """Whether each rank writes its part of a checkpoint of `whole_bytes` itself."""
    size = f"a checkpoint is {format_bytes(whole_bytes)}"
    large = whole_bytes >= SHARDED_FROM_BYTES
    choice = wanted if wanted != "auto" else ("on" if large else "off")
    sharded = "every rank writes its own part, none sees all"
    whole = "the first rank writes it whole, as a run on one GPU would"
    other = ("off", f"{size}: one rank would write all of it while the others wait")
    if choice == "off":
        other = ("on", f"{size}, and in parts it needs torch to be read")
    return Decision(
        knob="checkpoint.sharded",
        choice=choice,
        reason=f"{size}: {sharded if choice == 'on' else whole}"
        if wanted == "auto"
        else SET_BY_USER,
        rejected=(other,),
        overridden=wanted != "auto",
    )
