"""Train a byte-level BPE tokenizer on the train split of a corpus.

    python -m tests.support.train_tokenizer OUT.json --corpus python-stdlib --vocab 4096
    python -m tests.support.train_tokenizer OUT.json --corpus chats.jsonl --vocab 512 \\
        --special '<|im_start|>' --special '<|im_end|>'

The kind of tokenizer is that of Qwen2: text is cut by the split regex below, each part is spelt in
bytes (256 printable stand-ins, all of them in the vocabulary), and byte pairs are merged. Every
text can be encoded, and decoding gives it back exactly. Qwen2 also applies NFC normalization, which
would break that promise for combining marks; this one does not.

Ids: 0 is <|endoftext|>, then the special tokens that were asked for, then the 256 bytes, then one id a
merge. Of a conversation the contents of its messages are the text. Training is deterministic: the
same documents give the same bytes of the file. Held-out text takes no part in it, so bytes per
held-out token measures the tokenizer on text it has not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.data.conversations import read_conversation
from engine.data.corpus import Document, open_corpus
from engine.data.sources import STDLIB
from engine.errors import EXIT_PASS, BadInput, EngineError, UsageError
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.terminal import put, say
from tests.support.split_digest import digest_of
from tests.support.streams import documents_of

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""<|endoftext|> and 256 bytes."""

# Contractions, words, single digits, punctuation with the line ends after it, line ends, and runs
# of spaces that leave the last one to the word that follows. As in Qwen2's tokenizer.json.
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_bpe(documents: Sequence[Document], vocab_size: int, special: Sequence[str] = ()) -> str:
    """The JSON of a tokenizer with `vocab_size` ids, or fewer when no pair is left to merge.

    `special` are tokens in addition to the one that ends a text: those of a chat template."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    assert vocab_size >= SMALLEST_VOCAB + len(special)
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((_text(document) for document in documents), trainer)
    return inner.to_str()


def _text(document: Document) -> str:
    if not document.is_chat:
        return document.text
    messages = read_conversation(json.loads(document.text), document.name).messages
    return "\n".join(message["content"] for message in messages if message.get("content"))


def bytes_per_token(tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """UTF-8 bytes of the documents for each token they become, end-of-text tokens not counted."""
    texts = [_text(document) for document in documents]
    tokens = sum(len(ids) for ids in tokenizer.encode_documents(texts))
    return sum(len(text.encode("utf-8")) for text in texts) / tokens


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="python -m tests.support.train_tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--corpus", default=STDLIB, help="a folder, a file or %(default)s")
    parser.add_argument("--vocab", type=int, default=4096, help="most ids (%(default)s)")
    parser.add_argument(
        "--special", action="append", default=[], metavar="TOKEN", help="another special token"
    )
    parser.add_argument("--heldout-fraction", type=float, default=0.08, help="(%(default)s)")
    parser.add_argument("--max-bytes", type=int, help="most bytes to train on (no limit)")
    try:
        given = parser.parse_args(arguments)
        _train(given)
    except EngineError as error:
        say(error)
        return error.exit_code
    return EXIT_PASS


def _train(given: argparse.Namespace) -> None:
    out: Path = given.out
    # Both known before any work: training takes seconds to minutes.
    smallest = SMALLEST_VOCAB + len(given.special)
    if given.vocab < smallest:
        wanted = f"at least {smallest} (256 bytes and {', '.join([END_OF_TEXT, *given.special])})"
        raise UsageError(f"--vocab: expected {wanted}, found {given.vocab}")
    if not out.name or out.is_dir():
        raise UsageError(f"OUT.json: {out} — expected the name of a file, found a folder")
    if not out.parent.is_dir():
        raise UsageError(f"OUT.json: {out} — expected a folder at {out.parent}, found none")
    corpus = open_corpus(
        given.corpus, heldout_fraction=given.heldout_fraction, max_bytes=given.max_bytes
    )
    _write(out, train_bpe(documents_of(corpus.train), given.vocab, given.special))
    tokenizer = open_tokenizer(out)
    put(f"wrote {out}: {tokenizer.vocab_size:,} ids, sha256 {tokenizer.sha256}")
    for name, split in (("train", corpus.train), ("held-out", corpus.heldout)):
        ratio = bytes_per_token(tokenizer, documents_of(split))
        put(
            f"{name}: {split.document_count:,} documents, {split.size_bytes:,} bytes, "
            f"{ratio:.3f} bytes per token, sha256 {digest_of(split)}"
        )


def _write(out: Path, text: str) -> None:
    # Written to a temporary file and moved into place, so that a file under this name is always whole.
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise BadInput.expected("tokenizer", out, "a file that can be written", reason) from error


if __name__ == "__main__":
    sys.exit(main())
