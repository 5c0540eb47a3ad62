"""What a rank other than the first says in its own log, and what a note says at level error, is part of the view: it
stands in `engine checks`, `engine diagnose`, on the live screen and in how a run ended."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from engine.cli.main import main
from engine.cli.progress import exit_code
from engine.log.beats import log_of
from engine.log.events import AnyEvent, Event, Judged, Note, RunFinished, TrainerExited
from engine.log.fold import Follower
from engine.log.in_order import InOrder
from engine.log.read import Liveness
from engine.log.text import check_lines, line_text, status_text
from engine.log.view import SOURCES, RunView
from engine.log.write import LogWriter
from engine.train.checkpoint.continuing import was_stopped_by_checks
from engine.train.ranks.torchrun import _first_failed
from engine.watch.verdict_line import run_verdict_lines, verdict_of
from tests.support.judged import check_event
from tests.support.run_events import fold_events, picture
from tests.support.run_folders import Scene, completed, step

DEAD = Liveness(trainer=False, supervisor=False)
ROWS = "step 3 began at row 12, expected row 8"
PEER = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:6511"


def checked(id: str, level: str, reason: str, at: int = 3) -> Judged:
    return check_event(id=id, level=level, text=reason, cost_s=0.01, step=at)


def failed(reason: str, code: int = 1) -> RunFinished:
    return RunFinished(state="failed", reason=reason, exit_code=code, step=3)


def say(scene: Scene, rank: int, *events: Event) -> Scene:
    """Write events into the log of a rank, which it opens when it is not open yet."""
    name = f"rank {rank}"
    if name not in scene.writers:
        scene.writers[name] = LogWriter(
            log_of(scene.run, rank),
            writer=name,
            monotonic=lambda: scene.now_s,
            wall=lambda: scene.start_unix_s + scene.now_s,
        )
    for event in events:
        scene.now_s += 0.25
        scene.writers[name].write(event)
    return scene


def of_two(path: Path) -> Scene:
    """Two ranks that have made three steps; the first one passes a check."""
    scene = say(Scene(path).open().begin(60), 1).steps(1, 3)
    say(scene, 1, *(step(number, 1.0) for number in (1, 2, 3)))
    return scene.events(checked("weights_alive", "pass", "it goes on where it was"))


def exited(scene: Scene, code: int, sentence: str, rank: int | None = None) -> Scene:
    scene.now_s += 1
    return scene.watch(
        TrainerExited(
            trainer_pid=4242,
            returncode=code,
            state="failed",
            signal=None,
            cause="x",
            certainty="proved",
            sentence=sentence,
            rank=rank,
        )
    )


def view_of(scene: Scene) -> RunView:
    scene.close()
    return Follower(scene.run).read_all()


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


def both(
    capsys: pytest.CaptureFixture[str], scene: Scene, *texts: str, code: int = 1
) -> tuple[dict[str, object], dict[str, object]]:
    """Each text stands in `checks` and `diagnose` and in the JSON of both, and all exit alike."""
    scene.close()
    for words in ("checks", "diagnose"):
        for more in ([], ["--json"]):
            exits, out = answer(capsys, words, scene.run.path, *more)
            assert exits == code, (words, more, out)
            for text in texts:
                flat = json.dumps(json.loads(out), ensure_ascii=False) if more else out
                assert text in " ".join(flat.split()), (words, more, out)
    found = [
        json.loads(answer(capsys, w, scene.run.path, "--json")[1]) for w in ("checks", "diagnose")
    ]
    return found[0], found[1]


def stopped_at_rank_1(path: Path) -> Scene:
    """Rank 1 reads wrong rows at `checks.on_fail` stop: the first rank loses its peer."""
    scene = of_two(path)
    say(
        scene,
        1,
        checked("weights_alive", "fail", ROWS),
        failed(f"check weights_alive: {ROWS}"),
    )
    scene.now_s += 1
    scene.events(failed(f"RuntimeError: {PEER}", code=70))
    return exited(
        scene, 1, f"rank 1 (process 77) ended with exit code 1: it failed: {PEER}", rank=1
    )


def test_a_check_that_fails_on_another_rank_is_a_failed_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = stopped_at_rank_1(tmp_path / "run")
    checks, diagnosis = both(capsys, scene, f"rank 1: {ROWS}")
    rows = [row for row in checks["checks"] if row["level"] == "fail"]  # type: ignore[attr-defined]
    assert [(row["id"], row["rank"]) for row in rows] == [("weights_alive", 1)]
    assert [c["rank"] for c in diagnosis["checks"]] == [1]  # type: ignore[attr-defined]
    assert "1 failed" in answer(capsys, "checks", scene.run.path)[1].splitlines()[-1]


def test_a_failed_ranks_own_sentence_is_how_the_run_ended(tmp_path: Path) -> None:
    view = view_of(stopped_at_rank_1(tmp_path / "run"))
    assert view.finished is not None
    assert view.finished.reason.startswith(f"rank 1: check weights_alive: {ROWS}")
    assert view.finished.exit_code == 1 and exit_code(view, 70) == 1
    assert was_stopped_by_checks(view)
    assert status_text(view, DEAD).startswith("FAILED")
    first, seen, *_ = run_verdict_lines(view, view.state(DEAD))
    assert "WRONG since step" in first and "weights that were never loaded" in first
    assert ROWS in seen and PEER not in seen.partition(ROWS)[0]


def test_a_rank_that_lost_its_peer_is_not_named_in_its_place(tmp_path: Path) -> None:
    scene = of_two(tmp_path / "run").events(failed("check shift_proof: it is off"))
    say(scene, 1, failed(f"RuntimeError: {PEER}", code=70))
    view = view_of(exited(scene, 1, "rank 0 (process 76) ended with exit code 1: x", rank=0))
    assert view.finished is not None and view.finished.reason == "check shift_proof: it is off"


def test_a_check_that_fails_on_both_ranks_is_told_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = of_two(tmp_path / "run").events(checked("weights_alive", "fail", "row 4, not 0"))
    say(scene, 1, checked("weights_alive", "fail", ROWS))
    checks, _ = both(capsys, scene, "row 4, not 0", f"rank 1: {ROWS}")
    rows = [row["rank"] for row in checks["checks"] if row["level"] == "fail"]  # type: ignore[attr-defined]
    assert rows == [0, 1]


def test_what_the_first_rank_repeats_of_another_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, checked("checkpoint_reloads", "fail", "tensor x"))
    scene.now_s += 1
    scene.events(checked("checkpoint_reloads", "fail", "rank 1: tensor x"))
    checks, diagnosis = both(capsys, scene, "rank 1: tensor x")
    rows = [row["rank"] for row in checks["checks"] if row["level"] == "fail"]  # type: ignore[attr-defined]
    assert rows == [1] and len(diagnosis["checks"]) == 1  # type: ignore[arg-type]


def test_a_check_that_failed_and_later_passed_on_that_rank_has_passed(tmp_path: Path) -> None:
    scene = say(of_two(tmp_path / "run"), 1, checked("checkpoint_reloads", "fail", "tensor x"))
    view = view_of(say(scene, 1, checked("checkpoint_reloads", "pass", "it does", 6)))
    assert [id for id, check in view.checks.items() if check.level == "fail"] == []


def test_a_failure_that_is_only_reported_is_seen_of_a_run_that_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, checked("weights_alive", "fail", ROWS))
    scene.events(RunFinished(state="completed", reason="every step done", exit_code=0, step=3))
    both(capsys, scene, f"rank 1: {ROWS}")
    view = Follower(scene.run).read_all()
    assert view.finished is not None and view.finished.state == "completed"
    assert any("weights_alive" in line and "FAIL" in line for line in check_lines(view))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_note_of_an_error_is_found_by_checks_and_by_diagnose(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene, text = of_two(tmp_path / "run"), "step 3: kd is -1.5, expected it above 0"
    note = Note(level="error", text=text)
    scene = scene.events(note) if rank == 0 else say(scene, 1, note)
    scene.events(RunFinished(state="completed", reason="every step done", exit_code=0, step=3))
    checks, diagnosis = both(capsys, scene, text if rank == 0 else f"rank 1: {text}")
    for found in (checks, diagnosis):
        assert [one["rank"] for one in found["errors"]] == [rank]  # type: ignore[attr-defined]
    assert verdict_of(Follower(scene.run).read_all(), "completed").level == "WRONG"


def test_eleven_notes_of_errors_are_all_in_json_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = of_two(tmp_path / "run")
    scene.events(*(Note(level="error", text=f"step {n}: it is off") for n in range(11)))
    checks, diagnosis = both(capsys, scene, "step 0: it is off", "step 10: it is off")
    assert len(checks["errors"]) == len(diagnosis["errors"]) == 11  # type: ignore[arg-type]
    assert "11 errors" in answer(capsys, "checks", scene.run.path)[1].splitlines()[-1]


def test_an_error_that_every_rank_notes_alike_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene, note = of_two(tmp_path / "run"), Note(level="error", text="step 3: it is off")
    scene.events(note)
    checks, _ = both(capsys, say(say(scene, 1, note), 2, note), "step 3: it is off")
    assert [one["rank"] for one in checks["errors"]] == [0]  # type: ignore[attr-defined]


def test_a_rank_that_raised_is_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, failed("ZeroDivisionError: division by zero", 70))
    scene.now_s += 1
    scene.events(failed(f"RuntimeError: {PEER}", code=70))
    exited(scene, 70, "rank 1 (process 77) ended with exit code 70: x", rank=1)
    both(capsys, scene, "rank 1: ZeroDivisionError: division by zero")


def test_a_rank_that_was_killed_is_named_before_what_the_others_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = of_two(tmp_path / "run").events(failed(f"RuntimeError: {PEER}", code=70))
    lost = "rank 1 (process 77) was ended by SIGKILL"
    view = view_of(exited(scene, 137, f"{lost}: the kernel's OOM killer did not do it", rank=1))
    assert view.finished is not None and view.finished.reason.startswith(lost)
    assert exit_code(view, 137) == 137 and lost in " ".join(
        run_verdict_lines(view, view.state(DEAD))
    )
    for words in ("checks", "diagnose"):
        code, out = answer(capsys, words, scene.run.path)
        assert code == 1 and lost in out and PEER not in out


def test_a_run_that_was_asked_to_stop_is_not_said_to_have_lost_a_rank(tmp_path: Path) -> None:
    stopped = RunFinished(state="stopped", reason="SIGTERM", exit_code=143, step=3)
    scene = of_two(tmp_path / "run").events(stopped)
    view = view_of(exited(scene, 143, "rank 1 (process 77) was ended by SIGTERM: x", rank=1))
    assert view.finished is not None and view.finished.state == "stopped"


def test_a_rank_that_fails_after_the_run_completed_leaves_it_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = of_two(tmp_path / "run")
    scene.events(RunFinished(state="completed", reason="every step done", exit_code=0, step=3))
    view = view_of(say(scene, 1, failed("OSError: the disk is full", 65)))
    assert view.state(DEAD) == "completed"


def test_of_ranks_that_fail_in_one_second_the_first_to_record_it_is_named() -> None:
    def failures(**codes: int) -> dict[int, ProcessFailure]:
        return {
            int(name[1:]): ProcessFailure(int(name[1:]), 100 + int(name[1:]), code, "none")
            for name, code in codes.items()
        }

    now = float(failures(r0=1)[0].timestamp)
    assert _first_failed(failures(r0=70, r1=1), {0: now + 0.9, 1: now + 0.8}) == 1
    assert _first_failed(failures(r0=1, r1=70), {0: now + 0.1, 1: now + 0.8}) == 0
    assert _first_failed(failures(r0=70, r1=-9), {0: now - 0.1}) == 1
    assert _first_failed(failures(r0=70, r1=-15), {0: now + 0.5}) == 0
    assert _first_failed(failures(r0=-15, r1=-15), {}) == 0


def test_a_rank_that_failed_is_told_where_nothing_else_recorded_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, failed(f"check weights_alive: {ROWS}"))
    scene.close()
    view = Follower(scene.run).read_all()
    assert view.state(DEAD) == "failed" and f"rank 1: check weights_alive: {ROWS}" in " ".join(
        run_verdict_lines(view, view.state(DEAD))
    )
    both(capsys, scene, f"rank 1: check weights_alive: {ROWS}")
    # The first rank may go on for some seconds.
    assert view.state(Liveness(trainer=True, supervisor=True)) == "running"


def test_a_session_that_is_over_is_not_held_against_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = stopped_at_rank_1(tmp_path / "run")
    scene.events(Note(level="error", text="an old error")).close()
    scene.now_s += 10
    say(scene.open().begin(60, resumed_from=3), 1).steps(4, 6)
    scene.events(checked("weights_alive", "pass", "it goes on where it was", at=4))
    scene.close()
    view = Follower(scene.run).read_all()
    assert view.finished is None and not view.errors
    assert [id for id, check in view.checks.items() if check.level == "fail"] == []
    # A diagnosis is of the whole run.
    code, out = answer(capsys, "diagnose", scene.run.path)
    assert code == 1 and f"rank 1: {ROWS}" in out and "an old error" in out


def test_a_rank_that_a_resumed_run_has_no_more_says_nothing_of_it(tmp_path: Path) -> None:
    scene = stopped_at_rank_1(tmp_path / "run").close()
    scene.now_s += 10
    view = view_of(scene.open().begin(60, resumed_from=3).steps(4, 6))
    assert view.finished is None and not view.errors and view.checks == {}


def test_a_rank_may_open_its_log_before_the_first_rank_does(tmp_path: Path) -> None:
    scene = stopped_at_rank_1(tmp_path / "run").close()
    scene.now_s += 10
    say(scene, 1, checked("weights_alive", "fail", "other rows again"))
    view = view_of(scene.open().begin(60, resumed_from=3).steps(4, 6))
    assert view.checks["weights_alive"].text == "rank 1: other rows again"


def test_a_line_that_is_cut_off_says_nothing_and_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, checked("weights_alive", "fail", ROWS))
    say(scene, 1, failed("it is cut off")).close()
    log = log_of(scene.run, 1)
    log.write_bytes(log.read_bytes()[:-20])
    both(capsys, scene, f"rank 1: {ROWS}")
    assert "it is cut off" not in answer(capsys, "diagnose", scene.run.path)[1]


def test_a_ranks_log_that_cannot_be_read_further_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = say(of_two(tmp_path / "run"), 1, checked("weights_alive", "fail", ROWS)).close()
    with log_of(scene.run, 1).open("ab") as file:
        file.write(b'{"kind":"note","seq"\n')
    both(capsys, scene, f"rank 1: {ROWS}", "1.jsonl", "expected a record")


def test_what_is_no_log_of_a_rank_is_let_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = of_two(tmp_path / "run").close()
    for name in ("0.jsonl", "x.jsonl", "1.jsonl.partial-9", "lost.txt", "٣.jsonl"):
        (scene.run.path / "ranks" / name).write_text("no log\n")
    assert tuple(scene.run.logs()) == ("events", "device", "watch", "rank 1")
    assert answer(capsys, "checks", scene.run.path)[0] == 2


def test_a_run_of_one_process_and_a_log_without_ranks_read_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = completed(tmp_path / "run")
    view = Follower(run).read_all()
    assert (view.ranks, view.errors) == ({}, ()) and tuple(run.logs()) == SOURCES
    code, out = answer(capsys, "diagnose", run.path, "--json")
    assert (code, json.loads(out)["errors"]) == (0, [])


def test_a_failure_of_a_rank_is_a_line_of_the_log_that_is_followed(tmp_path: Path) -> None:
    scene = of_two(tmp_path / "run")
    follower = Follower(scene.run)
    follower.read_all()
    follower.new_lines()
    say(scene, 1, checked("weights_alive", "fail", ROWS))
    say(scene, 3, Note(level="error", text="its disk is full"), Note(level="info", text="hello"))
    say(scene, 1, checked("shift_proof", "pass", "it is right"))
    follower.read_all()
    assert [line_text(line).partition(" ")[2] for line in follower.new_lines()] == [
        f"check weights_alive: FAIL: rank 1: {ROWS} (10 ms)",
        "error: rank 3: its disk is full",
    ]
    assert follower.new_lines() == []
    scene.close()


def test_the_order_in_which_logs_are_read_does_not_matter(tmp_path: Path) -> None:
    scene = stopped_at_rank_1(tmp_path / "run").close()
    scene.now_s += 10
    say(scene.open().begin(60, resumed_from=3), 1).steps(4, 6)
    say(scene, 1, Note(level="error", text="another"), checked("weights_alive", "fail", "again"))
    scene.close()
    logs: dict[str, list[AnyEvent]] = {}
    for line in InOrder(scene.run):
        logs.setdefault(line.source, []).append(line.event)
    assert "rank 1" in logs
    whole = picture(Follower(scene.run).read_all())
    dice = random.Random(71)
    for _ in range(40):
        view, left = RunView(), {source: list(events) for source, events in logs.items()}
        while left:
            source = dice.choice(sorted(left))
            size = dice.randint(1, len(left[source]))
            view = fold_events(view, source, left[source][:size])
            left[source] = left[source][size:]
            left = {source: events for source, events in left.items() if events}
        assert picture(view) == whole
