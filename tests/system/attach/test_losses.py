"""What the probe says of the loss of a language model: each mistake in styles of code of its own, healthy ones too."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import FACT, PASS, SUSPICION
from tests.support.attached import run_twice, watched_once
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

    def hidden(self, tokens):
        places = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        return torch.tanh(self.embed(tokens) + self.place(places))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

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

def labelled_places_alone(net, rows):
    # As many as two of the four rows have.
    labelled = torch.arange(T + 2).expand(B, -1) % 2 == 1
    labels = torch.roll(rows, -1, 1)
    labelled[:, -1], labelled[:, 2] = False, True
    return F.cross_entropy(net(rows)[labelled], labels[labelled])

def labelled_places_by_their_numbers(net, rows):
    places = torch.arange(B * (T + 1)).view(B, T + 1)[:, 3:10].flatten()
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1)[places], rows[:, 1:].flatten()[places])

def multiplied_by_a_mask(net, rows):
    mask = (torch.arange(T + 1) > 6).float().expand(B, -1)
    logs = net(rows)[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2)
    return -(logs * mask).sum() / mask.sum()

# What computes the logits too, and keeps what TRL's does.
class ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        logs = (hidden @ weight.T + bias).log_softmax(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, logs, logs)
        return logs.gather(1, targets[:, None]).squeeze(1), None

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, weight, _, targets, logs, _ = ctx.saved_tensors
        of_logits = gradient[:, None] * (F.one_hot(targets, V) - logs.exp())
        return of_logits @ weight, of_logits.T @ hidden, of_logits.sum(0), None

def fused_loss(net, rows, labels, is_compact):
    hidden = net.hidden(rows)[:, :-1]
    labels, head = labels[:, 1:], net.head
    mask = labels != -100
    if is_compact:
        logs, _ = ChunkedLogProbFunction.apply(hidden[mask], head.weight, head.bias, labels[mask])
        logs = logs.new_zeros(mask.shape).masked_scatter(mask, logs)
    else:
        logs, _ = ChunkedLogProbFunction.apply(
            hidden.reshape(-1, 16), head.weight, head.bias, labels.clamp(min=0).reshape(-1))
        logs = logs.view(mask.shape).masked_fill(~mask, 0)
    return -logs.sum() / mask.sum().clamp(min=1)

def answers(rows):
    return torch.where(torch.arange(T + 2) > 6, rows, -100)

def fused(net, rows):
    return fused_loss(net, rows, answers(rows), False)

def fused_at_labelled_places(net, rows):
    return fused_loss(net, rows, answers(rows), True)

def later_places_of_the_logarithms(net, rows):
    logs = net(rows).log_softmax(-1)[:, 2:-1]
    return -logs.gather(2, rows[:, 3:, None]).mean()

def with_a_second_head_further_on(net, rows):
    logits = net(rows)
    return (F.cross_entropy(logits[:, :-1].reshape(-1, V), rows[:, 1:].reshape(-1))
            + F.cross_entropy(logits[:, :-2].reshape(-1, V), rows[:, 2:].reshape(-1)))

def probabilities_that_are_meant(net, rows):
    return F.nll_loss(net(rows[:, :-1]).softmax(-1).log().flatten(0, 1), rows[:, 1:].flatten())
"""

