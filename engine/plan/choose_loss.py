"""Which form of the loss a run uses, and why. Pure: the facts come from whoever looked them up."""

from __future__ import annotations

from engine.decision import Decision
from engine.errors import BadInput
from engine.spec.divergences import DIVERGENCES, fused_divergences

CAPABILITY = (8, 0)
"""The first compute capability that our kernels compile for."""


def choose_loss_kernel(
    wanted: str,
    *,
    device: str,
    capability: tuple[int, int] | None,
    has_triton: bool,
    divergence: str,
) -> Decision:
    """`capability` is the GPU's, None on a CPU. Raises BadInput for `fused` where it cannot run."""
    knob = "loss.kernel"
    hindrance = _hindrance(device, capability, has_triton, divergence)
    if hindrance is None:
        fused = (
            "everything between the products in one kernel, which reads each logit once from memory"
        )
        eager = "the same in plain torch, in about ten passes over the logits"
        choice = "eager" if wanted == "eager" else "fused"
        reason, other = (fused, eager) if choice == "fused" else (eager, fused)
        rejected = (("eager" if choice == "fused" else "fused", other),)
        return Decision(
            knob=knob, choice=choice, reason=reason, rejected=rejected, overridden=wanted != "auto"
        )
    if wanted == "fused":
        raise BadInput.expected(
            knob, "fused", *hindrance, hint="`--set loss.kernel=auto` runs with any"
        )
    expected, found = hindrance
    return Decision(
        knob=knob,
        choice="eager",
        reason="plain torch runs anywhere",
        rejected=(("fused", f"needs {expected}; here is {found}"),),
        overridden=wanted != "auto",
    )


def _hindrance(
    device: str,
    capability: tuple[int, int] | None,
    has_triton: bool,
    divergence: str,
) -> tuple[str, str] | None:
    """What the fused form needs and what there is instead; None where it can run."""
    if device != "cuda" or capability is None:
        return "a GPU", "a CPU"
    if capability < CAPABILITY:
        needed, found = (f"{major}.{minor}" for major, minor in (CAPABILITY, capability))
        return f"a GPU of compute capability {needed} or later", f"compute capability {found}"
    if not has_triton:
        return "triton", "none installed"
    if not DIVERGENCES[divergence].fused:
        return f"loss.divergence {' or '.join(fused_divergences())}", divergence
    return None
