"""What the probe says of the training itself: each mistake is named, in two styles of code, and nothing healthy is."""

from __future__ import annotations

from typing import Any

import pytest

from engine.attach.identities import BY_ID, CONTRADICTION, DEGREES, PASS, UNKNOWN
from tests.support.attached import Ran, watched_once

SETUP = """
import copy
from torch import nn

def data(rows=16, width=8):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 1, generator=generator)

x, y = data()

def fit(net, optimizer, steps=5, after=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x.to(next(net.parameters()).dtype)) - y).square().mean().backward()
        optimizer.step()
        after()
    return net

def tell(*functions):
    # Each is a training; its name is said beside it.
    for function in functions:
        say(name=function.__name__)
        save(function())
"""


def outcomes(ran: Ran) -> dict[str, list[dict[str, Any]]]:
    """The lines of identities of each training, by the name that the script says; each has a row in the table."""
    names = [said["name"] for said in ran.said]
    found = {
        name: [line for line in lines if line["kind"] == "identity"]
        for name, lines in zip(names, ran.trainings, strict=True)
    }
    for lines in found.values():
        for line in lines:
            assert DEGREES.index(line["degree"]) <= max(
                DEGREES.index(BY_ID[line["id"]].degree), DEGREES.index(UNKNOWN)
            )
    for lines in ran.trainings:
        assert not [line for line in lines if line["kind"] == "note"]
    return found


def degrees(lines: list[dict[str, Any]], name: str) -> list[str]:
    return [line["degree"] for line in lines if line["id"] == name]


HEALTHY_UPDATES = """
optim = torch.optim

def adamw():
    net = model()
    return fit(net, optim.AdamW(net.parameters(), lr=0.1))

def adamw_in_groups():
    net = model()
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1]},
              {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3}]
    optimizer = optim.AdamW(groups, lr=0.1, weight_decay=0.5, betas=(0.8, 0.95), eps=1e-6, foreach=True)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return fit(net, optimizer, after=schedule.step)

def adamw_fused():
    net = model()
    return fit(net, optim.AdamW(net.parameters(), lr=0.1, fused=True))

def adam_with_decay():
    net = model()
    return fit(net, optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1))

def sgd():
    net = model()
    return fit(net, optim.SGD(net.parameters(), lr=0.1))

def sgd_with_momentum():
    net = model()
    return fit(net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1))

def nesterov():
    net = model()
    return fit(net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True))

def bf16():
    net = model().to(torch.bfloat16)
    return fit(net, optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1))

def a_closure():
    net = model()
    optimizer = optim.AdamW(net.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    return net

def clipping_in_a_hook():
    net = model()
    optimizer = optim.AdamW(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(net.parameters(), 0.1) and None)
    return fit(net, optimizer)

class Scaled(optim.AdamW):
    # A step of its own: nobody can know what it is meant to be.
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.999)

def a_subclass():
    net = model()
    return fit(net, Scaled(net.parameters(), lr=0.1))

def weights_moved_in_a_hook():
    net = model()
    optimizer = optim.AdamW(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in net.parameters()] and None)
    return fit(net, optimizer)

def amsgrad():
    net = model()
    return fit(net, optim.AdamW(net.parameters(), lr=0.1, amsgrad=True))

def in_shared_memory():
    net = model().share_memory()
    return fit(net, optim.SGD(net.parameters(), lr=0.1))

tell(adamw, adamw_in_groups, adamw_fused, adam_with_decay, sgd, sgd_with_momentum, nesterov, bf16, a_closure,
     clipping_in_a_hook, a_subclass, weights_moved_in_a_hook, amsgrad, in_shared_memory)
"""
UNSEEN = {"a_subclass", "weights_moved_in_a_hook", "amsgrad", "in_shared_memory"}

WRONG_UPDATES = """
of_adam, of_sgd = (sys.modules[f"torch.optim.{name}"] for name in ("adam", "sgd"))

def without_the_correction_of_the_moments():
    real = of_adam.adam

    def adam(*args, **kwargs):
        # The update of a step far on, in which the moments are no longer corrected.
        steps = args[5]
        torch._foreach_add_(steps, 10000.0)
        real(*args, **kwargs)
        torch._foreach_sub_(steps, 10000.0)

    of_adam.adam = adam
    try:
        net = model()
        return fit(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    finally:
        of_adam.adam = real

class Clamps:
    def __init__(self, function):
        self.function = function

    def __call__(self, params, *args, **kwargs):
        result = self.function(params, *args, **kwargs)
        for p in params:
            if p.shape == (16, 8):
                p[0].clamp_(-1e-3, 1e-3)
        return result

def a_row_that_is_written_elsewhere():
    function = of_sgd.sgd
    of_sgd.sgd = Clamps(function)
    try:
        net = nn.ModuleDict({"body": model()})
        return fit(net["body"], torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    finally:
        of_sgd.sgd = function

tell(without_the_correction_of_the_moments, a_row_that_is_written_elsewhere)
"""


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    script = SETUP + HEALTHY_UPDATES + WRONG_UPDATES
    return outcomes(watched_once(tmp_path_factory, "updates", script))


def test_updates_of_adamw_adam_and_sgd_are_the_textbooks(
    updates: dict[str, list[dict[str, Any]]],
) -> None:
    for name, lines in updates.items():
        if name not in UNSEEN | WRONG_NAMES:
            assert degrees(lines, "update") == [PASS], name
            (line,) = [line for line in lines if line["id"] == "update"]
            assert (line["numbers"]["parameters"], line["numbers"]["numbers"]) == (4, 161)
            assert line["step"] == 1 and 0 < line["numbers"]["largest"] <= 1


def test_an_update_that_has_no_textbook_is_unknown(
    updates: dict[str, list[dict[str, Any]]],
) -> None:
    for name in UNSEEN:
        assert degrees(updates[name], "update") == [UNKNOWN], name


WRONG_NAMES = {"without_the_correction_of_the_moments", "a_row_that_is_written_elsewhere"}


def test_weights_that_are_not_the_textbooks_update_are_named_with_both_values(
    updates: dict[str, list[dict[str, Any]]],
) -> None:
    for name in WRONG_NAMES:
        assert CONTRADICTION in degrees(updates[name], "update"), name
    (line,) = updates["without_the_correction_of_the_moments"]
    assert line["step"] == 1 and "0.weight: AdamW made " in line["text"]
    line = updates["a_row_that_is_written_elsewhere"][0]
    # The name is that of the outermost module, and one row of it is wrong.
    assert line["text"].startswith("body.0.weight: SGD made -0.00100000005 of -0.28")
    assert line["text"].endswith("so 8 of 128 numbers")
    assert line["numbers"]["wrong"] == 1
