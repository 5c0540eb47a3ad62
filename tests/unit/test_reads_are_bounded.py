"""Nothing is read but through `engine.files`, or for a reason that stands here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

OWN = "a file or answer of this package, or of a process that it started"
SYSTEM = "a file of the kernel or the system, not of a user"
LOG = "a log: read in blocks and by lines with a length of their own"
WRITES = "opened to be written, or for a lock"
BOUNDED = "text that is bounded already, with RecursionError and ValueError caught at the line"

ALLOWED: dict[str, str] = {
    "engine/data/tokens.py": "a record, which was bounded when it was read",
    "engine/formats/tokenizer_probes.py": "a tokenizer.json, which was bounded when it was opened",
    "engine/contracts/contract.py": "the text of a contract, which was bounded when it was read",
    **dict.fromkeys(
        (
            "engine/cli/flip.py",
            "engine/contracts/plant.py",
            "engine/contracts/run.py",
            "engine/contracts/source.py",
            "evidence/chat/make_chats.py",
            "tests/support/train_tokenizer.py",
            "engine/machine/cuda_facts.py",
            "engine/machine/rates.py",
            "engine/train/finish.py",
            "engine/drills/inputs.py",
            "engine/drills/planting.py",
            "tests/support/hostile_programs.py",
            "engine/receipts/receipt.py",
            "engine/flips/flip.py",
            "engine/kernels/bodies.py",
            "engine/kernels/compiler.py",
            "engine/export/peer.py",
            "engine/export/peers.py",
            "engine/runtime/c_library.py",
            "engine/watch/start_and_stop.py",
            "engine/watch/stacks.py",
            "workbench/doctor_rows.py",
            "workbench/engine_commands.py",
            "engine/report/page.py",
            "workbench/notebook/live.py",
        ),
        OWN,
    ),
    **dict.fromkeys(
        (
            "engine/machine/family.py",
            "engine/machine/kernel_files.py",
            "engine/machine/surroundings.py",
            "engine/train/ranks/torchrun.py",
            "engine/drills/runs.py",
            "engine/flips/surroundings.py",
            "engine/signals.py",
            "engine/attach/probe/apr_watch/writer.py",
            "engine/attach/command.py",
            "engine/watch/exit_cause.py",
            "engine/watch/stacks.py",
            "workbench/cli.py",
        ),
        SYSTEM,
    ),
    **dict.fromkeys(
        (
            "engine/log/read.py",
            "engine/log/rows.py",
            "engine/log/written.py",
            "engine/watch/supervisor.py",
            "workbench/jobs.py",
            "workbench/log_pages.py",
        ),
        LOG,
    ),
    **dict.fromkeys(
        (
            "engine/attach/probe/apr_watch/memory.py",
            "engine/attach/probe/apr_watch/stacks.py",
            "engine/crash.py",
            "engine/train/checkpoint/write.py",
            "engine/train/checkpoint/keeper.py",
            "engine/findings/bundle.py",
            "engine/flips/controls.py",
            "engine/flips/flip_folder.py",
            "engine/formats/safetensors.py",
            "engine/formats/writing.py",
            "engine/models/load.py",
            "engine/export/publish.py",
            "engine/log/beats.py",
            "engine/log/held.py",
            "engine/log/notes.py",
            "engine/log/write.py",
            "engine/teachers/store/folder.py",
        ),
        WRITES,
    ),
    **dict.fromkeys(
        (
            "engine/contracts/measured.py",
            "engine/data/records.py",
            "engine/train/checkpoint/manifest.py",
            "engine/findings/finding.py",
            "engine/formats/apr_metadata.py",
            "engine/formats/gguf_tokenizer.py",
            "engine/formats/tokenizer.py",
            "engine/formats/weights.py",
            "engine/notify/receivers.py",
            "engine/spec/build.py",
            "engine/spec/values.py",
        ),
        BOUNDED,
    ),
    **dict.fromkeys(
        (
            "engine/evaluate/guest.py",
            "engine/evaluate/sandbox.py",
        ),
        "the pipe from the process of a trial, which has limits of its own",
    ),
    **dict.fromkeys(
        ("engine/data/token_cache.py", "engine/formats/apr.py", "engine/formats/gguf.py"),
        "a map of a file that was opened as a regular one",
    ),
    "engine/data/template_program.py": "a line of the kernel about this process",
    "engine/attach/probe/apr_watch/folders.py": "small files of its own, at most so many bytes; it imports no engine",
    "engine/attach/probe/apr_watch/ranks.py": "small files of its own, at most so many bytes; it imports no engine",
    "engine/receipts/context.py": "files of a worktree, each looked at for kind and size before",
    "engine/teachers/store/folder.py": "rows of a shard whose header was read, at offsets of it",
    "engine/watch/flight_recorder.py": WRITES,
    "engine/files.py": "it is the module",
}
"""File -> why it may read by itself."""


def reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every call that reads a file or parses text, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := reads_by(node)):
            yield node.lineno, name


def reads_by(call: ast.Call) -> str:
    """The name of a call that reads, else nothing."""
    called = call.func
    if isinstance(called, ast.Name):
        return "open" if called.id == "open" and reads_in(call, 1) else ""
    if not isinstance(called, ast.Attribute):
        return ""
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr in ("load", "loads") and of in ("json", "tomllib", "pickle", "yaml", "marshal"):
        return f"{of}.{called.attr}"
    if called.attr == "decode" and ast.unparse(called.value) == "msgspec.json":
        return "msgspec.json.decode"
    if called.attr in ("read_text", "read_bytes") and of != "files":
        return called.attr
    if called.attr == "open" and of in ("gzip", "bz2", "lzma", "io", "codecs"):
        return f"{of}.open"
    if called.attr == "open" and of == "os":
        return "os.open"
    if called.attr == "open" and of != "webbrowser" and reads_in(call, 0):
        return ".open"
    return "mmap" if (of, called.attr) == ("mmap", "mmap") else ""


def reads_in(call: ast.Call, place: int) -> bool:
    """Whether a call of open is for reading: no mode, or one with r in it."""
    modes = [one.value for one in call.keywords if one.arg == "mode"] + call.args[place : place + 1]
    if not modes:
        return bool(call.args) == bool(place)
    mode = modes[0]
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "r" in mode.value


def found() -> dict[str, str]:
    places: dict[str, str] = {}
    for package in ("engine", "workbench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for line, call in reads(ast.parse(path.read_text())):
                places.setdefault(name, f"{name}:{line}: {call}")
    return places


def test_every_reader_goes_through_the_module_of_bounded_reads() -> None:
    others = [where for place, where in found().items() if place not in ALLOWED]
    assert not others, "read with engine.files and a row of engine/limits.py:\n" + "\n".join(others)


def test_the_walk_sees_what_it_is_for() -> None:
    text = """
def a(path):
    json.loads(path.read_text())
    open(path)
    open(path, "rb")
    path.open("rb")
    path.open()
    open(path, "w")
    path.open("ab")
    tomllib.load(path)
    gzip.open(path)
"""
    assert len(list(reads(ast.parse(text)))) == 8
