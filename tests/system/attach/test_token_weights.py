"""What a labelled token weighs in a step that sums the gradients of several batches: means of means, and losses that
weigh tokens alike or differently on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import PASS, SUSPICION
from tests.support.attached import run_twice, run_watched, watched_once
from tests.system.attach.test_frameworks import HF
from tests.system.attach.test_identities import SETUP, Found, degrees, outcomes
from tests.system.attach.test_ranks import TORCHRUN

SCRIPT = """
from torch.nn import functional as F
from torch.utils.data import DataLoader
VOCABULARY = 13
draw = torch.Generator().manual_seed(2)
LENGTHS = [7, 5, 30, 28, 12, 9, 22, 31]
TEXTS = [torch.randint(VOCABULARY, (length,), generator=draw) for length in LENGTHS * 4]

def padded(texts, length=None):
    pads = [(length or max(map(len, texts))) - len(one) for one in texts]
    tokens = torch.stack([F.pad(one, (0, pad)) for one, pad in zip(texts, pads)])
    labels = torch.stack([F.pad(one, (0, pad), value=-100) for one, pad in zip(texts, pads)])
    return tokens, labels

def language_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

def cross_entropy(net, tokens, labels, **settings):
    return F.cross_entropy(net(tokens)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), **settings)

def count(labels):
    return int((labels[:, 1:] != -100).sum())

def batches(rows=2, texts=TEXTS, collate=padded):
    return DataLoader(texts, batch_size=rows, collate_fn=collate)

def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []

def train(loss, window=4, loader=None, net=None):
    net = net or language_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for several in windows(batches() if loader is None else loader, window):
        labelled = sum(count(labels) for _, labels in several)
        for tokens, labels in several:
            loss(net, tokens, labels, labelled, window).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

# Means of means.

def means_of_means():
    return train(lambda net, tokens, labels, labelled, window: cross_entropy(net, tokens, labels) / window)

def means_of_single_texts():
    return train(lambda net, tokens, labels, labelled, window: cross_entropy(net, tokens, labels) / window,
                 loader=batches(1))

class SumsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = language_model()

    def training_step(self, tokens, labels):
        logs = self.net(tokens)[:, :-1].log_softmax(-1)
        labels = labels[:, 1:]
        mask = labels != -100
        return -(logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask).sum() / mask.sum()

def a_module_that_divides_by_its_own_mask():
    module = SumsItself()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for at, batch in enumerate(batches(), 1):
        torch.autograd.backward([module.training_step(*batch) * 0.5])
        if at % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return module

def means_of_batches_cut_by_hand():
    net = language_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    order = [0, 2, 3, 1, 4, 5, 7, 6, 0, 3, 2, 1]
    for at, number in enumerate(order, 1):
        tokens, labels = padded([TEXTS[number], TEXTS[number + 8]])
        (cross_entropy(net, tokens, labels) / 2).backward()
        if at % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net

def divided_by_ignored_labels_too():
    def loss(net, tokens, labels, labelled, window):
        summed = cross_entropy(net, tokens, labels, reduction="sum", ignore_index=-100)
        return summed / labels[:, 1:].numel() / window
    texts = [text for short, long in zip(TEXTS[1::8] * 4, TEXTS[2::8] * 4) for text in (short, short[:3], long, long)]
    return train(loss, window=2, loader=batches(texts=texts))

def labels_counted_before_the_shift():
    def loss(net, tokens, labels, labelled, window):
        return cross_entropy(net, tokens, labels, reduction="sum") / (labels != -100).sum() / window
    return train(loss)

# Tokens weigh alike.

def divided_by_the_labels_of_the_step():
    return train(lambda net, tokens, labels, labelled, window:
                 cross_entropy(net, tokens, labels, reduction="sum") / labelled)

def masked_and_divided_by_the_labels_of_the_step():
    def loss(net, tokens, labels, labelled, window):
        every = cross_entropy(net, tokens, labels, reduction="none")
        return (every * (labels[:, 1:].reshape(-1) != -100)).sum() / torch.tensor(float(labelled))
    return train(loss)

def equal_counts():
    return train(lambda net, tokens, labels, labelled, window: cross_entropy(net, tokens, labels) / window,
                 loader=batches(texts=[text[:5] for text in TEXTS]))

