"""Compare two students on what they write: samples after one prompt, and the reverse KL on their own texts.

python -m engine.demo.own_text BEFORE AFTER          (folders of students of the demo on source text)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from engine.data.batches import Batch, heldout_rows
from engine.data.packing import STREAM
from engine.data.token_cache import Recipe, load_tokens
from engine.data.tokens import Encoder
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.models.load import load_decoder
from engine.spec import RolloutSection
from engine.terminal import put
from engine.train.rollout import Rollout

TEACHER = Path(__file__).parent / "teacher"
TEXTS, SEQ_LEN = 32, 128
WRITES = RolloutSection(share=1.0, max_new_tokens=64, prompt_tokens=32)


class OwnText(NamedTuple):
    reverse_kl: float
    """Mean KL(student || teacher) on the texts that the student writes, in nats per token."""
    prompt: list[int]
    sample: list[int]
    """The text after the first prompt."""


def heldout_prompts(tokenizer: Tokenizer, count: int = TEXTS) -> Batch:
    """Return rows of held-out source text, whose beginnings are the prompts. The demo has cached them."""
    recipe = Recipe(
        source="python-stdlib",
        include_tests=False,
        columns=(),
        heldout_fraction=0.08,
        max_bytes=None,
        encoder=Encoder(tokenizer=tokenizer),
        packing=STREAM,
        seq_len=SEQ_LEN,
    )
    return heldout_rows(load_tokens(recipe).heldout, SEQ_LEN, count)


@torch.no_grad()
def own_text(student_folder: Path, prompts: Batch, tokenizer: Tokenizer) -> OwnText:
    """Let a student write after each prompt, always with the same random numbers, and the teacher score it."""
    student, teacher = load_decoder(student_folder), load_decoder(TEACHER)
    rollout = Rollout(
        student,
        tokenizer,
        WRITES,
        seed=0,
        seq_len=SEQ_LEN,
        slots=len(prompts.row_ids),
        dtype=torch.float32,
    )
    ((batch, written),) = rollout.write([prompts], 1)
    total, count = 0.0, 0
    for part in batch.split(16):
        tokens_BT, documents_BT, labels_BT = part.to_torch("cpu")
        kept = labels_BT >= 0
        q_NV = student(tokens_BT, documents_BT)[kept].log_softmax(-1)
        p_NV = teacher(tokens_BT, documents_BT)[kept].log_softmax(-1)
        total += float((q_NV.exp() * (q_NV - p_NV)).sum())
        count += int(kept.sum())
    return OwnText(total / count, written.prompts[0], written.completions[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args()
    # Models this small take three seconds on one thread. Several wait for each other at each of thousands of small
    # products, ten times as long on a busy machine.
    torch.set_num_threads(1)
    tokenizer = open_tokenizer(TEACHER)
    prompts = heldout_prompts(tokenizer)
    before, after = (own_text(one, prompts, tokenizer) for one in (given.before, given.after))
    put(f"prompt\n  {tokenizer.decode(before.prompt)!r}")
    for name, one in (("before", before), ("after", after)):
        put(f"{name} on-policy steps\n  {tokenizer.decode(one.sample)!r}")
    put(
        f"reverse KL on {TEXTS} texts of its own: {before.reverse_kl:.3f} nats per token before, "
        f"{after.reverse_kl:.3f} after"
    )


if __name__ == "__main__":
    main()
