"""Healthy programs of other styles: no contradiction, and each suspicion is known. Equal to the byte with and without
the probe: weights, states of optimizers, random numbers, global variables, output.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.log.events import FAIL, SUSPICION
from tests.support.attached import watched_once
from tests.system.attach.test_identities import outcomes

Found = dict[str, list[dict[str, Any]]]
SETUP = """
import contextlib, copy, io, math, random
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
"""

PROGRAMS = """
def diffusion_noise_in_forward_with_ema():
    class Denoiser(nn.Module):
        def __init__(self, width=16, steps=50):
            super().__init__()
            self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(0.0001, 0.02, steps), 0))
            self.time = nn.Embedding(steps, width)
            self.enc, self.mid, self.dec = (
                nn.Conv2d(1, width, 3, padding=1),
                nn.Conv2d(width, width, 3, padding=1),
                nn.Conv2d(width, 1, 3, padding=1),
            )
            self.norm = nn.GroupNorm(4, width)
        def eps(self, x, t):
            h = F.silu(self.enc(x) + self.time(t)[:, :, None, None])
            return self.dec(F.silu(self.norm(self.mid(h))) + h)
        def forward(self, x0):
            t = torch.randint(0, len(self.alpha_bar), (len(x0),))
            a = self.alpha_bar[t][:, None, None, None]
            noise = torch.randn_like(x0)
            return F.mse_loss(self.eps(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    net = Denoiser()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=0.002)
    data = torch.randn(160, 1, 8, 8)
    for epoch in range(2):
        for (x,) in DataLoader(TensorDataset(data), batch_size=8, shuffle=True):
            loss = net(x)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                for e, p in zip(ema.state_dict().values(), net.state_dict().values()):
                    e.mul_(0.99).add_(p, alpha=0.01) if e.is_floating_point() else e.copy_(p)
    save(net, ema, opt)

def gan_with_spectral_norm():
    G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    D = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 32)),
        nn.LeakyReLU(0.2),
        nn.utils.spectral_norm(nn.Linear(32, 1)),
    )
    og, od = (
        torch.optim.Adam(G.parameters(), lr=0.001, betas=(0.0, 0.9)),
        torch.optim.Adam(D.parameters(), lr=0.002, betas=(0.0, 0.9)),
    )
    real = torch.randn(640, 2) * 0.3 + 1
    for (x,) in DataLoader(TensorDataset(real), batch_size=32, shuffle=True):
        fake = G(torch.randn(len(x), 8))
        od.zero_grad()
        ld = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
        ld.backward()
        od.step()
        og.zero_grad()
        F.softplus(-D(fake)).mean().backward()
        og.step()
    save(G, D, og, od)

def manual_updates_of_one_part():
    emb = nn.Embedding(40, 16)
    head = nn.Linear(16, 4)
    opt = torch.optim.Adagrad(head.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (20, 16, 5), generator=g)
    lab = ids[..., 0] % 4
    for i, l in zip(ids, lab):
        loss = F.cross_entropy(head(emb(i).mean(1)), l)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            emb.weight -= 0.5 * emb.weight.grad
        emb.weight.grad = None
    save(emb, head, opt)

