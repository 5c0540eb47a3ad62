"""Causal attention over one long document, forward and backward, by each kernel that torch or cuDNN has:
`python -m evidence.distill.attention > evidence/distill/attention.json`, on a GPU.

    cudnn     the engine's: documents by their offsets (`engine.kernels.cudnn_attention`)
    dense     cuDNN by torch, for a row that is one document
    flash     torch's variable-length flash attention
    flex      FlexAttention, compiled, with a mask of documents

Each entry is [milliseconds, TFLOP/s]; the FLOPs are 2 E for each score of a query with a key at or before it, once for
the scores and once for the values, and 2.5 times as many in a backward pass. `matmul` is the rate of a large matmul.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels.cudnn_attention import Ragged, attend
from engine.models.attention import Packing, attend_packed
from evidence.bench.shapes import config_named
from evidence.bench.timing import time_arms

CUDA = torch.device("cuda")
LENGTHS = (1024, 8192, 32768)
TOKENS = 8192
"""Tokens of a batch of shorter rows."""
Arms = dict[str, Callable[[], object]]


def forms(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, length: int
) -> dict[str, Callable[[], Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, _, width = q_NHE.shape
    rows = tokens // length
    starts_S = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=CUDA)
    ragged = Ragged(starts_S, length)
    q, k, v = (each.view(rows, length, -1, width) for each in (q_NHE, k_NKE, v_NKE))
    document_N = torch.arange(tokens, device=CUDA) // length

    def dense() -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = (each.transpose(1, 2) for each in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True
            )

    def mask(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_N[query] == document_N[key])

    blocks = create_block_mask(mask, None, None, tokens, tokens, device="cuda", _compile=True)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    as_heads = [each.transpose(0, 1)[None] for each in (q_NHE, k_NKE, v_NKE)]
    return {
        "cudnn": lambda: attend(q_NHE, k_NKE, v_NKE, ragged),
        "dense": dense,
        "flash": lambda: attend_packed(q, k, v, Packing(starts_S, length)),
        "flex": lambda: compiled(*as_heads, block_mask=blocks, enable_gqa=True),
    }


def measured(name: str, length: int, *, trained: bool) -> dict[str, Any]:
    """Return what each kernel needs for the attention of one layer."""
    config = config_named(name)
    heads, shared, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    tokens = max(length, TOKENS)
    generator = torch.Generator(CUDA).manual_seed(0)
    q_NHE, k_NKE, v_NKE = (
        torch.randn(
            tokens, count, width, generator=generator, device=CUDA, dtype=torch.bfloat16
        ).requires_grad_(trained)
        for count in (heads, shared, shared)
    )
    upstream = torch.randn_like(q_NHE)
    flop = 4 * width * heads * (tokens // length) * length * (length + 1) / 2
    arms: Arms = {}
    failed = {}
    for form, call in forms(q_NHE, k_NKE, v_NKE, length).items():
        try:
            out = call()
            arms[form] = call
            if trained:
                given = upstream.view(out.shape) if out.dim() == 3 else upstream.view_as(out)
                back = partial(
                    torch.autograd.grad, out, (q_NHE, k_NKE, v_NKE), given, retain_graph=True
                )
                back()
                arms[f"{form} backward"] = back
        except RuntimeError as error:
            failed[form] = str(error).partition("\n")[0][:200]
    found: dict[str, Any] = dict(failed)
    for form, timing in time_arms(arms, CUDA, rounds=10, inner=3, queue_first=True).items():
        work = flop * (2.5 if form.endswith("backward") else 1)
        found[form] = [round(timing.seconds * 1e3, 4), round(work / timing.seconds / 1e12)]
    return found


def main() -> None:
    a, b = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    product = time_arms({"x": lambda: a @ b}, CUDA, inner=5, queue_first=True)["x"].seconds
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matmul": round(2 * 8192**3 / product / 1e12),
    }
    for name, trained in (("qwen2.5-7b", False), ("qwen2.5-0.5b", True)):
        for length in LENGTHS:
            found[f"{name}, {length}"] = measured(name, length, trained=trained)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
