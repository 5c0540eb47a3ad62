"""The package is not only a clone: a wheel carries what the program reads, and runs from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Sources are copied, so that a build leaves nothing in the working tree and takes nothing stale from it.
    source = folder / "source"
    names = ["pyproject.toml", "README.md", "LICENSE", "engine", "workbench"]
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(source)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder),
            str(source),
        ],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_carries_every_file_the_program_reads(wheel: Path) -> None:
    carried = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("engine", "workbench")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= carried, sorted(wanted - carried)
    assert {"engine/demo/chats.jsonl", "engine/demo/chat/teacher.gguf"} <= carried
    assert not {name for name in carried if name.startswith(("tests/", "evidence/"))}


def test_the_embedded_teacher_is_small_and_complete() -> None:
    teacher = ROOT / "engine" / "demo" / "teacher"
    files = {path.name: path.stat().st_size for path in teacher.iterdir()}
    assert set(files) == {
        "LICENSE",
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert sum(files.values()) <= 12_000_000


def test_the_embedded_teacher_of_the_chat_demo_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in (ROOT / "engine/demo/chat").iterdir()}
    assert set(files) == {
        "README.md",
        "student.json",
        "teacher.gguf",
        "teacher.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 3_000_000


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked into a folder of its own; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            # What is run is compiled when it is run; the rest need not be.
            "--no-compile",
            "--target",
            str(folder),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    return folder


def from_wheel(installed: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
    )


SHORT = [
    "--set",
    "train.steps=3",
    "--set",
    "train.rows=2",
    "--set",
    "eval.rows=2",
    "--set",
    "train.warmup_steps=1",
]
SHORT += ["--set", "data.max_bytes=300000", "--set", "compute.threads=1"]


@pytest.mark.soak
def test_the_installed_demo_runs_headless_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    where = from_wheel(
        installed, tmp_path, "-c", "import engine, workbench; print(engine.__file__)"
    )
    assert where.stdout.startswith(str(installed)), where.stderr
    done = from_wheel(installed, tmp_path, "-m", "workbench", "demo", *SHORT)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "student" / "model.safetensors").is_file()
    assert "held-out loss of the teacher" in done.stdout
    assert str(run) in done.stdout + done.stderr


@pytest.mark.soak
def test_the_installed_engine_distils_a_spec_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    demo = installed / "engine" / "demo"
    # The demo has been checked already, which takes as long as a start.
    unchecked = ["--set", "checks.enabled=false"]
    spec = tmp_path / "kd.toml"
    spec.write_text((demo / "demo.toml").read_text())
    paths = [
        "--set",
        f"teacher.path={demo / 'teacher'}",
        "--set",
        f"student.config={demo / 'student.json'}",
    ]
    (tmp_path / "teacher").mkdir()
    done = from_wheel(
        installed,
        tmp_path,
        "-m",
        "engine",
        "distill",
        "kd.toml",
        *paths,
        *SHORT,
        *unchecked,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "completed"