def time_first_by_transpose_same_sizes():
    T = B = 12
    class Forecaster(nn.Module):
        def __init__(s):
            super().__init__()
            s.rnn = nn.GRU(5, 24)
            s.out = nn.Linear(24, 5)
        def forward(s, x):
            return s.out(s.rnn(x)[0])
    series = torch.randn(240, T, 5).cumsum(1)
    net = Forecaster()
    opt = torch.optim.Adam(net.parameters(), lr=0.003)
    for batch in DataLoader(series, batch_size=B, shuffle=True):
        x = batch.transpose(0, 1)
        loss = F.l1_loss(net(x)[:-1], x[1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def stateful_lstm_in_attributes():
    V, T, B = (29, 12, 4)
    class LM(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(V, 24)
            s.r = nn.LSTM(24, 24, batch_first=True)
            s.o = nn.Linear(24, V)
            s.state = None
            s.calls = 0
        def forward(s, i):
            s.calls += 1
            h, state = s.r(s.e(i), s.state)
            s.state = tuple((z.detach() for z in state))
            return s.o(h)
    g = torch.Generator().manual_seed(4)
    stream = (
        torch.randint(V, (B, 1), generator=g) + torch.tensor([[1], [3], [5], [7]]) * torch.arange(20 * T + 1)
    ) % V
    net = LM()
    opt = torch.optim.Adam(net.parameters(), lr=0.005)
    for k in range(20):
        x, y = (stream[:, k * T : (k + 1) * T], stream[:, k * T + 1 : (k + 1) * T + 1])
        loss = F.cross_entropy(net(x).transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(net.calls, float(net.state[0].sum()))
    save(net, opt)

def similarities_inside_the_model():
    class CLIP(nn.Module):
        def __init__(s):
            super().__init__()
            s.im = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))
            s.tx = nn.Embedding(50, 16)
            s.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        def forward(s, image, text):
            a, b = (F.normalize(s.im(image), dim=-1), F.normalize(s.tx(text).mean(1), dim=-1))
            logits = s.scale.exp() * a @ b.T
            return (logits, logits.T)
    net = CLIP()
    opt = torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.ndim > 1]},
            {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.001,
    )
    im = torch.randn(160, 3, 4, 4)
    tx = torch.randint(50, (160, 6))
    for a, b in DataLoader(TensorDataset(im, tx), batch_size=8, shuffle=True, drop_last=True):
        i, t = net(a, b)
        lab = torch.arange(len(a))
        loss = (F.cross_entropy(i, lab) + F.cross_entropy(t, lab)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            net.scale.clamp_(0, math.log(100))
    save(net, opt)

def graph_edges_as_index():
    class SAGE(nn.Module):
        def __init__(s):
            super().__init__()
            s.me, s.them, s.out = (nn.Linear(7, 16), nn.Linear(7, 16), nn.Linear(16, 3))
        def forward(s, x, edge_index):
            src, dst = edge_index
            agg = (
                torch.zeros_like(x).index_add_(0, dst, x[src])
                / torch.bincount(dst, minlength=len(x)).clamp(min=1)[:, None]
            )
            return s.out(F.relu(s.me(x) + s.them(agg)))
    x = torch.randn(50, 7)
    edges = torch.randint(50, (2, 200))
    y = x[:, :3].argmax(1)
    net = SAGE()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for ep in range(20):
        opt.zero_grad()
        F.cross_entropy(net(x, edges), y).backward()
        opt.step()
    save(net, opt)

CALLS = 0
CACHE = {}
def forward_that_counts_globally_in_every_mode():
    class Net(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.Linear(8, 3)
        def forward(s, x):
            global CALLS
            CALLS += 1
            CACHE[CALLS] = x.shape
            return s.a(x)
    x = torch.randn(320, 8)
    y = x[:, :3].argmax(1)
    net = Net()
    opt = torch.optim.RAdam(net.parameters(), lr=0.01)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        opt.zero_grad()
        F.cross_entropy(net(a), b).backward()
        opt.step()
    print("calls", CALLS, len(CACHE))
    save(net, opt)

def byol_momentum_encoder_in_train_mode():
    def mlp(i, o):
        return nn.Sequential(nn.Linear(i, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, o))
    online, predictor = (mlp(20, 16), mlp(16, 16))
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad_(False)
    opt = torch.optim.AdamW([*online.parameters(), *predictor.parameters()], lr=0.001)
    def aug(x):
        return x + 0.2 * torch.randn_like(x)
    def reg(p, z):
        return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()
    for x in DataLoader(torch.randn(320, 20), batch_size=16, shuffle=True):
        a, b = (aug(x), aug(x))
        with torch.no_grad():
            ta, tb = (target(a), target(b))
        loss = reg(predictor(online(a)), tb) + reg(predictor(online(b)), ta)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters()):
                t.mul_(0.99).add_(o, alpha=0.01)
    save(online, predictor, target, opt)

def time_first_transformer_of_tokens():
    V, T, B = (21, 10, 10)
    class Net(nn.Module):
        def __init__(s):
            super().__init__()
            s.e, s.p = (nn.Embedding(V, 16), nn.Embedding(T, 16))
            s.l = nn.TransformerEncoderLayer(16, 2, 32)
            s.o = nn.Linear(16, V)
        def forward(s, src):
            n = len(src)
            m = nn.Transformer.generate_square_subsequent_mask(n)
            return s.o(s.l(s.e(src) * 4 + s.p.weight[:n, None], src_mask=m))
    g = torch.Generator().manual_seed(2)
    rows = (
        torch.randint(V, (200, 1), generator=g) + torch.randint(1, V, (200, 1), generator=g) * torch.arange(T + 1)
    ) % V
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    for r in DataLoader(rows, batch_size=B, shuffle=True):
        r = r.T.contiguous()
        loss = F.cross_entropy(net(r[:-1]).view(-1, V), r[1:].reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
    save(net, opt)

def prefix_lm_bidirectional_prompt():
    V, T, PRE = (27, 12, 7)
    class Prefix(nn.Module):
        def __init__(s, d=32):
            super().__init__()
            s.e, s.p = (nn.Embedding(V, d), nn.Embedding(T, d))
            s.l = nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True)
            s.o = nn.Linear(d, V)
        def forward(s, i):
            n = i.shape[1]
            m = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
            m[:, :PRE] = False
            return s.o(s.l(s.e(i) + s.p.weight[:n], src_mask=m))
    g = torch.Generator().manual_seed(2)
    rows = (
        torch.randint(V, (80, 1), generator=g) + torch.randint(1, V, (80, 1), generator=g) * torch.arange(T)
    ) % V
    net = Prefix()
    opt = torch.optim.AdamW(net.parameters(), lr=0.001)
    for r in DataLoader(rows, batch_size=4, shuffle=True):
        lab = r.clone()
        lab[:, :PRE] = -100
        logits = net(r)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), lab[:, 1:].reshape(-1), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)
