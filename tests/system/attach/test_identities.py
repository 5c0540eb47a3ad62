"""What the probe says of the training itself: each mistake is named, in two styles of code, and nothing healthy is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.catalogue import BY_ID
from engine.log.events import FACT, FAIL, LEVELS, PASS, SUSPICION, UNKNOWN
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.attached import Ran, run_twice, run_watched, watched_once

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
        name: [line for line in lines if line.get("by") == "identity"]
        for name, lines in zip(names, ran.trainings, strict=True)
    }
    for lines in found.values():
        for line in lines:
            assert LEVELS.index(line["level"]) <= max(
                LEVELS.index(BY_ID["identity"][line["id"]].level), LEVELS.index(UNKNOWN)
            )
    for lines in ran.trainings:
        assert not [line for line in lines if line["kind"] == "note"]
    return found


def degrees(lines: list[dict[str, Any]], name: str) -> list[str]:
    return [line["level"] for line in lines if line["id"] == name]


Found = dict[str, list[dict[str, Any]]]


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


def of_script(found: Found, script: str) -> Found:
    return {name: lines for name, lines in found.items() if f"def {name}(" in script}


@pytest.fixture
def updates(plain_loops: Found) -> Found:
    return of_script(plain_loops, HEALTHY_UPDATES)


def test_optimizers_of_all_kinds_have_no_contradiction(updates: Found) -> None:
    assert degrees(updates["a_closure"], "kept_gradients") == [PASS]
    for name, lines in updates.items():
        assert not [line for line in lines if line["level"] == FAIL], name


PARAMETERS = """
class Loop:
    def __init__(self, net, make=torch.optim.AdamW, **settings):
        self.net, self.optimizer = net, make(net.parameters(), **settings)

    def run(self, steps=5):
        for _ in range(steps):
            self.step()
        return self.net

    def loss(self):
        return nn.functional.mse_loss(self.net(x), y)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward([self.loss()])
        self.optimizer.step()

def classifier():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

# Updates that vanish.

def bf16_at_a_small_rate():
    net = model().bfloat16()
    return fit(net, torch.optim.AdamW(net.parameters(), lr=1e-6))

class In16Bit(Loop):
    def loss(self):
        return (self.net(x.bfloat16()).float() - y).abs().mean()

def a_loop_in_16_bit_after_its_warm_up():
    loop = In16Bit(classifier().to(dtype=torch.bfloat16), torch.optim.Adam, lr=1e-6, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.5, total_iters=2)
    for _ in range(9):
        loop.step()
        schedule.step()
    return loop.net

def bf16_at_a_large_rate():
    net = model().bfloat16()
    return fit(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

def bf16_in_its_warm_up():
    net = model().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-4 * 10 ** min(step, 4))
    return fit(net, optimizer, steps=9, after=schedule.step)

def bf16_at_the_end_of_its_schedule():
    net = model().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    return fit(net, optimizer, steps=8, after=schedule.step)

def fp32_at_a_small_rate():
    net = model()
    return fit(net, torch.optim.AdamW(net.parameters(), lr=1e-6))

