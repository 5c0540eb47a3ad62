"""Find a model by its name on the Hugging Face hub, `ORG/NAME` or `ORG/NAME@REVISION`, in the hub's cache on this
machine. Nothing is downloaded, and the library `huggingface_hub` is not needed.

    CACHE/models--ORG--NAME/refs/main             the commit of a branch, tag or pull request when it was downloaded
                           /snapshots/COMMIT/     the files of a commit, as links to ../../blobs/DIGEST

CACHE is the first of $HF_HUB_CACHE, $HUGGINGFACE_HUB_CACHE, $HF_HOME/hub and $XDG_CACHE_HOME/huggingface/hub whose
variable is set, otherwise ~/.cache/huggingface/hub, as in `huggingface_hub`.

A path that exists is never taken for a name. The path of a snapshot contains the model's name and its commit. A run's
settings store this path, so a resume reads the same snapshot even if the branch has moved.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from engine import limits
from engine.errors import BadInput
from engine.files import read_json_object, read_text

Wanted = Literal["model", "tokenizer", "config"]
"""Part of a snapshot that is read, and must be complete."""

MAIN = "main"
CONFIG_FILE = "config.json"
_PART = r"[A-Za-z0-9](?:[\w-]|\.(?!\.))*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_ENDINGS = (".gguf", ".apr", ".safetensors", ".json", ".toml", ".jsonl", ".bin", ".pt", ".pth")
_WEIGHTS = (".safetensors", ".gguf", ".apr", ".bin", ".pt", ".pth", ".ckpt")
_INDEX = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model as the hub names it."""

    name: str
    """`ORG/NAME`."""
    revision: str = MAIN
    """A branch, a tag, `refs/pr/N`, or all 40 digits of a commit."""

    @property
    def download(self) -> str:
        """The command that fetches it into the cache."""
        option = "" if self.revision == MAIN else f" --revision {self.revision}"
        return f"hf download {self.name}{option}"

    def refusal(self, expected: str, found: str) -> BadInput:
        """Return the error, one line with the command that helps."""
        suffix = "" if self.revision == MAIN else f"@{self.revision}"
        return BadInput(
            f"model: {self.name}{suffix} — expected {expected}, found {found}; `{self.download}` fetches it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of one commit of a model."""

    name: str
    commit: str
    folder: Path

    @property
    def text(self) -> str:
        """The description that commands and screens show."""
        return f"{self.name} at commit {self.commit}, from the hub cache: {self.folder}"

    def check(self, part: Wanted, model: HubName | None = None) -> None:
        """Raise BadInput where a file of `part` is missing: the download did not end, or fetched only some files."""
        if missing := _missing(self.folder, part):
            model = model or HubName(name=self.name, revision=self.commit)
            raise model.refusal(f"a complete snapshot {self.folder}", f"no {missing} in it")


def cache_folder() -> Path:
    """Return the folder of the hub's cache, which need not exist."""
    for variable, subfolder in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(value)), subfolder).absolute()
    return Path.home() / ".cache/huggingface/hub"


def hub_name(text: str | Path) -> HubName | None:
    """Parse a model's name on the hub; return None if `text` can only be a path."""
    match = _NAME.fullmatch(str(text))
    if match is None or str(text).lower().endswith(_FILE_ENDINGS):
        return None
    name, revision = match[1], match[2] or MAIN
    if "--" in name or len(name) > limits.HUB_NAME.most or ".." in PurePosixPath(revision).parts:
        return None
    return HubName(name=name, revision=revision)


def find_snapshot(hub_model: HubName, part: Wanted = "model") -> Snapshot:
    """Return the snapshot of a model in the cache. Raises BadInput if it is missing or incomplete."""
    cache = cache_folder()
    model = cache / f"models--{hub_model.name.replace('/', '--')}"
    if not model.is_dir():
        found = "neither"
        if not cache.is_dir():
            found = "nothing there, and no such cache"
        raise hub_model.refusal(
            f"a file or folder of that path, or that model in the hub cache {cache}", found
        )
    commit = _commit(model, hub_model)
    folder = model / "snapshots" / commit
    if not folder.is_dir():
        raise hub_model.refusal(f"the snapshot {commit} in {model}", "none")
    snapshot = Snapshot(name=hub_model.name, commit=commit, folder=folder)
    snapshot.check(part, hub_model)
    return snapshot


def snapshot_of(path: str | Path) -> Snapshot | None:
    """Return the snapshot that a path is in, whether or not it exists; None for a path outside of a hub's cache."""
    parts = Path(path).parts
    for index in range(len(parts) - 2):
        owner, middle, commit = parts[index : index + 3]
        if owner.startswith("models--") and middle == "snapshots" and _COMMIT.fullmatch(commit):
            name = owner.removeprefix("models--").replace("--", "/", 1)
            return Snapshot(name=name, commit=commit, folder=Path(*parts[: index + 3]))
    return None


def local_path(path_or_name: str | Path, part: Wanted = "model") -> Path:
    """Return the path of a model: a path is returned unchanged, and a name on the hub gives the folder of its snapshot,
    or the config.json in it. Raises BadInput for a name that is not in the cache."""
    model = None if os.path.lexists(path_or_name) else hub_name(path_or_name)
    if model is None:
        return Path(path_or_name)
    folder = find_snapshot(model, part).folder
    return folder / CONFIG_FILE if part == "config" else folder


def _commit(model: Path, hub_model: HubName) -> str:
    """Return the commit of a revision."""
    if _COMMIT.fullmatch(hub_model.revision):
        return hub_model.revision
    ref = model / "refs" / hub_model.revision
    if not ref.is_file():
        raise hub_model.refusal(f"the revision {hub_model.revision} in {model}", "none")
    commit = read_text(ref, "revision", limits.HUB_REVISION).strip()
    # It becomes a component of a path.
    if not _COMMIT.fullmatch(commit):
        raise hub_model.refusal(f"the 40 digits of a commit in {ref}", f"{commit!r:.60}")
    return commit


def _missing(folder: Path, part: Wanted) -> str | None:
    """Return the first missing file of a part of a snapshot; None if the part is complete."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return "file at all"
    # A link to a deleted blob.
    if broken := [name for name in names if not (folder / name).exists()]:
        return f"{broken[0]} (its link is broken)"
    if part != "tokenizer" and CONFIG_FILE not in names:
        single_files = any(name.endswith((".gguf", ".apr")) for name in names)
        if part == "config" or not single_files:
            return CONFIG_FILE
    if part != "model":
        return None
    for index in (name for name in names if name.endswith(_INDEX)):
        content = read_json_object(folder / index, "index of weights", limits.WEIGHTS_HEADER)
        shards = content.get("weight_map")
        # The reader of the weights refuses an index without a map, and names that lead out of the folder.
        listed = shards.values() if isinstance(shards, dict) else ()
        for shard in sorted({name for name in listed if isinstance(name, str)}):
            if PurePosixPath(shard).name == shard and not (folder / shard).exists():
                return f"{shard}, which {index} lists"
    weights = any(name.lower().endswith(_WEIGHTS) for name in names)
    return None if weights else "weights (model.safetensors)"
