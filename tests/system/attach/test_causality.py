"""`engine watch --ask causality`: models that see what they are to predict are named, and the run stays the same."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import PASS, SUSPICION, UNKNOWN
from tests.support.attached import watched_once
from tests.support.paths import ROOT
from tests.support.running import engine
from tests.system.attach.test_identities import outcomes

Found = dict[str, list[dict[str, Any]]]
SCRIPT = """
import random
random.seed(3)
from torch import nn
from torch.nn import functional as F
V, B, T = 23, 4, 12
text = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(5))

class Model(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(V, 16), nn.Linear(16, V), mix
        self.dropout, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(16)

    def forward(self, tokens, scale=1.0):
        x = self.dropout(self.embed(tokens))
        x = x + self.mix(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.head(torch.tanh(x)) * scale

class Attention(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.qkv, self.is_causal = nn.Linear(16, 48), is_causal

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

class Convolution(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.of, self.pad = nn.Conv1d(16, 16, 3), (left, right)

    def forward(self, x):
        return self.of(F.pad(x.transpose(1, 2), self.pad)).transpose(1, 2)

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True)

class Given(nn.Module):
    # As models of transformers are called, and what they give.
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *, labels, input_ids):
        logits = self.model(input_ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}

def fit(net, loss=lambda net: F.cross_entropy(net(text[:, :-1]).reshape(-1, V), text[:, 1:].reshape(-1))):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
    say(drawn=[random.random(), float(torch.rand(()))], training=net.training)
    return net

def attention():
    return fit(Model(Attention(True)))

def attention_to_all():
    return fit(Model(Attention(False)))

def a_convolution():
    return fit(Model(Convolution(2, 0)))

def a_convolution_that_is_centred():
    return fit(Model(Convolution(1, 1)))

def a_mean_over_the_row():
    return fit(Given(Model(Mean())), lambda net: net(input_ids=text, labels=text)["loss"])

def attention_by_keywords():
    return fit(Given(Model(Attention(True))), lambda net: net(labels=text, input_ids=text)["loss"])

def a_model_that_is_never_called():
    return fit(nn.ModuleDict({"embed": nn.Embedding(V, 16), "head": nn.Linear(16, V)}),
               lambda net: F.cross_entropy(net["head"](net["embed"](text[:, :-1])).reshape(-1, V),
                                           text[:, 1:].reshape(-1)))

def a_classifier():
    return fit(nn.Linear(8, 2), lambda net: net(torch.ones(4, 8)).square().mean())

for function in (attention, attention_to_all, a_convolution, a_convolution_that_is_centred, a_mean_over_the_row,
                 attention_by_keywords, a_model_that_is_never_called, a_classifier):
    print(json.dumps({"name": function.__name__}))
    save(function())
"""
EXPECTED = {
    "attention": (PASS, "another token at position 6 of 12 changes no logits before it"),
    "attention_to_all": (SUSPICION, "changes the logits of 6 positions before it"),
    "a_convolution": (PASS, "changes no logits before it"),
    "a_convolution_that_is_centred": (SUSPICION, "changes the logits of 1 positions before it"),
    "a_mean_over_the_row": (SUSPICION, "changes the logits of 6 positions before it"),
    "attention_by_keywords": (PASS, "changes no logits before it"),
    "a_model_that_is_never_called": (UNKNOWN, "no call of the model was seen"),
    "a_classifier": (UNKNOWN, "no embedding is trained"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Equal to the byte with and without it: weights, statistics of the norm, random numbers, modes."""
    ran = watched_once(tmp_path_factory, "causality", SCRIPT, asked="causality", forked=True)
    names = [line for line in ran.stdout.splitlines() if '"name"' in line]
    return outcomes(dataclasses.replace(ran, stdout="\n".join(names)))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_that_sees_what_it_is_to_predict_is_suspected(found: Found, name: str) -> None:
    degree, text = EXPECTED[name]
    (line,) = [line for line in found[name] if line["id"] == "causality"]
    assert line["level"] == degree and text in line["text"], line


def test_it_is_asked_by_the_command(tmp_path: Path) -> None:
    words = ("--runs", tmp_path, "--name", "run", "--ask", "causality")
    done = engine("watch", *words, "--", "sh", "-c", 'echo "$APR_WATCH_ASK"')
    assert (done.returncode, done.stdout) == (0, "causality\n")


@pytest.mark.soak
def test_what_the_command_asks_is_answered(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nnet = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
    )
    command = ["-m", "engine", "watch", "--name", "run", "--ask", "causality", "--"]
    subprocess.run(
        [sys.executable, *command, sys.executable, "train.py"],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines if '"causality"' in line]
    assert [line["level"] for line in said] == [UNKNOWN]
