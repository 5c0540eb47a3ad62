"""Determine the models that a student was made from, and the licence under which it may be distributed.

    student base    the student's weights started from its weights: a derived work
    teacher         its outputs were the student's training targets

A licence is read from `license:` in the front matter of the README.md in the folder of the
weights, or from the metadata of a GGUF or .apr file. If neither has it, the licence is
unknown, and the card says so. If two bases have different licences, the card says
`other`, and lists both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.files import open_regular, read_bytes
from engine.formats.open import open_weights

UNKNOWN, OTHER = "unknown", "other"
_README = "README.md"
_README_BYTES = 1 << 20
_LICENCE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE")
_HUB_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)$")
_METADATA_KEYS = {"gguf": "general.license", "apr": "license"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    role: str
    """`student base` or `teacher`."""
    name: str
    """Its name on the Hub if the path shows it, otherwise the name of its file or folder."""
    on_hub: bool
    licence: str | None
    licence_name: str | None
    """Name of a licence without an identifier on the Hub: `license_name:`, used with `license: other`."""
    why: str
    """Place where the licence was read, or the reason why there is none."""
    licence_file: Path | None
    sha256: str | None
    """Hash of the base's tensors, as recorded by the run."""

    @property
    def words(self) -> str:
        return f"`{self.name}` ({self.role})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """The licence of the published model."""

    identifier: str
    """Identifier of the licence as the Hub spells it."""
    why: str
    name: str | None = None
    """The name of a licence without an identifier on the Hub (`other`)."""


def bases_of(receipt_spec: dict[str, Any], hashes: dict[str, Any]) -> tuple[Base, ...]:
    """Return the models that a run with these settings started from; `hashes` are the receipt's."""
    bases = []
    student, teacher = receipt_spec.get("student") or {}, receipt_spec.get("teacher") or {}
    if student.get("path"):
        bases.append(_base("student base", Path(student["path"]), hashes.get("student_start")))
    if teacher.get("path") and teacher.get("backend") != "none":
        bases.append(_base("teacher", Path(teacher["path"]), hashes.get("teacher")))
    return tuple(bases)


# contract: publication-v1
def inherited(bases: Sequence[Base], chosen: str | None) -> Licence:
    """Return the licence of a model made from `bases`; `chosen`: the publisher's choice, which has precedence."""
    if chosen is not None:
        return Licence(identifier=chosen, why="given by the publisher (--license)")
    if not bases:
        return Licence(
            identifier=UNKNOWN,
            why="the weights were freshly initialised and had no teacher: nothing to inherit from",
        )
    if lacking := [base for base in bases if base.licence is None]:
        reasons = "; ".join(f"{base.words}: {base.why}" for base in lacking)
        return Licence(identifier=UNKNOWN, why=reasons)
    reasons = "; ".join(f"{base.licence_name or base.licence} of {base.words}" for base in bases)
    if len({(base.licence, base.licence_name) for base in bases}) > 1:
        return Licence(identifier=OTHER, why=f"the bases differ: {reasons}")
    (first, *_) = bases
    return Licence(
        identifier=str(first.licence), why=f"inherited: {reasons}", name=first.licence_name
    )


def licence_files(bases: Sequence[Base], licence: Licence) -> dict[str, Base]:
    """Return the licence texts in the folders of the bases: file name -> base.

    A single text is called `LICENSE`. With several texts, or when each base has its own licence, each is
    named after the role of its base.
    """
    base_of_text: dict[bytes, Base] = {}
    for base in bases:
        if base.licence_file is not None and licence.identifier in (base.licence, OTHER):
            text = read_bytes(base.licence_file, "licence", limits.MODEL_TEXT)
            base_of_text.setdefault(text, base)
    bases_with_text = list(base_of_text.values())
    if len(bases_with_text) == 1 and licence.identifier == bases[0].licence:
        return {"LICENSE": bases_with_text[0]}
    return {f"LICENSE-{base.role.replace(' ', '-')}": base for base in bases_with_text}


def _base(role: str, path: Path, sha256: Any) -> Base:
    folder = path if path.is_dir() else path.parent
    name, on_hub = _name_of(path)
    licence, licence_name, why = _licence_of(path)
    files = (folder / file for file in _LICENCE_FILES)
    return Base(
        role=role,
        name=name,
        on_hub=on_hub,
        licence=licence,
        licence_name=licence_name,
        why=why,
        licence_file=next((file for file in files if file.is_file()), None),
        sha256=sha256 if isinstance(sha256, str) else None,
    )


def _name_of(path: Path) -> tuple[str, bool]:
    """Return `org/name` and true for a path in a cache of the Hub, otherwise the last part of the path and false."""
    for folder in (path, *path.parents):
        if match := _HUB_FOLDER.search(folder.name):
            return f"{match[1]}/{match[2]}", True
    return path.name, False


def _licence_of(path: Path) -> tuple[str | None, str | None, str]:
    """Return a licence's identifier, its name if the identifier is `other`, and where it was read or why there is
    none."""
    if not path.exists():
        return None, None, "it is no longer at the path that the run read"
    if path.is_dir():
        readme = path / _README
        if not readme.is_file():
            return None, None, "no README.md in the folder of its weights"
        fields = front_matter(readme)
        # The Hub's identifiers are in lower case.
        identifier = fields.get("license", "").lower()
        if not identifier:
            return None, None, "its README.md has no `license:` in its front matter"
        return (
            identifier,
            fields.get("license_name") if identifier == OTHER else None,
            "its README.md",
        )
    try:
        with open_weights(path) as weights:
            licence = weights.metadata.get(_METADATA_KEYS.get(weights.format, ""))
    except BadInput as error:
        return None, None, error.message
    if not isinstance(licence, str) or not licence:
        return None, None, "its metadata has no licence"
    return licence.lower(), None, "its metadata"


def front_matter(readme: Path) -> dict[str, str]:
    """Return the plain `key: text` lines between the two `---` at the head of a model card."""
    try:
        with open_regular(readme, "model card") as file:
            text = file.read(_README_BYTES).decode("utf-8", "replace")
    except (OSError, BadInput):
        return {}
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (body := lines[1:]):
        return {}
    pairs = (
        line.split(":", 1) for line in body[: body.index("---")] if re.match(r"\w+:\s*\S", line)
    )
    return {key: value.strip().strip("'\"") for key, value in pairs}
