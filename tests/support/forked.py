"""Start Python processes as forks of a process that has imported torch, since the import takes longer than the tests.

Run as a script it is that process: it reads requests from its stdin, and answers each with the exit code. What a
command of the engine starts in Python, its supervisor, its trainer, a watched script, is a fork of that command,
a child with a pid of its own as ever; what a user's script starts is not. Options of Python, variables of its
interpreter and of loaded libraries, and imports differ from those of a new process: tests of these start new
processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import random
import runpy
import select
import signal
import site
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LIMIT_S = 300.0
"""Longest duration of one request, in seconds."""
_OF_A_RUN = ("PYTHONPATH", "APR_WATCH_RUN")
_LOADED = ("LD_", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "PYTHON", "COVERAGE")
"""Beginnings of the variables that are read before or while torch is imported, but `_FREE`."""
_FREE = (
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("TORCH_FR_", "TORCH_NCCL_", "OMP_WAIT_POLICY"),
)
_OF_SUITE = dict(os.environ)
"""Environment before any test has changed it."""
_OURS = ("engine", "workbench", "apr_workbench", "apr_watch", "sitecustomize", "usercustomize")
"""Packages that a fork must see as if they had just been imported."""
_PR_SET_CHILD_SUBREAPER = 36
_fork_exec: Any = getattr(subprocess, "_fork_exec", None)
ROOT = Path(__file__).parents[2]


def run_fork(folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run `train.py` of a folder as Python run there with this environment would; returns the exit code, negative for
    a signal, the stdout and the stderr. What torch does on being imported has happened before the script begins."""
    process = _ask(["train.py"], folder, environment)
    return process.returncode, process.stdout, process.stderr