def autocast():
    loop = Loop(model(), lr=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loop.run()

# Parameters of the optimizer that are not the model's.

def a_copy_behind_the_optimizer():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net = copy.deepcopy(net)
    return fit(net, optimizer)

def a_head_replaced_behind_the_optimizer():
    loop = Loop(classifier(), torch.optim.SGD, lr=0.1)
    loop.net[2] = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
    return loop.run()

def a_head_replaced_in_front_of_the_optimizer():
    net = classifier()
    net[2] = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
    return Loop(net, torch.optim.SGD, lr=0.1).run()

def moved_behind_the_optimizer():
    # Its parameters stay the same objects.
    loop = Loop(classifier(), lr=0.1)
    loop.net.double().float()
    return loop.run()

# Gradients that are gone at the step.

def zeroed_between_backward_and_step():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        (net(x) - y).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()
    return net

class Forgets(Loop):
    def step(self):
        torch.autograd.backward([self.loss()])
        for p in self.net.parameters():
            p.grad = None
        self.optimizer.step()

def a_loop_that_removes_its_gradients():
    return Forgets(classifier(), torch.optim.RMSprop, lr=0.1).run()

def zeroed_behind_the_step():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net

# Gradients that nothing zeroes.

def never_zeroed():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net

def never_zeroed_beside_a_closure():
    # As with manual optimization in Lightning, which gives every step one.
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        (net(x) - y).square().mean().backward()
        optimizer.step(lambda: None)
    return net

class TwoOptimizers:
    def __init__(self, zeroes):
        self.net, self.zeroes = classifier(), zeroes
        self.optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
                           for layer in (self.net[0], self.net[2])]

    def run(self):
        for _ in range(5):
            for part in (0, 1):
                here = slice(8 * part, 8 * part + 8)
                torch.autograd.backward(nn.functional.mse_loss(self.net(x[here]), y[here]) / 2)
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers[:self.zeroes]:
                optimizer.zero_grad()
        return self.net

def one_of_two_is_zeroed():
    return TwoOptimizers(1).run()

def both_are_zeroed():
    return TwoOptimizers(2).run()

def zeroed_in_place():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=False)
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net

def two_losses_of_one_step_each():
    net = classifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        (net(x) + y).abs().mean().backward()
        optimizer.step()
    return net

def a_decaying_sum_of_gradients():
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.9)
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net

# Parameters of no optimizer, and such without a gradient.

def only_the_head_is_held():
    net = classifier()
    return fit(net, torch.optim.AdamW(net[2].parameters(), lr=0.1))

class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = [nn.Linear(8, 16), nn.Tanh()], nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

def layers_in_a_list():
    return Loop(InAList(), torch.optim.SGD, lr=0.1).run()

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        return self.used(self.body(x).relu())

def a_head_that_is_not_used():
    return Loop(TwoHeads(), lr=0.1).run()

class Cut(TwoHeads):
    def forward(self, x):
        return self.used(self.body(x).relu().detach()) + self.unused(self.body(x).data)

def a_body_that_is_cut_off():
    net = Cut()
    return fit(net, torch.optim.SGD(net.parameters(), lr=0.1))

tell(bf16_at_a_small_rate, a_loop_in_16_bit_after_its_warm_up, bf16_at_a_large_rate, bf16_in_its_warm_up,
     bf16_at_the_end_of_its_schedule, fp32_at_a_small_rate, autocast, a_copy_behind_the_optimizer,
     a_head_replaced_behind_the_optimizer, a_head_replaced_in_front_of_the_optimizer, moved_behind_the_optimizer,
     never_zeroed, never_zeroed_beside_a_closure, one_of_two_is_zeroed, both_are_zeroed, zeroed_in_place,
     two_losses_of_one_step_each,
     a_decaying_sum_of_gradients, zeroed_between_backward_and_step, a_loop_that_removes_its_gradients,
     zeroed_behind_the_step,
     only_the_head_is_held, layers_in_a_list, a_head_that_is_not_used, a_body_that_is_cut_off)