"""

OTHERS = """
def dqn_with_target_network():
    class Q(nn.Module):
        def __init__(s):
            super().__init__()
            s.f = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        def forward(s, x):
            return s.f(x)
    q, target = (Q(), Q())
    target.load_state_dict(q.state_dict())
    opt = torch.optim.RMSprop(q.parameters(), lr=0.001)
    buffer, state = ([], torch.zeros(4))
    for step in range(120):
        with torch.no_grad():
            a = random.Random(step).randrange(2) if step < 20 else int(q(state[None]).argmax())
        nxt = state * 0.9 + torch.randn(4) * 0.1 + (a - 0.5)
        buffer.append((state, a, float(-nxt.abs().sum()), nxt, step % 10 == 9))
        state = torch.zeros(4) if step % 10 == 9 else nxt
        if len(buffer) >= 32:
            s, ac, r, n, d = zip(*random.Random(step).sample(buffer, 16))
            s, n, r, d, ac = (
                torch.stack(s),
                torch.stack(n),
                torch.tensor(r),
                torch.tensor(d).float(),
                torch.tensor(ac),
            )
            with torch.no_grad():
                y = r + 0.99 * (1 - d) * target(n).gather(1, q(n).argmax(1, keepdim=True)).squeeze(1)
            loss = F.smooth_l1_loss(q(s).gather(1, ac[:, None]).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(q.parameters(), 1.0)
            opt.step()
            if step % 20 == 0:
                target.load_state_dict(q.state_dict())
    save(q, target, opt)

def reinforce_with_generation_inside():
    V, T = (17, 10)
    class LM(nn.Module):
        def __init__(s):
            super().__init__()
            s.emb = nn.Embedding(V, 32)
            s.rnn = nn.GRU(32, 32, batch_first=True)
            s.out = nn.Linear(32, V)
        def forward(s, ids, state=None):
            h, state = s.rnn(s.emb(ids), state)
            return (s.out(h), state)
        @torch.no_grad()
        def generate(s, prompt, n):
            ids, state, cur = (prompt, None, prompt)
            for _ in range(n):
                logits, state = s(cur, state)
                cur = torch.multinomial(logits[:, -1].softmax(-1), 1)
                ids = torch.cat([ids, cur], 1)
            return ids
    policy = LM()
    ref = copy.deepcopy(policy).eval()
    for p in ref.parameters():
        p.requires_grad = False
    opt = torch.optim.AdamW(policy.parameters(), lr=0.003)
    for it in range(20):
        prompts = torch.randint(V, (4, 2)).repeat_interleave(4, 0)
        policy.eval()
        ids = policy.generate(prompts, T)
        policy.train()
        reward = (ids[:, 2:] < 5).float().mean(1)
        adv = reward.view(4, 4)
        adv = ((adv - adv.mean(1, keepdim=True)) / (adv.std(1, keepdim=True) + 0.0001)).view(-1)
        logits = policy(ids)[0][:, 1:-1]
        logp = logits.log_softmax(-1).gather(-1, ids[:, 2:, None]).squeeze(-1)
        with torch.no_grad():
            rlogp = ref(ids)[0][:, 1:-1].log_softmax(-1).gather(-1, ids[:, 2:, None]).squeeze(-1)
        kl = (rlogp - logp).exp() - (rlogp - logp) - 1
        loss = -(torch.exp(logp - logp.detach()) * adv[:, None] - 0.04 * kl).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(policy, ref, opt)

def quantised_training():
    class STE(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            return (x / scale).round().clamp(-8, 7) * scale
        @staticmethod
        def backward(ctx, g):
            return (g, None)
    class QLinear(nn.Linear):
        def __init__(s, i, o):
            super().__init__(i, o)
            s.register_buffer("observed", torch.tensor(0.0))
        def forward(s, x):
            if s.training:
                with torch.no_grad():
                    s.observed.copy_(torch.maximum(s.observed * 0.99, x.abs().max()))
            w = STE.apply(s.weight, s.weight.abs().max() / 7)
            return F.linear(STE.apply(x, s.observed.clamp_min(1e-06) / 7), w, s.bias)
    net = nn.Sequential(QLinear(8, 32), nn.ReLU(), QLinear(32, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    for e in range(3):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            opt.zero_grad()
            F.cross_entropy(net(a), b).backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            print("acc", float((net(x).argmax(1) == y).float().mean()))
        net.train()
    save(net, opt)

def mixture_of_experts_with_capacity():
    V, T, B = (31, 16, 4)
    class MoE(nn.Module):
        def __init__(s, d=32, e=4, k=2, capacity=1.5):
            super().__init__()
            s.gate = nn.Linear(d, e, bias=False)
            s.k, s.c = (k, capacity)
            s.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(e)]
            )
        def forward(s, x):
            flat = x.reshape(-1, x.shape[-1])
            probs = s.gate(flat).softmax(-1)
            w, idx = probs.topk(s.k, -1)
            w = w / w.sum(-1, keepdim=True)
            cap = int(s.c * s.k * len(flat) / len(s.experts))
            out = torch.zeros_like(flat)
            for e, expert in enumerate(s.experts):
                tok, slot = torch.where(idx == e)
                tok, slot = (tok[:cap], slot[:cap])
                if len(tok):
                    out = out.index_add(0, tok, expert(flat[tok]) * w[tok, slot, None])
            s.aux = len(s.experts) * (probs.mean(0) * F.one_hot(idx[:, 0], len(s.experts)).float().mean(0)).sum()
            return out.view_as(x)
    class Block(nn.Module):
        def __init__(s, d=32):
            super().__init__()
            s.n1, s.n2, s.moe = (nn.LayerNorm(d), nn.LayerNorm(d), MoE(d))
            s.att = nn.MultiheadAttention(d, 4, batch_first=True)
        def forward(s, x):
            m = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
            h = s.n1(x)
            x = x + s.att(h, h, h, attn_mask=m, need_weights=False)[0]
            return x + s.moe(s.n2(x))
    class LM(nn.Module):
        def __init__(s, d=32):
            super().__init__()
            s.e, s.p = (nn.Embedding(V, d), nn.Embedding(T, d))
            s.b = nn.ModuleList([Block(d) for _ in range(2)])
            s.n = nn.LayerNorm(d)
        def forward(s, i):
            x = s.e(i) + s.p.weight[: i.shape[1]]
            for b in s.b:
                x = b(x)
            return (F.linear(s.n(x), s.e.weight), sum((b.moe.aux for b in s.b)))
    net = LM()
    opt = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1)
    g = torch.Generator().manual_seed(1)
    rows = (
        torch.randint(V, (96, 1), generator=g) + torch.randint(1, V, (96, 1), generator=g) * torch.arange(T + 1)
    ) % V
    for r in DataLoader(rows, batch_size=B, shuffle=True):
        logits, aux = net(r[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, V), r[:, 1:].reshape(-1)) + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    save(net, opt)

def lbfgs_with_closure():
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = torch.randn(64, 6).double()
    y = torch.sin(x.sum(1, keepdim=True))
    opt = torch.optim.LBFGS(net.parameters(), lr=1, max_iter=5, line_search_fn="strong_wolfe")
    for _ in range(18):
        def closure():
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss
        print("loss", float(opt.step(closure)))
    save(net, opt)

def time_first_with_batch_size_as_length():
    T = B = 12
    class Forecaster(nn.Module):
        def __init__(s):
            super().__init__()
            s.rnn = nn.LSTM(5, 24, num_layers=2, dropout=0.1)
            s.out = nn.Linear(24, 5)
        def forward(s, x_TBD):
            h, _ = s.rnn(x_TBD)
            return s.out(h)
    series = torch.randn(240, T + 1, 5).cumsum(1)
    def collate(rows):
        return torch.stack(rows, 1)
    net = Forecaster()
    opt = torch.optim.Adam(net.parameters(), lr=0.003)
    for batch in DataLoader(series, batch_size=B, shuffle=True, collate_fn=collate):
        loss = F.mse_loss(net(batch[:-1]), batch[1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def two_views_in_one_forward_pass():
    class SimCLR(nn.Module):
        def __init__(s):
            super().__init__()
            s.f = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        def forward(s, x, temp=0.5):
            n = len(x)
            z = F.normalize(s.f(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])), dim=1)
            sim = (z @ z.T / temp).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1000000000.0)
            return F.cross_entropy(sim, torch.arange(2 * n).roll(n))
    net = SimCLR()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0001)
    for x in DataLoader(torch.randn(320, 20), batch_size=16):
        loss = net(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def masked_autoencoder():
    class MAE(nn.Module):
        def __init__(s, n=16, d=32, p=12):
            super().__init__()
            s.proj, s.pos = (nn.Linear(p, d), nn.Parameter(torch.randn(1, n, d) * 0.02))
            s.mask = nn.Parameter(torch.zeros(1, 1, d))
            layer = lambda: nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            s.enc, s.dec, s.out = (layer(), layer(), nn.Linear(d, p))
        def forward(s, x, ratio=0.75):
            B, N, P = x.shape
            keep = int(N * (1 - ratio))
            order = torch.rand(B, N).argsort(1)
            restore = order.argsort(1)
            h = s.proj(x) + s.pos
            h = s.enc(h.gather(1, order[:, :keep, None].expand(-1, -1, h.shape[-1])))
            full = (
                torch.cat([h, s.mask.expand(B, N - keep, -1)], 1).gather(
                    1, restore[..., None].expand(-1, -1, h.shape[-1])
                )
                + s.pos
            )
            m = torch.ones(B, N)
            m[:, :keep] = 0
            m = m.gather(1, restore)
            pred = s.out(s.dec(full))
            return (((pred - x).square().mean(-1) * m).sum() / m.sum(), pred)
    net = MAE()
    opt = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.9, 0.95), weight_decay=0.05)
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, 0.003, total_steps=20)
    for x in DataLoader(torch.randn(160, 16, 12), batch_size=8, shuffle=True):
        loss, _ = net(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sch.step()
    net.eval()
    with torch.no_grad():
        print("val", float(net(torch.randn(8, 16, 12))[0]) > 0)
    save(net, opt)

def graph_network_on_one_graph():
    N = 60
    class GCN(nn.Module):
        def __init__(s):
            super().__init__()
            s.a, s.b = (nn.Linear(7, 16), nn.Linear(16, 4))
        def forward(s, x, adj):
            return s.b(adj @ F.dropout(F.relu(s.a(adj @ x)), 0.5, s.training))
    e = torch.rand(N, N) < 0.08
    adj = (e | e.T | torch.eye(N, dtype=torch.bool)).float()
    d = adj.sum(1) ** (-0.5)
    adj = d[:, None] * adj * d
    x = torch.randn(N, 7)
    y = x[:, :4].argmax(1)
    train = torch.arange(N) < 20
    net = GCN()
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.0005)
    for ep in range(30):
        net.train()
        opt.zero_grad()
        loss = F.cross_entropy(net(x, adj)[train], y[train])
        loss.backward()
        opt.step()
        net.eval()
        with torch.no_grad():
            acc = (net(x, adj).argmax(1)[~train] == y[~train]).float().mean()
    print(float(acc))
    save(net, opt)

