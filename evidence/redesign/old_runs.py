"""Do runs, stores, checkpoints and flips that an older checkout wrote open and resume in a newer one?

    python evidence/redesign/old_runs.py --before DIR --after DIR [--work DIR]

DIR are checkouts with a `.venv`. `before` trains, stops a run two steps after a checkpoint, prepares a store and
flips a setting. Then each reading command answers in `before` and, on a copy of the same folder, in `after`:
their JSON and exit codes must be equal but for times. `after` resumes the stopped run, whose student must be the
unbroken one's to the byte; trains from the old store; and verifies
the finding that lies in the repository. A table goes to stdout; the exit code is 1 when anything fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from equal import Kit, digests, engine, plain, train

READING: dict[str, list[str]] = {
    "tail": ["tail", "{run}", "--json"],
    "runs": ["runs", "{parent}", "--json"],
    "checks": ["checks", "{run}", "--json"],
    "diagnose": ["diagnose", "{run}", "--all", "--json"],
    "receipt": ["evidence", "receipt", "{run}", "--json"],
    "gate": ["gate", "{run}", "--only", "heldout", "--set", "gate.heldout_loss=9.0", "--json"],
    "flips": ["flips", "{flips}", "--json"],
    "finding": ["why", "check", "--all", "--evidence", "{evidence}", "--json"],
    "report": ["report", "{run}", "--out", "{parent}/report.html"],
}


def ask(checkout: Path, words: list[str]) -> tuple[int, str]:
    """Exit code and answer of one reading command."""
    done = subprocess.run(
        [checkout / ".venv/bin/python", "-m", "engine", *words],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout or done.stderr


def comparable(text: str, folder: Path) -> object:
    """An answer without times and without the name of the folder that it was asked about."""
    text = text.replace(str(folder), "FOLDER")
    try:
        return plain(json.loads(text))
    except json.JSONDecodeError:
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="keep what `before` wrote here, and use it again")
    arguments = parser.parse_args()
    before, after = arguments.before.resolve(), arguments.after.resolve()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="old-runs-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if (work / "made").exists():
        kit = Kit.__new__(Kit)
        kit.folder, kit.now = work / "kit", work / "now"
    else:
        kit = Kit(before, work)
        make(before, kit)
        (work / "made").touch()
    is_good = True

    def told(name: str, good: bool, words: str = "") -> None:
        nonlocal is_good
        is_good &= good
        print(f"{name:12}{'holds' if good else 'FAILS'}  {words}", flush=True)

    for name, template in READING.items():
        answers = []
        for side, checkout in (("before", before), ("after", after)):
            folder = work / "copy"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(kit.now, folder, symlinks=True)
            places = {
                "run": folder / "run",
                "parent": folder,
                "flips": folder / "flips",
                "evidence": after / "evidence",
            }
            code, text = ask(checkout, [word.format(**places) for word in template])
            (work / f"{name}.{side}").write_text(text)
            answers.append((code, comparable(text, folder)))
        told(name, answers[0] == answers[1], f"exit {answers[1][0]}, {differing(*answers)}")
    for name, check in (("resume", resumes), ("store", trains_from_the_store)):
        shutil.rmtree(work / "copy", ignore_errors=True)
        shutil.copytree(kit.now, work / "copy", symlinks=True)
        told(name, *check(after, kit))
        shutil.rmtree(kit.now)
        (work / "copy").rename(kit.now)
    if arguments.work is None:
        shutil.rmtree(work)
    return 0 if is_good else 1


def differing(before: tuple[int, object], after: tuple[int, object]) -> str:
    if before == after:
        return "equal answers"
    if before[0] != after[0]:
        return f"exit {before[0]} before"
    pair = [json.dumps(side[1], indent=1, sort_keys=True).splitlines() for side in (before, after)]
    unlike = [(a, b) for a, b in zip(*pair, strict=False) if a != b][:2]
    return f"first differences {unlike}, lines {len(pair[0])} and {len(pair[1])}"


def make(before: Path, kit: Kit) -> None:
    """What the older checkout writes: a finished run, a stopped one, a store, a flip."""
    kit.now.mkdir()
    train(before, kit)
    spec = kit.now / "spec.toml"
    engine(before, "prepare", kit.spec(), "--out", kit.now / "store")
    words = [
        "--set",
        "compute.threads=2",
        "--steps",
        6,
        "--pairs",
        6,
        "--controls",
        "skip",
        "--seed",
        1,
    ]
    command = [before / ".venv/bin/python", "-m", "engine", "flip", spec, *words, "--share"]
    flip = [str(word) for word in [*command, "--out", kit.now / "flips" / "threads"]]
    code = subprocess.run(flip, cwd=before, check=False, timeout=900).returncode
    if code not in (0, 2):
        sys.exit(f"the flip ended with exit code {code}")
    # A power failure two steps after the checkpoint of step 8.
    stopped = kit.now / "stopped"
    shutil.copytree(kit.now / "run", stopped)
    lines = (stopped / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if json.loads(line).get("step") == 10)
    (stopped / "events.jsonl").write_text("".join(lines[: last + 1]))
    for path in (stopped / "student", *(stopped / "checkpoints").iterdir()):
        if path.name != "step-00000008":
            shutil.rmtree(path)
    (stopped / "receipt.json").unlink()
    lines = (stopped / "watch.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] in ("log_opened", "trainer_started")]
    (stopped / "watch.jsonl").write_text("".join(kept))


def students(folder: Path) -> list[str]:
    return digests((folder / "student").rglob("*.safetensors"), folder)


def resumes(after: Path, kit: Kit) -> tuple[bool, str]:
    engine(after, "distill", "--resume", kit.now / "stopped")
    return students(kit.now / "stopped") == students(
        kit.now / "run"
    ) != [], "the student of the unbroken run"


def trains_from_the_store(after: Path, kit: Kit) -> tuple[bool, str]:
    spec = kit.spec(teacher__cache=str(kit.now / "store"), teacher__backend="cached")
    engine(after, "distill", spec, "--out", kit.now / "cached")
    found = json.loads((kit.now / "cached" / "receipt.json").read_text())["data"]["order_sha256"]
    live = json.loads((kit.now / "run" / "receipt.json").read_text())["data"]["order_sha256"]
    return found == live, "rows in the order of the run with a live teacher"


if __name__ == "__main__":
    sys.exit(main())
