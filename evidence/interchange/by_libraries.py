"""Thirty logs of ten kinds, written by the libraries themselves in small trainings: 18 with one fault, 12 healthy.

    pip install torch==2.13.0 torchtune torchao==0.13.0 tensorboard wandb mlflow lightning transformers accelerate
    pip install keras pandas pyarrow tqdm
    python evidence/interchange/by_libraries.py --out evidence/interchange/by_libraries.tar.xz

in an environment of its own. Each training is a process of its own on the CPU with a fixed seed. A fault is a mistake
that people make, at a step that is known because it was planted there. The stall takes five minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 400
Row = dict[str, float]


class Training(NamedTuple):
    kind: str
    train: Callable[[Path], int | None]
    """Trains and logs into a folder; returns the step where a fault began, if only the training knows it."""
    fault: str
    """What is wrong, in words; empty for a healthy training."""
    step: int | None
    """The step where it began, as the log counts steps."""
    log: str
    """The log in the folder, or `printed.log`: what the process has printed."""


TRAININGS: dict[str, Training] = {}
PRINTED = "printed.log"


def training(
    kind: str, log: str, fault: str = "", step: int | None = None
) -> Callable[[Callable[[Path], int | None]], None]:
    def add(train: Callable[[Path], int | None]) -> None:
        TRAININGS[train.__name__] = Training(kind, train, fault, step, log)

    return add


# The training: the next token of a Markov chain, from the eight before it.


def chain(count: int, seed: int, tokens: int = 64, branches: int = 4) -> tuple[Any, Any]:
    """Return contexts and next tokens; each token has `branches` successors, the same ones for every seed."""
    import torch

    after = torch.randint(
        tokens, (tokens, branches), generator=torch.Generator().manual_seed(branches)
    )
    drawn = torch.Generator().manual_seed(seed)
    rows = [torch.randint(tokens, (count,), generator=drawn)]
    for _ in range(8):
        rows.append(after[rows[-1], torch.randint(branches, (count,), generator=drawn)])
    whole = torch.stack(rows, 1)
    return whole[:, :8], whole[:, 8]


def model_of(tokens: int = 64, dropout: float = 0.0) -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Embedding(tokens, 32), nn.Flatten(), nn.Linear(256, 128), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(128, tokens)),
    )


def loop(
    *,
    steps: int = STEPS,
    rows: int = 64,
    rate: Callable[[int], float] = lambda step: 3e-3,
    batch: Callable[[int], tuple[Any, Any]] | None = None,
    masked: Callable[[int], bool] = lambda step: False,
    skips: bool = False,
    held_out_every: int = 0,
    model: Any = None,
    trained: Any = None,
    kept: list[Any] | None = None,
    tokens: int = 64,
) -> Iterator[Row]:
    """Train and yield what is to be logged of each step, from 1 on.

    `masked` steps have no label; `skips` leaves out the update of a step whose loss is not finite; `trained` is another
    model, whose weights the optimizer has by mistake; `kept` collects the losses with their graphs.
    """
    import torch
    from torch.nn.functional import cross_entropy

    model = model_of(tokens) if model is None else model
    optimizer = torch.optim.AdamW((trained or model).parameters(), lr=rate(1))
    held_out = chain(512, seed=999_999, tokens=tokens)
    draw = batch or (lambda step: chain(rows, seed=step, tokens=tokens))
    for step in range(1, steps + 1):
        begun_s = time.perf_counter()
        inputs, labels = draw(step)
        read_s = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        mask = torch.full(labels.shape, 0.0 if masked(step) else 1.0)
        loss = (cross_entropy(model(inputs), labels, reduction="none") * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=kept is not None)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        if not skips or torch.isfinite(loss):
            optimizer.step()
        if kept is not None:
            kept.append(loss)
        row = {"loss": loss.item(), "lr": rate(step), "grad_norm": norm.item()}
        if held_out_every and step % held_out_every == 0:
            model.eval()
            with torch.no_grad():
                row["val_loss"] = cross_entropy(model(held_out[0]), held_out[1]).item()
            model.train()
        ended_s = time.perf_counter()
        yield {
            "step": step, **row, "data_time": read_s - begun_s, "step_time": ended_s - begun_s,
            "timestamp": time.time(),
        }  # fmt: skip


def few(count: int = 300) -> Callable[[int], tuple[Any, Any]]:
    """Return batches of the same few examples."""
    import torch

    inputs, labels = chain(count, seed=7)

    def draw(step: int) -> tuple[Any, Any]:
        at = torch.randperm(count, generator=torch.Generator().manual_seed(step))[:64]
        return inputs[at], labels[at]

    return draw


def best_of(rows: Iterator[Row], log: Callable[[Row], None]) -> int:
    """Log rows; returns the step of the lowest held-out loss."""
    held_out = {}
    for row in rows:
        log(row)
        if "val_loss" in row:
            held_out[int(row["step"])] = row["val_loss"]
    return min(held_out, key=held_out.__getitem__)


# TensorBoard.


def tensorboard_writer(folder: Path) -> Callable[[Row], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tb"))

    def log(row: Row) -> None:
        names = {"loss": "Loss/train", "val_loss": "Loss/val", "lr": "lr", "grad_norm": "grad_norm"}
        names |= {"loss_d": "loss_d", "loss_g": "loss_g"}
        for name in names.keys() & row.keys():
            writer.add_scalar(names[name], row[name], int(row["step"]))
        writer.flush()

    return log


@training("tensorboard", "tb", "the rate is 300 times too high from step 250 on", 250)
def tensorboard_rate_jumps(folder: Path) -> None:
    log = tensorboard_writer(folder)
    for row in loop(rate=lambda step: 3e-3 if step < 250 else 0.9):
        log(row)


@training("tensorboard", "tb", "300 examples are learnt by heart")
def tensorboard_overfits(folder: Path) -> int:
    return best_of(loop(batch=few(), held_out_every=10), tensorboard_writer(folder))


@training("tensorboard", "tb")
def tensorboard_gan(folder: Path) -> None:
    import torch
    from torch import nn
    from torch.nn.functional import binary_cross_entropy_with_logits as bce

    log = tensorboard_writer(folder)
    makes = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    tells = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_g, of_d = (torch.optim.Adam(one.parameters(), 2e-3, (0.5, 0.9)) for one in (makes, tells))
    yes, no = torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(1, STEPS + 1):
        angle = 2 * math.pi * torch.rand(64)
        real = torch.stack([angle.cos(), angle.sin()], 1)
        made = makes(torch.randn(64, 4))
        loss_d = bce(tells(real), yes) + bce(tells(made.detach()), no)
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = bce(tells(made), yes)
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        log({"step": step, "loss_d": loss_d.item(), "loss_g": loss_g.item(), "lr": 2e-3})


# W&B, offline.


def wandb_run(folder: Path, **config: Any) -> Any:
    import wandb

    about = wandb.Settings(x_disable_meta=True, x_disable_stats=True, console="off")
    return wandb.init(
        mode="offline", dir=str(folder), project="small", config=config, settings=about
    )


@training("wandb", "wandb", "a batch without labels: 0/0 from its step 179 on", 179)
def wandb_nan(folder: Path) -> None:
    run = wandb_run(folder, lr=3e-3)
    for row in loop(masked=lambda step: step == 180):  # W&B counts from 0
        run.log({"train/loss": row["loss"], "train/grad_norm": row["grad_norm"], "lr": row["lr"]})
    run.finish()


@training("wandb", "wandb", "each loss is kept with its graph", 1)
def wandb_memory(folder: Path) -> None:
    run = wandb_run(folder, lr=3e-3)
    for row in loop(rows=512, kept=[]):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        run.log({"loss": row["loss"], "process_memory_mb": used}, step=int(row["step"]))
    run.finish()


@training("wandb", "wandb")
def wandb_reinforce(folder: Path) -> None:
    import torch

    run = wandb_run(folder, algorithm="reinforce")
    logits = torch.zeros(10, requires_grad=True)
    optimizer, usual = torch.optim.Adam([logits], 0.02), 0.0
    for _ in range(STEPS):
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample((16,))
        reward = action.float() + torch.randn(16)
        loss = -(policy.log_prob(action) * (reward - usual)).mean()
        usual = 0.9 * usual + 0.1 * reward.mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        said = {"loss": loss.item(), "reward": reward.mean().item()}
        run.log(said | {"entropy": policy.entropy().item()})
    run.finish()


# MLflow.


def mlflow_logs(rows: Iterator[Row], where: str, **params: Any) -> None:
    import mlflow

    mlflow.set_tracking_uri(where)
    with mlflow.start_run(run_name="small"):
        mlflow.log_params(params)
        for row in rows:
            names = {
                "train_loss": "loss",
                "lr": "lr",
                "grad_norm": "grad_norm",
                "val_loss": "val_loss",
            }
            said = {name: row[of] for name, of in names.items() if of in row}
            mlflow.log_metrics(said, step=int(row["step"]))


@training("mlflow", "mlruns", "the schedule has the steps of one epoch of four", 101)
def mlflow_rate_ends(folder: Path) -> None:
    cosine = lambda step: 1.5e-3 * (1 + math.cos(math.pi * min(step - 1, 100) / 100))  # noqa: E731
    mlflow_logs(loop(rate=cosine), (folder / "mlruns").as_uri(), optimizer="adamw")


@training("mlflow", "mlflow.db", "the optimizer has the weights of another model", 1)
def mlflow_guesses(folder: Path) -> None:
    rows = loop(tokens=1000, trained=model_of(1000))
    mlflow_logs(rows, f"sqlite:///{folder}/mlflow.db", vocab_size=1000)


@training("mlflow", "mlflow.db")
def mlflow_constant_rate(folder: Path) -> None:
    mlflow_logs(loop(held_out_every=40), f"sqlite:///{folder}/mlflow.db", optimizer="adamw")


# Lightning.


def lightning_fit(
    folder: Path, *, accumulated: int = 1, rate: float = 3e-3, restarts: int = 0, sgd: bool = False
) -> None:
    import lightning
    import torch
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", accumulated * loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            kind = torch.optim.SGD if sgd else torch.optim.AdamW
            optimizer = kind(self.parameters(), lr=rate)
            if not restarts:
                return optimizer
            warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, restarts)
            plan = {"scheduler": warm, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": plan}

    loaders = [
        DataLoader(TensorDataset(*chain(count, seed)), 64, shuffle=seed == 1)
        for count, seed in ((6400, 1), (640, 2))
    ]
    trainer = lightning.Trainer(
        max_epochs=4, log_every_n_steps=1, val_check_interval=50, accelerator="cpu",
        logger=CSVLogger(str(folder)), callbacks=[LearningRateMonitor("step")],
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Small(), *loaders)


@training("lightning", "lightning_logs", "the training loss is a sum over 8 parts, not a mean", 49)
def lightning_sum(folder: Path) -> None:
    lightning_fit(folder, accumulated=8)


@training("lightning", "lightning_logs", "a rate 1000 times too high from the start", 1)
def lightning_rate_too_high(folder: Path) -> None:
    lightning_fit(folder, rate=3.0)


@training("lightning", "lightning_logs")
def lightning_warm_restarts(folder: Path) -> None:
    lightning_fit(folder, restarts=100)


# Transformers.


def transformers_fit(
    folder: Path,
    *,
    batch: Callable[[int, Any, Any], tuple[Any, Any]] = lambda step, inputs, labels: (
        inputs,
        labels,
    ),
    rate: Callable[[int], float] | None = None,
    schedule: str = "linear",
    evaluated: bool = False,
    saved: bool = False,
    before: Callable[[int], None] = lambda step: None,
) -> None:
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        return [{"input_ids": row, "labels": row.clone()} for row in chain(count, seed)[0]]

    class Ordered(Trainer):
        """Reads its rows in their order."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Before(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            before(state.global_step + 1)

    trains = []
    all_rows = rows(32 * STEPS, 1)
    for step in range(1, STEPS + 1):
        part = all_rows[32 * (step - 1) : 32 * step]
        for row in part:
            row["input_ids"], row["labels"] = batch(step, row["input_ids"], row["labels"])
        trains += part
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=32, learning_rate=3e-3,
        lr_scheduler_type=schedule, logging_steps=1, logging_nan_inf_filter=False, report_to=[],
        eval_strategy="steps" if evaluated else "no", eval_steps=50, use_cpu=True, seed=0,
        save_strategy="steps" if saved else "no", save_steps=STEPS, save_only_model=True,
    )  # fmt: skip
    optimizers: tuple[Any, Any] = (None, None)
    if rate is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        planned = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: rate(at + 1))
        optimizers = optimizer, planned
    Ordered(
        model, arguments, train_dataset=trains, eval_dataset=rows(256, 2) if evaluated else None,
        optimizers=optimizers, callbacks=[Before()],
    ).train()  # fmt: skip
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    for other in folder.glob("checkpoint-*/*.bin"):
        other.unlink()