SEEN = 0
LOG = []
def custom_autograd_function_and_globals():
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return g * (s + x * s * (1 - s))
    class Net(nn.Module):
        def __init__(s):
            super().__init__()
            s.a, s.b = (nn.Linear(8, 24), nn.Linear(24, 3))
            s.stats = {"n": 0, "hist": []}
            s.step = 0
        def forward(s, x):
            global SEEN
            if s.training:
                SEEN += len(x)
                s.stats["n"] += 1
                s.stats["hist"].append(float(x.mean()))
                s.step += 1
                if s.step % 7 == 0:
                    print("step", s.step, "seen", SEEN)
                LOG.append(len(x))
            return s.b(Swish.apply(s.a(x)))
    x = torch.randn(300, 8)
    y = x[:, :3].argmax(1)
    net = Net()
    opt = torch.optim.NAdam(net.parameters(), lr=0.01)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        opt.zero_grad()
        F.cross_entropy(net(a), b).backward()
        opt.step()
    print(SEEN, len(LOG), net.stats["n"], len(net.stats["hist"]))
    save(net, opt)

def batch_norm_classifier():
    def conv(i, o, s=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
    class Basic(nn.Module):
        def __init__(s, c):
            super().__init__()
            s.a = conv(c, c)
            s.b = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c))
            nn.init.zeros_(s.b[1].weight)
        def forward(s, x):
            return F.relu(x + s.b(s.a(x)))
    net = nn.Sequential(
        conv(3, 16),
        Basic(16),
        conv(16, 32, 2),
        Basic(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    x = torch.randn(160, 3, 8, 8)
    y = torch.randint(5, (160,))
    x[torch.arange(160), 0] += y[:, None, None]
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": 0.0005}, {"params": rest, "weight_decay": 0}], lr=0.1, momentum=0.9
    )
    sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3)
    tr = TensorDataset(x[:128], y[:128])
    va = TensorDataset(x[128:], y[128:])
    for ep in range(3):
        net.train()
        for a, b in DataLoader(tr, batch_size=16, shuffle=True):
            opt.zero_grad()
            F.cross_entropy(net(a), b, label_smoothing=0.1).backward()
            opt.step()
        sch.step()
        net.eval()
        with torch.no_grad():
            print(sum((int((net(a).argmax(1) == b).sum()) for a, b in DataLoader(va, batch_size=32))))
    save(net, opt)

