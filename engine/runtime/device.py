"""Choose the device, precision and threads of a run, each as a Decision from what torch finds on this machine."""

from __future__ import annotations

import os

import torch

from engine.decision import Decision
from engine.errors import BadInput

Capability = tuple[int, int] | None
"""Compute capability of the GPU; None on a CPU."""


def choose_device(wanted: str) -> Decision:
    """Choose `cuda` when there is a GPU, else `cpu`. A request for a GPU that does not exist is refused, never
    replaced."""
    gpus = torch.cuda.device_count()
    build = f"torch {torch.__version__}"
    if wanted == "cuda" and gpus == 0:
        why = "built without CUDA" if torch.version.cuda is None else "no GPU is visible to it"
        raise BadInput(
            f"compute.device: cuda — expected a GPU, found none: {build}, {why}",
            hint="`--set compute.device=cpu` runs on the CPU",
        )
    if wanted != "auto":
        return Decision(
            knob="compute.device", choice=wanted, reason="set by the user", overridden=True
        )
    if gpus:
        return Decision(
            knob="compute.device",
            choice="cuda",
            reason=f"{build} sees {gpus} GPU(s), the first is {torch.cuda.get_device_name(0)}",
            rejected=(("cpu", "a GPU is there"),),
        )
    why = "it is a build without CUDA" if torch.version.cuda is None else "no GPU is visible to it"
    return Decision(
        knob="compute.device",
        choice="cpu",
        reason=f"{build}: {why}",
        rejected=(("cuda", "no GPU to use"),),
        impossible=("cuda",),
    )


def choose_precision(knob: str, wanted: str, device: str) -> Decision:
    """Choose bf16 on a GPU that computes it in hardware, else fp32."""
    if wanted != "auto":
        return Decision(knob=knob, choice=wanted, reason="set by the user", overridden=True)
    if device != "cuda":
        return Decision(
            knob=knob,
            choice="fp32",
            reason="on a CPU fp32 is exact and usually the fastest",
            rejected=(("bf16", "emulated or slow on many CPUs"),),
        )
    major, minor = torch.cuda.get_device_capability()
    if major >= 8:
        return Decision(
            knob=knob,
            choice="bf16",
            reason=f"compute capability {major}.{minor} has bf16 tensor cores",
            rejected=(("fp32", "several times slower here"),),
        )
    return Decision(
        knob=knob,
        choice="fp32",
        reason=f"compute capability {major}.{minor} has no bf16 arithmetic",
        rejected=(("bf16", "not in this GPU's hardware"),),
    )


def choose_threads(wanted: int) -> Decision:
    """Choose as many threads as CPUs this process may use; a fixed number also fixes the order of sums."""
    if wanted:
        return Decision(
            knob="compute.threads", choice=str(wanted), reason="set by the user", overridden=True
        )
    usable = len(os.sched_getaffinity(0))
    return Decision(
        knob="compute.threads",
        choice=str(usable),
        reason=f"the process may run on {usable} of {os.cpu_count()} CPUs",
        rejected=((str(max(1, usable // 2)), "leaves CPUs idle"),),
    )


def torch_dtype(precision: str) -> torch.dtype:
    """Return the storage dtype of a precision; tf32 is a matmul mode of fp32."""
    return {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}[precision]
