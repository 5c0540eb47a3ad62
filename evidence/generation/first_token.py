"""Measure the seconds from the command to the first token of a 7B-shaped GGUF file in Q4_K_M that is in the page cache.

python -m evidence.generation.first_token FOLDER      writes a file of 4.4 GB into FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from evidence.generation.on_policy import TOKENIZER, write_teacher


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / "random-7b.gguf"
    write_teacher(path)
    path.read_bytes()
    command = [sys.executable, "-m", "engine", "generate", str(path)]
    command += ["--tokenizer", str(TOKENIZER), "--prompt", "def add(a, b):"]
    for _ in range(2):
        begun_s = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            running.stdout.read(1)
            print(json.dumps({"first_token_s": time.perf_counter() - begun_s}), flush=True)
            running.kill()


if __name__ == "__main__":
    main()