@training(
    "trainer_state",
    f"checkpoint-{STEPS}",
    "a batch whose labels are all -100: NaN from then on",
    150,
)
def trainer_nan(folder: Path) -> None:
    import torch

    none = lambda step, inputs, labels: (  # noqa: E731
        inputs,
        torch.full_like(labels, -100) if step == 150 else labels,
    )
    transformers_fit(folder, batch=none, saved=True)


@training("trainer_state", f"checkpoint-{STEPS}", "a batch of other text", 220)
def trainer_spike(folder: Path) -> None:
    import torch

    noise = torch.Generator().manual_seed(3)

    def other(step: int, inputs: Any, labels: Any) -> tuple[Any, Any]:
        if step != 220:
            return inputs, labels
        drawn = torch.randint(64, inputs.shape, generator=noise)
        return drawn, drawn.clone()

    transformers_fit(folder, batch=other, saved=True)


@training("trainer_state", f"checkpoint-{STEPS}")
def trainer_cosine(folder: Path) -> None:
    transformers_fit(folder, schedule="cosine", evaluated=True, saved=True)


@training("transformers_text", PRINTED, "out of memory in step 138", 137)
def printed_out_of_memory(folder: Path) -> None:
    import torch

    def grows(step: int) -> None:
        if step == 138:
            torch.empty(1 << 46)

    transformers_fit(folder, before=grows)


