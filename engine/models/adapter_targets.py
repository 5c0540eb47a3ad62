"""Choose the matrices of a decoder that get low-rank adapters, and count their numbers: without torch, for plans."""

from __future__ import annotations

from collections import Counter

from engine.errors import BadInput
from engine.models.config import ModelConfig, count_parameters
from engine.models.names import expected_tensors, hf_names
from engine.spec.sections import StudentSection

TARGETS = {
    "attention": ("attention.q", "attention.k", "attention.v", "attention.o"),
    "mlp": ("mlp.gate", "mlp.up", "mlp.down"),
}
"""Names of a layer's matrices by group; `all` are those of both."""


def targets_of(config: ModelConfig, targets: str) -> dict[str, str]:
    """Return our name -> Hugging Face name of each module that gets an adapter.

    `targets` is `all`, `attention`, or Hugging Face names such as `q_proj,v_proj`. Raises BadInput for a name that no
    layer has, and for a matrix that is only part of one in the files (q, k and v of Phi-3), which peft cannot adapt
    alone.
    """
    names = hf_names(config)
    shared = Counter(names.values())
    found = {}
    wanted = {one.strip() for one in targets.split(",")}
    groups = {"all": (*TARGETS["attention"], *TARGETS["mlp"]), "attention": TARGETS["attention"]}
    chosen = {one for name in wanted for one in groups.get(name, ())}
    known = set()
    for ours, theirs in names.items():
        module, hf_module = ours.removesuffix(".weight"), theirs.removesuffix(".weight")
        inside = module.split(".", 2)[-1] if module.startswith("layers.") else ""
        if not ours.endswith(".weight") or inside not in groups["all"]:
            continue
        last = hf_module.rpartition(".")[2]
        known.add(last)
        if inside not in chosen and last not in wanted:
            continue
        if shared[theirs] > 1:
            raise BadInput.expected(
                "student.adapter_targets",
                targets,
                "matrices that are tensors of their own",
                f"{last}, which holds several",
            )
        found[module] = hf_module
    if unknown := sorted(wanted - known - groups.keys()):
        raise BadInput.expected(
            "student.adapter_targets",
            targets,
            f"all, attention, or some of {', '.join(sorted(known))}",
            ", ".join(unknown),
        )
    return found


def trained_parameters(config: ModelConfig, student: StudentSection) -> int:
    """Return how many numbers of a student are trained: those of its adapters, or all. Raises BadInput."""
    if student.adapter == "none":
        return count_parameters(config)
    shapes = expected_tensors(config)
    targets = targets_of(config, student.adapter_targets).values()
    return student.adapter_rank * sum(sum(shapes[f"{name}.weight"]) for name in targets)
