"""Verify a run: replay it from its settings, files, corpus and checkpoints, and report how the replay differs.

verify(run)                 every step, from the first; from a checkpoint where a resume changed settings
verify(run, chain=True)     from checkpoint to checkpoint; the checkpoint of each replay is compared with the saved one
verify(run, step=N)         step N, with an audit of it, from the nearest checkpoint before it
verify(run, data=True)      also the corpus, read and tokenized again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engine.catalogue import STAGES
from engine.checkpoint_folders import published, step_of
from engine.errors import BadInput, EngineError, RunLogError, SpecError, UsageError
from engine.log.folder import RunFolder, must_have_settings
from engine.log.follow import Follower
from engine.plan.inputs import check_inputs
from engine.receipts.receipt import check_receipt, not_compared, read_receipt_or_facts
from engine.spec import spec_from_dict
from engine.train.background import Background
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
    compare_written,
    differences,
    same,
    why_rounded,
)
from engine.verify.replay import replay_folder, replayed_spec
from engine.verify.saved import compare_checkpoints, compare_students
from engine.verify.sessions import ChangedSettings, Session, Stretch, read_sessions, stretches


@dataclass
class Verified:
    """The result of verifying a run."""

    lines: dict[str, Verdict] = field(default_factory=dict)
    """Verdicts of all comparisons, by name."""
    not_compared: list[str] = field(default_factory=list)
    steps: int = 0
    """Number of compared steps that agree."""
    rounding: str = ""
    """Reason and size of the allowed rounding; empty where every bit must be equal."""
    difference: FirstDifference | None = None
    kept: Path | None = None
    """The folder of the replays, if they were kept."""

    @property
    def verdict(self) -> Verdict:
        found = lowest(self.lines.values())
        how = "within rounding" if self.rounding else "to the bit"
        agreeing = f"the replay matches {self.steps} recorded steps {how}"
        if found.level is Level.PASS:
            return Verdict(Level.PASS, agreeing)
        first, *others = [name for name, one in self.lines.items() if one.level is found.level]
        text = f"{first}: {found.reason}"
        if others:
            text += f"; and {', '.join(others)}"
        if self.steps and self.difference is None:
            text += f"; {agreeing}"
        return Verdict(found.level, text)

    def add(self, name: str, verdict: Verdict | None) -> None:
        """Add the verdict of one comparison; the lowest of several replays is kept."""
        before = self.lines.get(name)
        if verdict is not None and (before is None or verdict.level < before.level):
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

    Raises BadInput for a run that has not ended, that the engine did not train or that has no such step, and
    RunLogError for a log that cannot be read.
    """
    must_have_settings(run)
    alive = run.liveness()
    if alive.trainer or alive.supervisor:
        raise RunLogError.expected(
            "run folder", run.path, "a run that has ended", "a run that has not ended"
        )
    # Hashing gigabytes of files overlaps with the replay.
    receipt = Background(partial(_compare_receipt, run), "hash of the run's files")
    found = Verified()
    sessions = read_sessions(run)
    parts = _parts(run, sessions, found)
    if parts:
        with replay_folder(run, scratch, keep=keep) as folder:
            verifying = _Verifying(run, sessions, folder, found)
            if data:
                verifying.data(parts[0])
            if step is not None:
                verifying.step(parts, step)
            else:
                verifying.steps(parts, steps, chain=chain)
            if keep:
                found.kept = folder
    of_files = receipt.result()
    found.lines = of_files.lines | found.lines
    found.not_compared[:0] = of_files.not_compared
    if chain:
        found.not_compared = [one for one in found.not_compared if "their contents" not in one]
    return found


def _parts(run: RunFolder, sessions: Sequence[Session], found: Verified) -> list[Stretch]:
    """Return the stretches of a run. Where there are none, add a line with the reason and return an empty list."""
    if not sessions or sessions[0].started is None:
        found.lines["steps"] = Verdict(Level.UNKNOWN, "the log has no step to compare")
        return []
    try:
        parts = stretches(sessions, run.read_effective())
    except ChangedSettings as error:
        found.lines["settings"] = Verdict(Level.FAIL, str(error))
        found.lines["steps"] = Verdict(Level.UNKNOWN, "no replay: the settings are missing")
        return []
    text = "effective.json has the hash that the run logged"
    found.lines["settings"] = Verdict(Level.PASS, text)
    return parts


