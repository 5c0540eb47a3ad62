"""Does one checkout train byte for byte as another does? The demo and small specs, on the CPU, in both.

    python evidence/redesign/equal.py --before DIR --after DIR [--work DIR] [--cases NAME,...]

DIR are checkouts with a `.venv`. Each case is a run of the real command `engine distill` (of some, of
`engine prepare` before it), in the same folder for both checkouts, so that no path has to be explained away:

    demo           the demo's spec and models, some steps
    gguf           the demo's teacher in blocks
    accumulation   three micro-batches a step
    packing        rows of many short documents
    cached         hidden states of a store
    top_k          the likeliest ids of a store
    sampled        ids drawn, of a store
    resume         a run cut off two steps after a checkpoint, and gone on with

Compared to the byte: student, checkpoints (student, optimizer, RNG, state, manifest), the rows of a store, and the
order of rows (position, rows, tokens and labels of each step, and the hash of their order). Compared as
values: every line of events.jsonl, in order, and receipts and manifests, less times, ids of processes and
boots, hashes of logs, and versions. Of watch.jsonl what was logged, in order, without readings and alerts, which
depend on the clock. A table goes to stdout; the exit code is 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAKE_KIT = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
try:
    from tests.conftest import make_kit
except ImportError:
    from tests.support.kit import make_kit
make_kit(Path(sys.argv[1]))
"""

# Fields of log lines, receipts and manifests that are times, ids, or say which version wrote them.
UNEQUAL = {
    *("t_s", "unix_s", "boot_id", "pid", "trainer_pid", "supervisor_pid", "seq"),
    *("step_s", "data_s", "teacher_s", "eval_s", "save_s", "cost_s", "compile_s", "phases"),
    *("engine", "tool", "times", "packages", "environment", "device_facts", "logs", "host"),
    *("finished_unix_s", "last_session_s", "began_unix_s", "mtime_ns", "created"),
}
DURATION = re.compile(r"\b\d+(\.\d+)? ?(ns|us|µs|ms|s|min|h)\b")
"""In sentences: how long something took."""
WATCHED = {"trainer_started", "trainer_exited", "stop_sent"}


class Kit:
    """Models and texts that every run of both checkouts reads, and the folder that all are made in."""

    def __init__(self, before: Path, work: Path) -> None:
        self.folder, self.now = work / "kit", work / "now"
        self.folder.mkdir()
        run([before / ".venv/bin/python", "-c", MAKE_KIT, self.folder], before)
        shutil.copytree(before / "engine" / "demo", self.folder / "demo")
        short = self.folder / "short"
        short.mkdir()
        for index in range(300):
            (short / f"s{index:03}.py").write_text(f"def f{index}(x):\n    return x + {index}\n")

    def spec(self, **changes: object) -> Path:
        """A spec file; `changes` are settings with `__` for the dot."""
        settings: dict[str, object] = {
            "teacher.path": str(self.folder / "teacher"),
            "student.config": str(self.folder / "student.json"),
            "data.corpus": str(self.folder / "corpus"),
            "data.seq_len": 32,
            "data.heldout_fraction": 0.2,
            "loss.alpha": 0.3,
            "loss.temperature": 2.0,
            "train.steps": 12,
            "train.rows": 4,
            "train.warmup_steps": 2,
            "eval.every": 6,
            "eval.rows": 4,
            "checkpoint.every": 4,
            "compute.device": "cpu",
            "compute.threads": 1,
            # What is free now would be another number in each run.
            "memory.limit_gib": 1.0,
        }
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        sections: dict[str, list[str]] = {}
        for key, value in settings.items():
            section, name = key.split(".")
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        path = self.now / "spec.toml"
        lines = [f"[{section}]\n" + "\n".join(rows) for section, rows in sections.items()]
        path.write_text("\n".join(lines) + "\n")
        return path


