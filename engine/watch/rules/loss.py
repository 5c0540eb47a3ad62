"""Rules about the loss: compared with that of guessing, ln V, and with its earlier values (rises, spikes, a rising
held-out loss)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from engine.catalogue import BY_ID
from engine.log.events import FAIL, IDENTITY, PASS
from engine.watch.rules.rule import (
    MAD_TO_SIGMA,
    CannotJudge,
    Case,
    Number,
    Span,
    Symptom,
    mean,
    median,
    rule,
    sigma,
)

NON_FINITE_STEPS = 3
"""Number of consecutive non-finite losses of a watched script that raise the alert."""
GUESSING_STEPS = 50
GUESSING_FROM = 100
"""Steps after which a student trained from scratch must be better than guessing; a few tens are normal."""
STAYS_FROM = 500
"""Steps after which a loss near ln V is judged: a warm-up may keep it there before."""
STAYS_NEAR = 0.03
"""Relative distance below ln V within which a loss counts as near ln V."""
STAYS_VOCABULARY = 4
"""Smallest number of classes that is judged; with fewer, a loss near ln V may be the best possible."""
CONSTANT_STEPS, CONSTANT, ZERO_LOSS = 30, 2e-6, 1e-5
"""Minimum number of losses; their maximum difference by rounding, as a share of the first loss; loss up to which it
counts as 0."""
RISE_FROM, RISE_ROWS = 100, 30
"""Steps since the start, and logged steps, from which a rise is not the transient of a warm-up."""
RISE_FIRST, RISE_NEWEST = 5, 50
"""Number of first and of newest steps whose median losses are compared."""
RISE_TIMES = 1.2
"""Minimum ratio of a risen loss to the level of the first steps."""
RISE_SIGMAS = 3.0
"""Minimum distance of a risen cross entropy above the first step's, in robust sigmas of the newest steps."""
RISE_SIGMAS_UNKNOWN, RISE_SIGMAS_OF_LOG = 4.0, 6.0
"""Minimum distance of a risen loss of unknown kind above the first losses, in robust sigmas of the newest losses and
of their logarithms; the lower of the two limits counts."""
RISE_BELOW = 25
"""Number of steps of which one may be below the first loss, because a noisy loss is sometimes lower."""
RISE_WITHIN = 10
"""Logged steps within which a loss of unknown kind must have risen; a later rise may be a harder stage of a
curriculum."""
RISE_SLOWS = 1.65
"""Minimum ratio of the rise in the first RISE_WITHIN steps to the rise in the next 2 * RISE_WITHIN: the loss of an
annealed term continues to rise."""
RISE_LUCK = 2.0
"""Distance that the loss of a lucky first batch may be below the true level, in robust sigmas."""
RISE_RETURNS = 0.25
"""Fall of the loss between the last two windows from which it counts as recovering, as a share of its rise."""
RISE_FAR = 3.0
"""Ratio of the lowest loss after an explosion to the first loss from which the scatter is ignored."""
RISE_EXPLODES, RISE_EXPLODES_ROWS = 10.0, 3
"""Minimum ratio of the losses of an explosion to the first loss and to the newest losses, and minimum number of such
losses in the first RISE_WITHIN steps: one bad batch is no explosion. If the loss then stays above the first loss,
nothing was learnt."""
DESTROYED = (
    "the first updates destroyed the initial weights: most often the learning rate is far too large"
)
"""Meaning of a loss that rose in the first steps."""
SPIKE_BEFORE, SPIKE_WINDOW = 50, 100
SPIKE_SIGMAS, SPIKE_RATIO = 8.0, 1.5
"""Minimum height of a spike, in sigmas and as a ratio. Sigmas alone would flag a ripple on a smooth curve, and a
ratio alone a noisy batch."""
SPIKE_OF_FIRST = 0.15
"""Minimum height of a spike as a share of the first losses: the noise of a loss near 0 is relatively large, and harms
nothing."""
SPIKE_TRIED, SPIKE_PEAKS, SPIKE_BACK, SPIKE_AFTER = 20, 3, 30, 5
"""Number of high losses of a log that are examined; maximum number of peaks near a spike with a third of its height;
steps within which it must be over; minimum number of steps after it."""
SPIKE_SIGMAS_OF_LOG = 5.0
"""Height of a spike of an imported log in robust sigmas of the logarithm."""
SINCE_ROWS = 2000
"""Number of steps before a window that are searched for the first wrong step."""
HELDOUT_LEAST = 4
HELDOUT_WORSE_NATS = 0.05
HELDOUT_SIGMAS = 3.0
"""Minimum distance of a diverging held-out loss above its best, in robust sigmas of the change between two
evaluations."""
HELDOUT_NOISE = 8
"""Number of evaluations from which their noise is estimated."""
HELDOUT_IN_A_ROW = 3


