"""An ordinary training script: a causal language model of the Qwen2-0.5B shape, random weights, random tokens.

    python evidence/attach/train.py --steps 40 [--device cuda] [--layers 24] [--rows 8] [--length 1024]

It prints the seconds of a step (the mean over all but the first ten, the device synchronised at both ends alone) and
a hash of the weights at the end, as one JSON value.
"""

import argparse
import hashlib
import json
import time

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.gate = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.t()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(given.device)
    model = Model(given.vocabulary, given.width, given.layers, 14, 4864 * given.width // 896).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    shape = (given.rows * given.steps, given.length + 1)
    rows = torch.randint(given.vocabulary, shape)
    loader = torch.utils.data.DataLoader(rows, batch_size=given.rows)
    begun_s = 0.0
    for step, batch in enumerate(loader):
        if step == 10:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun_s = time.perf_counter()
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - begun_s) / (given.steps - 10)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    print(json.dumps({"step_s": step_s, "loss": loss.item(), "weights": digest.hexdigest()[:16]}))


if __name__ == "__main__":
    main()
