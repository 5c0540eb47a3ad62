"""Scripts of several ranks: each rank's weights are the same to the byte with the probe, and rank 0 logs every step.

`make frameworks` and `make soak` run them: up to six processes at a time import torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import FACT, FAIL, PASS, SUSPICION, UNKNOWN
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.attached import BEGIN, Ran, agree, run_twice, run_watched, watched_once
from tests.system.attach.test_identities import degrees, outcomes

pytestmark = pytest.mark.soak

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

TRAIN = """
import torch.distributed as dist

def train(net, rank, optimizer, clip):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(11 + rank)
    rows = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(rows, batch_size=8)):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        norm = clip(net)
        said = dict(loss=loss.item(), lr=optimizer.param_groups[0]["lr"], grad_norm=norm)
        optimizer.step()
        schedule.step()
        if rank == 0:
            say(**said, rows=8, backwards=1)

def clip(net):
    return torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()

def data_parallel(rank):
    net = torch.nn.parallel.DistributedDataParallel(model())
    train(net, rank, torch.optim.AdamW(net.parameters(), lr=0.1), clip)
    torch.save(net.module.state_dict(), f"weights-{rank}.pt")
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)
"""

DDP = (
    TRAIN
    + """
dist.init_process_group("gloo")
data_parallel(dist.get_rank())
dist.destroy_process_group()
"""
)

SPAWN = (
    TRAIN
    + """
def main(rank, folder):
    torch.manual_seed(7)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert "RANK" not in os.environ
    data_parallel(rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (os.getcwd(),), nprocs=2)
"""
)

FSDP = (
    TRAIN
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def clip_shards(net):
    # A DTensor: to read it takes a collective, so that the log has no norm.
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)

dist.init_process_group("gloo")
rank, mesh, net = dist.get_rank(), init_device_mesh("cpu", (2,)), model()
for layer in net:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
train(net, rank, torch.optim.AdamW(net.parameters(), lr=0.1), clip_shards)
shards = {name: value.to_local() for name, value in net.state_dict().items()}
torch.save(shards, f"weights-{rank}.pt")
dist.destroy_process_group()
"""
)

BETWEEN = """
import copy
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(5)
x, y = torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator)
rows = TensorDataset(x, y)

def spread():
    return DataLoader(rows, 8, sampler=DistributedSampler(rows))

def nothing():
    pass

def fit(net, call=None, loader=None, before=nothing, after=nothing):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in spread() if loader is None else loader:
        optimizer.zero_grad()
        ((call or net)(x) - y).square().mean().backward()
        before()
        optimizer.step()
        after()
    return net

def averaged(tensors):
    for one in tensors:
        dist.all_reduce(one)
        one /= 2

def tell(*functions):
    # Each is a training; its name is said beside it.
    for function in functions:
        torch.manual_seed(7)
        net = function()
        torch.save([getattr(p, "to_local", lambda: p)() for p in net.parameters()],
                   f"weights-{rank}-{function.__name__}.pt")
        # What rank 1 has said is there before rank 0 goes on.
        dist.barrier()
        if rank == 0:
            say(name=function.__name__)
    dist.destroy_process_group()
"""
"""Trainings of two ranks, one behind the other."""

HEALTHY = (
    BETWEEN
    + """
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

def ddp():
    return fit(DDP(model()))

def ddp_in_a_module_that_is_held_twice():
    net = nn.ModuleDict({"inner": model()})
    net["wrapped"] = DDP(net["inner"])
    return fit(net, net["wrapped"])

def accumulation():
    net = DDP(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number, (x, y) in enumerate(spread()):
        if number % 2:
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with net.no_sync():
                (net(x) - y).square().mean().backward()
    return net

def two_networks():
    one, two = DDP(model()), DDP(model())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (one, two)]
    for x, y in spread():
        for net, optimizer in zip((one, two), optimizers):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
    return one

def gradients_averaged_by_hand():
    net = model()
    return fit(net, before=lambda: averaged([p.grad for p in net.parameters()]))

def weights_averaged_by_hand():
    net = model()
    return fit(net, after=lambda: averaged([p.data for p in net.parameters()]))

def ensemble():
    torch.manual_seed(100 + rank)
    return fit(model())

def communication_hook():
    net = DDP(model())
    group, _ = dist.new_subgroups(1)
    net.register_comm_hook(local.PostLocalSGDState(None, group, 1), local.post_localSGD_hook)
    return fit(net)

def parts_of_one():
    # As by tensor parallelism: each rank has half of the hidden units, and both read the same.
    net = nn.Sequential(nn.Linear(8, 8 + rank), nn.Linear(8 + rank, 1))
    return fit(net, loader=DataLoader(rows, 8))

def parts_of_one_shape():
    torch.manual_seed(100 + rank)
    return fit(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), loader=DataLoader(rows, 8))

def left_alone():
    # An expert of its own on each rank.
    net = model()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
    return fit(DDP(net))

def own_file():
    # Each rank has loaded its part of the data, and the indices are the same.
    part = TensorDataset(x[rank::2], y[rank::2])
    return fit(DDP(model()), loader=DataLoader(part, 8))

def own_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(x[rank::2], y[rank::2])
    return fit(DDP(model()), loader=DataLoader(Stream(), 8))

def split_optimizer():
    net = DDP(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    for x, y in spread():
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net

def sharded():
    net, mesh = model(), init_device_mesh("cpu", (2,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fit(fully_shard(net, mesh=mesh))

tell(ddp, ddp_in_a_module_that_is_held_twice, accumulation, two_networks, gradients_averaged_by_hand,
     weights_averaged_by_hand, ensemble, communication_hook, parts_of_one, parts_of_one_shape, left_alone,
     own_file, own_stream, split_optimizer, sharded)
"""
)