@training("transformers_text", PRINTED, "the rate is 300 times too high from step 200 on", 200)
def printed_diverges(folder: Path) -> None:
    transformers_fit(folder, rate=lambda step: 3e-3 if step < 200 else 1.0)


@training("transformers_text", PRINTED)
def printed_linear(folder: Path) -> None:
    transformers_fit(folder, evaluated=True)


# Tables, by pandas and pyarrow.


@training("table", "history.parquet", "each batch is read from a slow disk from step 200 on", 200)
def parquet_waits_for_data(folder: Path) -> None:
    import pandas

    def draw(step: int) -> tuple[Any, Any]:
        if step >= 200:
            time.sleep(0.04)
        return chain(64, seed=step)

    pandas.DataFrame(loop(batch=draw, steps=300)).to_parquet(folder / "history.parquet")


@training("table", "history.csv")
def csv_tiny_batches(folder: Path) -> None:
    import pandas

    frame = pandas.DataFrame(loop(rows=2, rate=lambda step: 1e-3))
    frame.to_csv(folder / "history.csv")


@training("table", "history.parquet")
def parquet_curriculum(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    draw = lambda step: chain(64, seed=step, branches=2 if step < 200 else 6)  # noqa: E731
    table = pyarrow.Table.from_pylist([*loop(batch=draw)])
    pyarrow.parquet.write_table(table, folder / "history.parquet")


# JSON lines.


def json_lines(rows: Iterator[Row], folder: Path) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)