def mean_teacher_with_dropout_teacher():
    def mlp():
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    student = mlp()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.detach_()
    opt = torch.optim.Adam(student.parameters(), lr=0.003)
    x = torch.randn(320, 10)
    y = x[:, :4].argmax(1)
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)):
        s = student(a + 0.1 * torch.randn_like(a))
        t = teacher(a + 0.1 * torch.randn_like(a))
        loss = F.cross_entropy(s[:4], b[:4]) + F.mse_loss(s.softmax(1), t.softmax(1).detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
        d = min(1 - 1 / (i + 2), 0.99)
        for e, p in zip(teacher.parameters(), student.parameters()):
            e.data.mul_(d).add_(p.data, alpha=1 - d)
    save(student, teacher, opt)

def distillation_teacher_of_other_vocabulary():
    VS, VT, T, B = (19, 29, 12, 4)
    class LM(nn.Module):
        def __init__(s, v, d):
            super().__init__()
            s.e = nn.Embedding(v, d)
            s.r = nn.GRU(d, d, batch_first=True)
            s.o = nn.Linear(d, v)
        def forward(s, i):
            return s.o(s.r(s.e(i))[0])
    student, teacher = (LM(VS, 16), LM(VT, 32).eval().requires_grad_(False))
    map_ = torch.randperm(VT, generator=torch.Generator().manual_seed(3))[:VS]
    opt = torch.optim.AdamW(student.parameters(), lr=0.003)
    g = torch.Generator().manual_seed(1)
    rows = (
        torch.randint(VS, (80, 1), generator=g) + torch.randint(1, VS, (80, 1), generator=g) * torch.arange(T)
    ) % VS
    tau = 2.0
    for r in DataLoader(rows, batch_size=B, shuffle=True):
        s = student(r)
        with torch.no_grad():
            t = teacher(map_[r]).index_select(-1, map_)
        kd = (
            F.kl_div(
                F.log_softmax(s / tau, -1).flatten(0, 1),
                F.softmax(t / tau, -1).flatten(0, 1),
                reduction="batchmean",
            )
            * tau**2
        )
        ce = F.cross_entropy(s[:, :-1].reshape(-1, VS), r[:, 1:].reshape(-1))
        loss = 0.5 * kd + 0.5 * ce
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(student, teacher, opt)

def functional_call_and_vmap():
    from torch.func import functional_call, grad, vmap, stack_module_state
    nets = [nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(3)]
    params, buffers = stack_module_state(nets)
    base = copy.deepcopy(nets[0]).to("meta")
    params = {k: nn.Parameter(v.detach()) for k, v in params.items()}
    opt = torch.optim.AdamW(params.values(), lr=0.01)
    x, y = (torch.randn(200, 5), torch.randn(200, 1))
    for a, b in DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True):
        pred = vmap(lambda p: functional_call(base, p, (a,)))(params)
        loss = (pred - b).square().mean((1, 2)).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(nn.ParameterDict({k.replace(".", "_"): v for k, v in params.items()}), opt)