def run_python(
    *words: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end: in a fork, or in a new process where a fork would differ."""
    if _Words.read(words) is None or _loaded(environment) != _loaded(_environment()):
        return run_new(*words, folder=folder, environment=environment)
    return _ask(words, folder or Path.cwd(), environment)


def run_new(
    *words: str, folder: Path | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end in a new process."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=environment,
    )


def start_python(
    *words: str, env: Mapping[str, str] = os.environ, **how: Any
) -> subprocess.Popen[Any]:
    """Start Python with these words as `subprocess.Popen` does: a fork, but a child of this process all the same, or a
    new process where a fork would differ."""
    command = [sys.executable, *words]
    if _Words.read(words) is None or _loaded(env) != _loaded(_environment()):
        return subprocess.Popen(command, env=env, **how)
    _server()
    # Other threads may start processes at the same time, and these are no forks.
    subprocess._fork_exec = _fork_or_exec
    _thread.forks = True
    try:
        return subprocess.Popen(command, env=env, **how)
    finally:
        _thread.forks = False


_thread = threading.local()
"""Whether the thread starts a fork: `forks`."""


def _fork_or_exec(words: Sequence[str], *rest: Any) -> int:
    start = _fork_of_server if getattr(_thread, "forks", False) else _fork_exec
    return int(start(words, *rest))


def _fork_of_server(words: Sequence[str], *rest: Any) -> int:
    """Start a fork in place of the command that `subprocess.Popen` starts; its arguments are those of `_fork_exec`."""
    reads, _, _, writes, _, errors = rest[5:11]
    ends = (
        0 if reads == -1 else reads,
        1 if writes == -1 else writes,
        2 if errors == -1 else errors,
    )
    pairs = (os.fsdecode(variable).partition("=") for variable in rest[4])
    request = _Request(
        files=[f"/proc/{os.getpid()}/fd/{end}" for end in ends],
        words=[os.fsdecode(word) for word in words[1:]],
        folder=os.getcwd() if rest[3] is None else os.fsdecode(rest[3]),
        environment={name: text for name, _, text in pairs},
        is_awaited=False,
        session=rest[14],
        group=rest[15],
    )
    # A process whose parent has ended becomes a child of its nearest ancestor that is a subreaper.
    _take_orphans(True)
    try:
        return _answer(request)
    finally:
        _take_orphans(False)


def _take_orphans(does: bool) -> None:
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) == 0


def _ask(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as output:
        files = [os.devnull, f"{output}/stdout", f"{output}/stderr"]
        code = _answer(_Request(files, list(words), str(folder), dict(environment)))
        stdout, stderr = (Path(file).read_text() for file in files[1:])
    return subprocess.CompletedProcess([sys.executable, *words], code, stdout, stderr)


class _Request(NamedTuple):
    files: list[str]
    """Its stdin, stdout and stderr."""
    words: list[str]
    folder: str
    environment: dict[str, str]
    is_awaited: bool = True
    """Whether the answer is its exit code, at its end, or its pid."""
    session: bool = False
    group: int = -1
    """Process group to join, 0 for one of its own."""


def _answer(request: _Request) -> int:
    with _asking:
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
    assert answer, f"the process that forks ended with {server.wait()}"
    return int(answer)


_asking = threading.Lock()
"""Held until the answer to one request has been read: a screen starts commands in threads."""


def _environment() -> dict[str, str]:
    """Return the environment of the process that forks."""
    environment = {name: text for name, text in _OF_SUITE.items() if name not in _OF_A_RUN}
    # Threads are not forked, and a driver of GPUs that has been started is of no use to a fork.
    return environment | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _loaded(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(_LOADED) and not name.startswith(_FREE)
    }


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks for this worker. It ends when the worker does, which closes its stdin."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Closes its pipes and waits for its end.
    atexit.register(server.communicate)
    return server


class _Words(NamedTuple):
    """Arguments after `python` in a command."""

    words: tuple[str, ...]
    module: str
    """Name after `-m`; empty for a script."""
    is_safe: bool
    """Whether `-P` keeps the folder out of `sys.path`."""
    is_unbuffered: bool
    has_stacks: bool

    @classmethod
    def read(cls, words: Sequence[str]) -> _Words | None:
        """Return None for a command that cannot be a fork."""
        options, rest = set[str](), list(words)
        while rest and rest[0] in ("-P", "-u", "-X"):
            option = rest.pop(0)
            options.add(rest.pop(0) if option == "-X" and rest else option)
        if not options <= {"-P", "-u", "faulthandler"}:
            return None
        module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
        if not module.startswith("engine") and not (rest and rest[0].endswith(".py")):
            return None
        words = tuple(rest[2:] if module else rest)
        return cls(words, module, "-P" in options, "-u" in options, "faulthandler" in options)


def _fork_for_each_request() -> Callable[[], None] | None:
    """In a fork: what it is to run, when all is as at the start of a Python process. In the process itself: None, when
    no more requests come."""
    import gc

    # The first optimizer imports it, and so would each script; the others are imported by commands.
    import msgspec  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401

    path = sys.path[:]
    sys.path.insert(0, str(ROOT))
    import engine.attach.command
    import engine.attach.supervisor
    import engine.cli.main
    import engine.train.run
    import engine.watch.supervisor  # noqa: F401

    sys.path[:] = path
    for name in _of_ours():
        _unused[name] = {key: (one, _copy(one)) for key, one in vars(sys.modules[name]).items()}
    # A garbage collection in a fork would copy every page that it visits.
    gc.freeze()
    while line := sys.stdin.readline():
        request = _Request(*json.loads(line))
        child = os.fork()
        if child == 0:
            answers = os.dup(1)
            for number, name in enumerate(request.files):
                # Both may be one file.
                writes = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                mode = writes if number else os.O_RDONLY
                file = os.open(name, mode, 0o666)
                os.dup2(file, number)
                os.close(file)
            # After its files are open: who asked closes his ends of them once he has the answer.
            if not request.is_awaited and (started := os.fork()):
                os.write(answers, b"%d" % started)
                os._exit(0)
            os.close(answers)
            if request.session:
                os.setsid()
            if request.group >= 0:
                os.setpgid(0, request.group)
            asked = _Words.read(request.words)
            assert asked is not None
            os.chdir(request.folder)
            return _begin(asked, request.environment, path)
        code = _returncode(child)
        print(code if request.is_awaited else "", flush=True)
    return None


def _returncode(child: int) -> int:
    ends = os.pidfd_open(child)
    if not select.select([ends], [], [], LIMIT_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ends)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _begin(
    asked: _Words, environment: Mapping[str, str], path: Sequence[str]
) -> Callable[[], None]:
    """Give a fork the state of a new Python process; returns the function that it must call."""
    os.environ.clear()
    os.environ.update(environment)
    if asked.module or Path(asked.words[0]).is_relative_to(ROOT):
        _fork_children(path)
    if not asked.module:
        _kept.extend([sys.modules.pop(name) for name in _of_ours()])
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*map(os.path.abspath, entries), *path]
    # As every Python process does it; that of the probe finds torch imported.
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if not asked.is_safe:
        beside = os.getcwd() if asked.module else str(Path(asked.words[0]).absolute().parent)
        sys.path.insert(0, beside)
    if asked.has_stacks:
        faulthandler.enable()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if asked.module:
        sys.argv = ["-m", *asked.words]
        sys.orig_argv = [sys.executable, "-m", asked.module, *asked.words]
        # `runpy` warns of a module that is imported before it is run.
        sys.modules.pop(asked.module, None)
        return functools.partial(runpy._run_module_as_main, asked.module)  # type: ignore[attr-defined]
    sys.argv = list(asked.words)
    sys.orig_argv = [sys.executable, *asked.words]
    script = Path(asked.words[0]).absolute()
    main.__file__ = str(script)
    return lambda: exec(compile(script.read_text(), script, "exec"), vars(main))


_unused: dict[str, dict[str, tuple[Any, Any]]] = {}
"""Values of each of these modules just after its import, before anything was called, and copies of them."""
_kept: list[object] = []
"""Objects that a fork no longer needs and must not close: their file descriptors now belong to other files."""


def _fork_children(path: Sequence[str]) -> None:
    """Let this process fork where it would start Python."""

    def fork_exec(words: Sequence[str], *rest: Any) -> int:
        texts = [os.fsdecode(word) for word in words]
        pairs = (os.fsdecode(one).partition("=") for one in rest[4] or ())
        environment = {name: text for name, _, text in pairs} if rest[4] else dict(os.environ)
        asked = _Words.read(texts[1:]) if texts[0] == sys.executable else None
        pid = -1
        if asked is not None and _loaded(environment) == _loaded(os.environ):
            pid = os.fork()
        if pid:
            return pid if pid > 0 else _fork_exec(words, *rest)
        assert asked is not None
        try:
            reads, _, _, writes, _, errors, _, error_pipe = rest[5:13]
            kept = [number for number in rest[2] if number > 2 and number != error_pipe]
            _take_files_and_signals((reads, writes, errors), kept, session=rest[14])
            if rest[15] >= 0:
                os.setpgid(0, rest[15])
            if rest[3] is not None:
                os.chdir(rest[3])
            _start_anew()
            code = _run(_begin(asked, environment, path), asked)
        except BaseException:  # noqa: BLE001 — nothing of the parent may go on here
            traceback.print_exc()
            code = 70
        _end(code)

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _take_files_and_signals(standard: Sequence[int], kept: Sequence[int], *, session: bool) -> None:
    ends = [os.dup(number) if number != -1 else -1 for number in standard]
    for number, end in enumerate(ends):
        if end != -1:
            os.dup2(end, number)
    at = 3
    for number in [*sorted(kept), 1 << 20]:
        os.closerange(at, number)
        at = number + 1
    if session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_anew() -> None:
    """Drop the project's modules that the parent has imported, and its streams."""
    import gc

    gc.disable()
    _kept.extend([sys.stdin, sys.stdout, sys.stderr])
    for name in _of_ours():
        if name in _unused:
            _make_unused(vars(sys.modules[name]), _unused[name])
        else:
            _kept.append(sys.modules.pop(name))
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.excepthook = sys.__excepthook__
    threading.excepthook = threading.__excepthook__
    atexit._clear()
    random.seed()
    gc.freeze()
    gc.enable()


def _of_ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in _OURS]


def _copy(value: object) -> Any:
    """Copy what a module may have changed in itself."""
    return value.copy() if type(value) in (dict, list, set) else None  # type: ignore[attr-defined]


def _make_unused(names: dict[str, Any], unused: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a module the values that it had when it had been imported."""
    _kept.append(dict(names))
    for name in names.keys() - unused.keys():
        del names[name]
    for name, (value, held) in unused.items():
        names[name] = value
        if name.startswith("__"):
            continue
        if held is not None and value != held:
            # The same object: other modules have it too.
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(held)
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _run(what: Callable[[], None], asked: _Words) -> int:
    if asked.is_unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        what()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 — as Python does
        # Without the frame of this function.
        within = error.__traceback__ and error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, within
        sys.excepthook(type(error), error, within)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    asked_for = _fork_for_each_request()
    if asked_for is not None:
        asked_for()
