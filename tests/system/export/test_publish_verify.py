"""Verification of a published folder: what each way to load it must not let pass, on answers that differ
in one thing; and the ways themselves, where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cli.main import main
from engine.export.compare import (
    FLOAT_TOLERANCE,
    as_float,
    divergence,
    first_difference,
    within,
)
from engine.export.convert import convert
from engine.export.peers import PEERS, Absent, Answered, Crashed, ask
from engine.export.published import PROMPTS, verify
from engine.models.config import ModelConfig
from engine.models.load import new_decoder, save_decoder
from engine.quant.blocks import NOISE_FLOORS
from engine.verdict import Level
from tests.support.kit import Kit, tiny_config
from tests.support.lacks import needs
from tests.support.paths import ROOT

STEPS, IDS = 4, 11


def answer(seed: int = 0) -> Answered:
    """Of two prompts of three tokens, continued with the likeliest ids of random logits."""
    random = np.random.default_rng(seed)
    logits = [random.normal(size=(3 + STEPS, IDS)).astype(np.float32) for _ in PROMPTS]
    tokens = [[int(one) for one in row_TV[2:-1].argmax(-1)] for row_TV in logits]
    return Answered(
        version="other 1.0",
        ids=[[1, 2, 3] for _ in PROMPTS],
        tokens=tokens,
        text=[str(row) for row in tokens],
        rows=[[1, 2, 3, *row] for row in tokens],
        logits=logits,
    )


def moved(found: Answered, change: Callable[[np.ndarray], None]) -> Answered:
    logits = [row_TV.copy() for row_TV in found.logits]
    change(logits[1])
    return replace(found, logits=logits)


def with_token(found: Answered, step: int, token: int) -> Answered:
    tokens = [list(row) for row in found.tokens]
    tokens[1][step] = token
    return replace(found, tokens=tokens)


def test_the_same_answers_pass() -> None:
    outcome = as_float("other", answer(), answer())
    assert outcome.verdict.level == Level.PASS and outcome.numbers["logits_apart"] == 0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (with_token(answer(), 2, 10), "step 3: token 10 instead of"),
        (replace(answer(), ids=[[1, 2, 3], [1, 2, 4], *answer().ids[2:]]), "another tokenizer"),
        (
            replace(answer(), text=["other", *answer().text[1:]]),
            "the same tokens are decoded to other text",
        ),
        (
            moved(answer(), lambda row: row.__setitem__((4, 0), row[4, 0] + 0.01)),
            "apart, expected at most",
        ),
        (moved(answer(), lambda row: row.__setitem__((4, 0), np.nan)), "logits nan"),
        (
            replace(answer(), logits=[row[:, :-1] for row in answer().logits]),
            "10 logits, expected 11",
        ),
        (Crashed("ended by signal 11"), "ended by signal 11"),
    ],
)
def test_one_thing_that_differs_fails(other: Answered | Crashed, words: str) -> None:
    outcome = as_float("other", other, answer())
    assert outcome.verdict.level == Level.FAIL and words in outcome.verdict.reason


def test_a_way_that_is_absent_is_unknown_and_so_is_a_tie() -> None:
    assert as_float("other", Absent("not installed"), answer()).verdict.level == Level.UNKNOWN
    reference = answer()
    best = reference.tokens[1][2]
    second = (best + 1) % IDS

    def tie(row_TV: np.ndarray) -> None:
        row_TV[4, second] = row_TV[4, best] - FLOAT_TOLERANCE / 10

    reference = moved(reference, tie)
    outcome = as_float("other", with_token(reference, 2, second), reference)
    assert outcome.verdict.level == Level.UNKNOWN and "a tie" in outcome.verdict.reason
    at = first_difference([1, 2, 3], reference.tokens[1], reference.tokens[1], reference.logits[1])
    assert at is None


def test_kl_is_that_of_its_definition_from_position_1_on() -> None:
    first, second = answer().logits[0], answer(1).logits[0]
    kl, agreement = divergence([first], [second])
    p_TV, q_TV = (torch.tensor(one[1:]).double().softmax(-1) for one in (first, second))
    expected = (p_TV * (p_TV.log() - q_TV.log())).sum(-1).mean()
    assert kl == pytest.approx(float(expected), rel=1e-12)
    assert agreement == float((p_TV.argmax(-1) == q_TV.argmax(-1)).double().mean())
    hidden = first.copy()
    hidden[0] = 100 * hidden[0]
    assert divergence([first], [hidden]) == (0.0, 1.0)


def test_quantised_weights_with_another_tokenizer_fail() -> None:
    other = replace(answer(), ids=[*answer().ids[:1], [1, 2, 9], *answer().ids[2:]])
    outcome = within("gguf", other, answer(), 1.0, "the reference")
    assert outcome.verdict.level == Level.FAIL and "text 2, token" in outcome.verdict.reason


@pytest.mark.parametrize(("scale", "level"), [(1e-3, Level.PASS), (1.0, Level.FAIL)])
def test_blocks_have_the_noise_of_their_type_and_no_more(scale: float, level: Level) -> None:
    other = moved(answer(), lambda row: row.__iadd__(scale * answer(2).logits[1]))
    limit = NOISE_FLOORS["q4_k_m"].kl
    outcome = within("gguf", other, answer(), limit, "the reference")
    assert outcome.verdict.level == level
    nan = moved(answer(), lambda row: row.__setitem__((4, 0), np.nan))
    assert within("gguf", nan, answer(), limit, "the reference").verdict.level == Level.FAIL
    assert within("gguf", Absent("no"), answer(), limit, "it").verdict.level == Level.UNKNOWN
    assert within("gguf", Crashed("no"), answer(), limit, "it").verdict.level == Level.FAIL


@pytest.fixture
def model(kit: Kit, tmp_path: Path) -> Path:
    config = ModelConfig.from_dict(tiny_config(hidden_size=64), "test")
    files = [kit.teacher / "tokenizer.json"]
    save_decoder(new_decoder(config, seed=5), tmp_path / "model", torch.float32, files)
    return tmp_path / "model"


def test_a_file_of_other_weights_fails_and_the_command_exits_1(
    model: Path,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GGUF that was made of another student than the safetensors beside it."""
    convert(kit.teacher, model / "m-Q8_0.gguf", "q8_0")
    asked: list[str] = []

    def engine_alone(kind: str, *arguments: object, **named: object) -> Answered | Absent | Crashed:
        asked.append(kind)
        if kind != "engine":
            return Absent("left out")
        return ask(kind, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.export.published.ask", engine_alone)
    assert main(["publish", "--verify", str(model), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    found = {way["id"]: way["level"] for way in printed["ways"]}
    assert found == {
        "files": "unknown",
        "engine": "pass",
        "transformers": "unknown",
        "llama float": "unknown",
        "gguf m-Q8_0.gguf": "fail",
        "llama m-Q8_0.gguf": "unknown",
    }
    assert printed["level"] == "fail"
    assert asked.count("engine") == 2


def test_transformers_and_this_engine_give_the_same_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked here; `ask` gives each a process of its own."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "")  # it sets them; restored at the end
    answers = {}
    for kind in ("engine", "transformers"):
        question = {"path": str(model), "texts": PROMPTS, "prompts": [[5], [7, 8, 9]]}
        question |= {"steps": STEPS, "rows": None, "logits": str(tmp_path / f"{kind}.npz")}
        found = PEERS[kind](question)
        assert str(found.pop("version")).startswith(kind)
        answers[kind] = found
    assert answers["engine"] == answers["transformers"]
    assert [len(row) for row in answers["engine"]["rows"]] == [1 + STEPS, 3 + STEPS]
    ours, theirs = (np.load(tmp_path / f"{kind}.npz") for kind in answers)
    for name in ("row0", "row1"):
        np.testing.assert_allclose(ours[name], theirs[name], atol=FLOAT_TOLERANCE)


def test_a_library_that_is_not_there_is_absent_and_a_model_that_does_not_load_a_crash(
    tmp_path: Path,
) -> None:
    def asked(kind: str) -> Answered | Absent | Crashed:
        return ask(
            kind, tmp_path / "none.gguf", tmp_path, texts=[], prompts=[[1]], steps=1, rows=[[1]]
        )

    crashed = asked("engine")
    assert isinstance(crashed, Crashed) and "exit 1" in crashed.reason
    there = importlib.util.find_spec("llama_cpp") is not None
    assert isinstance(asked("llama"), Crashed if there else Absent)


def test_a_peer_that_is_absent_says_so_with_an_exit_status_of_its_own(tmp_path: Path) -> None:
    """Whatever is installed here: an empty place where the library would be."""
    (tmp_path / "transformers.py").write_text("raise ImportError('not today')\n")
    done = subprocess.run(
        [sys.executable, "-m", "engine.export.peers", "transformers"],
        input=json.dumps({"path": str(tmp_path)}),
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and "transformers is not installed: not today" in done.stdout


# Not Gemma 3: it is loaded, but its GELU there looks up fp16 numbers, and logits are 0.0022 RMS apart.
KNOWN_TO_LLAMA_CPP: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {},
    # The last of every four layers has no RoPE.
    "smollm3": {"num_hidden_layers": 4, "layers_without_rope": (3,)},
    # llama.cpp reads no tied head of this family.
    "olmo2": {"tie_word_embeddings": False},
    "phi3": {"partial_rotary_factor": 0.5},
}


@needs("llama.cpp", importlib.util.find_spec("llama_cpp"))
@pytest.mark.parametrize("family", KNOWN_TO_LLAMA_CPP)
def test_llama_cpp_gives_the_same_tokens_and_text(family: str, kit: Kit, tmp_path: Path) -> None:
    plain = ModelConfig.from_dict(tiny_config(hidden_size=64, head_dim=16, eos_token_id=0), "test")
    changes: dict[str, Any] = {"family": family, **KNOWN_TO_LLAMA_CPP[family]}
    config = replace(plain, **changes)
    decoder = new_decoder(config, seed=3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path / "model"
    save_decoder(decoder, folder, torch.float32, [kit.teacher / "tokenizer.json"])
    convert(folder, folder / "m-Q8_0.gguf", "q8_0")
    found = {one.id: one.verdict for one in verify(folder).outcomes}
    assert found["llama float"].level == Level.PASS, found
    assert found["llama m-Q8_0.gguf"].level == Level.PASS, found
