"""Dispatch tables, written a second time as what they should be and compared over all of their inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

from contracts.proofs.methods import enumerated
from engine.contracts.proving import Proved
from engine.errors import BadInput
from engine.machine.allocator import choose_allocator
from engine.machine.cuda_facts import NO, YES
from engine.machine.reading import absent, measured
from engine.models.config import ModelConfig
from engine.teachers.backend import choose_backend
from tests.support.machines import MACHINES, cuda_facts

ANSWERS = (YES, NO, None)
WORDS = ("auto", "native", "managed", "", "1", "unified")
REFUSED = "refused"


def allocator() -> Proved:
    cases = itertools.product(ANSWERS, ANSWERS, ANSWERS, (True, False), ("cuda", "cpu"), WORDS)
    return enumerated(cases, _allocator_fault)


def _allocator_fault(
    case: tuple[str | None, str | None, str | None, bool, str, str],
) -> str | None:
    integrated, managed, concurrent, present, compute_device, wanted = case
    machine = MACHINES["gb10"]
    attributes = {
        name: absent("not known", "the case") if value is None else measured(value, "the case")
        for name, value in (
            ("integrated", integrated),
            ("managed_memory", managed),
            ("concurrent_managed_access", concurrent),
        )
    }
    cuda = cuda_facts(replace(machine.cuda.devices[0], **attributes))
    if not present:
        cuda = replace(cuda, devices=())
    try:
        found = choose_allocator(wanted, replace(machine, cuda=cuda).facts, compute_device).choice
    except BadInput:
        found = REFUSED
    usable = present and compute_device == "cuda"
    if wanted not in ("auto", "native", "managed"):
        expected = REFUSED
    elif wanted == "managed":
        expected = "managed" if usable and managed == YES else REFUSED
    elif wanted == "auto" and usable and integrated == managed == YES:
        expected = "managed"
    else:
        expected = "native"
    return None if found == expected else f"expected {expected}, found {found}"


DENSE_BYTES = 1000


def backend() -> Proved:
    wishes = ("auto", "dequantized", "quantized", "none")
    memory = (None, DENSE_BYTES, DENSE_BYTES - 1)
    cases = itertools.product(wishes, (True, False), (True, False), (None, 300), memory)
    return enumerated(cases, _backend_fault)


def _backend_fault(case: tuple[str, bool, bool, int | None, int | None]) -> str | None:
    wanted, given, blocks, packed_bytes, available_bytes = case
    # A wish for no teacher comes without one: the run reads no config then.
    given = given and wanted != "none"
    try:
        found = choose_backend(
            wanted,
            config=_CONFIG if given else None,
            quantised_blocks=blocks,
            dense_bytes=DENSE_BYTES,
            packed_bytes=packed_bytes if blocks else None,
            available_bytes=available_bytes,
        ).choice
    except BadInput:
        found = REFUSED
    if not given:
        expected = "none"
    elif wanted == "quantized":
        expected = "quantized" if blocks else REFUSED
    elif wanted == "auto" and blocks and available_bytes == DENSE_BYTES - 1:
        expected = "quantized"
    else:
        expected = "dequantized"
    return None if found == expected else f"expected {expected}, found {found}"


_CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "a teacher",
)