"""
WRONG = {
    "bf16_at_a_small_rate": ("vanishing_updates", 2, "of 161 16-bit weights"),
    "a_loop_in_16_bit_after_its_warm_up": ("vanishing_updates", 4, "at a learning rate of 1e-06"),
    "a_copy_behind_the_optimizer": ("stale_parameters", 3, "(0.bias, 0.weight, 3.bias, ...)"),
    "a_head_replaced_behind_the_optimizer": (
        "stale_parameters",
        3,
        "(group 0, parameter 2, group 0, parameter 3), and 4 that get gradients are in no optimizer (2.0.bias,",
    ),
    "never_zeroed": ("kept_gradients", 3, "the gradients of step 3 of AdamW still contain"),
    "never_zeroed_beside_a_closure": (
        "kept_gradients",
        3,
        "the gradients of step 3 of AdamW still contain",
    ),
    "one_of_two_is_zeroed": (
        "kept_gradients",
        3,
        "the gradients of step 3 of SGD still contain",
    ),
    "zeroed_between_backward_and_step": ("lost_gradients", 2, "of its 4 parameters"),
    "a_loop_that_removes_its_gradients": ("lost_gradients", 2, "RMSprop has stepped 2 times"),
}
SUSPECT = {
    "only_the_head_is_held": (
        "unowned_parameters",
        "2 parameters get gradients",
        "0.bias, 0.weight",
    ),
    "layers_in_a_list": ("unowned_parameters", "2 parameters get gradients", ": bias, weight"),
    "a_head_that_is_not_used": ("no_gradient", "2 of 6 parameters", "unused.weight, unused.bias"),
    "a_body_that_is_cut_off": ("no_gradient", "2 of 6 parameters", "body.weight, body.bias"),
}


@pytest.fixture
def parameters(plain_loops: Found) -> Found:
    return of_script(plain_loops, PARAMETERS)


def of_degree(lines: list[dict[str, Any]], degree: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["level"] == degree]


@pytest.mark.parametrize("name", WRONG)
def test_a_contradiction_names_what_is_wrong_and_where(parameters: Found, name: str) -> None:
    identity, step, text = WRONG[name]
    (line,) = of_degree(parameters[name], FAIL)
    assert (line["id"], line["step"]) == (identity, step)
    assert text in line["text"]


@pytest.mark.parametrize("name", SUSPECT)
def test_what_may_be_meant_is_a_suspicion(parameters: Found, name: str) -> None:
    identity, *texts = SUSPECT[name]
    (line,) = of_degree(parameters[name], SUSPICION)
    assert line["id"] == identity
    assert all(text in line["text"] for text in texts)
    assert not of_degree(parameters[name], FAIL)


def test_a_parameter_that_gets_its_gradient_later_takes_the_suspicion_back(tmp_path: Path) -> None:
    script = """
def used_now_and_then(every):
    body, head, late = nn.Linear(8, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters(), *late.parameters()])
    for step in range(24):
        hidden = body(x)
        (head(hidden) + (late(hidden) if step % every == every - 1 else 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

used_now_and_then(10)
used_now_and_then(100)
"""
    ran = run_watched(tmp_path, SETUP + script)
    said = [
        [(one["step"], one["level"]) for one in lines if one.get("id") == "no_gradient"]
        for lines in ran.trainings
    ]
    # Its steps 10 and 20 are not among the sampled ones.
    assert said == [[(3, SUSPICION), (10, PASS)], [(3, SUSPICION)]]
    levels = []
    for name in ("run", "run-2"):
        follower = Follower(RunFolder(ran.folder / name))
        follower.read_all()
        levels.append([one.level for one in follower.view.identities if one.id == "no_gradient"])
    assert levels == [[PASS], [SUSPICION]]


def test_parameters_that_get_no_gradient_are_not_passed_over(tmp_path: Path) -> None:
    script = """
from torch.utils.checkpoint import checkpoint

def without_a_trained_parameter():
    net = model().requires_grad_(False)
    optimizer, other = torch.optim.Adam(net.parameters()), model()
    for _ in range(4):
        (net(x) + other(x)).sum().backward()
        optimizer.step()

def checkpointed(reentrant):
    adapter, head = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*adapter.parameters(), *head.parameters()])
    for _ in range(4):
        optimizer.zero_grad()
        head(checkpoint(adapter, x, use_reentrant=reentrant)).sum().backward()
        optimizer.step()