MISTAKES = (
    BETWEEN
    + """
def bypassed():
    net = DDP(model())
    return fit(net, net.module)

def bypassed_by_a_method():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model()
        def forward(self, x):
            return self.body(x)
        def loss(self, x):
            return self(x)
    net = DDP(Net())
    return fit(net, lambda x: net.module.loss(x))

def gone_when_it_is_judged():
    net = DDP(model())
    return copy.deepcopy(fit(net, net.module).module)

def written_on_one_rank():
    net, steps = DDP(model()), []
    def clamp():
        steps.append(0)
        if rank == 0 and len(steps) == 2:
            net.module[0].weight.data.clamp_(-0.1, 0.1)
    return fit(net, after=clamp)

def loaded_on_one_rank():
    net = DDP(model())
    if rank == 0:
        net.module.load_state_dict(model().state_dict())
    return fit(net)

def unfrozen_after_wrapping():
    net = model()
    net[0].requires_grad_(False)
    net = DDP(net)
    net.module[0].requires_grad_(True)
    return fit(net)

def new_head_after_wrapping():
    net = DDP(model(), find_unused_parameters=True)
    net.module[3] = nn.Linear(16, 1)
    return fit(net)

def never_averaged():
    return fit(model())

def partly_averaged():
    net = model()
    return fit(net, before=lambda: averaged([p.grad for p in net[0].parameters()]))

def always_in_no_sync():
    net = DDP(model())
    with net.no_sync():
        return fit(net)

def same_data():
    return fit(DDP(model()), loader=DataLoader(rows, 8, shuffle=True))

def same_data_by_workers():
    return fit(DDP(model()), loader=DataLoader(rows, 8, num_workers=1))

def same_stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(x, y)
    net = model()
    return fit(net, loader=DataLoader(Stream(), 8), before=lambda: averaged([p.grad for p in net.parameters()]))

tell(bypassed, bypassed_by_a_method, gone_when_it_is_judged, written_on_one_rank, loaded_on_one_rank,
     unfrozen_after_wrapping, new_head_after_wrapping, never_averaged, partly_averaged, always_in_no_sync,
     same_data, same_data_by_workers, same_stream)
"""
)

FRAMEWORKS = (
    BETWEEN.replace(
        'dist.init_process_group("gloo")\nrank = dist.get_rank()', 'rank = int(os.environ["RANK"])'
    )
    + """
import transformers
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

def trainer():
    size = dict(n_layer=1, n_head=2, n_embd=16, n_positions=16)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **size))
    tokens = torch.randint(0, 64, (64, 16), generator=generator)
    about = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, save_strategy="no")
    asked = transformers.TrainingArguments("out", use_cpu=True, report_to=[], disable_tqdm=True, **about)
    data = [dict(input_ids=row, labels=row) for row in tokens]
    transformers.Trainer(net, asked, train_dataset=data).train()
    return net

def accelerated(**more):
    accelerator = Accelerator(cpu=True, **more)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(net, optimizer, DataLoader(rows, 8, shuffle=True))

def step(accelerator, net, optimizer, x, y):
    accelerator.backward((net(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()

def accumulated():
    accelerator, net, optimizer, loader = accelerated(gradient_accumulation_steps=2)
    for x, y in loader:
        with accelerator.accumulate(net):
            step(accelerator, net, optimizer, x, y)
    return net

def local_sgd():
    accelerator, net, optimizer, loader = accelerated()
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=3) as local:
        for x, y in loader:
            step(accelerator, net, optimizer, x, y)
            local.step()
    return net

def unwrapped():
    accelerator, net, optimizer, loader = accelerated()
    for x, y in loader:
        step(accelerator, accelerator.unwrap_model(net), optimizer, x, y)
    return net

tell(trainer, accumulated, local_sgd, unwrapped)
"""
)

