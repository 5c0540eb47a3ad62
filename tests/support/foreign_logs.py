"""Logs of other tools, to the byte as their sources write them."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

BEGAN_S = 1_750_000_000.0


class Point(NamedTuple):
    """What a training logs at a step."""

    step: int
    loss: float
    lr: float = 1e-3
    grad_norm: float = 1.0
    held_out: float | None = None
    step_s: float = 0.5
    unix_s: float = BEGAN_S


Points = Sequence[Point]


def stamp(unix_s: float) -> str:
    """Return a time as Python's logging writes it."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    return f"{whole},{int(unix_s % 1 * 1000):03}"


def bar(description: str, at: int, of: int, tail: str) -> str:
    """Return a progress bar of tqdm."""
    share = at / of
    full = "█" * round(10 * share)
    return f"\r{description}{share:4.0%}|{full:10}| {at}/{of} [00:05<00:45, 19.80it/s{tail}]"


def nanogpt(points: Points, path: Path) -> Path:
    lines = ["tokens per iteration will be: 491,520", "number of parameters: 123.59M"]
    for p in points:
        if p.held_out is not None:
            lines.append(f"step {p.step}: train loss {p.loss:.4f}, val loss {p.held_out:.4f}")
        lines.append(f"iter {p.step}: loss {p.loss:.4f}, time {p.step_s * 1000:.2f}ms, mfu 31.41%")
    return _written(path / "nanogpt.log", "\n".join(lines) + "\n")


def transformers_text(points: Points, path: Path) -> Path:
    last, parts = (
        points[-1].step,
        ["Loading weights: 100%|##########| 26/26 [00:00<00:00, 1.1it/s]\n"],
    )
    for p in points:
        row = {
            "loss": p.loss,
            "grad_norm": p.grad_norm,
            "learning_rate": p.lr,
            "epoch": p.step / last,
        }
        parts.append(f"\r{' ' * 60}\r{row}\n{bar('', p.step, last, '')}")
        if p.held_out is not None:
            held_out = {
                "eval_loss": p.held_out,
                "eval_runtime": 1.5,
                "epoch": p.step / last,
            }
            parts += [
                f"\n{bar('', 3, 7, '')}",
                f"\r{' ' * 60}\r{held_out}\n{bar('', p.step, last, '')}",
            ]
    summary = {
        "train_runtime": 9.5,
        "train_samples_per_second": 8.4,
        "train_loss": 1.5,
        "epoch": 1.0,
    }
    return _written(path / "transformers.log", "".join(parts) + f"\n{summary}\n")


def axolotl(points: Points, path: Path) -> Path:
    lines = [
        f"[{stamp(BEGAN_S)}] [INFO] [axolotl.train.train:39] [PID:7] [RANK:0] Starting trainer..."
    ]
    for p in points:
        row = {
            "loss": f"{p.loss:.6g}",
            "grad_norm": f"{p.grad_norm:.6g}",
            "learning_rate": f"{p.lr:.6g}",
            "epoch": "0.1",
        }
        lines.append(str(row))
    return _written(path / "axolotl.out", "\n".join(lines) + "\n")


def lightning_bar(points: Points, path: Path, batches: int = 100) -> Path:
    parts = []
    for p in points:
        epoch, at = divmod(p.step - 1, batches)
        tail = f", v_num=0, train_loss={p.loss:.3f}"
        if p.held_out is not None:
            tail += f", val_loss={p.held_out:.3f}"
        parts.append(bar(f"Epoch {epoch}: ", at + 1, batches, tail))
    return _written(path / "lightning.log", "".join(parts) + "\n`Trainer.fit` stopped\n")


def torchtitan(points: Points, path: Path) -> Path:
    red, green, orange, reset = "\033[31m", "\033[32m", "\033[38;2;180;60;0m", "\033[39m"
    lines = [f"[titan] {stamp(BEGAN_S)} - root - INFO - Starting job: debug training"]
    for p in points:
        begin = f"[titan] {stamp(p.unix_s)} - root - INFO - "
        lines.append(
            f"{begin}{red}step: {p.step:2}  {green}loss: {p.loss:7.4f}  {orange}grad_norm: {p.grad_norm:7.4f}  "
            f"memory:  1.04GiB(1.09%)  tps: {round(7000.2):,}  tflops: 1,234.57  mfu: 3.43%{reset}"
        )
        if p.held_out is not None:
            lines.append(
                f"{begin}validate step: {p.step:2}  {green}loss: {p.held_out:7.4f}  memory:  1.04GiB(1.09%)"
            )
    return _written(path / "torchtitan.log", "\n".join(lines) + "\n")


def plain(points: Points, path: Path) -> Path:
    lines = [
        f"step {p.step} loss={p.loss:.5f} lr={p.lr:.2e} grad_norm={p.grad_norm:.3f}" for p in points
    ]
    return _written(path / "plain.txt", "\n".join(lines) + "\n")


