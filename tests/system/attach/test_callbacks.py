"""One line in a framework, or in a plain loop: the run folder, the steps and the end as below `engine watch`, what the
framework says itself, and the run unchanged to the byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.log.events import Evaluated, Judged, Logged, Note, TrainerExited
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command
from engine.log.text import command_lines
from tests.support.attached import (
    PROBE,
    Lined,
    events_of,
    lined,
    run_forked,
    run_lined,
    run_watched,
    with_and_without,
)
from tests.support.paths import ROOT

WORDS = """
import tokenizers, transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

vocabulary = {"<eos>": 0, "<pad>": 1, **{f"w{number}": number for number in range(2, 64)}}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
net = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, attention_dropout=0.2,
    eos_token_id=0, pad_token_id=1, bos_token_id=None))
"""

TRAINER = (
    WORDS
    + """
callbacks = []
#LINE from apr_watch.transformers import WatchCallback
#LINE callbacks = [WatchCallback("line")]

rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 64, (24, 12)).tolist()]

def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

class Tells(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        say(**{name: logs[name] for name in ("loss", "eval_loss") if name in logs})

trainer = transformers.Trainer(
    model=net, train_dataset=rows[4:], eval_dataset=rows[:4], data_collator=collate,
    callbacks=[*callbacks, Tells()], processing_class=tokenizer,
    args=transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=4, report_to=[],
        save_strategy="no", use_cpu=True, seed=3, disable_tqdm=True))
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
save(net)
"""
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Lined:
    folder = tmp_path_factory.mktemp("trainer")
    return with_and_without(folder, TRAINER, forked=False)


def test_a_callback_in_a_trainer_of_transformers_changes_no_byte_and_records_what_engine_watch_does(
    trainer: Lined,
) -> None:
    said = [one["loss"] for one in trainer.ran.said if "loss" in one]
    losses = trainer.view.steps.values("loss")
    assert losses == pytest.approx(said, rel=1e-4, abs=1e-4) and len(said) == 8
    assert trainer.view.total_steps == 8
    passed = {one.id for one in events_of(trainer, Judged) if one.level == "pass"}
    assert passed >= {"outside_writes", "label_shift", "accumulation_windows", "stale_parameters"}


def test_a_callback_adds_the_held_out_loss_settings_and_what_the_framework_logs(
    trainer: Lined,
) -> None:
    said = [one["eval_loss"] for one in trainer.ran.said if "eval_loss" in one]
    evals = events_of(trainer, Evaluated)
    assert [one.step for one in evals] == [4, 8]
    assert [one.loss for one in evals] == pytest.approx(said)
    assert trainer.view.logged["learning_rate"][0] == 8
    command = read_command(trainer.run)
    assert command is not None and command.arguments[-1] == "train.py"
    (settings,) = [
        line for line in command_lines(trainer.view, command) if line.startswith("settings")
    ]
    assert "TrainingArguments: " in settings and "learning_rate=0.01" in settings


def test_what_is_watched_from_inside_is_seen_from_outside_and_its_end_recorded(
    trainer: Lined,
) -> None:
    assert trainer.view.state(trainer.run.liveness()) == "completed"
    (ended,) = events_of(trainer, TrainerExited)
    assert ended.returncode is None and "only its parent" in ended.sentence
    assert trainer.view.launcher_gone is None
    assert trainer.view.host is not None


LOOP = """
import contextlib
apr_watch = None
#LINE import apr_watch

def train(rate, steps, watched, fail=False):
    net = model()
    with watched:
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        x = torch.randn(4, 8)
        for number in range(steps):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            say(loss=loss.item())
        if apr_watch:
            apr_watch.log(held_out=loss, prompt="a", sample="b")
        if fail:
            raise KeyError("mine")
    save(net)

def block(out):
    return apr_watch.watch(out=out) if apr_watch else contextlib.nullcontext()

train(0.1, 3, block("line"))
train(0.9, 1, contextlib.nullcontext())
try:
    train(0.2, 2, block("line"), fail=True)
except KeyError:
    pass
if apr_watch:
    apr_watch.start("train.py/under a file")
    apr_watch.stop()
    apr_watch.start("line")
train(0.3, 4, contextlib.nullcontext())
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> list[Lined]:
    """Two blocks of one process, the second of which raises, and what follows to the end of the process."""
    first = with_and_without(tmp_path_factory.mktemp("loop"), LOOP)
    return [first, *(lined(first.ran, f"line-{number}") for number in (2, 3))]


def test_a_block_of_a_plain_loop_is_a_run_with_an_end_of_its_own(loops: list[Lined]) -> None:
    said = [one["loss"] for one in loops[0].ran.said]
    found = [one.view.steps.values("loss") for one in loops]
    assert found == [said[:3], said[4:6], said[6:]]
    assert [one.view.steps.values("lr")[0] for one in loops] == [0.1, 0.2, 0.3]
    states = [one.view.state(one.run.liveness()) for one in loops]
    assert states == ["completed", "failed", "completed"]
    (ended,) = events_of(loops[1], TrainerExited)
    assert "KeyError: 'mine'" in ended.sentence or "mine" in ended.sentence


