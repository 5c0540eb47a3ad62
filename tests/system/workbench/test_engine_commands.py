"""Starting and stopping runs as a shell would: the engine's own words and exit codes come back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import BadInput, EngineError, InternalError, RunLogError, UsageError
from tests.support.kit import Kit
from tests.support.run_folders import completed, killed
from tests.support.running import wait_until_ended
from workbench import engine_commands
from workbench.engine_commands import resume_run, start_run, stop_run
from workbench.feed import RunFeed

ECHO = "import json, sys; open({path!r}, 'w').write(json.dumps(sys.argv[1:])); {then}"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program in the place of `python -m engine` that writes its arguments down, then does `then`."""

    def replace(then: str) -> None:
        program = ECHO.format(path=str(tmp_path / "arguments"), then=then)
        monkeypatch.setattr(engine_commands, "ENGINE", (sys.executable, "-c", program))

    return replace


def arguments(tmp_path: Path) -> list[str]:
    given: list[str] = json.loads((tmp_path / "arguments").read_text())
    return given


def test_a_run_is_started_detached_with_its_settings(
    engine: Callable[[str], None], tmp_path: Path
) -> None:
    run = completed(tmp_path / "run")
    engine(f"print({str(run.path)!r})")
    started = start_run(
        Path("kd.toml"),
        ["train.steps=5", "loss.alpha=0.1"],
        run.path,
    )
    assert started == run
    assert arguments(tmp_path) == [
        *("distill", "kd.toml", "--set", "train.steps=5", "--set", "loss.alpha=0.1"),
        *("--out", str(run.path), "--detach"),
    ]


def test_a_run_is_resumed_in_its_folder(engine: Callable[[str], None], tmp_path: Path) -> None:
    run = killed(tmp_path / "run")
    engine(f"print({str(run.path)!r})")
    assert resume_run(run) == run
    assert arguments(tmp_path) == ["distill", "--resume", str(run.path), "--detach"]


def test_stopping_returns_what_the_engine_said(
    engine: Callable[[str], None], tmp_path: Path
) -> None:
    run = killed(tmp_path / "run")
    engine("print('asked run', file=sys.stderr)")
    said = stop_run(run)
    assert (said, arguments(tmp_path)) == ("asked run", ["stop", str(run.path)])


@pytest.mark.parametrize(
    ("code", "kind"), [(64, UsageError), (65, BadInput), (70, InternalError), (1, InternalError)]
)
def test_a_refusal_keeps_its_class_message_and_hint(
    engine: Callable[[str], None], code: int, kind: type[EngineError]
) -> None:
    then = f"sys.stderr.write('spec: bad\\nhint: mend it\\n'); sys.exit({code})"
    engine(then)
    with pytest.raises(kind) as caught:
        start_run(Path("kd.toml"), [], None)
    assert "spec: bad" in caught.value.message
    assert caught.value.hint == "mend it"


def test_an_engine_that_dies_in_silence_is_told(engine: Callable[[str], None]) -> None:
    engine("sys.exit(3)")
    with pytest.raises(InternalError, match="found none"):
        start_run(Path("kd.toml"), [], None)


@pytest.mark.parametrize("then", ["pass", "print('one'); print('two')"])
def test_stdout_that_is_not_one_path_is_refused(engine: Callable[[str], None], then: str) -> None:
    engine(then)
    with pytest.raises(InternalError, match="expected the path of a run folder"):
        start_run(Path("kd.toml"), [], None)


def test_a_path_without_a_run_is_refused(engine: Callable[[str], None]) -> None:
    engine("print('/nothing')")
    with pytest.raises(RunLogError):
        start_run(Path("kd.toml"), [], None)


# The form of a new run starts one, too, and a notebook starts, stops and resumes one.
@pytest.mark.soak
def test_the_real_engine_runs_what_was_started_here(kit: Kit, tmp_path: Path) -> None:
    run = start_run(kit.spec(tmp_path), ["train.steps=6"], tmp_path / "run")
    feed = RunFeed(run)
    wait_until_ended(run.path)
    snapshot = feed.poll()
    assert snapshot.has_ended
    assert (snapshot.state, snapshot.view.last_step) == ("completed", 6)
    with pytest.raises(BadInput, match="completed"):
        resume_run(run)


def test_the_real_engine_refuses_a_spec_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing\.toml"):
        start_run(tmp_path / "nothing.toml", [], tmp_path / "run")
    assert not (tmp_path / "run").exists()
