"""What a machine may do to a run: no inode left, a read-only folder, files that only root may read, a run of
another user's, a wall clock that is set. Each ends with a line that names the file, and the run goes on after it.

Needs root and `unshare`, and skips with that reason without them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.kit import Kit
from tests.support.lacks import skip_for
from tests.support.running import DEADLINE_S, engine, environment, start, wait_for, wait_until_ended

pytestmark = [pytest.mark.attack, pytest.mark.soak]
NOBODY = 65534
ENGINE = [sys.executable, "-m", "engine"]


@pytest.fixture(autouse=True, scope="module")
def privileged() -> None:
    if os.getuid() != 0:
        skip_for("root")
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs unshare and setpriv of util-linux")
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"])
    if tried.returncode:
        skip_for("root", "this machine lets even root make no mount of its own")


@pytest.fixture
def shared(kit: Kit) -> Iterator[Path]:
    """A folder that everybody may enter, with the kit in it. The folders of pytest are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="apr-shared-"))
    try:
        for path in (kit.teacher, kit.student, kit.corpus):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / path.name)
        folder.chmod(0o777)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def spec_of(kit: Kit, folder: Path, **changes: object) -> Path:
    own = Kit(
        teacher=folder / kit.teacher.name,
        student=folder / kit.student.name,
        corpus=folder / kit.corpus.name,
    )
    spec = own.spec(folder, **changes)
    spec.chmod(0o644)
    return spec


