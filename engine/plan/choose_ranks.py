"""How several GPUs share a student and a teacher, and why. Pure: facts come in, Decisions go out.

    teacher.shard         whether the ranks share the teacher's layers, or each has all of them
    student.reshard       whether a layer's weights are gathered twice a step, or kept in between
    checkpoint.sharded    whether each rank writes its own part of a checkpoint, or the first all of it

None is asked of a run of one process.
"""

from __future__ import annotations

from engine.decision import SET_BY_USER, Decision
from engine.errors import BadInput
from engine.units import format_bytes

SHARDED_FROM_BYTES = 16 * 2**30
"""Of one checkpoint: 12 bytes a parameter. Under it, gathering it on the first rank takes seconds."""


def choose_teacher_shard(
    wanted: str,
    *,
    ranks: int,
    whole_bytes: int,
    shared_bytes: int,
    available_bytes: int | None,
    stored: bool = False,
) -> Decision:
    """Whether the ranks share the teacher's layers. `whole_bytes` and `shared_bytes` are what the run needs
    on each GPU at its peak with all of them there and with its share, when everything else is given
    up that `auto` may give up. `stored`: whether the teacher's outputs come out of a store.

    Raises BadInput for `on` where they do: a rank that misses a row asks the teacher alone.
    """
    knob = "teacher.shard"
    if stored:
        if wanted == "on":
            raise BadInput.expected(
                knob,
                "on",
                "a teacher that computes",
                "one whose outputs are stored",
                hint="without teacher.cache every rank asks the teacher in every step",
            )
        why = "its outputs are stored: a rank that misses a row asks the teacher alone"
        return Decision(
            knob=knob, choice="off", reason=why, rejected=(("on", why),), overridden=wanted == "off"
        )
    room = "" if available_bytes is None else f" of {format_bytes(available_bytes)} available"
    whole = f"with the teacher whole on each GPU the run needs {format_bytes(whole_bytes)}{room}"
    shared = f"with its layers shared by {ranks} GPUs {format_bytes(shared_bytes)}"
    fits = available_bytes is None or whole_bytes <= available_bytes
    helps = not fits and available_bytes is not None and shared_bytes <= available_bytes
    choice = wanted if wanted != "auto" else ("on" if helps else "off")
    if wanted == "auto" and not fits and not helps:
        whole += f", and {shared} it does not fit either"
    rejected = ("off", whole) if choice == "on" else ("on", f"{shared}: gathers every layer")
    return Decision(
        knob=knob,
        choice=choice,
        reason=SET_BY_USER if wanted != "auto" else f"{whole}, {shared}" if helps else whole,
        rejected=(rejected,),
        overridden=wanted != "auto",
    )


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
