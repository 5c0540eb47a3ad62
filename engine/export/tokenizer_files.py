"""What transformers reads beside weights, configuration and tokenizer.json, made where a run has none.

    generation_config.json    what ends a text: the same ids that end one in this engine
    tokenizer_config.json     that tokenizer.json is all there is, and what ends a document

Both are taken from the student's base where it has them, which a run does not copy. A teacher's are not
taken: its chat template would promise a model that answers chats.

No torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engine.errors import TokenizerError
from engine.export.about import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from engine.export.folder import BESIDE
from engine.formats.tokenizer import open_tokenizer
from engine.models.config import read_config

GENERATION_FILE = "generation_config.json"


def complete_folder(folder: Path, base: Path | None) -> None:
    """Puts into `folder`, which has a model and its tokenizer.json, what else transformers reads.

    `base` is the folder of the student's base, where there was one and it is still there.
    """
    for name in (*BESIDE, TEMPLATE_FILE):
        if base is not None and (base / name).is_file() and not (folder / name).exists():
            shutil.copyfile(base / name, folder / name)
    config = read_config(folder)
    tokenizer = open_tokenizer(folder)
    try:
        end: int | None = tokenizer.end_of_text_id
    except TokenizerError:
        end = None
    eos = list(config.eos_token_ids) or ([] if end is None else [end])
    if not (folder / GENERATION_FILE).exists():
        record: dict[str, Any] = {"do_sample": False}
        if eos:
            record |= {"eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": eos[0]}
        if config.bos_token_id is not None:
            record["bos_token_id"] = config.bos_token_id
        _write(folder / GENERATION_FILE, record)
    if not (folder / TOKENIZER_CONFIG_FILE).exists():
        record = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        }
        if end is not None:
            text = tokenizer.tokens()[end]
            record |= {"eos_token": text, "pad_token": text}
        _write(folder / TOKENIZER_CONFIG_FILE, record)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
