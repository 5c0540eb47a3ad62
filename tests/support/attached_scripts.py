"""The training scripts of tests/system/attach: each says what the log of a watched run has to hold."""

from __future__ import annotations

PLAIN = """
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
rows = torch.utils.data.TensorDataset(torch.randn(44, 8), torch.randn(44, 1))
test = torch.utils.data.DataLoader(rows, 30)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        said = dict(loss=loss.item(), lr=optimizer.param_groups[0]["lr"], grad_norm=norm.item())
        optimizer.step()
        schedule.step()
        say(**said, rows=len(x), tokens=None, backwards=1)
    with torch.no_grad():
        for x, _ in test:
            net(x)
save(net)
"""

SLEEPING = """
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out")
arguments = parser.parse_args()
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    for step in range(arguments.steps):
        time.sleep(arguments.sleep)
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
finally:
    if arguments.out:
        with open(arguments.out + "/closed", "w") as file:
            file.write(os.environ["WANDB_MODE"])
"""
"""Its options say how long a step takes, and how many it makes without being ended."""

LOADED = """
import argparse, itertools, time
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--transform", type=float, default=0.005)
parser.add_argument("--step-sleep", type=float, default=0.0)
arguments = parser.parse_args()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(arguments.transform)
        return torch.full((8,), index / 1e5)

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    for x in itertools.islice(torch.utils.data.DataLoader(Rows(), batch_size=8), arguments.steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        time.sleep(arguments.step_sleep)
        optimizer.step()
finally:
    with open("kept.txt", "w") as file:
        file.write("of this run")
"""
"""Its batches come from a slow place, and it writes a file into its folder at its end."""

ACCUMULATION = """
from torch.utils.checkpoint import checkpoint
body = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.GELU())
head = torch.nn.Linear(8, 11)
both = torch.nn.ModuleList([body, head])
optimizer = torch.optim.SGD(both.parameters(), lr=torch.tensor(0.25), momentum=0.9)
ids = [{"input_ids": torch.randint(0, 11, (5,)), "weight": torch.tensor(1.0)} for _ in range(30)]
losses = []
for number, batch in enumerate(torch.utils.data.DataLoader(ids, batch_size=2), 1):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # A reentrant checkpoint calls autograd.backward inside the backward pass.
        hidden = checkpoint(body[1:], body[0](batch["input_ids"]), use_reentrant=True)
        logits = head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    loss = loss.to(torch.bfloat16) / 3
    losses.append(loss.item())
    if number % 2:
        loss.backward()
    else:
        torch.autograd.backward([loss])
    if number % 3 == 0:
        norm = torch.nn.utils.clip_grad_norm_(parameters=both.parameters(), max_norm=0.1, norm_type=2)
        said = dict(loss=sum(losses), losses=list(losses), grad_norm=norm.item(),
                    lr=optimizer.param_groups[0]["lr"].item())
        optimizer.step()
        optimizer.zero_grad()
        losses.clear()
        say(**said, rows=6, tokens=30, backwards=3)
save(both)
"""