def as_nobody(*arguments: object) -> subprocess.CompletedProcess[str]:
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    # A checkout in a home folder, or a Python there, may be closed to others.
    tried = subprocess.run([*user, *ENGINE, "--version"], capture_output=True, cwd="/")
    if tried.returncode:
        pytest.skip(
            "another user cannot run the engine of this checkout: its folder is closed to others"
        )
    return subprocess.run(
        [*user, *ENGINE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment() | {"HOME": "/nonexistent", "XDG_STATE_HOME": "/nonexistent/state"},
        cwd="/",
    )


def refused(done: subprocess.CompletedProcess[str], path: Path) -> None:
    assert done.returncode == 65, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and str(path) in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr


@pytest.mark.parametrize("what", ["spec", "corpus", "teacher", "weights", "student"])
def test_a_file_that_the_user_may_not_read_is_named(kit: Kit, shared: Path, what: str) -> None:
    spec = spec_of(kit, shared)
    path = {
        "spec": spec,
        "corpus": shared / kit.corpus.name,
        "teacher": shared / kit.teacher.name,
        "weights": shared / kit.teacher.name / "model.safetensors",
        "student": shared / kit.student.name,
    }[what]
    path.chmod(0)
    refused(as_nobody("distill", spec, "--out", shared / "run"), path)
    assert not (shared / "run").exists()


@pytest.mark.parametrize(
    "command", ["tail", "diagnose", "checks", "report", "stop", "distill --resume"]
)
def test_a_run_folder_of_another_user_is_named(kit: Kit, shared: Path, command: str) -> None:
    run = shared / "run"
    launched = start("distill", spec_of(kit, shared, train__steps=2), "--out", run)
    launched.communicate(timeout=DEADLINE_S)
    assert launched.returncode == 0
    for path in (run, *run.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    refused(as_nobody(*command.split(), run), run)


def test_two_users_on_one_run_folder(kit: Kit, shared: Path) -> None:
    run = shared / "run"
    launched = start("distill", spec_of(kit, shared, train__steps=100000), "--out", run)
    wait_for(run, lambda view: view.last_step >= 6)
    try:
        seen = as_nobody("tail", run)
        assert seen.returncode == 0, seen.stderr
        refused(as_nobody("distill", "--resume", run), run)
        stopped = as_nobody("stop", run)
        refused(stopped, run)
        assert "user with id 0" in stopped.stderr
    finally:
        launched.terminate()
        launched.communicate(timeout=DEADLINE_S)
    assert launched.returncode == 143
    refused(as_nobody("distill", "--resume", run, "--set", "train.steps=12"), run)
    wait_until_ended(run)
    changed = ["--set", "train.stop_after=2", "--allow-change", "train.stop_after"]
    again = engine("distill", "--resume", run, *changed)
    assert again.returncode == 0, again.stderr


def mounted(script: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A shell script with a mount of its own; $ENGINE is the command."""
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        + [str(one) for one in arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment() | {"ENGINE": " ".join(ENGINE), "M": str(folder)},
    )


@pytest.mark.parametrize("inodes", [3, 9, 14, 24])
def test_no_inode_left_is_told_and_the_run_goes_on_with_more(
    kit: Kit, tmp_path: Path, inodes: int
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    script = """
    mount -t tmpfs -o nr_inodes=$2 none $M
    $ENGINE distill $1 --out $M/run 2> $3/first >&2; echo $?
    # A trainer that could not make its log says it there; the launcher names that file.
    cat $M/run/stderr.txt >> $3/first
    mount -o remount,nr_inodes=0 $M
    if test -e $M/run; then $ENGINE distill --resume $M/run 2> $3/second >&2
    else $ENGINE distill $1 --out $M/run 2> $3/second >&2; fi; echo $?
    """
    done = mounted(script, folder, kit.spec(tmp_path), inodes, tmp_path)
    said = (tmp_path / "first").read_text(), (tmp_path / "second").read_text()
    codes = [int(word) for word in done.stdout.split() if word.isdecimal()]
    first, second = codes[0], codes[-1]
    assert first == 65, (done.stdout, *said)
    assert "No space left" in said[0] and "Traceback" not in said[0], said[0]
    assert second == 0, said[1]


def test_a_read_only_file_system_is_told_and_the_run_goes_on_with_another(
    kit: Kit, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    script = """
    mount -t tmpfs none $M
    $ENGINE distill $1 --out $M/run --set train.stop_after=6 2> $2/first >&2; echo $?
    mount -o remount,ro $M
    $ENGINE distill --resume $M/run 2> $2/second >&2; echo $?
    $ENGINE distill $1 --out $M/other 2> $2/third >&2; echo $?
    $ENGINE tail $M/run 2>&1 >/dev/null; echo $?
    mount -o remount,rw $M
    $ENGINE distill --resume $M/run --set train.stop_after=0 --allow-change train.stop_after 2> $2/last >&2; echo $?
    """
    done = mounted(script, folder, kit.spec(tmp_path), tmp_path)
    said = {name: (tmp_path / name).read_text() for name in ("first", "second", "third", "last")}
    assert done.stdout.split() == ["0", "65", "65", "0", "0"], (done.stdout, said)
    for name in ("second", "third"):
        assert "Read-only file system" in said[name] and "Traceback" not in said[name], said[name]


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
/* The wall clock is an hour back, or ahead, while the file $CLOCK is there. */
int clock_gettime(clockid_t id, struct timespec *at) {
    int result = (int)syscall(SYS_clock_gettime, id, at);
    const char *file = getenv("CLOCK");
    if (id == CLOCK_REALTIME && file && access(file, F_OK) == 0) at->tv_sec += atol(getenv("BY_S"));
    return result;
}
"""


@pytest.mark.parametrize("by_s", [-3600, 86400])
def test_a_wall_clock_that_is_set_turns_no_time_of_the_log_back(
    kit: Kit, tmp_path: Path, by_s: int
) -> None:
    if shutil.which("cc") is None:
        skip_for("a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library, jump = tmp_path / "clock.so", tmp_path / "jump"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c"], check=True)
    run = tmp_path / "run"
    env = environment() | {"LD_PRELOAD": str(library), "CLOCK": str(jump), "BY_S": str(by_s)}
    spec = kit.spec(tmp_path, train__steps=100000)
    command = [*ENGINE, "distill", str(spec), "--out", str(run)]
    launched = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(run, lambda view: view.last_step >= 3)
    jump.touch()
    step = Follower(RunFolder(run)).read_all().last_step
    view = wait_for(run, lambda view: view.last_step > step + 20).view
    wait_for(run, lambda view: any("wall clock was set" in note.text for note in view.notes))
    launched.terminate()
    launched.communicate(timeout=DEADLINE_S)
    assert launched.returncode == 143
    for name in ("events.jsonl", "watch.jsonl", "device.jsonl"):
        times = [json.loads(line)["t_s"] for line in (run / name).read_text().splitlines()]
        assert times == sorted(times) and times[-1] < 600, name
    assert (view.tokens_per_second() or 1.0) > 0
