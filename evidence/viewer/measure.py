"""Size of an install of `apr-workbench-view` in an empty environment, and seconds until it shows something.

    python evidence/viewer/measure.py dist/apr_workbench_view-*.whl > evidence/viewer/results.json

The packages come through the machine's own configuration of pip. Sizes are those of `du -m`, without what
an empty environment has; times are the median and the least of five processes, with compiled modules.
"""

import argparse
import json
import os
import pty
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

RUNS = Path(__file__).parents[1] / "2026-11-27-hang-at-step-zero"
TIMES = 5


def size_mb(path: Path) -> float:
    return int(subprocess.check_output(["du", "-sk", path]).split()[0]) / 1024


def seconds(begin: Callable[[], object]) -> dict[str, float]:
    begin()
    taken = []
    for _ in range(TIMES):
        from_s = time.perf_counter()
        begin()
        taken.append(time.perf_counter() - from_s)
    return {"median_s": round(statistics.median(taken), 3), "least_s": round(min(taken), 3)}


def until_shown(command: list[str], text: str) -> float:
    """Start a command on a terminal, read until it has shown a text, and end it; returns its processor seconds."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", LANG="C.UTF-8", COLUMNS="160", LINES="45")
        os.execv(command[0], command)
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65536)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(terminal)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        venv.create(home, with_pip=False)
        binaries = home / "bin"
        (packages,) = home.glob("lib/*/site-packages")
        before = size_mb(home)
        pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python")]
        subprocess.run([*pip, "install", "-q", str(wheel)], check=True, stdout=sys.stderr)
        asked = [*pip, "list", "--format=json", "--disable-pip-version-check"]
        listed = json.loads(subprocess.check_output(asked))
        compiled = sum(map(size_mb, packages.rglob("__pycache__")))
        biggest = sorted(packages.iterdir(), key=size_mb, reverse=True)[:6]
        runs = Path(folder) / "runs"
        shutil.copytree(RUNS / "tests" / "t2" / "arms", runs)

        def run(*words: str) -> Callable[[], object]:
            command = [str(binaries / words[0]), *words[1:]]
            return lambda: subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL)

        screen = [str(binaries / "apr-workbench"), str(runs)]
        results = {
            "wheel": wheel.name,
            "wheel_mb": round(wheel.stat().st_size / 1e6, 2),
            "installed_mb": round(size_mb(home) - before, 1),
            "of_these_compiled_modules_mb": round(compiled, 1),
            "biggest_mb": {one.name: round(size_mb(one), 1) for one in biggest},
            "distributions": {one["name"]: one["version"] for one in listed},
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "engine --version": seconds(run("engine", "--version")),
            "engine diagnose": seconds(run("engine", "diagnose", str(runs))),
            "first frame of apr-workbench": seconds(lambda: until_shown(screen, "01-a")),
            "processor_s until the first frame": sorted(
                until_shown(screen, "01-a") for _ in range(TIMES)
            ),
        }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
