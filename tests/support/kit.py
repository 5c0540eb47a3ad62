"""A whole tiny distillation: teacher, student shape, corpus, and specs for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.data.corpus import Document
    from engine.formats.tokenizer import Tokenizer
    from engine.models.decoder import Decoder


@dataclass(frozen=True)
class Kit:
    """Paths of a teacher, a student's shape and a corpus small enough to distil in a second or two."""

    teacher: Path
    student: Path
    corpus: Path

    def spec(self, folder: Path, **changes: object) -> Path:
        """Write a spec file in `folder`; `changes` are settings with `__` for the dot."""
        settings: dict[str, object] = {
            "teacher.path": str(self.teacher),
            "student.config": str(self.student),
            "data.corpus": str(self.corpus),
            "data.seq_len": 32,
            "data.heldout_fraction": 0.2,
            "loss.alpha": 0.3,
            "loss.temperature": 2.0,
            "train.steps": 20,
            "train.rows": 4,
            "train.warmup_steps": 2,
            "eval.every": 10,
            "eval.rows": 4,
            "checkpoint.every": 5,
            "compute.device": "cpu",
            "compute.threads": 1,
        }
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        lines: dict[str, list[str]] = {}
        for key, value in settings.items():
            section, name = key.split(".")
            lines.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        text = "\n".join(f"[{section}]\n" + "\n".join(rows) for section, rows in lines.items())
        path = folder / "spec.toml"
        path.write_text(text + "\n")
        return path


def tiny_config(**changes: object) -> dict[str, object]:
    """Return a config.json of the Qwen2 family with 300 tokens."""
    config: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return config | changes


def _taught(decoder: Decoder, documents: Sequence[Document], tokenizer: Tokenizer) -> Decoder:
    """Train the model on the text for a second: a run refuses a teacher that has learnt nothing of it."""
    import torch

    from engine.data.batches import Batches
    from engine.spec import LossSection, TrainSection
    from engine.train.trainer import Trainer
    from tests.support.streams import tokenize

    train = TrainSection(steps=60, rows=8, lr=1e-2, warmup_steps=4)
    trainer = Trainer(
        student=decoder,
        teacher=None,
        batches=Batches(tokenize(documents, tokenizer), seq_len=32, rows_per_batch=8, seed=1),
        train=train,
        loss=LossSection(alpha=1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )
    for _ in trainer.steps():
        pass
    return decoder


def taught_on(kit: Kit, decoder: Decoder) -> Decoder:
    """Train a model on the kit's corpus for a second."""
    from engine.data.corpus import Document
    from engine.formats.tokenizer import open_tokenizer

    files = sorted(kit.corpus.iterdir())
    documents = [Document(name=p.name, text=p.read_text()) for p in files]
    return _taught(decoder, documents, open_tokenizer(kit.teacher))


def make_kit(root: Path) -> Kit:
    """Make a tiny distillation in the empty folder `root`; its teacher is trained for a second."""
    import torch

    from engine.data.corpus import Document
    from engine.formats.tokenizer import open_tokenizer
    from engine.models.config import ModelConfig
    from engine.models.load import new_decoder, save_decoder
    from tests.support.train_tokenizer import train_bpe

    corpus = root / "corpus"
    corpus.mkdir()
    for index in range(40):
        body = "\n".join(f"def f{index}_{line}(x):\n    return x + {line}" for line in range(12))
        (corpus / f"part_{index:02}.py").write_text(body + "\n")
    documents = [Document(name=p.name, text=p.read_text()) for p in sorted(corpus.iterdir())]
    tokenizer = root / "tokenizer.json"
    tokenizer.write_text(train_bpe(documents, 300))
    config = ModelConfig.from_dict(tiny_config(hidden_size=48), "kit")
    teacher = root / "teacher"
    decoder = _taught(new_decoder(config, seed=7), documents, open_tokenizer(tokenizer))
    save_decoder(decoder, teacher, torch.float32, extra_files=[tokenizer])
    (root / "student.json").write_text(json.dumps(tiny_config()))
    return kit_in(root)


def kit_in(root: Path) -> Kit:
    """The kit that was made in a folder."""
    return Kit(teacher=root / "teacher", student=root / "student.json", corpus=root / "corpus")