OTHER_STEPS = """
x, y = torch.randn(16, 8), torch.randn(16, 1)

def a_closure():
    net = model().eval()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        losses.clear()
        optimizer.step(closure)
        assert len(losses) > 1
        say(loss=sum(losses), lr=0.5, grad_norm=None, rows=None, tokens=None, backwards=len(losses))
    return net

def two_optimizers():
    generator, judge = model(4), model(1)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.02)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    for _ in range(4):
        fake = generator(torch.randn(6, 4))
        real, made = judge(torch.randn(6, 1)), judge(fake.detach())
        first = bce(real, torch.ones_like(real))
        second = bce(made, torch.zeros_like(made))
        of_judge.zero_grad()
        first.backward()
        second.backward()
        of_judge.step()
        say(loss=first.item() + second.item(), lr=0.01, grad_norm=None, rows=None, backwards=2)
        of_generator.zero_grad()
        bce(judge(fake), torch.ones_like(real)).backward()
        of_generator.step()
    return torch.nn.ModuleList([generator, judge])

class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {"lr": 0.5})
        self.inner = inner

    def step(self, closure=None):
        if closure is not None:
            closure()
        self.inner.step()

def an_optimizer_inside_another():
    net = model().eval()
    outer = Outer(torch.optim.SGD(net.parameters(), lr=0.125))
    for number in range(6):
        if number == 2:
            try:
                outer.step(lambda: 1 / 0)
            except ZeroDivisionError:
                pass
        outer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward(retain_graph=True)
        lost = number == 4
        if lost:
            try:
                loss.backward(torch.ones(3))
            except RuntimeError:
                pass
        outer.step()
        say(loss=None if lost else loss.item(), lr=0.125, backwards=1 + lost)
    return net

def optimizers_in_the_backward_pass():
    net = model().eval()
    hooked = {p: torch.optim.SGD([p], lr=0.25) for p in net.parameters()}

    def step(p):
        hooked[p].step()
        hooked[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss = (net(x) - y).square().mean()
        loss.backward()
        say(loss=loss.item(), lr=0.25, backwards=1)
    return net

def a_gradient_scaler_that_leaves_out_a_step():
    net = model().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(4):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number != 1:
            say(loss=loss.item(), grad_norm=norm.item(), lr=0.25, backwards=1)
    return net

# Nothing holds the optimizer of one of them when the next begins.
import gc
# The last of them holds its own: autograd keeps the hooks of its parameters.
save(*[(train(), gc.collect())[0] for train in (
    a_closure, two_optimizers, an_optimizer_inside_another,
    a_gradient_scaler_that_leaves_out_a_step, optimizers_in_the_backward_pass)])
"""

WORKERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, at):
        return torch.full((8,), float(at)) / 24 + torch.rand(8) / 100, torch.tensor([float(at)])

def train(workers, how):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(
        Rows(), batch_size=8, shuffle=True, num_workers=workers, multiprocessing_context=how
    ):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        say(loss=loss.item(), lr=0.1, rows=8, backwards=1)
    save(net)

if __name__ == "__main__":
    train(2, "fork")
    train(1, "spawn")
"""

FORKS = """
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step(quiet=False):
    loss = (net(torch.randn(4, 8)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not quiet:
        say(loss=loss.item(), lr=0.1)

step()
step()
child = os.fork()
if not child:
    step(quiet=True)
    step(quiet=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1])
# Number for number, somebody else's file: the probe neither writes nor closes it.
step()
if not os.fork():
    os.closerange(3, 256)
    mine = [os.open("mine.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC) for _ in range(64)]
    step(quiet=True)
    print([os.write(fd, b"x") for fd in mine] == [1] * 64, flush=True)
    sys.exit(0)
os.wait()
step()
save(net)
"""

COMPILED = """
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.randn(44, 8), torch.randn(44, 1))
loader = torch.utils.data.DataLoader(rows, 8)
compiled = dict(backend="aot_eager")

def loss_of(f, x, y):
    optimizer.zero_grad()
    return (f(x) - y).square().mean()

def clip():
    return torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)

def tell(what):
    # The names in the reasons of a break hold files and lines; their numbers are what must not change.
    counters = torch._dynamo.utils.counters
    print(what, {name: sum(counters[name].values()) for name in ("graph_break", "resumes", "recompiles")},
          dict(counters["stats"]), dict(counters["aot_autograd"]))
    counters.clear()
    torch._dynamo.reset()

fast = torch.compile(net, **compiled)
for x, y in loader:
    loss = loss_of(fast, x, y)
    loss.backward()
    norm = clip()
    optimizer.step()
    say(loss=loss.item(), lr=0.1, grad_norm=norm.item(), rows=len(x), backwards=1)
tell("a model")

@torch.compile(**compiled)
def forward_and_backward(x, y):
    loss = loss_of(net, x, y)
    loss.backward()
    return loss, clip()

for x, y in loader:
    loss, norm = forward_and_backward(x, y)
    optimizer.step()
    say(loss=loss.item(), lr=0.1, rows=len(x), backwards=1)
tell("backward and clipping")

@torch.compile(**compiled)
def from_loader(batches):
    x, y = next(batches)
    loss = loss_of(net, x, y)
    torch.autograd.backward(loss)
    return loss

batches = iter(loader)
for _ in range(2):
    loss = from_loader(batches)
    optimizer.step()
    say(loss=loss.item(), lr=0.1, rows=8, backwards=1)
tell("a loader")

@torch.compile(**compiled)
def whole(x, y):
    loss = loss_of(net, x, y)
    loss.backward()
    optimizer.step()

for x, y in loader:
    whole(x, y)
tell("an optimizer")
assert torch.compile(clip, fullgraph=True, **compiled)() is not None
tell("clipping without a break")
save(net)
"""

RECOMPILED = """
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)

