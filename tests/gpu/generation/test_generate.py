"""Generation on a GPU: the decoder's own answers, captured or not, the same whatever is beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import NoAnswer
from engine.generation.fused import FusedForward, coverage
from engine.generation.generate import Generator, generate
from engine.generation.sampling import Sampling
from engine.generation.slots import Slots
from engine.models.decoder import Decoder
from engine.models.load import load_packed_decoder
from tests.support.families import CHANGES
from tests.support.packed_models import lively, make_config, write

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * j) % 101 for j in range(1 + 11 * i % 29)] for i in range(11)]
PROMPTS[3] = [(5 * j + 1) % 101 for j in range(150)]
LONG = {"max_position_embeddings": 1024}
MODELS = [("qwen2", ""), ("qwen3", ""), ("mistral", ""), ("gemma3_text", ""), ("qwen2", "Q4_K")]
DRAWN = Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, seed=3)
COUNT = 40


def model(family: str, blocks: str, folder: Path) -> Decoder:
    changes = {} if blocks else CHANGES[family]
    decoder = lively(make_config(family, **{**changes, **LONG}))
    if blocks:
        path = write(folder / "model.gguf", decoder, blocks)
        decoder = load_packed_decoder(path, torch.bfloat16, "cuda")
    decoder = decoder.to("cuda", torch.bfloat16)
    assert (coverage(decoder) is None) == (family != "gemma3_text" and not blocks)
    return decoder


def tokens_of(decoder: Decoder, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for one in generate(decoder, prompts, **{"max_tokens": COUNT, **how}):
        found[one.prompt].append(one.token)
    return found


@pytest.mark.parametrize(("family", "blocks"), MODELS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5), DRAWN])
def test_a_sequence_does_not_depend_on_what_runs_beside_it(
    family: str, blocks: str, sampling: Sampling, tmp_path: Path
) -> None:
    decoder = model(family, blocks, tmp_path)
    how: dict[str, Any] = {"sampling": sampling, "slots": 8}
    reference = tokens_of(decoder, PROMPTS, **how)
    assert len({tuple(row) for row in reference}) > 1
    assert tokens_of(decoder, PROMPTS, **how, rows=3) == reference
    assert tokens_of(decoder, PROMPTS, **how, rows=1) == reference
    backwards = tokens_of(decoder, PROMPTS[::-1], **how, keys=range(len(PROMPTS))[::-1])
    assert backwards[::-1] == reference
    twice = tokens_of(decoder, PROMPTS[:4] * 2, **how, keys=[*range(4), *range(4)])
    assert twice == reference[:4] * 2


@pytest.mark.parametrize(("family", "blocks"), MODELS)
def test_a_graph_changes_no_token(
    family: str, blocks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = model(family, blocks, tmp_path)
    captured = tokens_of(decoder, PROMPTS)
    monkeypatch.setattr(Slots, "_capture", lambda self: None)
    assert tokens_of(decoder, PROMPTS) == captured


@pytest.mark.parametrize("slots", [3, 64])
@pytest.mark.parametrize(("family", "blocks"), MODELS)
def test_log_probabilities_are_those_of_the_decoder(
    family: str, blocks: str, slots: int, tmp_path: Path
) -> None:
    decoder = model(family, blocks, tmp_path)
    found: list[list[Any]] = [[] for _ in PROMPTS]
    for one in generate(
        decoder, PROMPTS, max_tokens=COUNT, slots=slots, sampling=Sampling(temperature=1.0)
    ):
        found[one.prompt].append(one)
    far = 0.0
    for prompt, row in zip(PROMPTS, found, strict=True):
        tokens_T = torch.tensor([one.token for one in row], device="cuda")
        with torch.inference_mode():
            ids_1T = torch.tensor([[*prompt, *tokens_T.tolist()]], device="cuda")
            logits_TV = decoder(ids_1T)[0, len(prompt) - 1 : -1].float()
        log_p_T = logits_TV.log_softmax(-1).gather(1, tokens_T[:, None])[:, 0]
        said_T = torch.tensor([one.log_p for one in row], device="cuda")
        far = max(far, float((said_T - log_p_T).norm() / log_p_T.norm()))
    # Both round to bf16 at every step of each layer.
    assert far < 0.03, far


def test_tokens_are_drawn_by_their_probabilities(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    count = 4096
    how: dict[str, Any] = {"max_tokens": 1, "slots": 512, "sampling": Sampling(temperature=1.0)}
    drawn = [row[0] for row in tokens_of(decoder, [PROMPTS[4]] * count, **how)]
    with torch.inference_mode():
        p_V = decoder(torch.tensor([PROMPTS[4]], device="cuda"))[0, -1].float().softmax(-1).cpu()
    share_V = torch.bincount(torch.tensor(drawn), minlength=101) / count
    # Five standard deviations of the likeliest, and the rounding of its logits.
    assert float((share_V - p_V).abs().max()) < 5 * 0.5 / count**0.5 + 0.01


def test_a_student_in_fp32_runs_as_the_decoder_says(tmp_path: Path) -> None:
    decoder = lively(make_config(**LONG)).to("cuda")
    assert coverage(decoder) == "the model computes in float32"
    on_cpu = copy.deepcopy(decoder).cpu()
    assert tokens_of(decoder, PROMPTS[:4]) == tokens_of(on_cpu, PROMPTS[:4])


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_student_in_fp32_writes_in_16_bits_what_its_update_left(family: str) -> None:
    decoder = lively(make_config(family, **{**CHANGES[family], **LONG})).to("cuda")
    how: dict[str, Any] = {"slots": 8, "capacity": 256, "dtype": torch.bfloat16}
    writer = Generator(decoder, **how)

    def text(generator: Generator) -> list[int]:
        return [one.token for one in generator.generate(PROMPTS[:3], max_tokens=COUNT)]

    before = text(writer)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    writer.refresh()
    after = text(writer)
    assert after == text(Generator(decoder, **how)) != before
    assert all(each.dtype == torch.float32 for each in decoder.parameters())


def test_parameters_that_became_views_can_still_be_trained(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    tokens_of(decoder, PROMPTS[:2])
    decoder(torch.tensor([PROMPTS[1]], device="cuda")).float().sum().backward()
    assert all(each.grad is not None for each in decoder.parameters())


def test_a_stop_and_an_end_cut_what_the_gpu_has_already_made(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    (row, *_) = tokens_of(decoder, PROMPTS)
    cut = list(generate(decoder, PROMPTS, max_tokens=COUNT, stop=lambda _, made: len(made) == 7))
    assert [one.token for one in cut if one.prompt == 0] == row[:7]
    assert {one.ended for one in cut} == {None, "stop"}
    ended = list(generate(decoder, PROMPTS[:1], max_tokens=COUNT, end_ids=[row[9]]))
    assert [one.token for one in ended] == row[: row.index(row[9]) + 1]
    assert ended[-1].ended == "end_of_text"


def test_a_model_with_a_nan_weight_answers_nothing(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    with torch.no_grad():
        decoder.norm.weight[3] = float("nan")
    with pytest.raises(NoAnswer, match="101 of 101 NaN or infinite"):
        tokens_of(decoder, PROMPTS)


def test_a_model_on_a_gpu_has_a_graph_and_its_kernels(tmp_path: Path) -> None:
    decoder = model("qwen2", "", tmp_path)
    with torch.inference_mode():
        how: dict[str, Any] = {"sampling": Sampling(), "ends": ()}
        slots = Slots(decoder, slots=2, capacity=100, pages=5, **how)
    assert isinstance(slots._forward, FusedForward) and slots._graph is not None