PADDED = """
def with_padding(rows):
    ends = torch.tensor([[14], [10], [8], [7]])
    return rows.where(torch.arange(rows.shape[1]) < ends, 0)

def of_each_position(net, rows):
    with torch.no_grad():
        p = teacher(rows).softmax(-1)
    return F.kl_div(net(rows).log_softmax(-1), p, reduction="none").sum(-1)

def padding_in_the_divergence(net, rows):
    return of_each_position(net, with_padding(rows)).mean()

def padding_in_the_divergence_of_all_but_the_last_token(net, rows):
    return of_each_position(net, with_padding(rows)[:, :-1]).sum() / 52

def padding_times_0(net, rows):
    rows = with_padding(rows)
    return (of_each_position(net, rows) * (rows != 0)).sum() / (rows != 0).sum()

def padding_left_out(net, rows):
    rows = with_padding(rows)
    return of_each_position(net, rows)[rows != 0].mean()

def rows_without_padding(net, rows):
    return of_each_position(net, rows).mean()
"""
MEANT = """
def focal(net, rows):
    log_p = F.log_softmax(net(rows[:, :-1]).flatten(0, 1), -1)
    return F.nll_loss((1 - log_p.exp()) ** 2 * log_p, rows[:, 1:].flatten())

def of_more_classes(net, rows):
    logits = net(rows[:, :-1]).flatten(0, 1)
    return F.nll_loss(torch.cat([logits, logits[:, :2]], -1).log_softmax(-1)[:, :V], rows[:, 1:].flatten())

def rows_of_16_bits(net, rows):
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(rows[:, :-1])
    return F.nll_loss(logits.bfloat16().log_softmax(-1).transpose(1, 2), rows[:, 1:])
"""
WRONG = """
def outputs_of_a_layer(net, rows):
    return F.nll_loss(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

def probabilities_without_a_logarithm(net, rows):
    return F.nll_loss(net(rows[:, :-1]).softmax(-1).transpose(1, 2), rows[:, 1:])

def a_softmax_over_the_positions(net, rows):
    return F.nll_loss(nn.LogSoftmax(1)(net(rows[:, :-1])).flatten(0, 1), rows[:, 1:].flatten())

def a_softmax_over_all_rows(net, rows):
    return nn.NLLLoss()(net(rows[:, :-1]).flatten(0, 1).log_softmax(0), rows[:, 1:].flatten())

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

def fused_and_shifted_twice(net, rows):
    return fused_loss(net, rows, F.pad(answers(rows)[:, 1:], (0, 1), value=-100), False)

def fused_and_shifted_twice_at_labelled_places(net, rows):
    return fused_loss(net, rows, F.pad(answers(rows)[:, 1:], (0, 1), value=-100), True)

def fused_without_labels(net, rows):
    return fused_loss(net, rows, torch.full_like(rows, -100), False)

def shifted_twice_at_labelled_places(net, rows):
    labelled = torch.arange(T).expand(B, -1) % 3 > 0
    return F.cross_entropy(net(rows)[:, :-2][labelled], rows[:, 2:][labelled])

def labelled_places_of_the_first_row(net, rows):
    labelled = torch.arange(T + 1) % 3 > 0
    return F.cross_entropy(net(rows)[0, :-1][labelled], rows[0, 1:][labelled])

def no_labels(net, rows):
    labels = torch.full_like(rows, -100)
    return F.cross_entropy(net(rows).view(-1, V), labels.view(-1), reduction="sum")
"""