def forward(x, factor):
    return net(x) * factor

fast = torch.compile(forward, backend="aot_eager", dynamic=False)
for number in range(1, 10):
    x = torch.randn(8 if number < 8 else 4, 8)
    optimizer.zero_grad()
    loss = fast(x, 2 if number < 2 else 3).square().mean()
    loss.backward()
    optimizer.step()
    say(loss=loss.item())
torch._dynamo.utils.counters.clear()
torch._dynamo.reset()
save(net)
"""

SURROUNDINGS = """
import inspect, pickle, sitecustomize, threading, warnings
print(sorted(set(sys.modules) & {"engine", "workbench", "usercustomize"}))
import engine
print(engine.MINE, sitecustomize.MINE, os.path.basename(sitecustomize.__file__), sitecustomize.__name__)
print([entry.replace(os.getcwd(), "") for entry in sys.path if not entry.endswith("attach/probe")])
ours = [entry for entry in sys.path if entry.endswith("attach/probe")]
print("APR_WATCH_RUN" not in os.environ or ours == sys.path[-1:])
print(sys.argv, __name__, threading.active_count(), warnings.filters[:2])
for f in (torch.Tensor.backward, torch.autograd.backward, torch.nn.utils.clip_grad_norm_,
          torch.optim.Optimizer.__init__, torch.utils.data.dataloader._BaseDataLoaderIter.__next__):
    print(f.__name__, f.__qualname__, f.__module__, len(f.__doc__ or ""), inspect.signature(f))
print(pickle.loads(pickle.dumps(torch.Tensor.backward)) is torch.Tensor.backward)
print(type(torch.__spec__.loader).__name__, "exec_module" in vars(torch.__spec__.loader))
import random
print(random.Random(3).random(), random.getstate() == sitecustomize.STATE, torch.initial_seed())
save(torch.nn.Linear(2, 2))
"""

NON_FINITE = """
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for factor in (1.0, float("nan"), float("inf")):
    with torch.no_grad():
        net.weight.fill_(1.0), net.bias.fill_(1.0)
    optimizer.zero_grad()
    (net(torch.ones(3, 2)).mean() * factor).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    say(lr=0.1, rows=None, backwards=1)
save(net)
"""

STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(6, 8))

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(Stream(), 2):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    say(loss=loss.item(), rows=2)
save(net)
"""

