"""Text from a model, token by token.

    prompt          every token at once, its keys and values put into the cache of one slot
    each further    one token of every slot at once, on top of what the cache holds
    slot            a sequence that ends leaves its slot to the next prompt

A prompt is run by itself and the steps always have `tile` rows, some of them idle. So a product has the
same shape whatever stands beside a sequence: what one sequence gets does not depend on the others, nor
on how many are run at once. (The sums of a product depend on its shape, in the last bit, and one bit
decides between two tokens that are nearly as good.)

The next token is the one with the largest logit, the lowest id of several; or it is drawn:

    p = softmax(logits / temperature), of the top_k largest, of those the fewest that reach top_p

one uniform number a token, from a generator that is seeded with (seed, key): the key names the sequence,
so it meets the same numbers whichever slot it is in.

Logits that are NaN or infinite raise `NoAnswer`: an argmax of NaN is a token like any other.

Weights may be dense or in blocks: the decoder is the same. On a GPU, where `engine.models.decode` covers
the model, it makes the steps: there tokens are chosen on the device, and the host, which looks for stop
strings, reads them some steps behind. A sequence that turns out to have ended is cut there.

Not covered: beams, penalties.

**Continuations as text** (`complete`): stop strings, and text that is sure. A token is not a character: a
tokenizer of bytes may cut one in the middle, and a stop string may begin in one token and end in another.
So text is decoded from all tokens of a sequence, and given out as far as nothing that follows can change
it: never the end that is half a character, or that could be the beginning of a stop string. What is given
out, joined together, is the completion: the text before the first stop string, or before the end-of-text
token.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from engine.errors import BadInput, NoAnswer
from engine.formats.tokenizer import Tokenizer
from engine.models.decode import (
    GREEDY,
    HISTORY,
    Chosen,
    GraphSetting,
    Sampling,
    choose_cuda_graph,
    coverage,
    draw,
)
from engine.models.decoder import Decoder, Past

if TYPE_CHECKING:
    from engine.models.decode_step import DecodeSteps

# Shapes: B rows of a tile, T tokens, V vocabulary, S slots for tokens, K key/value heads, E their width

TILE = 8
"""Sequences that are run side by side where many are wanted."""

AHEAD = 2
"""Steps that a GPU may be ahead of the host."""
_HALF = "\ufffd"
"""What half a character decodes to."""

Ended = Literal["end_of_text", "stop", "length"]


class Generated(NamedTuple):
    """One token of one sequence, as it is chosen."""

    prompt: int
    """Which one it continues."""
    token: int
    ended: Ended | None
    """Why this is the sequence's last token. `end_of_text`: the token itself is the end."""


Stop = Callable[[int, Sequence[int]], bool]
"""Whether the sequence of a prompt ends with the tokens it has; called after each."""


@dataclass(slots=True)
class _Sequence:
    index: int
    length: int
    """Tokens in the cache."""
    tokens: list[int]
    """What was generated; the last one is not in the cache yet."""
    random: torch.Generator
    ended: bool = False
    asked: int = 0
    """Tokens that the device was asked for, at most those that are wanted."""


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    keys: Sequence[object] | None = None,
    stop: Stop | None = None,
    tile: int = TILE,
    rows: int | None = None,
    capacity: int | None = None,
    cuda_graph: GraphSetting = "auto",
) -> Iterator[Generated]:
    """The tokens of each prompt's continuation, as they come; sequences are interleaved.

    `keys` name the sequences for sampling (their index), `rows` of `tile` slots are used (all).
    `capacity` is the length of the cache, by itself that of the longest prompt and `max_tokens`; it is
    part of a product's shape, so give it where results of several calls have to be equal. `cuda_graph`
    changes no token.

    Raises BadInput for a prompt that is empty or too long for the model, `NoAnswer`.
    """
    rows = tile if rows is None else rows
    assert 1 <= rows <= tile and max_tokens >= 1
    needed = max((len(prompt) for prompt in prompts), default=0) + max_tokens
    capacity = needed if capacity is None else capacity
    _check(decoder, prompts, max(needed, capacity), max_tokens)
    assert capacity >= needed
    waiting = iter(range(len(prompts)))
    running: list[_Sequence | None] = [None] * rows
    ends = frozenset(end_ids)

    def begin(index: int) -> _Sequence:
        key = index if keys is None else keys[index]
        return _Sequence(index, len(prompts[index]), [], _random(sampling.seed, key))

    def take(sequence: _Sequence, token: int) -> Generated:
        sequence.tokens.append(token)
        ended: Ended | None = None
        if token in ends:
            ended = "end_of_text"
        elif stop is not None and stop(sequence.index, sequence.tokens):
            ended = "stop"
        elif len(sequence.tokens) >= max_tokens:
            ended = "length"
        sequence.ended = ended is not None
        return Generated(sequence.index, token, ended)

    if coverage(decoder, tile) is None:
        from engine.models.decode_step import DecodeSteps  # which needs triton

        graph = choose_cuda_graph(decoder, tile, cuda_graph).choice == "on"
        steps = DecodeSteps(decoder, tile, capacity, graph=graph, sampling=sampling)
        yield from _ahead(steps, prompts, waiting, running, begin, take, max_tokens)
        return
    cache = Cache(decoder, tile, capacity)

    def choose(sequence: _Sequence, logits_V: Tensor) -> Generated:
        where = f"sequence {sequence.index}"
        return take(sequence, next_token(logits_V, sampling, sequence.random, where))

    while True:
        for slot in range(rows):
            while running[slot] is None and (index := next(waiting, None)) is not None:
                sequence = begin(index)
                generated = choose(sequence, cache.start(slot, prompts[index]))
                running[slot] = sequence if generated.ended is None else None
                yield generated
        alive = [(slot, sequence) for slot, sequence in enumerate(running) if sequence is not None]
        if not alive:
            return
        places = {slot: (sequence.tokens[-1], sequence.length) for slot, sequence in alive}
        logits_BV = cache.step(places)
        for slot, sequence in alive:
            sequence.length += 1
            generated = choose(sequence, logits_BV[slot])
            if generated.ended is not None:
                running[slot] = None
            yield generated


