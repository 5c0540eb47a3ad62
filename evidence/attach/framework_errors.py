"""Mistakes that raise no exception, in scripts on frameworks: the Trainer of transformers, TRL, Lightning and
Accelerate, each beside its healthy twin, under `engine watch`.

    python evidence/attach/framework_errors.py OUT [--only NAME ...]

Needs the `frameworks` extra. The findings about each wrong script and its healthy twin go to
OUT/framework_errors.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

from silent_errors import said_by_watch

BEGIN = """
import copy, logging, warnings
import torch
from torch import nn
from torch.nn import functional as F
warnings.simplefilter("ignore")
torch.manual_seed(2)
torch.set_num_threads(1)
V, T, B = 64, 24, 4
first = torch.randint(2, V, (64, 1))
text = (first + torch.arange(T) * torch.randint(1, 4, (64, 1))) % (V - 2) + 2
loader = lambda rows=text, **more: torch.utils.data.DataLoader(rows, **(dict(batch_size=B, shuffle=True) | more))
"""
TRANSFORMERS = (
    BEGIN
    + """
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

def llama(seed=1, **more):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(dict(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=1, eos_token_id=0, bos_token_id=0) | more)))

def gpt2(seed=1):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=2, n_positions=64,
                                      bos_token_id=0, eos_token_id=0))

