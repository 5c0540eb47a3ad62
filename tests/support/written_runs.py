"""Models that answer small questions, and runs of twenty steps on what they write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.chats import CHATML, make_tokenizer
from tests.support.kit import tiny_config

if TYPE_CHECKING:
    from engine.models.decoder import Decoder

WORDS = ("water", "steam", "place", "name", "time", "list", "short", "third", "first", "second")
SEQ_LEN, STEPS = 64, 20


def conversations(answer_words: int = 4) -> list[dict[str, Any]]:
    """Return questions about words whose answers repeat the question and count on."""
    found = []
    for number in range(120):
        first = number % len(WORDS)
        second = (3 * number + number // len(WORDS)) % len(WORDS)
        question = f"{WORDS[first]} and {WORDS[second]}?"
        following = [
            WORDS[(second + one * (first + 1)) % len(WORDS)] for one in range(answer_words)
        ]
        answer = " ".join([WORDS[first], *following][:answer_words])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


@dataclass(frozen=True)
class ChatKit:
    """Folders of models and a file of conversations."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "chats.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def shape(self) -> Path:
        return self.root / "shape.json"

    def spec(self, folder: Path, **changes: Any) -> Path:
        """Write the spec of a run on what the student writes; `changes` are settings with `__` for the dot."""
        settings: dict[str, Any] = {
            "teacher.path": str(self.root / "teacher"),
            "student.path": str(self.root / "student"),
            "data.corpus": str(self.corpus),
            "data.packing": "documents",
            "data.seq_len": SEQ_LEN,
            "data.heldout_fraction": 0.2,
            "loss.temperature": 1.0,
            "rollout.share": 1.0,
            "rollout.max_new_tokens": 24,
            "train.steps": STEPS,
            "train.rows": 4,
            "train.warmup_steps": 2,
            "train.lr": 1e-3,
            "eval.every": 0,
            "checkpoint.every": 0,
            "compute.device": "cpu",
            "compute.threads": 1,
        }
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        sections: dict[str, list[str]] = {}
        for key, value in settings.items():
            section, name = key.split(".")
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        path = folder / "spec.toml"
        path.write_text(
            "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
        )
        return path


def answered(answer: Callable[[int, str], str], answer_words: int = 4) -> list[dict[str, Any]]:
    """Return the conversations with other answers: of the conversation's number and its right answer."""
    found = conversations(answer_words)
    for number, record in enumerate(found):
        turn = record["messages"][1]
        turn["content"] = answer(number, turn["content"])
    return found


def taught(
    kit: ChatKit,
    name: str,
    records: list[dict[str, Any]],
    *,
    steps: int,
    seed: int = 8,
    end: str = CHATML.end,
) -> str:
    """Train a model on conversations, whose turns end with `end`, and save it in the kit; return its folder."""
    import torch

    from engine.data.batches import Batches
    from engine.data.corpus import open_corpus
    from engine.formats.tokenizer import open_tokenizer
    from engine.models.load import save_decoder
    from engine.spec import LossSection, TrainSection
    from engine.train.trainer import Trainer
    from tests.support.streams import documents_of, tokenize

    root = kit.root
    tokenizer = open_tokenizer(root / "tokenizer")
    file = root / f"{name}.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    # The end of the assistant's turn alone: the user's is followed by a new line in the same text.
    text = CHATML.plain.replace(f"message.content + '{CHATML.end}' ", f"message.content + '{end}' ")
    stream = tokenize(
        documents_of(open_corpus(str(file), heldout_fraction=0.2).train),
        tokenizer,
        template=CHATML.template(text=text),
    )
    decoder = untaught(kit, seed=seed)
    train = TrainSection(steps=steps, rows=8, lr=1e-2, warmup_steps=4)
    trainer = Trainer(
        student=decoder,
        teacher=None,
        batches=Batches(stream, seq_len=SEQ_LEN, rows_per_batch=8, seed=1),
        train=train,
        loss=LossSection(alpha=1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )
    for _ in trainer.steps():
        pass
    save_decoder(decoder, root / name, torch.float32, extra_files=sorted(kit.tokenizer.iterdir()))
    return str(root / name)


def untaught(kit: ChatKit, *, seed: int) -> Decoder:
    """Return a model with fresh weights."""
    from engine.models.config import ModelConfig
    from engine.models.load import new_decoder

    return new_decoder(ModelConfig.from_dict(json.loads(kit.shape.read_text()), "chats"), seed=seed)


def make_chats(root: Path) -> None:
    """Make the kit's corpus, a teacher and a student in the empty folder `root`, in two seconds."""
    kit = ChatKit(root)
    size = make_tokenizer(kit.tokenizer).vocab_size
    (kit.tokenizer / "chat_template.jinja").write_text(CHATML.plain)
    (kit.tokenizer / "tokenizer_config.json").write_text(json.dumps(CHATML.special_tokens))
    kit.shape.write_text(json.dumps(tiny_config(vocab_size=size, hidden_size=48)))
    records = conversations()
    kit.corpus.write_text("\n".join(map(json.dumps, records)))
    taught(kit, "teacher", records, steps=120, seed=7)
    taught(kit, "student", records, steps=30)
