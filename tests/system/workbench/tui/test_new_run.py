"""A run that is to be started: its form is the engine's own table of settings, checked as it is typed,
and what is started is the command that is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from engine.errors import BadInput
from engine.log.folder import RunFolder, create_run
from engine.spec import KEYS, load_spec
from tests.support.kit import Kit
from tests.support.run_folders import completed
from tests.support.running import wait_until_ended
from tests.support.screens import on_screen, press, settle, text_of, words_of
from workbench.drafts import (
    ESSENTIALS,
    beginnings,
    draft_like,
    draft_of_nothing,
    find_specs,
    free_name,
    matching,
    open_draft,
    shown_first,
)
from workbench.engine_commands import check_run
from workbench.feed import RunFeed
from workbench.tui.screens import new_run

SIZES = [
    ((80, 24), True),
    *(
        pytest.param(size, False, marks=pytest.mark.soak)
        for size in ((160, 45), (120, 40), (40, 12))
    ),
]
SIGNS = {".": "full_stop", "/": "slash", "-": "minus", "_": "underscore", " ": "space"}


def typed(text: str) -> list[str]:
    return [SIGNS.get(char, char) for char in text]


@pytest.fixture
def spec(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec in the working folder, named as it is there."""
    monkeypatch.chdir(tmp_path)
    return kit.spec(tmp_path, train__steps=6).relative_to(tmp_path)


# The draft.


def test_every_setting_of_the_engine_is_in_the_form(spec: Path) -> None:
    settings = {setting.option.key: setting for setting in open_draft(spec).settings()}
    assert tuple(settings) == KEYS
    assert (settings["train.steps"].value, settings["train.steps"].source[:5]) == ("6", "line ")
    assert (settings["train.beta1"].value, settings["train.beta1"].source) == ("0.9", "default")


def test_a_change_is_the_set_argument_of_the_command(spec: Path) -> None:
    draft = open_draft(spec).edited("loss.alpha", "0.5").edited("train.steps", "9")
    assert draft.sets == ["loss.alpha=0.5", "train.steps=9"]
    built, problems = draft.build()
    assert not problems
    assert built == load_spec(spec, draft.sets)[0]
    assert draft.command.startswith(f"engine distill {spec} --set ")
    assert draft.command.endswith(" --detach")
    assert open_draft(spec).edited("loss.alpha", "0.5").edited("loss.alpha", None).sets == []


@pytest.mark.parametrize("name", ["2024", "true", "1e3", "plain", 'with "quotes"', "[a]"])
def test_a_text_that_looks_like_a_number_stays_a_text(spec: Path, name: str) -> None:
    built, problems = open_draft(spec).edited("run.name", name).build()
    assert not problems
    assert built is not None
    assert built.run.name == name


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("train.lr", "x", "--set train.lr: expected a number"),
        ("loss.alpha", "2", "--set loss.alpha: expected a number in [0, 1], found 2"),
        ("train.schedule", "cosin", "expected one of cosine, constant"),
        ("train.warmup_steps", "50", "expected at most train.steps (6), found 50"),
    ],
)
def test_a_wrong_value_is_told_in_the_engines_words(
    spec: Path, key: str, text: str, words: str
) -> None:
    draft = open_draft(spec).edited(key, text)
    built, problems = draft.build()
    assert built is None
    (setting,) = (s for s in draft.settings(problems) if s.option.key == key)
    assert words in setting.problems[0]


def test_settings_of_the_environment_are_told(spec: Path) -> None:
    draft = open_draft(spec, {"MANAGED_MEMORY": "0"})
    (setting,) = (s for s in draft.settings() if s.option.key == "memory.allocator")
    assert (setting.value, setting.source) == ("native", "environment")
    assert "memory.allocator" not in draft.command, "the engine reads its environment by itself"


def run_of(spec: Path, folder: Path, sets: list[str]) -> RunFolder:
    built, text = load_spec(spec, sets)
    effective = {"spec_file": str(spec.absolute()), "sets": sets, "spec": built.to_dict()}
    return create_run(folder, text, effective)