@training(
    "json_lines", "metrics.jsonl", "ten batches without labels, whose updates are left out", 150
)
def json_nan_recovers(folder: Path) -> None:
    json_lines(loop(masked=lambda step: 150 <= step < 160, skips=True), folder)


@training("json_lines", "metrics.jsonl", "no batch for five minutes before step 180", 180)
def json_stalls(folder: Path) -> None:
    def draw(step: int) -> tuple[Any, Any]:
        if step == 180:
            time.sleep(310)
        return chain(64, seed=step)

    untimed = ({k: v for k, v in row.items() if "_time" not in k} for row in loop(batch=draw))
    json_lines(untimed, folder)


@training("json_lines", "metrics.jsonl")
def json_slow_evaluations(folder: Path) -> None:
    def rows() -> Iterator[Row]:
        for row in loop(held_out_every=50):
            if "val_loss" in row:
                time.sleep(0.5)
                row["step_time"] += 0.5
            yield row

    json_lines(rows(), folder)


# Text: as nanoGPT prints, tqdm, torchtune.


@training("text", PRINTED, "every 20 steps waits until 128 MB are on the disk", 20)
def nanogpt_slow_steps(folder: Path) -> None:
    import torch

    state = torch.zeros(32 << 20)
    print(f"tokens per iteration will be: {64 * 8:,}")
    t0 = time.time()
    for row in loop():
        iter_num = int(row["step"])
        if iter_num % 20 == 0:
            torch.save(state, folder / "ckpt.pt")
            os.sync()
        t1 = time.time()
        dt, t0 = t1 - t0, t1
        print(f"iter {iter_num}: loss {row['loss']:.4f}, time {dt * 1000:.2f}ms, mfu {-100.0:.2f}%")
    (folder / "ckpt.pt").unlink()