without_a_trained_parameter()
checkpointed(False)
checkpointed(True)
"""
    ran = run_watched(tmp_path, SETUP + script)
    first, second, third = (
        [line for line in lines if line.get("id") == "no_gradient"] for lines in ran.trainings
    )
    assert [line["level"] for line in (*first, *second, *third)] == [SUSPICION, PASS, SUSPICION]
    assert "no parameter of Adam requires a gradient" in first[0]["text"]
    assert "no input of a checkpointed layer requires a gradient" in third[0]["text"]


def test_the_healthy_twin_of_each_says_nothing(parameters: Found) -> None:
    for name, lines in parameters.items():
        if name not in WRONG and name not in SUSPECT:
            facts = ("update_size", "vanishing_updates")
            levels = {line["level"] for line in lines if line["id"] not in facts}
            assert levels == {PASS}, name
            assert degrees(lines, "stale_parameters") == [PASS], name
            assert degrees(lines, "kept_gradients") == [PASS], name
    # Some of its weights have not changed.
    assert degrees(parameters["bf16_at_a_large_rate"], "vanishing_updates")[-1] == FACT
    assert not degrees(parameters["fp32_at_a_small_rate"], "vanishing_updates")


HEALTHY = """
Adam, SGD = torch.optim.Adam, torch.optim.SGD

def loss_of(net, x=x):
    return (net(x) - y).square().mean()

def gan():
    generator, judge = classifier(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_judge = Adam(generator.parameters(), lr=0.01), Adam(judge.parameters(), lr=0.01)
    for _ in range(8):
        fake = generator(x)
        of_judge.zero_grad()
        (judge(fake.detach()).mean() - judge(y).mean()).backward()
        of_judge.step()
        of_generator.zero_grad()
        (-judge(fake).mean()).backward()
        of_generator.step()
    return nn.ModuleList([generator, judge])

def gan_whose_judge_learns_now_and_then():
    generator, judge = classifier(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_judge = Adam(generator.parameters(), lr=0.01), Adam(judge.parameters(), lr=0.01)
    for number in range(9):
        of_generator.zero_grad()
        (-judge(generator(x)).mean()).backward()
        of_generator.step()
        if number % 3 == 2:
            of_judge.zero_grad()
            (judge(generator(x).detach()).mean() - judge(y).mean()).backward()
            of_judge.step()
    return nn.ModuleList([generator, judge])

def actor_and_critic():
    actor, critic = nn.Linear(8, 2), nn.Linear(8, 1)
    target = copy.deepcopy(critic)
    optimizer = Adam([*actor.parameters(), *critic.parameters()], lr=0.01)
    for _ in range(5):
        value = critic(x)
        policy = torch.distributions.Categorical(logits=actor(x))
        action = torch.arange(16) % 2
        # Nobody steps the target, and its gradient is dropped.
        advantage = y + 0.9 * target(x) - value
        loss = -(policy.log_prob(action) * advantage.detach().squeeze(1)).mean() + advantage.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        optimizer.step()
        for old, new in zip(target.parameters(), critic.parameters()):
            old.data.lerp_(new.data, 0.1)
    return nn.ModuleList([actor, critic])

def lbfgs():
    net = classifier()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return net

def ema():
    net = classifier()
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def move():
        for old, new in zip(average.parameters(), net.parameters()):
            old.lerp_(new.detach(), 0.1)

    return fit(net, optimizer, after=move)

class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))

def lora():
    net = classifier().requires_grad_(False)
    net[0] = Adapter(net[0])
    return fit(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01))

def lora_with_all_parameters_given():
    net = classifier().requires_grad_(False)
    net[0] = Adapter(net[0])
    return fit(net, torch.optim.AdamW(net.parameters(), lr=0.01))

def gradient_penalty():
    net = classifier()
    optimizer = Adam(net.parameters(), lr=0.01)
    for _ in range(5):
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(point).sum(), point, create_graph=True)
        optimizer.zero_grad()
        (loss_of(net) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return net

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])

    def forward(self, x):
        scores = self.gate(x).softmax(1)
        best = int(scores.mean(0).argmax())
        return scores[:, best:best + 1] * self.experts[best](x)

def unused_experts():
    net = Experts()
    return fit(net, Adam(net.parameters(), lr=0.01))

