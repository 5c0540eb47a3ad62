"""Seconds from the command to the first token of a 7B-shaped GGUF file in Q4_K_M, with the file in the page cache.

python -m evidence.generation.first_token FOLDER      writes a file of 4.4 GB into FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from engine import demo
from engine.bench.random_weights import RandomWeights
from engine.bench.teacher import config_named
from engine.formats.gguf_write import write_gguf

TOKENIZER = Path(demo.__file__).parent / "teacher"


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / "random-7b.gguf"
    config = config_named("qwen2.5-7b")
    with RandomWeights(config, "q4_k_m", torch.device("cuda")) as weights:
        tensors = ((name, weights.get(name).to("cpu")) for name in weights.tensors)
        write_gguf(path, config=config.to_hf_dict(), tensors=tensors)
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
