"""Generate text from a model, many sequences at once.

    slots       the sequences that run at the same time; when one ends, the next prompt gets its slot
    prompt      run in one go, its keys and values stored in the slot's pages; equal prompts that begin together are
                run once
    step        computes one token of every slot; tokens are chosen on the device

A sequence depends on its prompt, its key, the seed, the weights, and the number of slots, which is
part of a matmul's shape. It does not depend on the other slots' sequences (`engine.generation.forward`).

On a GPU the device is up to AHEAD steps ahead of the host. When the host finds a stop string, the tokens after it are
dropped.

NaN or infinite logits raise `NoAnswer`, because the argmax of NaN looks like any other token. Earlier tokens
are not lost: they were already yielded.

Not covered: beam search, penalties.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Literal, NamedTuple

import torch

from engine.errors import BadInput, InternalError, NoAnswer
from engine.generation.forward import device_of
from engine.generation.pages import PagePool
from engine.generation.sampling import GREEDY, Sampling, row_key
from engine.generation.size import PAGE, pages_for, token_bytes
from engine.generation.slots import HISTORY, Admitted, Chosen, Slots
from engine.models.decoder import Decoder
from engine.models.transformers_decoder import TransformersDecoder
from engine.units import format_bytes

SLOTS = 8
"""Number of sequences that run at the same time."""
AHEAD = 2
"""Largest number of steps that the GPU may be ahead of the host."""
FREE_SHARE = 8
"""Inverse of the share of slots that must be free before new prompts begin: a pass over one prompt costs about as
much as a pass over several."""
MEMORY_SHARE = 0.9
"""Maximum share of a GPU's free memory that the cache may take, 0 to 1."""

Ended = Literal["end_of_text", "stop", "length"]


class Generated(NamedTuple):
    """One generated token of one sequence."""

    prompt: int
    """Index of the prompt it continues."""
    token: int
    ended: Ended | None
    """Reason why this is the sequence's last token; None if it is not the last. For `end_of_text` this token is the
    end-of-text token.
    """
    log_p: float
    """Log-probability of the token, in nats (`engine.generation.sampling`)."""


Stop = Callable[[int, Sequence[int]], bool]
"""Function that is called after each token with the index of the prompt and the tokens so far; it returns whether the
ence ends.
"""


@dataclass(slots=True)
class _Sequence:
    index: int
    pages: list[int]
    limit: int
    """Maximum number of tokens to generate."""
    tokens: list[int]
    asked: int = 0
    """Number of tokens requested from the device, at most the limit."""
    ended: bool = False


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    keys: Sequence[object] | None = None,
    stop: Stop | None = None,
    slots: int = SLOTS,
    rows: int | None = None,
    cache_bytes: int | None = None,
) -> Iterator[Generated]:
    """Yield the tokens of each prompt's continuation as they are generated; sequences are
    interleaved.

    `keys`: keys of the sequences for random draws (default: their index). `rows`: number of the `slots` that are used
    (default: all). For the other arguments see `Generator`; its cache is sized for these prompts.

    Raises BadInput for a prompt that is empty or too long for the model, and what `Generator` raises.
    """
    if not prompts:
        return
    _check(decoder, prompts, [max_tokens] * len(prompts))
    needs = sorted((pages_for(len(prompt) + max_tokens) for prompt in prompts), reverse=True)
    generator = Generator(
        decoder,
        slots=slots,
        capacity=needs[0] * PAGE,
        pages=sum(needs[:slots]),
        cache_bytes=cache_bytes,
        end_ids=end_ids,
        sampling=sampling,
    )
    yield from generator.generate(prompts, max_tokens=max_tokens, keys=keys, stop=stop, rows=rows)


