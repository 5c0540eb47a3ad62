"""The bundle of a finding: what is written can be read and checked, and no byte of it can be changed unseen."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import BadInput
from engine.findings import bundle as bundle_module
from engine.findings import finding as form
from engine.findings.bundle import LOG, Bundle
from engine.findings.capture import (
    Capture,
    capture_command,
    capture_events,
    capture_file,
    capture_flip,
    capture_metric,
    capture_part,
    capture_statement,
)
from engine.findings.context import run_blobs
from engine.findings.finding import Finding, MetricWindow
from engine.findings.logs import Window
from engine.findings.text import tree_lines
from engine.findings.verify import Checked, check_bundle
from engine.findings.whys import add_node, close, link, refute
from engine.log.folder import RunFolder
from engine.verdict import Level
from tests.support.findings import (
    AT,
    NO_SECRETS,
    SAME,
    ask,
    blobs_of,
    end_of,
    flip,
    hanging_run,
    idle,
    seen,
    steady_run,
    why,
    with_answered_alternative,
)
from tests.support.paths import ROOT


class World:
    """A run, two flips, a file, and a closed finding of them in its bundle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = hanging_run(folder / "runs" / "hang")
        flip(folder / "flips" / "backend")
        flip(folder / "flips" / "disk", SAME)
        (folder / "note.txt").write_text("one\ntwo\nthree\n")
        captures: list[Capture] = [idle(self.run)]
        finding = seen(self.run)
        self.where = folder / "evidence" / f"{AT[:10]}-hang"
        finding = refute_memory(finding, captures, self)
        self.captures = captures
        self.bundle = Bundle.create(folder / "evidence", finding, blobs_of(*captures))
        self.finding = self.bundle.load()

    def add(self, finding: Finding, node: str, capture: Capture, says: str = "supports") -> Finding:
        self.captures.append(capture)
        return link(finding, node, capture, says=says, relative_to=self.where, at=AT)  # type: ignore[arg-type]


def refute_memory(finding: Finding, captures: list[Capture], world: World) -> Finding:
    world.captures = captures
    flips = world.folder / "flips"
    exit_ = end_of(world.run).with_attached(run_blobs(world.run, NO_SECRETS, world.folder))
    finding = world.add(finding, "n1", exit_)
    finding = world.add(finding, "n1", capture_part(world.run, NO_SECRETS, alert="gpu_idle"))
    finding = world.add(finding, "n1", capture_events(world.run, "events", 1, 3, NO_SECRETS))
    finding = world.add(finding, "n1", capture_file(world.folder / "note.txt", NO_SECRETS, 2, 3))
    finding = world.add(finding, "n1", capture_statement("it was me who saw it", NO_SECRETS))
    finding = why(finding, "the dense upload caused the OOM kill", "hypothesis")
    disk = capture_flip(flips / "disk", NO_SECRETS)
    finding = refute(world.add(finding, "n2", disk, "contradicts"), "n2", "both arms completed")
    finding = why(finding, "attention ran on the CPU")
    finding = world.add(finding, "n3", capture_flip(flips / "backend", NO_SECRETS))
    command = capture_command(["sh", "-c", "echo made; exit 3"], NO_SECRETS, expect_exit=3)
    captures.append(command)
    finding = with_answered_alternative(finding, "n3", command)
    return close(finding, text="attention on the CPU", author="tester", at=AT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def copy(world: World, tmp_path: Path) -> Bundle:
    """A copy of the closed finding, without the runs that it was made from."""
    return Bundle(shutil.copytree(world.bundle.path, tmp_path / world.bundle.path.name))


def faults_of(bundle: Bundle) -> str:
    return "\n".join(map(str, check_bundle(bundle).faults))


def test_a_closed_finding_beside_its_runs_verifies(world: World) -> None:
    checked = check_bundle(world.bundle)
    assert not checked.faults and not checked.problems
    assert checked.verdict.level == checked.integrity.level == Level.PASS
    assert "root cause, 9 pieces of evidence" in checked.verdict.reason


def test_a_bundle_alone_verifies_and_says_what_it_could_not_compare(copy: Bundle) -> None:
    checked = check_bundle(copy)
    assert checked.verdict.level == Level.PASS
    assert sum("is not here, not compared" in note for note in checked.notes) >= 6


def test_the_same_finding_is_written_in_the_same_bytes(world: World) -> None:
    raw = world.bundle.read_finding()
    assert form.to_bytes(form.load(raw, "x")) == raw
    assert world.bundle.save(world.finding) == world.finding
    assert world.bundle.read_finding() == raw


def test_the_published_schema_is_that_of_the_reader() -> None:
    published = (ROOT / "engine" / "findings" / "finding.schema.json").read_bytes()
    assert published == form.schema(), "write engine.findings.finding.schema() to the file"
    assert set(json.loads(published)["$defs"]) >= {"Finding", "Node", "FlipResult"}


def flip_a_byte(copy: Bundle, data: st.DataObject) -> None:
    """Of any file, to any other value; it must be found, and is mended again."""
    files = sorted(p for p in copy.path.rglob("*") if p.is_file() and p.stat().st_size)
    file = data.draw(st.sampled_from(files), label="file")
    raw = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1), label="place")
    raw[place] ^= data.draw(st.integers(1, 255), label="flip")
    before = file.read_bytes()
    file.write_bytes(raw)
    try:
        checked = check_bundle(copy)
        assert checked.integrity.level == Level.FAIL
        assert str(file.relative_to(copy.path)) in {f.where for f in checked.faults}
    finally:
        file.write_bytes(before)


