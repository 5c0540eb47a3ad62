"""What the probe says of the loss of a language model: each mistake in styles of code of its own, healthy ones too."""

from __future__ import annotations

import pytest

from engine.attach.identities import FACT, PASS, SUSPICION
from tests.support.attached import watched_once
from tests.system.attach.test_identities import Found, degrees, outcomes

SETUP = """
from torch import nn
from torch.nn import functional as F
V, B, T = 23, 4, 12
generator = torch.Generator().manual_seed(5)
text = torch.randint(V, (64, T + 2), generator=generator)

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 16), nn.Linear(16, V)
        self.place = nn.Embedding(T + 2, 16)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        return self.head(torch.tanh(self.embed(tokens) + self.place(places)))

def fit(loss):
    torch.manual_seed(3)
    net = Small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(text, batch_size=B)
    for step, rows in enumerate(loader):
        if step == 4:
            break
        optimizer.zero_grad()
        loss(net, rows).backward()
        optimizer.step()
    return net

def tell(*functions):
    for function in functions:
        say(name=function.__name__)
        save(fit(function))
"""

HEALTHY = """
def shifted_in_the_loss(net, rows):
    return F.cross_entropy(net(rows)[:, :-1].reshape(-1, V), rows[:, 1:].reshape(-1))

def shifted_in_the_data(net, rows):
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

def classes_second(net, rows):
    return nn.CrossEntropyLoss()(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:]) / 4

def padded_labels(net, rows):
    labels = F.pad(rows[:, 1:], (0, 1), value=-100)
    labels[:, :5] = -100
    return F.cross_entropy(net(rows).view(-1, V), labels.view(-1))

def summed_and_smoothed(net, rows):
    loss = F.cross_entropy(net(rows)[:, :-1].reshape(-1, V), rows[:, 1:].reshape(-1), reduction="sum",
                           label_smoothing=0.1)
    return loss / (B * T)

def by_gather(net, rows):
    logs = net(rows[:, :-1]).log_softmax(-1)
    return -logs.gather(2, rows[:, 1:, None]).mean()

def by_index(net, rows):
    logs = F.log_softmax(net(rows[:, :-1]), -1).reshape(-1, V)
    return -logs[torch.arange(len(logs)), rows[:, 1:].reshape(-1)].mean()

def with_a_second_head_further_on(net, rows):
    logits = net(rows)
    return (F.cross_entropy(logits[:, :-1].reshape(-1, V), rows[:, 1:].reshape(-1))
            + F.cross_entropy(logits[:, :-2].reshape(-1, V), rows[:, 2:].reshape(-1)))

def probabilities_that_are_meant(net, rows):
    return F.nll_loss(net(rows[:, :-1]).softmax(-1).log().flatten(0, 1), rows[:, 1:].flatten())
"""

WRONG = """
def not_shifted(net, rows):
    return F.cross_entropy(net(rows).view(-1, V), rows.view(-1))

def not_shifted_by_gather(net, rows):
    return -net(rows).log_softmax(-1).gather(2, rows[:, :, None]).mean()

def shifted_twice(net, rows):
    return F.cross_entropy(net(rows)[:, :-2].reshape(-1, V), rows[:, 2:].reshape(-1))

def shifted_by_data_and_loss(net, rows):
    inputs, labels = rows[:, :-1], rows[:, 1:]
    return nn.CrossEntropyLoss()(net(inputs)[:, :-1].transpose(1, 2), labels[:, 1:])

def first_row(net, rows):
    return F.cross_entropy(net(rows)[0, :-1], rows[0, 1:])

def first_half_of_the_rows(net, rows):
    logits = net(rows[:, :-1])
    return -logits.log_softmax(-1)[: B // 2].gather(2, rows[: B // 2, 1:, None]).mean()

def softmax_twice(net, rows):
    return F.cross_entropy(net(rows)[:, :-1].softmax(-1).reshape(-1, V), rows[:, 1:].reshape(-1))

def log_softmax_twice(net, rows):
    logs = net(rows[:, :-1]).log_softmax(-1)
    return nn.CrossEntropyLoss()(logs.flatten(0, 1), rows[:, 1:].flatten())

def no_labels(net, rows):
    labels = torch.full_like(rows, -100)
    return F.cross_entropy(net(rows).view(-1, V), labels.view(-1), reduction="sum")
"""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "losses", SETUP + HEALTHY + _tell(HEALTHY)))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "wrong_losses", SETUP + WRONG + _tell(WRONG)))


def _names(script: str) -> list[str]:
    return [line[4 : line.index("(")] for line in script.splitlines() if line.startswith("def ")]


def _tell(script: str) -> str:
    return f"\ntell({', '.join(_names(script))})\n"


def test_a_loss_of_the_next_tokens_is_known_in_every_style(healthy: Found) -> None:
    assert list(healthy) == _names(HEALTHY)
    for name, lines in healthy.items():
        assert degrees(lines, "label_shift") == [PASS], name
        assert degrees(lines, "label_coverage") == [FACT], name
        assert degrees(lines, "double_softmax") == [PASS], name
        assert not [line for line in lines if line["degree"] == SUSPICION], name


def test_what_has_a_label_is_said(healthy: Found) -> None:
    (line,) = [one for one in healthy["padded_labels"] if one["id"] == "label_coverage"]
    # 14 tokens a row, the last without a next one, the first five left out.
    assert line["text"] == "32 of 56 places have a label"


@pytest.mark.parametrize(
    ("name", "id", "text"),
    [
        ("not_shifted", "label_shift", "has just read"),
        ("not_shifted_by_gather", "label_shift", "has just read"),
        ("shifted_twice", "label_shift", "shifted twice"),
        ("shifted_by_data_and_loss", "label_shift", "shifted twice"),
        ("first_row", "rows_left_out", "1 of the 4 rows"),
        ("first_half_of_the_rows", "rows_left_out", "2 of the 4 rows"),
        ("softmax_twice", "double_softmax", "a softmax gave"),
        ("log_softmax_twice", "double_softmax", "a softmax gave"),
        ("no_labels", "label_coverage", "none of 56 places"),
    ],
)
def test_a_wrong_loss_is_named(wrong: Found, name: str, id: str, text: str) -> None:
    found = [one for one in wrong[name] if one["degree"] == SUSPICION]
    assert [one["id"] for one in found] == [id]
    assert text in found[0]["text"]
