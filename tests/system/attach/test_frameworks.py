"""Scripts on frameworks, unchanged: the same weights to the byte with the probe, and a log that holds every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attached import Ran, run_twice

TRAINER = """
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

config = Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True)
net = Qwen2ForCausalLM(config)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (24, 12)).tolist()]

class Tells(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **more):
        self.lr = more["optimizer"].param_groups[0]["lr"]
    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            say(loss=logs["loss"], grad_norm=logs["grad_norm"], lr=self.lr)

def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

trainer = Trainer(
    model=net, train_dataset=rows, data_collator=collate, callbacks=[Tells()],
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, seed=3,
        disable_tqdm=True))
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
save(net)
"""


def near(ran: Ran) -> None:
    """The log has the losses that the framework prints, which it sums in its own order."""
    assert len(ran.steps) == len(ran.said)
    for step, said in zip(ran.steps, ran.said, strict=True):
        assert step["loss"] == pytest.approx(said["loss"], rel=1e-4, abs=1e-4)
        assert step["grad_norm"] == pytest.approx(said["grad_norm"], rel=1e-6)
        assert step["lr"] == said["lr"]


def test_a_trainer_of_transformers_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    tmp_path: Path,
) -> None:
    watched, alone = run_twice(tmp_path, TRAINER)
    near(watched)
    assert len(watched.steps) == 12 and not alone.lines
    assert {step["backwards"] for step in watched.steps} == {2}
    # Its loader fetches one batch ahead of the step: of each epoch the sum is right.
    assert [sum(step["rows"] for step in watched.steps[at : at + 6]) for at in (0, 6)] == [24, 24]
    # It says how many steps there will be to whoever asks after the first.
    assert [step.get("total_steps") for step in watched.steps] == [None, *[12] * 11]