ONE_COPY = [HealthCheck.function_scoped_fixture]


@settings(max_examples=40, suppress_health_check=ONE_COPY)
@given(data=st.data())
def test_any_flipped_byte_anywhere_is_found_and_named(copy: Bundle, data: st.DataObject) -> None:
    flip_a_byte(copy, data)


@pytest.mark.soak
@settings(max_examples=400, suppress_health_check=ONE_COPY)
@given(data=st.data())
def test_any_of_many_flipped_bytes_is_found_and_named(copy: Bundle, data: st.DataObject) -> None:
    flip_a_byte(copy, data)


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "link", "extra", "folder", "swapped"])
def test_any_other_change_of_a_file_is_found_and_named(copy: Bundle, change: str) -> None:
    first, second = sorted((copy.path / "artifacts").iterdir())[:2]
    name = f"artifacts/{first.name}"
    match change:
        case "cut":
            first.write_bytes(first.read_bytes()[:-1])
        case "longer":
            first.write_bytes(first.read_bytes() + b"\n")
        case "gone":
            first.unlink()
        case "link":
            first.rename(copy.path.parent / "elsewhere")
            first.symlink_to(copy.path.parent / "elsewhere")
        case "extra":
            name = "artifacts/extra.txt"
            (copy.path / name).write_text("x")
        case "folder":
            name = "more"
            (copy.path / name).mkdir()
        case "swapped":
            one, other = first.read_bytes(), second.read_bytes()
            first.write_bytes(other)
            second.write_bytes(one)
    assert name in {fault.where for fault in check_bundle(copy).faults}


def changed(bundle: Bundle, **fields: object) -> str:
    """The faults after a field of every locator that has it was changed and sealed again."""
    finding = bundle.load()
    nodes = []
    for node in finding.nodes:
        evidence = tuple(
            msgspec.structs.replace(e, locator=msgspec.structs.replace(e.locator, **fields))
            if all(name in e.locator.__struct_fields__ for name in fields)
            else e
            for e in node.evidence
        )
        nodes.append(msgspec.structs.replace(node, evidence=evidence))
    bundle.save(msgspec.structs.replace(finding, nodes=tuple(nodes)))
    return faults_of(bundle)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mean": 96.0}, "mean: expected 96.0, found 0.0"),
        ({"first_seq": 2}, "expected lines 2 to 3"),
        ({"quotes": ()}, "do not begin as they are quoted"),
        ({"state": "OOM_MEMCG"}, "state: expected 'OOM_MEMCG', found 'KILLED_EXTERNAL'"),
        ({"verdict": "B_SLOWER"}, "verdict: expected 'B_SLOWER'"),
        ({"n_pairs": 400}, "expected 400 complete pairs, found 4"),
        ({"plan_sha256": "0" * 64}, "plan: expected 000000000000"),
        ({"exit_status": 0}, "exit_status: expected 0, found 3"),
        ({"as_expected": False}, "as_expected: expected False, found True"),
        ({"last_line": 9}, "expected 8 lines, found 2"),
        ({"text": "it was not me"}, "the statement is another"),
    ],
)
def test_a_locator_that_says_more_than_its_artifact_is_found(
    copy: Bundle, fields: dict[str, object], said: str
) -> None:
    assert said in changed(copy, **fields)