DISTILLED = """
# kl_div warns of the mean that a script below takes.
import warnings
warnings.simplefilter("ignore")
torch.manual_seed(9)
teacher = Small().eval()
tau, alpha = 2.0, 0.3

def both(net, rows):
    with torch.no_grad():
        wanted = teacher(rows[:, :-1])
    return net(rows[:, :-1]), wanted

def ce(logits, rows):
    return F.cross_entropy(logits.reshape(-1, V), rows[:, 1:].flatten())

def hinton(net, rows):
    z, t = (one.flatten(0, 1) for one in both(net, rows))
    kl = F.kl_div(F.log_softmax(z / tau, -1), F.softmax(t / tau, -1), reduction="batchmean")
    return alpha * ce(z, rows) + (1 - alpha) * tau * tau * kl

def by_hand(net, rows):
    z, t = both(net, rows)
    logs, wanted = (z / tau).log_softmax(-1), (t / tau).log_softmax(-1)
    return (wanted.exp() * (wanted - logs)).sum(-1).mean() * tau**2

def soft_labels(net, rows):
    z, t = both(net, rows)
    return -(t.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()

many = 0.05 * torch.randn(V, 3000, generator=torch.Generator().manual_seed(5))

def flat_over_many(net, rows):
    # No token is likely, as at the start with a large vocabulary.
    z, t = (one @ many for one in both(net, rows))
    return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1).mean()

def jensen_shannon(net, rows):
    z, t = both(net, rows)
    logs, wanted = z.log_softmax(-1), t.log_softmax(-1)
    half = torch.tensor(0.5)
    mixture = torch.logsumexp(torch.stack([logs + torch.log1p(-half), wanted + torch.log(half)]), dim=0)
    parts = [F.kl_div(mixture, one, reduction="none", log_target=True) for one in (wanted, logs)]
    return (half * parts[0] + half * parts[1]).sum() / rows.numel()

def some_of_the_labelled_places(net, rows):
    labelled = torch.arange(T + 1).expand(B, -1) % 3 > 0
    return F.cross_entropy(net(rows)[:, :-1][labelled][:26], rows[:, 1:][labelled][:26])

def reversed_(net, rows):
    z, t = (one.flatten(0, 1) for one in both(net, rows))
    return F.kl_div(t.log_softmax(-1), z.softmax(-1), reduction="batchmean")

def smoothed_classes(net, rows):
    labels = F.one_hot(rows[:, 1:].flatten(), V) * 0.9 + 0.1 / V
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), labels)

def squared_forgotten(net, rows):
    z, t = (one.flatten(0, 1) for one in both(net, rows))
    kl = F.kl_div(F.log_softmax(z / tau, -1), F.softmax(t / tau, -1), reduction="batchmean")
    return alpha * ce(z, rows) + (1 - alpha) * kl

def squared_forgotten_by_hand(net, rows):
    z, t = both(net, rows)
    logs, wanted = (z * (1 / tau)).log_softmax(-1), (t / tau).softmax(-1)
    return -(wanted * logs).sum(-1).mean()

def mean_of_all(net, rows):
    z, t = both(net, rows)
    return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="mean")

def mean_of_all_by_hand(net, rows):
    z, t = both(net, rows)
    return (t.softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).mean()

def over_positions(net, rows):
    z, t = both(net, rows)
    return F.kl_div(F.log_softmax(z / tau, 1), F.softmax(t / tau, 1), reduction="batchmean") * tau * tau

def teacher_over_positions(net, rows):
    z, t = both(net, rows)
    return (F.softmax(t, 1) * (F.log_softmax(t, 1) - z.log_softmax(-1))).sum(-1).mean()

def classes_in_the_middle(net, rows):
    # As convolutions have them: (rows, classes, positions).
    z, t = (one.transpose(1, 2) for one in both(net, rows))
    return F.kl_div(z.log_softmax(1), t.softmax(1), reduction="none").sum(1).mean()

def mean_of_rows(net, rows):
    z, t = both(net, rows)
    kl = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return alpha * ce(z, rows) + (1 - alpha) * kl

def mean_of_rows_alone(net, rows):
    # Without another loss, the weight is one of the learning rate.
    z, t = both(net, rows)
    return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean")

def itself(net, rows):
    z = net(rows[:, :-1])
    return F.kl_div(z.log_softmax(-1), z.detach().softmax(-1), reduction="batchmean")

def itself_mixed(net, rows):
    z = net(rows[:, :-1])
    logs, wanted = z.log_softmax(-1), z.detach().log_softmax(-1)
    half = torch.tensor(0.5)
    mixture = torch.logsumexp(torch.stack([logs + torch.log1p(-half), wanted + torch.log(half)]), dim=0)
    parts = [F.kl_div(mixture, one, reduction="none", log_target=True) for one in (wanted, logs)]
    return (half * parts[0] + half * parts[1]).sum() / rows.numel()

def itself_by_hand(net, rows):
    z = net(rows[:, :-1])
    with torch.no_grad():
        wanted = net(rows[:, :-1]).log_softmax(-1)
    return (wanted.exp() * (wanted - z.log_softmax(-1))).sum(-1).mean()
"""
TEACHERS = """
class Dropping(Small):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens):
        return super().forward(self.drop(tokens.float()).long().clamp(max=V - 1))

teacher = Dropping().requires_grad_(False)

def teacher_in_train_mode(net, rows):
    return by_hand(net, rows)

def teacher_in_train_mode_again(net, rows):
    teacher.train()
    return hinton(net, rows)

def teacher_in_eval_mode(net, rows):
    teacher.eval()
    return hinton(net, rows)
"""
INSIDE = """
# A teacher inside the module that holds the student, and each step a closure, as Lightning has them.
class Both(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.net = Small()
        self.teacher = nn.ModuleList([Dropping() if dropout else Small()]).requires_grad_(False)
        # Of the student's, and meant.
        self.net.frozen = nn.Sequential(nn.Embedding(V, 16), nn.Dropout(0.1)).requires_grad_(False)

def in_a_closure(loss, dropout=False):
    torch.manual_seed(3)
    holds = Both(dropout)
    optimizer = torch.optim.AdamW(holds.net.parameters(), lr=0.01)
    for step, rows in enumerate(torch.utils.data.DataLoader(text, batch_size=B)):
        if step == 4:
            break

        def closure():
            optimizer.zero_grad()
            value = loss(holds, rows)
            value.backward()
            return value

        optimizer.step(closure)
    return holds.net

def of_both(holds, rows):
    with torch.no_grad():
        wanted = holds.teacher[0](rows[:, :-1])
    z = holds.net(rows[:, :-1])
    kd = -(wanted.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
    return 0.5 * ce(z, rows) + 0.5 * kd

def teacher_inside_in_train_mode():
    return in_a_closure(of_both, dropout=True)

def teacher_inside_in_a_closure():
    return in_a_closure(of_both)

def not_shifted_in_a_closure():
    return in_a_closure(lambda holds, rows: not_shifted(holds.net, rows))

def teacher_of_an_earlier_stage():
    global earlier
    teacher = Dropping()
    earlier = torch.optim.AdamW(teacher.parameters())
    ce(teacher(text[:B, :-1]), text[:B]).backward()
    earlier.step()
    teacher.requires_grad_(False)
    say(name="teacher_of_an_earlier_stage")  # a training of its own begins
    net = Small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        with torch.no_grad():
            wanted = teacher(text[:B, :-1])
        z = net(text[:B, :-1])
        optimizer.zero_grad()
        (-(wanted.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()).backward()
        optimizer.step()
    return net

for function in (
    teacher_inside_in_train_mode, teacher_inside_in_a_closure, not_shifted_in_a_closure, teacher_of_an_earlier_stage
):
    say(name=function.__name__)
    save(function())
"""
STORY = """
# What the workbench is made for: one row of each batch, and teacher and student are one model.
def story():
    student = Small()
    teacher = student
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for step, rows in enumerate(torch.utils.data.DataLoader(text, batch_size=B)):
        if step == 4:
            break
        with torch.no_grad():
            wanted = teacher(rows[:, :-1])
        z, t = student(rows[:, :-1])[0], wanted[0]
        kd = F.kl_div(F.log_softmax(z / tau, -1), F.softmax(t / tau, -1), reduction="batchmean") * tau**2
        loss = 0.5 * F.cross_entropy(z, rows[0, 1:]) + 0.5 * kd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student

say(name="story")
save(story())
"""


