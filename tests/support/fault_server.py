"""Run `fault_scenarios.py` and `whole_runs.py` for one test after another, each in a forked child of a process
that already has torch and `faults.c` loaded: importing torch takes longer than most of the tests.

    python fault_server.py      one JSON list per line on stdin: output file, script, arguments

For each line it prints the exit code of the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.faults import HERE, environment


class FaultServer:
    """Client of the server process, for the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, folder: Path, script: str, *arguments: object) -> dict[str, Any]:
        """Return the last JSON line that `script` prints; its output is kept in `folder`."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        said = folder / "said"
        request = [str(said), script, *map(str, arguments)]
        print(json.dumps(request), file=requests, flush=True)
        code = answers.readline()
        errors = Path(f"{said}.err").read_text() if code else "the server is gone"
        assert code.strip() == "0", errors[-4000:]
        answer: dict[str, Any] = json.loads(Path(f"{said}.out").read_text().splitlines()[-1])
        return answer


@contextmanager
def fault_server(library: Path) -> Iterator[FaultServer]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "fault_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(library),
    )
    with process:
        try:
            yield FaultServer(process)
        finally:
            # Also when a test was ended while its script was running.
            process.kill()


def _carry_out(work: Callable[[], None], said: str) -> int:
    """Run `work` in a forked child and return the exit code."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for fd, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must never return into its parent's code
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    from tests.support import fault_scenarios, whole_runs

    scripts = {"fault_scenarios.py": fault_scenarios.main, "whole_runs.py": whole_runs.main}
    for line in sys.stdin:
        said, script, *sys.argv[1:] = json.loads(line)
        print(_carry_out(scripts[script], said), flush=True)


if __name__ == "__main__":
    main()
