"""Measure what the probe of `engine watch` costs each step of a small script whose steps take about a millisecond.

    python evidence/attach/small_steps.py [--pairs 40] [--steps 100] [--out FILE]

One process trains in epochs of `--steps` steps; the probe's hooks are in place in every second one and removed in the
others, so that both arms see the same load of the machine. Printed, as one JSON value: CPU milliseconds of a step in
both arms (median over all steps), the difference of the medians and of the means of neighbouring epochs (median over
pairs, after the first), and what the first 16 steps cost in all.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

PROBE = Path(__file__).resolve().parents[2] / "engine" / "attach" / "probe"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    sys.path.insert(0, str(PROBE))
    import apr_watch

    apr_watch.follow(folder.name)
    import torch
    from torch import nn

    hooks = apr_watch._hooks
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = given.width
    model = nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)),
        *(nn.ReLU(), nn.Linear(width, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = given.steps * 32
    data = torch.utils.data.TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

    def epoch() -> list[float]:
        found, begin_s = [], time.thread_time()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            now_s = time.thread_time()
            found.append(1e3 * (now_s - begin_s))
            begin_s = now_s
        return found

    arms: dict[str, list[list[float]]] = {"watched": [], "alone": []}
    for _ in range(given.pairs):
        hooks._on = True
        if not hooks._undo:
            hooks.install()
        arms["watched"].append(epoch())
        hooks._on = False
        hooks.remove()
        arms["alone"].append(epoch())
    pairs = list(zip(arms["watched"], arms["alone"], strict=True))
    medians = [statistics.median(one) - statistics.median(other) for one, other in pairs[1:]]
    means = [statistics.fmean(one) - statistics.fmean(other) for one, other in pairs[1:]]
    found = {
        "alone_ms": statistics.median(chain(*arms["alone"][1:])),
        "watched_ms": statistics.median(chain(*arms["watched"][1:])),
        "probe_ms": statistics.median(medians),
        "probe_mean_ms": statistics.median(means),
        "first_16_steps_ms": sum(arms["watched"][0][:16]) - sum(arms["alone"][0][:16]),
        "pairs": given.pairs,
        "torch": torch.__version__,
    }
    text = json.dumps(
        {key: round(one, 4) if type(one) is float else one for key, one in found.items()}
    )
    print(text)
    if given.out is not None:
        with given.out.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