def maml_inner_loop():
    from torch.func import functional_call
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for it in range(20):
        losses = []
        for task in range(4):
            amp, ph = torch.rand(2)
            x = torch.randn(10, 1)
            y = amp * torch.sin(3 * x + ph)
            p = dict(net.named_parameters())
            g = torch.autograd.grad(
                F.mse_loss(functional_call(net, p, (x[:5],)), y[:5]), p.values(), create_graph=True
            )
            p = {k: v - 0.1 * d for (k, v), d in zip(p.items(), g)}
            losses.append(F.mse_loss(functional_call(net, p, (x[5:],)), y[5:]))
        loss = torch.stack(losses).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def accumulation_with_short_last_window():
    V, T = (27, 14)
    class LM(nn.Module):
        def __init__(s, d=32):
            super().__init__()
            s.e, s.p = (nn.Embedding(V, d), nn.Embedding(T, d))
            s.l = nn.TransformerEncoderLayer(d, 4, 64, 0.1, batch_first=True)
            s.o = nn.Linear(d, V)
        def forward(s, i):
            n = i.shape[1]
            return s.o(
                s.l(
                    s.e(i) + s.p.weight[:n],
                    src_mask=nn.Transformer.generate_square_subsequent_mask(n),
                    is_causal=True,
                )
            )
    g = torch.Generator().manual_seed(2)
    rows = (
        torch.randint(V, (58, 1), generator=g) + torch.randint(1, V, (58, 1), generator=g) * torch.arange(T)
    ) % V
    net = LM()
    opt = torch.optim.AdamW(net.parameters(), lr=0.001)
    ACC = 4
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    for ep in range(5):
        for k, r in enumerate(loader):
            window = ACC if k < len(loader) // ACC * ACC else len(loader) % ACC
            (F.cross_entropy(net(r[:, :-1]).flatten(0, 1), r[:, 1:].flatten()) / window).backward()
            if (k + 1) % ACC == 0 or k + 1 == len(loader):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
    save(net, opt)

