"""What it costs to count the work of an evaluation, and to look at the kernel's accounts.

`python evidence/audit/counting.py [--turns N]`: the demo's teacher, 16 rows of 1,024 tokens, with and without counting
in turns, each turn's own quotient; then the seconds of one look.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import torch

from engine.audit.work import CountedWork
from engine.machine.accounts import look
from engine.models.load import load_decoder

TEACHER = Path(__file__).parents[2] / "engine" / "demo" / "teacher"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = load_decoder(TEACHER, torch.float32, device)
    tokens_BT = torch.arange(16 * 1024, device=device).reshape(16, 1024) % 4096
    documents_BT = torch.zeros_like(tokens_BT)

    def seconds(*, counted: bool) -> float:
        begun_s = time.perf_counter()
        with (
            torch.inference_mode(),
            CountedWork(lambda: "it") if counted else contextlib.nullcontext(),
        ):
            decoder.hidden(tokens_BT, documents_BT)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    for counted in (False, True):
        seconds(counted=counted)
    pairs = [(seconds(counted=False), seconds(counted=True)) for _ in range(turns)]
    quotients = sorted(with_ / without for without, with_ in pairs)
    print(
        f"{device}: counted / not counted, median {statistics.median(quotients):.3f}, all", end=" "
    )
    print(*(f"{one:.3f}" for one in quotients))
    looks = []
    for _ in range(100):
        begun_s = time.perf_counter()
        look()
        looks.append(time.perf_counter() - begun_s)
    print(f"a look at the accounts: median {1e6 * statistics.median(looks):.0f} us")


if __name__ == "__main__":
    main()
