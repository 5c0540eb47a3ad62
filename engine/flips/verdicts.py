"""Verdicts of a flip (VERDICTS): each with its level, the requirements for a measurement, one sentence, and the next
action.

Every surface shows sentence and action before the statistics. They need only the fields of verdict.json, so verdicts of
older engines get the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from engine.flips.arms import ENDED_EARLY, NO_STEPS, OVER_THE_LIMIT
from engine.flips.command import WORDS
from engine.flips.controls import UNDECIDED
from engine.flips.pair import count_of
from engine.flips.plan import LONGEST_S, METRICS, PAIRS_LIMIT, PAIRS_MAX, PAIRS_MIN, SHOWN
from engine.flips.script_settings import OWN, SCRIPT_SETTINGS, by_hand
from engine.flips.statistics import (
    ALPHA,
    EQUIVALENT,
    FASTER,
    SLOWER,
)
from engine.flips.statistics import INCONCLUSIVE as INCONCLUSIVE
from engine.flips.surroundings import CPU
from engine.verdict import Level

PARITY_FAIL, INVALID = "PARITY_FAIL", "INVALID"
DID_NOT_COMPLETE = {"A": "A_DID_NOT_COMPLETE", "B": "B_DID_NOT_COMPLETE"}
ENDS_IT, KEEPS_IT, NOT_SEEN = "B_ENDS_IT", "B_KEEPS_IT", "NOT_SEEN"
ENDS_IT_HERE, UNTESTED = "B_ENDS_IT_FOR_ONE_SEED", "NOT_TESTED"
CONTROLS = {
    "AA": "control A against A",
    "positive": "control with A made slower",
    "manipulation": "proof that the setting was flipped",
    "equal": "proof that nothing else differs",
    "parity": "parity of the losses",
}
"""Requirements of measured verdicts, in words: controls, and proofs about the pairs."""
BUSY = 0.5
"""Mean number of other processes that ran or waited for a CPU, above which the machine counts as busy."""
Fields: TypeAlias = Mapping[str, Any]
"""The content of verdict.json."""


class Answer(NamedTuple):
    sentence: str
    action: str
    options: str = ""
    """Options of `engine flip` that do it, where the action is another flip."""


class Meaning(NamedTuple):
    level: Level
    """PASS when the flip decided, FAIL when the arms compute different things, otherwise UNKNOWN."""
    says: Callable[[Fields], Answer]
    requires: tuple[str, ...] = ()
    """The CONTROLS that a measured verdict needs; none for a verdict that measures nothing."""
    is_in_logs: bool = False
    """Whether the log of a run says more about it."""


def answer(fields: Fields) -> Answer:
    """Put a verdict into words. Raises KeyError, TypeError or ValueError for fields of no verdict."""
    return VERDICTS[fields["verdict"]].says(fields)


def busy_with(fields: Fields) -> float:
    """Return the number of other processes that wanted the CPUs, in the busiest run; 0 on a GPU, on an idle machine,
    and for metrics that load cannot change."""
    if not _varies_with_load(fields):
        return 0.0
    loads = fields["diagnostics"]["neighbour_load"].values()
    most = max(loads, default=0.0)
    return most if fields["host"]["device"] == CPU and most > BUSY else 0.0


def _varies_with_load(fields: Fields) -> bool:
    return fields["metric"] not in METRICS or METRICS[fields["metric"]].varies_with_load


def affordable(fields: Fields) -> int | None:
    """Return the number of pairs that would decide; None if it is unknown, or they would take longer than LONGEST_S."""
    pairs = fields["pairs_needed"]
    if not pairs or pairs > PAIRS_LIMIT or pairs * _pair_s(fields) > LONGEST_S:
        return None
    return int(pairs)


# Verdicts with more than one thing to say


def _different(fields: Fields) -> Answer:
    """Say which setting to use, and what is missing before the number may be quoted."""
    metric, is_less = METRICS[fields["metric"]], fields["verdict"] == FASTER
    does = metric.less if is_less else metric.more
    sentence = f"{_change_of_b(fields)} {does}: {_effect(fields)}, more than the margin of {_margin(fields)}"
    action = _setting_action(fields, b=is_less)
    controls = {name: fields["controls"][name] for name in ("AA", "positive")}
    for name, control in controls.items():
        if control["level"] == "fail":
            why = f"the {CONTROLS[name]} failed on this machine"
            again = "run it again while nothing else runs"
            return Answer(sentence, f"do not rely on it: {why}; {again}")
        if UNDECIDED in control["reason"]:
            more, options = _more_pairs(fields, PAIRS_MAX)
            action = f"do not rely on it yet: the {CONTROLS[name]} had {UNDECIDED}; {more} with both controls"
            return Answer(sentence, action, f"{options} --controls run")
    if fields["class"] == "exploratory":
        return Answer(sentence, f"{action}; run it again before you quote the number")
    if any(c["level"] == "unknown" and "no positive" not in c["reason"] for c in controls.values()):
        action += "; to quote the number, run it with both controls"
        return Answer(sentence, action, "--controls run")
    return Answer(sentence, action)


def _did_not_complete(fields: Fields) -> Answer:
    censored = fields["censored"]
    pairs, took = censored["pairs"], censored["bound_ln_b_over_a"]
    states = ", ".join(str(state).replace("_", " ") for state in censored["states"])
    all_pairs = "the only pair" if pairs == 1 else f"any of {pairs} pairs"
    failed_b = censored["arm"] == "B"
    failed, finished = _arm(fields, b=failed_b), _arm(fields, b=not failed_b)
    sentence = f"{failed} did not finish in {all_pairs} ({states}) and {finished} did"
    if took is not None:
        sentence += f", so it takes at least {math.exp(abs(took)):.1f} times as long"
    elif censored["p"] > ALPHA:
        more, options = _more_pairs(fields, math.ceil(-math.log2(ALPHA)))
        return Answer(sentence, f"{more}: so few failures may be chance", options)
    use = _setting_action(fields, b=not failed_b)
    return Answer(sentence, f"{use}, and read the log of {censored['arm']}")


def _inconclusive(fields: Fields) -> Answer:
    result, is_open = "no pair could be compared", None in fields["interval"]
    if fields["effect"] is not None:
        rest = f" after {count_of(fields['n_pairs'])}, too few to tell"
        result = _effect(fields) + (rest if is_open else f", margin {_margin(fields)}")
    if fields["diagnostics"]["left_out"]:
        result += "; runs were ended from outside"
    if fields["interrupted"]:
        return Answer(f"not decided yet, it was interrupted: {result}", "continue it")
    if fields["metric"] == SHOWN:
        return Answer(f"not decided: {fields['reason']}", "run it again with a larger --budget")
    pairs, others = affordable(fields), busy_with(fields)
    if is_open:
        pairs = max(PAIRS_MIN, pairs or 0)
    busy, close = "", ""
    if others:
        count = f"{others:.0f} others want" if others >= 1.5 else "others want"
        busy, close = f" on this busy machine: {count} its CPUs", "close them and "
    if pairs is not None:
        more, options = _more_pairs(fields, pairs)
        return Answer(f"not decided{busy}{';' if busy else ':'} {result}", close + more, options)
    again = "run it again with more steps, or with a larger margin"
    if busy:
        return Answer(f"cannot be decided{busy}; {result}", "close them and run it again")
    varies = _percent(fields["diagnostics"]["deviation"])
    return Answer(f"cannot be decided: pairs differ by {varies} among themselves; {result}", again)


_FAILED = {
    "manipulation": (
        "the setting was not tested",
        "read in the log of B why the setting had no effect",
    ),
    "equal": (
        "more than the setting differs between the arms",
        "remove that difference and run it again",
    ),
}
"""Sentence and next action of a proof that failed."""
_DID_TOO_LITTLE = {
    ENDED_EARLY: Answer(
        "not comparable: the script ended by itself before the steps of --steps",
        "run it again with fewer --steps, or let the script make more",
    ),
    NO_STEPS: Answer(
        "nothing was measured: no optimizer of torch stepped where the probe could see it",
        "run the command with `engine watch` and read its messages",
    ),
}


def _invalid(fields: Fields) -> Answer:
    controls = fields["controls"]
    for name, (sentence, action) in _FAILED.items():
        if controls[name]["level"] == "fail":
            return Answer(f"{sentence}: {controls[name]['reason']}", action)
    if findings := fields["diagnostics"]["findings"]:
        action = "close the other programs" if busy_with(fields) else "let the machine become idle"
        if not _varies_with_load(fields):
            action = "raise --pairs"
        sentence = f"the pairs are not independent: {'; '.join(findings.values())}"
        return Answer(sentence, f"{action} and run it again")
    if fields["metric"] == SHOWN:
        return Answer(f"not tested: {fields['reason']}", "read the log of B")
    failed = [run for run in fields["raw_runs"] if run["state"] != "completed"]
    if not failed:
        return Answer(f"nothing was measured: {fields['reason']}", "choose another --metric")
    states, arms = {run["state"] for run in failed}, sorted({run["arm"] for run in failed})
    first = failed[0]
    if states == {first["state"]} and first["state"] in _DID_TOO_LITTLE:
        return _DID_TOO_LITTLE[first["state"]]
    sentence = (
        f"not comparable: {len(failed)} of {len(fields['raw_runs'])} runs did not finish, in "
        f"{'both arms' if len(arms) == 2 else f'arm {arms[0]}'}, first in pair {first['pair']} "
        f"({str(first['state']).replace('_', ' ')})"
    )
    if states == {OVER_THE_LIMIT} and len(arms) == 2:
        return Answer(sentence, "run it again with a larger --budget")
    return Answer(sentence, f"read the log of {first['run']}")


_ALL, _FLIPPED = tuple(CONTROLS), ("manipulation",)
# An arm that did not finish, or ended when it showed what is asked, has not logged everything that would be compared.
VERDICTS = {
    FASTER: Meaning(Level.PASS, _different, _ALL),
    SLOWER: Meaning(Level.PASS, _different, _ALL),
    EQUIVALENT: Meaning(
        Level.PASS,
        lambda fields: Answer(
            f"{_change_of_b(fields)} makes no difference that matters: {_effect(fields)}, within the margin of "
            f"{_margin(fields)}",
            f"{_setting_action(fields, b=False)} and look for another cause",
        ),
        _ALL,
    ),
    DID_NOT_COMPLETE["A"]: Meaning(Level.PASS, _did_not_complete, _FLIPPED, is_in_logs=True),
    DID_NOT_COMPLETE["B"]: Meaning(Level.PASS, _did_not_complete, _FLIPPED, is_in_logs=True),
    ENDS_IT: Meaning(
        Level.PASS,
        lambda fields: Answer(
            f"{_change_of_b(fields)} ends it: {fields['reason']}",
            _setting_action(fields, b=True),
        ),
        _FLIPPED,
    ),
    ENDS_IT_HERE: Meaning(
        Level.PASS,
        lambda fields: Answer(
            f"{_change_of_b(fields)} ends it for this seed: {fields['reason']}",
            f"let the script take a seed, {_setting_action(fields, b=True)}",
        ),
        _FLIPPED,
    ),
    UNTESTED: Meaning(
        Level.UNKNOWN,
        lambda fields: Answer(
            f"could not be tested: {fields['reason']}",
            "repair the change, or the run, and test it again",
        ),
        is_in_logs=True,
    ),
    KEEPS_IT: Meaning(
        Level.PASS,
        lambda fields: Answer(
            f"{_change_of_b(fields)} does not end it: {fields['reason']}",
            f"{_setting_action(fields, b=False)} and look for another cause",
        ),
        _FLIPPED,
    ),
    NOT_SEEN: Meaning(
        Level.UNKNOWN,
        lambda fields: Answer(
            f"not tested: {fields['reason']}",
            "run it with more --steps or a longer --budget, as the run that showed it",
        ),
    ),
    INCONCLUSIVE: Meaning(Level.UNKNOWN, _inconclusive),
    PARITY_FAIL: Meaning(
        Level.FAIL,
        lambda fields: Answer(
            f"not comparable, the arms compute different things: {fields['controls']['parity']['reason']}",
            f"{_setting_action(fields, b=False)}, and compare the logs where the losses part",
        ),
        is_in_logs=True,
    ),
    INVALID: Meaning(Level.UNKNOWN, _invalid, is_in_logs=True),
}
DECIDED = frozenset(word for word, meaning in VERDICTS.items() if meaning.level is Level.PASS)


# Parts of sentences


def _settings(fields: Fields, *, b: bool) -> list[str]:
    """Return the changed settings with their values in an arm, as `key=value`; words of a command as they are."""
    texts = []
    for change in fields["changes"]:
        key, _, values = change.partition(": ")
        value = values.partition(" -> ")[2 if b else 0]
        if value == OWN:
            texts.append(f"{OWN} {key}")
        else:
            texts.append(value if key == WORDS else f"{key}={value}")
    return texts


def _change_of_b(fields: Fields) -> str:
    """Name what B changes."""
    settings = _settings(fields, b=True)
    if len(settings) > 1:
        return f"the bundle of {len(settings)} settings"
    return settings[0] if settings else "B"


def _arm(fields: Fields, *, b: bool) -> str:
    name, settings = "B" if b else "A", _settings(fields, b=b)
    return f"{name} ({settings[0]})" if len(settings) == 1 else name


def _setting_action(fields: Fields, *, b: bool) -> str:
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


def _effect(fields: Fields) -> str:
    """Return the effect with its interval: `time per step -26.0 % [-26.2, -25.7]`."""
    noun, ratios = METRICS[fields["metric"]].noun, (fields["effect"], *fields["interval"])
    mean, low, high = (math.inf if one is None else 100 * (one - 1) for one in ratios)
    if math.isinf(high):
        return f"{noun} {mean:+z.0f} %"
    half = (high - low) / 2
    # As many digits as the interval leaves certain.
    digits = min(3, max(0, -math.floor(math.log10(half)))) if half > 0 else 1
    if not half and fields["metric"] == "final_loss":
        return f"{noun} {mean:+z.{digits}f} % for this seed"
    return f"{noun} {mean:+z.{digits}f} % [{low:+z.{digits}f}, {high:+z.{digits}f}]"


def _margin(fields: Fields) -> str:
    return _percent(fields["margin"])


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _pair_s(fields: Fields) -> float:
    """Return the mean duration of a pair, in seconds."""
    seconds = sum(run["seconds"] for run in fields["raw_runs"])
    return float(seconds / max(1, fields["pairs_run"]))


def _more_pairs(fields: Fields, pairs: int) -> tuple[str, str]:
    """Return the action and the options that run a number of pairs, with a budget a quarter above the expected time."""
    minutes = math.ceil(pairs * _pair_s(fields) / 60)
    budget = max(5, math.ceil(1.25 * minutes))
    lasting = f" (about {minutes} min)" if minutes else ""
    return f"run {pairs} pairs{lasting}", f"--pairs {pairs} --budget {budget}m"
