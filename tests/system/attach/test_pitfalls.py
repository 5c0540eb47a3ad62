"""Schedules that do not go with the steps, mistakes next to any loss, evaluations of what is trained on: each in two
styles of code, and healthy programs that look alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import FACT, PASS, SUSPICION
from tests.support.attached import run_twice, run_watched
from tests.system.attach.test_identities import SETUP, Found, degrees, of_script

SCRIPT = """
import warnings
# Some of it torch says too, with the path of the script.
warnings.simplefilter("ignore")
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
schedules = torch.optim.lr_scheduler
classes = torch.arange(96) // 32

def fit(loss, net=None, steps=10, each=lambda optimizer: (lambda at: None), shuffle=True, y=None):
    net = net or model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, targets = data(96)
    targets = targets if y is None else y
    behind = each(optimizer)
    rows = DataLoader(TensorDataset(x, targets), batch_size=8, shuffle=shuffle)
    for at, (x, y) in zip(range(steps), rows):
        optimizer.zero_grad()
        loss(net, x, y).backward()
        optimizer.step()
        behind(at)
    return net

def mse(net, x, y):
    return F.mse_loss(net(x), y)

# Schedules.

def with_schedule(make, times=lambda at: 1):
    def each(optimizer):
        schedule = make(optimizer)
        return lambda at: [schedule.step() for _ in range(times(at))]
    return fit(mse, each=each)

def called_twice():
    return with_schedule(lambda optimizer: schedules.StepLR(optimizer, 1000), lambda at: 2)

def called_for_each_micro_batch():
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = schedules.LambdaLR(optimizer, lambda at: 1 / (1 + at))
    for at, (x, y) in enumerate(zip(*(one.split(4) for one in data(96)))):
        mse(net, x, y).backward()
        schedule.step()
        if at % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return net

def a_cosine_past_its_end():
    return with_schedule(lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=5))

def a_rate_that_comes_to_nothing():
    return with_schedule(lambda optimizer: schedules.LinearLR(optimizer, 1.0, 0.0, total_iters=3))

def a_rate_that_comes_to_next_to_nothing():
    return with_schedule(lambda optimizer: schedules.LinearLR(optimizer, 1.0, 1e-12, total_iters=3))

def a_rate_of_nothing_by_hand():
    def each(optimizer):
        return lambda at: [group.update(lr=0.0) for group in optimizer.param_groups]
    return fit(mse, each=each)

def called_for_each_epoch_and_as_long_as_all_steps():
    return with_schedule(lambda optimizer: schedules.CosineAnnealingLR(optimizer, 10), lambda at: at % 5 == 4)

def called_once():
    return with_schedule(lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=10))

def called_for_each_epoch():
    return with_schedule(lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=5), lambda at: at % 5 == 4)

def a_chain_of_schedules():
    return with_schedule(lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, 1.0, 3), schedules.CosineAnnealingLR(optimizer, 20)], [3]))

def on_a_plateau():
    def each(optimizer):
        schedule = schedules.ReduceLROnPlateau(optimizer)
        return lambda at: schedule.step(1.0)
    return fit(mse, each=each)

# Shapes.

def flat(net, x, y):
    return F.mse_loss(net(x), y[:, 0])

def all_pairs():
    return fit(flat)

def all_pairs_by_hand():
    return fit(lambda net, x, y: (y.squeeze(1) - net(x)).pow(2).sum() / 64, nn.Linear(8, 1))

def all_pairs_of_a_robust_loss():
    return fit(lambda net, x, y: nn.SmoothL1Loss()(net(x)[:, 0], y), nn.Linear(8, 1))

def one_target_each():
    return fit(mse)

def one_embedding_for_all():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = nn.Parameter(torch.zeros(1, 8))
        def forward(self, x):
            return self.of
    return fit(lambda net, x, y: F.mse_loss(net(x).expand(8, 8), x), One())

def distances_of_all_pairs():
    return fit(lambda net, x, y: (net(x) - net(x).T - (y - y.T)).square().mean(), nn.Linear(8, 1))

# Logits and classes.

def three(*more):
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), *more)

