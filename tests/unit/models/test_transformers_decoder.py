"""Models that transformers runs are the same functions of rows with documents, however each keeps documents apart and
whatever it does behind its head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import WeightsError
from engine.models.config import count_parameters
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.read_config import read_config
from engine.models.transformers_decoder import TransformersDecoder
from engine.spec.sections import ModelSection
from tests.support.other_models import ALONE, OTHERS, OWN_LOGITS, make_other, save_other

LENGTH = 20
THEIRS = ModelSection(engine="transformers")


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(120, (3, LENGTH), generator=generator)
    documents_BT = torch.zeros(3, LENGTH, dtype=torch.int64)
    documents_BT[0, 7:] = 1
    documents_BT[1, 3:], documents_BT[1, 12:] = 5, 9
    return tokens_BT, documents_BT


def each_alone(model: Any, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """The logits of every document in a row of its own, by the model itself."""
    out_BTV = torch.zeros(*tokens_BT.shape, model.config.vocab_size)
    for row, documents_T in enumerate(documents_BT):
        for document in documents_T.unique():
            here_T = documents_T == document
            out_BTV[row, here_T] = model(input_ids=tokens_BT[row : row + 1, here_T]).logits[0]
    return out_BTV


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found - wanted).abs().max().detach() / wanted.abs().max().detach())


def opened(folder: Path, how: ModelSection = THEIRS) -> TransformersDecoder:
    decoder = load_decoder(folder, how=how)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


@pytest.mark.parametrize("family", OTHERS)
def test_logits_and_gradients_are_those_of_each_document_by_itself(
    family: str, tmp_path: Path
) -> None:
    model = save_other(tmp_path / "model", family)
    tokens_BT, documents_BT = rows()
    wanted_BTV = each_alone(model, tokens_BT, documents_BT)
    wanted_BTV.square().mean().backward()
    decoder = opened(tmp_path / "model", ModelSection())
    untold_BTV = decoder.logits(tokens_BT, documents_BT)
    head, documents = decoder.probe("student", LENGTH)
    assert head.choice == ("of the model" if family in OWN_LOGITS else "head(hidden)")
    assert documents.choice == ("alone" if family in ALONE else "masked")
    found_BTV = decoder.logits(tokens_BT, documents_BT)
    assert apart(untold_BTV, wanted_BTV) < 1e-5
    assert apart(found_BTV, wanted_BTV) < 1e-5
    found_BTV.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in decoder.model.named_parameters():
        wanted = gradients[name]
        assert wanted is not None and parameter.grad is not None, name
        size = max(float(wanted.abs().max()), 1e-6)
        assert float((parameter.grad - wanted).abs().max()) / size < 1e-4, name


def test_a_cap_is_found_where_no_logit_comes_near_it() -> None:
    config = make_other("gemma2").config
    model = type(make_other("gemma2"))(config)
    tokens_BT, _ = rows()
    # Initial weights: the largest logit is a hundredth of the cap of 30.
    assert float(model(input_ids=tokens_BT).logits.detach().abs().max()) < 3
    raw = {**config.to_dict(), "model_type": "gemma2"}
    decoder = fresh(raw)
    assert decoder.gives_logits


def fresh(raw: dict[str, Any]) -> TransformersDecoder:
    from engine.models.transformers_config import read_transformers_config

    config = read_transformers_config(raw, Path("config.json"), THEIRS, "")
    decoder = new_decoder(config, seed=0)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


def test_a_window_shorter_than_the_rows_is_kept(tmp_path: Path) -> None:
    """A mask given from outside replaces the model's own, and its window with it."""
    model = save_other(tmp_path / "model", "mistral", **WINDOWED)
    tokens_BT, documents_BT = rows()
    decoder = opened(tmp_path / "model")
    _, short = decoder.probe("student", 4)
    assert short.choice == "masked"
    _, long = decoder.probe("student", LENGTH)
    assert long.choice == "alone" and "what it is alone" in long.reason
    wanted_BTV = each_alone(model, tokens_BT, documents_BT)
    found_BTV = decoder.logits(tokens_BT, documents_BT)
    assert apart(found_BTV, wanted_BTV) < 1e-5


WINDOWED = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    sliding_window=5,
)