def scaled_and_in_chunks():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    def loss(net, tokens, labels, labelled, window):
        logits = net(tokens)[:, :-1].reshape(-1, VOCABULARY)
        pieces = zip(logits.chunk(3), labels[:, 1:].reshape(-1).chunk(3))
        return scaler.scale(sum(F.cross_entropy(*piece, reduction="sum") for piece in pieces) / labelled)
    return train(loss)

# Not judged.

def no_accumulation():
    return train(lambda net, tokens, labels, labelled, window: cross_entropy(net, tokens, labels), window=1)

def means_of_rows():
    def loss(net, tokens, labels, labelled, window):
        every = cross_entropy(net, tokens, labels, reduction="none").reshape(len(labels), -1)
        mask = labels[:, 1:] != -100
        return (every.sum(1) / mask.sum(1)).mean() / window
    return train(loss, loader=batches(1))

def losses_of_rows():
    def loss(net, tokens, labels, labelled, window):
        return torch.stack([cross_entropy(net, one[None], of[None]) for one, of in zip(tokens, labels)]).mean() / window
    return train(loss)

def weights_of_classes():
    weight = torch.linspace(0.5, 2.0, VOCABULARY)
    return train(lambda net, tokens, labels, labelled, window:
                 cross_entropy(net, tokens, labels, weight=weight) / window)

def a_curriculum():
    turns = iter([0.2, 0.9, 0.5, 1.0] * 4)
    return train(lambda net, tokens, labels, labelled, window:
                 cross_entropy(net, tokens, labels, reduction="sum") * next(turns) / labelled)

def importance_of_tokens():
    return train(lambda net, tokens, labels, labelled, window:
                 (cross_entropy(net, tokens, labels, reduction="none")
                  * torch.linspace(0.1, 1.0, labels[:, 1:].numel())).mean())

def a_policy_gradient():
    turns = iter([1.3, -0.4, 0.8, -1.1] * 8)
    return train(lambda net, tokens, labels, labelled, window:
                 next(turns) * cross_entropy(net, tokens, labels) / window, loader=batches(1))

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = language_model()
        self.other = nn.Linear(8, VOCABULARY)

    def forward(self, tokens, head):
        return self.other(self.body[0](tokens)) if head else self.body(tokens)