def test_the_effect_of_a_flip_is_computed_again_from_its_pairs(
    world: World, tmp_path: Path
) -> None:
    flip(tmp_path / "flip")
    verdict = tmp_path / "flip" / "verdict.json"
    fields = json.loads(verdict.read_text())
    fields["effect"] = 0.024
    verdict.write_text(json.dumps(fields))
    capture = capture_flip(tmp_path / "flip", NO_SECRETS)
    finding = link(why(seen(world.run), "x"), "n2", capture, at=AT)
    bundle = Bundle.create(tmp_path / "e", finding, blobs_of(idle(world.run), capture))
    assert "effect: expected 0.024 from the pairs, found 0.7" in faults_of(bundle)


def test_a_run_that_was_changed_after_it_was_linked_is_named(tmp_path: Path) -> None:
    run = steady_run(tmp_path / "run", [3.0, 2.0, 1.0])
    capture = capture_metric(run, "loss", NO_SECRETS)
    finding = link(seen(run_of(tmp_path)), "n1", capture, relative_to=tmp_path / "e" / "b", at=AT)
    bundle = Bundle.create(tmp_path / "e", finding, blobs_of(idle(run_of(tmp_path)), capture))
    assert not check_bundle(bundle).faults
    lines = run.events.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"loss":2.0', b'"loss":9.0')
    run.events.write_bytes(b"".join(lines))
    assert faults_of(bundle) == "e2: ../../run: does not say any more what was taken from it"


def run_of(folder: Path) -> RunFolder:
    path = folder / "hanging"
    return RunFolder(path) if path.exists() else hanging_run(path)


def test_a_run_that_grew_since_still_says_what_it_said(world: World, tmp_path: Path) -> None:
    run = steady_run(tmp_path / "run", [3.0, 2.0, 1.0])
    where = tmp_path / "e" / f"{AT[:10]}-hang"
    capture = capture_metric(run, "loss", NO_SECRETS, Window(first_step=1, last_step=2))
    finding = link(seen(world.run), "n1", capture, relative_to=where, at=AT)
    bundle = Bundle.create(tmp_path / "e", finding, blobs_of(idle(world.run), capture))
    with run.events.open("ab") as file:
        file.write(b'{"v":1,"seq":6,"t_s":9.0,"kind":"note","level":"info","text":"later"}\n')
    assert not check_bundle(bundle).faults


def test_a_file_of_a_project_that_was_edited_is_a_note_and_no_fault(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "run")
    code = tmp_path / "train.py"
    code.write_text("a\nb\n")
    where = tmp_path / "e" / f"{AT[:10]}-hang"
    capture = capture_file(code, NO_SECRETS)
    finding = link(seen(run), "n1", capture, relative_to=where, at=AT)
    bundle = Bundle.create(tmp_path / "e", finding, blobs_of(idle(run), capture))
    code.write_text("a\nc\n")
    checked = check_bundle(bundle)
    assert not checked.faults and any("was changed since" in note for note in checked.notes)


def test_a_finding_that_was_edited_by_hand_is_not_worked_on(copy: Bundle) -> None:
    path = copy.path / "finding.json"
    path.write_text(path.read_text().replace("attention on the CPU", "something else"))
    with pytest.raises(BadInput, match="the content that was sealed"):
        copy.load()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n", " "),
        ('"author"', '"author" '),
        ("5.0,", "5.00,"),
        ('"schema"', '"seal": "", "schema"'),
        ("tester", "t\\u0065ster"),
    ],
)
def test_the_same_content_in_another_form_is_not_what_the_tool_wrote(
    copy: Bundle, old: str, new: str
) -> None:
    path = copy.path / "finding.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert json.loads(path.read_text())["title"] == json.loads(text)["title"]
    assert {fault.where for fault in check_bundle(copy).faults} == {"finding.json"}