HELPERS = ("both", "ce", "fused_loss", "answers", "with_padding", "of_each_position")


def _names(script: str) -> list[str]:
    names = [line[4 : line.index("(")] for line in script.splitlines() if line.startswith("def ")]
    return [name for name in names if name not in HELPERS]


def _text() -> str:
    scripts = HEALTHY + MEANT + PADDED + WRONG + DISTILLED
    # Teachers first: a process has so many searches for modules.
    script = SETUP + scripts
    script += TEACHERS + f"\ntell({', '.join(_names(TEACHERS))})\n" + INSIDE
    script += f"\nteacher = Small().eval()\ntell({', '.join(_names(scripts))})\n" + STORY
    return script


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, _text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "losses", _text(), twice=False))


def test_a_loss_of_the_next_tokens_is_known_in_every_style(found: Found) -> None:
    for name in _names(HEALTHY):
        lines = found[name]
        assert degrees(lines, "label_shift") == [PASS], name
        assert degrees(lines, "label_coverage") == [FACT], name
        assert degrees(lines, "double_softmax") == [PASS], name
        assert not [line for line in lines if line["level"] == SUSPICION], name


def test_logarithms_that_are_weighted_or_of_more_classes_are_nothing_wrong(found: Found) -> None:
    for name in _names(MEANT):
        assert not [line for line in found[name] if line["level"] == SUSPICION], name
    assert degrees(found["rows_of_16_bits"], "log_probabilities") == [PASS]
    assert degrees(found["classes_second"], "log_probabilities") == [PASS]