def carried_state():
    net = nn.RNN(8, 1, batch_first=True)
    optimizer = SGD(net.parameters(), lr=0.1)
    state = None
    for _ in range(5):
        out, state = net(x[:, None], state)
        optimizer.zero_grad()
        (out[:, 0] - y).square().mean().backward()
        optimizer.step()
        state = state.detach()
    return net

def sam():
    net = classifier()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(net).backward()
        moves = [0.05 * p.grad / (1e-12 + p.grad.norm()) for p in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), moves)
        optimizer.zero_grad()
        loss_of(net).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        optimizer.step()
    return net

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(0.9 * mean + 0.1 * p.grad))
                mean.lerp_(p.grad, 0.01)

def lion():
    net = classifier()
    return fit(net, Lion(net.parameters(), lr=0.01))

def accumulation():
    net = classifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(5):
        for part in range(8):
            here = slice(2 * part, 2 * part + 2)
            ((net(x[here]) - y[here]).square().mean() / 8).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return net

def forward_forward():
    layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
    optimizers = [Adam(layer.parameters(), lr=0.01) for layer in layers]
    for _ in range(5):
        good, bad = x, x.flip(1)
        for layer, optimizer in zip(layers, optimizers):
            good, bad = layer(good.detach()).relu(), layer(bad.detach()).relu()
            optimizer.zero_grad()
            nn.functional.softplus(bad.square().mean(1) - good.square().mean(1)).mean().backward()
            optimizer.step()
    return layers

def meta_learning():
    net = classifier()
    outer = Adam(net.parameters(), lr=0.01)
    for _ in range(5):
        fast = copy.deepcopy(net)
        for _ in range(2):
            loss_of(fast).backward()
            with torch.no_grad():
                for p in fast.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        for p, moved in zip(net.parameters(), fast.parameters()):
            p.grad = p.detach() - moved.detach()
        outer.step()
    return net

def master_weights():
    net = classifier().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    for _ in range(5):
        loss_of(net, x.bfloat16()).backward()
        for master, p in zip(masters, net.parameters()):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        for master, p in zip(masters, net.parameters()):
            p.data.copy_(master.data)
    return net

