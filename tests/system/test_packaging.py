"""The package is not only a clone: two wheels carry what the program reads, and run from an empty folder. That of the
viewer does so without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

import numpy
import pip as pip_package
import pytest
from packaging.requirements import Requirement

from engine.version import VERSION
from tests.support.paths import ROOT
from tests.support.run_folders import completed
from wheels.split import DOORS, ENGINE_PACKAGES, Split, is_below, module_name, split_wheel

PACKAGES = ("engine", "workbench")
OFFERED = (
    *(
        "checks",
        "completion",
        "contracts",
        "diagnose",
        "doctor",
        "evidence",
        "flips",
        "interchange",
    ),
    *("mcp", "notify", "report", "runs", "serve", "spec", "watch", "why"),
)
"""Modules of the commands that need no engine."""
NEED_ENGINE = (
    *("distill kd.toml", "distill --resume run", "prepare kd.toml", "data kd.toml", "verify run"),
    *("init --teacher t --student t --data t --name new", "flip kd.toml loss.alpha 0.1 0.2"),
    *("inspect t", "convert t out.gguf --quant bf16", "publish run out", "gate t"),
    *("generate --prompt a t", "eval ppl t --data t", "drill swapped_tokenizer"),
)
"""Commands that a folder with `kd.toml`, `run` and `t` has all inputs for."""
MISSING = (
    "expected the engine, found apr-workbench-view, which only shows runs\n"
    "hint: pip install apr-workbench\n"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Sources are copied, so that a build leaves nothing in the working tree and takes nothing stale from it.
    source = folder / "source"
    names = ["pyproject.toml", "README.md", "LICENSE", "apr_workbench.py", *PACKAGES]
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


@pytest.fixture(scope="module")
def wheels(whole: Path) -> tuple[Path, Path]:
    """The wheel of the viewer and that of the rest."""
    return split_wheel(whole, whole.parent / "dist")


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


def test_each_file_that_the_program_reads_is_in_one_of_the_wheels(
    wheels: tuple[Path, Path],
) -> None:
    view, rest = map(names_in, wheels)
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not view & rest
    assert wanted <= view | rest, sorted(wanted - view - rest)
    assert {"engine/demo/chats.jsonl", "engine/demo/chat/teacher.gguf"} <= rest
    assert {"apr_workbench.py", "engine/report/chart.js", "engine/agent/SKILL.md"} <= view
    assert not {name for name in view | rest if name.startswith(("tests/", "evidence/"))}
    manuals = f"apr_workbench_view-{VERSION}.data/data/share/man/man1"
    assert {f"{manuals}/engine-tail.1", f"{manuals}/apr-workbench.1"} <= view


def test_the_rest_needs_the_viewer_and_the_viewer_nothing_of_torch(
    wheels: tuple[Path, Path],
) -> None:
    view, rest = map(metadata_of, wheels)
    wanted = {Requirement(one).name for one in view.get_all("Requires-Dist", [])}
    assert not wanted & {*ENGINE_PACKAGES, "apr-workbench", "jinja2"}
    assert {"numpy", "msgspec", "textual", "nvidia-ml-py", "PyYAML", "mpmath"} <= wanted
    needed = rest.get_all("Requires-Dist", [])
    assert f"apr-workbench-view=={VERSION}" in needed
    assert "torch" in {Requirement(one).name for one in needed}
    extras = set(view.get_all("Provides-Extra", []))
    assert extras == {"agent", "data", "import", "notebook", "serve", "stacks"}
    assert {f'apr-workbench-view[{e}]=={VERSION}; extra == "{e}"' for e in extras} <= set(needed)
    (project,) = (tomllib.loads((ROOT / "pyproject.toml").read_text())["project"],)
    assert set(project["optional-dependencies"]) == set(rest.get_all("Provides-Extra", []))
    listed = {Requirement(one).name for one in project["dependencies"]}
    both = wanted | {Requirement(one).name for one in needed}
    assert listed <= both, "a dependency that no module imports"


@pytest.fixture(scope="module")
def split() -> Split:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    files.append(ROOT / "apr_workbench.py")
    return Split({str(path.relative_to(ROOT)): path.read_text() for path in files})


def test_nothing_of_the_viewer_imports_the_engine_but_commands_that_it_does_not_offer(
    split: Split,
) -> None:
    beyond = {name for name in split.view if split.needs_engine(name, split.engine, doors=True)}
    assert beyond and all(is_below(name, DOORS) for name in beyond)
    offered = {f"engine.cli.{name}" for name in OFFERED}
    assert offered <= split.view and not offered & beyond
    # A missing module is one that neither has: nothing that is imported was left out of both.
    for name in split.view - beyond:
        missing = {
            one.name
            for one in split.modules[name].imports
            if one.name in split.modules and one.name not in split.view
        }
        assert not missing, (name, missing)


def test_a_module_belongs_to_the_engine_by_what_it_imports_in_functions_too() -> None:
    made = Split(
        {
            "workbench/__init__.py": "",
            "workbench/seen.py": "from workbench import deep\nimport engine.cli.asks",
            "workbench/deep.py": "def f():\n    from . import heavy",
            "workbench/heavy.py": "def f():\n    import torch",
            "engine/__init__.py": "",
            "engine/cli/__init__.py": "",
            "engine/cli/asks.py": "def f():\n    import torch\nSTARTED = 'engine.started'",
            "engine/started.py": "",
            "engine/unused.py": "if TYPE_CHECKING:\n    import torch",
        }
    )
    assert made.engine == {"workbench.seen", "workbench.deep", "workbench.heavy"}
    assert made.view == {"workbench"}


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


def unpacked(folder: Path, *wheels: Path) -> Path:
    """The wheels unpacked into a folder of their own; their dependencies are those of this environment."""
    pip("install", "--target", folder, *wheels)
    return folder


def pip(command: str, *words: object, python: Path | None = None) -> None:
    # What is run is compiled when it is run; the rest need not be.
    options = ["--no-index", "--no-deps", "--no-compile"] if command == "install" else ["--yes"]
    start = [str(python or sys.executable), "-m", "pip", command, "-q"]
    subprocess.run(
        [*start, "--disable-pip-version-check", *options, *map(str, words)],
        # Another Python finds this one's pip beside it.
        env=os.environ | ({"PYTHONPATH": str(python.parents[2])} if python else {}),
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def installed(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("installed"), *wheels)


@pytest.fixture(scope="module")
def viewer(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("viewer"), wheels[0])


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


ASK = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({sorted(ENGINE_PACKAGES)!r}))
import apr_workbench
from engine.cli.main import main
def ask(begin, words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = begin(words)
        except SystemExit as usage:
            code = usage.code
    return code, out.getvalue(), err.getvalue()
"""
"""Begin a program that may ask for commands, without what needs torch."""