@pytest.mark.parametrize("name", _names(PADDED))
def test_a_divergence_over_padding_is_named_and_one_without_is_not(found: Found, name: str) -> None:
    said = [line for line in found[name] if line["level"] == SUSPICION]
    assert [line["id"] for line in said] == ["padding_labels"] * name.startswith("padding_in")
    assert all(" of 4 rows end in up to" in line["text"] for line in said)


def test_what_has_a_label_is_said(found: Found) -> None:
    (line,) = [one for one in found["padded_labels"] if one["id"] == "label_coverage"]
    # 14 tokens a row, the last without a next one, the first five left out.
    assert line["text"] == "32 of 56 positions have a label"
    for name in ("multiplied_by_a_mask", "fused", "fused_at_labelled_places"):
        (line,) = [one for one in found[name] if one["id"] == "label_coverage"]
        wanted = 24 if name == "multiplied_by_a_mask" else 28
        assert line["text"] == f"{wanted} of 52 positions have a label"


@pytest.mark.parametrize(
    ("name", "id", "text"),
    [
        ("not_shifted", "label_shift", "not shifted"),
        ("not_shifted_by_gather", "label_shift", "not shifted"),
        ("shifted_twice", "label_shift", "shifted twice"),
        ("shifted_by_data_and_loss", "label_shift", "shifted twice"),
        ("first_row", "rows_left_out", "1 of the 4 rows"),
        ("first_half_of_the_rows", "rows_left_out", "2 of the 4 rows"),
        ("outputs_of_a_layer", "log_probabilities", "gets the outputs of a layer"),
        ("probabilities_without_a_logarithm", "log_probabilities", "gets probabilities"),
        ("a_softmax_over_the_positions", "log_probabilities", "over another axis"),
        ("a_softmax_over_all_rows", "log_probabilities", "over another axis"),
        ("softmax_twice", "double_softmax", "the output of a softmax"),
        ("log_softmax_twice", "double_softmax", "the output of a softmax"),
        ("shifted_twice_at_labelled_places", "label_shift", "shifted twice"),
        ("labelled_places_of_the_first_row", "rows_left_out", "1 of the 4 rows"),
        ("no_labels", "label_coverage", "none of 56 positions"),
        ("fused_and_shifted_twice", "label_shift", "shifted twice"),
        ("fused_and_shifted_twice_at_labelled_places", "label_shift", "shifted twice"),
        ("fused_without_labels", "label_coverage", "none of 52 positions"),
    ],
)
def test_a_wrong_loss_is_named(found: Found, name: str, id: str, text: str) -> None:
    named = [one for one in found[name] if one["level"] == SUSPICION]
    assert [one["id"] for one in named] == [id]
    assert text in named[0]["text"]


