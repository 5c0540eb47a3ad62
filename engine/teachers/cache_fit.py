"""Whether a store of teacher outputs fits a run: checked from its manifest, before anything is loaded.

Whether each row is there is seen when it is asked for; whether the teacher's files are those of the
store takes reading them, and comes with the data in hand. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from engine.models.config import ModelConfig
from engine.spec import RunSpec
from engine.spec.divergences import DIVERGENCES, sparse_divergences
from engine.teachers.cache_manifest import Manifest, read_manifest
from engine.teachers.cache_rows import HIDDEN, CacheError


def uses_cache(spec: RunSpec) -> bool:
    """Whether a run of `spec` takes its teacher's outputs from a store."""
    teacher = spec.teacher
    wanted = teacher.backend == "cached" or (teacher.backend == "auto" and bool(teacher.cache))
    return wanted and spec.has_teacher


def fitting_manifest(spec: RunSpec, teacher: ModelConfig, student: ModelConfig) -> Manifest:
    """The manifest of the spec's store. Raises CacheError for one that has nothing for this run."""
    path = Path(spec.teacher.cache)
    manifest = read_manifest(path)
    identity = manifest.identity
    wanted: list[tuple[str, object, object]] = [
        ("data.seq_len", spec.data.seq_len, identity.seq_len),
        ("the teacher's width", teacher.hidden_size, identity.width),
        ("the teacher's ids", teacher.vocab_size, manifest.teacher_ids),
    ]
    if spec.teacher.precision != "auto":
        wanted.append(("teacher.precision", spec.teacher.precision, identity.precision))
    if identity.form != HIDDEN:
        wanted += [
            ("the student's ids", student.vocab_size, identity.vocabulary),
            ("loss.temperature", spec.loss.temperature, identity.temperature),
        ]
        if not DIVERGENCES[spec.loss.divergence].sparse:
            sparse = " or ".join(sparse_divergences())
            wanted.append(("loss.divergence", spec.loss.divergence, sparse))
    differing = [(name, ours, theirs) for name, ours, theirs in wanted if ours != theirs]
    if differing:
        raise CacheError.expected(
            "teacher.cache",
            path,
            ", ".join(f"{name} {ours}" for name, ours, _ in differing),
            ", ".join(f"{theirs}" for _, _, theirs in differing),
            hint='`engine prepare` with this spec makes a store that fits; teacher.cache="" goes without',
        )
    return manifest
