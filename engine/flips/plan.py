"""The plan of a flip, written down and hashed before the first arm starts.

A flip runs two arms, A as in the spec and B with one setting changed, in pairs of fresh processes. The plan
fixes everything that could be adjusted afterwards to suit the result: the hypothesis, the metric and the
margin below which a difference does not matter, the number of pairs, the steps that count, the limits, and
the seed of the order. `sha256` covers all of it; a change of the plan after the start makes the verdict
exploratory.

Apart from the setting both arms are the same run: same rows, same seeds, same length. Both are shortened in
the same way: stopped after `steps` steps, no checkpoints, one held-out evaluation before the first step. When
the metric is a loss, each pair has a seed of its own, since the same seed would give the same number again.

An arm is a run of our spec, or of a command that is watched (`engine.flips.command`), whose words or environment
differ; `Plan.kind` says which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.decision import as_choice, is_choice_of_the_engine
from engine.errors import BadInput, SpecError
from engine.files import parse_json
from engine.flips.command import NOTHING, SEED, WORDS, Arm, Command, option_for
from engine.flips.script_settings import OWN, SCRIPT_SETTINGS
from engine.flips.statistics import ALPHA, LEVEL, PRIOR_WEIGHT
from engine.log.fold import Follower
from engine.log.folder import RunFolder, is_run, must_have_settings
from engine.log.observed import Observed, observed_fields
from engine.spec import GONE, RunSpec, build_spec, load_spec, parse_set

PAIRS_MIN = 4
PAIRS_MAX = 16
PAIRS_LIMIT = 64
"""Largest number of pairs that --pairs accepts."""
WARM_UP_STEPS = 3
MEASURED_STEPS_MIN = 3
STEPS = 12
STEPS_OF_LOADERS = 40
"""Number of steps of a flip of loader workers, whose first steps are not representative (`_warm_up`)."""
PREFETCHED = 2
"""Batches that each worker of a DataLoader prepares ahead."""
MARGIN = 0.05
BUDGET_S = 300.0
RUN_LIMIT_S = 300.0
LONGEST_S = 3 * 3600
"""Maximum time of all pairs for which a verdict or an estimate proposes a flip, in seconds."""
PARITY = 0.02
"""Allowed relative difference between the arms' losses at the same step."""


class Metric(NamedTuple):
    """A metric that can decide a flip, in words. Less of each is better."""

    definition: str
    noun: str
    less: str
    """Predicate of a setting that reduces it."""
    more: str
    """Predicate of a setting that increases it."""
    varies_with_load: bool = True
    """Whether other work on the machine changes it."""