@pytest.mark.parametrize(
    "fields",
    [
        {"derived": {"../../outside.md": "0" * 64}},
        {"nodes": ()},
        {"slug": "../x"},
        {"artifacts": ()},
    ],
)
def test_a_sealed_finding_of_a_form_that_cannot_be_is_refused(
    world: World, fields: dict[str, object]
) -> None:
    odd = msgspec.structs.replace(world.finding, **fields)
    with pytest.raises(BadInput, match="finding"):
        form.load(form.to_bytes(form.sealed(odd)), "x")


def test_whys_form_no_circle(world: World) -> None:
    first, *rest = world.finding.nodes
    circle = (msgspec.structs.replace(first, why_of=(rest[-1].id,)), *rest)
    with pytest.raises(BadInput, match="a why of nodes before it"):
        form.check_form(msgspec.structs.replace(world.finding, nodes=circle), "x")


def test_a_node_may_answer_two_whys_and_is_drawn_once(world: World) -> None:
    finding = add_node(world.finding, "both", why_of=["n2", "n3"], author="tester", at=AT)
    lines = tree_lines(finding)
    assert sum("hypothesis: both" in line for line in lines) == 1
    assert sum(line.endswith("n4  see above") for line in lines) == 1


def test_a_damaged_artifact_is_not_covered_up_by_the_next_change(copy: Bundle) -> None:
    first = min((copy.path / "artifacts").iterdir())
    first.write_bytes(b"x" * first.stat().st_size)
    with pytest.raises(BadInput, match=first.name):
        copy.save(add_node(copy.load(), "more", why_of=["n1"]))


