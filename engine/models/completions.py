"""Continuations as text: stop strings, and text that is sure.

A token is not a character: a tokenizer of bytes may cut one in the middle, and a stop string may begin in
one token and end in another. So text is decoded from all tokens of a sequence, and given out as far as
nothing that follows can change it: never the end that is half a character, or that could be the beginning
of a stop string. What is given out, joined together, is the completion: the text before the first stop
string, or before the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import BadInput
from engine.formats.tokenizer import Tokenizer
from engine.models.decode import GraphSetting
from engine.models.decoder import Decoder
from engine.models.generate import GREEDY, TILE, Ended, Sampling, generate

_HALF = "\ufffd"
"""What half a character decodes to."""


class Piece(NamedTuple):
    """The next part of one completion."""

    prompt: int
    """Which one it continues."""
    text: str
    ended: Ended | None
    tokens: int
    """Generated so far for this prompt."""


@dataclass(slots=True)
class StopText:
    """The text of one sequence, and how much of it is sure."""

    stops: Sequence[str]
    text: str = ""
    """Before the first stop string."""
    stopped: bool = False
    given: int = field(default=0)
    """Characters given out."""

    def update(self, text: str) -> None:
        """`text` is that of all tokens so far."""
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        self.text = text[: min(found)] if found else text

    def sure(self, *, last: bool) -> str:
        """What was not given out yet and cannot change; at the `last`, all that is left."""
        end = len(self.text)
        if not (last or self.stopped):
            end = len(self.text.rstrip(_HALF))
            end -= max((_begun(stop, self.text[:end]) for stop in self.stops), default=0)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece


def _begun(stop: str, text: str) -> int:
    """How many characters of `stop` the text ends with, short of all of them."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def end_ids(decoder: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a text: as the model's configuration says, else the tokenizer's end of text."""
    return decoder.config.eos_token_ids or (tokenizer.end_of_text_id,)


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    stops: Sequence[str] = (),
    sampling: Sampling = GREEDY,
    keys: Sequence[object] | None = None,
    tile: int = TILE,
    rows: int | None = None,
    capacity: int | None = None,
    cuda_graph: GraphSetting = "auto",
) -> Iterator[Piece]:
    """The completions of `prompts` as they come; each prompt's last piece says how it ended.

    For the arguments and errors see `generate`. A model may choose an id beyond its tokenizer's, of an
    embedding that is padded: it has no text.
    """
    if "" in stops:
        raise BadInput.expected("stop string", repr(""), "at least one character", "none")
    ids = [[int(one) for one in row] for row in tokenizer.encode_documents(prompts)]
    ends = end_ids(decoder, tokenizer)
    texts = [StopText(stops) for _ in prompts]
    counts = [0] * len(prompts)

    def stop(index: int, tokens: Sequence[int]) -> bool:
        texts[index].update(tokenizer.decode(tokens))
        return texts[index].stopped

    for index, _, ended in generate(
        decoder,
        ids,
        max_tokens=max_tokens,
        end_ids=ends,
        sampling=sampling,
        keys=keys,
        stop=stop,
        tile=tile,
        rows=rows,
        capacity=capacity,
        cuda_graph=cuda_graph,
    ):
        counts[index] += 1
        piece = texts[index].sure(last=ended is not None)
        if piece or ended is not None:
            yield Piece(index, piece, ended, counts[index])
