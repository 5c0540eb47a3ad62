"""What the probe says of a training on a GPU: copied there, read late, and the run waits for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attached import run_twice

pytestmark = pytest.mark.gpu

TRAININGS = """
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
device = torch.device("cuda")
x = torch.randn(64, 512, device=device)
optim = torch.optim

def fit(make, dtype=torch.float32, zero=lambda optimizer: optimizer.zero_grad(), **settings):
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).to(device, dtype)
    optimizer = make(net.parameters(), **settings)
    # An error where the host waits for the GPU.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(9):
        zero(optimizer)
        net(x.to(dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    return net

def in_place(optimizer):
    optimizer.zero_grad(set_to_none=False)

def never(optimizer):
    pass

cases = {
    "foreach": (optim.AdamW, dict(lr=1e-3)),
    "a loop": (optim.AdamW, dict(lr=1e-3, foreach=False)),
    "fused": (optim.AdamW, dict(lr=1e-3, fused=True)),
    "capturable": (optim.Adam, dict(lr=1e-3, capturable=True, weight_decay=0.1)),
    "sgd": (optim.SGD, dict(lr=1e-3, momentum=0.9, nesterov=True)),
    "fused sgd": (optim.SGD, dict(lr=1e-3, momentum=0.9, fused=True)),
    "bf16": (optim.AdamW, dict(lr=1e-2, dtype=torch.bfloat16)),
    "zeroed in place": (optim.AdamW, dict(lr=1e-3, zero=in_place)),
    "vanishing": (optim.AdamW, dict(lr=1e-7, dtype=torch.bfloat16, fused=True)),
    "never zeroed": (optim.AdamW, dict(lr=1e-3, zero=never)),
}
for name, (make, settings) in cases.items():
    say(name=name)
    save(fit(make, **settings))
"""


def test_trainings_on_a_gpu_are_judged_without_waiting_for_it(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, TRAININGS)
    names = [said["name"] for said in watched.said]
    found = {
        name: {line["id"]: line for line in lines if line.get("by") == "identity"}
        for name, lines in zip(names, watched.trainings, strict=True)
    }
    wrong = {"vanishing": "vanishing_updates", "never zeroed": "kept_gradients"}
    for name, lines in found.items():
        assert lines["outside_writes"]["level"] == "pass", (name, lines["outside_writes"])
        assert {one for one in lines if lines[one]["level"] == "fail"} == (
            {wrong[name]} if name in wrong else set()
        ), (name, lines)
        assert "kept_gradients" in lines and "stale_parameters" in lines
    for lines in watched.trainings:
        assert not [line for line in lines if line["kind"] == "note"]


LOSSES = """
from torch import nn
from torch.nn import functional as F
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
device = torch.device("cuda")
V, T = 50_257, 32
text = torch.randint(V, (4, T), device=device)

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 64), nn.Linear(64, V, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))

teacher = Small().to(device)

def next_tokens(z, t):
    return F.cross_entropy(z[:, :-1].reshape(-1, V), text[:, 1:].reshape(-1))

def same_tokens(z, t):
    return F.cross_entropy(z.reshape(-1, V), text.reshape(-1))

def distilled(z, t):
    kd = F.kl_div(F.log_softmax(z / 2, -1), F.softmax(t / 2, -1), reduction="none").sum(-1).mean()
    return 0.5 * next_tokens(z, t) + 0.5 * 4 * kd

def unscaled(z, t):
    return F.kl_div(F.log_softmax(z / 2, -1), F.softmax(t / 2, -1), reduction="none").sum(-1).mean()

for loss in (next_tokens, same_tokens, distilled, unscaled):
    torch.manual_seed(3)
    net = Small().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(text)
            value = loss(net(text), wanted)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    say(name=loss.__name__)
    save(net)
"""


def test_losses_on_a_gpu_are_judged_without_waiting_for_it(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, LOSSES)
    names = [said["name"] for said in watched.said]
    found = {
        name: {(line["id"], line["level"]) for line in lines if line.get("by") == "identity"}
        for name, lines in zip(names, watched.trainings, strict=True)
    }
    wrong = {"same_tokens": "label_shift", "unscaled": "temperature_squared"}
    for name, lines in found.items():
        named = {id for id, degree in lines if degree in ("suspicion", "fail")}
        assert named == ({wrong[name]} if name in wrong else set()), (name, lines)
    assert ("label_shift", "pass") in found["next_tokens"]
    assert {("temperature_squared", "pass"), ("teacher_is_student", "pass")} <= found["distilled"]