def test_a_death_before_the_end_of_a_save_leaves_the_finding_as_it_was(
    copy: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copy.load()
    note = capture_statement("later", NO_SECRETS)
    finding = link(before, "n1", note, at=AT)
    real = bundle_module._write

    def dies(path: Path, data: bytes) -> None:
        if path.name == "finding.json":
            raise KeyboardInterrupt
        real(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(bundle_module, "_write", dies)
        with pytest.raises(KeyboardInterrupt):
            copy.save(finding, blobs_of(note))
    assert copy.load() == before
    copy.save(before)
    assert not check_bundle(copy).faults, "the next change takes away what nothing names"


def test_two_changes_at_once_wait_for_each_other(copy: Bundle) -> None:
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with copy.locked():
            inside.set()
            order.append("first")
            copy.save(add_node(copy.load(), "one", why_of=["n1"]))
            order.append("first done")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(30)
    with copy.locked():
        order.append("second")
        copy.save(add_node(copy.load(), "two", why_of=["n1"]))
    thread.join(30)
    assert order == ["first", "first done", "second"]
    assert [n.claim for n in copy.load().nodes[-2:]] == ["one", "two"]


def test_big_files_are_known_by_hash_and_size_alone(tmp_path: Path) -> None:
    run, weights = hanging_run(tmp_path / "run"), tmp_path / "model.bin"
    weights.write_bytes(random.Random(0).randbytes(1024) * 5000)
    capture = capture_file(weights, NO_SECRETS)
    bundle = Bundle.create(
        tmp_path / "e",
        link(seen(run), "n1", capture, relative_to=tmp_path / "e" / f"{AT[:10]}-hang", at=AT),
        blobs_of(idle(run), capture),
    )
    assert sum(p.stat().st_size for p in bundle.path.rglob("*") if p.is_file()) < 100_000
    checked = check_bundle(bundle)
    assert not checked.faults
    assert any("was not copied: known by hash and size" in note for note in checked.notes)


def test_the_readme_has_the_tree_the_numbers_and_a_plot(world: World) -> None:
    text = (world.bundle.path / "README.md").read_text()
    for part in (
        "n2  refuted  hypothesis: the dense upload caused the OOM kill",
        "n3  supported  mechanism: attention ran on the CPU",
        "least 0, greatest 0, mean 0, n = 6",
        "plots/e1.svg",
        "B\\_FASTER",
        "| a1: the disk was slow | ",
        " | x | y | 5 |",
    ):
        assert part in text, part
    svg = (world.bundle.path / "plots" / "e1.svg").read_text()
    assert svg.startswith("<svg ") and "polyline" in svg and "script" not in svg


def test_what_people_write_is_no_markup(world: World, tmp_path: Path) -> None:
    claim = "<script>alert(1)</script> | `x` [a](b)\n# heading"
    bundle = Bundle.create(
        tmp_path, add_node(seen(world.run), claim, why_of=["n1"]), blobs_of(idle(world.run))
    )
    text = (bundle.path / "README.md").read_text()
    body = text.split("```")[-1]
    assert "<script" not in body and "\n# heading" not in text and "[a](b)" not in body


def test_a_metric_with_gaps_and_nan_says_so(tmp_path: Path) -> None:
    run = steady_run(tmp_path / "run", [3.0, None, float("nan"), float("inf"), 1.0])
    locator = capture_metric(run, "loss", NO_SECRETS).locator
    assert isinstance(locator, MetricWindow)
    assert (locator.count, locator.absent, locator.non_finite) == (2, 1, 2)
    assert (locator.first, locator.last, locator.mean) == (3.0, 1.0, 2.0)


@pytest.mark.parametrize("name", ["loss_", "gpu0.name", "gpu.util", "clock_event_reasons", "nf"])
def test_a_metric_that_no_log_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="metric"):
        capture_metric(hanging_run(tmp_path / "run"), name, NO_SECRETS)


def test_lines_that_a_log_does_not_have_are_refused(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "run")
    with pytest.raises(BadInput, match="lines 3 to 99"):
        capture_events(run, "events", 3, 99, NO_SECRETS)


def test_a_command_keeps_its_status_hash_and_excerpt_and_ends_at_its_limit() -> None:
    ran = capture_command("sh -c 'printf abc; kill -9 $$'", NO_SECRETS)
    record = json.loads(ran.blob.data or b"")
    assert record["exit_status"] == 137 and record["stdout"]["excerpt"] == "abc"
    assert record["stdout"]["sha256"].startswith("ba7816bf"), "the sha256 of abc"
    late = capture_command(["sh", "-c", "sleep 60 & sleep 60"], NO_SECRETS, limit_s=0.2)
    assert json.loads(late.blob.data or b"")["exit_status"] is None
    with pytest.raises(BadInput, match="to start it"):
        capture_command(["/no/such/program"], NO_SECRETS)


class TestLog:
    """LOG.md beside the bundles."""

    def test_an_export_enters_the_finding_on_top_and_once(
        self, world: World, tmp_path: Path
    ) -> None:
        (tmp_path / LOG).write_text(
            "# What was tried, newest first\n\n## 2020-01-01: older, `x/`\nText.\n"
        )
        bundle = world.bundle.export(tmp_path)
        bundle.export()
        text = (tmp_path / LOG).read_text()
        assert text.startswith(
            "# What was tried, newest first\n\n## 2026-05-22: no step in 90 minutes"
        )
        assert text.count(f"`{bundle.path.name}/`") == 1 and text.endswith("`x/`\nText.\n")
        assert world.finding.seal in text and check_bundle(bundle).verdict.level == Level.PASS

    def test_a_bundle_that_was_sealed_anew_does_not_fit_the_log(
        self, world: World, tmp_path: Path
    ) -> None:
        bundle = world.bundle.export(tmp_path)
        bundle.save(msgspec.structs.replace(bundle.load(), title="a nicer story"))
        assert "LOG.md: has the seal" in faults_of(bundle)

    def test_a_copy_does_not_overwrite(self, world: World, tmp_path: Path) -> None:
        world.bundle.export(tmp_path)
        with pytest.raises(BadInput, match="export"):
            world.bundle.export(tmp_path)


def checked_json(folder: Path) -> list[dict[str, object]]:
    return ask("evidence", "verify", folder, "--json").json  # type: ignore[no-any-return]


def test_verify_of_a_folder_names_what_was_changed_and_says_so_in_its_exit_code(
    world: World, tmp_path: Path
) -> None:
    assert ask("evidence", "verify", tmp_path).code == 2
    good = world.bundle.export(tmp_path)
    assert ask("evidence", "verify", tmp_path).code == 0
    shutil.copytree(good.path, tmp_path / "2026-01-01-bad")
    (tmp_path / "2026-01-01-bad" / "README.md").write_text("all is well\n")
    ran = ask("evidence", "verify", tmp_path)
    assert ran.code == 1 and "changed: README.md" in ran.out
    levels = {Path(str(c["folder"])).name: c["level"] for c in checked_json(tmp_path)}
    assert levels == {good.path.name: "pass", "2026-01-01-bad": "fail"}


def test_verify_of_a_folder_does_not_ask_for_what_an_open_finding_lacks(
    world: World, tmp_path: Path
) -> None:
    bundle = world.bundle.export(tmp_path)
    bundle.save(add_node(bundle.load(), "and why that?", why_of=["n3"]))
    bundle.export()
    ran = ask("evidence", "verify", tmp_path)
    assert ran.code == 0 and "E-WHY" not in ran.out
    asked = ask("why", "verify", "--finding", bundle.path)
    assert asked.code == 2 and "open: E-WHY-002 n4" in asked.out


def test_a_list_is_not_stopped_by_a_finding_that_is_damaged(world: World, tmp_path: Path) -> None:
    world.bundle.export(tmp_path)
    bad = tmp_path / "2026-01-01-bad"
    bad.mkdir()
    (bad / "finding.json").write_text("{")
    ran = ask("evidence", "list", tmp_path)
    assert ran.code == 0 and "root cause: attention on the CPU" in ran.out and "bad" in ran.out
    assert [("error" in row) for row in ask("evidence", "list", tmp_path, "--json").json] == [
        False,
        True,
    ]
    assert isinstance(check_bundle(Bundle(bad)), Checked)


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling", "device", "huge"])
def test_a_finding_that_is_no_file_is_never_passed_over(copy: Bundle, kind: str) -> None:
    path = copy.path / "finding.json"
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "dangling":
            path.symlink_to("nowhere")
        case "device":
            path.symlink_to("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    for folder in (copy.path, copy.path.parent):
        ran = ask("evidence", "verify", folder)
        assert ran.code == 65 and ran.out.startswith("UNKNOWN"), ran
        assert "could not be checked" in ran.out and "finding.json" in ran.out
        assert "nothing was checked" not in ran.err
        (one,) = ask("evidence", "verify", folder, "--json").json
        assert one["level"] == "unknown" and one["seal"] is None
    listed = ask("evidence", "list", copy.path.parent)
    assert "finding.json" in listed.out
    assert ask("why", "show", "--finding", copy.path).code == 65
    assert ask("why", "verify", "--finding", copy.path).code == 65


def test_one_that_cannot_be_read_hides_no_change_of_another(copy: Bundle, tmp_path: Path) -> None:
    folder = copy.path.parent
    (folder / "2026-01-01-odd" / "finding.json").mkdir(parents=True)
    assert ask("evidence", "verify", folder).code == 65
    (copy.path / "README.md").write_text("another")
    ran = ask("evidence", "verify", folder)
    assert ran.code == 1 and "README.md" in ran.out and "2026-01-01-odd" in ran.out


def test_a_fifo_in_the_place_of_a_file_of_the_bundle_is_a_change(copy: Bundle) -> None:
    artifact = next((copy.path / "artifacts").iterdir())
    for path in (copy.path / "README.md", copy.path.parent / "LOG.md", artifact):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    ran = ask("evidence", "verify", copy.path)
    assert ran.code == 1 and "README.md" in ran.out and artifact.name in ran.out


def test_a_finding_cut_anywhere_is_a_change(copy: Bundle) -> None:
    path = copy.path / "finding.json"
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        ran = ask("evidence", "verify", copy.path)
        assert ran.code == 1 and ran.out.startswith("FAIL") and "finding.json" in ran.out


def test_a_folder_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask("evidence", "verify").code == 2, "none was begun yet"
    (tmp_path / "file").write_text("x")
    for name, found in (("nowhere", "nothing there"), ("file", "no folder")):
        ran = ask("evidence", "verify", name)
        assert ran.code == 65 and found in ran.err
