"""Generates text from a model, token by token.

    prompt     all tokens at once; their keys and values go into the KV cache of one slot
    decoding   one token of every slot at once, on top of the cache
    slot       when a sequence ends, its slot is given to the next prompt

A prompt is run by itself, and the decode steps always have `tile` rows, some of them idle. So a
matmul has the same shape whatever else is in the batch: the output of a sequence does not depend on
the other sequences, nor on how many run at once. (The summation order of a matmul depends on its
shape, which changes the last bit, and one bit can decide between two nearly equal logits.)

The next token is the one with the largest logit (the lowest id on ties), or it is sampled:

    p = softmax(logits / temperature), of the top_k largest, of those the fewest that reach top_p

Sampling takes one uniform number per token from a generator seeded with (seed, key). The key names
the sequence, so it gets the same numbers whichever slot it is in.

NaN or infinite logits raise `NoAnswer`: the argmax of NaN looks like any other token.

Weights may be dense or block-quantised; the decoder is the same. On a GPU, if
`engine.models.decode` covers the model, it runs the steps: tokens are then chosen on the device,
and the host, which looks for stop strings, reads them a few steps later. A sequence that turns out
to have ended is cut there.

Not covered: beam search, penalties.

**Streaming text** (`complete`): handles stop strings and gives out only final text. A token is not
a character: a byte-level tokenizer may split one in the middle, and a stop string may begin in one
token and end in another. So text is decoded from all tokens of a sequence, and given out only as
far as nothing that follows can change it: never a trailing part of a character, or a trailing
prefix of a stop string. The pieces, joined, are the completion: the text before the first stop
string, or before the end-of-text token.
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
from engine.models.transformers_decoder import TransformersCache, TransformersDecoder

if TYPE_CHECKING:
    from engine.models.decode_step import DecodeSteps

# Shapes: B rows of a tile, T tokens, V vocabulary, S slots for tokens, K key/value heads, E their width

TILE = 8
"""Number of sequences that run side by side."""

AHEAD = 2
"""Maximum number of steps that the GPU may be ahead of the host."""
_HALF = "\ufffd"
"""What an incomplete character decodes to."""

Ended = Literal["end_of_text", "stop", "length"]


class Generated(NamedTuple):
    """One generated token of one sequence."""

    prompt: int
    """Index of the prompt it continues."""
    token: int
    ended: Ended | None
    """Why this is the sequence's last token; None if it is not. With `end_of_text` the token itself
    is the end.
    """


Stop = Callable[[int, Sequence[int]], bool]
"""Called after each token with the index of the prompt and its tokens so far; returns whether the
sequence ends.
"""


@dataclass(slots=True)
class _Sequence:
    index: int
    length: int
    """Number of tokens in the cache."""
    tokens: list[int]
    """The generated tokens; the last one is not in the cache yet."""
    random: torch.Generator
    ended: bool = False
    asked: int = 0
    """Number of tokens requested from the device, at most `max_tokens`."""


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
    """Yield the tokens of each prompt's continuation as they are generated; sequences are
    interleaved.

    `keys` name the sequences for sampling (default: their index). `rows` of the `tile` slots are
    used (default: all). `capacity` is the length of the cache, by default the longest prompt plus
    `max_tokens`; it is part of a matmul's shape, so set it if the results of several calls must be
    equal. `cuda_graph` changes no token.

    Raises BadInput for a prompt that is empty or too long for the model, and `NoAnswer`.
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
    cache = cache_of(decoder, tile, capacity)

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
    """As `generate`, with the device a few steps ahead of the host."""
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
            # Stop waiting once a slot is free, as long as the queue can take what filling it adds.
            if None in running and len(pending) <= HISTORY // 2:
                break


def cache_of(decoder: Decoder, tile: int, capacity: int) -> Cache | TransformersCache:
    """Return an empty cache of `tile` slots of `capacity` tokens."""
    if isinstance(decoder, TransformersDecoder):
        return TransformersCache(decoder, tile)
    return Cache(decoder, tile, capacity)


class Cache:
    """The KV cache of `tile` slots, and the forward passes on top of it."""

    def __init__(self, decoder: Decoder, tile: int, capacity: int) -> None:
        config = decoder.config
        like = decoder.norm.weight
        shape = (tile, capacity, config.num_key_value_heads, config.head_dim)
        # Zeros, because the mask hides slots that were never written, but 0 times NaN is NaN.
        self._layers = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_hidden_layers)
        ]
        self._decoder, self._device, self._tile = decoder, like.device, tile

    def start(self, slot: int, prompt: Sequence[int]) -> Tensor:
        """Run a prompt into a slot and return the logits (V,) of the next token."""
        tokens_BT = torch.tensor([list(prompt)], device=self._device)
        position_BT = torch.arange(len(prompt), device=self._device)[None]
        return self._run(tokens_BT, position_BT, slice(slot, slot + 1))[0]

    def step(self, steps: dict[int, tuple[int, int]]) -> Tensor:
        """Run one token, with its position, of each slot named; return the logits (B, V) of the
        next tokens.
        """
        # An idle slot writes to its position 0, which the next prompt overwrites.
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
    """Return the token id that `sampling` chooses. Raises `NoAnswer` if any logit is not finite."""
    logits_V = logits_V.float()
    if not bool(logits_V.isfinite().all()):
        bad = int((~logits_V.isfinite()).sum())
        raise _not_finite(where, bad, len(logits_V))
    if sampling.temperature == 0:
        # The first of equal maxima: argmax does not promise which one it returns.
        return int((logits_V == logits_V.max()).nonzero()[0, 0])
    # On the CPU and in fp64, so that a seed gives the same text on every device.
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
    """Index of the prompt it continues."""
    text: str
    ended: Ended | None
    tokens: int
    """Number of tokens generated so far for this prompt."""


@dataclass(slots=True)
class StopText:
    """The text of one sequence, and how much of it is final."""

    stops: Sequence[str]
    text: str = ""
    """The text before the first stop string."""
    stopped: bool = False
    given: int = field(default=0)
    """Number of characters given out."""

    def update(self, text: str) -> None:
        """Set the text, decoded from all tokens so far."""
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        self.text = text[: min(found)] if found else text

    def sure(self, *, last: bool) -> str:
        """Return the text that was not given out yet and cannot change; all that is left if this is
        the `last` call.
        """
        end = len(self.text)
        if not (last or self.stopped):
            end = len(self.text.rstrip(_HALF))
            end -= max((_begun(stop, self.text[:end]) for stop in self.stops), default=0)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece


def _begun(stop: str, text: str) -> int:
    """Return the length of the longest proper prefix of `stop` that the text ends with."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def end_ids(decoder: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a text: those of the model's configuration, else the tokenizer's end
    of text.
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
    tile: int = TILE,
    rows: int | None = None,
    capacity: int | None = None,
    cuda_graph: GraphSetting = "auto",
) -> Iterator[Piece]:
    """Yield the completions of `prompts` in pieces as they are generated; each prompt's last piece
    says how it ended.

    For the arguments and errors see `generate`. A model with a padded embedding may choose an id
    beyond its tokenizer's; it has no text.
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