def two_tasks_of_one_model():
    net = TwoHeads()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for (tokens, labels), (others, of) in zip(batches(), batches(1, TEXTS[3:])):
        (F.cross_entropy(net(tokens, 0).flatten(0, 1), labels.flatten()) / 2).backward()
        (F.cross_entropy(net(others, 1).flatten(0, 1), of.flatten()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

def a_mixture_of_two_corpora():
    net = language_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for short, long in zip(batches(), batches(2, TEXTS[2:])):
        for batch in (short, long):
            (cross_entropy(net, *batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

def two_losses_of_a_batch():
    net = language_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for tokens, labels in batches():
        (cross_entropy(net, tokens, labels) / 2).backward()
        (cross_entropy(net, tokens[:, :5], labels[:, :5]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

def a_short_last_batch():
    classifier = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.01)
    x, _ = data(28)
    loader = DataLoader(list(zip(x, torch.arange(28) % 3)), batch_size=5)
    for _ in range(2):
        for at, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(classifier(x), y) / 2).backward()
            if at % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return classifier

tell(means_of_means, means_of_single_texts, a_module_that_divides_by_its_own_mask, means_of_batches_cut_by_hand,
     divided_by_ignored_labels_too, labels_counted_before_the_shift,
     divided_by_the_labels_of_the_step, masked_and_divided_by_the_labels_of_the_step,
     equal_counts, scaled_and_in_chunks, no_accumulation, means_of_rows, losses_of_rows, weights_of_classes,
     a_curriculum, importance_of_tokens, a_policy_gradient, two_tasks_of_one_model, a_mixture_of_two_corpora,
     two_losses_of_a_batch, a_short_last_batch)
"""


TRAINER = """
transformers.utils.logging.disable_progress_bar()
draw = torch.Generator().manual_seed(2)
rows = [torch.randint(64, (length,), generator=draw) for length in [7, 5, 30, 28, 12, 9, 22, 31] * 2]

def collate(rows):
    width = max(map(len, rows))
    pad = lambda one, value: torch.nn.functional.pad(one, (0, width - len(one)), value=value)
    return {"input_ids": torch.stack([pad(one, 0) for one in rows]),
            "labels": torch.stack([pad(one, -100) for one in rows])}

class Means(transformers.Trainer):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, **unused):
        out = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        return (out.loss, out) if return_outputs else out.loss

for kind in (transformers.Trainer, Means):
    say(name=kind.__name__)
    train(kind(model=net, train_dataset=rows, data_collator=collate,
               args=transformers.TrainingArguments(**settings)))
"""


@pytest.mark.soak
def test_the_loss_of_a_trainer_weighs_tokens_alike_and_a_mean_of_ones_own_does_not(
    tmp_path: Path,
) -> None:
    found = outcomes(run_watched(tmp_path, HF + TRAINER))
    assert degrees(found["Trainer"], "token_weights") == [PASS]
    (line,) = [line for line in found["Means"] if line["id"] == "token_weights"]
    assert line["level"] == SUSPICION and OWN in line["text"]


RANKS = """
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank = dist.get_rank()

def fit(divisor):
    torch.manual_seed(3)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        lengths = [5 + 9 * rank + step, 20 + 30 * rank]
        count = torch.tensor(float(sum(lengths)))
        total = count.clone()
        dist.all_reduce(total)
        for length in lengths:
            tokens = torch.randint(13, (1, length + 1))
            loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            (loss / divisor(float(count), float(total))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

for name, divisor in dict(own=lambda own, total: own, twice=lambda own, total: total,
                          all=lambda own, total: total / 2).items():
    if rank == 0:
        say(name=name)
    fit(divisor)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_labels_of_one_rank_alone_and_averages_of_averages_are_suspected(tmp_path: Path) -> None:
    found = outcomes(run_watched(tmp_path, RANKS, *TORCHRUN))
    texts = {
        name: [
            line["text"]
            for line in lines
            if line["level"] == SUSPICION and line["id"] == "token_weights"
        ]
        for name, lines in found.items()
    }
    assert "each rank divides by its own 25 and 64 labels" in texts["own"][0]
    assert "divided by the 89 labels of all ranks" in texts["twice"][0]
    assert texts["all"] == [] and PASS in degrees(found["all"], "token_weights")


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SETUP + SCRIPT)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "token_weights", SETUP + SCRIPT, twice=False))


OWN = "each loss is the mean over its own"
WRONG = {
    "means_of_means": OWN,
    "means_of_single_texts": OWN,
    "a_module_that_divides_by_its_own_mask": OWN,
    "means_of_batches_cut_by_hand": OWN,
    "labels_counted_before_the_shift": "divided by its own 10 and 56 labels and 2 more",
    "divided_by_ignored_labels_too": "each loss is divided by its own 8 and 58 positions",
}
ALIKE = (
    "divided_by_the_labels_of_the_step",
    "masked_and_divided_by_the_labels_of_the_step",
    "equal_counts",
    "scaled_and_in_chunks",
    "a_short_last_batch",
)


@pytest.mark.parametrize("name", WRONG)
def test_tokens_that_weigh_differently_are_suspected_with_their_counts(
    weights: Found, name: str
) -> None:
    lines = [line for line in weights[name] if line["id"] == "token_weights"]
    assert [line["level"] for line in lines] == [SUSPICION], weights[name]
    assert WRONG[name] in lines[0]["text"], lines[0]["text"]


def test_each_weight_is_that_of_the_counts(weights: Found) -> None:
    (line,) = [line for line in weights["means_of_means"] if line["id"] == "token_weights"]
    assert line["numbers"]["times"] == pytest.approx(56 / 10)
    assert "of pass 2: each loss is the mean over its own 10 and 56 labels" in line["text"]


def test_tokens_that_weigh_alike_pass_and_no_other_loss_is_judged(weights: Found) -> None:
    seen = {name: degrees(lines, "token_weights") for name, lines in weights.items()}
    expected = {name: [PASS] if name in ALIKE else [] for name in weights if name not in WRONG}
    assert {name: seen[name] for name in expected} == expected
