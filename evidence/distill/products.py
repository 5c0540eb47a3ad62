"""Measure the matmuls of the loss head one by one, in loops as the loss has them, and the parts of an optimizer
step: `python evidence/distill/products.py > products.json`, on a GPU.

8192 tokens, 151936 ids, widths 896 and 3584, bf16. Each entry is [median milliseconds, spread].

    parts    all chunks of one matmul: z and t in fp32 and bf16, dh, dw, by tokens of a chunk
    whole    dh and dw of all tokens at once
    loops    CHUNK/GROUP: logits by chunks, dh and dw by groups; `kernel` with the loss's own kernel
             between them, `streams` with the kernel of a chunk beside the matmuls of the next
    lt       matmuls by cuBLASLt
    opt      parts of an optimizer step of 494M weights, and of an embedding's gradient
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.kernels.dense_loss import LossRows, row_buffer
from engine.models.head import multiply
from engine.models.load import new_decoder

sys.path.insert(0, str(Path(__file__).parents[2]))

from evidence.bench.shapes import config_named
from evidence.bench.timing import time_arms

N, V, W, D, E = 8192, 151936, 152064, 896, 3584
CUDA = torch.device("cuda")
F32, B16 = torch.float32, torch.bfloat16
Arms = dict[str, Callable[[], object]]


class Work:
    def __init__(self) -> None:
        generator = torch.Generator(device=CUDA).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=CUDA, dtype=B16)

        self.h, self.w = random(N, D), random(V, D) * 0.05
        self.th, self.tw = random(N, E), (random(W, E) * 0.02)[:V]
        self.labels = torch.randint(0, V, (N,), device=CUDA)
        self.dz = row_buffer(N, V, B16, CUDA)
        self.dz.normal_()
        self.dh = torch.empty(N, D, device=CUDA)
        self.dw = torch.empty(V, D, device=CUDA)


def parts(k: Work, chunk: int) -> Arms:
    z, narrow = row_buffer(chunk, V, F32, CUDA), row_buffer(chunk, V, B16, CUDA)
    dz = k.dz[:chunk]

    def each(call: Callable[[slice], object]) -> Callable[[], None]:
        def run() -> None:
            for start in range(0, N, chunk):
                call(slice(start, start + chunk))

        return run

    return {
        f"z32 {chunk}": each(lambda s: multiply(z, k.h[s], k.w.t())),
        f"z16 {chunk}": each(lambda s: multiply(narrow, k.h[s], k.w.t())),
        f"t32 {chunk}": each(lambda s: multiply(z, k.th[s], k.tw.t())),
        f"t16 {chunk}": each(lambda s: multiply(narrow, k.th[s], k.tw.t())),
        f"dh {chunk}": each(lambda s: multiply(k.dh[s], dz, k.w)),
        f"dw {chunk}": each(lambda s: multiply(k.dw, dz.t(), k.h[s], add=s.start > 0)),
    }


def loop(k: Work, chunk: int, group: int, *, kernel: bool, streams: bool = False) -> Any:
    pairs = [[row_buffer(chunk, V, F32, CUDA) for _ in range(2)] for _ in range(1 + streams)]
    side: Any = torch.cuda.Stream()
    dz = k.dz[:group]

    def run() -> None:
        rows = LossRows.empty(N, V, CUDA)
        main: Any = torch.cuda.current_stream()
        done: dict[int, Any] = {}
        for begun in range(0, N, group):
            for count, start in enumerate(range(begun, begun + group, chunk)):
                place = count % len(pairs)
                z, t = pairs[place]
                if streams and place in done:
                    main.wait_event(done[place])
                multiply(z, k.h[start : start + chunk], k.w.t())
                multiply(t, k.th[start : start + chunk], k.tw.t())
                if not kernel:
                    continue
                side.wait_stream(main)
                with torch.cuda.stream(side if streams else main):
                    rows.differentiate(
                        z, t, dz[start - begun : start - begun + chunk], k.labels, start,
                        alpha=0.5, temperature=2.0, divergence="forward_kl",
                    )  # fmt: skip
                    if streams:
                        done[place] = side.record_event()
            if streams:
                main.wait_stream(side)
            multiply(k.dh[begun : begun + group], dz, k.w)
            multiply(k.dw, dz.t(), k.h[begun : begun + group], add=begun > 0)

    return run


def optimizer_arms() -> Arms:
    weights = list(new_decoder(config_named("qwen2.5-0.5b"), seed=0).to(CUDA).parameters())
    flat = torch.nn.Parameter(torch.randn(sum(p.numel() for p in weights), device=CUDA))
    for p in (*weights, flat):
        p.grad = torch.randn_like(p)
    grads = [p.grad for p in weights if p.grad is not None]
    many, one = (torch.optim.AdamW(x, lr=1e-4, fused=True) for x in (weights, [flat]))
    ids = torch.randint(0, V, (N,), device=CUDA)
    upstream, summed = torch.randn(N, D, device=CUDA), torch.randn(V, D, device=CUDA)
    backward = torch.ops.aten.embedding_dense_backward
    return {
        "norm": lambda: torch.nn.utils.get_total_norm(grads),
        "norm flat": lambda: grads and flat.grad is not None and flat.grad.norm(),
        "adam": many.step,
        "adam flat": one.step,
        "emb bwd": lambda: backward(upstream, ids, V, -1, False),
        "add": lambda: summed.add_(summed, alpha=0.0),
        "index_add": lambda: summed.index_add_(0, ids, upstream),
    }


def main() -> None:
    found: dict[str, dict[str, list[float]]] = {}

    def measure(name: str, arms: Arms) -> None:
        times = time_arms(arms, CUDA, rounds=5, warm_up=2)
        found[name] = {
            arm: [round(t.seconds * 1e3, 3), round(t.spread, 3)] for arm, t in times.items()
        }

    k = Work()
    measure("parts", {a: f for chunk in (1024, 2048, 4096) for a, f in parts(k, chunk).items()})
    whole: Arms = {
        "dh 8192": lambda: multiply(k.dh, k.dz, k.w),
        "dw 8192": lambda: multiply(k.dw, k.dz.t(), k.h),
    }
    measure("whole", whole)
    loops: Arms = {}
    for chunk, group in (
        *((2048, 2048), (1024, 2048), (1024, 4096), (2048, 4096)),
        *((4096, 4096), (2048, 8192), (1024, 8192)),
    ):
        loops[f"products {chunk}/{group}"] = loop(k, chunk, group, kernel=False)
        loops[f"kernel {chunk}/{group}"] = loop(k, chunk, group, kernel=True)
    for chunk in (1024, 2048):
        loops[f"streams {chunk}/8192"] = loop(k, chunk, 8192, kernel=True, streams=True)
    measure("loops", loops)
    del loops
    torch.backends.cuda.preferred_blas_library("cublaslt")
    z32, t32, *_ = (parts(k, 2048)[f"{name} 2048"] for name in ("z32", "t32"))
    measure("lt", {"z32": z32, "t32": t32, "dh": whole["dh 8192"], "dw": whole["dw 8192"]})
    torch.backends.cuda.preferred_blas_library("cublas")
    measure("opt", optimizer_arms())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