@pytest.mark.parametrize("is_there", [True, False])
def test_starting_again_gives_the_settings_that_the_run_had(
    spec: Path, tmp_path: Path, is_there: bool
) -> None:
    run = run_of(spec, tmp_path / "runs" / "kd", ["loss.alpha=0.5", "run.name=kd"])
    wanted = json.loads(run.effective.read_text())["spec"]
    if not is_there:
        spec.unlink()
    draft = draft_like(run)
    assert draft.file == (spec.absolute() if is_there else run.spec)
    built, problems = draft.build()
    assert not problems
    assert built is not None
    assert {**built.to_dict(), "run": None} == {**wanted, "run": None}
    assert (built.run.name, built.run.out) == ("kd-2", str((tmp_path / "runs").resolve()))


def test_a_run_that_does_not_tell_its_settings_cannot_be_started_again(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected the settings of the run"):
        draft_like(completed(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "there", "free"),
    [
        ("kd", [], "kd-2"),
        ("kd", ["kd-2"], "kd-3"),
        ("kd-2", [], "kd-3"),
        ("kd-20260101-120000", [], "kd-20260101-120000-2"),
    ],
)
def test_the_next_name_is_one_that_is_free(
    tmp_path: Path, name: str, there: list[str], free: str
) -> None:
    for other in there:
        (tmp_path / other).mkdir()
    assert free_name(tmp_path, name) == free


def test_a_saved_spec_is_the_same_run_and_no_file_is_overwritten(
    spec: Path, tmp_path: Path
) -> None:
    draft = open_draft(spec).edited("train.lr", "0.01")
    saved = draft.save_as(tmp_path / "new.toml")
    assert saved.sets == []
    assert saved.build()[0] == draft.build()[0]
    with pytest.raises(BadInput, match="one that exists"):
        draft.save_as(tmp_path / "new.toml")
    with pytest.raises(BadInput, match=r"train\.lr"):
        draft.edited("train.lr", "0").save_as(tmp_path / "other.toml")
    assert not (tmp_path / "other.toml").exists()


def test_specs_are_found_and_other_files_are_not(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "broken.toml").write_text("[train\n")
    monkeypatch.chdir("/")
    found = find_specs([tmp_path, tmp_path / "nothing"])
    assert found[0] == tmp_path / spec
    assert [path.name for path in found[1:]] == ["demo.toml"]


def test_the_engine_checks_the_inputs_without_starting(spec: Path, tmp_path: Path) -> None:
    assert "sound" in check_run(spec, [], tmp_path / "run")
    with pytest.raises(BadInput, match=r"seq_len"):
        check_run(spec, ["data.seq_len=100000"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_essentials_come_first_and_then_what_is_not_as_usual(spec: Path) -> None:
    draft = open_draft(spec).edited("train.seed", "7").edited("gate.pass_at_1", "2")
    _, problems = draft.build()
    keys = [setting.option.key for setting in shown_first(draft.settings(problems))]
    assert tuple(keys[: len(ESSENTIALS)]) == ESSENTIALS
    assert {"train.seed", "gate.pass_at_1"} <= set(keys[len(ESSENTIALS) :])
    assert "train.beta1" not in keys


@pytest.mark.parametrize(
    ("pattern", "first", "also"),
    [
        ("beta", "loss.beta", "train.beta2"),
        ("gradient clipped", "train.clip_norm", "train.clip_norm"),
        ("columns softmax", "vocab.align", "vocab.align"),
        ("WARM", "train.warmup_steps", "train.schedule"),
    ],
)
def test_a_search_finds_words_of_name_and_description(
    spec: Path, pattern: str, first: str, also: str
) -> None:
    keys = [setting.option.key for setting in matching(open_draft(spec).settings(), pattern)]
    assert keys[0] == first and also in keys


def test_an_empty_search_has_all_settings_and_a_strange_one_none(spec: Path) -> None:
    settings = open_draft(spec).settings()
    assert matching(settings, "") == settings and matching(settings, "weather") == []


def test_a_run_begins_from_a_template_a_past_run_or_nothing(spec: Path, tmp_path: Path) -> None:
    run = run_of(spec, tmp_path / "runs" / "kd", ["loss.alpha=0.5", "run.name=kd"])
    found = beginnings([tmp_path / "runs"])
    assert [(begin.kind, begin.name) for begin in found if "demo" not in begin.name] == [
        ("template", str(spec)),
        ("run", run.name),
        ("nothing", "all settings at their defaults"),
    ]
    drafts = {begin.kind: begin.make() for begin in found if "demo" not in begin.name}
    assert drafts["template"].edits == {} and drafts["template"].file == spec
    assert drafts["run"].edits["loss.alpha"] == "0.5"
    assert drafts["nothing"].file == Path("run.toml") and not drafts["nothing"].written


def test_a_draft_of_nothing_is_a_spec_when_it_is_written(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    draft = draft_of_nothing(Path())
    assert draft.file == Path("run-2.toml") and draft.build()[0] is None
    known, _ = open_draft(spec).build()
    assert known is not None
    draft = draft.edited("teacher.path", known.teacher.path)
    draft = draft.edited("student.config", known.student.config)
    assert draft.command == "engine distill run-2.toml --detach"
    assert draft.save_as(draft.file).build()[0] == draft.build()[0]


# The screen.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would have been started."""
    asked: list[object] = []

    def start(file: Path, sets: list[str], out: Path | None) -> RunFolder:
        asked.append((file, sets, out))
        raise BadInput("run folder: there is one", hint="choose another")

    monkeypatch.setattr(new_run, "start_run", start)
    return asked


@pytest.mark.parametrize(("size", "ascii_only"), SIZES)
def test_a_value_is_checked_as_it_is_typed_at_every_size(
    spec: Path, tmp_path: Path, size: tuple[int, int], ascii_only: bool, started: list[object]
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "begin from" in words_of(pilot)
        await press(pilot, "enter", "slash", *typed("train.lr"), "enter", "enter")
        await press(pilot, *["backspace"] * 6, "minus", "1")
        assert "--set train.lr:" in words_of(pilot)
        assert "above 0, found -1" in words_of(pilot)
        await press(pilot, "enter", "backspace", "backspace", *typed("0.01"))
        assert "above 0" not in words_of(pilot).replace("a number above 0;", "")
        await press(pilot, "enter", "s")
        assert "train.lr=0.01" in words_of(pilot)
        assert started == []
        await press(pilot, "y")
        assert "there is one" in words_of(pilot)
        assert not ascii_only or text_of(pilot).isascii()

    on_screen([tmp_path], size, script, ascii_only=ascii_only)
    assert started == [(spec, [f"run.out={tmp_path}", "train.lr=0.01"], None)]


def test_space_goes_through_the_allowed_values_and_backspace_takes_it_back(
    spec: Path, tmp_path: Path
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "slash", *typed("schedule"), "enter", "space")
        assert "* train.schedule" in words_of(pilot)
        assert "train.schedule=constant" in words_of(pilot)
        await press(pilot, "space")
        assert "train.schedule=cosine" in words_of(pilot)
        await press(pilot, "backspace")
        assert "--set train.schedule" not in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_a_form_with_a_problem_starts_nothing(
    spec: Path, tmp_path: Path, started: list[object]
) -> None:
    spec.write_text(spec.read_text().replace("steps = 6", "steps = 0"))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter")
        assert "! train.steps" in words_of(pilot)
        assert "spec.toml:" in words_of(pilot)
        assert "train.seed" not in words_of(pilot), "it is the default"
        await press(pilot, "s")
        assert "not started" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)
    assert started == []


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
def test_a_description_is_whole_at_every_size(
    spec: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "slash", *typed("recomputed backward"))
        words = words_of(pilot)
        assert "student.checkpointing" in words or "checkpointing" in words
        await press(pilot, "enter")
        for part in ("Whether activations are recomputed", "instead of kept"):
            assert part in words_of(pilot), words_of(pilot)

    on_screen([tmp_path], size, script, ascii_only=True)


def test_enter_pressed_twice_at_once_is_one_answer(spec: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "slash", *typed("seed"))
        line = pilot.app.screen.query_one("#line", Input)
        for _ in range(2):
            line.post_message(Input.Submitted(line, "seed"))
        await settle(pilot)
        assert "train.seed" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_a_click_opens_the_search_and_the_field(spec: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter")
        lines = text_of(pilot).splitlines()
        (more,) = (at for at, line in enumerate(lines) if "more settings: search" in line)
        await pilot.click(offset=(10, more))
        await press(pilot, *typed("seed"))
        await settle(pilot)
        (seed,) = (
            at for at, line in enumerate(text_of(pilot).splitlines()) if "train.seed " in line
        )
        await pilot.click(offset=(10, seed))
        await press(pilot, "7", "enter")
        assert "train.seed=7" in words_of(pilot)
        await press(pilot, "escape")
        assert "train.lr" in words_of(pilot) and "* train.seed" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script, ascii_only=True)


def test_what_is_wrong_is_told_below_its_field(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text().replace("steps = 6", "steps = 0"))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter")
        lines = text_of(pilot).splitlines()
        (at,) = (at for at, line in enumerate(lines) if "! train.steps" in line)
        assert "train.steps: expected a number of at least 1, found 0" in lines[at + 1]

    on_screen([tmp_path], (120, 40), script, ascii_only=True)


def test_from_nothing_a_spec_is_written_before_the_start(
    spec: Path, tmp_path: Path, started: list[object]
) -> None:
    known, _ = open_draft(spec).build()
    assert known is not None
    given = {"teacher.path": known.teacher.path, "student.config": known.student.config}

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "end", "enter")
        assert "teacher.path: expected a teacher, found none" in words_of(pilot)
        await press(pilot, "s")
        assert "not started" in words_of(pilot)
        for key, value in given.items():
            await press(pilot, "slash", "ctrl+u", *typed(key), "enter", "enter")
            pilot.app.screen.query_one("#line", Input).value = value
            await press(pilot, "enter", "escape")
        assert "run.toml is written first: engine distill run.toml --detach" in words_of(pilot)
        await press(pilot, "s", "y")
        assert "there is one" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)
    assert started == [(Path("run.toml"), [], None)]
    assert load_spec(tmp_path / "run.toml")[0].teacher.path == known.teacher.path


def test_leaving_a_line_keeps_the_value_from_before(spec: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "slash", *typed("train.seed"), "enter", "enter")
        await press(pilot, "backspace", "7")
        assert "train.seed=7" in words_of(pilot)
        await press(pilot, "escape")
        assert "train.seed=" not in words_of(pilot)
        await press(pilot, "escape", "escape")
        assert "No run in" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script)


def test_the_form_saves_a_new_spec(spec: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "a", "ctrl+u", *typed("saved.toml"), "enter")
        assert "saved as" in words_of(pilot)

    on_screen([tmp_path], (120, 40), script)
    assert load_spec(tmp_path / "saved.toml")[0].train.steps == 6


def test_read_only_has_no_form(spec: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "s", "o", "a")
        assert "spec.toml" not in words_of(pilot)
        assert "read-only" in words_of(pilot)

    on_screen([tmp_path], (80, 24), script, read_only=True)


def test_a_run_is_checked_and_started_and_its_screen_opens(spec: Path, tmp_path: Path) -> None:
    runs: list[RunFolder] = []

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "enter", "k")
        assert "sound" in words_of(pilot)
        await press(pilot, "s", "y")
        await settle(pilot)
        assert "spec-" in text_of(pilot).splitlines()[1]
        runs.extend(RunFolder(path) for path in tmp_path.glob("spec-*"))

    on_screen([tmp_path], (120, 40), script)
    (run,) = runs
    wait_until_ended(run.path)
    snapshot = RunFeed(run).read_all()
    assert (snapshot.state, snapshot.view.last_step) == ("completed", 6)
