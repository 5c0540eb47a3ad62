"""Verify a run: replay it from its settings, files, corpus and checkpoints, and report how the replay differs.

verify(run)                 all steps, from the first; a new replay begins at the checkpoint from which a resume with
                            changed settings continued
verify(run, chain=True)     one replay from each checkpoint to the next, whose checkpoint is compared with the saved one
verify(run, step=N)         step N alone, with an audit, replayed from the nearest checkpoint before it
verify(run, data=True)      in addition, the corpus is read and tokenized again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.catalogue import STAGES
from engine.checkpoint_folders import published, step_of
from engine.errors import BadInput, EngineError, RunLogError, SpecError, UsageError
from engine.log.fold import Follower
from engine.log.folder import RunFolder, must_have_settings
from engine.plan.inputs import check_inputs
from engine.receipts.receipt import check_receipt, not_compared, read_receipt_or_facts
from engine.spec import spec_from_dict
from engine.verdict import Level, Verdict, lowest
from engine.verify import replay
from engine.verify.compare import (
    BUILT_FIELDS,
    DATA_FIELDS,
    ROUNDING,
    Compared,
    FirstDifference,
    compare_losses,
    compare_rows,
    compare_steps,
    differences,
    same,
    why_rounded,
)
from engine.verify.replay import replay_folder, replayed_spec
from engine.verify.saved import compare_checkpoints, compare_students
from engine.verify.sessions import ChangedSettings, Session, Stretch, read_sessions, stretches

ROUNDED_TEXT = (
    "no replay: a model generated rows, and with other rounding (a GPU, another torch or machine) it generates "
    "different text"
)


@dataclass
class Verified:
    """The result of verifying a run."""

    lines: dict[str, Verdict] = field(default_factory=dict)
    """Verdicts of all comparisons, by name."""
    not_compared: list[str] = field(default_factory=list)
    steps: int = 0
    """Number of compared steps that agree."""
    rounding: str = ""
    """Size of the allowed rounding and the reason for it; empty if every bit must be equal."""
    difference: FirstDifference | None = None
    kept: Path | None = None
    """Folder of the replays, if they were kept."""

    @property
    def verdict(self) -> Verdict:
        lowest_verdict = lowest(self.lines.values())
        precision = "within rounding" if self.rounding else "to the bit"
        agreeing = f"the replay matches {self.steps} recorded steps {precision}"
        if lowest_verdict.level is Level.PASS:
            return Verdict(Level.PASS, agreeing)
        first, *others = [
            name for name, verdict in self.lines.items() if verdict.level is lowest_verdict.level
        ]
        text = f"{first}: {lowest_verdict.reason}"
        if others:
            text += f"; and {', '.join(others)}"
        if self.steps and self.difference is None:
            text += f"; {agreeing}"
        return Verdict(lowest_verdict.level, text)

    def add(self, name: str, verdict: Verdict | None) -> None:
        """Add the verdict of one comparison. If several replays made it, the lowest verdict counts."""
        previous = self.lines.get(name)
        if verdict is not None and (previous is None or verdict.level < previous.level):
            self.lines[name] = verdict


def verify(
    run: RunFolder,
    *,
    steps: int | None = None,
    step: int | None = None,
    chain: bool = False,
    data: bool = False,
    scratch: Path | None = None,
    keep: bool = False,
) -> Verified:
    """Replay `run` and compare it with its record: all steps, the first `steps`, or `step` alone.

    Raises BadInput if the engine did not train the run, RunLogError if the run has not ended or its log cannot be
    read, and UsageError if the run has no step `step`.
    """
    must_have_settings(run)
    alive = run.liveness()
    if alive.trainer or alive.supervisor:
        raise RunLogError.expected(
            "run folder", run.path, "a run that has ended", "a run that has not ended"
        )
    result = Verified()
    _compare_receipt(run, result)
    sessions = read_sessions(run)
    run_stretches = _read_stretches(run, sessions, result)
    if run_stretches:
        with replay_folder(run, scratch, keep=keep) as folder:
            verifying = _Verifier(run, sessions, folder, result)
            if data:
                verifying.data(run_stretches[0])
            if step is not None:
                verifying.step(run_stretches, step)
            else:
                verifying.steps(run_stretches, steps, chain=chain)
            if keep:
                result.kept = folder
    if chain:
        result.not_compared = [text for text in result.not_compared if "their contents" not in text]
    return result


def _read_stretches(run: RunFolder, sessions: Sequence[Session], result: Verified) -> list[Stretch]:
    """Return the stretches of a run. If none can be replayed, add a line with the reason and return an empty list."""
    if not sessions or sessions[0].started is None:
        result.lines["steps"] = Verdict(Level.UNKNOWN, "the log has no step to compare")
        return []
    try:
        run_stretches = stretches(sessions, run.read_effective())
    except ChangedSettings as error:
        result.lines["settings"] = Verdict(Level.FAIL, str(error))
        result.lines["steps"] = Verdict(Level.UNKNOWN, "no replay: the settings are missing")
        return []
    text = "effective.json has the hash that the run logged"
    result.lines["settings"] = Verdict(Level.PASS, text)
    return run_stretches


def _compare_receipt(run: RunFolder, result: Verified) -> None:
    """Compare the files of the folder with the hashes in its receipt."""
    view = Follower(run).read_all()
    receipt, is_receipt = read_receipt_or_facts(run, view)
    if not is_receipt:
        if view.receipt is not None:
            text = "the log records a receipt, but receipt.json is missing"
            result.lines["receipt"] = Verdict(Level.FAIL, text)
        else:
            result.not_compared.append("files: the run ended without a receipt of their hashes")
        return
    answers = check_receipt(run, receipt, view)
    wrong = {name: verdict for name, verdict in answers.items() if verdict.level is not Level.PASS}
    for name, verdict in wrong.items():
        result.lines[f"receipt: {name}"] = verdict
    if not wrong:
        text = f"{len(answers)} entries of the receipt match the run folder"
        result.lines["receipt"] = Verdict(Level.PASS, text)
    result.not_compared += not_compared(run, receipt)


class _Verifier:
    """Replays one run, each stretch in its own folder below `folder`."""

    def __init__(
        self, run: RunFolder, sessions: Sequence[Session], folder: Path, result: Verified
    ) -> None:
        self._run, self._sessions, self._folder, self._result = run, sessions, folder, result
        self._last = max(session.last_step for session in sessions)
        self._replay_count = 0
        self._saved = {step_of(path): path for path in reversed([*published(run.checkpoints)])}

    def data(self, stretch: Stretch) -> None:
        """Read and tokenize the corpus again, and compare its tokens with those that the run trained on."""
        ready = stretch.sessions[0].data
        try:
            spec = spec_from_dict(stretch.settings)
            inputs = check_inputs(spec, self._folder)
            tokens = inputs.load_tokens(spec.data, root=self._folder / "tokens")
        except EngineError as error:
            verdict = Verdict(Level.UNKNOWN, f"the corpus cannot be read again: {error.message}")
        else:
            pairs = [("train", tokens.train), ("heldout", tokens.heldout)]
            differing = [
                f"{name}: recorded {recorded[:16]}, read again {stream.sha256[:16]}"
                for name, stream in pairs
                if ready is not None
                and (recorded := getattr(ready, f"{name}_sha256")) != stream.sha256
            ]
            count = sum(stream.token_count for _, stream in pairs)
            text = f"{count:,} tokens match the corpus, read and tokenized again"
            verdict = Verdict(Level.FAIL, differing[0]) if differing else Verdict(Level.PASS, text)
            if ready is None:
                verdict = Verdict(Level.UNKNOWN, "the run did not record it")
        self._result.add("corpus", verdict)

    def steps(self, run_stretches: Sequence[Stretch], steps: int | None, *, chain: bool) -> None:
        """Replay the steps of a run in order; with `chain`, from checkpoint to checkpoint."""
        last = self._last if steps is None else min(steps, self._last)
        if last < self._last:
            text = f"steps {last + 1} to {self._last}: not requested"
            self._result.not_compared.append(text)
        for stretch in run_stretches:
            for part in self._parts(stretch.between(0, last), chain=chain):
                self._replay_and_compare(part, saves=chain)

    def _parts(self, stretch: Stretch, *, chain: bool) -> Iterator[Stretch]:
        """Yield the stretches to replay in turn: with `chain` cut at each checkpoint, otherwise the whole."""
        if stretch.begin >= stretch.end:
            return
        cuts = [n for n in self._saved if stretch.begin < n < stretch.end] if chain else []
        for begin, end in zip((stretch.begin, *cuts), (*cuts, stretch.end), strict=True):
            yield stretch.between(begin, end)

    def _replay_and_compare(self, piece: Stretch, *, saves: bool) -> None:
        """Replay a stretch and compare it."""
        result = self._result
        if (replayed := self._run_replay(piece, saves=saves)) is None:
            return
        replay_run, fresh, why = replayed
        record = piece.sessions[0]
        assert record.started is not None and fresh.started is not None
        result.add("settings as built", same(BUILT_FIELDS, record.started, fresh.started))
        result.add("data", same(DATA_FIELDS, record.data, fresh.data))
        for role in dict.fromkeys((*record.models, *fresh.models)):
            # A resumed session logs the student of the run's beginning, before it loads the checkpoint.
            if role != "student" or not (piece.begin or record.begin):
                of_role = (record.models.get(role), fresh.models.get(role))
                result.add(f"{role} as loaded", same(("sha256", "parameters"), *of_role))
        if record.started.engine != fresh.started.engine:
            text = f"the run was trained by engine {record.started.engine}, replayed by {fresh.started.engine}"
            result.not_compared.append(f"the engine's code at the time of the run: {text}")
        compared = compare_steps(piece, fresh, rounded=bool(why))
        result.steps += compared.steps
        self._add_steps(piece, compared)
        if compared.difference is not None:
            return
        length = piece.end - piece.begin if why else 0
        rows = compare_rows(self._run, replay_run, piece)
        if rows is None:
            result.not_compared.append(f"rows by content, {piece}: the run did not record them")
        result.add("rows", rows)
        evaluated = [event for session in self._sessions for event in session.evaluated]
        losses = f"held-out losses, {piece}" if saves else "held-out losses"
        result.add(losses, compare_losses(evaluated, fresh, length))
        if saves:
            name = f"checkpoint of step {piece.end}"
            result.add(name, compare_checkpoints(self._run, replay_run, piece.end, length))
            if piece.end == self._last:
                result.add("saved student", compare_students(self._run, replay_run, length))

    def _run_replay(
        self, piece: Stretch, *, saves: bool = False, audited: int = 0
    ) -> tuple[RunFolder, Session, list[str]] | None:
        """Replay a stretch and return its run folder, its session and the reasons for rounding. If it cannot be
        replayed, add a line with the reason and return None.

        A run that trains on generated text can be compared only if every bit is equal, because with other rounding
        a model soon generates different text. That is impossible on a GPU; on a CPU, the replay shows whether it is so.
        """
        writes = piece.settings.get("rollout", {}).get("share", 0) > 0
        devices = {session.started.device for session in piece.sessions if session.started}
        if writes and devices != {"cpu"}:
            self._result.add(str(piece), Verdict(Level.UNKNOWN, ROUNDED_TEXT))
            return None
        replay_run = self._train_replay(piece, saves=saves, audited=audited)
        fresh = None if replay_run is None else self._first_session(piece, replay_run)
        if replay_run is None or fresh is None:
            return None
        why = why_rounded(self._run, piece, replay_run, fresh)
        if why and writes:
            self._result.add(str(piece), Verdict(Level.UNKNOWN, ROUNDED_TEXT))
            return None
        if why:
            self._result.rounding = f"{ROUNDING}, because of {'; '.join(why)}"
        return replay_run, fresh, why

    def _train_replay(
        self, piece: Stretch, *, saves: bool = False, audited: int = 0
    ) -> RunFolder | None:
        """Replay a stretch and return its run folder. If it cannot be replayed, add a line with the reason and return
        None."""
        checkpoint = None
        if piece.begin and (checkpoint := self._saved.get(piece.begin)) is None:
            text = f"settings were changed at step {piece.begin}, whose checkpoint no longer exists"
            self._result.add(str(piece), Verdict(Level.UNKNOWN, text))
            return None
        self._replay_count += 1
        folder = self._folder / f"run-{self._replay_count}"
        try:
            spec = replayed_spec(piece, folder, saves=saves, audited=audited)
            check_inputs(spec, folder)
            return replay.train_again(spec, piece, checkpoint)
        except (BadInput, SpecError) as error:
            text = f"no replay: {error.message}"
            self._result.add(str(piece), Verdict(Level.UNKNOWN, text))
            return None

    def _first_session(self, piece: Stretch, replay_run: RunFolder) -> Session | None:
        """Return the session of a replay. If it ran no step, add a line with the reason and return None."""
        sessions = read_sessions(replay_run)
        if sessions and sessions[0].started is not None:
            return sessions[0]
        view = Follower(replay_run).read_all()
        reason = view.finished.reason if view.finished is not None else ""
        reason = reason or (
            view.exit.sentence if view.exit is not None else "its log ends without run_finished"
        )
        text = f"the replay ran no step: {reason.splitlines()[0]}"
        self._result.add(str(piece), Verdict(Level.UNKNOWN, text))
        return None

    def _add_steps(self, piece: Stretch, compared: Compared) -> None:
        name, count = str(piece), compared.steps
        for field_name, of_steps in compared.lacking.items():
            text = f"{of_steps} of {piece.end - piece.begin} recorded steps lack this field"
            self._result.add(f"steps: {field_name}", Verdict(Level.UNKNOWN, text))
        if (difference := compared.difference) is not None:
            self._result.difference = self._result.difference or difference
            text = str(difference)
            if count:
                text += f"; {count} steps before it agree"
            text += f"; --step {difference.step} audits that step"
            self._result.add(name, Verdict(Level.FAIL, text))
        elif compared.ended:
            level = Level.FAIL if compared.ended.startswith("the settings end") else Level.UNKNOWN
            text = f"the replay has no step {piece.begin + count + 1}: {compared.ended}"
            self._result.add(name, Verdict(level, text))
        else:
            precision = self._result.rounding or "every bit the same"
            self._result.add(name, Verdict(Level.PASS, f"{count} steps agree: {precision}"))

    def _from_checkpoint(self, stretch: Stretch, step: int) -> Stretch:
        """Return the stretch from the nearest checkpoint before `step` up to `step`."""
        checkpoints = [n for n in self._saved if stretch.begin < n < step]
        return stretch.between(max(checkpoints, default=stretch.begin), step)

    def step(self, run_stretches: Sequence[Stretch], step: int) -> None:
        """Replay and audit `step` from the nearest checkpoint before it, and add a line for each stage."""
        stretch = next((item for item in run_stretches if item.begin < step <= item.end), None)
        if stretch is None:
            raise UsageError(f"--step: expected a step of the run, 1 to {self._last}, found {step}")
        piece, result = self._from_checkpoint(stretch, step), self._result
        if (replayed := self._run_replay(piece, audited=step)) is None:
            return
        replay_run, fresh, why = replayed
        if step > piece.begin + 1:
            earlier = piece.between(piece.begin, step - 1)
            compared = compare_steps(earlier, fresh, rounded=bool(why))
            result.steps += compared.steps
            self._add_steps(earlier, compared)
        rows = compare_rows(self._run, replay_run, piece)
        if rows is not None and rows.level is Level.FAIL:
            result.add("rows", rows)
        differing = {
            item.stage: item for item in differences(piece, fresh, step, rounded=bool(why))
        }
        answers = _audit_verdicts(fresh, step)
        if other := differing.get("rows"):
            result.difference = other
            result.add("rows", Verdict(Level.FAIL, str(other)))
        for about in STAGES:
            verdict = answers.get(about.id, Verdict(Level.UNKNOWN, "the replay did not audit it"))
            if about.id in differing:
                result.difference = result.difference or differing[about.id]
                verdict = Verdict(Level.FAIL, str(differing[about.id]))
            result.add(about.id, verdict)
        result.steps += not differing


def _audit_verdicts(session: Session, step: int) -> dict[str, Verdict]:
    answers = ((about.id, session.audited.get((step, about.id))) for about in STAGES)
    return {
        id: Verdict(Level[judged.level.upper()], judged.text)
        for id, judged in answers
        if judged is not None
    }