@rule(
    reads=("non_finite events",),
    threshold="one number",
)
def non_finite(case: Case) -> Symptom | None:
    if case.view.is_foreign:
        return _non_finite_losses(case)
    non_finite_numbers = case.view.non_finite
    if not non_finite_numbers:
        case.steps(1, at_least=1)
        return None
    first, last = non_finite_numbers[0], non_finite_numbers[-1]
    rows = case.steps(1, at_least=1, session=False)
    return Symptom(
        f"{first.id} was {first.text} at step {first.step}"
        + (
            f", and {len(non_finite_numbers) - 1} more up to step {last.step}"
            if len(non_finite_numbers) > 1
            else ""
        ),
        [("numbers that are not finite", len(non_finite_numbers), "expected 0")],
        case.span(rows),
        meaning="the weights or a batch gave NaN or infinity; everything after it is suspect",
        part=first.id,
        **case.lower_learning_rate(10),
    )


def _non_finite_losses(case: Case) -> Symptom | None:
    """Judge a watched script by its newest losses. A single infinite loss may be a step that the gradient scaler
    skips."""
    rows = case.steps(NON_FINITE_STEPS, at_least=1)
    losses = case.view.steps.values("loss", rows.start, rows.stop)
    known = [loss for loss in losses if loss is not None]
    if len(known) < NON_FINITE_STEPS or any(math.isfinite(loss) for loss in known):
        return None
    begin = rows.start
    everything = case.view.steps.values("loss", 0, begin)
    while begin and not math.isfinite(everything[begin - 1] or 0.0):
        begin -= 1
    meaning, remedy = (
        "the loss is not finite; whether the weights are is unknown",
        case.lower_learning_rate(10),
    )
    levels = {i.level for i in case.view.identities if i.id == "finite_weights"}
    if FAIL in levels:
        meaning = "the weights are NaN and remain NaN: the model learns nothing any more"
    elif PASS in levels:
        meaning = "the weights are finite: the loss alone is not"
        has_labels = not any(
            identity.id == "label_coverage" and identity.numbers.get("labels") == 0
            for identity in case.view.identities
        )
        remedy = {
            "no_flip": "check what the loss divides by or takes the logarithm of"
            if has_labels
            else BY_ID[IDENTITY]["label_coverage"].remedy
        }
    return Symptom(
        f"the loss has been {known[-1]} for {rows.stop - begin} steps",
        [("losses that are not finite", rows.stop - begin, "expected 0")],
        case.span(range(begin, rows.stop)),
        meaning=meaning,
        **remedy,
    )


@rule(
    reads=("ce", "vocabulary"),
    threshold=f"mean ce of {GUESSING_STEPS} steps at ln V or above, from step {GUESSING_FROM} on",
)
def loss_not_below_guessing(case: Case) -> Symptom | None:
    ceiling = case.vocabulary_nats
    rows = case.steps(GUESSING_STEPS, at_least=GUESSING_STEPS)
    if case.view.last_step < GUESSING_FROM:
        raise CannotJudge(f"needs {GUESSING_FROM} steps since the start of the run")
    ce = mean(case.column(case.cross_entropy, rows))
    if ce < ceiling:
        return None
    return Symptom(
        f"cross entropy is {ce:.3f}: not below ln V = {ceiling:.3f}, the loss of guessing",
        [("ce, mean", ce, f"ln V = {ceiling:.4f}")],
        _since(case, case.cross_entropy, rows, ceiling, GUESSING_STEPS),
        meaning="the student is worse than uniform guessing: a wrong forward pass, wrong labels, or a diverged run",
        **case.lower_learning_rate(10),
    )