def test_a_text_that_the_script_says_stands_beside_its_held_out_loss(loops: list[Lined]) -> None:
    (done,) = events_of(loops[0], Evaluated)
    assert (done.step, done.prompt, done.sample) == (3, "a", "b")
    assert done.loss == loops[0].ran.said[2]["loss"]
    assert not events_of(loops[0], Logged)


def test_a_run_folder_that_cannot_be_made_is_said_and_the_script_goes_on(
    loops: list[Lined],
) -> None:
    assert loops[0].ran.stderr.splitlines()[2].startswith("apr_watch: not watched: ")


ONCE = """
import apr_watch
apr_watch.start("line")
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 8)).mean().backward()
optimizer.step()
apr_watch.log(held_out=2.5)
apr_watch.stop()
optimizer.step()
"""


def test_below_engine_watch_a_line_begins_no_second_run(tmp_path: Path) -> None:
    ran = run_watched(tmp_path, ONCE)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not (tmp_path / "line").exists()
    assert len(ran.steps) == 2
    assert [line["loss"] for line in ran.of_kind("eval")] == [2.5]


def test_where_the_engine_cannot_be_run_the_reason_is_said_and_the_script_goes_on(
    tmp_path: Path,
) -> None:
    """As in an environment of its own, or with a package of that name on its path."""
    (tmp_path / "mine" / "engine").mkdir(parents=True)
    (tmp_path / "mine" / "engine" / "child.py").write_text("")
    (tmp_path / "mine" / "engine" / "__init__.py").write_text("raise ImportError('a part')")
    path = Path(f"{tmp_path / 'mine'}{os.pathsep}{PROBE}")
    ran = run_forked(tmp_path, ONCE, watched=False, path=path)
    assert ran.returncode == 0, ran.stderr
    assert "apr_watch: not watched: RuntimeError: the engine could not make" in ran.stderr
    assert "a part" in ran.stderr and not (tmp_path / "line").exists()


def test_an_engine_of_the_users_on_the_path_does_not_hide_the_engine(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("engine", "token"):
        (tmp_path / "mine" / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w')")
    path = Path(os.pathsep.join(map(str, (tmp_path / "mine", PROBE, ROOT))))
    ran = run_forked(tmp_path, ONCE, watched=False, path=path)
    assert ran.returncode == 0, ran.stderr
    view = Follower(RunFolder(tmp_path / "line")).read_all()
    assert len(view.steps) == 1 and not (tmp_path / "ran").exists()


FAILS = """
from apr_watch.callback import Guard
import apr_watch
apr_watch.start("line")

def asked(number):
    say(asked=number)
    raise ValueError("wrong")

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
guarded = Guard("WatchCallback")
for number in range(3):
    net(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    guarded(asked, number)
save(net)
"""


def test_a_callback_that_fails_removes_itself_says_so_and_the_steps_go_on(tmp_path: Path) -> None:
    one = lined(run_lined(tmp_path, FAILS))
    assert one.ran.returncode == 0, one.ran.stderr
    assert [said["asked"] for said in one.ran.said] == [0]
    assert len(one.view.steps) == 3
    texts = [note.text for note in events_of(one, Note) if note.level == "warning"]
    assert texts == ["WatchCallback removed itself, the run goes on: ValueError: wrong"]


ACCELERATE = """
from accelerate import Accelerator

trackers = None
#LINE from apr_watch.accelerate import WatchTracker
#LINE trackers = WatchTracker("line")
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, log_with=trackers)
accelerator.init_trackers("mine", config={"lr": 0.1, "name": "first"})
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = (net(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    say(held_out=loss.item())
    accelerator.log({"eval_loss": loss.item(), "epoch": epoch, "word": "a"}, step=100 * epoch)
accelerator.end_training()
save(net)
"""


def test_a_tracker_of_accelerate_adds_what_the_script_logs_and_changes_no_byte(
    tmp_path: Path,
) -> None:
    one = with_and_without(tmp_path, ACCELERATE)
    assert len(one.view.steps) == 4
    said = [said["held_out"] for said in one.ran.said]
    # At the optimizer's steps, not at the script's own count.
    assert [(done.step, done.loss) for done in events_of(one, Evaluated)] == list(
        zip((2, 4), said, strict=True)
    )
    assert [(e.step, e.values) for e in events_of(one, Logged)] == [
        (2, {"epoch": 0.0, "word": None}),
        (4, {"epoch": 1.0, "word": None}),
    ]
    notes = [note.text for note in events_of(one, Note)]
    assert "settings of the script: lr=0.1, name=first" in notes