ENDS_EARLY = (
    BETWEEN
    + """
steps = []
def leave():
    steps.append(0)
    if len(steps) == LAST:
        dist.barrier()
        if rank:
            os._exit(0)
fit(model(), after=leave)
if rank == 0:
    say(name="ends early")
"""
)


def agree_of_two(ran: Ran) -> None:
    agree(ran)
    (facts,) = ran.of_kind("watched")
    assert (facts["rank"], facts["world"]) == (0, 2)
    assert facts["parameters"] == 8 * 16 + 16 + 16 + 1
    assert len(ran.steps) == 6 and set(ran.weights) == {"weights-0.pt", "weights-1.pt"}


@pytest.mark.parametrize(("script", "launch"), [(DDP, TORCHRUN), (SPAWN, ())])
def test_ranks_of_ddp_are_the_same_to_the_byte_and_the_first_logs_every_step(
    tmp_path: Path, script: str, launch: tuple[str, ...]
) -> None:
    """Under torchrun, and in processes that the script starts, which have no RANK in their environment."""
    watched, alone = run_twice(tmp_path, script, *launch)
    agree_of_two(watched)
    assert all(step["grad_norm"] > 0 for step in watched.steps) and not alone.lines


def test_ranks_of_fsdp_are_the_same_to_the_byte_and_the_first_logs_every_step(
    tmp_path: Path,
) -> None:
    watched, _ = run_twice(tmp_path, FSDP, *TORCHRUN)
    agree_of_two(watched)
    assert {step["grad_norm"] for step in watched.steps} == {None}


DRIFT, DATA = "rank_drift", "rank_data"

HEALTHY_SEEN = {
    "ddp": ([PASS], [PASS]),
    "ddp_in_a_module_that_is_held_twice": ([PASS], [PASS]),
    "accumulation": ([PASS], [PASS]),
    "two_networks": ([PASS], [PASS]),
    "gradients_averaged_by_hand": ([PASS], [PASS]),
    "weights_averaged_by_hand": ([PASS], [PASS]),
    "ensemble": ([FACT], [PASS]),
    # Its first step is averaged as without it.
    "communication_hook": ([PASS, UNKNOWN], [PASS]),
    "parts_of_one": ([UNKNOWN], []),
    "parts_of_one_shape": ([FACT], []),
    "left_alone": ([PASS], [PASS]),
    # The same indices, of other data.
    "own_file": ([PASS], []),
    "own_stream": ([PASS], [PASS]),
    # The optimizer inside holds other parameters on each rank.
    "split_optimizer": ([UNKNOWN, PASS], [PASS]),
    "sharded": ([UNKNOWN], []),
}

MISTAKES_SEEN = {
    "bypassed": ([FAIL], "before step 2"),
    "bypassed_by_a_method": (
        [FAIL],
        "body.0.weight, body.0.bias, body.3.weight, ...: 4 of 4",
    ),
    "gone_when_it_is_judged": ([FAIL], "before step 2"),
    "written_on_one_rank": (
        [PASS, FAIL],
        "0.weight: 1 of 4 parameters under DistributedDataParallel differ between ranks 0 and 1 before step 3",
    ),
    "loaded_on_one_rank": (
        [FAIL],
        "differ between ranks 0 and 1 before step 1",
    ),
    "unfrozen_after_wrapping": ([FAIL], "0.weight, 0.bias: 2 of 4"),
    "new_head_after_wrapping": ([FAIL], "under DistributedDataParallel differ"),
    "never_averaged": ([SUSPICION], "were equal on ranks 0 and 1 before the first step"),
    "partly_averaged": ([SUSPICION], "3.weight, 3.bias: 2 of 4"),
    "always_in_no_sync": ([SUSPICION], "inside no_sync()"),
}
READ_TWICE = ("same_data", "same_data_by_workers", "same_stream")