@rule(
    reads=("ce", "vocabulary"),
    threshold=f"mean ce of the newest {GUESSING_STEPS} steps and of as many half-way less than {STAYS_NEAR:.0%} below "
    f"ln V, from step {STAYS_FROM} on, with {STAYS_VOCABULARY} tokens or more",
)
def loss_stays_at_guessing(case: Case) -> Symptom | None:
    ceiling = case.vocabulary_nats
    if ceiling < math.log(STAYS_VOCABULARY):
        raise CannotJudge(f"fewer than {STAYS_VOCABULARY} tokens: there may be little to learn")
    rows = case.steps(GUESSING_STEPS, at_least=GUESSING_STEPS)
    if case.view.last_step < STAYS_FROM:
        raise CannotJudge(f"needs {STAYS_FROM} steps since the start of the run")
    name, low = case.cross_entropy, (1 - STAYS_NEAR) * ceiling
    ce = mean(case.column(name, rows))
    # At ln V or above `loss_not_below_guessing` applies; if the loss was lower half-way, something was learnt.
    half_way = range(rows.start // 2, rows.start // 2 + GUESSING_STEPS)
    if not low <= ce < ceiling or mean(case.column(name, half_way)) < low:
        return None
    return Symptom(
        f"after {case.view.last_step} steps cross entropy is {ce:.3f}, close to guessing: ln V = {ceiling:.3f}",
        [("ce, mean", ce, f"less than {STAYS_NEAR:.0%} below ln V = {ceiling:.4f}")],
        case.span(rows),
        meaning="nothing is learnt: a learning rate far too large or too small, or labels that do not depend on the "
        "inputs",
        **case.lower_learning_rate(100),
    )


@rule(
    reads=("loss",),
    threshold=f"each loss of the run, {CONSTANT_STEPS} or more, is the same within {CONSTANT:g} of it, and not 0",
)
def loss_is_constant(case: Case) -> Symptom | None:
    rows = case.steps(len(case.view.steps), at_least=CONSTANT_STEPS, session=False)
    # A loss of 0 may be intended, as in GRPO.
    first = case.column("loss", rows[:1])[0]
    if abs(first) < ZERO_LOSS:
        raise CannotJudge("the first loss is 0")
    if any(abs(loss - first) > CONSTANT * abs(first) for loss in case.column("loss", rows)):
        return None
    return Symptom(
        f"the loss has been {first:.6g} in each of {len(rows)} steps",
        [("loss", first, "expected to differ from batch to batch")],
        case.span(rows),
        meaning="the loss does not depend on the weights or the data: the reference model is the policy itself (ln 2 "
        "in DPO), an output is saturated or detached, or every batch is the same",
        no_flip="compare the two sides of the loss, and the outputs of two different batches",
    )


@rule(
    reads=("loss",),
    threshold=f"median loss of the newest {RISE_NEWEST} steps {RISE_TIMES:g} times that of the first {RISE_FIRST}, or "
    f"of the first and {RISE_SIGMAS:g} robust sigmas above it, with hardly a step below; where it is not known to be a "
    f"cross entropy {RISE_SIGMAS_UNKNOWN:g} sigmas above it since the first "
    f"{RISE_WITHIN} logged steps; or not below the first, with {RISE_EXPLODES_ROWS} of the first {RISE_WITHIN} over "
    f"{RISE_EXPLODES:g} times both; from step {RISE_FROM} and {RISE_ROWS} logged steps on",
)
def loss_rose_for_good(case: Case) -> Symptom | None:
    all_rows = case.steps(len(case.view.steps), at_least=RISE_ROWS, session=False)
    if case.view.last_step < RISE_FROM:
        raise CannotJudge(f"needs {RISE_FROM} steps since the start of the run")
    first_step, second_step = case.column("step", all_rows[:2])
    if first_step > 2 * (second_step - first_step):
        raise CannotJudge("the first steps of the run are not in its log")
    is_known = _is_cross_entropy(case)
    if not is_known:
        case.require_loss_should_fall()
    rows = all_rows[-min(RISE_NEWEST, len(all_rows) // 2) :]
    newest, start = case.column("loss", rows), case.column("loss", all_rows[:RISE_FIRST])
    now, lowest = median(newest), sorted(newest)[len(newest) // RISE_BELOW]
    level, first_loss = median(start), start[0]
    if (
        explosion := _exploded(case.pairs("loss", "step", all_rows[:RISE_WITHIN]), now)
    ) is not None:
        peak, step = explosion
        return Symptom(
            f"the loss rose from {first_loss:.3g} to {peak:.4g} and is {now:.3g} after {case.view.last_step} steps: "
            "not below its start",
            [
                (
                    f"loss, median of the newest {len(newest)}",
                    now,
                    f"expected less than {first_loss:.4g}",
                )
            ],
            replace(case.span(all_rows), first_step=step),
            meaning=DESTROYED,
            **case.lower_learning_rate(100),
        )
    if now < RISE_TIMES * min(level, first_loss):
        return None
    if is_known:
        above_level = now >= RISE_TIMES * level and lowest > level
        above_first = (
            now >= max(RISE_TIMES * first_loss, first_loss + RISE_SIGMAS * sigma(newest))
            and min(newest) > first_loss
        )
    else:
        losses = case.column("loss", all_rows)
        above_level, above_first = (
            _rose_at_once(losses, start_loss, newest) for start_loss in (level, first_loss)
        )
    if level > 0 and above_level:
        first, reference = level, f"the median of the first {RISE_FIRST}"
    elif first_loss > 0 and above_first:
        first, reference = first_loss, "the first loss"
    else:
        return None
    return Symptom(
        f"the loss rose from {first:.3g} to {now:.3g} and has not come back in {case.view.last_step} steps",
        [
            (
                f"loss, median of the newest {len(newest)}",
                now,
                f"expected less than {RISE_TIMES:g} times {first:.4g}, {reference}",
            ),
            ("loss, lowest without outliers", lowest, f"{first:.4g} at the start"),
        ],
        _since(case, "loss", rows, first, RISE_WITHIN),
        meaning=DESTROYED,
        **case.lower_learning_rate(100),
    )


def _exploded(losses: Sequence[tuple[float, float]], now: float) -> tuple[float, int] | None:
    """Return the peak of an explosion in the first steps, and its first step. None if there was no explosion, or if
    `now`, the present loss, is below the first loss."""
    first = losses[0][0]
    high = [(loss, step) for loss, step in losses if loss >= RISE_EXPLODES * max(first, now)]
    if not 0 < first <= now or len(high) < RISE_EXPLODES_ROWS:
        return None
    return max(high)[0], int(high[0][1])


def _since(case: Case, name: str, rows: range, limit: float, window: int) -> Span:
    """Return the span of the rows, extended back over each earlier window whose mean loss is at or above the
    limit."""
    begin = rows.start
    for stop in range(begin, max(0, begin - SINCE_ROWS), -window):
        before = case.view.steps.values(name, max(0, stop - window), stop)
        if not before or mean([limit if loss is None else loss for loss in before]) < limit:
            break
        begin = max(0, stop - window)
    return case.span(range(begin, rows.stop))


def _scatter(newest: Sequence[float], rest: Sequence[float]) -> float:
    """Return the larger of two robust sigmas: of the newest losses, and of the changes from step to step."""
    steps = [(right - left) / math.sqrt(2) for left, right in itertools.pairwise(rest)]
    return max(sigma(newest), sigma(steps))


def _rose_at_once(losses: list[float], first: float, newest: list[float]) -> bool:
    """Return whether a loss of unknown kind rose from `first` within its first steps by more than its scatter, and
    has stayed high since, as after an update that was far too large. False if a loss is 0 or negative, because ratios
    are compared."""
    if min(losses) <= 0:
        return False
    rest, window = losses[RISE_WITHIN:], len(newest)
    reached, after = median(rest[:RISE_WITHIN]), median(rest[RISE_WITHIN : 3 * RISE_WITHIN])
    now, before = median(newest), median(losses[-2 * window : -window])
    spread = _scatter(newest, rest)
    # Some losses scatter in proportion to their size; after a rise that scatter can be as large as the rise.
    sigma_of_log = _scatter([math.log(x) for x in newest], [math.log(x) for x in rest])
    scatter = min(
        first + RISE_SIGMAS_UNKNOWN * spread, first * math.exp(RISE_SIGMAS_OF_LOG * sigma_of_log)
    )
    # `first` may be the loss of a lucky batch.
    at_once = reached - first - RISE_LUCK * min(spread, first)
    # The loss exploded, and even its lowest value since then is far above the start.
    if max(losses[:RISE_WITHIN]) > now and min(rest) >= RISE_FAR * first:
        return True
    return (
        min(now, reached) >= max(RISE_TIMES * first, scatter)
        and at_once >= RISE_SLOWS * (after - reached)
        and before - now <= RISE_RETURNS * (now - first)
        and sorted(rest)[len(rest) // RISE_BELOW] > first
    )


def _is_cross_entropy(case: Case) -> bool:
    try:
        return bool(case.cross_entropy)
    except CannotJudge:
        return False


@rule(
    reads=("check teacher_knows_text",),
    threshold="cross entropy on held-out text at that of token frequencies or above, and below ln V",
)
def teacher_off_text(case: Case) -> Symptom | None:
    check = case.view.checks.get("teacher_knows_text")
    names = ("ce", "frequencies", "ln_vocabulary")
    numbers = {} if check is None else check.numbers
    values = [value for name in names if (value := numbers.get(name)) is not None]
    if check is None or len(values) < len(names):
        raise CannotJudge("teacher_knows_text has no numbers in this session")
    ce, frequencies, ln_v = values
    # If the result is a failure, the check reports it.
    if check.level != "unknown" or not ce >= frequencies:
        return None
    return Symptom(
        f"the teacher does not know this kind of text: its cross entropy is {ce:.2f} nats",
        [
            ("cross entropy, nats", ce, f"token frequencies alone have {frequencies:.4f}"),
            ("cross entropy, nats", ce, f"ln V = {ln_v:.4f}"),
        ],
        case.recent(0.0),
        meaning="it predicts this text worse than token frequencies do, so the student can learn little from it",
        flip="--set loss.alpha=1",
    )


@rule(
    reads=("loss",),
    threshold=f"{SPIKE_SIGMAS:g} robust sigmas and {SPIKE_RATIO:g} times the median of the "
    f"{SPIKE_BEFORE} steps before, and {SPIKE_OF_FIRST:.0%} of the first losses above it, within {SPIKE_WINDOW} steps",
)
def loss_spike(case: Case) -> Symptom | None:
    is_log = case.view.imported is not None
    if is_log and not case.is_over:
        raise CannotJudge("the log is not read to its end")
    newest = len(case.view.steps) if is_log else SPIKE_BEFORE + SPIKE_WINDOW
    rows = case.steps(newest, at_least=SPIKE_BEFORE + 1, session=not is_log)
    numbered = case.pairs("loss", "step", rows)
    losses = [loss for loss, _ in numbered]
    first = [loss for loss in case.view.steps.finite("loss")[:RISE_FIRST]]
    least = SPIKE_OF_FIRST * abs(median(first)) if first else 0.0
    if len(losses) <= SPIKE_BEFORE:
        raise CannotJudge(f"needs {SPIKE_BEFORE + 1} finite losses")
    spikes: list[tuple[float, int, float]] = []
    for index in range(SPIKE_BEFORE, len(losses)):
        # The median of the preceding steps changes little, so it is computed only every ten steps.
        if (index - SPIKE_BEFORE) % 10 == 0:
            before = losses[index - SPIKE_BEFORE : index]
            level = median(before)
            spread = MAD_TO_SIGMA * median([abs(x - level) for x in before])
            limit = max(level + SPIKE_SIGMAS * spread, SPIKE_RATIO * level, level + least)
        if losses[index] > limit:
            spikes.append((-losses[index], index, limit))
    spikes.sort()
    if is_log:
        spikes = [
            spike for spike in spikes[:SPIKE_TRIED] if _is_spike(case, rows, losses, spike[1])
        ]
    if not spikes:
        return None
    loss, index, limit = -spikes[0][0], *spikes[0][1:]
    step = int(numbered[index][1])
    shown = "" if case.view.is_foreign else f" (`engine data RUN --step {step}` shows it)"
    return Symptom(
        f"the loss jumped to {loss:.3f} at step {step}",
        [
            (
                "loss",
                loss,
                f"over {limit:.4f}: {SPIKE_SIGMAS:g} sigma and {SPIKE_RATIO:g} times usual",
            ),
            *rate_and_norm(case, rows, index),
        ],
        replace(case.span(rows), first_step=step),
        meaning=f"a batch unlike the others{shown}, a learning rate too high, or a hardware error",
        **case.lower_learning_rate(2),
    )


def _is_spike(case: Case, rows: range, losses: list[float], index: int) -> bool:
    """Return whether a high loss of a log is a spike: it is over soon, and it is not one of many in a noisy curve, a
    harder stage of a curriculum, or a warm restart (the learning rate was raised, or the loss had risen twice before
    at that interval)."""
    near = losses[max(0, index - SPIKE_WINDOW) : index + SPIKE_WINDOW]
    before = losses[index - SPIKE_BEFORE : index]
    level, height = median(before), losses[index] - median(before)
    above = [loss > level + height / 3 for loss in near]
    peaks = sum(now and not before for before, now in itertools.pairwise([False, *above]))
    after = losses[index + 1 : index + 1 + SPIKE_BACK]
    if peaks > SPIKE_PEAKS or len(after) < SPIKE_AFTER or min(after) > level + height / 3:
        return False
    if min(before) > 0:
        logs = [math.log(loss) for loss in before]
        if math.log(losses[index]) - median(logs) < SPIKE_SIGMAS_OF_LOG * sigma(logs):
            return False
    old, new = (
        [rate for rate in case.view.steps.values("lr", *rows_near) if rate is not None]
        for rows_near in ((max(0, index - 5), index), (max(0, index - 1), index + 2))
    )
    if old and new and max(new) > SPIKE_RATIO * min(old):
        return False
    rose = [
        at
        for at in range(10, len(losses) - 3)
        if median(losses[at : at + 3]) - median(losses[at - 10 : at]) > height / 4
    ]
    starts = [at for at in rose if at - 1 not in rose]
    gaps = [right - left for left, right in itertools.pairwise(starts)]
    return len(gaps) < 2 or max(gaps) - min(gaps) > max(gaps) // 20


def rate_and_norm(case: Case, rows: range, before: int) -> list[Number]:
    """Return the learning rate and the gradient norm before a row, each with the median of its earlier values."""
    numbers: list[Number] = []
    for name in ("lr", "grad_norm"):
        finite = case.view.steps.finite(name, rows.start, rows.start + before)
        if finite:
            numbers.append((f"{name} before it", finite[-1], f"median {median(finite):.4g}"))
    return numbers


@rule(
    reads=("held-out loss of the student", "ce"),
    threshold=f"{HELDOUT_IN_A_ROW} evaluations in a row {HELDOUT_WORSE_NATS:g} nats above the best",
)
def heldout_diverging(case: Case) -> Symptom | None:
    evals = [
        e
        for e in case.view.evals
        if e.subject == "student" and not e.saved and e.loss is not None and math.isfinite(e.loss)
    ]
    if len(evals) < HELDOUT_LEAST:
        raise CannotJudge(f"needs {HELDOUT_LEAST} held-out losses, {len(evals)} were measured")
    losses = [e.loss for e in evals if e.loss is not None]
    best = min(range(len(losses)), key=losses.__getitem__)
    since = losses[best + 1 :]
    # The loss of a small held-out set is noisy: it changes by chance from one evaluation to the next.
    changes = [right - left for left, right in itertools.pairwise(losses)]
    noise = HELDOUT_SIGMAS * sigma(changes) if len(losses) >= HELDOUT_NOISE else 0.0
    limit = losses[best] + max(HELDOUT_WORSE_NATS, noise)
    if len(since) < HELDOUT_IN_A_ROW or min(since[-HELDOUT_IN_A_ROW:]) < limit:
        return None
    watched = case.view.is_foreign
    ce_at_best, ce_now = _train_ce(case, evals[best].step), _train_ce(case, evals[-1].step)
    if ce_now >= ce_at_best:
        return None
    return Symptom(
        f"held-out loss has been above its best ({losses[best]:.3f} at step {evals[best].step}) for "
        f"{len(since)} evaluations, while the training loss fell",
        [
            ("held-out loss", losses[-1], f"best {losses[best]:.4f} + {HELDOUT_WORSE_NATS:g}"),
            ("training ce now", ce_now, f"{ce_at_best:.4f} at the best"),
        ],
        replace(case.span(case.steps(1, at_least=1, session=False)), first_step=evals[best].step),
        meaning="the model memorises its training set"
        if watched
        else "the student memorises its training set; the best checkpoint is kept",
        flip="" if watched else f"--set train.steps={evals[best].step}",
        no_flip=f"stop at step {evals[best].step}, or regularise",
    )


def _train_ce(case: Case, step: int) -> float:
    """Return the mean cross entropy of the twenty steps up to `step`."""
    steps = case.view.steps
    row = steps.find("step", step + 1)
    if not row:
        raise CannotJudge(f"step {step} is not in the log")
    name = "loss" if case.view.is_foreign else "ce"
    return mean(case.column(name, range(max(0, row - 20), row)))
