"""Save and load sharded named tensors as safetensors files, one file per rank.

    shard-00001-model-00001-of-00001.safetensors      the shards of rank 0

torch.distributed.checkpoint writes and reads them with its safetensors backend: the header of each file gives
the offsets of its shards in the full tensors, and no pickle is involved, which could run code. So any number
of ranks, or one process, can assemble the tensors again. The module is imported lazily: a run on one GPU
starts without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.runtime.ranks import Ranks


def part_name(rank: int) -> str:
    """Return the name of the file that a rank writes; a rank without shards writes none."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def is_part(name: str) -> bool:
    return name.startswith("shard-") and name.endswith(".safetensors")


def write_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this rank's shards of `tensors` into `folder`, which every rank must see; rank 0 writes replicated
    tensors. A collective: every rank passes the same names.

    When it fails on any rank it raises on all: OSError for a disk error, else CheckpointError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with warnings.catch_warnings():
            # Without a process group, torch treats the process as a group of one and warns.
            warnings.simplefilter("ignore", UserWarning)
            save(dict(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as error:
        rank, (why, _stack) = sorted(error.failures.items())[0]
        if isinstance(why, OSError):
            raise OSError(why.errno, f"rank {rank}: {why.strerror or why}") from error
        raise CheckpointError(f"checkpoint: rank {rank} could not write its part: {why}") from error


def read_parts(
    folder: Path, wanted: Callable[[str], bool], *, numbers: bool = True
) -> dict[str, Tensor]:
    """Return the full tensors in `folder` whose names are `wanted`, on the CPU. If not `numbers`, their values are
    not read, and they are on the meta device. Not a collective.

    Raises CheckpointError when the shards do not cover their tensor.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, about in reader.read_metadata().state_dict_metadata.items():
        if not wanted(name):
            continue
        assert isinstance(about, TensorStorageMetadata)
        covered = sum(chunk.sizes.numel() for chunk in about.chunks)
        if covered != about.size.numel():
            raise CheckpointError(
                f"checkpoint: {folder} — expected the {about.size.numel()} numbers of {name}, found {covered}"
            )
        where = "cpu" if numbers else "meta"
        tensors[name] = torch.empty(about.size, dtype=about.properties.dtype, device=where)
    if not numbers:
        return tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def check_shared_folder(ranks: Ranks, folder: Path, device: torch.device) -> None:
    """Raise CheckpointError on every rank unless all of them see `folder`. A collective."""
    sees_R = ranks.gather(torch.tensor([float(folder.is_dir())], device=device))[:, 0]
    without_folder = [rank for rank, sees in enumerate(sees_R.tolist()) if not sees]
    if without_folder:
        raise CheckpointError(
            f"checkpoint: {folder} — expected a folder that all ranks see, found none on rank {without_folder[0]}",
            hint="put the run on storage that every machine has, or --set checkpoint.sharded=off",
        )
