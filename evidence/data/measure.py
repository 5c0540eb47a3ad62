"""Measure how much memory and time a run needs until it has its rows, for corpora of several sizes.

    PYTHONPATH=. python evidence/data/measure.py WORK OUT.json --mib 512 1024 2048

A file of JSON lines is written for each size: consecutive pieces of Python's library, each with its own number, so that
none is another's copy. For each, a process of its own takes what the trainer takes: `load_tokens`, and then 1,000 rows
in their order. It does so twice: with an empty cache, and with the one that the first left.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

DOCUMENT_CHARACTERS = 1600
TOKENIZER = "engine/demo/teacher"


def write_corpus(path: Path, size: int) -> int:
    """Write at least `size` bytes of JSON lines, and return how many."""
    count = written = 0
    with path.open("w", encoding="utf-8") as file:
        for text in _pieces():
            written += file.write(json.dumps({"text": f"# {count}\n{text}"}) + "\n")
            count += 1
            if written >= size:
                return count
    raise AssertionError("no end")


def _pieces() -> Iterator[str]:
    library = "\n".join(
        path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    while True:
        for start in range(0, len(library), DOCUMENT_CHARACTERS):
            yield library[start : start + DOCUMENT_CHARACTERS]


def take_rows(path: str, root: str) -> dict[str, object]:
    """Take the rows of a corpus, and return what that needed."""
    from engine.data.batches import Batches
    from engine.data.token_cache import Recipe, load_tokens
    from engine.data.tokens import Encoder
    from engine.formats.tokenizer import open_tokenizer

    recipe = Recipe(
        source=path,
        include_tests=False,
        columns=(),
        heldout_fraction=0.05,
        max_bytes=None,
        encoder=Encoder(tokenizer=open_tokenizer(TOKENIZER)),
        packing="stream",
        seq_len=1024,
    )
    before = _resident()
    phases: dict[str, float] = {}
    begun = last = time.monotonic()
    now = ""

    def progress(what: str, done: int, total: int | None) -> None:
        nonlocal now, last
        if what != now:
            at = time.monotonic()
            phases[now] = phases.get(now, 0.0) + at - last
            now, last = what, at

    tokens = load_tokens(recipe, progress, root=Path(root))
    phases[now] = phases.get(now, 0.0) + time.monotonic() - last
    seconds = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    batches = Batches(tokens.train, seq_len=1024, rows_per_batch=4, seed=0)
    begun = time.monotonic()
    for index in range(250):
        batches.batch_at(index)
    return {
        "tokens": tokens.train.token_count + tokens.heldout.token_count,
        "documents": sum(tokens.documents),
        "train_sha256": tokens.train.sha256,
        "load_s": round(seconds, 1),
        "phases_s": {what: round(spent, 1) for what, spent in phases.items() if what},
        "resident_before_bytes": before,
        "peak_resident_bytes": peak,
        "rows_s": round(time.monotonic() - begun, 2),
        "anonymous_after_rows_bytes": _resident("RssAnon"),
        "peak_after_rows_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _resident(name: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--take", action="store_true", help="take rows of WORK with the cache OUT")
    given = parser.parse_args()
    if given.take:
        print(json.dumps(take_rows(str(given.work), str(given.out))))
        return
    found = []
    for mib in given.mib:
        path, cache = given.work / f"{mib}.jsonl", given.work / f"cache-{mib}"
        write_corpus(path, mib << 20)
        for start in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, __file__, str(path), str(cache), "--take"],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
            )
            found.append({"mib": mib, "start": start, **json.loads(done.stdout)})
            print(found[-1], flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
        path.unlink()


if __name__ == "__main__":
    main()