def perceptual_loss():
    net, judge = nn.Linear(8, 8), classifier()
    optimizer = Adam(net.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (judge(net(x)) - judge(x)).square().mean().backward()
        optimizer.step()
    return nn.ModuleList([net, judge])

def a_gradient_scaler():
    net = classifier()
    optimizer = Adam(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(6):
        optimizer.zero_grad()
        loss = loss_of(net) * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return net

def steps_in_the_backward_pass():
    net = classifier()
    hooked = {p: SGD([p], lr=0.1) for p in net.parameters()}

    def step(p):
        hooked[p].step()
        hooked[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(5):
        loss_of(net).backward()
    return net

def hogwild():
    import threading
    net = classifier()
    # Made in front, so that they are one training.
    optimizers = [SGD(net.parameters(), lr=0.01) for _ in range(2)]
    for optimizer in optimizers:
        thread = threading.Thread(target=fit, args=(net, optimizer))
        thread.start()
        thread.join()
    return net

tell(gan, gan_whose_judge_learns_now_and_then, actor_and_critic, lbfgs, ema, lora, lora_with_all_parameters_given,
     gradient_penalty, unused_experts, carried_state, sam, lion, accumulation, forward_forward, meta_learning,
     master_weights, perceptual_loss, a_gradient_scaler, hogwild, steps_in_the_backward_pass)
"""


PLAIN_LOOPS = SETUP + HEALTHY_UPDATES + PARAMETERS + HEALTHY


@pytest.fixture(scope="module")
def plain_loops(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of one process, as importing torch takes longer than the trainings."""
    return outcomes(watched_once(tmp_path_factory, "plain_loops", PLAIN_LOOPS, twice=False))


@pytest.fixture
def healthy(plain_loops: Found) -> Found:
    return of_script(plain_loops, HEALTHY)


def test_no_healthy_program_has_a_contradiction(healthy: Found) -> None:
    assert len(healthy) == HEALTHY.count("\ndef ") - 1
    for name, lines in healthy.items():
        assert not of_degree(lines, FAIL), name


def test_suspicions_of_healthy_programs_are_few_and_say_why(healthy: Found) -> None:
    suspected = {name for name, lines in healthy.items() if of_degree(lines, SUSPICION)}
    assert suspected == {"actor_and_critic", "unused_experts", "perceptual_loss"}


TRAINER = """
import copy, transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

def language_model():
    torch.manual_seed(3)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True))

rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (24, 12)).tolist()]

def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

def train(net, kind=transformers.Trainer, optimizer=None, **settings):
    settings = dict(max_steps=5, learning_rate=1e-2, lr_scheduler_type="constant") | settings
    trainer = kind(
        model=net, train_dataset=rows, data_collator=collate, optimizers=(optimizer, None),
        args=transformers.TrainingArguments(
            output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
            save_strategy="no", use_cpu=True, seed=3, disable_tqdm=True, **settings))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return net

def healthy():
    return train(language_model())

def healthy_with_checkpointing():
    return train(language_model(), gradient_checkpointing=True, weight_decay=0.1, optim="adamw_torch_fused")

def healthy_in_bf16():
    return train(language_model(), bf16=True, learning_rate=1e-5, warmup_steps=2)

def weights_in_bf16():
    return train(language_model().bfloat16(), learning_rate=1e-5)

def a_copy_behind_the_optimizer():
    net = language_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return train(copy.deepcopy(net), optimizer=optimizer)

class Keeps(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        # To keep what another part of the script added; and so it keeps all.
        model.zero_grad = lambda set_to_none=True: None
        self.optimizer.zero_grad = model.zero_grad
        return super().training_step(model, inputs, *args, **kwargs)

def zero_grad_replaced():
    return train(language_model(), Keeps)

def a_layer_that_is_frozen_by_no_grad():
    net = language_model()
    layer = net.model.layers[0]
    forward = layer.forward
    layer.forward = torch.no_grad()(forward)
    return train(net)

for function in (healthy, healthy_with_checkpointing, healthy_in_bf16, weights_in_bf16,
                 a_copy_behind_the_optimizer, zero_grad_replaced, a_layer_that_is_frozen_by_no_grad):
    say(name=function.__name__)
    save(function())
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "trainer", TRAINER, twice=False))


@pytest.mark.soak
@pytest.mark.parametrize("script", [PLAIN_LOOPS, TRAINER], ids=["plain loops", "trainer"])
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path, script: str) -> None:
    run_twice(tmp_path, script)


@pytest.mark.soak
def test_a_healthy_trainer_of_transformers_has_no_contradiction(trainer: Found) -> None:
    for name in ("healthy", "healthy_with_checkpointing", "healthy_in_bf16"):
        lines = trainer[name]
        assert {line["level"] for line in lines} <= {PASS, FACT}, name
        assert {line["framework"] for line in lines} == {"transformers"}
        for identity in ("outside_writes", "stale_parameters", "kept_gradients"):
            assert degrees(lines, identity) == [PASS], (name, identity)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("weights_in_bf16", "vanishing_updates"),
        ("a_copy_behind_the_optimizer", "stale_parameters"),
        ("zero_grad_replaced", "kept_gradients"),
    ],
)
def test_mistakes_in_front_of_a_trainer_are_named(trainer: Found, name: str, identity: str) -> None:
    (line,) = of_degree(trainer[name], FAIL)
    assert line["id"] == identity


def test_parameters_behind_no_grad_are_suspected_by_their_names(trainer: Found) -> None:
    (line,) = of_degree(trainer["a_layer_that_is_frozen_by_no_grad"], SUSPICION)
    assert line["id"] == "no_gradient" and "model.layers.0." in line["text"]
