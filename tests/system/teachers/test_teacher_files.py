"""A teacher in one file, GGUF or .apr, teaches exactly as the same weights in a folder do."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.export.convert import convert
from engine.models.load import load_decoder
from tests.support.paths import DEMO


def test_the_shipped_gguf_is_what_engine_convert_makes_of_the_shipped_folder(
    tmp_path: Path,
) -> None:
    again = tmp_path / "teacher.gguf"
    convert(DEMO / "teacher", again, quant="q4_k_m")
    made, shipped = again.read_bytes(), (DEMO / "teacher.gguf").read_bytes()
    assert len(made) == len(shipped)
    # Another CPU adds in another order, and a tie between two scales may fall the other way.
    differing = sum(a != b for a, b in zip(made, shipped, strict=True))
    assert differing < len(shipped) / 1000, differing


def test_the_shipped_gguf_stays_close_to_the_teacher_it_was_made_of() -> None:
    dense, packed = load_decoder(DEMO / "teacher"), load_decoder(DEMO / "teacher.gguf")
    tokens = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        p = dense.logits(tokens).log_softmax(-1)
        q = packed.logits(tokens).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    # Q4_K_M of this small model costs a few hundredths of a nat; a wrong layout costs whole ones.
    assert 0 < kl < 0.1, kl
