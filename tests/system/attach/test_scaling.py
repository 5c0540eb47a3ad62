"""What multiplies gradients between a loss and the step, and what writes weights beside it: each mistake in two styles
of code, and healthy ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import FACT, PASS, SUSPICION
from tests.support.attached import run_twice
from tests.system.attach.test_identities import SETUP, Found, degrees, of_script

SCRIPT = """
from torch.utils.data import DataLoader, TensorDataset

def loader(batches=24):
    x, y = data(2 * batches)
    return DataLoader(TensorDataset(x, y), batch_size=2)

def mse(net, x, y):
    return (net(x) - y).square().mean()

def loop(window=1, divide=lambda loss, window: loss / window, front=None, behind=None, kind=torch.optim.AdamW,
         loss=mse):
    net = model()
    optimizer = kind(net.parameters(), lr=0.01)
    for at, (x, y) in enumerate(loader(), 1):
        divide(loss(net, x, y), window).backward()
        if at % window == 0:
            if front:
                front(net.parameters())
            optimizer.step()
            if behind:
                behind(net.parameters())
            optimizer.zero_grad()
    return net

def clip(parameters):
    nn.utils.clip_grad_norm_(list(parameters), 0.1)

def scaled(window=1, unscale=True, init_scale=1024.0, clip=clip):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for at, (x, y) in enumerate(loader(), 1):
        scaler.scale(mse(net, x, y) / window).backward()
        if at % window:
            continue
        if unscale:
            scaler.unscale_(optimizer)
        clip(net.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net

# Clipping.

def clipped_behind_the_step():
    return loop(behind=clip)

class Trainer:
    def __init__(self):
        self.net = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def forward_backward(self, x, y, window):
        torch.autograd.backward([nn.functional.mse_loss(self.net(x), y) * (1 / window)])

    def update(self):
        self.optimizer.step()

    def run(self, window=1):
        for at, (x, y) in enumerate(loader(), 1):
            self.forward_backward(x, y, window)
            if at % window == 0:
                self.update()
                self.net.zero_grad(set_to_none=False)
        return self.net

class ClipsLate(Trainer):
    def update(self):
        super().update()
        torch.nn.utils.clip_grad_norm_(parameters=self.net.parameters(), max_norm=1.0, norm_type=1.0)

def a_trainer_that_clips_late():
    return ClipsLate().run()

def clipped_with_the_scale():
    return scaled(unscale=False)

def clipped_with_the_scale_over_windows():
    return scaled(unscale=False, window=3)

def by_norm(parameters, most=0.1):
    with torch.no_grad():
        gradients = [one.grad for one in parameters]
        norm = torch.sqrt(sum((one * one).sum() for one in gradients))
        for one in gradients:
            one.mul_(min(1.0, most / float(norm)))

def clipped_by_hand_once_unscaled():
    return scaled(clip=by_norm)

def clipped_in_front():
    return loop(front=clip)

def clipped_once_unscaled():
    return scaled(window=2)

def looked_at_behind_the_step():
    # Not clipped: this is how a norm is logged.
    return loop(behind=lambda parameters: nn.utils.clip_grad_norm_(list(parameters), float("inf")))

def two_optimizers_that_clip_in_turn():
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in net]
    for x, y in loader():
        mse(net, x, y).backward()
        for layer, optimizer in zip(net, optimizers):
            clip(layer.parameters())
            optimizer.step()
        net.zero_grad()
    return net

# Sums of several batches.

def divided_twice():
    return loop(4, lambda loss, window: loss / window / window)

class DividesAgain(Trainer):
    def forward_backward(self, x, y, window):
        super().forward_backward(x, y, window * window)

def a_trainer_that_divides_in_two_places():
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for at, (x, y) in enumerate(loader(), 1):
        loss = nn.SmoothL1Loss()(net(x), y) * (1 / 3)
        (loss / 3).backward()
        if at % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net

def never_divided():
    return loop(4, lambda loss, window: loss)

def never_divided_in_a_trainer():
    class Sums(Trainer):
        def forward_backward(self, x, y, window):
            nn.functional.huber_loss(self.net(x), y).backward()
    return Sums().run(3)

def divided_by_another_number():
    return loop(4, lambda loss, window: loss / 2)