class Generator:
    """A model ready to generate: its slots, their cache, and the graph of a step.

    `capacity`: maximum number of tokens of a sequence, its prompt included. `pages`: number of pages of the cache, by
    default as many as all slots may need. If `cache_bytes` or the free memory of a GPU is too small, there are fewer,
    and some sequences wait. `dtype`: dtype of the computation; a model in fp32 may compute in 16 bits.

    Raises BadInput if the cache cannot hold one sequence of `capacity` tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        capacity: int,
        pages: int | None = None,
        cache_bytes: int | None = None,
        end_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._decoder, self._sampling, self._slots = decoder, sampling, slots
        self._ends, self._capacity = frozenset(end_ids), capacity
        wanted_pages = slots * pages_for(capacity) if pages is None else pages
        dtype = decoder.dtype if dtype is None else dtype
        pages_in_cache = _pages(
            decoder, wanted_pages, pages_for(capacity), slots, cache_bytes, dtype
        )
        self._pool = PagePool(pages_in_cache + 1)
        self._device = Slots(
            decoder,
            slots=slots,
            capacity=capacity,
            pages=pages_in_cache + 1,
            sampling=sampling,
            ends=end_ids,
            dtype=dtype,
        )

    def refresh(self) -> None:
        """Copy the model's weights again after an update."""
        self._device.refresh()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int],
        keys: Sequence[object] | None = None,
        stop: Stop | None = None,
        rows: int | None = None,
    ) -> Iterator[Generated]:
        """Yield the tokens of each prompt's continuation, as `generate` does; `max_tokens` may be given for each
        prompt. One call at a time; closing the iterator early abandons its sequences.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        _check(self._decoder, prompts, limits)
        longest = max(map(add, map(len, prompts), limits), default=0)
        if longest > pages_for(self._capacity) * PAGE:
            raise InternalError(
                f"generate: expected at most {self._capacity}, found {longest} tokens"
            )
        names = range(len(prompts)) if keys is None else keys
        run = _Run(
            self._device,
            self._pool,
            prompts,
            [row_key(self._sampling.seed, name) for name in names],
            limits,
            self._ends,
            stop,
            self._decoder.config.vocab_size,
            self._slots if rows is None else rows,
        )
        try:
            yield from run.tokens()
        finally:
            run.abandon()


class _Run:
    """The sequences of one call: those that wait and those in a slot."""

    def __init__(
        self,
        device: Slots,
        pool: PagePool,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int],
        limits: Sequence[int],
        ends: frozenset[int],
        stop: Stop | None,
        ids: int,
        rows: int,
    ) -> None:
        self._device, self._pool, self._prompts, self._keys = device, pool, prompts, keys
        self._limits, self._ends, self._stop, self._ids = limits, ends, stop, ids
        self._needs = list(map(pages_for, map(add, map(len, prompts), limits)))
        self._waiting = deque(range(len(prompts)))
        self._running: list[_Sequence | None] = [None] * rows

    def tokens(self) -> Iterator[Generated]:
        """Yield the tokens of all sequences."""
        pending: deque[tuple[Chosen, list[tuple[int, _Sequence]]]] = deque()
        while True:
            if started := self._admit():
                pending.append(started)
            unfinished = [
                (slot, sequence)
                for slot, sequence in enumerate(self._running)
                if sequence is not None and sequence.asked < sequence.limit
            ]
            if unfinished:
                pending.append((self._device.step(), unfinished))
                for _, sequence in unfinished:
                    sequence.asked += 1
            elif not pending:
                return
            while pending and (len(pending) > AHEAD or not unfinished):
                yield from self._read(*pending.popleft())
                # A free slot is filled as soon as the queue has room for a prompt pass.
                if self._may_admit() and len(pending) <= HISTORY // 2:
                    break

    def abandon(self) -> None:
        """Stop the running sequences, and release their pages."""
        running = [
            (slot, sequence) for slot, sequence in enumerate(self._running) if sequence is not None
        ]
        if running:
            self._device.stop([slot for slot, _ in running])
            for _, sequence in running:
                self._pool.release(sequence.pages)

    def _read(self, chosen: Chosen, sequences: list[tuple[int, _Sequence]]) -> Iterator[Generated]:
        """Yield the tokens of one step, and free the slots of sequences that ended."""
        tokens, log_p = (array.tolist() for array in chosen.wait())
        non_finite = None
        stopped = []
        for slot, sequence in sequences:
            if sequence.ended:
                continue
            token = tokens[slot]
            if token < 0:
                non_finite = non_finite or (sequence.index, -token)
                continue
            sequence.tokens.append(token)
            ended: Ended | None = None
            if token in self._ends:
                ended = "end_of_text"
            elif self._stop is not None and self._stop(sequence.index, sequence.tokens):
                ended = "stop"
                stopped.append(slot)
            elif len(sequence.tokens) >= sequence.limit:
                ended = "length"
            if ended is not None:
                sequence.ended = True
                self._running[slot] = None
                self._pool.release(sequence.pages)
            yield Generated(sequence.index, token, ended, log_p[slot])
        if stopped:
            self._device.stop(stopped)
        if non_finite is not None:
            index, bad = non_finite
            raise not_finite(f"sequence {index}", bad, self._ids)

    def _may_admit(self) -> bool:
        """Return whether to begin new sequences now."""
        free = self._running.count(None)
        if not self._waiting or not free:
            return False
        return free * FREE_SHARE >= len(self._running) or free >= len(self._waiting)

    def _admit(self) -> tuple[Chosen, list[tuple[int, _Sequence]]] | None:
        """Begin sequences in free slots, as far as the free pages suffice."""
        if not self._may_admit():
            return None
        admitted: list[Admitted] = []
        started: list[tuple[int, _Sequence]] = []
        index_by_prompt: dict[tuple[int, ...], int] = {}
        for slot, running in enumerate(self._running):
            if running is not None or not self._waiting:
                continue
            index = self._waiting[0]
            prompt = self._prompts[index]
            like = index_by_prompt.get(tuple(prompt))
            shared = [] if like is None else admitted[like].pages[: len(prompt) // PAGE]
            if self._needs[index] - len(shared) > self._pool.free:
                break
            self._waiting.popleft()
            self._pool.share(shared)
            pages = shared + self._pool.take(self._needs[index] - len(shared))
            if like is None:
                index_by_prompt[tuple(prompt)] = len(admitted)
            admitted.append(
                Admitted(slot, prompt, self._keys[index], self._limits[index], pages, like)
            )
            sequence = _Sequence(index, pages, self._limits[index], [], asked=1)
            started.append((slot, sequence))
            self._running[slot] = sequence
        return (self._device.begin(admitted), started) if admitted else None


def _pages(
    decoder: Decoder,
    wanted: int,
    needed: int,
    slots: int,
    cache_bytes: int | None,
    dtype: torch.dtype,
) -> int:
    """Return how many pages the cache has, at most `wanted`. Raises BadInput if it would be fewer than `needed`."""
    if isinstance(decoder, TransformersDecoder):
        return wanted
    if cache_bytes is None:
        device = device_of(decoder)
        if device.type != "cuda":
            return wanted
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # Logits, and the sums of a step.
        cache_bytes = int(MEMORY_SHARE * free) - 12 * slots * decoder.config.vocab_size
    page = PAGE * token_bytes(decoder.config, dtype.itemsize)
    fits = cache_bytes // page
    if fits < needed:
        raise BadInput.expected(
            "generate",
            "the longest sequence",
            f"room for its keys and values, {format_bytes(needed * page)}",
            format_bytes(max(cache_bytes, 0)),
            hint="ask for fewer tokens, or give less text",
        )
    return min(wanted, fits)


def not_finite(where: str, bad: int, ids: int) -> NoAnswer:
    """Return the exception for `bad` non-finite logits among `ids`."""
    return NoAnswer(
        f"generate: {where} — expected finite logits, found {bad:,} of {ids:,} NaN or infinite"
    )


def _check(decoder: Decoder, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    assert min(limits, default=1) >= 1
    positions, ids = decoder.config.max_position_embeddings, decoder.config.vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput.expected("prompt", index, "at least one token", "none")
        if max(prompt) >= ids or min(prompt) < 0:
            raise BadInput.expected("prompt", index, f"ids below {ids:,}", f"{max(prompt):,}")
    needed = max(map(add, map(len, prompts), limits), default=0)
    if needed > positions:
        raise BadInput.expected(
            "prompt",
            f"the longest, and {max(limits, default=0):,} tokens to come",
            f"at most {positions:,} tokens, the positions of the model",
            f"{needed:,}",
            hint="ask for fewer tokens, or give less text",
        )
