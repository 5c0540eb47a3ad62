"""Choose the matrices of a decoder that get low-rank adapters, and count their parameters, without torch."""

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
"""Names of a layer's matrices by group; `all` means both groups."""


def targets_of(config: ModelConfig, targets: str) -> dict[str, str]:
    """Return our name -> Hugging Face name of each module that gets an adapter.

    `targets` is `all`, `attention`, or Hugging Face names such as `q_proj,v_proj`. Raises BadInput for a name that no
    layer has, and for a matrix that is only part of one in the files (q, k and v of Phi-3), which peft cannot adapt
    alone.
    """
    names = hf_names(config)
    shared = Counter(names.values())
    targets_by_name = {}
    requested = {name.strip() for name in targets.split(",")}
    groups = {"all": (*TARGETS["attention"], *TARGETS["mlp"]), "attention": TARGETS["attention"]}
    chosen = {matrix for name in requested for matrix in groups.get(name, ())}
    names_in_layers = set()
    for ours, hf_name in names.items():
        module, hf_module = ours.removesuffix(".weight"), hf_name.removesuffix(".weight")
        in_layer = module.split(".", 2)[-1] if module.startswith("layers.") else ""
        if not ours.endswith(".weight") or in_layer not in groups["all"]:
            continue
        last = hf_module.rpartition(".")[2]
        names_in_layers.add(last)
        if in_layer not in chosen and last not in requested:
            continue
        if shared[hf_name] > 1:
            raise BadInput.expected(
                "student.adapter_targets",
                targets,
                "matrices that are tensors of their own",
                f"{last}, which holds several",
            )
        targets_by_name[module] = hf_module
    if unknown := sorted(requested - names_in_layers - groups.keys()):
        raise BadInput.expected(
            "student.adapter_targets",
            targets,
            f"all, attention, or some of {', '.join(sorted(names_in_layers))}",
            ", ".join(unknown),
        )
    return targets_by_name


def trained_parameters(config: ModelConfig, student: StudentSection) -> int:
    """Return the number of trained parameters of a student: those of its adapters, or all. Raises BadInput."""
    if student.adapter == "none":
        return count_parameters(config)
    shapes = expected_tensors(config)
    targets = targets_of(config, student.adapter_targets).values()
    return student.adapter_rank * sum(sum(shapes[f"{name}.weight"]) for name in targets)
