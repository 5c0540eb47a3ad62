"""What is said of weights that do not move, that move though they are frozen, or that are NaN; and of healthy twins."""

from __future__ import annotations

import pytest

from engine.log.events import FAIL, PASS, SUSPICION
from tests.support.attached import watched_once
from tests.system.attach.test_identities import SETUP, Found, outcomes

SCRIPT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).tanh())

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])

class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD

def run(make, dtype=torch.float32, after=lambda net, optimizer, step: None, wanted=y, scale=1.0, steps=18):
    net = Net().to(dtype)
    optimizer = make(net)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        (scale * (net(x.to(dtype)) - wanted.to(dtype)).square().mean()).backward()
        optimizer.step()
        after(net, optimizer, step)
    return net

def a_norm_in_16_bit():
    return run(lambda net: Sign(net.parameters(), 1e-3), torch.bfloat16)

def a_norm_in_16_bit_at_a_large_rate():
    return run(lambda net: Sign(net.parameters(), 0.05), torch.bfloat16)

def an_optimizer_that_does_nothing():
    return run(lambda net: Idle(net.parameters(), 0.1))

def rewards_that_are_all_equal():
    return run(lambda net: SGD(net.parameters(), 0.1), wanted=x.new_zeros(()), scale=0.0)

def an_optimizer_of_a_copy():
    net = Net()
    optimizer = torch.optim.RMSprop(net.parameters())
    with torch.no_grad():
        for _ in range(18):
            optimizer.step()
    return net

def frozen_with_its_momentum():
    return run(lambda net: AdamW(net.parameters()),
               after=lambda net, optimizer, step: net.body.requires_grad_(step < 4))

def frozen_without_a_gradient():
    def after(net, optimizer, step):
        if step == 4:
            net.body.requires_grad_(False).zero_grad()
    return run(lambda net: AdamW(net.parameters()), after=after)

def an_average_inside_the_model():
    def make(net):
        net.target = copy.deepcopy(net.body).requires_grad_(False)
        return AdamW(net.parameters())
    @torch.no_grad()
    def after(net, optimizer, step):
        for p, q in zip(net.target.parameters(), net.body.parameters()):
            p.lerp_(q, 0.1)
    return run(make, after=after)

def a_group_at_a_rate_of_0():
    return run(lambda net: AdamW([{"params": net.body.parameters(), "lr": 0.0},
                                  {"params": [*net.norm.parameters(), *net.head.parameters()]}]))

def a_group_that_begins_at_a_rate_of_0():
    def after(net, optimizer, step):
        optimizer.param_groups[0]["lr"] = 1e-3 if step > 8 else 0.0
    return run(lambda net: AdamW([{"params": net.body.parameters(), "lr": 0.0}, {"params": net.head.parameters()}]),
               after=after)

def a_search_for_a_rate():
    def after(net, optimizer, step):
        optimizer.param_groups[0]["lr"] *= 1.3
    return run(lambda net: SGD(net.parameters(), 1e-12), after=after)

def weights_by_hand():
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    optimizer = AdamW(net.parameters())
    for _ in range(18):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return net

def a_bias_before_a_batch_norm():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    return fit(net, SGD(net.parameters(), 0.01), 18)

def nan_weights():
    return run(lambda net: SGD(net.parameters(), 0.01), wanted=y / 0)

def a_loss_that_is_nan_at_times():
    net = Net()
    optimizer = SGD(net.parameters(), 0.01)
    for step in range(18):
        optimizer.zero_grad()
        labels = torch.full((16,), -100 if step > 8 else 0)
        nn.functional.cross_entropy(net(x).expand(-1, 2) * torch.tensor([1.0, -1.0]), labels).backward()
        optimizer.step()
    return net

def rewards_that_are_all_equal_for_long():
    return run(lambda net: SGD(net.parameters(), 0.1), wanted=x.new_zeros(()), scale=0.0, steps=66)

def units_that_are_never_active():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(net[0].bias, -50.0)
    return fit(net, AdamW(net.parameters()), 66)

class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.code(x).round())

