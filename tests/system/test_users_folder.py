"""A folder and a PYTHONPATH of the user's may hold modules of any name; none of them runs in a process of ours."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.attach.command import PROBE
from engine.log.folder import RunFolder
from tests.support.kit import Kit
from tests.support.paths import ROOT

SHADOWING = [
    "engine",
    "workbench",
    "token",
    "queue",
    "json",
    "typing",
    "types",
    "random",
    "string",
    "signal",
    "select",
    "socket",
    "logging",
    "inspect",
    "enum",
    "dataclasses",
    "copy",
    "code",
    "calendar",
    "statistics",
    "secrets",
    "platform",
    "profile",
    "operator",
    "keyword",
    "heapq",
    "collections",
    "functools",
    "contextlib",
    "pathlib",
    "subprocess",
    "tempfile",
    "threading",
    "argparse",
    "struct",
    "datetime",
    "re",
    "shutil",
    "textwrap",
    "traceback",
    "warnings",
    "weakref",
    "hashlib",
    "http",
    "email",
    "html",
    "xml",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "msgspec",
    "textual",
    "pynvml",
    "jinja2",
    "yaml",
    "mpmath",
    "gguf",
    "pyarrow",
    "wandb",
    "transformers",
    "train",
    "data",
    "models",
    "utils",
    "config",
    "sitecustomize",
    "usercustomize",
]
MARKS = "IMPORTED_BY"
SHADOW = f"""
import os, sys
with open(os.path.join({MARKS!r}), "a") as marks:
    marks.write(__name__ + " in " + " ".join(sys.orig_argv).replace("\\n", " ") + "\\n")
"""
"""A module that says who imported it, and has nothing that anybody expects."""


def shadow(folder: Path, marks: Path, names: Sequence[str]) -> None:
    """Write modules of these names into a folder; each notes in `marks` that it was imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(SHADOW.replace(repr(MARKS), repr(str(marks))))


class Shell:
    """A user's shell in a folder of such modules, with the commands that pip installs."""

    def __init__(
        self, tmp_path: Path, name: str = "research", names: Sequence[str] = SHADOWING
    ) -> None:
        self.folder, self.marks = tmp_path / name, tmp_path / "marks"
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        for command, function in (("engine", "engine"), ("apr-workbench", "workbench")):
            (self.bin / command).write_text(
                f"import sys\nfrom apr_workbench import {function}\nsys.exit({function}())\n"
            )
        shadow(self.folder, self.marks, names)
        self.environment = {k: v for k, v in os.environ.items() if k not in UNSET} | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self, command: str, *arguments: object, code: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = self.python(self.bin / command, *arguments, **environment)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def python(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
        )

    def marked(self, done: subprocess.CompletedProcess[str]) -> list[str]:
        """Return what has imported which of the modules by the end of this command, and forget it."""
        found = self.imported
        self.marks.unlink(missing_ok=True)
        return found

    @property
    def imported(self) -> list[str]:
        return self.marks.read_text().splitlines() if self.marks.exists() else []


UNSET = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONSTARTUP")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def state(run: Path) -> str:
    from engine.log.fold import Follower

    follower = Follower(RunFolder(run))
    follower.read_all()
    return follower.state


def test_no_command_imports_what_lies_in_the_folder(shell: Shell, kit: Kit) -> None:
    """One of each kind: a command that starts a trainer, one that imports torch, one that starts other programs, one
    that imports neither, and the other entry point."""
    spec = kit.spec(shell.folder, train__steps=2, checkpoint__every=0, eval__every=0)
    run = shell.folder / "runs" / "first"
    shell.run("engine", "distill", spec, "--out", run)
    assert state(run) == "completed"
    shell.run("engine", "generate", run, "--prompt", "def f", "--max-tokens", "2")
    shell.run("engine", "doctor", code=None)
    shell.run("engine", "report", run)
    shell.run("apr-workbench", "--version")
    assert shell.imported == []


@pytest.mark.soak
def test_no_other_command_imports_what_lies_in_the_folder(shell: Shell, kit: Kit) -> None:
    spec = kit.spec(shell.folder, train__steps=6, checkpoint__every=3, eval__every=0)
    run = shell.folder / "runs" / "first"
    shell.run("engine", "distill", spec, "--out", run, "--set", "train.stop_after=3")
    shell.run(
        "engine",
        *("distill", "--resume", run, "--allow-change", "train.stop_after"),
        *("--set", "train.stop_after=0"),
    )
    assert state(run) == "completed"
    shell.run("engine", "prepare", spec, "--out", "stored", "--rows", "4")
    shell.run("engine", "runs")
    shell.run("engine", "tail", run)
    shell.run("engine", "data", run, "--step", "1", "--json")
    assert shell.imported == []


@pytest.mark.soak
def test_the_demo_without_a_terminal_completes(shell: Shell) -> None:
    short = ("train.steps=2", "train.rows=2", "eval.rows=2", "train.warmup_steps=1")
    words = [word for setting in short for word in ("--set", setting)]
    words += ["--set", "data.max_bytes=300000", "--set", "compute.threads=1"]
    shell.run("apr-workbench", "demo", *words, "--out", "demo")
    assert state(shell.folder / "demo") == "completed" and shell.imported == []