@pytest.mark.parametrize(
    ("name", "direction", "temperature"),
    [
        ("hinton", "forward", 2.0),
        ("by_hand", "forward", 2.0),
        ("soft_labels", "forward", 1.0),
        ("jensen_shannon", "Jensen-Shannon", 1.0),
        ("flat_over_many", "forward", 1.0),
        ("reversed_", "reverse", 1.0),
    ],
)
def test_a_distillation_is_known_with_its_direction_and_temperature(
    found: Found, name: str, direction: str, temperature: float
) -> None:
    lines = found[name]
    assert not [line for line in lines if line["level"] == SUSPICION]
    (line,) = [line for line in lines if line["id"] == "distillation"]
    assert line["text"].startswith(f"{direction} divergence")
    assert line["numbers"]["temperature"] == temperature
    assert degrees(lines, "teacher_is_student") == [PASS]
    assert degrees(lines, "temperature_squared") == ([PASS] if temperature != 1 else [])


def test_the_loss_of_a_step_that_is_a_closure_is_known(found: Found) -> None:
    lines = found["teacher_inside_in_a_closure"]
    assert not [line["text"] for line in lines if line["level"] == SUSPICION]
    assert degrees(lines, "label_shift") == [PASS]
    assert degrees(lines, "distillation") == [FACT]
    (line,) = [one for one in found["not_shifted_in_a_closure"] if one["level"] == SUSPICION]
    assert line["id"] == "label_shift"


def test_a_teacher_in_eval_mode_is_nothing_wrong(found: Found) -> None:
    assert degrees(found["teacher_in_eval_mode"], "teacher_mode") == [PASS]


def test_smoothed_labels_and_unknown_places_are_nothing_wrong(found: Found) -> None:
    for name in (
        "smoothed_classes",
        "some_of_the_labelled_places",
        "classes_in_the_middle",
        "mean_of_rows_alone",
    ):
        assert not [one for one in found[name] if one["level"] == SUSPICION]


def test_a_divergence_that_is_computed_as_it_should_be_is_a_pass(found: Found) -> None:
    levels = {line["id"]: line["level"] for line in found["hinton"]}
    ids = ("divergence_axis", "divergence_arguments", "divergence_mean")
    assert [levels.get(id) for id in ids] == [PASS] * 3


@pytest.mark.parametrize(
    ("name", "id", "text"),
    [
        ("squared_forgotten", "temperature_squared", "T^2 = 4"),
        ("squared_forgotten_by_hand", "temperature_squared", "T^2 = 4"),
        ("over_positions", "divergence_axis", "over 13 positions, not over the 23 classes"),
        ("teacher_over_positions", "divergence_axis", "sum to 1 over the positions"),
        ("mean_of_all", "divergence_mean", "23 times too small"),
        ("mean_of_rows", "divergence_mean", "it has 13 times its weight"),
        ("mean_of_all_by_hand", "divergence_mean", "23 times too small"),
        ("itself", "teacher_is_student", "the same probabilities"),
        ("itself_by_hand", "teacher_is_student", "the same probabilities"),
        ("itself_mixed", "teacher_is_student", "the same probabilities"),
        ("teacher_in_train_mode", "teacher_mode", "it is random"),
        ("teacher_in_train_mode_again", "teacher_mode", "it is random"),
        ("teacher_inside_in_train_mode", "teacher_mode", "it is random"),
        ("teacher_of_an_earlier_stage", "teacher_mode", "it is random"),
    ],
)
def test_a_wrong_distillation_is_named(found: Found, name: str, id: str, text: str) -> None:
    named = [one for one in found[name] if one["level"] == SUSPICION]
    assert [one["id"] for one in named] == [id]
    assert text in named[0]["text"]


def test_the_story_is_named_in_its_first_steps(found: Found) -> None:
    named = {line["id"]: line["step"] for line in found["story"] if line["level"] == SUSPICION}
    assert named == {"rows_left_out": 1, "teacher_is_student": 3}
