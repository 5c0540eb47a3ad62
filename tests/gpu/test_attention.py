"""On a GPU, attention by cuDNN is no farther from float32 than torch's flash attention, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels import cudnn_attention
from engine.kernels.cudnn_attention import Ragged
from engine.models.attention import Packing, attend_packed

pytestmark = [
    pytest.mark.gpu,
    # The first matmul of the thread of a backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

ROWS, LENGTH = 3, 320
DOCUMENTS = {
    "whole rows": [LENGTH] * ROWS,
    "ragged": [1, 127, 192, 320, 64, 1, 2, 253],
    "many": [8] * (ROWS * LENGTH // 8),
}


def needs_cudnn() -> None:
    if torch.cuda.get_device_capability() < cudnn_attention.LEAST_CAPABILITY:
        pytest.skip("attention by cuDNN is for compute capability 9.0 and later")
    if not cudnn_attention.is_installed():
        pytest.skip("nvidia-cudnn-frontend is not installed")


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Return the attention of each document, written out."""
    rows, groups = q.shape[:2], q.shape[2] // k.shape[2]
    parts = []
    each = zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True)
    for q_THE, k_TKE, v_TKE in each:
        k_THE, v_THE = (x.repeat_interleave(groups, dim=1) for x in (k_TKE, v_TKE))
        scores_HTT = torch.einsum("the,she->hts", q_THE, k_THE) / math.sqrt(q.shape[-1])
        place_T = torch.arange(len(q_THE), device=q.device)
        gap_TT = place_T[:, None] - place_T
        hidden_TT = gap_TT < 0
        if window is not None:
            hidden_TT |= gap_TT >= window
        share_HTT = scores_HTT.masked_fill(hidden_TT, -math.inf).softmax(-1)
        parts.append(torch.einsum("hts,she->the", share_HTT, v_THE))
    return torch.cat(parts).view(*rows, *q.shape[2:])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("heads", "shared", "width"), [(14, 2, 64), (4, 4, 128), (8, 2, 80)])
def test_cudnn_is_no_farther_from_float32_than_flash_attention(
    heads: int, shared: int, width: int, documents: str, window: int | None
) -> None:
    needs_cudnn()
    lengths = DOCUMENTS[documents]
    generator = torch.Generator("cuda").manual_seed(0)
    # As queries, keys and values lie that come out of one matmul.
    joined = torch.randn(
        (ROWS, LENGTH, heads + 2 * shared, width), generator=generator, device="cuda"
    ).bfloat16()
    dout = torch.randn((ROWS, LENGTH, heads, width), generator=generator, device="cuda").bfloat16()
    ends = torch.tensor(lengths).cumsum(0)
    starts_S = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().cuda()
    plain = Packing(starts_S, LENGTH)
    found: dict[str, list[Tensor]] = {}
    for arm in ("exact", "flash", "cudnn"):
        whole = joined.float() if arm == "exact" else joined.clone()
        whole.requires_grad_()
        q, k, v = whole.split([heads, shared, shared], dim=2)
        if arm == "exact":
            out = exact(q, k, v, lengths, window)
        else:
            packing = plain
            if arm == "cudnn":
                packing = plain._replace(ragged=Ragged(starts_S, LENGTH))
            out = attend_packed(q, k, v, packing, window=window)
        (slope,) = torch.autograd.grad(out, whole, dout.to(out.dtype))
        with torch.no_grad():
            again = attend_packed(q, k, v, packing, window=window) if arm == "cudnn" else out
        found[arm] = [each.detach().float() for each in (out, slope, again)]
    for wanted, flash, cudnn in zip(found["exact"], found["flash"], found["cudnn"], strict=True):
        allowed = 1.5 * float((flash - wanted).norm()) + 1e-3 * float(wanted.norm())
        assert float((cudnn - wanted).norm()) <= allowed
