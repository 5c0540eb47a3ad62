"""Logits that are one number for every id say nothing of a text, and are no figure of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli.main import main
from engine.errors import NoAnswer
from engine.evaluate.model import open_model
from engine.evaluate.perplexity import perplexity, read_documents
from engine.models.load import load_decoder, save_decoder
from tests.support.kit import Kit


def saved(kit: Kit, folder: Path, *, embeddings: float, norm: float) -> Path:
    """The teacher with its embeddings and the weight of its last norm multiplied."""
    decoder: Any = load_decoder(kit.teacher)
    with torch.no_grad():
        decoder.embed.weight.mul_(embeddings)
        decoder.norm.weight.mul_(norm)
    save_decoder(decoder, folder, torch.float32, [kit.teacher / "tokenizer.json"])
    return folder


@pytest.fixture
def constant(kit: Kit, tmp_path: Path) -> Path:
    return saved(kit, tmp_path / "constant", embeddings=1.0, norm=0.0)


def test_equal_logits_everywhere_are_unknown_to_programs_and_to_people(
    kit: Kit, constant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "ppl", str(constant), "--data", str(kit.corpus / "part_00.py")]
    assert main([*given, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["mode"] == "unknown" and "perplexity" not in printed
    assert "expected some that differ" in printed["error"] and str(constant) in printed["error"]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert "perplexity" not in out and "expected some that differ" in err


def test_equal_logits_of_either_side_are_no_comparison(kit: Kit, constant: Path) -> None:
    documents = read_documents(str(kit.corpus))[0][:1]
    sound, blank = open_model(kit.teacher), open_model(constant)
    for model, against in ((sound, blank), (blank, sound), (blank, blank)):
        with pytest.raises(NoAnswer, match=f"one value for all ids .* computed by {constant}"):
            perplexity(model, documents, against=against)


def test_a_norm_that_overflows_is_found_out(kit: Kit, tmp_path: Path) -> None:
    """The squares of what it normalises are infinite, so all that it lets through is zero."""
    model = open_model(saved(kit, tmp_path / "huge", embeddings=1e30, norm=1.0))
    with pytest.raises(NoAnswer, match="one value for all ids"):
        perplexity(model, read_documents(str(kit.corpus))[0][:1])


def test_logits_that_differ_are_a_figure_however_little_they_say(kit: Kit, tmp_path: Path) -> None:
    faint = open_model(saved(kit, tmp_path / "faint", embeddings=1.0, norm=1e-3))
    documents = read_documents(str(kit.corpus))[0][:2]
    found = perplexity(faint, documents, against=open_model(kit.teacher))
    assert found.loss.value > 0 and found.kl is not None and found.kl.value > 0
