"""Scripts with one mistake each that a change of one line mends, by the identity that shows it."""

from __future__ import annotations

from typing import NamedTuple


class Fixable(NamedTuple):
    script: str
    line: str
    """The line that the fix replaces, without its indentation."""
    by: str


_REGRESSION = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 8), torch.randn(64, 1)
for step in range(24):
{loop}
"""
_LANGUAGE = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        return self.head(self.dropout(self.embedding(tokens)))


def train():
    model = Model()
    teacher = Model(8).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(4 * 32).reshape(4, 32) * 7 % 50
    for step in range(24):
        optimizer.zero_grad()
        logits = model(tokens)
{loop}
        loss.backward()
        optimizer.step()


{begin}
"""


def _regression(*loop: str) -> str:
    return _REGRESSION.format(loop="\n".join(f"    {line}" for line in loop))


def _language(*loop: str, begin: str = "train()") -> str:
    return _LANGUAGE.format(loop="\n".join(f"        {line}" for line in loop), begin=begin)


_KL = (
    "with torch.no_grad():",
    "    teacher_logits = teacher(tokens)",
)
_NEXT = "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())"

FIXABLE: dict[str, Fixable] = {
    "kept_gradients": Fixable(
        _regression(
            "loss = (model(x) - y).square().mean()",
            "loss.backward()",
            "optimizer.step()  # every step",
        ),
        "optimizer.step()  # every step",
        "optimizer.step(); optimizer.zero_grad()  # every step",
    ),
    "training_mode": Fixable(
        _regression(
            "optimizer.zero_grad()",
            "loss = (model(x) - y).square().mean()",
            "loss.backward()",
            "optimizer.step()",
            "model.eval()",
        ).replace("for step", "model.eval()\nfor step"),
        "optimizer.zero_grad()",
        "model.train(); optimizer.zero_grad()",
    ),
    "accumulated_mean": Fixable(
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(400, 8), torch.randn(400, 1)), 4, shuffle=True)
for number, (x, y) in enumerate(loader, 1):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if number % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        "loss.backward()",
        "(loss / 4).backward()",
    ),
    "clipping": Fixable(
        _regression(
            "optimizer.zero_grad()",
            "loss = (model(x) - y).square().mean()",
            "loss.backward()",
            "optimizer.step()",
            "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        "optimizer.step()",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()",
    ),
    "schedule": Fixable(
        _regression(
            "optimizer.zero_grad()",
            "loss = (model(x) - y).square().mean()",
            "loss.backward()",
            "optimizer.step()",
            "schedule.step()",
            "print(loss.item())",
            "schedule.step()",
        ).replace("x, y =", "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)\nx, y ="),
        "schedule.step()",
        "pass",
    ),
    "label_shift": Fixable(
        _language("loss = F.cross_entropy(logits.view(-1, 50), tokens.view(-1))"),
        "loss = F.cross_entropy(logits.view(-1, 50), tokens.view(-1))",
        "loss = F.cross_entropy(logits[:, :-1].reshape(-1, 50), tokens[:, 1:].reshape(-1))",
    ),
    "double_softmax": Fixable(
        _language(
            "chances = logits[:, :-1].softmax(-1)",
            "loss = F.cross_entropy(chances.flatten(0, 1), tokens[:, 1:].flatten())",
        ),
        "chances = logits[:, :-1].softmax(-1)",
        "chances = logits[:, :-1]",
    ),
    "bounded_logits": Fixable(
        _language(_NEXT).replace(
            "return self.head(self.dropout(self.embedding(tokens)))",
            "return torch.tanh(self.head(self.dropout(self.embedding(tokens))))",
        ),
        "return torch.tanh(self.head(self.dropout(self.embedding(tokens))))",
        "return self.head(self.dropout(self.embedding(tokens)))",
    ),
    "teacher_mode": Fixable(
        _language(
            *_KL,
            'kl = F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean")',
            "loss = kl / 32",
        ).replace("Model(8).eval()", "Model(8)"),
        "optimizer.zero_grad()",
        "teacher.eval(); optimizer.zero_grad()",
    ),
    "temperature_squared": Fixable(
        _language(
            *_KL,
            "flat = (logits / 4).log_softmax(-1).flatten(0, 1)",
            "wanted = (teacher_logits / 4).softmax(-1).flatten(0, 1)",
            'loss = F.kl_div(flat, wanted, reduction="batchmean")',
        ),
        'loss = F.kl_div(flat, wanted, reduction="batchmean")',
        'loss = F.kl_div(flat, wanted, reduction="batchmean") * 4 ** 2',
    ),
    "unowned_parameters": Fixable(
        _regression(
            "optimizer.zero_grad()",
            "loss = (model(x) - y).square().mean()",
            "loss.backward()",
            "optimizer.step()",
        ).replace("SGD(model.parameters(), lr", "SGD(model[3].parameters(), lr"),
        "optimizer = torch.optim.SGD(model[3].parameters(), lr=0.01)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
    ),
}
