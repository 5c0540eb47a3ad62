"""A flip as text: its plan, a line for each pair, and its verdict. Every surface prints these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.flips.arms import Outcome
from engine.flips.command import SEED, TRACKERS
from engine.flips.pair import Pair, count_of
from engine.flips.plan import SHOWN, Plan
from engine.flips.statistics import Interval
from engine.flips.verdicts import answer
from engine.units import NOT_MEASURED, format_bytes, format_seconds, format_value


def plan_lines(plan: Plan) -> list[str]:
    """Describe what was registered before anything runs."""
    what = "flip" if len(plan.changes) == 1 else "bundle: its verdict names no single cause"
    metric = (
        f"metric: {plan.metric} ({plan.definition}; less is better), margin {plan.margin:.1%},"
        f" level {plan.level:.0%}"
    )
    runs = f"of {plan.steps} steps, the first {plan.warm_up_steps} warm up"
    if plan.observed is not None:
        metric = f"question: {plan.definition} ({plan.observed.text})"
        lasting = format_seconds(plan.observed.window_s) if plan.observed.window_s else ""
        runs = f"until a run shows it, or has made {plan.steps} steps{lasting and f' and gone on for {lasting}'}"
    return [
        f"hypothesis: {plan.hypothesis}",
        *(f"{what}: {change}" for change in plan.changes),
        *_command_lines(plan),
        metric,
        f"pairs: {plan.pairs_min} to {plan.pairs_max} {runs}, order by seed {plan.order_seed}",
        f"source: {plan.source}",
        f"plan sha256: {plan.sha256}",
    ]


def _command_lines(plan: Plan) -> list[str]:
    """Describe how the runs of a command are started."""
    if plan.command is None:
        return []
    where = plan.command.folder
    if plan.command.copied:
        where = f"a copy of {where} that is removed afterwards"
    trackers = " ".join(f"{name}={value}" for name, value in TRACKERS.items())
    lines = [
        f"each run: {'' if plan.observed else f'ended after {plan.steps} optimizer steps, '}in {where}",
        f"trackers are offline: {trackers}",
    ]
    if plan.has_one_seed:
        lines.append(
            f"seed: no {SEED} in the command; if the script sets its own, all pairs are the same and one decides"
        )
    return lines


def pair_heading(plan: Plan) -> str:
    if plan.observed is not None:
        return f"{'pair':>4}  {'order':5}  {'A':>12}  {'B':>12}"
    return f"{'pair':>4}  {'order':5}  {'A':>12}  {'B':>12}  {'B/A':>7}  {plan.metric} B/A so far"


def pair_line(plan: Plan, pair: Pair, interval: Interval | None) -> str:
    """Format one line of the table of pairs."""
    ratio = "-" if pair.difference is None else f"{math.exp(pair.difference):.3f}"
    values = [value_text(plan.metric, o) for o in pair.arms]
    order = "B A" if pair.b_first else "A B"
    so_far = "-" if interval is None else interval_text(interval)
    line = f"{pair.number:>4}  {order:5}  {values[0]:>12}  {values[1]:>12}"
    if plan.observed is None:
        line += f"  {ratio:>7}  {so_far}"
    ends = [f"{o.arm} {o.in_words()}" for o in pair.arms if not o.completed]
    return "\n".join([line, *(f"      {text}" for text in ends)])


def value_text(metric: str, outcome: Outcome) -> str:
    """Format the metric of one run, or the state in which it ended."""
    if metric == SHOWN:
        return {True: "shows it", False: "does not", None: outcome.state}[outcome.shown]
    if outcome.value is None:
        return outcome.state if not outcome.completed else NOT_MEASURED
    value = outcome.value
    if metric.endswith("_bytes"):
        return format_bytes(value)
    if metric == "step_s":
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.3f} s"
    return format_value(value)


def interval_text(interval: Interval) -> str:
    if math.isinf(interval.high):
        return f"{interval.ratio:.3f} (too few pairs for an interval)"
    return f"{interval.ratio:.3f} [{math.exp(interval.low):.3f}, {math.exp(interval.high):.3f}]"


def answer_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return the content of verdict.json in one sentence, and the next action."""
    found = answer(fields)
    return [found.sentence, f"next: {found.action}"]


def verdict_lines(fields: Mapping[str, Any]) -> list[str]:
    """Describe the content of verdict.json for a person: the sentence, the next action, then the details."""
    return [*answer_lines(fields), "details", *(f"  {line}" for line in detail_lines(fields))]


def detail_lines(fields: Mapping[str, Any]) -> list[str]:
    """Return the details of a verdict: statistics, proofs, controls, and the next commands."""
    broken = ", interrupted" if fields["interrupted"] else ""
    out = [f"{fields['verdict']} ({fields['class']}{broken}): {fields['reason']}"]
    if fields["effect"] is not None:
        noise = fields["diagnostics"]["deviation"]
        pairs = f"{fields['n_pairs']} of {count_of(fields['pairs_run'])}"
        out.append(f"{pairs} compared, deviation between pairs {noise:.1%}")
    out += [f"left out: {text}" for text in fields["diagnostics"]["left_out"]]
    out += [
        f"{name}: {control['level']}: {control['reason']}"
        for name, control in fields["controls"].items()
    ]
    out += [f"not measured because of {text}" for text in fields["why_grade"]]
    out += [
        f"also changed: {name} B/A {guard['ratio']:.3f}"
        for name, guard in fields["guards"].items()
        if guard["differs"]
    ]
    out.append(f"took {format_seconds(fields['cost_s'])} on {fields['host']['device_name']}")
    return [*out, *fields["next"]]


def verdict_line(fields: Mapping[str, Any]) -> str:
    """Return one line for a flip in a list. The verdict comes first, because a long line is cut off at its end."""
    effect = "" if fields["effect"] is None else f"  B/A {fields['effect']:.3f}"
    broken = ", interrupted" if fields["interrupted"] else ""
    changes = "; ".join(fields["changes"])
    pairs = count_of(fields["n_pairs"])
    return f"{fields['verdict']} ({fields['class']}{broken}){effect}  {changes}  {pairs}"
