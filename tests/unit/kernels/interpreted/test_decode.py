"""The steps of generation in Triton's interpreter: the decoder's own logits, by other kernels.

In float32: the interpreter does not round to bf16 as a GPU does. Inputs of products with blocks are
whole numbers of 13 bits, which is what the limits allow for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels.compiler import Variant
from engine.kernels.registry import REGISTRY
from engine.models.decode_step import DecodeSteps
from engine.models.decoder import Decoder
from engine.models.load import load_packed_decoder
from tests.support.packed_models import lively, make_config, write

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5] * 16, [8]]
"""The second fills a chunk of the cache, so that its next tokens are in another."""
SMALL = {"num_hidden_layers": 1, "intermediate_size": 256}


def model(family: str, blocks: str, folder: Path, **changes: object) -> Decoder:
    decoder = lively(make_config(family, **{**SMALL, **changes}))  # type: ignore[arg-type]
    if not blocks:
        return decoder
    return load_packed_decoder(write(folder / "model.gguf", decoder, blocks))


@torch.inference_mode()
def steps_of(
    decoder: Decoder, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], Tensor]:
    """The tokens of each prompt, and the logits of the last step."""
    steps = DecodeSteps(decoder, len(prompts), 200, graph=False)
    found = [[steps.start(row, prompt).wait()[row]] for row, prompt in enumerate(prompts)]
    for _ in range(count):
        for row, token in enumerate(steps.step().wait()):
            found[row].append(token)
    return found, steps.logits()


@torch.inference_mode()
def expected_of(decoder: Decoder, prompt: list[int], tokens: list[int]) -> Tensor:
    return decoder(torch.tensor([prompt + tokens]))[0, -1]


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("qwen3", ""),
        ("qwen2", "Q4_K"),
        pytest.param("qwen3", "Q6_K", marks=pytest.mark.soak),
        pytest.param("llama", "Q5_K", marks=pytest.mark.soak),
    ],
)
def test_steps_give_the_logits_of_the_decoder(family: str, blocks: str, tmp_path: Path) -> None:
    decoder = model(family, blocks, tmp_path)
    tokens, logits_MV = steps_of(decoder, PROMPTS, 2)
    for prompt, row, logits_V in zip(PROMPTS, tokens, logits_MV, strict=True):
        # The last token is what these logits chose.
        expected_V = expected_of(decoder, prompt, row[:-1])
        error = float((logits_V - expected_V).norm() / expected_V.norm())
        assert error < (3e-3 if blocks else 1e-5), (len(prompt), error)
        assert row[-1] == int((logits_V == logits_V.max()).nonzero()[0])


@pytest.mark.parametrize("blocks", ["", pytest.param("Q4_K", marks=pytest.mark.soak)])
def test_a_row_is_the_same_bits_whatever_is_beside_it(blocks: str, tmp_path: Path) -> None:
    decoder = model("qwen2", blocks, tmp_path)
    tokens, logits_MV = steps_of(decoder, PROMPTS, 1)
    alone, logits_1V = steps_of(decoder, PROMPTS[:1], 1)
    assert alone[0] == tokens[0]
    assert torch.equal(logits_1V[0], logits_MV[0])


def test_a_row_takes_the_next_prompt(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    with torch.inference_mode():
        steps = DecodeSteps(decoder, 2, 200, graph=False)
        steps.start(0, PROMPTS[1])
        steps.start(1, PROMPTS[2])
        steps.step()
        found = [steps.start(0, PROMPTS[0]).wait()[0], steps.step().wait()[0]]
    assert found == steps_of(decoder, [PROMPTS[0]], 1)[0][0]


# The interpreter's numpy warns of the NaN that are wanted.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    with torch.inference_mode():
        steps = DecodeSteps(decoder, 1, 20, graph=False)
        steps.start(0, PROMPTS[0])
        decoder.norm.weight[3] = float("nan")
        assert steps.step().wait() == [-decoder.config.vocab_size]


@pytest.mark.soak
@torch.inference_mode()
def test_what_is_warmed_up_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = DecodeSteps(model("qwen3", "Q4_K", tmp_path), 1, 20, graph=False)
    steps.start(0, PROMPTS[0])
    with REGISTRY.noting() as noted:
        steps._run()
    launched: set[Variant] = set()
    monkeypatch.setattr(REGISTRY, "_interpreted", launched)
    steps.step()
    names = {variant.name for variant in launched}
    assert {"norm", "attend", "gate", "products", "largest", "choose"} <= names
    assert launched <= set(noted)
