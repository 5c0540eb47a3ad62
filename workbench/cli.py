"""`apr-workbench`: watch runs in the terminal, or start the demo and watch it.

stdout carries results, stderr everything else. No run depends on this process: the demo is started like any
other run, by `engine distill`, and without a terminal this process becomes that command.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import subprocess
import sys
import time
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from pathlib import Path

from engine import child
from engine.bytecode import keep_bytecode
from engine.crash import run_command
from engine.errors import EXIT_TERMINATED, InternalError, UsageError, missing_engine
from engine.log.folder import RunFolder, is_run, open_run
from engine.log.text import result_lines
from engine.terminal import ArgumentParser, put, say
from engine.version import VERSION
from engine.watch.verdict_line import run_verdict_lines
from workbench.engine_commands import ENGINE, distill_arguments, start_run
from workbench.feed import RunFeed, Snapshot

DEFAULT_RUNS = Path("runs")
ON_CORPUS = ("train.steps=120", "train.warmup_steps=25", "eval.every=60", "checkpoint.every=0")
"""Changes to the demo for a student that is about to write for itself."""
ESCAPE_MS = "25"
"""Milliseconds after which an escape character is the escape key and not the start of a sequence. Terminals write a
sequence in one piece, so Textual's 100 ms are a needless delay. Curses reads the same variable."""

WATCH_HELP = """\
Watch runs in the terminal. A folder of runs opens the list of them, the folder of one run opens
that run. Closing the workbench does not affect a run.

other commands:
  apr-workbench demo [--chat | --on-policy] [--set KEY=VALUE ...] [--out DIR]
                                                         start an example run and watch it
  engine tail PATH                                       the same in plain lines

environment:
  NO_COLOR=1                    no colour; no meaning is carried by colour alone
  APR_WORKBENCH_THEME=NAME      as --theme; else TEXTUAL_THEME, else dark, or light where the
                                terminal says in COLORFGBG that it is
  ESCDELAY=MS                   milliseconds to wait for the rest of a key that begins with escape (25)

`?` shows every key.
"""
DEMO_HELP = """\
Start an example: a small student learns from a small teacher to continue Python source, in a few
minutes on any machine; or, with --chat, to answer small questions, from conversations, in about one
minute. With --on-policy it learns from text that it writes itself, after a minute on source text
(a run of its own, DIR-corpus); what it writes before and after is printed at the end. In a terminal
the run continues in the background and the workbench opens on it; without one (a pipe, a batch job)
the run is in the foreground and its exit code is the exit code of this command.
"""


def _screen_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="no key starts, stops or changes a run, a flip or evidence",
    )
    parser.add_argument(
        "--ascii",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="draw with ASCII only; by default when the locale is not UTF-8",
    )
    parser.add_argument(
        "--theme",
        metavar="NAME",
        help="colours: dark, light, colourblind-dark, colourblind-light or one of Textual's",
    )
    parser.add_argument("--version", action="version", version=f"apr-workbench {VERSION}")


def watch_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="apr-workbench",
        description=WATCH_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUNS",
        help="folders of runs, or the folder of one run (default: runs/)",
    )
    _screen_options(parser)
    return parser


def demo_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="apr-workbench demo",
        description=DEMO_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    example = parser.add_mutually_exclusive_group()
    example.add_argument(
        "--chat", action="store_true", help="the example on conversations instead of source text"
    )
    example.add_argument(
        "--on-policy",
        action="store_true",
        help="the example on the student's own text; --set student.path=RUN/student continues from a run of the demo",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=VALUE",
        help="change a setting of the example, for instance train.steps=50; may be repeated",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run folder to make (default: runs/demo-YYYYmmdd-HHMMSS, or runs/chat-...)",
    )
    _screen_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    if argv is None:
        keep_bytecode()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        options, show = demo_parser().parse_args(arguments[1:]), _demo
    else:
        options, show = watch_parser().parse_args(arguments), _watch
    return run_command("apr-workbench", lambda: show(options))


def _watch(options: argparse.Namespace) -> int:
    paths = options.runs or [DEFAULT_RUNS]
    for path in options.runs:
        # An existing folder without runs is fine, as runs may appear in it; a name that does not exist is a
        # mistake.
        if not path.is_dir():
            open_run(path)
    if not _has_terminal():
        raise UsageError(
            "stdin and stdout: expected a terminal, found a pipe or a file",
            hint="`engine runs` lists runs, `engine tail PATH` prints one",
        )
    options.theme = load_screen(options.theme)
    code = _show(paths, options)
    if len(paths) == 1 and is_run(paths[0]):
        _print_result(RunFolder(paths[0]), code)
    return code


def load_screen(theme: str | None) -> str:
    """Import the terminal UI and return the name of its theme, before anything is started. Raises UsageError for an
    unknown theme."""
    # Textual reads it when its first module is imported.
    os.environ.setdefault("ESCDELAY", ESCAPE_MS)
    # Imported modules are not garbage: collecting during the import takes 15 ms, and each later collection would walk
    # them.
    gc.disable()
    try:
        # Imported here, because --help and a demo without a terminal need no Textual.
        import_module("workbench.tui.app")
        from workbench.tui.themes import chosen_theme
    finally:
        gc.freeze()
        gc.enable()
    return chosen_theme(theme, os.environ)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def demo_spec(name: str = "demo") -> Path:
    """Return a packaged spec: `demo`, `chat` (on conversations) or `on_policy` (on the student's own text)."""
    # Imported here: a list of runs does not need it.
    import importlib.resources

    path = Path(str(importlib.resources.files("engine.demo") / f"{name}.toml"))
    if not path.is_file():
        raise missing_engine()
    return path


