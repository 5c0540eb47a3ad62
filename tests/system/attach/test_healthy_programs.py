"""Healthy programs of many kinds: no contradiction in any, and few suspicions, each of which is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.log.events import FAIL, SUSPICION
from tests.support.attached import run_twice, watched_once
from tests.system.attach.test_identities import Found, of_degree, outcomes

SETUP = """
import copy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
V, B, T = 23, 4, 12
generator = torch.Generator().manual_seed(5)
# Each token follows from the one before, and rows are not alike.
start, stride = (torch.randint(1, V, (64, 1), generator=generator) for _ in range(2))
text = (start + stride * torch.arange(T)) % V
x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)
classes = torch.randint(3, (16,), generator=generator)

class Tokens(nn.Module):
    def __init__(self, dropout=0.0, more=0):
        super().__init__()
        self.embed, self.place, self.drop = nn.Embedding(V + 1, 16), nn.Embedding(T, 16), nn.Dropout(dropout)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, V)
        self.later = nn.ModuleList([nn.Linear(16, V) for _ in range(more)])

    def hidden(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x + x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return x + self.drop(torch.tanh(self.inner(x)))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

def classifier(out=1):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, out))

def adam(*modules):
    return torch.optim.AdamW([p for module in modules for p in module.parameters() if p.requires_grad], lr=0.01)

def fit(loss, net, optimizer=None, steps=5, after=lambda: None):
    # Next tokens, or whatever `loss` takes of them.
    optimizer = optimizer or adam(net)
    for step, rows in enumerate(DataLoader(text, batch_size=B)):
        if step == steps:
            break
        optimizer.zero_grad()
        loss(net, rows).backward()
        optimizer.step()
        after()
    return net

def ce(logits, labels):
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))

def next_tokens(net, rows):
    return ce(net(rows[:, :-1]), rows[:, 1:])

def on_numbers(loss, optimizer, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

def tell(*functions):
    for function in functions:
        torch.manual_seed(3)
        say(name=function.__name__)
        save(function())
"""

OPTIMIZERS = """
def muon():
    net = Tokens()
    matrices = [net.inner.weight]
    rest = [p for p in net.parameters() if p is not net.inner.weight]
    both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    for step, rows in enumerate(DataLoader(text, batch_size=B)):
        if step == 5:
            break
        next_tokens(net, rows).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return net

class ScheduleFree(torch.optim.Optimizer):
    # The gradient is that of a point between the average and the iterate.
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})

    @torch.no_grad()
    def move(self, to):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "z" in state:
                    p.lerp_(state["z"], 1 - 1 / group["beta"] if to == "average" else 1 - group["beta"])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["steps"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["steps"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])

def schedule_free():
    net = classifier()
    optimizer = ScheduleFree(net.parameters(), lr=0.05)
    for epoch in range(3):
        on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 3)
        optimizer.move("average")
        with torch.no_grad():
            net(x)
        optimizer.move("between")
    return net

def stochastic_weight_averaging():
    net = classifier()
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 1)
        average.update_parameters(net)
    return average

def lookahead():
    net = classifier()
    slow = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(4):
        on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 2)
        with torch.no_grad():
            for old, p in zip(slow, net.parameters()):
                p.copy_(old.lerp_(p, 0.5))
    return net

def weights_kept_on_a_sphere():
    net = classifier()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(5):
        on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 1)
        with torch.no_grad():
            net[0].weight.div_(net[0].weight.norm(dim=1, keepdim=True))
    return net

def hogwild():
    net = classifier().share_memory()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 3)

    def trains(number):
        say(name=f"hogwild, process {number}")
        on_numbers(lambda: F.mse_loss(net(x), y), torch.optim.SGD(net.parameters(), lr=0.01))

    # One behind the other: the weights have to be the same without the probe.
    for number in range(2):
        process = torch.multiprocessing.get_context("fork").Process(target=trains, args=(number,))
        process.start()
        process.join()
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 2)
    return net