def run(command: list[Any], checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=checkout,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        sys.exit(f"{checkout}: {command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def engine(checkout: Path, *words: object) -> None:
    run([checkout / ".venv/bin/python", "-m", "engine", *words], checkout)


def train(checkout: Path, kit: Kit, **changes: object) -> None:
    engine(checkout, "distill", kit.spec(**changes), "--out", kit.now / "run")


def demo(checkout: Path, kit: Kit, **changes: object) -> None:
    folder = kit.folder / "demo"
    train(
        checkout,
        kit,
        **{
            "teacher__path": str(folder / "teacher"),
            "student__config": str(folder / "student.json"),
            "data__corpus": "python-stdlib",
            "data__max_bytes": 2_000_000,
            "data__seq_len": 128,
            "loss__alpha": 0.1,
            "loss__temperature": 1.0,
            "train__steps": 8,
            "train__lr": 4e-3,
            "train__final_lr_ratio": 0.05,
            "eval__rows": 16,
            **changes,
        },
    )


def gguf(checkout: Path, kit: Kit) -> None:
    path = str(kit.folder / "demo" / "teacher.gguf")
    demo(checkout, kit, teacher__path=path, teacher__backend="quantized", train__steps=4)


def accumulation(checkout: Path, kit: Kit) -> None:
    train(checkout, kit, train__accumulation=3, train__rows=2, student__checkpointing="on")


def packing(checkout: Path, kit: Kit) -> None:
    train(checkout, kit, data__corpus=str(kit.folder / "short"), data__seq_len=96)


def stored(*form: object) -> Callable[[Path, Kit], None]:
    def case(checkout: Path, kit: Kit) -> None:
        store = kit.now / "store"
        engine(checkout, "prepare", kit.spec(), "--out", store, *form)
        train(checkout, kit, teacher__cache=str(store), teacher__backend="cached")

    return case


def resume(checkout: Path, kit: Kit) -> None:
    """A run whose machine lost power two steps after the checkpoint of step 8."""
    train(checkout, kit)
    folder = kit.now / "run"
    shutil.copytree(folder / "student", kit.now / "unbroken")
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if json.loads(line).get("step") == 10)
    (folder / "events.jsonl").write_text("".join(lines[: last + 1]))
    lines = (folder / "watch.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] in ("log_opened", "trainer_started")]
    (folder / "watch.jsonl").write_text("".join(kept))
    for path in (folder / "student", *(folder / "checkpoints").iterdir()):
        if path.name != "step-00000008":
            shutil.rmtree(path)
    (folder / "receipt.json").unlink()
    shutil.rmtree(folder / "columns", ignore_errors=True)
    engine(checkout, "distill", "--resume", folder)


CASES: dict[str, Callable[[Path, Kit], None]] = {
    "demo": demo,
    "gguf": gguf,
    "accumulation": accumulation,
    "packing": packing,
    "cached": stored(),
    "top_k": stored("--form", "top_k", "--top-k", 8),
    "sampled": stored("--form", "sampled", "--draws", 8),
    "resume": resume,
}


def plain(value: Any) -> Any:
    """A value of a log or a receipt without what may differ from run to run."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in UNEQUAL}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return DURATION.sub("TIME", value) if isinstance(value, str) else value


def lines_of(path: Path, only: set[str] | None = None) -> list[str]:
    """The lines of a log as they are compared."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if only is None or line["kind"] in only]
    return [json.dumps(plain(line), sort_keys=True) for line in kept]


def rows_of(folder: Path) -> list[str]:
    """Which rows each step took, and the hash of the order that the receipt states."""
    steps = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    fields = ("step", "position", "rows", "tokens", "labelled")
    taken = [str([s[f] for f in fields]) for s in steps if s["kind"] == "step"]
    data = json.loads((folder / "run/receipt.json").read_text())["data"]
    return [*taken, data["order_sha256"]]


def json_of(path: Path) -> list[str]:
    return json.dumps(plain(json.loads(path.read_text())), indent=1, sort_keys=True).splitlines()


def digests(paths: Iterator[Path], folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(paths)
        if path.is_file()
    ]


def parts_of(folder: Path) -> dict[str, list[str]]:
    """What is compared of one case, as lines of text by the name of the part."""
    run_folder, store = folder / "run", folder / "store"
    parts = {
        "student": digests((run_folder / "student").rglob("*"), folder)
        + digests((folder / "unbroken").rglob("*"), folder),
        "checkpoints": digests((run_folder / "checkpoints").rglob("*"), folder),
        "rows": rows_of(folder),
        "events": lines_of(run_folder / "events.jsonl"),
        "watch": lines_of(run_folder / "watch.jsonl", WATCHED),
        "receipt": json_of(run_folder / "receipt.json"),
        "effective": json_of(run_folder / "effective.json"),
    }
    if store.is_dir():
        parts["store"] = digests(store.glob("shard-*"), folder)
        parts["store log"] = lines_of(store / "prepare.jsonl")
        for path in sorted(store.glob("*.json")):
            if not path.name.startswith("shard-"):
                parts["store manifest"] = json_of(path)
    return parts


def compare(name: str, before: Path, after: Path) -> bool:
    equal = True
    ours, theirs = parts_of(after), parts_of(before)
    for part in theirs:
        same = ours.get(part) == theirs[part]
        equal &= same
        digest = hashlib.sha256("\n".join(theirs[part]).encode()).hexdigest()[:12]
        count = len(theirs[part])
        print(f"{name:14}{part:16}{count:6}  {digest}  {'equal' if same else 'DIFFERS'}")
        if not same:
            there = ours.get(part, [])
            pairs = list(zip(theirs[part], there, strict=False))
            unlike = [(a, b) for a, b in pairs if a != b][:3]
            for a, b in unlike:
                print(f"    before {a[:600]}\n    after  {b[:600]}")
            if len(there) != count:
                print(f"    {count} before, {len(there)} after")
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, help="keep models and results here, and use those of `before` again"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="equal-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    kit_folder = work / "kit"
    if kit_folder.exists():
        kit = Kit.__new__(Kit)
        kit.folder, kit.now = kit_folder, work / "now"
    else:
        kit = Kit(checkouts["before"], work)
    shutil.rmtree(work / "after", ignore_errors=True)
    print(f"{'case':14}{'part':16}{'lines':>6}  sha256")
    equal = True
    for name in arguments.cases.split(","):
        for side, checkout in checkouts.items():
            done = work / side / name
            if side == "before" and done.exists():
                continue
            shutil.rmtree(kit.now, ignore_errors=True)
            kit.now.mkdir()
            CASES[name](checkout, kit)
            done.parent.mkdir(exist_ok=True)
            kit.now.rename(done)
        equal &= compare(name, work / "before" / name, work / "after" / name)
        sys.stdout.flush()
    print("equal" if equal else "DIFFERENT")
    if arguments.work is None:
        shutil.rmtree(work)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
