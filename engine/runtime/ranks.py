"""The processes of one run, called ranks: one per GPU, started by torchrun.

torchrun gives each process its place in three variables, RANK, WORLD_SIZE and LOCAL_RANK; without them a run
is one process and nothing here is a collective.

Every rank runs the same program on its own rows. The student is sharded over the ranks by FSDP2
(`fully_shard`): each rank holds 1/world of every parameter, of its gradient and of its AdamW moments,
all-gathers a layer when the layer computes, and gets the reduce-scattered sum of all ranks' gradients for its
shard. A student with adapters is whole on each rank instead, and the gradients of its adapters are summed over
the ranks (`sum_gradients`). It is the sum, not the mean, because the loss is already divided by the labelled
tokens of the whole step over all ranks. So the split of a batch over ranks changes rounding and nothing else.

A collective waits for every rank, so no rank may leave a step early. What only one rank can know (a signal,
for example) is shared in the step's one exchange of numbers, and all ranks act on it together. A rank that
dies ends the run (`engine.train.ranks.torchrun`); one that hangs is identified by the work it has not done
(`engine.log.beats`).

The teacher is replicated on every rank where it fits: it is frozen, so it needs no communication. Otherwise
its layers are sharded too, as bytes, because it has no parameters that FSDP2 could shard
(`engine.teachers.sharded`).
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all processes of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Index of this process, and of its GPU, on this machine."""

    @property
    def many(self) -> bool:
        return self.world > 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run's log, checkpoints and student."""
        return self.rank == 0

    def gather(self, values_N: Tensor) -> Tensor:
        """Return the `values_N` of every rank as (world, N), in rank order; one collective."""
        if not self.many:
            return values_N[None]
        flat = values_N.new_empty(self.world * len(values_N))
        dist.all_gather_into_tensor(flat, values_N)
        return flat.view(self.world, -1)

    def tell(self, value: object) -> object:
        """Broadcast rank 0's `value` to every rank. It must be small and picklable; a collective."""
        if not self.many:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def collect(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on each rank. The same conditions hold as for `tell`."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait_for_all(self) -> None:
        if self.many:
            dist.barrier()


def ranks_here() -> Ranks:
    """Read this process's place from torchrun's variables; without them it is one process."""
    if "RANK" not in os.environ:
        return Ranks()
    rank, world, local_rank = (int(os.environ[name]) for name in VARIABLES)
    return Ranks(rank=rank, world=world, local_rank=local_rank)


def use_own_gpu(ranks: Ranks, wanted: str) -> None:
    """Make "cuda" mean this rank's GPU, unless the CPU is `wanted`. Raises BadInput if this machine has GPUs, but
    fewer than its ranks; does nothing without a GPU."""
    gpus = torch.cuda.device_count()
    if not ranks.many or gpus == 0 or wanted == "cpu":
        return
    if ranks.local_rank >= gpus:
        raise BadInput(
            f"compute.gpus: rank {ranks.rank} — expected a GPU of its own, found {gpus} in this machine",
            hint=f"--gpus {gpus}",
        )
    torch.cuda.set_device(ranks.local_rank)


def join(ranks: Ranks, device: torch.device, *, timeout_s: float) -> None:
    """Join the process group. A collective that waits longer than `timeout_s` ends this process with an error,
    so that a missing rank cannot block the others for ever."""
    if not ranks.many:
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", ranks.local_rank) if device.type == "cuda" else None,
    )


def leave(ranks: Ranks) -> None:
    if ranks.many and dist.is_initialized():
        dist.destroy_process_group()


def shard(
    model: nn.Module,
    layers: nn.ModuleList,
    ranks: Ranks,
    device: torch.device,
    *,
    reshard: bool = True,
    entering: Callable[[], None] = lambda: None,
) -> None:
    """Shard `model` over the ranks in place. Each of `layers` is gathered when it computes; parameters outside
    them stay gathered until the backward pass ends. `reshard` says whether a layer is freed after its forward pass and
    gathered again for its backward pass. `entering` is called before each all-gather of weights and each
    reduce-scatter of gradients.

    The parameters keep their names and become DTensors. `model.hidden` triggers the gathering as `forward`
    does. Does nothing on one rank.
    """
    if not ranks.many:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks.world,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    for module in (model, *layers):
        assert is_fsdp(module)
        # Sum the ranks' gradients, as the module docstring explains. Gloo supports no other reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # The oldest supported torch may lack these methods; a hung rank is then found by its steps alone.
        for name, collective in (
            ("set_custom_all_gather", _AnnouncedAllGather(entering)),
            ("set_custom_reduce_scatter", _AnnouncedReduceScatter(entering)),
        ):
            if hasattr(module, name):
                getattr(module, name)(collective)
    register_fsdp_forward_method(model, "hidden")
    cast(Any, model).gathered_early = (model,) if reshard else (model, *layers)


# FSDP2 and DTensor take a third as long to import as torch itself. A run on one GPU never needs them, and
# where they were never imported nothing is sharded. Another thread may be importing them (torch's compiler does); until
# the class exists, nothing can be an instance of it.


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP2 shards this module."""
    loaded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return loaded is not None and isinstance(module, loaded)


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank holds only a shard of the tensor."""
    loaded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return loaded is not None and isinstance(tensor, loaded)


class _AnnouncedCollective:
    """An FSDP2 collective that calls `entering` when this rank enters it."""

    def __init__(self, entering: Callable[[], None]) -> None:
        self.entering = entering

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AnnouncedAllGather(_AnnouncedCollective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.entering()
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group, async_op
        )
        return work


class _AnnouncedReduceScatter(_AnnouncedCollective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.entering()
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op
        )
        return work


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum over the ranks the gradients of parameters that every rank has in full, and set them as `.grad`; one
    collective. A parameter without a gradient counts as zeros."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [grad.numel() for grad in grads])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def gather_early(model: nn.Module) -> None:
    """Start gathering the parameters that `model` keeps gathered through its backward pass, so that the
    gathering overlaps with kernels launched before its next forward pass. Does nothing when it is not
    sharded."""
    for module in getattr(model, "gathered_early", ()):
        assert is_fsdp(module)
        module.unshard(async_op=True)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor this is a collective: every rank must request the same
    tensors in the same order."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or all of it when it is not sharded."""
    return tensor.to_local() if is_shard(tensor) else tensor


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy `value`, which is complete on every rank, into `target`; each rank copies its own shard."""
    if not is_shard(target):
        target.copy_(value)
        return
    own_shard = distribute(value, target)
    target.to_local().copy_(own_shard.to_local())


def distribute(value: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a value that every rank has in full, laid out as `like`. No communication."""
    from torch.distributed.tensor import distribute_tensor

    on_device = value.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