METRICS = {
    "step_s": Metric("median step time, seconds", "time per step", "is faster", "is slower"),
    "peak_memory_bytes": Metric(
        "peak of the device's allocator, bytes",
        "peak memory",
        "needs less memory",
        "needs more memory",
        varies_with_load=False,
    ),
    "energy_per_token_j": Metric(
        "energy of the GPU over the measured steps by tokens, joules",
        "energy per token",
        "needs less energy",
        "needs more energy",
    ),
    "final_loss": Metric(
        "mean loss of the last quarter of the steps, nats",
        "final loss",
        "ends at a lower loss",
        "ends at a higher loss",
        varies_with_load=False,
    ),
}
BURSTS = 24
"""Number of steps that are averaged for a script: a multiple of usual numbers of loader workers, which yield their
batches in bursts."""
_SCRIPT_STEP_S = f"mean step time (from {4 * BURSTS} steps on, median of the means of {BURSTS} in a row), seconds"
SHOWN = "shown"
"""Metric of a flip that tests whether a setting ends something observed."""
_NAME = 40
"""Maximum length of a change in the name of the flip's folder, in characters."""
SEED_BY = "APR_WATCH_SEED_BY"
"""Environment variable: offset that the probe adds to a script's seeds, so that pairs are not copies of each other."""
EXTERNAL = ("run",)
"""Sections that are not part of the experiment: they say where a run is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that differs between the arms."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.text(b=False)} -> {self.text(b=True)}"

    def text(self, *, b: bool) -> str:
        """Return the value of an arm as text."""
        value = self.b if b else self.a
        if self.key == WORDS and value == "":
            return NOTHING
        if value is None:
            return OWN if self.key in SCRIPT_SETTINGS else "unset"
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    hypothesis: str = ""
    changes: tuple[Change, ...]
    """One change makes a flip; several make a bundle, whose verdict names no single cause; none compares A
    with A."""
    metric: str = "step_s"
    margin: float = MARGIN
    """Fraction below which a difference does not matter: 0.05 is 5 %."""
    alpha: float = ALPHA
    """A verdict is wrong in at most this fraction of experiments, however often the interval is checked."""
    pairs_min: int = PAIRS_MIN
    pairs_max: int = PAIRS_MAX
    steps: int = STEPS
    """Optimizer steps of each run."""
    warm_up_steps: int = WARM_UP_STEPS
    """Number of first steps that are not measured."""
    run_limit_s: float = RUN_LIMIT_S
    """A run that takes longer did not complete."""
    budget_s: float = BUDGET_S
    """A pair starts only if it is expected to end within this time."""
    parity: float = PARITY
    """Allowed relative difference between the arms' losses at the same step."""
    order_seed: int
    slow_a_by: float = 0.0
    """Fraction by which every step of A is deliberately lengthened in a control, otherwise 0."""
    spec: Mapping[str, Mapping[str, Any]]
    """Settings of arm A; empty where the arms are a command."""
    source: str
    """Spec file or run folder that A comes from, or the line of the command."""
    level: float = LEVEL
    """Level of the interval that decides: 1 - 2 alpha, because each end may be exceeded with probability alpha."""
    prior_weight: float = PRIOR_WEIGHT
    """Prior weight g of that interval."""
    command: Command | None = None
    """Command of the arms; None for a spec."""
    attempt: int = 0
    """Number of this test among the tests of its finding, from 1; later tests need more pairs
    (`statistics.pairs_to_confirm`). 0 in plans of earlier versions, which any three pairs of runs decide."""
    observed: Observed | None = None
    """Observation that B must end; None for a flip that measures a metric."""
    changes_on_purpose: str = ""
    """Part of the work that the change is registered to change (`engine.log.work.KINDS`); empty for none."""

    @property
    def kind(self) -> str:
        """Kind of an arm: `spec` for a run of the engine, `command` for a watched one."""
        return "spec" if self.command is None else "command"

    @property
    def subject(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of arm A by section, by which controls are matched."""
        if self.command is None:
            return self.spec
        about = dataclasses.asdict(self.command)
        return {"command": about | {"words": list(self.command.words), "steps": self.steps}}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def definition(self) -> str:
        """Definition of the metric, in words."""
        if self.observed is not None:
            return f"whether a run shows {self.observed.name}"
        if self.metric == "step_s" and self.kind == "command":
            return _SCRIPT_STEP_S
        return METRICS[self.metric].definition

    @property
    def has_one_seed(self) -> bool:
        """Whether the metric is a loss of a command without {seed}, so that each pair may run with the same seed."""
        words = () if self.command is None else self.command.words
        return bool(words) and self.metric == "final_loss" and not any(SEED in w for w in words)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(change.key for change in self.changes)

    @property
    def name(self) -> str:
        if not self.changes:
            return "control-slow" if self.slow_a_by else "control-same"
        names = (change.b if change.key == WORDS else change.key for change in self.changes)
        return "+".join(
            re.sub(r"[^\w+]+", "-", name).strip("-")[:_NAME] or "words" for name in names
        )

    def fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        for name in ("command", "observed", "attempt", "changes_on_purpose"):
            if not fields[name]:
                # Left out as in older files, so that the hash of their plans stays the same.
                del fields[name]
        if self.observed is not None:
            fields["observed"] = observed_fields(self.observed)
        return fields

    def to_json(self) -> str:
        return json.dumps(self.fields(), indent=2, sort_keys=True, allow_nan=False)

    def order(self) -> list[bool]:
        """Return for each pair whether B runs first.

        Two consecutive pairs share a fair coin from `order_seed` and run in opposite orders. With one coin per pair,
        a few pairs would often all have the same order, and the same arm would always run second.
        """
        coins = random.Random(self.order_seed)
        first = [coins.random() < 0.5 for _ in range(0, self.pairs_max, 2)]
        return [order for coin in first for order in (coin, not coin)][: self.pairs_max]

    def command_line(self, options: str = "") -> str:
        """Return the `engine flip` command that registers the same changes, with these options."""
        if self.command is None:
            sets = "".join(f" --set {change.key}={change.b}" for change in self.changes)
            return f"engine flip {self.source}{sets}{options}"
        arms, is_of_run = "", self.source != self.command.line
        for change in self.changes:
            options_of_a = {} if is_of_run else {option_for(change.key, "a"): change.a}
            for name, value in (options_of_a | {option_for(change.key): change.b}).items():
                if value is not None:
                    text = value if change.key == WORDS else f"{change.key}={value}"
                    arms += f" {name} {shlex.quote(text)}"
        if is_of_run:
            return f"engine flip {shlex.quote(self.source)}{arms}{options}"
        return f"engine flip{arms}{options} -- {self.command.line}"

    def arm_of_command(self, b: bool, out: Path, pair: int) -> Arm:
        """Return how to start a command's run in pair number `pair`, with the output folder `out`."""
        assert self.command is not None, "the arms are a command"
        changed = {change.key: change.b for change in self.changes if b}
        arm = self.command.arm(changed, out, pair)
        if self.attempt:
            arm.variables[SEED_BY] = str(pair - 1)
        return arm

    def arm(self, b: bool, out: Path, name: str, pair: int = 0) -> RunSpec:
        """Return the spec of an arm's run in pair number `pair`, stored in the folder `name` of `out`."""
        tree: dict[str, dict[str, Any]] = {key: dict(value) for key, value in self.spec.items()}
        if self.metric == "final_loss":
            tree["train"]["seed"] += pair
        elif self.attempt:
            tree["train"]["seed"] += pair - 1
        for change in self.changes if b else ():
            section, key = change.key.split(".")
            tree[section][key] = change.b
        if not b and self.slow_a_by:
            tree["compute"]["slow_by"] = self.slow_a_by
        tree["run"] = {"name": name, "out": str(out)}
        return build_spec(tree, file=f"arm {'B' if b else 'A'}", base=Path("/"), check_paths=False)

    def control(self, *, slow: bool) -> Plan:
        """Return the plan of a control: A against A, or A made slower by twice the margin against A. Flips on
        this machine must tell these two cases apart before a verdict counts as measured."""
        return dataclasses.replace(
            self,
            hypothesis=f"A made slower by {200 * self.margin:g} % is seen as slower"
            if slow
            else f"two runs of the same {self.kind} differ in {self.metric} by less than {100 * self.margin:g} %",
            changes=(),
            order_seed=self.order_seed + (2 if slow else 1),
            slow_a_by=2 * self.margin if slow else 0.0,
        )


def read_plan(text: str) -> Plan:
    """Read a plan that `to_json` wrote. Raises ValueError, TypeError or KeyError for another text."""
    fields = parse_json(text, "plan.json", "plan")
    fields["changes"] = tuple(Change(**change) for change in fields["changes"])
    if command := fields.get("command"):
        fields["command"] = Command(**command | {"words": tuple(command["words"])})
    if observed := fields.get("observed"):
        fields["observed"] = Observed(**observed)
    return Plan(**fields)


def load_source(path: Path, sets: Sequence[str] = ()) -> RunSpec:
    """Load the spec of a run folder, or of a TOML file overridden by `sets`. Raises BadInput."""
    if path.is_dir():
        run = RunFolder(path)
        if not run.effective.is_file():
            raise BadInput.expected("run folder", path, "effective.json", "none")
        must_have_settings(run)
        tree = run.read_effective()["spec"]
        return build_spec(tree, file=str(run.effective), base=Path("/"), check_paths=False)
    return load_spec(path, list(sets))[0]


def make_plan(
    source: Path, sets: Sequence[str], *, base_sets: Sequence[str] = (), **how: Any
) -> Plan:
    """Make a plan of a spec with one setting changed, and check everything that can be checked before a process starts.
    Raises BadInput.

    `sets` are the changes of arm B as on the command line, `teacher.backend=quantized`; `base_sets` are settings of
    both arms; `how` are fields of the plan.
    """
    base = load_source(source, base_sets)
    spec = _shortened(base, how.get("steps", STEPS))
    changes = _changes(base, sets)
    _refuse_own_choices(source, changes)
    return _register(changes, spec=spec, source=str(source.absolute()), **how)


def _refuse_own_choices(source: Path, changes: Sequence[Change]) -> None:
    """Refuse a value of B that the engine chose by itself in the run that A comes from: both arms would be the same."""
    automatic = [change for change in changes if is_choice_of_the_engine(change.a)]
    if not automatic or not is_run(source):
        return
    logged = {one.knob: one for one in Follower(RunFolder(source)).read_all().decisions}
    for change in automatic:
        decision = logged.get(change.key)
        # An overridden decision came from an environment variable, which may have changed since.
        if decision and not decision.overridden and decision.choice == as_choice(change.b):
            raise BadInput.expected(
                f"--set {change.key}",
                decision.choice,
                "another value than arm A's",
                f"that the run chose {decision.choice} by itself: {decision.reason}",
                hint=f"`engine flip {source} --propose` lists what can be tested",
            )


def make_command_plan(
    words: Sequence[str],
    a: Mapping[str, str | None],
    b: Mapping[str, str | None],
    *,
    folder: str | None = None,
    source: str = "",
    copied: bool = False,
    **how: Any,
) -> Plan:
    """Make a plan of a command with other words, another environment or a setting that the probe changes. Raises
    BadInput.

    `a` and `b` map WORDS to what replaces `{}` in each arm, and the names of variables and of SCRIPT_SETTINGS to their
    values. A variable that an arm lacks keeps its current value, a setting that of the script. The command starts in
    `folder`, by default the current one; `source` is the run folder that it comes from.
    """
    defaults: dict[str, str | None] = {
        name: None if name in SCRIPT_SETTINGS else os.environ.get(name) for name in {**a, **b}
    }
    if WORDS in defaults:
        defaults[WORDS] = ""
    arms = {**defaults, **a}, {**defaults, **b}
    command = Command(
        words=tuple(words), folder=folder or os.getcwd(), settings=arms[0], copied=copied
    )
    changes = tuple(
        Change(key=key, a=value, b=arms[1][key])
        for key, value in arms[0].items()
        if value != arms[1][key]
    )
    workers = _workers(changes)
    how = {"steps": STEPS_OF_LOADERS if workers else STEPS} | how
    how["warm_up_steps"] = _warm_up(workers, how["steps"])
    _check_command(command, changes, arms)
    return _register(changes, spec={}, source=source or command.line, command=command, **how)


def _workers(changes: Sequence[Change]) -> int:
    """Return the largest number of loader workers that the changes name; 0 where they name none."""
    texts = (f"{change.key}={value}" for change in changes for value in (change.a, change.b))
    return max(
        (int(n) for text in texts for n in re.findall(r"workers?[= ](\d{1,3})\b", text)), default=0
    )


def _warm_up(workers: int, steps: int) -> int:
    """Return the number of steps that are not measured. During a slow first step, workers prepare batches ahead, for
    which the next steps do not wait; counting these would make more workers look faster than they are."""
    return min(WARM_UP_STEPS + PREFETCHED * workers, max(WARM_UP_STEPS, steps // 2))


def _check_command(
    command: Command, changes: Sequence[Change], arms: Sequence[Mapping[str, str | None]]
) -> None:
    if WORDS in arms[0] and not any(WORDS in word for word in command.words):
        raise BadInput.expected(
            "command", command.line, f"{WORDS} where the words of --a and --b belong", "none"
        )
    if not changes:
        found = ", ".join(f"{key} {value!r}" for key, value in arms[0].items())
        raise BadInput.expected("arms", "of the flip", "arms that differ", f"{found} in both")
    for changed in arms:
        try:
            program = command.arm(changed, Path(), 0).words[0]
        except ValueError as error:
            found = repr(changed[WORDS])
            raise BadInput.expected(
                "words", found, "words quoted as in a shell", str(error)
            ) from error
        except IndexError:
            program = ""
        if "/" in program:
            program = os.path.join(command.folder, program)
        if shutil.which(program) is None:
            raise BadInput.expected("command", program or "''", "a program to start", "none")


def _register(
    changes: tuple[Change, ...], *, run_limit_s: float | None = None, **fields: Any
) -> Plan:
    """Make the plan of these changes. A run may take half the budget, so that one pair always fits, up to
    RUN_LIMIT_S."""
    plan = Plan(changes=changes, **fields)
    _check_numbers(plan)
    changed = " and ".join(map(str, changes)) or "nothing"
    hypothesis = f"{changed} changes {plan.metric} by more than {100 * plan.margin:g} %"
    return dataclasses.replace(
        plan,
        hypothesis=plan.hypothesis or hypothesis,
        run_limit_s=run_limit_s or min(RUN_LIMIT_S, plan.budget_s / 2),
    )


def _check_numbers(plan: Plan) -> None:
    least = WARM_UP_STEPS + MEASURED_STEPS_MIN
    for name, is_valid, expected, found in (
        ("metric", plan.metric in METRICS, f"one of {', '.join(METRICS)}", plan.metric),
        ("margin", 0 < plan.margin < 1, "a share between 0 and 1", f"{plan.margin:g}"),
        (
            "steps",
            plan.steps >= least,
            f"at least {least}, of which {WARM_UP_STEPS} warm up",
            plan.steps,
        ),
        ("pairs", 0 < plan.pairs_max <= PAIRS_LIMIT, f"1 to {PAIRS_LIMIT}", plan.pairs_max),
        ("budget", plan.budget_s > 0, "more than 0 seconds", f"{plan.budget_s:g}"),
    ):
        if not is_valid:
            raise BadInput.expected(name, "of the flip", expected, str(found))


def _changes(base: RunSpec, sets: Sequence[str]) -> tuple[Change, ...]:
    """Return the settings that B changes, each value parsed as its setting's type."""
    requested = dict(parse_set(argument) for argument in sets)
    if removed := [
        f"--set {key}: {GONE[key].refusal(requested[key])}" for key in requested if key in GONE
    ]:
        raise SpecError(removed)
    changed = build_spec(base.to_dict(), file="the spec", base=Path("/"), sets=list(sets)).to_dict()
    tree = base.to_dict()
    changes, problems = [], []
    for dotted in requested:
        section, key = dotted.split(".")
        a, b = tree[section][key], changed[section][key]
        if section in EXTERNAL:
            problems.append(
                f"--set {dotted}: expected a setting of the training, found one of where the run is stored"
            )
        elif a == b:
            problems.append(
                f"--set {dotted}: expected another value than arm A's, found {b!r} in both"
            )
        changes.append(Change(key=dotted, a=a, b=b))
    if problems:
        raise SpecError(problems)
    return tuple(changes)


def _shortened(spec: RunSpec, steps: int) -> dict[str, dict[str, Any]]:
    tree = spec.to_dict()
    # Stop early instead of shortening the run: whatever depends on the length of a run (its schedule, whether
    # compiling pays) then stays as in the full run.
    tree["train"]["stop_after"] = steps
    tree["train"]["steps"] = max(tree["train"]["steps"], steps)
    tree["eval"] |= {"every": 0, "rows": min(tree["eval"]["rows"], 16)}
    tree["checkpoint"] |= {"every": 0, "at_end": False}
    # The plan alone limits how long an arm may take.
    tree["watch"]["on_stall"] = "report"
    return tree
