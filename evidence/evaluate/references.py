"""Judge the reference solution and an empty one for every problem of a file, several times.

    python3 evidence/evaluate/references.py humaneval=HumanEval.jsonl.gz mbpp=mbpp.jsonl \\
        mbpp=sanitized-mbpp.json > evidence/evaluate/references.json

The files are the public ones (openai/human-eval, google-research/google-research in mbpp/); a file's sha256
is of its content, unpacked. What is written holds ids and numbers, and no text of a problem. Programs run
in the sandbox, as many at once as there are processors.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

from engine.evaluate.humaneval import trials
from engine.evaluate.problems import Problem, read_problems
from engine.evaluate.sandbox import Sandbox, open_sandbox

TIMES = 2


def outcomes(sandbox: Sandbox, problems: tuple[Problem, ...], texts: list[str]) -> dict[str, str]:
    found = trials(sandbox, problems, texts)
    return {one.task_id: trial.outcome for one, trial in zip(problems, found, strict=True)}


def counted(sandbox: Sandbox, benchmark: str, path: Path) -> dict[str, object]:
    read = read_problems(path, benchmark)
    problems = read.problems
    rounds, seconds = [], []
    for _ in range(TIMES):
        begin = time.monotonic()
        references = outcomes(sandbox, problems, [one.reference for one in problems])
        empty = outcomes(sandbox, problems, [""] * len(problems))
        seconds.append(round(time.monotonic() - begin, 1))
        rounds.append((references, empty))
        print(f"{path.name}: {seconds[-1]} s", file=sys.stderr)
    references, empty = rounds[0]
    return {
        "benchmark": benchmark,
        "file": path.name,
        "sha256": read.sha256,
        "problems": len(problems),
        "references": {
            "pass": list(references.values()).count("pass"),
            "not": {name: said for name, said in references.items() if said != "pass"},
        },
        "empty": {
            "fail": list(empty.values()).count("fail"),
            "not": {name: said for name, said in empty.items() if said != "fail"},
        },
        "times": TIMES,
        "every_time_the_same": all(one == rounds[0] for one in rounds),
        "seconds": seconds,
    }


def main() -> None:
    sandbox = open_sandbox()
    given = [one.partition("=") for one in sys.argv[1:]]
    record = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "sandbox": sandbox.version,
        "at_once": len(os.sched_getaffinity(0)),
        "limits": {"cpu_s": sandbox.cpu_s, "clock_s": sandbox.clock_s},
        "files": [counted(sandbox, benchmark, Path(path)) for benchmark, _, path in given],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
