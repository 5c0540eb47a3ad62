"""Models that transformers runs, on a GPU: a mask, a row of one document and each document by itself give the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.attention import record_documents
from engine.models.load import load_decoder
from engine.models.transformers_decoder import TransformersDecoder
from tests.support.other_models import ALONE, OTHERS, OWN_LOGITS, save_other

pytestmark = pytest.mark.gpu
LENGTH = 40


def opened(folder: Path, dtype: torch.dtype) -> TransformersDecoder:
    decoder = load_decoder(folder, dtype, "cuda")
    assert isinstance(decoder, TransformersDecoder)
    return decoder


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(120, (3, LENGTH), generator=generator)
    documents_BT = torch.zeros(3, LENGTH, dtype=torch.int64)
    documents_BT[0, 7:] = 1
    documents_BT[1, 3:], documents_BT[1, 12:] = 5, 9
    return tokens_BT.cuda(), documents_BT.cuda()


@pytest.mark.parametrize("family", sorted(set(OTHERS) - {"mamba"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_are_kept_apart_however_they_are_run(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_other(tmp_path / "model", family)
    decoder = opened(tmp_path / "model", dtype)
    exact = opened(tmp_path / "model", torch.float32)
    tokens_BT, documents_BT = rows()
    head, documents = decoder.probe("student", LENGTH)
    assert head.choice == ("of the model" if family in OWN_LOGITS else "head(hidden)")
    if dtype == torch.float32:
        assert documents.choice == ("alone" if family in ALONE else "masked")
    with torch.no_grad():
        found_BTV = decoder.logits(tokens_BT, documents_BT).float()
        alone_BTV = exact.logits(tokens_BT, documents_BT).float()
    assert not exact.masks_documents
    apart = float((found_BTV - alone_BTV).norm() / alone_BTV.norm())
    assert apart < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_rows_that_the_host_knows_are_run_without_waiting_for_the_gpu(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gpt_neox")
    decoder = opened(tmp_path / "model", torch.bfloat16)
    decoder.probe("student", LENGTH)
    tokens_BT, documents_BT = rows()
    record_documents(documents_BT, documents_BT.cpu().numpy())
    decoder.hidden(tokens_BT, documents_BT)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.hidden(tokens_BT, documents_BT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
