"""Stream the text of completions, and handle stop strings.

A byte-level tokenizer may split a character between two tokens, and a stop string may begin in
one token and end in another. So the text is decoded from all tokens of a sequence, and only the part that later
tokens cannot change is yielded: an incomplete character or a beginning of a stop string at the end is
held back. The yielded pieces together are the completion: the text before the first stop string, or before the
end-of-text token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import BadInput
from engine.formats.tokenizer import Tokenizer
from engine.generation.generate import SLOTS, Ended, generate
from engine.generation.sampling import GREEDY, Sampling
from engine.models.decoder import Decoder

_INCOMPLETE = "\ufffd"
"""Replacement character that an incomplete character is decoded to."""


class Piece(NamedTuple):
    """The next part of one completion."""

    prompt: int
    """Index of the prompt that the completion continues."""
    text: str
    ended: Ended | None
    tokens: int
    """Number of tokens generated so far for this prompt."""


@dataclass(slots=True)
class StopText:
    """The text of one sequence, and how much of it has been yielded."""

    stops: Sequence[str]
    text: str = ""
    """The text before the first stop string."""
    stopped: bool = False
    given: int = field(default=0)
    """Number of characters already yielded."""

    def update(self, text: str) -> None:
        """Set the text, decoded from all tokens so far."""
        starts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(starts)
        self.text = text[: min(starts)] if starts else text

    def take_final(self, *, last: bool) -> str:
        """Return the text that was not yielded yet and cannot change any more; all remaining text if this is
        the `last` call.
        """
        end = len(self.text)
        if not (last or self.stopped):
            end = len(self.text.rstrip(_INCOMPLETE))
            end -= max((_prefix_length(stop, self.text[:end]) for stop in self.stops), default=0)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece


def _prefix_length(stop: str, text: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which the text ends."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def end_ids(decoder: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the end-of-text ids: from the model's configuration, or if it has none, from the
    tokenizer.
    """
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
    slots: int = SLOTS,
    rows: int | None = None,
) -> Iterator[Piece]:
    """Yield the completions of `prompts` in pieces as they are generated; each prompt's last piece
    says how it ended.

    For the arguments and errors see `generate`. A model with a padded embedding may choose an id
    that its tokenizer does not have; this id is decoded to nothing.
    """
    if "" in stops:
        raise BadInput.expected("stop string", repr(""), "at least one character", "none")
    ids = [[int(token) for token in row] for row in tokenizer.encode_documents(prompts)]
    ends = end_ids(decoder, tokenizer)
    texts = [StopText(stops) for _ in prompts]
    counts = [0] * len(prompts)

    def stop(index: int, tokens: Sequence[int]) -> bool:
        texts[index].update(tokenizer.decode(tokens))
        return texts[index].stopped

    for index, _, ended, _ in generate(
        decoder,
        ids,
        max_tokens=max_tokens,
        end_ids=ends,
        sampling=sampling,
        keys=keys,
        stop=stop,
        slots=slots,
        rows=rows,
    ):
        counts[index] += 1
        piece = texts[index].take_final(last=ended is not None)
        if piece or ended is not None:
            yield Piece(index, piece, ended, counts[index])