def classify(net, x, y):
    return F.cross_entropy(net(x), y)

def a_sum_of_losses():
    def loss(net, x, y):
        return (torch.zeros(()) + classify(net, x, y) + 0.3 * classify(net, x + 1, y)) / 2 - 0.0
    return fit(loss, three(), y=classes)

def the_same_number_in_each_loss():
    return fit(lambda net, x, y: classify(net, x, y) + 3.0, three(), y=classes)

def a_term_of_another_kind():
    return fit(lambda net, x, y: classify(net, x, y) + net(x).square().mean(), three(), y=classes)

def two_optimizers(in_turns):
    net = nn.Linear(8, 1)
    both = torch.optim.SGD(net.parameters(), lr=0.01), torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in zip(*(one.split(8) for one in data(64))):
        for one in both:
            one.zero_grad()
        mse(net, x, y).backward()
        both[0].step()
        if in_turns:
            both[1].zero_grad()
            mse(net, x, y).backward()
        both[1].step()
    return net

def a_layer_with_two_optimizers():
    return two_optimizers(False)

def two_optimizers_in_turns():
    return two_optimizers(True)

def a_relu_behind_the_last_layer():
    return fit(classify, three(nn.ReLU()), y=classes)

def a_sigmoid_in_front_of_its_own():
    return fit(lambda net, x, y: F.binary_cross_entropy_with_logits(net(x).sigmoid()[:, 0], (y > 0).float()),
               nn.Linear(8, 1), y=classes)

def sorted_by_class():
    return fit(classify, three(), shuffle=False, y=classes)

def decays(of_matrices, of_vectors):
    net = three()
    rates = {True: of_matrices, False: of_vectors}
    groups = [{"params": [p for p in net.parameters() if (p.dim() > 1) is kind], "weight_decay": rate}
              for kind, rate in rates.items()]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    x, _ = data(96)
    for number in range(3):
        optimizer.zero_grad()
        classify(net, x, classes).backward()
        optimizer.step()
    return net

def decay_of_biases_alone():
    return decays(0.0, 0.1)

def decay_of_matrices():
    return decays(0.1, 0.0)

def no_decay():
    return decays(0.0, 0.0)

def the_first_class_is_always_right():
    # As in contrastive losses, whose first logit is that of the pair.
    return fit(classify, three(), y=classes * 0)

def never_called():
    return with_schedule(lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=10), lambda at: 0)

def statistics_of_the_training_data():
    # As torch.optim.swa_utils.update_bn.
    def look(net, loader):
        with torch.no_grad():
            for x, _ in loader:
                net(x)
    return looked_at(look)

def all_are_scored_and_some_are_trained_on():
    return evaluated(parts[0], samples)

class Reader(torch.utils.data.IterableDataset):
    def __iter__(self):
        x, _ = data(96)
        yield from zip(x, classes)

def a_stream_that_is_sorted():
    net = three()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for at, (x, y) in zip(range(5), DataLoader(Reader(), batch_size=16)):
        optimizer.zero_grad()
        logs = net(x).log_softmax(1)
        nn.NLLLoss()(logs, y % 3 * 0 + (at > 2)).backward()
        optimizer.step()
    return net

def classes_that_are_mixed():
    return fit(classify, three(), y=classes)

def classes_in_bytes():
    return fit(lambda net, x, y: F.nll_loss(net(x).log_softmax(1), y.byte()), three(), y=classes)

def softly_capped():
    class Capped(nn.Module):
        def forward(self, x):
            return 30 * torch.tanh(x / 30)
    return fit(classify, three(Capped()), y=classes)

# Evaluations.

