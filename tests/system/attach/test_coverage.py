"""What the labels of a language model cover: padding, the end of a text, and the first row as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.log.events import PASS, SUSPICION
from tests.support.attached import run_twice, watched_once
from tests.system.attach.test_identities import degrees, outcomes

Found = dict[str, list[dict[str, Any]]]
SCRIPT = """
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase
V, B, T, END, PAD = 64, 4, 16, 1, 0
words = [2 + (7 * at) % 60 for at in range(400)]

class Tokenizer(PreTrainedTokenizerBase):
    # The words are numbers.
    eos_token_id, pad_token_id = END, PAD
    def __init__(self):
        pass
    def __len__(self):
        return V
    def decode(self, tokens, **more):
        return "".join({END: "<end>", PAD: "."}.get(one, f"{one} ") for one in tokens)

tokenizer = Tokenizer()

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 16), nn.Linear(16, V)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))

def rows(lengths=(5, 9, 12, 7), pad=PAD, prompt=0, end=True):
    tokens = torch.full((B, T), pad)
    labels = torch.full((B, T), -100)
    for row, length in enumerate(lengths):
        text = torch.tensor(words[20 * row:20 * row + length] + [END] * end)
        tokens[row, :len(text)] = text
        labels[row, prompt:len(text)] = text[prompt:]
    return tokens, labels

def fit(tokens, labels):
    net = Small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        logits = net(tokens)[:, :-1]
        F.cross_entropy(logits.reshape(-1, V), labels[:, 1:].reshape(-1)).backward()
        optimizer.step()
    return net

def fit_by_hand(tokens, mask):
    net = Small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net.zero_grad()
        logs = net(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        (-(logs * mask[:, 1:]).sum() / mask[:, 1:].sum()).backward()
        optimizer.step()
    return net

def padding_is_labelled():
    tokens, _ = rows()
    return fit(tokens, tokens)

def padding_is_not_masked_by_hand():
    tokens, _ = rows()
    return fit_by_hand(tokens, torch.ones(B, T))

def padding_by_the_end_is_masked_with_it():
    tokens, labels = rows(pad=END)
    return fit(tokens, labels.masked_fill(tokens == END, -100))

def the_end_is_masked_by_hand():
    tokens, _ = rows()
    return fit_by_hand(tokens, (tokens > END).float())

def only_answers():
    return fit(*rows(prompt=3))

def only_answers_by_hand():
    tokens, labels = rows(prompt=3)
    return fit_by_hand(tokens, (labels >= 0).float())

def rows_of_a_long_text():
    tokens = torch.tensor(words[:B * T]).reshape(B, T)
    return fit(tokens, tokens)

def rows_that_end_alike():
    tokens = torch.tensor(words[:B * T]).reshape(B, T)
    tokens[:, -5:] = 7
    tokens[:, -6] = 9
    return fit(tokens, tokens)

for function in (padding_is_labelled, padding_is_not_masked_by_hand, padding_by_the_end_is_masked_with_it,
                 the_end_is_masked_by_hand, only_answers, only_answers_by_hand, rows_of_a_long_text,
                 rows_that_end_alike):
    say(name=function.__name__)
    save(function())
"""


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SCRIPT)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "coverage", SCRIPT, twice=False))


IDS = ("padding_labels", "end_of_text")
EXPECTED = {
    "padding_is_labelled": {"padding_labels": SUSPICION, "end_of_text": PASS},
    "padding_is_not_masked_by_hand": {"padding_labels": SUSPICION, "end_of_text": PASS},
    "padding_by_the_end_is_masked_with_it": {"end_of_text": SUSPICION},
    "the_end_is_masked_by_hand": {"end_of_text": SUSPICION},
    "only_answers": {"end_of_text": PASS},
    "only_answers_by_hand": {"end_of_text": PASS},
    "rows_of_a_long_text": {},
    "rows_that_end_alike": {},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_padding_that_has_labels_and_an_end_that_has_none_are_suspected(
    found: Found, name: str
) -> None:
    seen = {id: said for id in IDS if (said := degrees(found[name], id))}
    assert seen == {id: [degree] for id, degree in EXPECTED[name].items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("padding_is_labelled", "in brackets: 2 [9 16 23 30 <end>..........]"),
        ("only_answers", "in brackets: 2 9 16 [23 30 <end>].........."),
        ("only_answers_by_hand", "in brackets: 2 9 16 [23 30 <end>]........."),
    ],
)
def test_the_first_row_is_shown_as_text_with_what_has_a_label_in_brackets(
    found: Found, name: str, text: str
) -> None:
    (fact,) = [line for line in found[name] if line["id"] == "label_coverage"]
    assert fact["text"].endswith(text)
