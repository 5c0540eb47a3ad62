"""Scripts on frameworks, unchanged: the same weights to the byte with the probe, and a log that holds every step.

What the suite's own environment lacks is skipped there and run by `make frameworks`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.log.events import Evaluated
from tests.support.attached import (
    Lined,
    Ran,
    agree,
    events_of,
    in_three_ways,
    run_twice,
)
from tests.support.lacks import needs

HF = """
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

net = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True))
settings = dict(
    output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
    learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, seed=3,
    disable_tqdm=True)

class Tells(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **more):
        self.lr = more["optimizer"].param_groups[0]["lr"]
    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            say(loss=logs["loss"], grad_norm=logs["grad_norm"], lr=self.lr)

def train(trainer):
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    save(net)
"""

TRAINER = (
    HF
    + """
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (24, 12)).tolist()]

def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

train(transformers.Trainer(
    model=net, train_dataset=rows, data_collator=collate, callbacks=[Tells()],
    args=transformers.TrainingArguments(**settings)))
"""
)

SFT = (
    HF
    + """
import tokenizers
from datasets import Dataset, disable_progress_bars
from trl import SFTConfig, SFTTrainer

disable_progress_bars()
vocabulary = {"<eos>": 0, "<pad>": 1, **{f"w{number}": number for number in range(2, 64)}}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
rows = [{"prompt": " ".join(f"w{number}" for number in row[:4]),
         "completion": " " + " ".join(f"w{number}" for number in row[4:])}
        for row in torch.randint(2, 64, (24, 12)).tolist()]
callbacks = [Tells()]
#LINE from apr_watch.transformers import WatchCallback
#LINE callbacks.append(WatchCallback("line"))
train(SFTTrainer(
    model=net, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=callbacks,
    eval_dataset=Dataset.from_list(rows[:4]),
    args=SFTConfig(**settings, bf16=False, max_length=32, eval_strategy="epoch")))
"""
)

LIGHTNING = """
import logging, warnings
import lightning

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses, self.norm = model(), [], None

    def training_step(self, batch, number):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.losses.append(loss.detach() / self.trainer.accumulate_grad_batches)
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        gradients = [parameter.grad for parameter in self.parameters()]
        self.norm = torch.nn.utils.get_total_norm(gradients).item()
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, outputs, batch, number):
        if len(self.losses) == 2:
            loss = sum(loss.item() for loss in self.losses)
            say(loss=loss, lr=self.lr, grad_norm=self.norm, rows=8, backwards=2)
            self.losses.clear()

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val_loss", (self.net(x) - y).square().mean())

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            held_out.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(x, y)

x, y = torch.randn(40, 8), torch.randn(40, 1)
sized = torch.utils.data.TensorDataset(x, y)
check = torch.utils.data.DataLoader(sized, batch_size=20)

def train(dataset, **ours):
    global held_out
    module, held_out = Module(), []
    ours = {"logger": False} | ours
    lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu", devices=1, **ours,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(dataset, batch_size=4), check)
    save(module)
    print("held out", *held_out)

logger = dict
#LINE from apr_watch.lightning import WatchLogger
#LINE logger = lambda: {"logger": WatchLogger("line")}
train(sized, **logger())
train(Stream())
"""
"""The line makes a run of the first training."""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
x, y = torch.randn(42, 8), torch.randn(42, 1)
rows = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
losses, seen = [], []
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(net):
            loss = (net(x) - y).square().mean()
            losses.append(loss.item() / 2)
            seen.append(len(x))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
                said = dict(loss=sum(losses), lr=optimizer.param_groups[0]["lr"], grad_norm=norm.item())
                said |= dict(rows=sum(seen), backwards=len(losses))
                if accelerator.is_main_process:
                    say(**said)
                losses.clear()
                seen.clear()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if epoch == 1 and number == 3:
            break
torch.save(net.state_dict(), f"weights-{accelerator.process_index}.pt")
"""


def near(ran: Ran) -> None:
    """The log has the losses that the framework prints, which it sums in its own order."""
    assert len(ran.steps) == len(ran.said)
    for step, said in zip(ran.steps, ran.said, strict=True):
        assert step["loss"] == pytest.approx(said["loss"], rel=1e-4, abs=1e-4)
        assert step["grad_norm"] == pytest.approx(said["grad_norm"], rel=1e-6)
        assert step["lr"] == said["lr"]
    assert {(step["backwards"], step["rows"]) for step in ran.steps} == {(2, 4)}


@pytest.mark.soak
def test_a_trainer_of_transformers_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    tmp_path: Path,
) -> None:
    watched, _ = run_twice(tmp_path, TRAINER)
    near(watched)
    assert len(watched.steps) == 12
    # It says how many steps there will be to whoever asks after the first.
    assert [step.get("total_steps") for step in watched.steps] == [None, *[12] * 11]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Lined]:
    return in_three_ways(tmp_path_factory, "trl", SFT)


@pytest.fixture(scope="module")
def in_lightning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Lined]:
    return in_three_ways(tmp_path_factory, "lightning", LIGHTNING)


@needs("TRL", find_spec("trl"))
def test_a_trainer_of_trl_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    trl: tuple[Ran, Lined],
) -> None:
    watched, _ = trl
    near(watched)
    assert len(watched.steps) == 12


@needs("Lightning", find_spec("lightning"))
def test_a_trainer_of_lightning_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    in_lightning: tuple[Ran, Lined],
) -> None:
    """Its forward and backward passes run inside the optimizer's step, as a closure."""
    watched, _ = in_lightning
    agree(watched, trainings=2)
    for lines in watched.trainings:
        assert len([line for line in lines if line["kind"] == "step"]) == 10


# In the suite the script of the demo holds this: its Trainer trains by way of an Accelerator.
@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_on_accelerate_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    tmp_path: Path, ranks: int
) -> None:
    """Its loader reads one batch ahead, and an epoch of the script's ends early."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    watched, _ = run_twice(tmp_path, ACCELERATE, *(launch if ranks == 2 else []))
    agree(watched)
    assert len(watched.weights) == ranks
    assert watched.of_kind("watched")[0]["world"] == ranks


@needs("TRL", find_spec("trl"))
def test_a_callback_in_a_trainer_of_trl_changes_no_byte_and_adds_its_evaluations(
    trl: tuple[Ran, Lined],
) -> None:
    _, one = trl
    assert len(one.view.steps) == 12
    evals = events_of(one, Evaluated)
    assert [done.step for done in evals] == [6, 12]
    assert all(done.loss for done in evals)
    assert one.view.logged["num_tokens"][0] == 12


@needs("Lightning", find_spec("lightning"))
def test_a_logger_of_lightning_changes_no_byte_and_adds_its_validations(
    in_lightning: tuple[Ran, Lined],
) -> None:
    _, one = in_lightning
    assert len(one.view.steps) == 10
    evals = events_of(one, Evaluated)
    assert [done.step for done in evals] == [5, 10]
    told = [line for line in one.ran.stdout.splitlines() if line.startswith("held out ")]
    held_out = [float(word) for word in told[0].split()[2:]]
    assert [done.loss for done in evals] == pytest.approx(held_out)