def _ahead(
    steps: DecodeSteps,
    prompts: Sequence[Sequence[int]],
    waiting: Iterator[int],
    running: list[_Sequence | None],
    begin: Callable[[int], _Sequence],
    take: Callable[[_Sequence, int], Generated],
    max_tokens: int,
) -> Iterator[Generated]:
    """`generate`, with the device some steps ahead of the host."""
    pending: deque[tuple[Chosen, list[tuple[int, _Sequence]]]] = deque()
    while True:
        for slot in range(len(running)):
            if running[slot] is None and (index := next(waiting, None)) is not None:
                sequence = begin(index)
                running[slot] = sequence
                uniform = steps.uniform(sequence.random, max_tokens)
                pending.append((steps.start(slot, prompts[index], uniform), [(slot, sequence)]))
                sequence.asked = 1
        wanted = [
            (slot, sequence)
            for slot, sequence in enumerate(running)
            if sequence is not None and sequence.asked < max_tokens
        ]
        if wanted:
            pending.append((steps.step(), wanted))
            for _, sequence in wanted:
                sequence.asked += 1
        elif not pending:
            return
        while pending and (len(pending) > AHEAD or not wanted):
            chosen, of = pending.popleft()
            tokens = chosen.wait()
            for slot, sequence in of:
                if sequence.ended:
                    continue
                if tokens[slot] < 0:
                    raise _not_finite(f"sequence {sequence.index}", -tokens[slot], steps.vocab_size)
                generated = take(sequence, tokens[slot])
                if sequence.ended:
                    running[slot] = None
                yield generated
            # A free row is worth no more waiting, while there is room for what it would add.
            if None in running and len(pending) <= HISTORY // 2:
                break


class Cache:
    """Keys and values of `tile` slots, and the forward passes on top of them."""

    def __init__(self, decoder: Decoder, tile: int, capacity: int) -> None:
        config = decoder.config
        like = decoder.norm.weight
        shape = (tile, capacity, config.num_key_value_heads, config.head_dim)
        # Zeros: a slot that nothing was written to is hidden by the mask, but NaN times 0 is NaN.
        self._layers = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_hidden_layers)
        ]
        self._decoder, self._device, self._tile = decoder, like.device, tile

    def start(self, slot: int, prompt: Sequence[int]) -> Tensor:
        """Puts a prompt into a slot; the logits (V,) of what follows it."""
        tokens_BT = torch.tensor([list(prompt)], device=self._device)
        position_BT = torch.arange(len(prompt), device=self._device)[None]
        return self._run(tokens_BT, position_BT, slice(slot, slot + 1))[0]

    def step(self, steps: dict[int, tuple[int, int]]) -> Tensor:
        """One token, with its position, of each slot named; logits (B, V) of what follows."""
        # An idle slot writes into its first place, which the next prompt overwrites.
        both = [steps.get(slot, (0, 0)) for slot in range(self._tile)]
        both_B2 = torch.tensor(both, device=self._device)
        return self._run(both_B2[:, :1], both_B2[:, 1:], slice(None))

    def _run(self, tokens_BT: Tensor, position_BT: Tensor, slots: slice) -> Tensor:
        pasts = [Past(keys[slots], values[slots], position_BT) for keys, values in self._layers]
        hidden_BTD = self._decoder.hidden_with_past(tokens_BT, pasts)
        return self._decoder.logits_of(hidden_BTD[:, -1:])[:, 0]


# contract: eval-no-fake-pass-v1
def next_token(
    logits_V: Tensor, sampling: Sampling, random: torch.Generator, where: str = "logits"
) -> int:
    """The id that `sampling` chooses. Raises `NoAnswer` for logits that are not all finite."""
    logits_V = logits_V.float()
    if not bool(logits_V.isfinite().all()):
        bad = int((~logits_V.isfinite()).sum())
        raise _not_finite(where, bad, len(logits_V))
    if sampling.temperature == 0:
        # The first of equals: argmax promises none of them.
        return int((logits_V == logits_V.max()).nonzero()[0, 0])
    # On the CPU and in fp64: one seed is one text, on whatever device the model is.
    uniform_1 = torch.rand(1, generator=random, dtype=torch.float64)
    return int(draw(logits_V.cpu(), sampling, uniform_1))


def _not_finite(where: str, bad: int, ids: int) -> NoAnswer:
    return NoAnswer(
        f"generate: {where} — expected finite logits, found {bad:,} of {ids:,} NaN or infinite"
    )


def _random(seed: int, key: object) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _check(
    decoder: Decoder, prompts: Sequence[Sequence[int]], needed: int, max_tokens: int
) -> None:
    most, rows = decoder.config.max_position_embeddings, decoder.config.vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput.expected("prompt", index, "at least one token", "none")
        if max(prompt) >= rows or min(prompt) < 0:
            raise BadInput.expected("prompt", index, f"ids below {rows:,}", f"{max(prompt):,}")
    if needed > most:
        raise BadInput.expected(
            "prompt",
            f"the longest, and {max_tokens:,} tokens to come",
            f"at most {most:,} tokens, the positions of the model",
            f"{needed:,}",
            hint="ask for fewer tokens, or give less text",
        )


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
