"""Write and check the MANIFEST.json of a published folder: size and hash of every other file in it.

    {"schema": 1, "files": {name: {"bytes": n, "sha256": hex}}}

A missing, truncated or changed file is a failure and is reported by name. An added file makes the verdict
unknown, because the engine did not write it. Names that begin with a dot belong to tools (`.gitattributes`) and
are ignored.

No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput
from engine.files import read_json
from engine.receipts.receipt import digest_files
from engine.verdict import Level, Verdict

MANIFEST = "MANIFEST.json"
SCHEMA = 1


def write_manifest(folder: Path) -> None:
    files = {name: entry for name, entry in digest_files(folder).items() if _is_ours(name)}
    record = {"schema": SCHEMA, "files": files}
    (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return the files in the manifest; None if there is no readable manifest."""
    try:
        record = read_json(folder / MANIFEST, "manifest", limits.MANIFEST)
        files = record["files"]
        if record["schema"] != SCHEMA or not isinstance(files, dict):
            return None
        assert all({"bytes", "sha256"} <= entry.keys() for entry in files.values())
    except (BadInput, KeyError, TypeError, AttributeError, AssertionError):
        return None
    return files


def check_manifest(folder: Path) -> Verdict:
    """Compare the folder with its manifest."""
    files = read_manifest(folder)
    if files is None:
        return Verdict(Level.FAIL, f"{MANIFEST} cannot be read")
    present = {name: entry for name, entry in digest_files(folder).items() if _is_ours(name)}
    for name, entry in sorted(files.items()):
        if name not in present:
            return Verdict(Level.FAIL, f"{name} is missing")
        if present[name]["bytes"] != entry["bytes"]:
            sizes = f"{present[name]['bytes']:,} bytes, expected {entry['bytes']:,}"
            return Verdict(Level.FAIL, f"{name} has {sizes}")
        if present[name]["sha256"] != entry["sha256"]:
            return Verdict(Level.FAIL, f"{name} has other content than when it was published")
    if added := sorted(present.keys() - files.keys()):
        return Verdict(Level.UNKNOWN, f"{', '.join(added[:3])}: added after publication")
    total = sum(int(entry["bytes"]) for entry in files.values())
    return Verdict(Level.PASS, f"{len(files)} files, {total:,} bytes, unchanged since publication")


def _is_ours(name: str) -> bool:
    return name != MANIFEST and not name.startswith(".")
