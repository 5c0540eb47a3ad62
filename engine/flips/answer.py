"""What a flip says in one sentence, and the one thing to do next, from the fields of its verdict.json.

Every surface shows these two before the statistics. They need nothing but the fields, so flips that ended under
an older engine are put into the same words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.flips.arms import ENDED_EARLY, NO_STEPS, OVER_THE_LIMIT
from engine.flips.command import WORDS
from engine.flips.plan import METRICS, PAIRS_LIMIT, PAIRS_MIN, SHOWN
from engine.flips.script_settings import OWN, SCRIPT_SETTINGS, by_hand
from engine.flips.statistics import (
    ALPHA,
    Interval,
    decide,
    margin_of_a_difference,
    margin_of_equality,
)
from engine.flips.surroundings import CPU
from engine.flips.verdict import (
    DID_NOT_COMPLETE,
    ENDS_IT,
    EQUIVALENT,
    FASTER,
    INCONCLUSIVE,
    INVALID,
    KEEPS_IT,
    NOT_SEEN,
    PARITY_FAIL,
    SLOWER,
    count_of,
)

BUSY = 0.5
"""Mean number of other processes that ran or waited for a CPU, above which the machine counts as busy."""
LONGEST_S = 3 * 3600
"""More time than this for the pairs that are missing is not proposed."""
LARGEST_MARGIN = 0.5
"""A margin above this says nothing about a setting, so it is not proposed."""
ON_THE_MARGIN = 0.25
"""An effect nearer to the margin than this share of it takes so many pairs because of where it lies."""
CONTROLS = {
    "AA": "control A against A",
    "positive": "control with A made slower",
    "manipulation": "proof that the setting was flipped",
    "equal": "proof that nothing else differs",
    "parity": "parity of the losses",
}
"""Everything that a measured verdict requires, in words."""


@dataclass(frozen=True, slots=True)
class Answer:
    sentence: str
    action: str
    options: str = ""
    """Options of `engine flip` that do it, where the action is another flip."""


def answer(fields: Mapping[str, Any]) -> Answer:
    """Put a verdict into words. Raises KeyError, TypeError or ValueError for fields of no verdict."""
    return _WORDS[fields["verdict"]](fields)


def busy_with(fields: Mapping[str, Any]) -> float:
    """How many others wanted the CPUs, in the run that had most of them; 0 on a GPU or an idle machine."""
    loads = fields["diagnostics"]["neighbour_load"].values()
    most = max(loads, default=0.0)
    return most if fields["host"]["device"] == CPU and most > BUSY else 0.0


def affordable(fields: Mapping[str, Any]) -> int | None:
    """The number of pairs that would decide; None where it is unknown, or more than anyone would wait for."""
    pairs = fields["pairs_needed"]
    if not pairs or pairs > PAIRS_LIMIT or pairs * _pair_s(fields) > LONGEST_S:
        return None
    return int(pairs)


# The verdicts


def _different(fields: Mapping[str, Any]) -> Answer:
    less = fields["verdict"] == FASTER
    metric = METRICS[fields["metric"]]
    found = f"{_b(fields)} {metric.less if less else metric.more}: {_effect(fields)}"
    return _quoted(fields, f"{found}, more than the margin of {_percent(fields['margin'])}", less)


def _equivalent(fields: Mapping[str, Any]) -> Answer:
    within = f"within the margin of {_percent(fields['margin'])}"
    sentence = f"{_b(fields)} makes no difference that matters: {_effect(fields)}, {within}"
    return Answer(sentence, f"{_use(fields, b=False)} and look for another cause")


def _quoted(fields: Mapping[str, Any], sentence: str, b_is_better: bool) -> Answer:
    """Say which setting to use, and what is missing before the number may be quoted."""
    action = _use(fields, b=b_is_better)
    controls = {name: fields["controls"][name] for name in ("AA", "positive")}
    for name, control in controls.items():
        if control["level"] == "fail":
            why = f"the {CONTROLS[name]} failed on this machine"
            return Answer(
                sentence, f"do not rely on it: {why}; run it again while nothing else runs"
            )
    if fields["class"] == "exploratory":
        return Answer(sentence, f"{action}; run it again before you quote the number")
    if any(c["level"] == "unknown" and "no positive" not in c["reason"] for c in controls.values()):
        action += "; to quote the number, run it with both controls"
        return Answer(sentence, action, "--controls run")
    return Answer(sentence, action)


def _did_not_complete(fields: Mapping[str, Any]) -> Answer:
    censored = fields["censored"]
    arm, pairs = censored["arm"], censored["pairs"]
    other = "B" if arm == "A" else "A"
    states = [str(state).replace("_", " ") for state in censored["states"]]
    took = censored["bound_ln_b_over_a"]
    bound = (
        "" if took is None else f", so it takes at least {math.exp(abs(took)):.1f} times as long"
    )
    failed, finished = _arm(fields, b=arm == "B"), _arm(fields, b=arm == "A")
    how = f"did not finish in {_all(pairs)} ({', '.join(states)})"
    sentence = f"{failed} {how} and {finished} did{bound}"
    if took is None and censored["p"] > ALPHA:
        least = math.ceil(-math.log2(ALPHA))
        action = f"run {least} pairs{_minutes(fields, least)}: so few failures may be chance"
        return Answer(sentence, action, _pairs(fields, least))
    return Answer(sentence, f"{_use(fields, b=other == 'B')}, and read the log of {arm}")


def _inconclusive(fields: Mapping[str, Any]) -> Answer:
    seen, is_open = "no pair could be compared", None in fields["interval"]
    if fields["effect"] is not None:
        rest = f" after {count_of(fields['n_pairs'])}, too few to tell"
        seen = _effect(fields) + (rest if is_open else f", margin {_percent(fields['margin'])}")
    if fields["diagnostics"]["left_out"]:
        seen += "; runs were ended from outside"
    if fields["interrupted"]:
        return Answer(f"not decided yet, it was interrupted: {seen}", "continue it")
    if fields["metric"] == SHOWN:
        return Answer(f"not decided: {fields['reason']}", "run it again with a larger --budget")
    pairs, others = affordable(fields), busy_with(fields)
    if is_open:
        pairs = max(PAIRS_MIN, pairs or 0)
    busy = ""
    if others:
        count = f"{others:.0f} others want" if others >= 1.5 else "others want"
        busy = f" on this busy machine: {count} its CPUs"
    if pairs is not None:
        more = f"run {pairs} pairs{_minutes(fields, pairs)}"
        sentence = f"not decided{busy}; {seen}" if busy else f"not decided: {seen}"
        return Answer(sentence, f"close them and {more}" if busy else more, _pairs(fields, pairs))
    change, options = _other_margin(fields)
    if busy:
        action = f"close them or {change}" if change else "close them and run it again"
        return Answer(f"cannot be decided{busy}; {seen}", action, options)
    sentence = f"cannot be decided: {_why_undecidable(fields)}; {seen}"
    return Answer(sentence, change or "run it again with more steps", options)


def _why_undecidable(fields: Mapping[str, Any]) -> str:
    delta = math.log1p(fields["margin"])
    if abs(abs(math.log(fields["effect"])) - delta) < ON_THE_MARGIN * delta:
        return "the effect is as large as the margin"
    return f"pairs differ by {_percent(fields['diagnostics']['deviation'])} among themselves"


def _other_margin(fields: Mapping[str, Any]) -> tuple[str, str]:
    """The margin at which the present pairs would decide, as an action and as an option."""
    interval = _interval(fields)
    for word, margin in (
        ("lower", margin_of_a_difference(interval)),
        ("raise", margin_of_equality(interval)),
    ):
        if margin is not None and margin <= LARGEST_MARGIN:
            why = " if so little matters" if word == "lower" else ""
            return f"{word} the margin to {_percent(margin)}{why}", f"--margin {100 * margin:g}%"
    return "", ""


def _about_observed(fields: Mapping[str, Any]) -> Answer:
    word, reason = fields["verdict"], fields["reason"]
    if word == ENDS_IT:
        return Answer(f"{_b(fields)} ends it: {reason}", _use(fields, b=True))
    if word == KEEPS_IT:
        sentence = f"{_b(fields)} does not end it: {reason}"
        return Answer(sentence, f"{_use(fields, b=False)} and look for another cause")
    action = "run it with more --steps or a longer --budget, as the run that showed it"
    return Answer(f"not tested: {reason}", action)


def _parity(fields: Mapping[str, Any]) -> Answer:
    why = fields["controls"]["parity"]["reason"]
    sentence = f"not comparable, the arms compute different things: {why}"
    return Answer(sentence, f"{_use(fields, b=False)}, and compare the logs where the losses part")


def _invalid(fields: Mapping[str, Any]) -> Answer:
    controls, found = fields["controls"], fields["diagnostics"]["findings"]
    if controls["manipulation"]["level"] == "fail":
        sentence = f"the setting was not tested: {controls['manipulation']['reason']}"
        return Answer(sentence, "read in the log of B why the setting had no effect")
    if controls["equal"]["level"] == "fail":
        sentence = f"more than the setting differs between the arms: {controls['equal']['reason']}"
        return Answer(sentence, "remove that difference and run it again")
    if found:
        busy = busy_with(fields)
        action = "close the other programs" if busy else "let the machine become idle"
        sentence = f"the pairs disturb each other: {'; '.join(found.values())}"
        return Answer(sentence, f"{action} and run it again")
    if fields["metric"] == SHOWN:
        return Answer(f"not tested: {fields['reason']}", "read the log of B")
    failed = [run for run in fields["raw_runs"] if run["state"] != "completed"]
    if failed:
        arms = sorted({run["arm"] for run in failed})
        who = "both arms" if len(arms) == 2 else f"arm {arms[0]}"
        state = str(failed[0]["state"]).replace("_", " ")
        sentence = (
            f"not comparable: {len(failed)} of {len(fields['raw_runs'])} runs did not finish,"
            f" of {who}, the first in pair {failed[0]['pair']} ({state})"
        )
        if {run["state"] for run in failed} == {OVER_THE_LIMIT} and len(arms) == 2:
            return Answer(sentence, "run it again with a larger --budget")
        states = {run["state"] for run in failed}
        if len(states) == 1 and (short := _FELL_SHORT.get(states.pop())) is not None:
            return short
        return Answer(sentence, f"read the log of {failed[0]['run']}")
    return Answer(f"nothing was measured: {fields['reason']}", "choose another --metric")


_FELL_SHORT = {
    ENDED_EARLY: Answer(
        "not comparable: the script ended by itself before the steps of --steps",
        "run it again with fewer --steps, or let the script make more",
    ),
    NO_STEPS: Answer(
        "nothing was measured: no optimizer of torch stepped where the probe could see it",
        "see what `engine watch` says of the command",
    ),
}
"""What is said where a command succeeds and does too little."""
_WORDS = {
    FASTER: _different,
    SLOWER: _different,
    EQUIVALENT: _equivalent,
    INCONCLUSIVE: _inconclusive,
    PARITY_FAIL: _parity,
    INVALID: _invalid,
    **dict.fromkeys((ENDS_IT, KEEPS_IT, NOT_SEEN), _about_observed),
    **dict.fromkeys(DID_NOT_COMPLETE.values(), _did_not_complete),
}


# Their parts


def _settings(fields: Mapping[str, Any], *, b: bool) -> list[str]:
    """The changed settings with their values in an arm, as `key=value`; words of a command as they are."""
    found = []
    for change in fields["changes"]:
        key, _, values = change.partition(": ")
        value = values.partition(" -> ")[2 if b else 0]
        if value == OWN:
            found.append(f"{OWN} {key}")
        else:
            found.append(value if key == WORDS else f"{key}={value}")
    return found


def _b(fields: Mapping[str, Any]) -> str:
    """Name what B changes."""
    settings = _settings(fields, b=True)
    if len(settings) > 1:
        return f"the bundle of {len(settings)} settings"
    return settings[0] if settings else "B"


def _arm(fields: Mapping[str, Any], *, b: bool) -> str:
    settings = _settings(fields, b=b)
    return f"{'B' if b else 'A'} ({settings[0]})" if len(settings) == 1 else "B" if b else "A"


def _use(fields: Mapping[str, Any], *, b: bool) -> str:
    settings = _settings(fields, b=b)
    if not settings:
        return "change nothing"
    if b:
        pairs = [setting.partition("=") for setting in settings]
        settings = [
            by_hand(key, value) if key in SCRIPT_SETTINGS else f"{key}{equals}{value}"
            for key, equals, value in pairs
        ]
    return f"{'set' if b else 'keep'} {', '.join(settings)}"


def _all(pairs: int) -> str:
    return "the only pair" if pairs == 1 else f"any of {pairs} pairs"


def _interval(fields: Mapping[str, Any]) -> Interval:
    low, high = fields["interval"]
    return Interval(
        mean=math.log(fields["effect"]),
        low=-math.inf if low is None else math.log(low),
        high=math.inf if high is None else math.log(high),
        pairs=fields["n_pairs"],
        deviation=fields["diagnostics"]["deviation"] or 0.0,
    )


def _effect(fields: Mapping[str, Any]) -> str:
    """The effect with its interval: `time per step -26.0 % [-26.2, -25.7]`."""
    interval, noun = _interval(fields), METRICS[fields["metric"]].noun
    if math.isinf(interval.high):
        return f"{noun} {100 * math.expm1(interval.mean):+z.0f} %"
    ends = [100 * math.expm1(x) for x in (interval.mean, interval.low, interval.high)]
    half = (ends[2] - ends[1]) / 2
    # As many digits as the interval leaves certain, and enough that its ends keep their side of the margin.
    digits = min(3, max(0, -math.floor(math.log10(half)))) if half > 0 else 1
    while digits < 3 and _verdict_of(ends, digits, fields["margin"]) != decide(
        interval, fields["margin"]
    ):
        digits += 1
    mean, low, high = (f"{end:+z.{digits}f}" for end in ends)
    return f"{noun} {mean} % [{low}, {high}]"


def _verdict_of(ends: list[float], digits: int, margin: float) -> str | None:
    """What percentages would decide when they are rounded."""
    mean, low, high = (math.log1p(max(round(end, digits), -99.9) / 100) for end in ends)
    return decide(Interval(mean=mean, low=low, high=high, pairs=0, deviation=0.0), margin)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _pair_s(fields: Mapping[str, Any]) -> float:
    """Mean seconds of a pair."""
    seconds = sum(run["seconds"] for run in fields["raw_runs"])
    return float(seconds / max(1, fields["pairs_run"]))


def _whole_minutes(fields: Mapping[str, Any], pairs: int) -> int:
    return math.ceil(pairs * _pair_s(fields) / 60)


def _minutes(fields: Mapping[str, Any], pairs: int) -> str:
    minutes = _whole_minutes(fields, pairs)
    return f" (about {minutes} min)" if minutes else ""


def _pairs(fields: Mapping[str, Any], pairs: int) -> str:
    """Options for a number of pairs, with a quarter more time than they took."""
    budget = max(5, math.ceil(1.25 * _whole_minutes(fields, pairs)))
    return f"--pairs {pairs} --budget {budget}m"
