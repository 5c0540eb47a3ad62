"""Scripts of several ranks: each rank's weights are the same to the byte with the probe, and rank 0 logs every step.

`make frameworks` and `make soak` run them: up to six processes at a time import torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.log.folder import RunFolder
from engine.log.follow import Follower
from tests.support.attached import BEGIN, Ran, agree, run_twice

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


def commanded(folder: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    words = ["--runs", str(folder / "runs"), "--quiet", "--", sys.executable, *command]
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