@training("text", PRINTED, "a process that reads data is killed", 152)
def tqdm_loader_killed(folder: Path) -> None:
    import signal

    import torch
    from tqdm import tqdm

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 300

        def __getitem__(self, at: int) -> tuple[Any, Any]:
            time.sleep(0.02)
            if at == 152:
                os.kill(os.getpid(), signal.SIGKILL)
            return chain(64, seed=at)

    loader = iter(torch.utils.data.DataLoader(Rows(), None, num_workers=1))
    with tqdm(total=300, desc="train") as bar:
        for row in loop(batch=lambda step: next(loader), steps=300):
            bar.set_postfix(loss=row["loss"], lr=row["lr"], refresh=False)
            bar.update()


@training("text", "logs")
def torchtune_dropout(folder: Path) -> None:
    from torchtune.training.metric_logging import DiskLogger

    logger = DiskLogger(str(folder / "logs"))
    warm = lambda step: 3e-3 * min(1.0, step / 40)  # noqa: E731
    for row in loop(model=model_of(dropout=0.5), rate=warm):
        said = {name: row[name] for name in ("loss", "lr", "grad_norm")}
        said["tokens_per_second_per_gpu"] = 512 / row["step_time"]
        logger.log_dict(said, step=int(row["step"]))
    logger.close()


# Keras.


