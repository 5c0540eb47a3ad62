"""Verify that three independent implementations can load a published folder and give the same outputs.

    files          every file has the size and hash of MANIFEST.json
    engine         this engine on the safetensors: the reference; same tokens with and without a KV cache
    gguf           this engine on the GGUF: within its block type's noise of the reference
    transformers   the folder through AutoModel and AutoTokenizer: same token ids, greedy tokens, text and logits
    llama float    llama.cpp on the same weights in F32, in a temporary file: the same as for transformers
    llama gguf     llama.cpp on the shipped GGUF: within its block type's noise of this engine on it

Greedy tokens are compared for 50 steps after each of some prompts, or for as many as the model has positions.
If the first token at which two implementations differ is a tie (both tokens equally likely up to rounding), the result
is unknown and not a failure. Logits are compared at every position of these texts, in fp32, by the largest
difference relative to the root mean square.

The noise of a block type is its published KL (`engine.quant.blocks`). llama.cpp also rounds activations to 8
bits, so its logits differ even for the same blocks.

The result of an implementation that is not installed is unknown. This engine, transformers and
llama.cpp each run in a separate process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import BadInput
from engine.export.compare import as_float, first_difference, within
from engine.export.convert import FILE_TYPES, convert
from engine.export.manifest import MANIFEST, check_manifest
from engine.export.outcome import Outcome, answered, unknown
from engine.export.peers import Absent, Answered, Crashed, absent, ask
from engine.formats.open import open_weights
from engine.formats.tokenizer import open_tokenizer
from engine.models.read_config import read_config
from engine.quant.blocks import NOISE_FLOORS
from engine.signals import scratch_folder
from engine.verdict import Level, Verdict, lowest

STEPS = 50
PROMPTS = (
    "def ",
    "import os\n\n\ndef main(",
    "class Point:\n    def __init__(self, x",
    "The first thing to know about",
)
TEXTS = (*PROMPTS, inspect.getsource(inspect)[:20_000])
"""Texts whose token ids are compared. The long text has merges, words and spaces that the short texts lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    outcomes: tuple[Outcome, ...]
    steps: int
    prompt: str
    text: str
    """The model's continuation of `prompt`, for people to read."""

    @property
    def verdict(self) -> Verdict:
        return lowest(outcome.verdict for outcome in self.outcomes if outcome.verdict is not None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": self.verdict.level.name.lower(),
            "steps": self.steps,
            "prompt": self.prompt,
            "text": self.text,
            "ways": [one.as_dict() for one in self.outcomes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Request that is sent to every implementation."""

    prompts: list[list[int]]
    steps: int
    scratch: Path

    def send(
        self,
        kind: str,
        path: Path,
        rows: Sequence[Sequence[int]] | None,
        *,
        steps: int | None = None,
    ) -> Answered | Absent | Crashed:
        return ask(
            kind,
            path,
            self.scratch,
            # llama.cpp splits text into pre-tokens by its own patterns, so it gets the short texts only.
            texts=PROMPTS if kind == "llama" else TEXTS,
            prompts=self.prompts if steps is None else self.prompts[:1],
            steps=self.steps if steps is None else steps,
            rows=rows,
        )


def verify(folder: Path, say: Callable[[str], None] = lambda text: None) -> Verification:
    """Run every comparison, one after the other; call `say` with the name of each before it begins.

    Raises `BadInput` before the first comparison if the folder is not a model folder.
    """
    folder = Path(folder)
    config = read_config(folder)
    prompts = [
        [int(one) for one in ids] for ids in open_tokenizer(folder).encode_documents(PROMPTS)
    ]
    room = config.max_position_embeddings - max(map(len, prompts))
    if room < 1:
        raise BadInput.expected(
            "model", folder, f"positions for {max(map(len, prompts))} tokens and one more", "fewer"
        )
    steps = min(STEPS, room)
    with scratch_folder("engine-verify-") as scratch:
        request = _Request(prompts=prompts, steps=steps, scratch=scratch)
        say("hashing the files")
        outcomes = [_files(folder)]
        say("this engine, on the safetensors")
        reference = request.send("engine", folder, None)
        outcomes.append(_reference(reference, request))
        # Without the reference's outputs nothing else can be compared.
        if isinstance(reference, Answered):
            outcomes += _compare_others(folder, request, reference, say)
    return Verification(
        outcomes=tuple(outcomes),
        steps=steps,
        prompt=PROMPTS[1],
        text=reference.text[1] if isinstance(reference, Answered) else "",
    )


def _compare_others(
    folder: Path, request: _Request, reference: Answered, say: Callable[[str], None]
) -> Iterator[Outcome]:
    say("transformers")
    yield as_float("transformers", request.send("transformers", folder, reference.rows), reference)
    say("llama.cpp, on the weights in F32")
    yield _llama_float(folder, request, reference)
    for path in sorted(folder.glob("*.gguf")):
        say(f"this engine and llama.cpp, on {path.name}")
        yield from _gguf(path, request, reference)


def _files(folder: Path) -> Outcome:
    if not (folder / MANIFEST).is_file():
        return unknown("files", f"no {MANIFEST} to compare them with")
    verdict = check_manifest(folder)
    return answered("files", verdict.level, verdict.reason)


def _reference(answer: Answered | Absent | Crashed, request: _Request) -> Outcome:
    """Check the engine's outputs: logits must be finite, and the KV cache must not change a token."""
    if not isinstance(answer, Answered):
        return answered("engine", Level.FAIL, answer.reason)
    for prompt, tokens, logits_TV in zip(
        request.prompts, answer.tokens, answer.logits, strict=True
    ):
        if not np.isfinite(logits_TV).all():
            return answered("engine", Level.FAIL, "logits that are not finite")
        # The next token at each position of the continuation, computed without a cache.
        uncached = logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
        difference = first_difference(prompt, tokens, uncached, logits_TV)
        if difference is not None and not difference.tie:
            text = f"with a KV cache the model generates another token than without: {difference}"
            return answered("engine", Level.FAIL, text)
    text = (
        f"{answer.version}: {len(request.prompts)} texts of {request.steps} tokens, finite logits"
    )
    return answered("engine", Level.PASS, text)


def _llama_float(folder: Path, request: _Request, reference: Answered) -> Outcome:
    path = request.scratch / "float.gguf"
    if (why := absent("llama")) is not None:
        # Check this first, before a large F32 file is written.
        return as_float("llama float", why, reference)
    try:
        convert(folder, path, "f32")
    except BadInput as error:
        return unknown("llama float", f"no GGUF can be made of it: {error.message}")
    outcome = as_float("llama float", request.send("llama", path, reference.rows), reference)
    path.unlink()
    return outcome


def _gguf(path: Path, request: _Request, reference: Answered) -> Iterator[Outcome]:
    """Check the shipped GGUF file in this engine and in llama.cpp."""
    with open_weights(path) as weights:
        number = weights.metadata.get("general.file_type")
    quant = next((name for name, file_type in FILE_TYPES.items() if file_type == number), None)
    # A float type rounds less than any block type.
    floor = NOISE_FLOORS.get(quant or "", NOISE_FLOORS["q8_0"])
    engine_answer = request.send("engine", path, reference.rows, steps=1)
    yield within(f"gguf {path.name}", engine_answer, reference, floor.kl, "the safetensors")
    llama_answer = request.send("llama", path, reference.rows, steps=1)
    if isinstance(engine_answer, Answered):
        yield within(
            f"llama {path.name}", llama_answer, engine_answer, floor.kl, "this engine on it"
        )
