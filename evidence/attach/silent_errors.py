"""Mistakes that raise no exception, in small scripts, each beside its healthy twin, under three tools:
`engine watch`, TrainCheck 0.2 (its invariants are inferred from the healthy twin, then checked on the wrong script) and
TraceML 0.5 (`traceml run`).

    python evidence/attach/silent_errors.py OUT [--tools watch,traincheck,traceml] [--only NAME ...]

The tools are looked for beside the interpreter; traincheck and traceml-ai are no dependencies of the project. What each
says of the wrong script and of the healthy one goes to OUT/silent_errors.jsonl, and a table to OUT/silent_errors.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
PRELUDE = """
import copy, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(SEED)
torch.set_num_threads(1)
V, T, B, STEPS = 64, 24, 8, 20
first = torch.randint(V, (512, 1))
text = (first + torch.arange(T + 2) * torch.randint(1, 4, (512, 1))) % V


class Model(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, 32), nn.Embedding(T + 2, 32)
        self.inner, self.out = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(dropout)
        self.head = nn.Linear(32, V)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x + torch.cumsum(x, 1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(self.norm(x + self.dropout(self.out(torch.relu(self.inner(x))))))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))
"""
LOOP = """
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(text, batch_size=B, shuffle=True)
for step, rows in enumerate(loader):
    if step == STEPS:
        break
    loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DISTIL = """
teacher = Model().eval().requires_grad_(False)
student = Model()
tau, alpha = 2.0, 0.5
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
for step, rows in enumerate(torch.utils.data.DataLoader(text, batch_size=B, shuffle=True)):
    if step == STEPS:
        break
    with torch.no_grad():
        wanted = teacher(rows[:, :-1])
    logits = student(rows[:, :-1])
    p, q = (wanted / tau).softmax(-1), (logits / tau).log_softmax(-1)
    kd = (p * (p.log() - q)).sum(-1).mean() * tau**2
    loss = alpha * cross_entropy(logits, rows[:, 1:]) + (1 - alpha) * kd
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
EPOCHS = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
every = 4
for epoch in range(3):
    loader = torch.utils.data.DataLoader(text[:120], batch_size=B, shuffle=True)
    for place, rows in enumerate(loader):
        (cross_entropy(model(rows[:, :-1]), rows[:, 1:]) / every).backward()
        if (place + 1) % every == 0 or place + 1 == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""
CASES: dict[str, tuple[str, str, str]] = {
    # name: the healthy script, what is replaced in it, what takes its place
    "zero_grad missing": (LOOP, "    optimizer.zero_grad()\n", ""),
    "zero_grad of another optimizer": (
        LOOP,
        "    optimizer.zero_grad()\n",
        "    torch.optim.AdamW(Model().parameters()).zero_grad()\n",
    ),
    "optimizer holds a copy": (
        LOOP,
        "torch.optim.AdamW(model.parameters(), lr=3e-3)",
        "torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=3e-3)",
    ),
    "head replaced behind the optimizer": (
        LOOP,
        "loader = ",
        "model.head = nn.Linear(32, V)\nloader = ",
    ),
    "embedding in no optimizer": (
        LOOP,
        "torch.optim.AdamW(model.parameters(), lr=3e-3)",
        'torch.optim.AdamW([p for n, p in model.named_parameters() if "embed" not in n], lr=3e-3)',
    ),
    "layers cut off by no_grad": (
        LOOP,
        "loader = ",
        "inner = model.inner.forward\nmodel.inner.forward = torch.no_grad()(inner)\nloader = ",
    ),
    "labels not shifted": (LOOP, "model(rows[:, :-1]), rows[:, 1:]", "model(rows), rows"),
    "labels shifted twice": (
        LOOP,
        "model(rows[:, :-1]), rows[:, 1:]",
        "model(rows)[:, :-2], rows[:, 2:]",
    ),
    "one row of the batch": (
        LOOP,
        "model(rows[:, :-1]), rows[:, 1:]",
        "model(rows[:, :-1])[0], rows[0, 1:]",
    ),
    "softmax twice": (
        LOOP,
        "model(rows[:, :-1]), rows",
        "model(rows[:, :-1]).softmax(-1), rows",
    ),
    "bf16 weights at a small rate": (
        LOOP,
        "model = Model()\noptimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)",
        "model = Model().bfloat16()\noptimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)",
    ),
    "decay counted twice": (
        LOOP,
        "    optimizer.step()\n",
        "    optimizer.step()\n    torch._foreach_mul_([p.data for p in model.parameters()], 0.999)\n",
    ),
    "the model is in eval mode": (LOOP, "loader = ", "model.eval()\nloader = "),
    "the same batch at every step": (
        LOOP,
        "    loss = cross",
        "    rows = next(iter(torch.utils.data.DataLoader(text, batch_size=B)))\n    loss = cross",
    ),
    "the last accumulation window is lost": (EPOCHS, " or place + 1 == len(loader)", ""),
    "clipped after the step": (
        EPOCHS,
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            optimizer.step()\n",
        "            optimizer.step()\n            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    ),
    "the same order in every epoch": (
        EPOCHS,
        "shuffle=True)",
        "shuffle=True, generator=torch.Generator().manual_seed(1))",
    ),
    "teacher is the student": (
        DISTIL,
        "student = Model()",
        "teacher = student = Model(dropout=0.0)",
    ),
    "T squared forgotten": (DISTIL, ".mean() * tau**2", ".mean()"),
    "divergence is a mean over the vocabulary": (
        DISTIL,
        "(p * (p.log() - q)).sum(-1).mean()",
        "(p * (p.log() - q)).mean()",
    ),
    "teacher in train mode": (DISTIL, "Model().eval()", "Model().train()"),
}


def said_by_watch(script: Path, folder: Path) -> tuple[str, list[str]]:
    """What `engine watch` names, contradictions first, and the seconds it took."""
    run = folder / "runs" / "run"
    done = subprocess.run(
        # As a module, because the environment may have no command for it.
        [
            sys.executable,
            "-m",
            "engine",
            "watch",
            "--name",
            "run",
            "--",
            sys.executable,
            str(script),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    log = run / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = [
        f"{line['level']}: {line['id']} (step {line['step']})"
        for line in lines
        if line.get("by") == "identity" and line["level"] in ("fail", "suspicion")
    ]
    return f"exit {done.returncode}", sorted(found)


def said_by_traceml(script: Path, folder: Path) -> tuple[str, list[str]]:
    """Its diagnoses; those of pace and memory are not of what the training does."""
    done = subprocess.run(
        [
            str(BIN / "traceml"),
            "run",
            "--mode",
            "summary",
            "--logs-dir",
            str(folder / "logs"),
            str(script),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"(?:Diagnosis|Verdict|Status)\s*:?\s*([A-Z][A-Z _\-]+)", text)
    return f"exit {done.returncode}", sorted(set(found))


def said_by_traincheck(script: Path, folder: Path, healthy: Path) -> tuple[str, list[str]]:
    """How many invariants of the healthy twin are violated."""

    def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / name), *arguments], capture_output=True, text=True, cwd=folder, timeout=900
        )

    invariants = healthy.parent / "invariants.json"
    if not invariants.exists():
        tool(
            "traincheck-collect",
            "-p",
            str(healthy),
            "--models-to-track",
            "model",
            "--output-dir",
            "good",
        )
        tool("traincheck-infer", "-f", "good", "-o", str(invariants))
    if not invariants.exists():
        return "nothing was inferred", []
    name = f"trace-{script.stem}"
    tool(
        "traincheck-collect", "-p", str(script), "--models-to-track", "model", "--output-dir", name
    )
    done = tool("traincheck-check", "-f", name, "-i", str(invariants))
    text = done.stdout + done.stderr
    violated = re.findall(r"[Tt]otal failed invariants: (\d+)/(\d+)", text)
    if not violated:
        return f"exit {done.returncode}", [
            text.strip().splitlines()[-1][:200] if text.strip() else ""
        ]
    failed, total = violated[-1]
    return f"exit {done.returncode}", [f"{failed} of {total} invariants"] * (failed != "0")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", default="watch,traincheck,traceml")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    given = parser.parse_args()
    out = given.out.absolute()
    rows = []
    for name in given.only:
        healthy, old, new = CASES[name]
        assert healthy.count(old) == 1, name
        folder = out / re.sub(r"\W+", "_", name)
        folder.mkdir(parents=True, exist_ok=True)
        scripts = {
            # Another seed: invariants that are inferred from one healthy run must hold in the next.
            "reference": PRELUDE.replace("SEED", "1") + healthy,
            "healthy": PRELUDE.replace("SEED", "2") + healthy,
            "wrong": PRELUDE.replace("SEED", "2") + healthy.replace(old, new),
        }
        for kind, text in scripts.items():
            (folder / f"{kind}.py").write_text(text)
        row: dict[str, object] = {"name": name}
        for tool in given.tools.split(","):
            for kind in ("wrong", "healthy"):
                script, begun_s = folder / f"{kind}.py", time.monotonic()
                inside = folder / f"{tool}-{kind}"
                inside.mkdir()
                if tool == "watch":
                    how, said = said_by_watch(script, inside)
                elif tool == "traceml":
                    how, said = said_by_traceml(script, inside)
                else:
                    how, said = said_by_traincheck(script, inside, folder / "reference.py")
                seconds = round(time.monotonic() - begun_s, 1)
                row[f"{tool}, {kind}"] = {"said": said, "how": how, "seconds": seconds}
        rows.append(row)
        print(json.dumps(row), flush=True)
        with (out / "silent_errors.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