def ask_viewer(viewer: Path, cwd: Path, commands: Iterable[str], begin: str = "main") -> list[Any]:
    """Run commands in one process; returns the exit code, the output and the messages of each."""
    code = f"{ASK}print(json.dumps([ask({begin}, one.split()) for one in {list(commands)!r}]))"
    done = from_wheel(viewer, cwd, "-c", code)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_the_viewer_reads_judges_and_reports_runs_without_torch(
    viewer: Path, tmp_path: Path
) -> None:
    completed(tmp_path / "runs" / "kd", nan=(40,))
    shutil.copytree(ROOT / "evidence" / "2026-11-27-hang-at-step-zero", tmp_path / "hang")
    codes = {
        "runs": 0,
        "tail runs/kd": 0,
        "diagnose .": 1,
        "report runs/kd": 0,
        "report hang": 0,
        "tag runs/kd good": 0,
        "export runs/kd --to csv": 0,
        "why show --finding hang": 0,
        "flips": 0,
        "evidence list": 0,
        "completion bash": 0,
        "spec": 0,
        "mcp --skill": 0,
    }
    for (command, code), answer in zip(
        codes.items(), ask_viewer(viewer, tmp_path, codes), strict=True
    ):
        assert answer[0] == code, (command, answer)
    screen = f"{ASK}import workbench.tui.app; print(workbench.__file__)"
    done = from_wheel(viewer, tmp_path, "-c", screen)
    assert done.stdout.startswith(str(viewer)), done.stderr


