"""The folder of a finding on disk, the commands on it, and findings of the first version."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from engine.errors import EngineError
from engine.findings import bundle as bundles
from engine.findings import changes
from engine.findings.bundle import FINDING, LOG, Bundle, find_bundle, find_bundles, logged_seal
from engine.findings.check import check_bundle
from engine.findings.finding import Finding, load, schema, to_bytes
from engine.findings.older import Older
from engine.flips.flip_folder import find_flips
from engine.verdict import Level
from tests.support.attached import BEGIN
from tests.support.attached_scripts import SLEEPING
from tests.support.findings import ROWS, THREADS, ask, asked, carry_out, hanging_run
from tests.support.paths import ROOT
from tests.support.running import engine

OLDER = ROOT / "evidence" / "2026-11-21-hang-at-step-zero"


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.chdir(tmp_path)
    return asked(hanging_run(tmp_path / "runs" / "hang"), THREADS, ROWS)


def test_the_same_finding_is_written_in_the_same_bytes(bundle: Bundle) -> None:
    raw = (bundle.path / FINDING).read_bytes()
    assert to_bytes(load(raw, "x")) == raw
    assert bundle.save(bundle.load(), {}) == bundle.load()
    assert (bundle.path / FINDING).read_bytes() == raw


def test_the_published_schema_is_that_of_the_reader() -> None:
    published = (ROOT / "engine" / "findings" / "finding.schema.json").read_bytes()
    assert published == schema(), "write engine.findings.finding.schema() to the file"
    assert set(json.loads(published)["$defs"]) >= {"Finding", "Cause", "Test"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.replace(b"compute.threads", b"compute.thread_"),
        lambda raw: raw + b"\n",
        lambda raw: json.dumps(json.loads(raw)).encode(),
        lambda raw: raw.replace(b'"notes": []', b'"notes": [], "more": 1'),
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"[]",
        lambda raw: b'{"schema": "apr-workbench/finding/1"}',
        lambda raw: b"[" * 100_000,
    ],
)
def test_a_finding_that_was_edited_by_hand_is_not_worked_on(bundle: Bundle, edit) -> None:  # type: ignore[no-untyped-def]
    path = bundle.path / FINDING
    path.write_bytes(edit(path.read_bytes()))
    for change in (changes.close, lambda b: changes.note(b, "x"), changes.export):
        with pytest.raises(EngineError):
            change(bundle)
    assert check_bundle(bundle).verdict.level is Level.FAIL
    assert not (bundle.path.parent / LOG).exists()


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_death_before_the_end_of_a_change_leaves_the_finding_as_it_was(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    before, written = bundle.load(), list[Path]()
    whole = bundles.write_whole

    def dying(path: Path, data: bytes, what: str) -> None:
        if (len(written) == after and path.name == FINDING) or len(written) < after:
            written.append(path)
            whole(path, data, what)
            return
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bundles, "write_whole", dying)
        carry_out(bundle, tmp_path / "flips" / "1")
    monkeypatch.setattr(bundles, "write_whole", whole)
    assert len(bundle.load().tests) in (0, 1) and not bundle.load().confirmed
    assert bundle.load().causes == before.causes
    changes.note(bundle, "again")
    ran = ask("why", "test") if bundle.load().tests else None
    assert ran is None or bundle.load().confirmed
    assert check_bundle(bundle).is_sound


def _note(path: Path, number: int) -> None:
    changes.note(Bundle(path), f"note {number}")


def test_changes_at_once_wait_for_each_other(bundle: Bundle) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_note, args=(bundle.path, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(note.text for note in bundle.load().notes) == ["note 0", "note 1", "note 2"]
    assert check_bundle(bundle).is_sound


def test_a_change_of_a_logged_finding_enters_it_again(bundle: Bundle, tmp_path: Path) -> None:
    assert logged_seal(bundle.path) is None
    changes.export(bundle)
    first = logged_seal(bundle.path)
    assert first == bundle.load().seal
    changes.note(bundle, "more")
    assert logged_seal(bundle.path) == bundle.load().seal != first
    other = asked(hanging_run(tmp_path / "runs" / "other", later_s=9.0))
    changes.export(other)
    text = (bundle.path.parent / LOG).read_text()
    assert text.count("## ") == 2 and text.index("of other") < text.index("of hang")
    copy = changes.export(bundle, tmp_path / "elsewhere")
    assert check_bundle(copy).is_sound and logged_seal(copy.path) == bundle.load().seal
    with pytest.raises(EngineError, match="nothing there"):
        changes.export(bundle, tmp_path / "elsewhere")


def test_a_copy_verifies_without_the_run_and_the_flip(bundle: Bundle, tmp_path: Path) -> None:
    carry_out(bundle, tmp_path / "flips" / "1")
    changes.close(bundle)
    copy = changes.export(bundle, tmp_path / "elsewhere")
    for name in ("runs", "flips", "evidence"):
        shutil.rmtree(tmp_path / name)
    assert check_bundle(copy).verdict.level is Level.PASS
    with pytest.raises(EngineError, match="the observed run hang"):
        changes.suspect(copy, "train.lr=1e-4")


def test_a_big_log_is_known_by_hash_and_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "LARGEST_COPIED_BYTES", 1500)
    bundle = asked(hanging_run(tmp_path / "runs" / "hang"))
    file = bundle.load().files["observed/events.jsonl"]
    assert not file.is_copied and file.size > 1500
    checked = check_bundle(bundle)
    assert checked.is_sound and any("events.jsonl: not copied" in note for note in checked.notes)


@pytest.mark.parametrize("kind", ["folder", "fifo", "missing", "dangling"])
def test_a_finding_that_is_no_file_is_never_passed_over(bundle: Bundle, kind: str) -> None:
    path = bundle.path / FINDING
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    checked = check_bundle(bundle)
    assert checked.verdict.level is Level.UNKNOWN and checked.unread
    if kind != "missing":
        assert ask("why", "check", "--all").code == 65
        assert FINDING in ask("evidence", "list").out


def test_a_list_is_not_stopped_by_a_finding_that_is_damaged(bundle: Bundle, tmp_path: Path) -> None:
    other = asked(hanging_run(tmp_path / "runs" / "other", later_s=9.0))
    (bundle.path / FINDING).write_text("{}")
    listed = ask("evidence", "list")
    assert listed.code == 0 and other.path.name in listed.out and "expected" in listed.out
    assert ask("why", "check", "--all").code == 1
    assert find_bundle("", tmp_path / "evidence") == other, "the only one that can be worked on"
    assert ask("evidence", "list", tmp_path / "nowhere").code == 65
    (tmp_path / "none").mkdir()
    assert ask("why", "check", "--all", "--evidence", tmp_path / "none").code == 2
    assert ask("why", "check", "--all", "--finding", other.path).code == 64


# Findings of the first version


def test_a_finding_of_the_first_version_opens_read_only_with_todays_level(tmp_path: Path) -> None:
    copy = Bundle(tmp_path / "evidence" / OLDER.name)
    shutil.copytree(OLDER, copy.path)
    checked = check_bundle(copy)
    assert checked.verdict.level is Level.UNKNOWN and not checked.faults
    assert "tested no cause by today's rules" in checked.verdict.reason
    finding = copy.read()
    assert isinstance(finding, Older)
    said = "\n".join(finding.lines)
    assert "was closed as root-cause" in said and "recorded as supported" in said
    for change in (changes.close, lambda b: changes.note(b, "x")):
        with pytest.raises(EngineError, match="read-only"):
            change(copy)
    for command in (("why", "show"), ("evidence", "list")):
        ran = ask(
            *command,
            *(("--evidence", copy.path.parent) if command[0] == "why" else (copy.path.parent,)),
        )
        assert ran.code == 0 and "earlier version" in ran.out


@pytest.mark.parametrize("name", ["finding.json", "README.md", "artifacts"])
def test_a_changed_finding_of_the_first_version_is_named(tmp_path: Path, name: str) -> None:
    copy = Bundle(tmp_path / OLDER.name)
    shutil.copytree(OLDER, copy.path)
    file = next((copy.path / name).iterdir()) if name == "artifacts" else copy.path / name
    file.write_bytes(file.read_bytes().replace(b"e", b"f", 1))
    assert check_bundle(copy).verdict.level is Level.FAIL


# The commands


def test_a_script_that_a_variable_breaks_is_explained_by_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    # Before torch is imported, so that it ends at once.
    check = "import os\nif os.environ['MODE'] != 'good':\n    raise ValueError('no such mode')\n"
    script = check + BEGIN + SLEEPING
    line = script.splitlines().index("    raise ValueError('no such mode')") + 1
    (tmp_path / "train.py").write_text(script)
    before = (tmp_path / "train.py").read_bytes()
    script_of = ("--", sys.executable, "train.py", "--steps", 40)
    engine("watch", "--quiet", "--name", "bad", "--env=MODE=bad", *script_of)
    made = ask("why", "new", "runs/bad", "--cause", "MODE=good", "--cause", "MODE=worse")
    assert made.code == 0 and "next: test c1: does MODE=good end it?" in made.err, made.err
    for nothing, said in (
        (f"train.py:{line}=pass", "the statement that raises it"),
        (f"train.py:{line - 1}=if not os.environ['MODE']:", "the statement that raises it"),
        (f"train.py:{line}=raise ValueError('no such mode')  # why?", "comments or spaces only"),
        ("PYTHONOPTIMIZE=1", "a variable that changes what Python checks"),
    ):
        refused = ask("why", "cause", nothing)
        assert refused.code == 65 and said in refused.err, refused.err
    (bundle,) = find_bundles(tmp_path / "evidence")
    assert re.fullmatch("exit [a-z_]+ of bad: .*", bundle.load().title)
    shown = ask("why", "test", "--dry-run")
    assert shown.code == 0 and "pairs: 3 to 10 until a run shows it" in shown.err, shown.err
    assert not bundle.load().tests and not find_flips(tmp_path / "flips")

    # In a process that forks what it starts.
    ended = engine("why", "test")
    assert ended.returncode == 0, ended.stderr
    assert "t1 B_ENDS_IT: A shows it in 3 of 3 pairs" in ended.stdout
    kept = engine("why", "test", "--cause", "c2")
    assert kept.returncode == 0, kept.stderr
    assert "t2 B_KEEPS_IT: B shows it too, in pair 1" in kept.stdout
    assert (tmp_path / "train.py").read_bytes() == before, "it is changed in copies alone"
    assert ask("why", "check").code == 2
    assert ask("why", "close").code == 0
    checked = ask("why", "check")
    assert checked.code == 0 and "2 tests judged again" in checked.out
    said = ask("why", "show").out
    assert "c1  confirmed: MODE: bad -> good" in said and "c2  refuted: MODE: bad -> worse" in said
    told = ask("why", "show", "--json").json
    assert told["levels"] == {"c1": "confirmed", "c2": "refuted"}
    assert ask("why", "export").code == 0
    assert "root cause: exit" in (tmp_path / "evidence" / LOG).read_text()


def test_a_test_whose_flip_ended_unrecorded_is_recorded_by_the_next_command(
    bundle: Bundle, tmp_path: Path
) -> None:
    from tests.support.findings import ENDS, begin_test, end_test

    begin_test(bundle, tmp_path / "flips" / "1")
    end_test(tmp_path / "flips" / "1", ENDS)
    assert not bundle.load().confirmed
    ran = ask("why", "test")
    assert ran.code == 0 and "t1 B_ENDS_IT" in ran.out
    assert bundle.load().confirmed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cause", "the moon is full"), "expected"),
        (("cause", THREADS), "which it has"),
        (("test", "--cause", "c9"), "one of c1"),
        (("note", " "), "some words"),
        (("close",), "expected a cause that a test confirms, found c1 open, c2 open"),
        (("show", "--finding", "nowhere"), "one called nowhere"),
        (("new", "runs/hang", "--seen", "alert none"), "alert gpu_idle, exit killed_external"),
        (("new", "runs/hang", "--slug", "No Slug"), "a name of a-z"),
        (("new", "runs/nowhere"), "nothing there"),
        (("new", "runs/hang", "--slug", "b", "--why-of", "hang-gpu-idle"), "a confirmed cause"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    bundle: Bundle, arguments: tuple[str, ...], said: str
) -> None:
    before = bundle.load()
    ran = ask("why", *arguments)
    assert ran.code in (1, 65) and said in ran.err, ran.err
    assert bundle.load() == before and len(find_bundles(bundle.path.parent)) == 1


def test_what_people_write_is_no_markup(bundle: Bundle) -> None:
    changes.note(bundle, "<script>alert(1)</script> [x](http://y) `z` |\n# heading")
    text = (bundle.path / "README.md").read_text()
    lines = [line for line in text.splitlines() if "alert" in line and "script" in line]
    assert lines and all(line.startswith("    ") for line in lines)
    assert "\n# heading" not in text


def test_every_value_of_a_finding_is_as_it_was_read(bundle: Bundle) -> None:
    finding = bundle.load()
    assert msgspec.json.decode(to_bytes(finding), type=Finding) == finding


def test_a_finding_kept_by_an_earlier_version_verifies_under_its_own_rules() -> None:
    """Observations had no sign then, and settings were others."""
    found = check_bundle(Bundle(ROOT / "evidence" / "2026-11-27-hang-at-step-zero"))
    assert found.verdict.level is Level.PASS, found.verdict.reason