def evaluated(training, *evaluations, rounds=2):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(rounds):
        for x, y in DataLoader(training, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            mse(net.train(), x, y).backward()
            optimizer.step()
        with torch.no_grad():
            for one in evaluations:
                for x, y in DataLoader(one, batch_size=16):
                    mse(net.eval(), x, y)
    return net

samples = TensorDataset(*data(96))
parts = [torch.utils.data.Subset(samples, range(begin, begin + 48)) for begin in (0, 48)]

def evaluated_on_what_it_trains_on():
    return evaluated(parts[0], parts[0])

def split_after_it_was_repeated():
    x, y = data(40)
    twice = TensorDataset(x.repeat(2, 1), y.repeat(2, 1))
    order = [at * 7 % 80 for at in range(80)]
    mixed = [torch.utils.data.Subset(twice, one) for one in (order[:56], order[56:])]
    return evaluated(*mixed, rounds=1)

def evaluated_on_the_other_part():
    return evaluated(*parts)

def evaluated_on_both_parts():
    return evaluated(parts[0], *parts)

def looked_at(look):
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(samples, batch_size=16, shuffle=True)
    for _ in range(3):
        look(net, loader)
        for x, y in loader:
            optimizer.zero_grad()
            mse(net, x, y).backward()
            optimizer.step()
    return net

def a_first_batch_is_printed():
    return looked_at(lambda net, loader: next(iter(loader)))

def a_first_batch_is_predicted():
    def look(net, loader):
        with torch.no_grad():
            net(next(iter(loader))[0])
    return looked_at(look)

def all_batches_are_averaged():
    return looked_at(lambda net, loader: sum(x.mean() for x, _ in loader))

tell(decay_of_biases_alone, decay_of_matrices, no_decay, called_for_each_epoch_and_as_long_as_all_steps,
     a_first_batch_is_printed, a_first_batch_is_predicted, all_batches_are_averaged,
     evaluated_on_what_it_trains_on, split_after_it_was_repeated, evaluated_on_the_other_part, evaluated_on_both_parts,
     called_twice, called_for_each_micro_batch, a_cosine_past_its_end, a_rate_that_comes_to_nothing,
     a_rate_that_comes_to_next_to_nothing,
     a_rate_of_nothing_by_hand, called_once, called_for_each_epoch,
     a_chain_of_schedules, on_a_plateau,
     all_pairs, all_pairs_by_hand, all_pairs_of_a_robust_loss, one_target_each, one_embedding_for_all,
     distances_of_all_pairs,
     the_first_class_is_always_right, never_called, statistics_of_the_training_data,
     all_are_scored_and_some_are_trained_on,
     a_relu_behind_the_last_layer, a_sigmoid_in_front_of_its_own, sorted_by_class, a_stream_that_is_sorted,
     classes_that_are_mixed, classes_in_bytes, softly_capped,
     a_sum_of_losses, the_same_number_in_each_loss, a_term_of_another_kind,
     a_layer_with_two_optimizers, two_optimizers_in_turns)
"""


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SETUP + SCRIPT)


@pytest.fixture
def found(loop_programs: Found) -> Found:
    return of_script(loop_programs, SCRIPT)


WRONG = {
    "called_for_each_epoch_and_as_long_as_all_steps": (
        "schedule",
        "CosineAnnealingLR is made for 10 calls, as many as there were steps, and had 1 before",
    ),
    "decay_of_biases_alone": ("decay_groups", "for biases and norms alone"),
    "never_called": (
        "schedule",
        "OneCycleLR is made for 10 calls, as many as there were steps, and had 0",
    ),
    "called_twice": ("schedule", "StepLR is called 2 times for each step"),
    "called_for_each_micro_batch": ("schedule", "LambdaLR is called 3 times for each step"),
    "a_cosine_past_its_end": ("schedule", "past its T_max of 5"),
    "a_rate_that_comes_to_nothing": (
        "schedule",
        "the learning rate of AdamW is 0 at step 8, as at step 4",
    ),
    "a_rate_that_comes_to_next_to_nothing": (
        "schedule",
        "the learning rate of AdamW is 1e-14 at step 8, after 0.01",
    ),
    "a_rate_of_nothing_by_hand": (
        "schedule",
        "the learning rate of AdamW is 0 at step 8, as at step 4",
    ),
    "all_pairs": ("broadcast_loss", "8 predictions (8, 1) and their targets has the shape (8, 8)"),
    "all_pairs_by_hand": ("broadcast_loss", "8 predictions (8, 1)"),
    "all_pairs_of_a_robust_loss": ("broadcast_loss", "8 predictions (8,)"),
    "a_relu_behind_the_last_layer": ("bounded_logits", "come out of a ReLU"),
    "a_sigmoid_in_front_of_its_own": ("bounded_logits", "come out of a sigmoid"),
    "sorted_by_class": ("one_class", "all 8 of the last one are 1"),
    "evaluated_on_what_it_trains_on": ("held_out", "48 of 48 samples that an evaluation read"),
    "split_after_it_was_repeated": (
        "held_out",
        "samples that an evaluation read had been trained on",
    ),
    "a_stream_that_is_sorted": ("one_class", "all 16 of the last one are 1"),
}
CLASSES = {"bounded_logits": PASS, "one_class": PASS}
HEALTHY: dict[str, dict[str, str]] = {
    "called_once": {"schedule": PASS},
    "called_for_each_epoch": {},
    "a_chain_of_schedules": {},
    "on_a_plateau": {},
    "one_target_each": {},
    "one_embedding_for_all": {},
    "distances_of_all_pairs": {},
    "evaluated_on_the_other_part": {"held_out": PASS},
    "evaluated_on_both_parts": {"held_out": FACT},
    "a_first_batch_is_printed": {},
    "a_first_batch_is_predicted": {},
    "all_batches_are_averaged": {},
    "decay_of_matrices": CLASSES | {"decay_groups": PASS},
    "no_decay": CLASSES,
    "statistics_of_the_training_data": {},
    "all_are_scored_and_some_are_trained_on": {"held_out": FACT},
    "the_first_class_is_always_right": {"bounded_logits": PASS},
    "classes_that_are_mixed": CLASSES,
    "classes_in_bytes": CLASSES,
    "softly_capped": CLASSES,
    "a_sum_of_losses": CLASSES,
    "the_same_number_in_each_loss": CLASSES,
    "a_term_of_another_kind": CLASSES,
}
IDS = (*("held_out", "schedule", "broadcast_loss", "bounded_logits", "one_class", "decay_groups"),)


def test_an_evaluation_in_eval_mode_with_gradients_on_reads_what_was_trained_on(
    tmp_path: Path,
) -> None:
    script = """
def look(net, loader):
    net.eval()
    sum(mse(net, x, y).item() for x, y in loader)
    net.train()
looked_at(look)
"""
    ran = run_watched(tmp_path, SETUP + SCRIPT.partition("tell(")[0] + script)
    (line,) = [line for line in ran.lines if line.get("id") == "held_out"]
    assert line["level"] == SUSPICION
    assert "96 of 96 samples that an evaluation read" in line["text"]


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(found: Found, name: str) -> None:
    id, text = WRONG[name]
    said = [line for line in found[name] if line["id"] in IDS and line["level"] == SUSPICION]
    assert [line["id"] for line in said] == [id], found[name]
    assert text in said[0]["text"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_one_is_not(found: Found, name: str) -> None:
    seen = {id: said for id in IDS if (said := degrees(found[name], id))}
    if name not in ("decay_of_matrices", "no_decay"):
        seen.pop("decay_groups", None)
    # Whatever is tried here, a regression's predictions have the shape of their targets.
    if seen.get("broadcast_loss") == [PASS]:
        del seen["broadcast_loss"]
    assert seen == {id: [degree] for id, degree in HEALTHY[name].items()}


def test_predictions_of_the_shape_of_their_targets_are_a_pass(found: Found) -> None:
    assert degrees(found["one_target_each"], "broadcast_loss") == [PASS]
    assert degrees(found["one_embedding_for_all"], "broadcast_loss") == []


def test_gradients_that_two_optimizers_take_are_named(found: Found) -> None:
    lines = found["a_layer_with_two_optimizers"]
    said = [one for one in lines if one["id"] == "accumulation_windows"]
    assert any(
        one["level"] == SUSPICION
        and "2 parameters are held by SGD and by AdamW, and both step" in one["text"]
        for one in said
    )
    lines = found["two_optimizers_in_turns"]
    assert SUSPICION not in degrees(lines, "accumulation_windows")
