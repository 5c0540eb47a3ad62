"""Generation on a GPU: the decoder's own answers, captured or not, the same whatever is beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import NoAnswer
from engine.models.decode import Sampling, choose_cuda_graph, coverage
from engine.models.decode_step import DecodeSteps
from engine.models.decoder import Decoder
from engine.models.generate import generate
from engine.models.load import load_packed_decoder
from tests.support.packed_models import lively, make_config, write

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * j) % 101 for j in range(1 + 11 * i % 29)] for i in range(11)]
LONG = {"max_position_embeddings": 1024}
MODELS = [("qwen2", ""), ("qwen3", ""), ("qwen2", "Q4_K"), ("llama", "Q5_K"), ("qwen3", "Q6_K")]
COUNT = 40


def model(family: str, blocks: str, folder: Path) -> Decoder:
    decoder = lively(make_config(family, **LONG))
    if blocks:
        path = write(folder / "model.gguf", decoder, blocks)
        decoder = load_packed_decoder(path, torch.bfloat16, "cuda")
    decoder = decoder.to("cuda", torch.bfloat16)
    assert coverage(decoder, 8) is None
    return decoder


def tokens_of(decoder: Decoder, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for index, token, _ in generate(decoder, prompts, **{"max_tokens": COUNT, **how}):
        found[index].append(token)
    return found


@pytest.mark.parametrize(("family", "blocks"), MODELS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.2, top_k=40, top_p=0.95, seed=3)]
)
def test_tokens_are_the_same_for_every_batch_size(
    family: str, blocks: str, sampling: Sampling, tmp_path: Path
) -> None:
    decoder = model(family, blocks, tmp_path)
    reference = tokens_of(decoder, PROMPTS, sampling=sampling, tile=8)
    assert len({tuple(row) for row in reference}) > 1
    for tile in (1, 2, 5):
        assert tokens_of(decoder, PROMPTS, sampling=sampling, tile=tile) == reference, tile
    assert tokens_of(decoder, PROMPTS, sampling=sampling, tile=8, rows=3) == reference
    backwards = tokens_of(
        decoder, PROMPTS[::-1], sampling=sampling, keys=range(len(PROMPTS))[::-1], tile=5
    )
    assert backwards[::-1] == reference


@pytest.mark.parametrize(("family", "blocks"), [("qwen2", ""), ("qwen2", "Q4_K")])
def test_a_graph_changes_no_token(family: str, blocks: str, tmp_path: Path) -> None:
    decoder = model(family, blocks, tmp_path)
    captured = tokens_of(decoder, PROMPTS, cuda_graph="on")
    assert tokens_of(decoder, PROMPTS, cuda_graph="off") == captured


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "blocks"), [("qwen3", ""), ("qwen2", "Q4_K"), ("qwen2", "Q6_K")]
)
def test_kernels_that_begin_early_change_no_bit(
    family: str, blocks: str, rows: int, tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no kernel begins early below capability 9.0")
    decoder = model(family, blocks, tmp_path)
    found = []
    with torch.inference_mode():
        for early, graph in ((False, True), (True, True), (True, False)):
            steps = DecodeSteps(decoder, rows, 600, graph=graph, early=early)
            for row in range(rows):
                steps.start(row, PROMPTS[row])
            tokens = [steps.step().wait() for _ in range(300)]
            found.append((tokens, steps.logits().clone()))
    for tokens, logits_MV in found[1:]:
        assert tokens == found[0][0]
        assert torch.equal(logits_MV, found[0][1])


@pytest.mark.parametrize(("family", "blocks"), MODELS)
def test_steps_give_the_logits_of_the_decoder(family: str, blocks: str, tmp_path: Path) -> None:
    decoder = model(family, blocks, tmp_path)
    # More chunks of the cache than a join has in flight.
    prompts = [PROMPTS[2], [5] * 820, PROMPTS[4]]
    with torch.inference_mode():
        steps = DecodeSteps(decoder, 3, 1000)
        tokens = [[steps.start(row, prompt).wait()[row]] for row, prompt in enumerate(prompts)]
        for _ in range(150):
            for row, token in enumerate(steps.step().wait()):
                tokens[row].append(token)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt + tokens[row][:-1]], device="cuda")
            whole = decoder(ids)[0, -1].float()
            found = steps.logits()[row].float()
            # Both round to bf16 at every step of each layer.
            assert float((found - whole).norm() / whole.norm()) < 0.03
            assert tokens[row][-1] == int((found == found.max()).nonzero()[0])


def test_a_stop_and_an_end_cut_what_the_gpu_has_already_made(tmp_path: Path) -> None:
    decoder = model("qwen2", "Q4_K", tmp_path)
    (row, *_) = tokens_of(decoder, PROMPTS)
    cut = list(generate(decoder, PROMPTS, max_tokens=COUNT, stop=lambda _, made: len(made) == 7))
    assert [one.token for one in cut if one.prompt == 0] == row[:7]
    assert {one.ended for one in cut} == {None, "stop"}
    ended = list(generate(decoder, PROMPTS[:1], max_tokens=COUNT, end_ids=[row[9]]))
    assert [one.token for one in ended] == row[: row.index(row[9]) + 1]
    assert ended[-1].ended == "end_of_text"


def test_a_model_with_a_nan_weight_answers_nothing(tmp_path: Path) -> None:
    decoder = copy.deepcopy(model("qwen2", "", tmp_path))
    with torch.no_grad():
        decoder.norm.weight[3] = float("nan")
    with pytest.raises(NoAnswer, match="101 of 101 NaN or infinite"):
        tokens_of(decoder, PROMPTS)


@pytest.mark.parametrize(
    ("changes", "dtype", "why"),
    [
        ({}, torch.float32, "the model computes in float32, not bfloat16"),
        ({"head_dim": 256}, torch.bfloat16, "heads are 256 wide, not 32, 64 or 128"),
    ],
)
def test_what_is_not_covered_runs_by_the_decoder_and_says_why(
    changes: dict[str, object], dtype: torch.dtype, why: str
) -> None:
    decoder = lively(make_config(**changes)).to("cuda", dtype)
    decision = choose_cuda_graph(decoder, 8)
    assert decision.choice == "off"
    assert decision.reason == f"{why}: the decoder makes each step"
    assert tokens_of(decoder, PROMPTS[:2]) == tokens_of(decoder, PROMPTS[:2], cuda_graph="off")