def divided_once():
    return loop(4)

def short_windows_at_the_ends_of_epochs():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    # Steps 4 and 8, which are looked at, take three batches.
    for _ in range(3):
        for at, (x, y) in enumerate(loader(15), 1):
            (mse(net, x, y) / 4).backward()
            if at % 4 == 0 or at == 15:
                optimizer.step()
                optimizer.zero_grad()
    return net

def means_of_unlike_sizes():
    turns = iter([1, 2] * 12)
    def loss(net, x, y):
        rows = next(turns)
        return mse(net, x[:rows], y[:rows])
    return loop(window=4, loss=loss)

def means_of_unlike_numbers_of_labels():
    turns = iter([1, 2] * 12)
    def loss(net, x, y):
        labels = torch.tensor([0, 0 if next(turns) > 1 else -100])
        return nn.functional.cross_entropy(net(x) * torch.tensor([1.0, -1.0]), labels)
    return loop(window=4, loss=loss)

def divided_once_in_a_trainer():
    return Trainer().run(3)

def sums_over_all_tokens():
    return loop(4, lambda loss, window: loss, loss=lambda net, x, y: (net(x) - y).square().sum() / 8)

def two_losses_of_each_batch():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in loader():
        mse(net, x, y).backward()
        (0.1 * net(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

# fp16.

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x).half()).float())

def half(scaler=None, by_hand=1.0):
    net = Half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in loader():
        loss = mse(net, x, y)
        if scaler is None:
            (loss * by_hand).backward()
            torch._foreach_div_([p.grad for p in net.parameters()], by_hand)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return net

def fp16_without_a_scale():
    return half()

def autocast_to_fp16_without_a_scale():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in loader():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(net, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

def fp16_with_a_scaler():
    return half(torch.amp.GradScaler("cpu", init_scale=64.0))

def fp16_scaled_by_hand():
    return half(by_hand=128.0)

# Weights.

def decayed_by_hand():
    def decay(parameters):
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9999)
    return loop(behind=decay)

def restored_each_time():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    old = {name: one.clone() for name, one in net.state_dict().items()}
    for x, y in loader():
        net.load_state_dict(old)
        optimizer.zero_grad()
        mse(net, x, y).backward()
        optimizer.step()
    return net

def a_hook_that_writes_nothing():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    for x, y in loader():
        optimizer.zero_grad()
        mse(net, x, y).backward()
        optimizer.step()
    return net

def averages_for_an_evaluation():
    net, average = model(), model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in loader():
        optimizer.zero_grad()
        mse(net, x, y).backward()
        optimizer.step()
        torch._foreach_lerp_([p.data for p in average.parameters()], [p.data for p in net.parameters()], 0.1)
        mine = {name: one.clone() for name, one in net.state_dict().items()}
        net.load_state_dict(average.state_dict())
        net.load_state_dict(mine)
    return net

