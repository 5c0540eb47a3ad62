"""Small plain-torch trainings of 200 steps: one at a learning rate 100 times too high, and healthy ones beside it."""

_BEGIN = """\
import torch
from torch import nn
from torch.nn import functional as F

V, W = 110, 32
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
table = torch.rand(V, V, generator=generator) ** 20

def model():
    torch.manual_seed(0)
    layers = [nn.Embedding(V, W), nn.Linear(W, 64), nn.GELU(), nn.Linear(64, W), nn.LayerNorm(W),
              nn.Linear(W, V, bias=False)]
    for layer in layers:
        if hasattr(layer, "weight") and layer.weight.dim() > 1:
            nn.init.normal_(layer.weight, std=0.02)
    return nn.Sequential(*layers)

def batch(rows, length):
    tokens = [torch.randint(V, (rows,), generator=generator)]
    for _ in range(length):
        tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)

def train(net, optimizer, rows=8, length=32, rate=lambda step: 1.0):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(200):
        tokens = batch(rows, length)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
"""

RATE_100_TIMES_TOO_HIGH = f"""{_BEGIN}
net = model()
train(net, torch.optim.AdamW(net.parameters(), lr=0.5, betas=(0.9, 0.95)), rows=2, length=8)
"""
"""Its loss rises from 4.7 to 6.2 and stays about there; at 0.005 it falls."""

HEALTHY_RATES = f"""{_BEGIN}
net = model()
train(net, torch.optim.AdamW(net.parameters(), lr=0.005), rate=lambda step: min(1.0, (step + 1) / 20))

net = model()
train(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))

net = model()
train(net, torch.optim.AdamW(net.parameters(), lr=0.002), rows=2, length=8)

# It begins at the best possible loss, and the noise of its gradients raises it by 3 %.
net = nn.Embedding(V, V)
net.load_state_dict({{"weight": (table + 1e-9).log()}})
train(net, torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0), rate=lambda step: 1 - step / 200)
"""
"""AdamW after a warm-up, SGD with momentum, a loss that is noisy at batch size 2, and a fine-tuning."""
