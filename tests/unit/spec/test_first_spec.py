"""The specs that somebody writes on the first day: what is left out has a default that fits, and what is wrong is
answered with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import SpecError
from engine.spec import KEYS, RunSpec, TrainSection, build_spec, load_spec, spec_to_toml
from engine.spec.other_names import OTHER_NAMES

MODELS = '[teacher]\npath = "teacher"\n[student]\nconfig = "student.json"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "student.json").write_text("{}")
    return tmp_path


def load(folder: Path, text: str, *sets: str) -> RunSpec:
    (folder / "kd.toml").write_text(text)
    return load_spec(folder / "kd.toml", list(sets))[0]


def problems(folder: Path, text: str, *sets: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(folder, text, *sets)
    return [line.replace(f"{folder}/", "") for line in caught.value.problems]


@pytest.mark.parametrize("steps", [1, 2, 5, 19, 100, 200, 1000, 5000])
def test_a_spec_that_sets_no_warm_up_has_one_that_fits(folder: Path, steps: int) -> None:
    train = load(folder, f"{MODELS}[train]\nsteps = {steps}\n").train
    assert 0 <= train.warmup <= steps // 10
    assert load(folder, MODELS, f"train.steps={steps}").train.warmup == train.warmup


def test_the_warm_up_by_default_is_a_share_of_the_steps() -> None:
    warmup = {n: TrainSection(steps=n).warmup for n in (5, 50, 200, 1000, 5000, 10**6)}
    assert warmup == {5: 0, 50: 5, 200: 20, 1000: 20, 5000: 100, 10**6: 20_000}


def test_a_warm_up_that_is_set_is_kept(folder: Path) -> None:
    for set_to in (0, 1, 7, 30):
        train = load(folder, f"{MODELS}[train]\nsteps = 30\nwarmup_steps = {set_to}\n").train
        assert train.warmup == train.warmup_steps == set_to


def test_a_warm_up_longer_than_the_run_is_one_error_at_its_line(folder: Path) -> None:
    found = problems(folder, f"{MODELS}[train]\nsteps = 5\nwarmup_steps = 20\n")
    assert found == ["kd.toml:7: train.warmup_steps: expected at most train.steps (5), found 20"]


def test_the_printed_spec_takes_fewer_steps_without_another_change(folder: Path) -> None:
    text = spec_to_toml(load(folder, MODELS))
    assert load(folder, text.replace("\nsteps = 1000\n", "\nsteps = 3\n")).train.warmup == 0


@pytest.mark.parametrize(("theirs", "ours"), OTHER_NAMES.items())
def test_a_name_of_another_trainer_is_answered_with_ours(theirs: str, ours: str) -> None:
    assert ours.split(",")[0].split(" ")[0] in KEYS
    assert theirs not in KEYS
    for key in (theirs,) if "." in theirs else (theirs, f"train.{theirs}", f"training.{theirs}"):
        if key in KEYS:
            continue
        with pytest.raises(SpecError) as caught:
            build_spec({}, sets=[f"{key}=1"], check_paths=False)
        assert f"--set {key}: unknown key; did you mean {ours}?" in caught.value.problems


def test_a_setting_in_another_section_is_found_by_its_name(folder: Path) -> None:
    text = f"{MODELS}[train]\nbatch_size = 4\ntemperature = 1.0\n[optimizer]\nlr = 1e-4\n"
    assert problems(folder, text) == [
        "kd.toml:6: train.batch_size: unknown key; did you mean train.rows?",
        "kd.toml:7: train.temperature: unknown key; did you mean loss.temperature?",
        "kd.toml:9: optimizer.lr: unknown key; did you mean train.lr?",
    ]


def test_a_spec_without_a_teacher_is_told_what_to_write(folder: Path) -> None:
    found = problems(folder, '[student]\nconfig = "student.json"\n')
    assert found == [
        'kd.toml: teacher.path: expected a teacher, found none; write [teacher] path = "FOLDER or FILE", '
        "or loss.alpha = 1 to train the student on the text alone"
    ]
    alone = load(folder, '[student]\nconfig = "student.json"\n[loss]\nalpha = 1\n')
    assert not alone.has_teacher


def test_a_teacher_that_is_switched_off_is_told_what_goes_with_it(folder: Path) -> None:
    found = problems(folder, f"{MODELS}".replace("[student]", 'backend = "none"\n[student]'))
    assert found == [
        'kd.toml:3: teacher.backend: expected loss.alpha = 1 with "none", found no loss.alpha'
    ]


def test_a_spec_without_a_student_is_told_what_to_write(folder: Path) -> None:
    assert problems(folder, '[teacher]\npath = "teacher"\n') == [
        "kd.toml: student.path: expected exactly one of student.path and student.config, found neither; "
        'write [student] path = "FOLDER or FILE" to continue from a model, or config = "config.json" for fresh weights'
    ]


def test_an_empty_spec_names_both_models(folder: Path) -> None:
    assert [line.split(": ")[1] for line in problems(folder, "")] == [
        "teacher.path",
        "student.path",
    ]


def test_a_model_written_as_a_value_is_told_its_section(folder: Path) -> None:
    found = problems(folder, 'teacher = "teacher"\nstudent = "student"\n')
    assert found[:2] == [
        'kd.toml:1: teacher: expected a section, [teacher] with path = "teacher", found a string',
        'kd.toml:2: student: expected a section, [student] with path = "student", found a string',
    ]


def test_a_path_that_is_not_there_is_shown_as_it_was_written(folder: Path) -> None:
    found = problems(folder, MODELS.replace('"teacher"', '"../Qwen/Qwen3"'))
    assert found[0].startswith("kd.toml:2: teacher.path: expected a file or folder at ")
    assert found[0].endswith("/Qwen/Qwen3, found nothing there")
    hub = problems(folder, MODELS.replace('"teacher"', '"Qwen/Qwen2.5-7B"'))
    assert len(hub) == 1
    assert hub[0].startswith("kd.toml:2: teacher.path: Qwen/Qwen2.5-7B — expected a file or folder")
    assert hub[0].endswith("; `hf download Qwen/Qwen2.5-7B` fetches it")
