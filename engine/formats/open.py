"""Open a model's weights in any format, whatever their file names are.

The first bytes of a file determine its format (`engine.formats.kinds`). A folder holds one model:
safetensors in Hugging Face's layout, or exactly one .gguf or .apr file (or the parts of one
split .gguf). If the folder has a config.json, its safetensors are opened, as other programs do;
a .gguf or .apr file in it must be given by name. Any other folder with more than one
candidate is refused with their names, because choosing one would be a guess.

Pickles (.pt, .bin, .pth, the .metadata of a distributed checkpoint) are refused (PK01). Loading one
runs whatever program it contains, and nothing that is opened here is ever executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.formats.adapter import AdapterFolder, base_of, is_adapter, read_adapter
from engine.formats.apr import AprFile
from engine.formats.gguf import PART, open_gguf
from engine.formats.kinds import HINTS, START_BYTES, Kind, kind_of, other_kind
from engine.formats.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFolder,
    open_index,
    read_header,
    refuse,
)
from engine.formats.weights import WeightFile, open_regular

_EXPECTED = "a safetensors, GGUF or .apr file"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")


def open_weights(path: str | Path) -> WeightFile:
    """Open the weights in a file, or in a folder that holds one model. Raises `WeightsError`."""
    path = Path(path)
    try:
        if is_adapter(path):
            about = read_adapter(path)
            weights: WeightFile = AdapterFolder(path, about, open_weights(base_of(path, about)))
        elif os.path.isdir(path):
            file = _in_folder(path)
            weights = open_index(file) if file.name == INDEX_FILE else _open_file(file)
        else:
            weights = _open_file(path)
    except OSError as error:
        # A disk error while reading: a file that cannot be opened has already been refused with another error.
        refuse(path, "a readable file", error.strerror or str(error))
    return weights


@contextmanager
def opened(source: str | Path | WeightFile) -> Iterator[WeightFile]:
    """Open the weights in a file or folder and close them afterwards; weights that are already open
    stay open.
    """
    if isinstance(source, str | Path):
        with open_weights(source) as weights:
            yield weights
    else:
        yield source


def _open_file(path: Path) -> WeightFile:
    if not os.path.lexists(path) and "\0" not in str(path):
        refuse(path, "a model: a folder, or a safetensors, GGUF or .apr file", "nothing there")
    with open_regular(path, "weights") as file:
        start = file.read(START_BYTES)
    kind = kind_of(start)
    if kind is Kind.SAFETENSORS:
        return SafetensorsFolder(path, [read_header(path)])
    if kind is Kind.GGUF:
        return open_gguf(path)
    if kind in (Kind.APR, Kind.APR_V1):
        return AprFile(path)
    if kind is Kind.JSON:
        return open_index(path)
    code = "PK01" if kind in (Kind.PICKLE, Kind.ZIP) else ""
    raise other_kind("weights", path, _EXPECTED, kind, start, code)


def _in_folder(folder: Path) -> Path:
    """Return the only weight file or index of a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        refuse(folder, "a readable folder", str(error.strerror))
    candidates: dict[str, Path] = {}
    for name in names:
        if name in (SINGLE_FILE, INDEX_FILE):
            candidates[name] = folder / name
        elif name.lower().endswith((".gguf", ".apr")) and not name.startswith("."):
            part = PART.fullmatch(name)
            # Any part of a split file represents all of them.
            pattern = f"{part['stem']}-*-of-{part['count']}.gguf" if part else name
            candidates.setdefault(pattern, folder / name)
    safetensors = {
        name: file for name, file in candidates.items() if name in (SINGLE_FILE, INDEX_FILE)
    }
    if safetensors and "config.json" in names:
        candidates = safetensors
    if len(candidates) > 1:
        hint = "name one of them instead of the folder"
        refuse(folder, "the weights of one model", ", ".join(candidates), hint)
    if candidates:
        return next(iter(candidates.values()))
    pickled = [name for name in names if name.endswith(_PICKLED) or name == ".metadata"]
    if pickled:
        found = f"only {', '.join(pickled[:8])}" + (", ..." if pickled[8:] else "")
        hint = HINTS[Kind.PICKLE]
        if any(name.startswith("pytorch_model") for name in pickled):
            hint = (
                "a pickle can run code; transformers reads its tensors alone, and writes them as safetensors: "
                'python -c "from transformers import AutoModelForCausalLM as Model; '
                f"Model.from_pretrained('{folder}', dtype='auto').save_pretrained('NEW')\"; then copy tokenizer.json"
            )
        refuse(folder, _EXPECTED, found, hint, code="PK01")
    listed = ", ".join(names[:8]) + (", ..." if names[8:] else "")
    expected = f"{SINGLE_FILE}, {INDEX_FILE}, or one .gguf or .apr file"
    refuse(folder, expected, listed or "an empty folder")