def keras_fit(
    folder: Path, *, rows: int, epochs: int, plateau: bool = False, **compiled: Any
) -> int:
    import keras
    import numpy

    keras.utils.set_random_seed(0)
    drawn = numpy.random.default_rng(0)
    inputs = drawn.normal(size=(rows + 200, 20)).astype("float32")
    labels = inputs[:, :4].argmax(1)
    is_noise = drawn.random(len(labels)) < 0.25
    labels[is_noise] = drawn.integers(4, size=is_noise.sum())
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam"} | compiled, loss=loss, metrics=["accuracy"])
    calls = [keras.callbacks.CSVLogger(folder / "training.csv")]
    if plateau:
        calls.insert(0, keras.callbacks.ReduceLROnPlateau(patience=8))
    said = model.fit(
        inputs[:rows], labels[:rows], validation_data=(inputs[rows:], labels[rows:]), epochs=epochs,
        batch_size=16, verbose=0, callbacks=calls,
    )  # fmt: skip
    return int(numpy.argmin(said.history["val_loss"]))


@training("keras", "training.csv", "64 rows, a quarter of them mislabelled, are learnt by heart")
def keras_overfits(folder: Path) -> int:
    return keras_fit(folder, rows=64, epochs=120)


@training("keras", "training.csv")
def keras_plateau(folder: Path) -> None:
    keras_fit(folder, rows=2000, epochs=60, plateau=True)


@training("keras", "training.csv")
def keras_sgd(folder: Path) -> None:
    import keras

    keras_fit(folder, rows=4000, epochs=80, optimizer=keras.optimizers.SGD(0.01))


def one(name: str, folder: Path) -> None:
    """Run a training in this process."""
    import random

    import numpy
    import torch

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    step = TRAININGS[name].train(folder)
    if step is not None:
        (folder / "step").write_text(str(step))


def made(name: str, folder: Path) -> dict[str, Any]:
    """Run a training in a process of its own; returns its row of the index."""
    found = TRAININGS[name]
    command = [sys.executable, __file__, "--one", name, "--out", str(folder / name)]
    chosen = {"KERAS_BACKEND": "torch", "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true"}
    done = subprocess.run(
        command, env=os.environ | chosen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )  # fmt: skip
    place, step = folder / name, found.step
    if found.log == PRINTED:
        (place / PRINTED).write_bytes(done.stdout)
    elif done.returncode:
        raise SystemExit(f"{name}: {done.stdout.decode()[-2000:]}")
    if (place / "step").exists():
        step = int((place / "step").read_text())
        (place / "step").unlink()
    print(name, done.returncode, step, flush=True)
    about = {"name": name, "kind": found.kind, "log": f"{name}/{found.log}"}
    return about | {"fault": found.fault, "step": step}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = (
        "torch tensorboard wandb mlflow lightning transformers torchtune keras pandas pyarrow tqdm"
    )
    return {name: version(name) for name in names.split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=TRAININGS, help="run this training alone, in this process")
    parser.add_argument("--only", nargs="*", default=[*TRAININGS], help="these logs alone")
    parser.add_argument("--out", type=Path, required=True, help="archive, or the folder of --one")
    given = parser.parse_args()
    if given.one:
        return one(given.one, given.out)
    with tempfile.TemporaryDirectory() as folder:
        # The stall first, because it takes the longest.
        names = sorted(given.only, key=lambda name: name != "json_stalls")
        with ThreadPoolExecutor(2) as pool:
            rows = [*pool.map(lambda name: made(name, Path(folder)), names)]
        rows.sort(key=lambda row: [*TRAININGS].index(row["name"]))
        with tarfile.open(given.out, "w:xz") as archive:
            for row in rows:
                archive.add(Path(folder) / row["log"], row["log"], filter=_anonymous)
            index = json.dumps({"versions": versions(), "logs": rows}, indent=1).encode()
            about = tarfile.TarInfo("index.json")
            about.size = len(index)
            archive.addfile(about, io.BytesIO(index))


def _anonymous(about: tarfile.TarInfo) -> tarfile.TarInfo | None:
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    # Files beside the log of the run: the library's own log, caches, links.
    left_out = ("/logs/debug", "/tmp", "/rng_state.pth", "/training_args", "hparams.yaml")
    return None if about.issym() or any(part in about.name for part in left_out) else about


if __name__ == "__main__":
    main()