def vae_drawn_in_every_mode():
    class VAE(nn.Module):
        def __init__(s):
            super().__init__()
            s.e, s.d = (nn.Linear(20, 16), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20)))
        def forward(s, x):
            mu, lv = s.e(x).chunk(2, -1)
            z = torch.distributions.Normal(mu, (lv / 2).exp()).rsample()
            return (s.d(z), mu, lv)
    net = VAE()
    opt = torch.optim.Adam(net.parameters(), lr=0.001)
    for x in DataLoader(torch.rand(320, 20), batch_size=16):
        r, mu, lv = net(x)
        loss = (
            F.binary_cross_entropy_with_logits(r, x, reduction="sum") / len(x)
            - 0.5 * (1 + lv - mu**2 - lv.exp()).sum(1).mean()
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def neural_process_of_one_task():
    class CNP(nn.Module):
        def __init__(s):
            super().__init__()
            s.e, s.d = (
                nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32)),
                nn.Sequential(nn.Linear(33, 32), nn.ReLU(), nn.Linear(32, 2)),
            )
        def forward(s, cx, cy, tx):
            r = s.e(torch.cat([cx, cy], -1)).mean(0, keepdim=True).expand(len(tx), -1)
            m, l = s.d(torch.cat([r, tx], -1)).chunk(2, -1)
            return (m, F.softplus(l) + 0.1)
    net = CNP()
    opt = torch.optim.Adam(net.parameters(), lr=0.001)
    for _ in range(20):
        x = torch.rand(10, 1) * 4
        y = torch.sin(x + torch.rand(1))
        m, s = net(x, y, x)
        loss = -torch.distributions.Normal(m, s).log_prob(y).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def ctc_speech():
    class ASR(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = nn.Conv1d(8, 16, 3, padding=1)
            s.r = nn.LSTM(16, 16, bidirectional=True, batch_first=True)
            s.o = nn.Linear(32, 12)
        def forward(s, x, lengths):
            h = F.relu(s.c(x)).transpose(1, 2)
            p = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(s.r(p)[0], batch_first=True, total_length=x.shape[2])
            return s.o(h).log_softmax(-1)
    net = ASR()
    opt = torch.optim.Adam(net.parameters(), lr=0.001)
    x = torch.randn(160, 8, 20)
    n = torch.randint(14, 21, (160,))
    y = torch.randint(1, 12, (160, 5))
    for a, l, b in DataLoader(TensorDataset(x, n, y), batch_size=8):
        loss = F.ctc_loss(net(a, l).transpose(0, 1), b, l, torch.full((len(a),), 5))
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)
"""

TRANSFORMERS = """
def t5_like():
    from transformers import T5Config, T5ForConditionalGeneration
    import transformers
    transformers.logging.set_verbosity_error()
    cfg = T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    net = T5ForConditionalGeneration(cfg)
    opt = torch.optim.AdamW(net.parameters(), lr=0.001)
    net.train()
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        n = torch.randint(4, 10, (4,), generator=g)
        pos = torch.arange(10)[None]
        mask = (pos < n[:, None]).long()
        src = torch.randint(2, 40, (4, 10), generator=g) * mask
        lab = src.flip(1).masked_fill(mask.flip(1) == 0, -100)
        lab = torch.where(
            pos < n[:, None], src.gather(1, (n[:, None] - 1 - pos).clamp(min=0)), torch.tensor(-100)
        )
        lab = F.pad(lab, (0, 1), value=-100)
        lab[torch.arange(4), n] = 1
        loss = net(input_ids=src, attention_mask=mask, labels=lab).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)