"""

PARTS = """
def two_optimizers_of_one_body():
    body, actor, critic = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
    of_actor, of_critic = adam(body, actor), adam(critic)
    for _ in range(6):
        features = torch.tanh(body(x))
        value = critic(features)
        advantage = (y - value).detach()
        policy = torch.distributions.Categorical(logits=actor(features))
        loss = -(policy.log_prob(classes) * advantage.squeeze(1)).mean() - 0.01 * policy.entropy().mean()
        loss = loss + 0.5 * (y - value).square().mean()
        of_actor.zero_grad()
        of_critic.zero_grad()
        loss.backward()
        of_actor.step()
        of_critic.step()
    return nn.ModuleList([body, actor, critic])

def soft_actor_critic():
    actor, critic = classifier(2), classifier(2)
    target = copy.deepcopy(critic).requires_grad_(False)
    of_actor, of_critic = adam(actor), adam(critic)
    for _ in range(6):
        with torch.no_grad():
            wanted = y + 0.9 * (target(x) * actor(x).softmax(1)).sum(1, keepdim=True)
        of_critic.zero_grad()
        (critic(x).gather(1, classes[:, None] % 2) - wanted).square().mean().backward()
        of_critic.step()
        policy = actor(x).softmax(1)
        of_actor.zero_grad()
        # Its gradient of the critic is dropped by the next zero_grad.
        (policy * (0.1 * policy.log() - critic(x))).sum(1).mean().backward()
        of_actor.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters()):
                old.lerp_(new, 0.05)
    return nn.ModuleList([actor, critic])

def heads_by_turns():
    body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1) for _ in range(2)])
    optimizer = adam(body, heads)
    for number in range(8):
        optimizer.zero_grad()
        F.mse_loss(heads[number % 2](body(x).relu()), y).backward()
        optimizer.step()
    return nn.ModuleList([body, heads])

def heads_by_turns_of_many_steps():
    body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1) for _ in range(2)])
    optimizer = adam(body, heads)
    for number in range(8):
        optimizer.zero_grad()
        F.mse_loss(heads[number // 4](body(x).relu()), y).backward()
        optimizer.step()
    return nn.ModuleList([body, heads])

def frozen_and_then_thawed():
    net = classifier()
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 5)
    net[0].requires_grad_(True)
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 5)
    return net

def thawed_as_a_new_group():
    net = classifier()
    net[0].requires_grad_(False)
    optimizer = adam(net)
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 5)
    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 1e-3})
    on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 5)
    return net

def layers_dropped_at_random():
    net = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)] + [nn.Linear(8, 1)])
    optimizer = adam(net)
    for number in range(8):
        z = x
        for at, layer in enumerate(net[:3]):
            z = z if at == number % 3 else z + layer(z).relu()
        optimizer.zero_grad()
        F.mse_loss(net[3](z), y).backward()
        optimizer.step()
    return net

def batch_norm_frozen_in_eval_mode():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = adam(net)
    for _ in range(5):
        net.train()
        net[1].eval()
        on_numbers(lambda: F.mse_loss(net(x), y), optimizer, 1)
    return net

def diffusion():
    net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = adam(net)
    for _ in range(5):
        time, noise = torch.rand(16, 1), torch.randn(16, 8)
        noisy = (1 - time).sqrt() * x + time.sqrt() * noise
        on_numbers(lambda: F.mse_loss(net(torch.cat([noisy, time], 1)), noise), optimizer, 1)
        for old, new in zip(average.parameters(), net.parameters()):
            old.lerp_(new.detach(), 0.01)
    return net

