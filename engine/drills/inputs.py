"""Damage a user's files for a drill. Each function is named after the id of its drill and changes the files in
`folder`: a copy of the demo's teacher with its tokenizer, or the folder of a run that was stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoint_folders import published
from engine.drills.runs import COPY
from engine.log.folder import RunFolder
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, save_decoder

WORDS = ("if", "for", "self", "return", "import")


def alter(id: str, folder: Path) -> None:
    """Damage the files in `folder` as the drill `id` requires."""
    globals()[id](folder)


def _saved(folder: Path, change: Callable[[Decoder], None], name: str = COPY) -> None:
    """Save the teacher in `folder`/`name` with changed weights."""
    decoder = load_decoder(folder / COPY)
    with torch.no_grad():
        change(decoder)
    tokenizer = (folder / COPY / "tokenizer.json").read_bytes()
    if name == COPY:
        shutil.rmtree(folder / COPY)
    save_decoder(decoder, folder / name, torch.float32)
    (folder / name / "tokenizer.json").write_bytes(tokenizer)


def random_teacher(folder: Path) -> None:
    _saved(folder, lambda teacher: teacher.init_weights(torch.Generator().manual_seed(99)))


teacher_after_prepare = random_teacher


def zero_teacher(folder: Path) -> None:
    def zero(teacher: Decoder) -> None:
        for parameter in teacher.parameters():
            if parameter.ndim >= 2:
                parameter.zero_()

    _saved(folder, zero)


def identical_teacher(folder: Path) -> None:
    """Use a copy of the teacher as the student, in another file and another dtype."""
    _saved(folder, lambda _: None, "student")


def swapped_tokenizer(folder: Path) -> None:
    """Permute the ids of all tokens but the first; the vocabulary size stays the same."""
    file = folder / COPY / "tokenizer.json"
    record = json.loads(file.read_bytes())
    vocabulary = record["model"]["vocab"]
    ids = torch.randperm(len(vocabulary) - 1, generator=torch.Generator().manual_seed(3)) + 1
    others = dict(zip(range(1, len(vocabulary)), ids.tolist(), strict=True))
    record["model"]["vocab"] = {token: others.get(id, id) for token, id in vocabulary.items()}
    file.write_text(json.dumps(record))


def degenerate_corpus(folder: Path) -> None:
    """Write a corpus in which each document repeats one word."""
    (folder / "corpus").mkdir()
    for number in range(40):
        word = WORDS[number % len(WORDS)]
        (folder / "corpus" / f"{number}.txt").write_text(f" {word}" * (2000 + number))


def altered_checkpoint(run: Path) -> None:
    """Flip one bit of the newest checkpoint."""
    file = next(published(RunFolder(run).checkpoints)) / "student.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
