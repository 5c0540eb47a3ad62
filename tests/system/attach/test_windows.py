"""Accumulation windows that the end of the data cuts short: each way to lose one is named, in two styles of code."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import FACT, PASS, SUSPICION
from tests.support.attached import run_twice
from tests.system.attach.test_identities import SETUP, Found, degrees, of_script

SCRIPT = """
from torch.utils.data import DataLoader, TensorDataset

def loader(batches, **settings):
    x, y = data(2 * batches)
    return DataLoader(TensorDataset(x, y), batch_size=2, **settings)

def mse(net, x, y):
    return (net(x) - y).square().mean()

def loop(batches, epochs=4, window=4, last=False, begin=lambda optimizer: None, kind=torch.optim.AdamW):
    net = model()
    optimizer = kind(net.parameters(), lr=0.01)
    for _ in range(epochs):
        begin(optimizer)
        for at, (x, y) in enumerate(loader(batches), 1):
            (mse(net, x, y) / window).backward()
            if at % window == 0 or (last and at == batches):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return net

class Trainer:
    window = 3

    def __init__(self, batches):
        self.net, self.batches, self.waiting = nn.Linear(8, 1), batches, 0
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def forget(self):
        self.waiting = 0
        for p in self.net.parameters():
            p.grad = None

    def micro(self, x, y):
        torch.autograd.backward([nn.functional.mse_loss(self.net(x), y, reduction="sum") / 6])
        self.waiting += 1
        if self.waiting == self.window:
            self.optimizer.step()
            self.forget()

    def epoch(self):
        for x, y in loader(self.batches, shuffle=True):
            self.micro(x, y)

    def run(self, epochs):
        for _ in range(epochs):
            self.epoch()
        return self.net

# The rest of a window becomes part of the next.

def a_rest_that_goes_on():
    return loop(10)

class CountsAnew(Trainer):
    def epoch(self):
        self.waiting = 0
        super().epoch()

def a_trainer_that_counts_anew():
    return CountsAnew(7).run(4)

# The rest of a window is dropped.

def zeroed_in_front_of_each_epoch():
    return loop(10, begin=lambda optimizer: optimizer.zero_grad())

class ForgetsTheRest(Trainer):
    def epoch(self):
        self.forget()
        super().epoch()

def a_trainer_that_forgets_the_rest():
    return ForgetsTheRest(11).run(4)

# The training ends within a window.

def one_epoch_that_ends_within_a_window():
    return loop(22, epochs=1)

def a_trainer_without_a_loader_that_ends_within_a_window():
    trainer = Trainer(0)
    for number in range(14):
        trainer.micro(x[number:number + 2], y[number:number + 2])
    return trainer.net

# Their healthy twins.

def windows_that_fit():
    return loop(12)

def the_last_window_is_stepped():
    return loop(10, last=True)

def the_last_window_is_divided_by_its_own_number():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(4):
        batches = list(loader(10))
        for begin in range(0, 10, 4):
            window = batches[begin:begin + 4]
            for x, y in window:
                (mse(net, x, y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net

def windows_that_go_on_over_epochs():
    return Trainer(10).run(3)

def one_pass_each():
    return loop(5, window=1)

def a_window_that_grows():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for window in (2, 2, 2, 2, 3, 3, 3):
        for x, y in loader(window):
            (mse(net, x, y) / window).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

def zeroed_in_place():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=False)
        for x, y in loader(3):
            (mse(net, x, y) / 3).backward()
        optimizer.step()
    return net

def a_gan_that_accumulates():
    generator, judge = nn.Linear(8, 1), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, judge)]
    for number in range(6):
        for _ in range(4):
            # The passes of the generator, which reach the judge too, are not to be the judge's.
            optimizers[1].zero_grad()
            for x, y in loader(4):
                (judge(generator(x).detach()).mean() - judge(y).mean()).backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        (-judge(generator(x)).mean()).backward()
        optimizers[0].step()
    return nn.ModuleList([generator, judge])