def truncated_backpropagation():
    net = nn.ModuleDict({"embed": nn.Embedding(V, 8), "rnn": nn.LSTM(8, 16, batch_first=True),
                         "head": nn.Linear(16, V)})
    optimizer, state = adam(net), None
    stream = text.reshape(B, -1)
    for begin in range(0, 5 * T, T):
        rows = stream[:, begin : begin + T + 1]
        hidden, state = net["rnn"](net["embed"](rows[:, :-1]), state)
        loss = ce(net["head"](hidden), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        state = tuple(one.detach() for one in state)
    return net

def contrastive():
    images, texts = classifier(4), Tokens()
    scale = nn.Parameter(torch.tensor(2.0))
    net = nn.ModuleDict({"images": images, "texts": texts, "scales": nn.ParameterList([scale])})
    optimizer = adam(net)
    project = net["project"] = nn.Linear(16, 4)
    optimizer = adam(images, texts.embed, texts.place, texts.inner, project, net["scales"])
    for step in range(5):
        rows = text[8 * step : 8 * step + 8]
        one = F.normalize(images(x[:8]), dim=1)
        other = F.normalize(project(texts.hidden(rows).mean(1)), dim=1)
        logits, labels = scale.exp() * one @ other.T, torch.arange(8)
        optimizer.zero_grad()
        ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
        optimizer.step()
    return net
"""

TEXTS = """
def masked_tokens():
    def loss(net, rows):
        masked = torch.rand(rows.shape) < 0.3
        masked[:, 0] = True
        return F.cross_entropy(
            net(rows.masked_fill(masked, V)).view(-1, V), rows.masked_fill(~masked, -100).view(-1))
    return fit(loss, Tokens())

def masked_tokens_of_which_some_are_kept():
    # As BERT has it: a tenth are as they were, a tenth are random.
    def loss(net, rows):
        chosen, kind = torch.rand(rows.shape) < 0.3, torch.rand(rows.shape)
        chosen[:, 0] = True
        read = rows.masked_fill(chosen & (kind < 0.8), V)
        read = torch.where(chosen & (kind > 0.9), torch.randint(V, rows.shape), read)
        return F.cross_entropy(net(read)[chosen], rows[chosen])
    return fit(loss, Tokens())

def replaced_tokens_are_found():
    net = Tokens()
    def loss(net, rows):
        replaced = torch.rand(rows.shape) < 0.3
        read = torch.where(replaced, torch.randint(V, rows.shape), rows)
        return F.binary_cross_entropy_with_logits(net(read)[..., 0], (read != rows).float())
    return fit(loss, net)

def a_class_of_each_token():
    # Labels are a function of the token that was read, as parts of speech are.
    return fit(lambda net, rows: ce(net(rows), rows % 5), Tokens())

def a_class_of_each_row():
    def loss(net, rows):
        return F.cross_entropy(net(rows).mean(1), rows[:, 0] % 3)
    return fit(loss, Tokens())

def prefix():
    def loss(net, rows):
        labels = rows[:, 1:].clone()
        labels[:, :5] = -100
        return ce(net(rows[:, :-1]), labels)
    return fit(loss, Tokens())

def learnt_prompts():
    net = Tokens().requires_grad_(False)
    net.prompt = nn.Parameter(torch.randn(1, 3, 16))
    def loss(net, rows):
        hidden = torch.cat([net.prompt.expand(B, -1, -1), net.embed(rows)], 1)
        return ce(net.head(torch.tanh(net.inner(hidden.cumsum(1))))[:, 3:-1], rows[:, 1:])
    return fit(loss, net)

class Translates(nn.Module):
    def __init__(self):
        super().__init__()
        self.reads, self.writes = Tokens(), Tokens()
        del self.reads.head

    def forward(self, read, written):
        return self.writes.head(self.writes.hidden(written) + self.reads.hidden(read).mean(1, keepdim=True))

def encoder_and_decoder():
    def loss(net, rows):
        written = (rows * 2) % V
        begun = F.pad(written[:, :-1], (1, 0), value=V)
        return ce(net(rows, begun), written)
    return fit(loss, Translates())

def an_encoder_that_reads_the_same_text():
    # Copies: the encoder's tokens are the labels, and what the decoder reads is one behind.
    def loss(net, rows):
        return ce(net(rows, F.pad(rows[:, :-1], (1, 0), value=V)), rows)
    return fit(loss, Translates())

def heads_for_later_tokens():
    def loss(net, rows):
        hidden = net.hidden(rows)
        losses = [ce(net.head(hidden[:, :-1]), rows[:, 1:])]
        losses += [ce(head(hidden[:, : -at]), rows[:, at:]) for at, head in enumerate(net.later, 2)]
        return torch.stack(losses).mean()
    return fit(loss, Tokens(more=2))

def smoothed():
    def loss(net, rows):
        return F.cross_entropy(net(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=0.1)
    return fit(loss, Tokens())

def packed_in_one_row():
    net = Tokens()
    def loss(net, rows):
        packed = rows.reshape(1, -1)
        ends = torch.arange(packed.shape[1]) % T == 0
        hidden = net.embed(packed) + net.place(torch.arange(T).repeat(B))
        return ce(net.head(torch.tanh(net.inner(hidden)))[:, :-1], packed.masked_fill(ends, -100)[:, 1:])
    return fit(loss, net)

def one_answer_of_each_prompt():
    # The best of two samples is trained on.
    def loss(net, rows):
        logits = net(rows)[:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)
        return each.view(-1, 2).min(1).values.mean()
    return fit(loss, Tokens())

def loss_in_chunks():
    def loss(net, rows):
        logits, labels = net(rows[:, :-1]).reshape(-1, V), rows[:, 1:].reshape(-1)
        parts = zip(logits.split(T - 1), labels.split(T - 1))
        return sum(F.cross_entropy(*part, reduction="sum") for part in parts) / labels.numel()
    return fit(loss, Tokens())

def row_by_row():
    def loss(net, rows):
        logits = net(rows[:, :-1])
        return sum(F.cross_entropy(logits[at], rows[at, 1:]) for at in range(B)) / B
    return fit(loss, Tokens())

def policy_gradient():
    def loss(net, rows):
        logs = net(rows[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2)
        reward = (rows[:, 0] % 2).float()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        ratio = (logs - logs.detach()).exp()
        return -torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]).mean()
    return fit(loss, Tokens())

def preferences():
    net = Tokens()
    reference = copy.deepcopy(net).requires_grad_(False).eval()
    def logs(model, rows):
        return model(rows[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2).sum(1)
    def loss(net, rows):
        chosen, rejected = rows, rows.flip(1)
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = logs(reference, both)
        good, bad = (logs(net, both) - before).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean()
    return fit(loss, net)
"""

TEACHERS = """
def kl(wanted, logits):
    return F.kl_div(logits.log_softmax(-1).flatten(0, 1), wanted.softmax(-1).flatten(0, 1), reduction="batchmean")

def best_tokens_of_a_teacher():
    teacher = Tokens().requires_grad_(False)
    def loss(net, rows):
        values, best = teacher(rows[:, :-1]).topk(5)
        logs = net(rows[:, :-1]).log_softmax(-1).gather(2, best)
        return F.kl_div(logs.flatten(0, 1), values.softmax(-1).flatten(0, 1), reduction="batchmean")
    return fit(loss, Tokens())

class Fused(torch.autograd.Function):
    # The matrix of the teacher is read, and gets no gradient, though nobody has said that it needs none.
    @staticmethod
    def forward(ctx, hidden, matrix, of_teacher, teachers):
        logs, wanted = (hidden @ matrix.T).log_softmax(-1), (of_teacher @ teachers.T).softmax(-1)
        ctx.save_for_backward(hidden, matrix, logs, wanted)
        return -(wanted * logs).sum(-1).mean()

    @staticmethod
    def backward(ctx, gradient):
        hidden, matrix, logs, wanted = ctx.saved_tensors
        of_logits = gradient * (logs.exp() - wanted) / len(logs)
        return of_logits @ matrix, of_logits.T @ hidden, None, None

def a_fused_loss_that_reads_the_teacher():
    teacher = Tokens()
    def loss(net, rows):
        with torch.no_grad():
            wanted = teacher.hidden(rows).flatten(0, 1)
        return Fused.apply(net.hidden(rows).flatten(0, 1), net.head.weight, wanted, teacher.head.weight)
    net = Tokens()
    net.head.bias.requires_grad_(False)
    return fit(loss, net)

def kept_near_its_start():
    net = Tokens()
    begun = copy.deepcopy(net).requires_grad_(False)
    return fit(lambda net, rows: next_tokens(net, rows) + 0.1 * kl(begun(rows[:, :-1]), net(rows[:, :-1])), net)

def kept_near_its_start_at_a_small_rate():
    net = Tokens()
    begun = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    return fit(lambda net, rows: next_tokens(net, rows) + 0.1 * kl(begun(rows[:, :-1]), net(rows[:, :-1])), net,
               optimizer, after=warm.step)

def an_average_as_teacher():
    net = Tokens()
    average = copy.deepcopy(net).requires_grad_(False)
    def move():
        for old, new in zip(average.parameters(), net.parameters()):
            old.lerp_(new.detach(), 0.1)
    return fit(lambda net, rows: next_tokens(net, rows) + kl(average(rows[:, :-1]), net(rows[:, :-1])), net,
               after=move)

def two_passes_with_dropout():
    def loss(net, rows):
        one, other = net(rows[:, :-1]), net(rows[:, :-1])
        labels = ce(one, rows[:, 1:]) + ce(other, rows[:, 1:])
        return labels / 2 + (kl(one, other) + kl(other, one)) / 4
    return fit(loss, Tokens(dropout=0.2))

def two_that_teach_each_other():
    pair = nn.ModuleList([Tokens(), Tokens()])
    def loss(pair, rows):
        one, other = (net(rows[:, :-1]) for net in pair)
        both = kl(one.detach(), other) + kl(other.detach(), one)
        return ce(one, rows[:, 1:]) + ce(other, rows[:, 1:]) + both
    return fit(loss, pair)

def classes_mixed():
    def loss(net, rows):
        share, other = 0.7, rows.flip(0)
        logits = net(rows).mean(1)
        wanted = share * F.one_hot(rows[:, 0], V) + (1 - share) * F.one_hot(other[:, 0], V)
        return -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    return fit(loss, Tokens())
"""

# Teachers first: a process has so many searches for modules.
SCRIPTS = (TEACHERS, TEXTS, PARTS, OPTIMIZERS)
SUSPECTED = {
    "lookahead": {"outside_writes"},
    "weights_kept_on_a_sphere": {"outside_writes"},
    "heads_by_turns_of_many_steps": {"no_gradient"},
}
"""What is true of a healthy program and may be a mistake in another."""


def _names(script: str) -> list[str]:
    names = [line[4 : line.index("(")] for line in script.splitlines() if line.startswith("def ")]
    return [name for name in names if name != "kl"]


NAMES = [name for script in SCRIPTS for name in _names(script)]
TEXT = SETUP + "".join(SCRIPTS) + f"\ntell({', '.join(NAMES)})\n"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return outcomes(watched_once(tmp_path_factory, "healthy_programs", TEXT, twice=False))


@pytest.mark.soak
def test_no_healthy_program_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_program_has_no_contradiction_and_no_unknown_suspicion(
    programs: Found, name: str
) -> None:
    lines = [line for one, found in programs.items() if one.split(",")[0] == name for line in found]
    assert lines and not of_degree(lines, FAIL)
    assert {line["id"] for line in of_degree(lines, SUSPICION)} == SUSPECTED.get(name, set())