def test_a_model_that_looks_at_the_document_in_front_is_run_one_by_one(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gpt2")
    decoder = opened(tmp_path / "model")
    real = decoder.model.transformer.forward

    # From positions alone transformers would tell the documents apart.
    def forgets_documents(
        *, attention_mask: Any = None, position_ids: Any = None, **named: Any
    ) -> Any:
        return real(**named)

    decoder.model.transformer.forward = forgets_documents
    _, documents = decoder.probe("student", LENGTH)
    assert documents.choice == "alone"
    assert "sees the one before it" in documents.reason


def test_dropout_is_off_in_training(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gpt2", resid_pdrop=0.5, attn_pdrop=0.5)
    decoder = opened(tmp_path / "model")
    decoder.train()
    tokens_BT, documents_BT = rows()
    one_BTD, other_BTD = (decoder.hidden(tokens_BT, documents_BT) for _ in range(2))
    assert torch.equal(one_BTD, other_BTD)


@pytest.mark.parametrize("family", ["gpt_neox", "mamba", "gemma2"])
def test_activation_checkpointing_changes_no_gradient(family: str, tmp_path: Path) -> None:
    save_other(tmp_path / "model", family)
    decoder = opened(tmp_path / "model")
    tokens_BT, documents_BT = rows()
    found = []
    for on in (False, True):
        decoder.checkpoint_layers(on)
        decoder.zero_grad()
        decoder.hidden(tokens_BT, documents_BT).square().mean().backward()
        found.append(
            {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
        )
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "gemma2"])
def test_a_saved_model_is_the_same_in_transformers(family: str, tmp_path: Path) -> None:
    from tests.support.other_models import LIBRARY

    save_other(tmp_path / "model", family)
    decoder = opened(tmp_path / "model")
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter *= 1.5
    save_decoder(decoder, tmp_path / "saved", torch.float32)
    again = LIBRARY.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens_BT, _ = rows()
    wanted_BTV = decoder.model(input_ids=tokens_BT).logits
    assert torch.equal(again(input_ids=tokens_BT).logits, wanted_BTV)


def test_fresh_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gpt_neox")
    config = read_config(tmp_path / "model")
    one, same, other = (dict(new_decoder(config, seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert count_parameters(config) == sum(p.numel() for p in one.values())


def test_native_families_may_be_run_by_transformers_and_compute_the_same(tmp_path: Path) -> None:
    changes = {key: value for key, value in WINDOWED.items() if key != "sliding_window"}
    save_other(tmp_path / "model", "llama", **changes)
    ours, theirs = load_decoder(tmp_path / "model"), opened(tmp_path / "model")
    assert not isinstance(ours, TransformersDecoder)
    tokens_BT, documents_BT = rows()
    a_BTV, b_BTV = (one.logits(tokens_BT, documents_BT) for one in (ours, theirs))
    assert apart(a_BTV, b_BTV) < 1e-5


def test_a_variant_of_a_native_family_goes_to_transformers_with_the_reason(tmp_path: Path) -> None:
    changes = {key: value for key, value in WINDOWED.items() if key != "sliding_window"}
    save_other(tmp_path / "model", "llama", hidden_act="gelu", **changes)
    config = read_config(tmp_path / "model")
    assert not config.native and "hidden_act" in getattr(config, "why", "")
    with pytest.raises(WeightsError, match="hidden_act"):
        read_config(tmp_path / "model", ModelSection(engine="native"))


# What cannot be run


def without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


def with_one_more(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.embed_in.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def changed(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | changes))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            without("gpt_neox.layers.0.attention.dense.weight"),
            "missing gpt_neox.layers.0.attention",
        ),
        (with_one_more, "unexpected extra"),
        (with_nan, "1 of 3,840 values are NaN or infinite"),
        (changed(hidden_size=36), "GPTNeoXForCausalLM"),
        (changed(model_type="of_tomorrow"), "a newer transformers may have it"),
        (
            changed(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
            "model.remote_code=true",
        ),
        (changed(num_attention_heads=[4]), "gpt_neox"),
    ],
)
def test_a_broken_model_is_refused_with_its_reason(
    spoil: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    save_other(tmp_path / "model", "gpt_neox")
    spoil(tmp_path / "model")
    with pytest.raises(WeightsError) as refusal:
        load_decoder(tmp_path / "model")
    assert said in f"{refusal.value.message} {refusal.value.hint}"
    assert refusal.value.exit_code == 65


def test_code_of_a_model_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gpt2")
    (tmp_path / "model" / "mine.py").write_text(CODE)
    changed(
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"},
    )(tmp_path / "model")
    with pytest.raises(WeightsError, match="computed by code in its own folder"):
        load_decoder(tmp_path / "model")
    decoder = opened(tmp_path / "model", ModelSection(remote_code=True))
    assert type(decoder.model).__name__ == "Mine"


CODE = """
from transformers import GPT2Config, GPT2LMHeadModel


class Config(GPT2Config):
    model_type = "mine"


class Mine(GPT2LMHeadModel):
    config_class = Config
"""
