"""Commands take a model by its name on the hub, from the cache, and say which commit they took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.finished_runs import carry_out
from tests.support.hub_caches import COMMIT, NAME, OTHER, cached, files_of
from tests.support.kit import Kit
from tests.support.running import engine_here

SAID = f"{NAME} at commit {COMMIT}, from the hub cache: "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def test_a_run_records_the_snapshot_and_goes_on_with_it(
    kit: Kit, tmp_path: Path, cache: Path
) -> None:
    folder = cached(cache, files_of(kit.teacher))
    spec = kit.spec(tmp_path, teacher__path=NAME, train__steps=3)
    checked = engine_here("distill", spec, "--check-inputs")
    assert checked.returncode == 0, checked.stderr
    assert f"teacher.path: {SAID}{folder}" in checked.stderr
    run, code = carry_out(spec, tmp_path / "run", "train.stop_after=1")
    assert code == 0
    recorded = json.loads(run.effective.read_text())["spec"]
    assert recorded["teacher"]["path"] == str(folder)
    assert f"teacher.path: {SAID}" in run.events.read_text()
    # The branch moves to a commit that is no model.
    cached(cache, {"README.md": b"moved"}, commit=OTHER)
    resumed = engine_here("distill", "--resume", run.path, "--create")
    assert resumed.returncode == 0, resumed.stderr
    # The snapshot is deleted.
    (folder / "model.safetensors").unlink()
    gone = engine_here("distill", "--resume", run.path, "--create")
    assert gone.returncode == 65
    assert f"`hf download {NAME} --revision {COMMIT}` fetches it" in gone.stderr


def test_init_keeps_the_name_in_the_spec(kit: Kit, cache: Path) -> None:
    folder = cached(cache, files_of(kit.teacher))
    made = engine_here(
        "init", "--teacher", NAME, "--student", kit.student, "--data", kit.corpus, "--name", "hub"
    )
    assert made.returncode == 0, made.stderr
    assert f'path = "{NAME}"' in Path("hub.toml").read_text()
    assert f"teacher.path: {SAID}{folder}" in made.stderr


def test_commands_that_take_a_model_take_its_name(kit: Kit, cache: Path) -> None:
    folder = cached(cache, files_of(kit.teacher))
    for command in (
        ("inspect", NAME),
        ("convert", NAME, "tiny.gguf", "--quant", "f32"),
        ("generate", NAME, "--prompt", "def", "--max-tokens", "1", "--device", "cpu"),
        ("eval", "ppl", f"{NAME}@main", "--data", kit.corpus, "--length", "32", "--device", "cpu"),
    ):
        done = engine_here(*command)
        assert done.returncode == 0, done.stderr
        assert f"{SAID}{folder}" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "Org/Absent"),
        ("convert", "Org/Absent", "out.gguf", "--quant", "f32"),
        ("generate", "Org/Absent", "--prompt", "def"),
        ("eval", "ppl", "Org/Absent", "--data", "."),
        ("init", "--teacher", "Org/Absent", "--student", "x", "--data", "python-stdlib"),
    ],
)
def test_a_name_that_is_not_in_the_cache_is_one_line_with_the_command(
    command: tuple[str, ...], cache: Path
) -> None:
    Path("text.txt").write_text("some text\n")
    done = engine_here(*command)
    assert done.returncode == 65
    [line] = [line for line in done.stderr.splitlines() if "Org/Absent" in line]
    assert str(cache) in line and line.endswith("`hf download Org/Absent` fetches it")