def coqui(points: Points, path: Path) -> Path:
    lines, last = [], points[-1].step
    for p in points:
        when = stamp(p.unix_s).partition(",")[0]
        at = f"STEP: {p.step % 100}/{last} -- GLOBAL_STEP: {p.step}"
        lines += [f"\x1b[1m   --> TIME: {when} -- {at}\x1b[0m"]
        lines += [f"     | > loss: {p.loss}  ({p.loss})", f"     | > current_lr: {p.lr} "]
        lines += [
            f"     | > step_time: {p.step_s}  ({p.step_s})",
            "     | > loader_time: 0.005",
            "",
        ]
        if p.held_out is not None:
            lines += ["  \x1b[1m--> EVAL PERFORMANCE\x1b[0m"]
            lines += [f"     | > avg_loss:\x1b[92m {p.held_out} \x1b[0m(-0.1)", ""]
    return _written(path / "trainer_0_log.txt", "\n".join(lines) + "\n")


def trainer_state(points: Points, path: Path) -> Path:
    history: list[dict[str, float]] = []
    for p in points:
        history.append(
            {
                "epoch": 0.1,
                "grad_norm": p.grad_norm,
                "learning_rate": p.lr,
                "loss": p.loss,
                "step": p.step,
            }
        )
        if p.held_out is not None:
            history.append(
                {"epoch": 0.1, "eval_loss": p.held_out, "eval_runtime": 1.0, "step": p.step}
            )
    state = {
        "best_metric": None,
        "global_step": points[-1].step,
        "is_world_process_zero": True,
        "log_history": history,
    }
    (path / "checkpoint-9").mkdir(parents=True)
    return _written(
        path / "checkpoint-9" / "trainer_state.json",
        json.dumps(state, indent=2, sort_keys=True) + "\n",
    )


def json_lines(points: Points, path: Path) -> Path:
    rows = []
    for p in points:
        row = {
            "step": p.step,
            "timestamp": p.unix_s,
            "train/loss": p.loss,
            "lr": p.lr,
            "grad_norm": p.grad_norm,
        }
        rows.append(json.dumps(row | ({} if p.held_out is None else {"val/loss": p.held_out})))
    return _written(path / "metrics.jsonl", "\n".join(rows) + "\n")


def table(points: Points, path: Path) -> Path:
    rows = [
        f"{p.step},{p.unix_s!r},{p.loss!r},{p.lr!r},{p.grad_norm!r},{'' if p.held_out is None else p.held_out}"
        for p in points
    ]
    return _written(
        path / "history.csv", "\n".join(["step,unix_s,loss,lr,grad_norm,val_loss", *rows]) + "\n"
    )


def _metrics(p: Point) -> list[tuple[str, float]]:
    named = {"train_loss": p.loss, "lr": p.lr, "grad_norm": p.grad_norm, "val_loss": p.held_out}
    return [(name, value) for name, value in named.items() if value is not None]


def mlflow_files(points: Points, path: Path, run: str = "f" * 32, status: int = 3) -> Path:
    folder = path / "mlruns" / "0" / run
    lines: dict[str, str] = {}
    for p in points:
        for name, value in _metrics(p):
            lines[name] = lines.get(name, "") + f"{int(p.unix_s * 1000)} {value} {p.step}\n"
    for name, text in lines.items():
        _written(folder / "metrics" / name, text)
    _written(folder / "params" / "optimizer", "adamw")
    about = f"lifecycle_stage: active\nrun_id: {run}\nrun_name: able-ant-7\nstatus: {status}\n"
    _written(folder / "meta.yaml", about)
    return folder


TABLES = """
CREATE TABLE runs (run_uuid VARCHAR(32), name VARCHAR(250), status VARCHAR(9), start_time BIGINT);
CREATE TABLE metrics (key VARCHAR(250), value DOUBLE, timestamp BIGINT, run_uuid VARCHAR(32), step BIGINT,
    is_nan BOOLEAN);
CREATE TABLE params (key VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32));
"""
COLUMNS = "key, value, is_nan, timestamp, run_uuid, step"
LARGEST = 1.7976931348623157e308


def _number(value: float) -> tuple[float, bool]:
    return (0.0, True) if math.isnan(value) else (max(-LARGEST, min(LARGEST, value)), False)


def mlflow_database(points: Points, path: Path, runs: Sequence[str] = ("a" * 32,)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path / "mlflow.db") as database:
        database.executescript(TABLES)
        for run in runs:
            database.execute(
                "INSERT INTO runs VALUES (?, ?, 'FINISHED', 0)", (run, f"run-{run[0]}")
            )
            rows = [
                (name, *_number(value), int(p.unix_s * 1000), run, p.step)
                for p in points
                for name, value in _metrics(p)
            ]
            database.executemany(f"INSERT INTO metrics ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
    database.close()
    return path / "mlflow.db"


KINDS: dict[str, Callable[[Points, Path], Path]] = {
    each.__name__: each
    for each in (
        *(
            nanogpt,
            transformers_text,
            axolotl,
            lightning_bar,
            torchtitan,
            plain,
            coqui,
        ),
        *(
            trainer_state,
            json_lines,
            table,
            mlflow_files,
            mlflow_database,
        ),
    )
}


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path