def trainer_checkpointing_left_padding():
    import transformers
    transformers.logging.set_verbosity_error()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    cfg = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        attn_implementation=os.environ.get("ATT", "sdpa"),
    )
    net = LlamaForCausalLM(cfg)
    class Rows(torch.utils.data.Dataset):
        def __len__(s):
            return 84
        def __getitem__(s, i):
            g = torch.Generator().manual_seed(i)
            n = int(torch.randint(5, 12, (1,), generator=g))
            a, b = torch.randint(0, 37, (2,), generator=g).tolist()
            return [1] + [3 + (a + b * k) % 37 for k in range(n)] + [2]
    def collate(rows):
        L = max(map(len, rows))
        ids = torch.tensor([[0] * (L - len(r)) + r for r in rows])
        m = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": m, "labels": ids.masked_fill(m == 0, -100)}
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.002,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=[],
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="cosine",
        warmup_steps=3,
    )
    tr = Trainer(net, args, train_dataset=Rows(), data_collator=collate)
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()):
        tr.train()
    save(net, tr.optimizer)

def bert_with_masked_tokens():
    from transformers import BertConfig, BertForMaskedLM
    cfg = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    net = BertForMaskedLM(cfg)
    opt = torch.optim.AdamW(net.parameters(), lr=0.001)
    net.train()
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        ids = torch.randint(4, 40, (4, 12), generator=g)
        m = torch.rand(4, 12, generator=g) < 0.3
        m[:, 0] = True
        att = torch.arange(12)[None] < torch.tensor([12, 9, 8, 6])[:, None]
        ids = ids * att
        m &= att
        loss = net(
            input_ids=ids.masked_fill(m, 3), attention_mask=att.long(), labels=ids.masked_fill(~m, -100)
        ).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    save(net, opt)
"""

SUSPECTED = {
    # Its embedding is moved by hand, without an optimizer.
    "manual_updates_of_one_part": {"unowned_parameters"},
    # The last batch of an epoch has half as many rows.
    "accumulation_with_short_last_window": {"token_weights"},
}
"""What is true of a healthy program and may be a mistake in another."""


def _names(script: str) -> list[str]:
    return [line[4 : line.index("(")] for line in script.splitlines() if line.startswith("def ")]


def _watched(factory: pytest.TempPathFactory, name: str, script: str) -> Found:
    calls = "".join(
        f"torch.manual_seed(3)\nsay(name={name!r})\n{name}()\n" for name in _names(script)
    )
    ran = watched_once(factory, name, SETUP + script + calls, forked=True)
    names = [line for line in ran.stdout.splitlines() if '"name"' in line]
    return outcomes(dataclasses.replace(ran, stdout="\n".join(names)))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _watched(tmp_path_factory, "healthy_styles", PROGRAMS)


@pytest.mark.parametrize("name", _names(PROGRAMS))
def test_a_healthy_program_of_another_style_has_no_unknown_suspicion(
    programs: Found, name: str
) -> None:
    _is_healthy(programs[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("script", [OTHERS, TRANSFORMERS], ids=["others", "transformers"])
def test_other_healthy_styles_have_no_unknown_suspicion(
    tmp_path_factory: pytest.TempPathFactory, script: str
) -> None:
    name = f"healthy_{_names(script)[0]}"
    for program, lines in _watched(tmp_path_factory, name, script).items():
        _is_healthy(lines, program)


def _is_healthy(lines: list[dict[str, Any]], name: str) -> None:
    assert lines and not [line for line in lines if line["level"] == FAIL]
    suspected = {line["id"] for line in lines if line["level"] == SUSPICION}
    assert suspected == SUSPECTED.get(name, set())