def _demo(options: argparse.Namespace) -> int:
    name = "chat" if options.chat else "on_policy" if options.on_policy else "demo"
    spec = demo_spec(name)
    out = options.out or DEFAULT_RUNS / time.strftime(f"{spec.stem}-%Y%m%d-%H%M%S")
    if options.on_policy:
        return _on_policy_demo(spec, out, options)
    if not _has_terminal():
        sys.stdout.flush()
        sys.stderr.flush()
        words = [*ENGINE, *distill_arguments(spec, options.sets, out)]
        os.execve(ENGINE[0], words, child.environment())
    options.theme = load_screen(options.theme)
    say(f"starting {out}")
    run = start_run(spec, options.sets, out)
    code = _show([run.path], options)
    _print_result(run, code)
    return code


def _on_policy_demo(spec: Path, out: Path, options: argparse.Namespace) -> int:
    """Train a student on the corpus unless one is given, continue on text that it writes, and compare both."""
    given = [
        assignment.partition("=")[2]
        for assignment in options.sets
        if assignment.startswith("student.path=")
    ]
    sets, first = list(options.sets), out.with_name(f"{out.name}-corpus")
    student = Path(given[-1]) if given else first / "student"
    if not given:
        say(f"a minute on source text first: {first}")
        if code := _foreground("engine", *distill_arguments(demo_spec(), ON_CORPUS, first)):
            return code
        sets.append(f"student.path={student.absolute()}")
    if _has_terminal():
        options.theme = load_screen(options.theme)
        run = start_run(spec, sets, out)
        code = _show([run.path], options)
        _print_result(run, code)
    else:
        code = _foreground("engine", *distill_arguments(spec, sets, out))
    compare = ("engine.demo.own_text", str(student), str(out / "student"))
    if code == 0 and (out / "student").is_dir():
        return _foreground(*compare)
    if code == 0:
        say(f"when it has ended: {shlex.join(('python', '-m', *compare))}")
    return code


def _foreground(module: str, *arguments: str) -> int:
    """Run a module of the engine to its end, in this terminal; returns its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = child.command(module, *arguments)
    return subprocess.run(words, env=child.environment(), check=False).returncode


def believe_the_terminal(environ: MutableMapping[str, str]) -> None:
    """Drop COLUMNS and LINES where stdout is a terminal that knows its size.

    A shell or a test runner exports them with the size of its own terminal, and Python, Textual and Rich
    prefer them to the terminal's size: the screen would keep that size and ignore every resize. A terminal
    without a size, such as a serial line, reports 0 x 0; then the variables are all there is.
    """
    try:
        # Textual's driver queries the same file.
        size = os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else -1)
    except (OSError, ValueError):
        return
    if size.columns and size.lines:
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)


def _show(paths: Sequence[Path], options: argparse.Namespace) -> int:
    """Open the terminal UI and wait until it is closed. Returns 70 when it crashed (Textual has printed the
    traceback) and 143 when it was terminated."""
    from workbench.tui.app import WorkbenchApp, refresh_seconds
    from workbench.tui.printable import is_utf8

    ascii_only = not is_utf8(os.environ) if options.ascii is None else options.ascii
    believe_the_terminal(os.environ)
    app = WorkbenchApp(
        paths,
        refresh_s=refresh_seconds(os.environ),
        read_only=options.read_only,
        ascii_only=ascii_only,
        theme=options.theme,
    )
    app.run()
    return InternalError.exit_code if app.return_code == 1 else app.return_code or 0


def farewell(snapshot: Snapshot) -> list[str]:
    """Return the summary of a run that is printed when its screen is closed."""
    path = snapshot.run.path
    verdict = run_verdict_lines(snapshot.view, snapshot.state, path)
    error = [] if snapshot.error is None else [snapshot.error]
    lines = [*([] if error else verdict), snapshot.status, *result_lines(snapshot.view), *error]
    lines.append(f"run folder: {path}")
    if not snapshot.has_ended:
        lines += [
            "the run continues in the background",
            f"  reattach  apr-workbench {path}",
            f"  follow    engine tail {path}",
            f"  stop      engine stop {path}",
        ]
    return lines


def _print_result(run: RunFolder, code: int) -> None:
    if code == InternalError.exit_code:
        # Whatever crashed the screen could crash the summary, too.
        say(
            "apr-workbench: the screen crashed; the run is not affected\n"
            f"hint: `engine tail {run.path}` prints this one"
        )
        return
    if code == EXIT_TERMINATED:
        # Who terminates the screen does not wait until a long log is read once more.
        put(f"run folder: {run.path}\n  reattach  apr-workbench {run.path}")
        return
    put("\n".join(farewell(RunFeed(run).read_all())))