def a_round_before_the_head():
    net = Rounded()
    return fit(net, AdamW(net.parameters()), 66)

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.rare, self.branch, self.head = nn.Embedding(9000, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.gate = nn.Parameter(torch.zeros(()))
        self.extra, self.calls = nn.Linear(8, 1), 0

    def forward(self, x):
        self.calls += 1
        x = x + self.rare(torch.arange(len(x)) * 7 + 1)
        found = self.head(x + self.gate * self.branch(x))
        return found + self.extra(x) if self.calls % 16 == 5 else found

def a_gate_that_begins_at_0_rare_rows_and_a_part_used_at_times():
    net = Gated()
    return fit(net, torch.optim.Adam(net.parameters(), 0.01), 66)

tell(rewards_that_are_all_equal_for_long, units_that_are_never_active, a_round_before_the_head,
     a_gate_that_begins_at_0_rare_rows_and_a_part_used_at_times)
tell(a_norm_in_16_bit, a_norm_in_16_bit_at_a_large_rate, an_optimizer_that_does_nothing, rewards_that_are_all_equal,
     an_optimizer_of_a_copy, frozen_with_its_momentum,
     frozen_without_a_gradient, an_average_inside_the_model, a_group_at_a_rate_of_0,
     a_group_that_begins_at_a_rate_of_0, a_search_for_a_rate,
     weights_by_hand, a_bias_before_a_batch_norm, nan_weights, a_loss_that_is_nan_at_times)
"""
EXPECTED = {
    "a_norm_in_16_bit": [("weights_move", SUSPICION, "1 of 6 tensors of Sign", "norm.weight")],
    "a_norm_in_16_bit_at_a_large_rate": [("weights_move", PASS, "6 tensors")],
    "an_optimizer_that_does_nothing": [("weights_move", FAIL, "none of 6 tensors of Idle")],
    "rewards_that_are_all_equal": [],
    "an_optimizer_of_a_copy": [("weights_move", FAIL, "and 0 have ever had a gradient")],
    "frozen_with_its_momentum": [
        ("frozen_weights", SUSPICION, "AdamW moves 2 tensors", "body.weight, body.bias"),
        ("weights_move", PASS, "4 tensors"),
    ],
    "frozen_without_a_gradient": [
        ("frozen_weights", PASS, "none of its 2 tensors"),
        ("weights_move", PASS, "4 tensors"),
    ],
    "an_average_inside_the_model": [
        ("frozen_weights", PASS, "none of its"),
        ("weights_move", PASS, "6 tensors"),
    ],
    "a_group_at_a_rate_of_0": [
        ("weights_move", SUSPICION, "2 tensors of AdamW have gradients", "learning rate 0")
    ],
    "a_group_that_begins_at_a_rate_of_0": [("weights_move", PASS, "4 tensors")],
    "a_search_for_a_rate": [],
    "weights_by_hand": [("frozen_weights", PASS, "none of its")],
    "a_bias_before_a_batch_norm": [("weights_move", PASS, "")],
    "nan_weights": [("finite_weights", FAIL, "6 tensors of SGD hold NaN")],
    "a_loss_that_is_nan_at_times": [
        ("finite_weights", PASS, "where the loss is not finite"),
        ("weights_move", PASS, ""),
    ],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "movement", SETUP + SCRIPT, twice=False))


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_that_stay_and_weights_that_should_are_counted(found: Found, name: str) -> None:
    ids = ("weights_move", "frozen_weights", "finite_weights")
    said = [line for line in found[name] if line["id"] in ids]
    assert [(one["id"], one["level"]) for one in said] == [one[:2] for one in EXPECTED[name]]
    for line, (_, _, *texts) in zip(said, EXPECTED[name], strict=True):
        assert all(text in line["text"] for text in texts)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rewards_that_are_all_equal_for_long", "6 of 6 tensors of SGD"),
        ("units_that_are_never_active", "3 of 4 tensors of AdamW"),
        ("a_round_before_the_head", "code.weight, code.bias"),
    ],
)
def test_gradients_that_are_always_0_are_named(found: Found, name: str, wanted: str) -> None:
    (line,) = [one for one in found[name] if one["id"] == "zero_gradient"]
    assert line["level"] == SUSPICION and wanted in line["text"]


@pytest.mark.parametrize(
    "name",
    ["a_bias_before_a_batch_norm", "a_gate_that_begins_at_0_rare_rows_and_a_part_used_at_times"],
)
def test_gradients_that_are_0_in_part_or_at_first_are_nothing_wrong(
    found: Found, name: str
) -> None:
    assert [one["level"] for one in found[name] if one["id"] == "zero_gradient"] == [PASS]