LOOKS = """
import os, sys
import engine, token, queue
print(repr({
    "path": sys.path, "PYTHONPATH": os.environ.get("PYTHONPATH"), "safe": sys.flags.safe_path,
    "argv": sys.argv, "files": [m.__spec__.origin for m in (engine, token, queue)],
    "ours": sorted(n for n in os.environ if n.startswith("APR_WORKBENCH")),
}))
"""
"""A script that has modules of its own beside it."""
KINDS: dict[str, tuple[str | None, list[str], dict[str, str]]] = {
    "none": (None, ["t.py"], {}),
    "the current folder": (".", ["t.py"], {}),
    "an empty entry": ("", ["t.py"], {}),
    "the whole path of the folder": ("{folder}", ["t.py"], {}),
    "an engine package elsewhere": ("lib", ["t.py"], {}),
    "a folder that is not there, and a slash at an end": ("gone:lib/", ["t.py"], {}),
    "an engine folder that is no package": ("bare", ["t.py"], {}),
    "Python's own safe path": ("lib", ["t.py"], {"PYTHONSAFEPATH": "1"}),
    "a module of a package": (".", ["-m", "pkg.train"], {}),
    "a module of a package without PYTHONPATH": (None, ["-m", "pkg.train"], {}),
    "a text of Python": (".", ["-c", LOOKS], {}),
    "a safe path of the script": ("lib", ["-P", "t.py"], {}),
}
"""PYTHONPATH in front of ours, the words of the script, further variables."""


def seen(output: str) -> dict[str, object]:
    """What the script has seen, without the probe, which is the only difference that a watch may make."""
    found: dict[str, object] = ast.literal_eval(output)
    path, variable = found["path"], found["PYTHONPATH"]
    assert isinstance(path, list) and isinstance(variable, str)
    found["path"] = [entry for entry in path if entry != str(PROBE)]
    found["PYTHONPATH"] = variable.removeprefix(f"{PROBE}{os.pathsep}")
    return found


FEW_KINDS = ("none", "an empty entry", "an engine package elsewhere", "a safe path of the script")
"""Without PYTHONPATH, with an entry of the folder itself, with a package of our name, with an option of Python."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.soak] * (kind not in FEW_KINDS)) for kind in KINDS],
)
def test_a_watched_script_imports_what_it_imports_by_hand(tmp_path: Path, kind: str) -> None:
    entries, words, environment = KINDS[kind]
    # A folder on PYTHONPATH that shadows what Python itself needs to start breaks every Python.
    bare = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    starts = subprocess.run(bare, capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in SHADOWING if name not in starts or "customize" in name]
    shell = Shell(tmp_path, "my research", names)
    shadow(shell.folder / "lib", shell.marks, ["token", "queue", "json", "sitecustomize"])
    shadow(shell.folder / "lib" / "engine", shell.marks, ["__init__"])
    shadow(shell.folder / "pkg", shell.marks, ["__init__"])
    (shell.folder / "bare" / "engine").mkdir(parents=True)
    for script in ("t.py", "pkg/train.py"):
        (shell.folder / script).write_text(LOOKS)
    if entries is not None:
        environment = environment | {
            "PYTHONPATH": f"{entries.format(folder=shell.folder)}{os.pathsep}{ROOT}"
        }

    at_start = shell.marked(shell.python("-c", "", **environment))
    by_hand = shell.python(*words, **environment)
    imported_by_hand = shell.marked(by_hand)
    watch = ["watch", "--quiet", "--runs", tmp_path / "runs", "--name", "run", "--"]
    watched = shell.run("engine", *watch, sys.executable, *words, **environment)

    assert seen(watched.stdout) == seen(by_hand.stdout)
    imported = shell.marked(watched)
    command = " ".join([sys.executable, *words]).replace("\n", " ")
    of_script = [line for line in imported if line.endswith(f" in {command}")]
    assert of_script == imported_by_hand
    # What Python imports in any process that the shell starts, before a line of ours is reached.
    others = [line.split()[0] for line in imported if line not in of_script]
    assert others == [line.split()[0] for line in at_start]
    assert outcome(tmp_path / "runs" / "run") == 0


def outcome(run: Path) -> int | None:
    """The recorded exit code of a watched command."""
    events = [json.loads(line) for line in RunFolder(run).watch.read_text().splitlines()]
    exits = [event for event in events if event["kind"] == "trainer_exited"]
    return int(exits[-1]["returncode"]) if exits else None


def test_a_flip_starts_its_runs_beside_such_modules(shell: Shell) -> None:
    fails = (sys.executable, "-c", "raise SystemExit('no data')", "{}")
    words = ("--a", "1", "--b", "2", "--out", "flips/1", "--controls", "skip", "--pairs", "1")
    done = shell.run("engine", "flip", *words, "--", *fails, code=None)
    assert "its last line: no data" in done.stdout + done.stderr
    assert not [line for line in shell.imported if "raise SystemExit" not in line]


def test_only_one_place_starts_processes_of_ours() -> None:
    """`child.command` alone decides what such a process imports first."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("engine", "workbench")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "sys.executable" in line and str(path.relative_to(ROOT)) not in OTHERS
    ]
    assert found == []


OTHERS = {
    # The one place.
    "engine/child.py",
    # Isolated guests: `-I`.
    "engine/formats/tokenizer.py",
    "engine/evaluate/sandbox.py",
    # The contract tests of a project, which keep the path that they have by hand.
    "engine/contracts/run.py",
    # In a script of the user's, without the engine.
    "engine/attach/probe/apr_watch/line.py",
    "engine/attach/probe/apr_watch/step.py",
    # Its folder holds the programs that are installed beside it.
    "engine/machine/surroundings.py",
}
"""Files that name Python's executable for another purpose."""