def zeroed_in_front_of_each_pass():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(12):
        for x, y in loader(1):
            net.zero_grad()
            mse(net, x, y).div(3).backward()
        if number % 3 == 2:
            optimizer.step()
    return net

def sam_that_accumulates():
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        for x, y in loader(2):
            (mse(net, x, y) / 2).backward()
        moves = [0.05 * p.grad for p in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), moves)
        optimizer.zero_grad()
        for x, y in loader(3):
            (mse(net, x, y) / 3).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
    return net

def steps_that_a_scaler_leaves_out():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(9):
        for x, y in loader(2):
            scaler.scale(mse(net, x, y) * (float("inf") if number == 5 else 0.5)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net

def two_optimizers_of_one_loss():
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in net]
    for _ in range(6):
        for x, y in loader(3):
            (mse(net, x, y) / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()
    return net

def sparse_gradients():
    net = nn.Embedding(16, 1, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        for ids in torch.arange(16).split(4):
            net(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

tell(a_rest_that_goes_on, a_trainer_that_counts_anew, zeroed_in_front_of_each_epoch, a_trainer_that_forgets_the_rest,
     one_epoch_that_ends_within_a_window, windows_that_fit,
     the_last_window_is_stepped, the_last_window_is_divided_by_its_own_number,
     windows_that_go_on_over_epochs, one_pass_each, a_window_that_grows, zeroed_in_place,
     zeroed_in_front_of_each_pass,
     a_gan_that_accumulates, sam_that_accumulates, steps_that_a_scaler_leaves_out, two_optimizers_of_one_loss,
     sparse_gradients,
     # It ends with the process.
     a_trainer_without_a_loader_that_ends_within_a_window)
"""


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SETUP + SCRIPT)


@pytest.fixture
def windows(loop_programs: Found) -> Found:
    return of_script(loop_programs, SCRIPT)


WRONG = {
    "a_rest_that_goes_on": (
        "of AdamW took the gradients of 6 backward passes, where others take those of 4",
        2,
        4,
    ),
    "zeroed_in_front_of_each_pass": ("takes the gradients of 1 of 3 backward passes", 1, 3),
    "a_trainer_that_counts_anew": ("took the gradients of 4 backward passes", 1, 3),
    "zeroed_in_front_of_each_epoch": ("of 2 backward passes before step", 2, 4),
    "a_trainer_that_forgets_the_rest": ("of 2 backward passes before step", 2, 3),
    "one_epoch_that_ends_within_a_window": ("the training ended with the gradients of 2", 2, 4),
    "a_trainer_without_a_loader_that_ends_within_a_window": ("the training ended with", 2, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_window_that_the_end_of_the_data_cuts_is_suspected(windows: Found, name: str) -> None:
    text, passes, window = WRONG[name]
    (line,) = [line for line in windows[name] if line["level"] == SUSPICION]
    assert line["id"] == "accumulation_windows" and text in line["text"]
    assert line["numbers"] == {"passes": passes, "window": window}


def test_whole_windows_and_passes_that_are_not_a_windows_are_not_suspected(windows: Found) -> None:
    for name, lines in windows.items():
        if name not in WRONG:
            found = [line for line in lines if line["id"] == "accumulation_windows"]
            assert {line["level"] for line in found} <= {PASS}, name
    for name in ("windows_that_fit", "the_last_window_is_stepped", "one_pass_each"):
        assert degrees(windows[name], "accumulation_windows") == [PASS], name


def test_a_last_window_that_is_divided_as_a_whole_one_is_a_fact(windows: Found) -> None:
    facts = [line for line in windows["the_last_window_is_stepped"] if line["level"] == FACT]
    (text,) = [line["text"] for line in facts if line["id"] == "accumulated_mean"]
    assert "sums the gradients of 2 losses, and each is divided by 4 as in a whole window" in text
    for name in ("the_last_window_is_divided_by_its_own_number", "windows_that_go_on_over_epochs"):
        assert FACT not in degrees(windows[name], "accumulated_mean"), name