def test_ranks_that_train_one_model_are_in_no_alarm(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    found = outcomes(watched_once(tmp_path_factory, "healthy_ranks", HEALTHY, *TORCHRUN))
    assert list(found) == list(HEALTHY_SEEN)
    for name, lines in found.items():
        assert (degrees(lines, DRIFT), degrees(lines, DATA)) == HEALTHY_SEEN[name], (name, lines)
        assert all(
            line["level"] in (PASS, FACT, UNKNOWN) for line in lines if line["id"] in (DRIFT, DATA)
        )


def test_what_makes_ranks_differ_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = outcomes(watched_once(tmp_path_factory, "ranks_apart", MISTAKES, *TORCHRUN))
    assert list(found) == [*MISTAKES_SEEN, *READ_TWICE]
    for name, (seen, text) in MISTAKES_SEEN.items():
        lines = [line for line in found[name] if line["id"] == DRIFT]
        assert [line["level"] for line in lines] == seen, (name, lines)
        assert text in lines[-1]["text"] and degrees(found[name], DATA) == [PASS], (name, lines)
    for name in READ_TWICE:
        lines = found[name]
        assert (degrees(lines, DRIFT), degrees(lines, DATA)) == ([PASS], [SUSPICION]), (name, lines)


def test_ranks_of_the_trainer_and_of_accelerate_are_judged_as_those_of_a_plain_loop(
    tmp_path: Path,
) -> None:
    ran = run_watched(tmp_path, FRAMEWORKS, *TORCHRUN)
    assert ran.returncode == 0, ran.stderr
    drift = [
        degrees([one for one in lines if one.get("by") == "identity"], DRIFT)
        for lines in ran.trainings
    ]
    data = [
        degrees([one for one in lines if one.get("by") == "identity"], DATA)
        for lines in ran.trainings
    ]
    # Local SGD averages the weights after three steps.
    assert drift == [[PASS], [PASS], [SUSPICION, PASS], [FAIL]]
    assert data == [[PASS]] * 4


@pytest.mark.parametrize(("last", "seen"), [(0, UNKNOWN), (3, SUSPICION)])
def test_a_rank_that_ends_early_is_compared_as_far_as_it_came(
    tmp_path: Path, last: int, seen: str
) -> None:
    """After its third step, or in front of its first."""
    script = ENDS_EARLY.replace("LAST", str(last))
    if not last:
        script = script.replace("steps = []", "steps = []\nif rank:\n    os._exit(0)")
    ran = run_watched(tmp_path, script, *TORCHRUN)
    assert ran.returncode == 0, ran.stderr
    (lines,) = outcomes(ran).values()
    assert degrees(lines, DRIFT) == [seen]


def commanded(
    folder: Path, *command: str, options: tuple[str, ...] = ("--quiet",)
) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    words = ["--runs", str(folder / "runs"), *options, "--", sys.executable, *command]
    done = subprocess.run(
        [sys.executable, "-m", "engine", "watch", *words],
        capture_output=True,
        text=True,
        timeout=240,
    )
    (run,) = (folder / "runs").iterdir()
    return done, RunFolder(run)


def steps_of(run: RunFolder) -> list[tuple[Any, ...]]:
    view = Follower(run).read_all()
    columns = (view.steps.values(name) for name in ("step", "loss", "lr"))
    return list(zip(*columns, strict=True))


def test_the_summary_of_a_bypassed_wrapper_names_the_parameters_and_what_to_do(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    begin = f"{BEGIN}os.chdir({str(tmp_path)!r})\n{BETWEEN}"
    script.write_text(f"{begin}net = DDP(model())\nfit(net, net.module)\ndist.barrier()\n")
    done, run = commanded(tmp_path, *TORCHRUN, str(script), options=())
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "contradiction rank_drift at step 2: 0.weight, 0.bias, 3.weight, ...: 4 of 4" in said
    assert "call the wrapped model, model(x), never model.module(x)" in said
    view = Follower(run).read_all()
    assert [one.level for one in view.identities if one.id == DRIFT] == [FAIL]


@pytest.mark.parametrize("code", [0, 3])
def test_torchrun_under_the_watch_keeps_its_exit_code_and_is_one_run(
    tmp_path: Path, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{BEGIN}os.chdir({str(tmp_path)!r})\n{DDP}sys.exit({code})\n")
    done, run = commanded(tmp_path, *TORCHRUN, str(script))
    # torchrun ends with 1 whatever a rank ended with.
    assert done.returncode == bool(code), done.stderr
    ran = Ran(folder=tmp_path, returncode=code, stdout=done.stdout, stderr=done.stderr)
    said = [(number, one["loss"], one["lr"]) for number, one in enumerate(ran.said, 1)]
    assert steps_of(run) == said and len(said) == 6


def test_accelerate_launch_under_the_watch_keeps_its_exit_code_and_is_one_run(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BEGIN
        + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = model()
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
for number in range(3):
    loss = net(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    say(loss=loss.item())
"""
    )
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    quiet = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    done, run = commanded(tmp_path, *launch, *quiet, str(script))
    assert done.returncode == 0, done.stderr
    ran = Ran(folder=tmp_path, returncode=0, stdout=done.stdout, stderr=done.stderr)
    said = [(number, one["loss"], 0.5) for number, one in enumerate(ran.said, 1)]
    assert steps_of(run) == said and len(said) == 3
    script.write_text("raise SystemExit(3)\n")
    failed = subprocess.run(
        [sys.executable, *launch, *quiet, str(script)], capture_output=True, timeout=240
    )
    words = ["--runs", str(tmp_path / "failed"), "--quiet", "--", sys.executable]
    again = subprocess.run(
        [sys.executable, "-m", "engine", "watch", *words, *launch, *quiet, str(script)],
        capture_output=True,
        timeout=240,
    )
    assert again.returncode == failed.returncode != 0
