"""Two ranks that hold the same teachers replicated and sharded: `python sharded_ranks.py FOLDER PORT`. Each
writes its results to FOLDER/<rank>.json, which `test_sharded_teacher` reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from engine.checks.weights import whole
from engine.formats.open import open_weights
from engine.formats.safetensors import tensors_sha256
from engine.machine.reading import measured
from engine.models.config import ModelConfig
from engine.models.decoder import Tensors
from engine.models.packed import tensor_names
from engine.models.packed_size import packed_size
from engine.runtime.ranks import Ranks, join, leave, ranks_here
from engine.teachers import build as build_module
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.same_model import same_values
from engine.teachers.sharded import ShardedLayers
from tests.support.budgets import planned, spec_of
from tests.support.packed_models import make_batch, make_config

LAYERS = {"dense": 5, "joined": 6, "blocks": 5, "fp8": 5}
"""Odd and even counts: the last layer does, or does not, share the first one's buffer."""
PRECISION = {"dense": "fp32", "joined": "bf16", "blocks": "fp32", "fp8": "fp8"}
CPU = torch.device("cpu")
PROBE = make_batch(2, 16)


def config_of(kind: str) -> ModelConfig:
    return make_config(num_hidden_layers=LAYERS[kind])


def path_of(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.gguf" if kind == "blocks" else folder / f"floats-{LAYERS[kind]}"


def build(folder: Path, kind: str, shards: ShardedLayers | None = None) -> BuiltTeacher:
    # Layers with the same input are joined where kernels run.
    build_module.has_kernels = lambda _device: kind == "joined"
    return build_teacher(
        path_of(folder, kind),
        backend="quantized" if kind == "blocks" else "dequantized",
        precision=PRECISION[kind],
        device=CPU,
        student_vocab=99,
        probe=PROBE,
        shards=shards,
    )


def storages(root: nn.Module) -> Iterator[torch.UntypedStorage]:
    for module in root.modules():
        for value in (*vars(module).values(), *module.buffers(recurse=False)):
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage()


def held_bytes(built: BuiltTeacher, shards: ShardedLayers) -> int:
    """Bytes of every storage that the teacher references; the scratch of quantised blocks is counted apart."""
    found = {s.data_ptr(): s.nbytes() for s in storages(built.decoder)}
    found |= {p.data_ptr(): p.nbytes for p in shards.parts}
    return sum(found.values())


def predicted_bytes(folder: Path, kind: str) -> int:
    config, path = config_of(kind), path_of(folder, kind)
    with open_weights(path) as weights:
        size = packed_size(config, weights)
    each = 2 if PRECISION[kind] in ("bf16", "fp8") else 4
    budget = planned(
        spec_of(compute__gpus=2),
        teacher=config,
        teacher_packed_bytes=size.weight_bytes(each),
        teacher_packed_layers=size.layer_bytes(each),
        teacher__shard="on",
        teacher__backend="quantized" if kind == "blocks" else "dequantized",
        teacher__precision=PRECISION[kind],
        student__precision="fp32",
        student=make_config(),
        compute__device="cpu",
        available=measured(1 << 60, "a test"),
    ).budget()
    sizes = {item.name: item.bytes for item in budget.items}
    return sizes["teacher weights"] + sizes["gathered teacher layers"]


def look(folder: Path, kind: str, ranks: Ranks) -> dict[str, object]:
    entered = []
    alone = build(folder, kind)
    shards = ShardedLayers(ranks, CPU, lambda: entered.append(1))
    shared = build(folder, kind, shards)
    batches = [make_batch(2, 16 + more) for more in range(3)]
    same, counts = [], []
    for batch in batches:
        tokens_BT, documents_BT, _ = batch.to_torch(CPU)
        before = shards.gathered
        answers = [each.teacher.hidden(tokens_BT, documents_BT) for each in (alone, shared)]
        same.append(torch.equal(*answers) and bool(answers[0].isfinite().all()))
        counts.append(shards.gathered - before)
    hashes = [tensors_sha256(Tensors(each.decoder)) for each in (alone, shared)]
    values = {
        name: torch.equal(whole(alone.decoder, name), whole(shared.decoder, name))
        for name in tensor_names(alone.decoder)
    }
    return {
        "same_answers": same,
        "gathered": counts,
        "entered": len(entered) == shards.gathered,
        "hashes": hashes,
        "other_values": [name for name, equal in values.items() if not equal],
        "same_model": same_values(alone.decoder, shared.decoder),
        "held": held_bytes(shared, shards),
        "predicted": predicted_bytes(folder, kind),
        "whole": sum({s.data_ptr(): s.nbytes() for s in storages(alone.decoder)}.values()),
    }


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # Before any threads exist: the imported modules are then shared by both processes at the cost of one
    # import.
    child = os.fork()
    rank = "0" if child else "1"
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    ranks = ranks_here()
    join(ranks, CPU, timeout_s=60)
    found = {kind: look(folder, kind, ranks) for kind in LAYERS}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    leave(ranks)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0


if __name__ == "__main__":
    sys.exit(main())