settings = dict(output_dir="out", max_steps=10, per_device_train_batch_size=B, gradient_accumulation_steps=2,
                learning_rate=3e-3, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
"""
)
TRAINER = (
    TRANSFORMERS
    + """
rows = [{"input_ids": row[: 12 + at % 12]} for at, row in enumerate(text.tolist())]

def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.ones(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        labels[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}

class Mine(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = out.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, out) if return_outputs else loss

    def evaluated(self, model):
        model.eval()
        with torch.no_grad():
            model(text[:B])
        model.train()

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        return loss

net = gpt2()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
args = transformers.TrainingArguments(**settings)
trainer = Mine(model=net, args=args, train_dataset=rows, data_collator=collate, optimizers=(optimizer, None))
trainer.train()
"""
)
STOCK_TRAINER = (
    TRAINER[: TRAINER.index("class Mine")]
    + """
net = llama()
args = transformers.TrainingArguments(**settings)
transformers.Trainer(model=net, args=args, train_dataset=rows, data_collator=collate).train()
"""
)
TRL = (
    TRANSFORMERS
    + """
import tokenizers
from datasets import Dataset, disable_progress_bars
disable_progress_bars()
vocabulary = {"<eos>": 0, "<pad>": 1, **{f"w{number}": number for number in range(2, V)}}
words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
spelled = [[f"w{number}" for number in row] for row in text.tolist()]
rows = Dataset.from_list([{"prompt": " ".join(row[:8]), "completion": " " + " ".join(row[8 : 16 + at % 8])}
                          for at, row in enumerate(spelled)])
settings |= dict(bf16=False)
"""
)
SFT = (
    TRL
    + """
from trl import SFTConfig, SFTTrainer
net = llama()
trainer = SFTTrainer(model=net, train_dataset=rows, processing_class=tokenizer,
                     args=SFTConfig(**settings, max_length=32, completion_only_loss=True))
trainer.train()
"""
)
DISTIL = (
    TRL
    + """
from trl import SFTConfig, SFTTrainer
teacher = gpt2(5).eval().requires_grad_(False)
student = gpt2()
tau, alpha = 2.0, 0.5

class Distils(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        with torch.no_grad():
            wanted = teacher(**inputs).logits
        mask = (labels[:, 1:] != -100).flatten()
        logits, wanted = (one[:, :-1].reshape(-1, V)[mask] for one in (out.logits, wanted))
        kd = F.kl_div(F.log_softmax(logits / tau, -1), F.softmax(wanted / tau, -1), reduction="batchmean") * tau**2
        ce = F.cross_entropy(logits, labels[:, 1:].flatten()[mask])
        loss = alpha * ce + (1 - alpha) * kd
        return (loss, out) if return_outputs else loss

settings |= dict(gradient_accumulation_steps=1)
trainer = Distils(model=student, train_dataset=rows, processing_class=tokenizer,
                  args=SFTConfig(**settings, max_length=32))
trainer.train()
"""
)
GKD = (
    TRL
    + """
from trl.experimental.gkd import GKDConfig, GKDTrainer
chats = Dataset.from_list([{"messages": [{"role": "user", "content": one["prompt"]},
                                         {"role": "assistant", "content": one["completion"]}]} for one in rows])
teacher, student = llama(5), llama()
args = GKDConfig(**settings, max_length=32, lmbda=0.0, beta=0.5, max_new_tokens=4)
GKDTrainer(model=student, teacher_model=teacher, args=args, train_dataset=chats, processing_class=tokenizer).train()
"""
)
LIGHTNING = (
    BEGIN
    + """
import lightning
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

class Model(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, 32), nn.Embedding(T, 32)
        self.inner, self.drop, self.head = nn.Linear(32, 32), nn.Dropout(dropout), nn.Linear(32, V)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(x + self.drop(torch.relu(self.inner(x))))

def cross_entropy(logits, labels):
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))

quiet = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
"""
)
MODULE = (
    LIGHTNING
    + """
train, held_out = text[:56], text[56:]

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Model()

    def training_step(self, rows, number):
        if number == 4:
            self.look_at_samples()
        return cross_entropy(self.net(rows[:, :-1]), rows[:, 1:])

    def look_at_samples(self):
        self.net.eval()
        with torch.no_grad():
            self.net(text[:2, :-1])
        self.net.train()

    def validation_step(self, rows, number):
        self.log("held_out", cross_entropy(self.net(rows[:, :-1]), rows[:, 1:]))

    def train_dataloader(self):
        return loader(train)

    def val_dataloader(self):
        return loader(held_out, shuffle=False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)

trainer = lightning.Trainer(max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=1.0,
                            reload_dataloaders_every_n_epochs=1, **quiet)
trainer.fit(Module())
"""
)
MANUAL = (
    LIGHTNING
    + """
class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = Model()

    def training_step(self, rows, number):
        optimizer = self.optimizers()
        loss = cross_entropy(self.net(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)

lightning.Trainer(max_epochs=2, **quiet).fit(Module(), loader())
"""
)
TEACHER = (
    LIGHTNING
    + """
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        teacher = Model().eval().requires_grad_(False)
        self.net, self.teacher = Model(), teacher

    def training_step(self, rows, number):
        with torch.no_grad():
            wanted = self.teacher(rows[:, :-1]).log_softmax(-1)
        logits = self.net(rows[:, :-1])
        kd = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
        return 0.5 * cross_entropy(logits, rows[:, 1:]) + 0.5 * kd

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)

module = Module()
lightning.Trainer(max_steps=10, **quiet).fit(module, loader())
"""
)
ACCELERATE = (
    TRANSFORMERS
    + """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
net = gpt2()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
net, optimizer, train_loader, held_out = accelerator.prepare(
    net, optimizer, loader(text[:48]), loader(text[48:], shuffle=False))
for epoch in range(3):
    net.train()
    for rows in train_loader:
        with accelerator.accumulate(net):
            loss = net(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        for rows in held_out:
            net(input_ids=rows, labels=rows)
"""
)
CASES: dict[str, tuple[str, str, str, str, str]] = {
    # name: framework, the healthy script, what is replaced in it, what takes its place, the id that should be named
    "collator shifts the labels": (
        "transformers",
        STOCK_TRAINER,
        'labels[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])',
        'labels[at, : len(row["input_ids"]) - 1] = torch.tensor(row["input_ids"][1:])',
        "label_shift",
    ),
    "padding has labels": (
        "transformers",
        STOCK_TRAINER,
        '"labels": labels}',
        '"labels": ids.clone()}',
        "padding_labels",
    ),
    "bf16 weights at a small rate": (
        "transformers",
        STOCK_TRAINER.replace(
            "learning_rate=3e-3", "learning_rate=1e-5, lr_scheduler_type='constant'"
        ),
        "net = llama()",
        "net = llama().bfloat16()",
        "vanishing_updates",
    ),
    "a metric in the loss leaves eval mode on": (
        "transformers",
        TRAINER.replace(
            "        out = model(", "        self.evaluated(model)\n        out = model("
        ),
        "        model.train()\n",
        "",
        "training_mode",
    ),
    "optimizer of a deepcopy": (
        "transformers",
        TRAINER,
        "trainer = Mine(model=net",
        "trainer = Mine(model=copy.deepcopy(net)",
        "stale_parameters",
    ),
    "head replaced behind the optimizer": (
        "transformers",
        TRAINER,
        "args = transformers",
        "net.lm_head = nn.Linear(32, V, bias=False)\nargs = transformers",
        "unowned_parameters",
    ),
    "zero_grad does nothing": (
        "transformers",
        TRAINER,
        "trainer.train()\n",
        "net.zero_grad = lambda set_to_none=True: None\ntrainer.train()\n",
        "kept_gradients",
    ),
    "compute_loss takes one row": (
        "transformers",
        TRAINER,
        'out.logits[:, :-1], inputs["labels"][:, 1:]',
        'out.logits[0, :-1], inputs["labels"][0, 1:]',
        "rows_left_out",
    ),
    "compute_loss takes two softmaxes": (
        "transformers",
        TRAINER,
        "F.cross_entropy(logits.reshape",
        "F.cross_entropy(logits.softmax(-1).reshape",
        "double_softmax",
    ),
    "compute_loss leaves num_items_in_batch out": (
        "transformers",
        TRAINER,
        ', reduction="sum")\n        loss = loss / num_items_in_batch',
        ")",
        "accumulated_mean",
    ),
    "a layer under no_grad": (
        "transformers",
        TRAINER,
        "args = transformers",
        "net.transformer.h[0].mlp.forward = torch.no_grad()(net.transformer.h[0].mlp.forward)\nargs = transformers",
        "no_gradient",
    ),
    "SFT with a collator that shifts": (
        "trl",
        SFT,
        "trainer.train()",
        "inner = trainer.data_collator\n"
        "def shifted(rows):\n"
        "    batch = inner(rows)\n"
        '    batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)\n'
        "    return batch\n"
        "trainer.data_collator = shifted\n"
        "trainer.train()",
        "label_shift",
    ),
    "SFT with a collator that finds no answer": (
        "trl",
        SFT,
        "trainer.train()",
        "inner = trainer.data_collator\n"
        "def masked(rows):\n"
        "    batch = inner(rows)\n"
        '    batch["labels"].fill_(-100)\n'
        "    return batch\n"
        "trainer.data_collator = masked\n"
        "trainer.train()",
        "label_coverage",
    ),
    "teacher is the student": (
        "trl",
        DISTIL,
        "student = gpt2()",
        "student = teacher.requires_grad_(True)\nfor one in student.modules():\n"
        "    if isinstance(one, nn.Dropout): one.p = 0.0",
        "teacher_is_student",
    ),
    "teacher in train mode": ("trl", DISTIL, "gpt2(5).eval()", "gpt2(5).train()", "teacher_mode"),
    "T squared forgotten": ("trl", DISTIL, " * tau**2", "", "temperature_squared"),
    "divergence is a mean over the vocabulary": (
        "trl",
        DISTIL,
        '"batchmean"',
        '"mean"',
        "divergence_mean",
    ),
    "GKD from the student itself": (
        "trl",
        GKD,
        "teacher, student = llama(5), llama()",
        "teacher = student = llama()",
        "teacher_is_student",
    ),
    "zero_grad missing (manual optimization)": (
        "lightning",
        MANUAL,
        "        optimizer.zero_grad()\n",
        "",
        "kept_gradients",
    ),
    "teacher that the module holds in train mode": (
        "lightning",
        TEACHER,
        "Model().eval()",
        "Model()",
        "teacher_mode",
    ),
    "optimizer of a copy": (
        "lightning",
        MODULE,
        "torch.optim.AdamW(self.net.parameters()",
        "torch.optim.AdamW(copy.deepcopy(self.net).parameters()",
        "stale_parameters",
    ),
    "head replaced behind configure_optimizers": (
        "lightning",
        MODULE,
        "    def train_dataloader",
        "    def on_train_start(self):\n        self.net.head = nn.Linear(32, V)\n\n    def train_dataloader",
        "stale_parameters",
    ),
    "a look at samples leaves eval mode on": (
        "lightning",
        MODULE,
        "        self.net.train()\n",
        "",
        "training_mode",
    ),
    "the same order in every epoch": (
        "lightning",
        MODULE,
        "loader(train)",
        "loader(train, generator=torch.Generator().manual_seed(1))",
        "data_order",
    ),
    "the loader is made anew in each step": (
        "lightning",
        MODULE,
        "        return cross_entropy(self.net(rows[:, :-1]), rows[:, 1:])\n\n    def look",
        "        rows = next(iter(self.train_dataloader()))\n"
        "        return cross_entropy(self.net(rows[:, :-1]), rows[:, 1:])\n\n    def look",
        "cut_passes",
    ),
    "optimizer of another model": (
        "accelerate",
        ACCELERATE,
        "AdamW(net.parameters()",
        "AdamW(gpt2().parameters()",
        "stale_parameters",
    ),
    "the loss is divided by the accumulation steps again": (
        "accelerate",
        ACCELERATE,
        "accelerator.backward(loss)",
        "accelerator.backward(loss / accelerator.gradient_accumulation_steps)",
        "accumulated_mean",
    ),
    "eval mode is left on": (
        "accelerate",
        ACCELERATE.replace("    net.train()\n", "")
        .replace("    net.eval()\n", "    net.eval()\n")
        .replace(
            "            net(input_ids=rows, labels=rows)\n",
            "            net(input_ids=rows, labels=rows)\n    net.train()\n",
        )
        .replace("for epoch", "net.train()\nfor epoch"),
        "    net.train()\n",
        "",
        "training_mode",
    ),
    "no eval mode in the evaluation": (
        "accelerate",
        ACCELERATE,
        "    net.eval()\n",
        "",
        "evaluation_mode",
    ),
    "zero_grad missing": (
        "accelerate",
        ACCELERATE,
        "            optimizer.zero_grad()\n",
        "",
        "kept_gradients",
    ),
    "zero_grad in front of the step": (
        "accelerate",
        ACCELERATE,
        "            optimizer.step()\n            optimizer.zero_grad()\n",
        "            optimizer.zero_grad()\n            optimizer.step()\n",
        "lost_gradients",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    given = parser.parse_args()
    out = given.out.absolute()
    # A healthy script that is the twin of several wrong ones is run once.
    healthy_ones: dict[str, list[str]] = {}

    def said_of(text: str, name: str) -> list[str]:
        folder = out / re.sub(r"\W+", "_", name)
        folder.mkdir(parents=True)
        (folder / "script.py").write_text(text)
        how, said = said_by_watch(folder / "script.py", folder)
        return said if how == "exit 0" else [how, *said]

    for name in given.only:
        framework, healthy, old, new, wanted = CASES[name]
        assert healthy.count(old) == 1, (name, healthy.count(old))
        begun_s = time.monotonic()
        if healthy not in healthy_ones:
            healthy_ones[healthy] = said_of(healthy, f"healthy {len(healthy_ones)}")
        row = {
            "name": name,
            "framework": framework,
            "wanted": wanted,
            "wrong": said_of(healthy.replace(old, new), name),
            "healthy": healthy_ones[healthy],
            "seconds": round(time.monotonic() - begun_s, 1),
        }
        row["named"] = bool(wanted) and any(f": {wanted} (" in one for one in row["wrong"])
        print(json.dumps(row), flush=True)
        with (out / "framework_errors.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
