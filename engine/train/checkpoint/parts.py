"""A checkpoint to which every rank writes its own part: the first leads, the others follow.

    first     checkpoint.save makes the partial folder ── tells ──> every rank writes its part,
              <── size and sha256 of each ──                        fsyncs it and hashes it
              manifest, fsync, rename, as of any other checkpoint

No rank has more than its own part in memory. What fails on one fails on all, before anything is
published.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.runtime.parts import own_folder, part_name, write_parts
from engine.runtime.ranks import Ranks
from engine.train.checkpoint.manifest import FileRecord, digest_of


class Parts:
    """The parts of one checkpoint: `write_into` for `checkpoint.save` on the first rank, `follow` on
    every other.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
        self._tensors, self._ranks, self._device = tensors, ranks, device
        self._told = False

    @property
    def size_bytes(self) -> int:
        """Of all ranks together, without the headers of the files."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def write_into(self, folder: Path) -> Mapping[str, FileRecord]:
        """The files of all ranks in `folder`, on disk in full. OSError or CheckpointError."""
        self._told = True
        self._ranks.tell(str(folder))
        return self._write(folder)

    def give_up(self) -> None:
        """Let the others go, when there was no folder to write into."""
        if not self._told:
            self._ranks.tell(None)

    def follow(self) -> None:
        """Write this rank's part where the first says. CheckpointError when that could not begin."""
        told = self._ranks.tell(None)
        if told is None:
            raise CheckpointError("checkpoint: the first rank could not begin to write it")
        self._write(Path(str(told)))

    def _write(self, folder: Path) -> Mapping[str, FileRecord]:
        own_folder(self._ranks, folder, self._device)
        write_parts(self._tensors, folder)
        path, own, problem = folder / part_name(self._ranks.rank), None, None
        if path.exists():
            try:
                own = _synced(path)
            except OSError as error:
                problem = error
        records: dict[str, FileRecord] = {}
        for rank, (record, trouble) in enumerate(self._ranks.collect((own, problem))):
            if trouble is not None:
                raise OSError(trouble.errno, f"rank {rank}: {trouble.strerror}")
            if record is not None:
                records[part_name(rank)] = record
        return records


def _synced(path: Path) -> FileRecord:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size, digest = digest_of(path)
    return FileRecord(sha256=digest, size=size)
