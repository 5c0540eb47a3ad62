"""The figures of `engine eval ppl` are those of other code, and one that is not would be named."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from engine.cli.eval_text import figures_json
from engine.cli.main import main
from engine.errors import InternalError
from engine.evaluate import perplexity as module
from engine.evaluate.model import open_model
from engine.evaluate.perplexity import read_documents
from engine.evaluate.statistics import Interval, bootstrap
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.read_config import read_config
from tests.support.kit import Kit, tiny_config
from tests.support.other_models import save_other
from tests.support.perplexity_oracle import Checked, check_perplexity, fault_of_record

DOCUMENTS = 12


@pytest.fixture
def ignorant(kit: Kit, tmp_path: Path) -> Path:
    folder = tmp_path / "ignorant"
    decoder = new_decoder(read_config(kit.teacher), seed=11)
    save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    return folder


@pytest.fixture(scope="module")
def few(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some documents of the corpus, of several rows each."""
    folder = tmp_path_factory.mktemp("few")
    for path in sorted(kit.corpus.iterdir())[:DOCUMENTS]:
        shutil.copyfile(path, folder / path.name)
    return folder


Evaluated: TypeAlias = Callable[..., Checked]


@pytest.fixture
def evaluated(kit: Kit, few: Path) -> Evaluated:
    """What evaluates a model and computes its figures anew; rows are short, so that documents have several."""

    def run(path: Path, against: Path | None = kit.teacher, **given: Any) -> Checked:
        documents, skipped = read_documents(str(few))
        model = open_model(path, **given)
        other = None if against is None else open_model(against, **given)
        found = module.perplexity(model, documents, against=other, length=50, skipped=skipped)
        checked = check_perplexity(found, documents, model, other, length=50)
        assert (fault := fault_of_record(figures_json(found), path, own=True)) == "", fault
        return checked

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sound_evaluation_is_that_of_other_code(
    precision: str, evaluated: Evaluated, ignorant: Path
) -> None:
    checked = evaluated(ignorant, precision=precision)
    assert checked.forward_pass == "plain" and checked.rows > 1
    assert 100 < checked.tokens <= 4096


def _reversed(real: Any) -> Any:
    return lambda ours, theirs: real(theirs, ours)


def _without_overlap(real: Any) -> Any:
    return lambda row_T, *rest: real(row_T[: max(2, len(row_T) - 1)], *rest)


def _shifted(real: Any) -> Any:
    return lambda row_T, *rest: real(row_T.roll(1), *rest)


def _halved(real: Any) -> Any:
    return lambda hidden_ND, head, columns: real(hidden_ND / 2, head, columns)


def _agreeing_more(real: Any) -> Any:
    def row(row_T: Any, models: Any, sums: Any) -> None:
        real(row_T, models, sums)
        sums.agreed += 1

    return row


def _mean_of_means(real: Any) -> Any:
    return lambda sums, counts: replace(
        real(sums, counts),
        value=sum(s / c for s, c in zip(sums, counts, strict=True)) / len(counts),
    )


def _last_never_drawn(real: Any) -> Any:
    return lambda sums, counts: real([*sums[:-1], sums[0]], [*counts[:-1], counts[0]])


def _one_resample(real: Any) -> Any:
    return lambda sums, counts: Interval(*[sum(sums) / sum(counts)] * 2)


def _none_of_many(real: Any) -> Any:
    return lambda sums, counts: None


def _longer(real: Any) -> Any:
    return lambda *given, **named: real(*given, **named | {"length": 60})


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("bootstrap", _last_never_drawn, "interval of loss: "),
        pytest.param("bootstrap", _one_resample, "interval of loss: ", marks=pytest.mark.soak),
        pytest.param("bootstrap", _none_of_many, "interval of loss: ", marks=pytest.mark.soak),
        ("perplexity", _longer, "tokens of a row: all — expected 50 "),
        ("_same_width", _reversed, "KL(against || model): "),
        ("_row", _without_overlap, "tokens predicted: "),
        pytest.param("_row", _shifted, "loss: ", marks=pytest.mark.soak),
        ("log_probabilities", _halved, "loss: "),
        ("_row", _agreeing_more, "top-1 agreement: "),
        ("_figure", _mean_of_means, "loss: "),
    ],
)
def test_a_figure_that_is_not_that_of_other_code_is_named(
    name: str,
    fault: Callable[[Any], Any],
    words: str,
    evaluated: Evaluated,
    ignorant: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    with pytest.raises((InternalError, AssertionError), match=re.escape(words)):
        evaluated(ignorant)


@pytest.mark.parametrize(
    "count", [2, 40, *(pytest.param(count, marks=pytest.mark.soak) for count in (3, 7))]
)
def test_no_interval_of_sound_documents_is_accused(count: int) -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        tokens = random.integers(1, 2000, count)
        losses = random.lognormal(1.0, 1.0, count)
        nats = tokens * (losses if seed % 2 else losses.round() + np.arange(count))
        interval = bootstrap(nats.tolist(), tokens.tolist())
        value = float(nats.sum() / tokens.sum())
        record: dict[str, Any] = {
            "tokens": int(tokens.sum()),
            "loss": {"value": value, "interval": interval},
            "perplexity": math.exp(min(value, 700.0)),
            **dict.fromkeys(("against_loss", "difference", "kl", "top1_agreement")),
            "documents": [
                {"tokens": int(t), "nats": float(n)}
                | dict.fromkeys(("against_nats", "kl", "agreed"))
                for t, n in zip(tokens, nats, strict=True)
            ],
        }
        assert fault_of_record(record, "here", own=True) == ""
        record["loss"]["interval"] = (value, value)
        assert "interval of loss: here — expected its end at 2.5% " in fault_of_record(
            record, "here"
        )


def test_weights_that_are_not_those_of_the_files_are_named(
    evaluated: Evaluated, ignorant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any) -> Any:
        decoder: Any = load_decoder(*given)
        with torch.no_grad():
            decoder.layers[0].mlp.down.weight.mul_(1.5)
        return decoder

    monkeypatch.setattr("engine.evaluate.model.load_decoder", load)
    with pytest.raises(InternalError, match="a plain forward pass of its weights"):
        evaluated(ignorant)


@pytest.mark.parametrize(
    "family",
    ["gpt_neox", *(pytest.param(one, marks=pytest.mark.soak) for one in ("granite", "mamba"))],
)
def test_a_model_of_transformers_is_evaluated_as_by_other_code(
    family: str, evaluated: Evaluated, kit: Kit, tmp_path: Path
) -> None:
    size = read_config(kit.teacher).vocab_size
    save_other(tmp_path / "other", family, vocab_size=size)
    shutil.copyfile(kit.teacher / "tokenizer.json", tmp_path / "other" / "tokenizer.json")
    assert "no other forward pass" in evaluated(tmp_path / "other").forward_pass


def test_weights_in_blocks_are_evaluated_as_by_other_code(
    evaluated: Evaluated, kit: Kit, tmp_path: Path
) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=64, head_dim=16)
    shape, folder = tmp_path / "shape.json", tmp_path / "wide"
    shape.write_text(json.dumps(config | {"vocab_size": read_config(kit.teacher).vocab_size}))
    tokenizer = kit.teacher / "tokenizer.json"
    save_decoder(new_decoder(read_config(shape), seed=11), folder, torch.float32, [tokenizer])
    file = tmp_path / "wide.gguf"
    assert main(["convert", str(folder), str(file), "--quant", "q8_0"]) == 0
    for weights in ("dense", "packed"):
        checked = evaluated(file, None, weights=weights, tokenizer=tokenizer)
        assert checked.forward_pass == "plain"