def test_the_viewer_says_what_to_install_for_the_engine_and_leaves_nothing(
    viewer: Path, tmp_path: Path
) -> None:
    spec = '[teacher]\npath = "t"\n[student]\npath = "t"\n[data]\ncorpus = "t"\n'
    (tmp_path / "kd.toml").write_text(spec)
    (tmp_path / "t").mkdir()
    completed(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    for command, (code, out, err) in zip(
        NEED_ENGINE, ask_viewer(viewer, tmp_path, NEED_ENGINE), strict=True
    ):
        wanted = f"engine {command.split()[0]}: {MISSING}"
        assert (code, out) == (65, "") and err.endswith(wanted), (command, code, out, err)
    (demo,) = ask_viewer(viewer, tmp_path, ["demo"], "__import__('workbench.cli').cli.main")
    assert demo == [65, "", f"apr-workbench: {MISSING}"]
    assert sorted(tmp_path.rglob("*")) == before


def later(whole: Path, folder: Path) -> tuple[Path, Path]:
    """Return the two wheels of a later version, in which a module of the engine has come to the viewer."""
    version = f"{VERSION}.post1"
    target = folder / whole.name.replace(VERSION, version)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == MOVED:
                data = b"def cost():\n    pass\n"
            elif name == "engine/cli/report.py":
                data += f"from {module_name(MOVED)} import cost\n".encode()
            elif name.endswith(("METADATA", "engine/version.py")):
                data = data.replace(VERSION.encode(), version.encode())
            new.writestr(name.replace(VERSION, version), data)
    view, rest = split_wheel(target, folder)
    assert MOVED in names_in(view) and MOVED not in names_in(rest)
    return view, rest


MOVED = "engine/plan/cost.py"


class Environment:
    """An environment of its own, changed with pip."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commands = folder, folder / "venv" / "bin"
        venv.create(folder / "venv", symlinks=True)
        (folder / "pip").symlink_to(Path(pip_package.__file__).parent)
        (self.packages,) = (folder / "venv" / "lib").glob("*/site-packages")

    def change(self, command: str, *words: object) -> None:
        pip(command, *words, python=self.commands / "python")

    def engine(self) -> tuple[int, str]:
        done = subprocess.run(
            [self.commands / "engine", "runs"],
            env={**os.environ, "PYTHONPATH": str(Path(numpy.__file__).parents[1])},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    def lacks(self, *wheels: Path) -> set[str]:
        wanted = set().union(*map(names_in, wheels))
        return {name for name in wanted if not self._place(name).exists()}

    def _place(self, name: str) -> Path:
        """Return where pip puts a file: a man page beside the folder of the commands."""
        _, is_data, page = name.partition(".data/data/")
        return self.folder / "venv" / page if is_data else self.packages / name


def test_the_distributions_are_installed_together_and_the_viewer_stays_alone(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    """Every other order, and an upgrade, take a minute of pip."""
    there, (view, rest) = Environment(tmp_path), wheels
    there.change("install", rest, view)
    assert there.engine() == (0, NO_RUNS) and not there.lacks(view, rest)
    there.change("uninstall", "apr-workbench")
    assert there.engine() == (0, NO_RUNS) and not there.lacks(view)
    assert not (there.packages / "engine" / "train" / "trainer.py").exists()


@pytest.mark.soak
def test_the_distributions_come_and_go_in_any_order(
    whole: Path, wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    there, (view, rest) = Environment(tmp_path), wheels
    change, engine, lacks = there.change, there.engine, there.lacks
    new_view, new_rest = later(whole, tmp_path)
    change("install", rest)
    change("install", view)
    assert engine() == (0, NO_RUNS) and not lacks(view, rest)
    change("uninstall", "apr-workbench-view")
    assert not lacks(rest) and not (there.commands / "engine").exists()
    change("install", view)
    change("uninstall", "apr-workbench")
    assert engine() == (0, NO_RUNS) and not lacks(view)
    assert not (there.packages / "engine" / "train" / "trainer.py").exists()
    change("install", rest)
    assert engine() == (0, NO_RUNS) and not lacks(view, rest)
    # pip installs the new viewer before it removes the old engine, and with that what has moved since.
    change("install", "--upgrade", new_view, new_rest)
    assert lacks(new_view, new_rest) == {MOVED, "engine/plan/__init__.py"}
    code, said = engine()
    mend = "pip install --force-reinstall --no-deps "
    both = f"apr-workbench-view=={VERSION}.post1 apr-workbench=={VERSION}.post1"
    wanted = f"expected the module {module_name(MOVED)}, found none\nhint: {mend}{both}\n"
    assert code == 65 and said == f"engine: installation: {wanted}"
    change("install", "--force-reinstall", new_view, new_rest)
    assert engine() == (0, NO_RUNS) and not lacks(new_view, new_rest)


NO_RUNS = "no runs in runs; start one with `engine distill SPEC.toml` or `apr-workbench demo`\n"

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