def sharpness_aware():
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader():
        optimizer.zero_grad()
        mse(net, x, y).backward()
        moves = [0.05 * p.grad for p in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), moves)
        optimizer.zero_grad()
        mse(net, x, y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        optimizer.step()
    return net

class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base, self.param_groups, self.number = base, base.param_groups, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.base.step()
        self.number += 1
        fast = [p.data for group in self.param_groups for p in group["params"]]
        torch._foreach_lerp_(self.slow, fast, 0.5)
        torch._foreach_copy_(fast, self.slow)

def an_optimizer_around_another():
    net = model()
    optimizer = Lookahead(torch.optim.AdamW(net.parameters(), lr=0.01))
    for x, y in loader():
        optimizer.zero_grad()
        mse(net, x, y).backward()
        optimizer.step()
    return net

def two_optimizers_of_one_body():
    body, heads = nn.Linear(8, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizers = [torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.01) for head in heads]
    for x, y in loader():
        for head, optimizer in zip(heads, optimizers):
            optimizer.zero_grad()
            (head(body(x)) - y).square().mean().backward()
            optimizer.step()
    return nn.ModuleList([body, heads])

tell(means_of_unlike_sizes, short_windows_at_the_ends_of_epochs, means_of_unlike_numbers_of_labels,
     clipped_behind_the_step, a_trainer_that_clips_late, clipped_with_the_scale, clipped_with_the_scale_over_windows,
     clipped_by_hand_once_unscaled, clipped_in_front, clipped_once_unscaled, looked_at_behind_the_step,
     two_optimizers_that_clip_in_turn,
     divided_twice, a_trainer_that_divides_in_two_places, never_divided, never_divided_in_a_trainer,
     divided_by_another_number, divided_once, divided_once_in_a_trainer, sums_over_all_tokens, two_losses_of_each_batch,
     fp16_without_a_scale, autocast_to_fp16_without_a_scale, fp16_with_a_scaler, fp16_scaled_by_hand,
     decayed_by_hand, restored_each_time, a_hook_that_writes_nothing, averages_for_an_evaluation,
     sharpness_aware, an_optimizer_around_another, two_optimizers_of_one_body)
"""


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SETUP + SCRIPT)


@pytest.fixture
def found(loop_programs: Found) -> Found:
    return of_script(loop_programs, SCRIPT)


WRONG = {
    "clipped_behind_the_step": ("clipping", "clipped after steps 1 and 2 of AdamW"),
    "a_trainer_that_clips_late": ("clipping", "clipped after steps 1 and 2 of SGD"),
    "clipped_with_the_scale": ("clipping", "still have the loss scale"),
    "clipped_with_the_scale_over_windows": ("clipping", "still have the loss scale"),
    "divided_twice": ("accumulated_mean", "divided by 4 2 times: the gradients are 4 times"),
    "a_trainer_that_divides_in_two_places": ("accumulated_mean", "divided by 3 2 times"),
    "never_divided": ("accumulated_mean", "sums the gradients of 4 losses, each a mean"),
    "never_divided_in_a_trainer": ("accumulated_mean", "sums the gradients of 3 losses"),
    "divided_by_another_number": ("accumulated_mean", "divided by 2, and a step of AdamW sums"),
    "fp16_without_a_scale": ("loss_scale", "nothing scales the loss"),
    "autocast_to_fp16_without_a_scale": ("loss_scale", "nothing scales the loss"),
    "decayed_by_hand": (
        "outside_writes",
        "between steps 1 and 2 of AdamW something else wrote its weights",
    ),
    "restored_each_time": (
        "outside_writes",
        "between steps 1 and 2 of SGD something else wrote its weights",
    ),
}
HEALTHY: dict[str, dict[str, str]] = {
    "clipped_in_front": {"clipping": PASS},
    "clipped_once_unscaled": {"clipping": PASS},
    "clipped_by_hand_once_unscaled": {},
    "looked_at_behind_the_step": {},
    "two_optimizers_that_clip_in_turn": {"clipping": PASS},
    "divided_once": {"accumulated_mean": PASS},
    "divided_once_in_a_trainer": {"accumulated_mean": PASS},
    "short_windows_at_the_ends_of_epochs": {"accumulated_mean": FACT},
    "means_of_unlike_sizes": {"accumulated_mean": FACT},
    "means_of_unlike_numbers_of_labels": {"accumulated_mean": FACT},
    "sums_over_all_tokens": {},
    "two_losses_of_each_batch": {},
    "fp16_with_a_scaler": {"loss_scale": PASS},
    "fp16_scaled_by_hand": {"loss_scale": PASS},
    "a_hook_that_writes_nothing": {},
    "averages_for_an_evaluation": {},
    "sharpness_aware": {},
    "an_optimizer_around_another": {},
    "two_optimizers_of_one_body": {},
}
IDS = ("clipping", "accumulated_mean", "loss_scale", "outside_writes")


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(found: Found, name: str) -> None:
    id, text = WRONG[name]
    said = [line for line in found[name] if line["id"] in IDS and line["level"] == SUSPICION]
    assert [line["id"] for line in said] == [id], found[name]
    assert text in said[0]["text"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_one_is_not(found: Found, name: str) -> None:
    all_of = {id: said for id in IDS if (said := degrees(found[name], id))}
    assert all(level in (PASS, FACT) for said in all_of.values() for level in said)
    seen = {id: said[-1] for id, said in all_of.items() if (id, said) != ("outside_writes", [PASS])}
    assert seen == HEALTHY[name]