def _compare_receipt(run: RunFolder) -> Verified:
    """Compare the files of the folder with the hashes in its receipt."""
    found = Verified()
    view = Follower(run).read_all()
    receipt, is_receipt = read_receipt_or_facts(run, view)
    if not is_receipt:
        if view.receipt is not None:
            text = "the log records a receipt, but receipt.json is missing"
            found.lines["receipt"] = Verdict(Level.FAIL, text)
        else:
            found.not_compared.append("files: the run ended without a receipt of their hashes")
        return found
    answers = check_receipt(run, receipt, view)
    wrong = {name: one for name, one in answers.items() if one.level is not Level.PASS}
    for name, one in wrong.items():
        found.lines[f"receipt: {name}"] = one
    if not wrong:
        text = f"{len(answers)} entries match the files of the folder"
        found.lines["receipt"] = Verdict(Level.PASS, text)
    found.not_compared += not_compared(run, receipt)
    return found


class _Verifying:
    """Replays one run, each stretch in its own folder below `folder`."""

    def __init__(
        self, run: RunFolder, sessions: Sequence[Session], folder: Path, found: Verified
    ) -> None:
        self._run, self._sessions, self._folder, self._found = run, sessions, folder, found
        self._last = max(one.last_step for one in sessions)
        self._made = 0
        self._saved = {step_of(path): path for path in reversed([*published(run.checkpoints)])}

    def data(self, part: Stretch) -> None:
        """Read and tokenize the corpus again, and compare its tokens with those that the run trained on."""
        ready = part.sessions[0].data
        try:
            spec = spec_from_dict(part.settings)
            inputs = check_inputs(spec, self._folder)
            tokens = inputs.load_tokens(spec.data, root=self._folder / "tokens")
        except EngineError as error:
            verdict = Verdict(Level.UNKNOWN, f"the corpus cannot be read again: {error.message}")
        else:
            pairs = [("train", tokens.train), ("heldout", tokens.heldout)]
            other = [
                f"{name}: recorded {was[:16]}, read again {stream.sha256[:16]}"
                for name, stream in pairs
                if ready is not None and (was := getattr(ready, f"{name}_sha256")) != stream.sha256
            ]
            count = sum(stream.token_count for _, stream in pairs)
            text = f"{count:,} tokens match the corpus, read and tokenized again"
            verdict = Verdict(Level.FAIL, other[0]) if other else Verdict(Level.PASS, text)
            if ready is None:
                verdict = Verdict(Level.UNKNOWN, "the run did not record it")
        self._found.add("corpus", verdict)

    def steps(self, parts: Sequence[Stretch], steps: int | None, *, chain: bool) -> None:
        """Replay the steps of a run in order; with `chain`, from checkpoint to checkpoint."""
        last = self._last if steps is None else min(steps, self._last)
        if last < self._last:
            text = f"steps {last + 1} to {self._last}: not requested"
            self._found.not_compared.append(text)
        for part in parts:
            for piece in self._pieces(part.between(0, last), chain=chain):
                self._replay(piece, saves=chain)

    def _pieces(self, part: Stretch, *, chain: bool) -> Iterator[Stretch]:
        """Yield the parts of a stretch that are replayed one after the other."""
        if part.begin >= part.end:
            return
        cuts = [n for n in self._saved if part.begin < n < part.end] if chain else []
        for begin, end in zip((part.begin, *cuts), (*cuts, part.end), strict=True):
            yield part.between(begin, end)

    def _replay(self, piece: Stretch, *, saves: bool) -> None:
        """Replay a stretch and compare it."""
        found = self._found
        if (replayed := self._replayed(piece, saves=saves)) is None:
            return
        again, fresh, why = replayed
        record = piece.sessions[0]
        assert record.started is not None and fresh.started is not None
        found.add("settings as built", same(BUILT_FIELDS, record.started, fresh.started))
        found.add("data", same(DATA_FIELDS, record.data, fresh.data))
        for role in dict.fromkeys((*record.models, *fresh.models)):
            # A resumed session logs the student as it was before the first step.
            if role != "student" or not (piece.begin or record.begin):
                of_role = (record.models.get(role), fresh.models.get(role))
                found.add(f"{role} as loaded", same(("sha256", "parameters"), *of_role))
        if record.started.engine != fresh.started.engine:
            text = f"the run was trained by engine {record.started.engine}, replayed by {fresh.started.engine}"
            found.not_compared.append(f"the engine's code at the time of the run: {text}")
        compared = compare_steps(piece, fresh, rounded=bool(why))
        found.steps += compared.steps
        self._add_steps(piece, compared)
        found.add("written text", compare_written(piece, fresh))
        if compared.difference is not None:
            return
        length = piece.end - piece.begin if why else 0
        rows = compare_rows(self._run, again, piece)
        if rows is None:
            found.not_compared.append(f"rows by content, {piece}: the run did not record them")
        found.add("rows", rows)
        evaluated = [one for session in self._sessions for one in session.evaluated]
        losses = f"held-out losses, {piece}" if saves else "held-out losses"
        found.add(losses, compare_losses(evaluated, fresh, length))
        if saves:
            at = f"checkpoint of step {piece.end}"
            found.add(at, compare_checkpoints(self._run, again, piece.end, length))
            if piece.end == self._last:
                found.add("saved student", compare_students(self._run, again, length))

    def _replayed(
        self, piece: Stretch, *, saves: bool = False, audited: int = 0
    ) -> tuple[RunFolder, Session, list[str]] | None:
        """Replay a stretch and return its run folder, its session and the reasons for rounding. Where that is not
        possible, add a line with the reason and return None.

        Where numbers are rounded in another way a model soon writes another text, so such a replay is given the
        recorded one. Most often the device tells that beforehand.
        """
        writes = piece.settings.get("rollout", {}).get("share", 0) > 0
        given = writes and not all(
            one.started is not None and one.started.device == "cpu" for one in piece.sessions
        )
        while True:
            again = self._train(piece, saves=saves, audited=audited, given=given)
            fresh = None if again is None else self._first_session(piece, again)
            if again is None or fresh is None:
                return None
            why = why_rounded(self._run, piece, again, fresh)
            if why:
                self._found.rounding = f"{ROUNDING}, because of {'; '.join(why)}"
            if given or not (why and writes):
                return again, fresh, why
            given = True

    def _train(
        self, piece: Stretch, *, saves: bool = False, audited: int = 0, given: bool = False
    ) -> RunFolder | None:
        """Replay a stretch and return its run folder; with `given` on the rows that the run wrote. Where that is not
        possible, add a line with the reason and return None."""
        checkpoint = None
        if piece.begin and (checkpoint := self._saved.get(piece.begin)) is None:
            text = f"settings were changed at step {piece.begin}, whose checkpoint no longer exists"
            self._found.add(str(piece), Verdict(Level.UNKNOWN, text))
            return None
        self._made += 1
        folder = self._folder / f"run-{self._made}"
        try:
            spec = replayed_spec(piece, folder, saves=saves, audited=audited)
            check_inputs(spec, folder)
            written_by = self._run.path.absolute() if given else None
            return replay.train_again(spec, piece, checkpoint, written_by=written_by)
        except (BadInput, SpecError) as error:
            text = f"no replay: {error.message}"
            self._found.add(str(piece), Verdict(Level.UNKNOWN, text))
            return None

    def _first_session(self, piece: Stretch, again: RunFolder) -> Session | None:
        """Return the session of a replay. Where it ran no step, add a line with the reason and return None."""
        sessions = read_sessions(again)
        if sessions and sessions[0].started is not None:
            return sessions[0]
        view = Follower(again).read_all()
        reason = view.finished.reason if view.finished is not None else ""
        reason = reason or (view.exit.sentence if view.exit is not None else "its log has no end")
        text = f"the replay ran no step: {reason.splitlines()[0]}"
        self._found.add(str(piece), Verdict(Level.UNKNOWN, text))
        return None

    def _add_steps(self, piece: Stretch, compared: Compared, *, explain: bool = True) -> None:
        name, count = str(piece), compared.steps
        for field_name, of_steps in compared.lacking.items():
            text = f"{of_steps} of {piece.end - piece.begin} steps of the log lack it"
            self._found.add(f"steps: {field_name}", Verdict(Level.UNKNOWN, text))
        if (difference := compared.difference) is not None:
            self._found.difference = self._found.difference or difference
            text = self._explained(piece, difference) if explain else str(difference)
            self._found.add(name, Verdict(Level.FAIL, text))
        elif compared.ended:
            level = Level.FAIL if compared.ended.startswith("the settings end") else Level.UNKNOWN
            text = f"the replay has no step {piece.begin + count + 1}: {compared.ended}"
            self._found.add(name, Verdict(level, text))
        else:
            how = self._found.rounding or "every bit the same"
            self._found.add(name, Verdict(Level.PASS, f"{count} steps agree: {how}"))

    def _explained(self, piece: Stretch, difference: FirstDifference) -> str:
        """Describe where the record differs, and by an audit of the replay which side is wrong."""
        text = str(difference)
        if before := difference.step - piece.begin - 1:
            text += f"; {before} steps before it agree"
        if difference.recorded is None:
            return text
        answers = self._textbook(piece, difference.step)
        wrong = [f"{id}: {one.reason}" for id, one in answers.items() if one.level is Level.FAIL]
        if wrong:
            return f"{text}; the audit of the replayed step fails {wrong[0]}"
        proved = sum(one.level is Level.PASS for one in answers.values())
        if proved:
            text += f"; the audit of the replayed step passes {proved} of {len(answers)} stages"
        return text

    def _textbook(self, piece: Stretch, step: int) -> dict[str, Verdict]:
        """Replay and audit `step`, and return the verdicts by stage; empty where it cannot be replayed."""
        replayed = self._replayed(self._up_to(piece, step), audited=step)
        return {} if replayed is None else _audited(replayed[1], step)

    def _up_to(self, part: Stretch, step: int) -> Stretch:
        """Return the steps after the nearest checkpoint before `step`, up to `step`."""
        earlier = [n for n in self._saved if part.begin < n < step]
        return part.between(max(earlier, default=part.begin), step)

    def step(self, parts: Sequence[Stretch], step: int) -> None:
        """Replay and audit `step` from the nearest checkpoint before it, and add a line for each stage."""
        part = next((one for one in parts if one.begin < step <= one.end), None)
        if part is None:
            raise UsageError(f"--step: expected a step of the run, 1 to {self._last}, found {step}")
        piece, found = self._up_to(part, step), self._found
        if (replayed := self._replayed(piece, audited=step)) is None:
            return
        again, fresh, why = replayed
        if step > piece.begin + 1:
            before = piece.between(piece.begin, step - 1)
            compared = compare_steps(before, fresh, rounded=bool(why))
            found.steps += compared.steps
            self._add_steps(before, compared, explain=False)
        rows = compare_rows(self._run, again, piece)
        if rows is not None and rows.level is Level.FAIL:
            found.add("rows", rows)
        found.add("written text", compare_written(piece, fresh))
        differing = {one.stage: one for one in differences(piece, fresh, step, rounded=bool(why))}
        answers = _audited(fresh, step)
        for about in STAGES:
            verdict = answers.get(about.id, Verdict(Level.UNKNOWN, "the replay did not audit it"))
            if about.id in differing:
                found.difference = found.difference or differing[about.id]
                verdict = Verdict(Level.FAIL, str(differing[about.id]))
            found.add(about.id, verdict)
        found.steps += not differing


def _audited(session: Session, step: int) -> dict[str, Verdict]:
    answers = ((about.id, session.audited.get((step, about.id))) for about in STAGES)
    return {
        id: Verdict(Level[one.level.upper()], one.text) for id, one in answers if one is not None
    }