FAULTS = """
import hashlib, signal, types
import apr_watch.gradients, apr_watch.hooks, apr_watch.identities, apr_watch.parameters, apr_watch.step
import apr_watch.sampled, apr_watch.values, apr_watch.writer
Steps, Log = apr_watch.step.Steps, apr_watch.writer.Log
optimizers = sys.modules["torch.optim.optimizer"]

class CallbackHandler:
    def on_step_begin(self, args, state, control):
        pass

def _call_callback_hooks(trainer, hook_name):
    pass

# What stands in for two frameworks: the doors at which they say how many steps are left.
callbacks = sys.modules["transformers.trainer_callback"] = types.ModuleType("callbacks")
calls = sys.modules["lightning.pytorch.trainer.call"] = types.ModuleType("calls")
callbacks.CallbackHandler, calls._call_callback_hooks = CallbackHandler, _call_callback_hooks

def hooked():
    loader = torch.utils.data.dataloader._BaseDataLoaderIter
    return [torch.Tensor.backward, torch.autograd.backward, torch.nn.utils.clip_grad_norm_,
            torch.nn.utils.clip_grad.clip_grad_norm_, loader.__next__,
            CallbackHandler.on_step_begin, calls._call_callback_hooks, torch.optim.Optimizer.__init__,
            len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]

def train():
    torch.manual_seed(3)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    for x, y in torch.utils.data.DataLoader(rows, 8):
        CallbackHandler().on_step_begin(None, None, None)
        calls._call_callback_hooks(None, "on_train_batch_start")
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    torch.autograd.backward(net(x).sum())
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()

plain, originals = train(), hooked()

def with_fault(owner, name, fault, at):
    calls = []
    real = getattr(owner, name)
    def faulty(*args, **kwargs):
        calls.append(1)
        return fault() if len(calls) == at else real(*args, **kwargs)
    folder = os.path.abspath(f"{name}-{at}-{fault.__name__}")
    os.mkdir(folder)
    setattr(owner, name, faulty)
    apr_watch.hooks.Hooks(torch, folder).install()
    try:
        weights = train()
    except Stop:
        weights = "stopped"
    finally:
        setattr(owner, name, real)
    path = os.path.join(folder, "events.jsonl")
    lines = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    return dict(
        name=name, at=at, called=len(calls) >= at, same=weights == plain, restored=hooked() == originals,
        steps=sum(line["kind"] == "step" for line in lines),
        notes=[line["text"] for line in lines if line["kind"] == "note"], weights=weights)

# With a probe whose log may not be written.
def into(name):
    hooks = apr_watch.hooks.Hooks(torch, os.path.abspath(name))
    hooks.install()
    same = train() == plain
    hooks._on = False
    hooks.remove()
    return dict(name=name, same=same, restored=hooked() == originals)

os.mkdir("old")
with open("old/events.jsonl", "w") as file:
    file.write("a line\\n")
say(**into("old"), left=open("old/events.jsonl").read())
# A folder of that name stands for a run folder that cannot be written: root may write everywhere.
os.makedirs("shut/events.jsonl")
os.chmod("shut", 0o555)
say(**into("shut"), left=os.listdir("shut/events.jsonl"))

class Stop(Exception):
    pass

def fail():
    raise ValueError("planted")

for name in ("data_begins", "data_ends", "batch_fetched", "backward_begins", "backward_ends", "clipped",
             "optimizer_begins", "optimizer_ends", "planned"):
    for at in (1, 4):
        say(**with_fault(Steps, name, fail, at))
say(**with_fault(Steps, "no_batch", fail, 1))
say(**with_fault(apr_watch.values.Reader, "keep", fail, 4))
for owner, name in ((apr_watch.compiles.Compiles, "since_last"), (apr_watch.memory.HeldMemory, "record"),
                    (apr_watch.step.Batches, "fetched"), (apr_watch.step.Batches, "lap")):
    say(**with_fault(owner, name, fail, 2))
for at in (1, 4):
    for name in ("step_begins", "step_ends"):
        say(**with_fault(apr_watch.identities.Identities, name, fail, at))
say(**with_fault(apr_watch.sampled.SampledStep, "lines", fail, 2))
say(**with_fault(apr_watch.gradients.Chain, "begin", fail, 2))
say(**with_fault(apr_watch.parameters.MissingGradients, "check", fail, 3))
for name in ("mark", "forget"):
    say(**with_fault(apr_watch.device_clock.DeviceClock, name, fail, 3))
say(**with_fault(apr_watch.step, "Log", fail, 1))
say(**with_fault(apr_watch.step, "claim", fail, 1))
say(**with_fault(Steps, "optimizer_created", fail, 1))
say(**with_fault(Log, "write", fail, 5))
say(**with_fault(apr_watch.hooks, "_is_below", fail, 7))

def handler(number, frame):
    raise Stop

def signalled():
    os.kill(os.getpid(), signal.SIGUSR1)

signal.signal(signal.SIGUSR1, handler)
say(**with_fault(Steps, "clipped", signalled, 2))
"""
