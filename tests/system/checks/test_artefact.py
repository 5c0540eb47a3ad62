"""The check of the saved student, on real runs and on files that were changed after they were written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint_folders import published
from engine.checks.artefact import (
    Artefact,
    _class_of,
    _read_otherwise,
    half_spacing,
    same_bits,
    samples_of,
)
from engine.data.batches import heldout_rows
from engine.data.chat_template import ChatTemplate
from engine.drills.catalogue import planted
from engine.errors import BadInput
from engine.evaluate.model import open_model
from engine.export.proof import examine
from engine.export.publish import Wanted, publish
from engine.formats.safetensors import tensors_sha256
from engine.log.follow import Follower
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.packed import head_of
from engine.models.read_config import read_config
from engine.plan.inputs import check_inputs
from engine.spec import spec_from_dict
from engine.spec.sections import ModelSection
from engine.train.heldout import heldout_loss
from engine.verdict import Level
from tests.support.checked_runs import Run, World, make_run, make_world
from tests.support.finished_runs import carried_out, finish, resumed_here
from tests.support.kit import Kit
from tests.support.other_models import save_other

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def trained(world: World) -> Run:
    run = make_run(world).begin()
    run.step(2)
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_student_saved_in_either_type_is_the_trained_one(
    dtype: torch.dtype, trained: Run, tmp_path: Path
) -> None:
    trained.end(tmp_path / "student", dtype)
    result = trained.results["artefact"]
    assert result.verdict.level is Level.PASS, result.verdict
    assert result.numbers["differing"] == result.numbers["left_over"] == 0
    assert result.numbers["moved"] > result.numbers["sampled"] / 2


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        ("config.json", "dtype", "float16", "config.json says that its tensors are float16"),
        ("config.json", "use_cache", False, "config.json has use_cache False"),
        ("config.json", "architectures", None, "config.json has architectures None"),
        (
            "config.json",
            "architectures",
            ["LlamaModel"],
            "config.json has architectures ['LlamaModel']",
        ),
        ("tokenizer.json", "truncation", {"max_length": 8}, "the 'truncation' of tokenizer.json"),
        ("tokenizer.json", "model", {}, "the 'model' of tokenizer.json"),
    ],
)
def test_files_beside_the_tensors_are_those_that_were_trained_with(
    file: str, key: str, value: object, words: str, trained: Run, kit: Kit, tmp_path: Path
) -> None:
    saved = trained.end(tmp_path / "student")
    raw = (kit.teacher / "tokenizer.json").read_bytes()
    (saved.folder / "tokenizer.json").write_bytes(raw)
    saved = dataclasses.replace(saved, tokenizer=raw)
    trained.read_back(saved)
    assert trained.results["artefact"].verdict.level is Level.PASS
    path = saved.folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    trained.read_back(saved)
    assert words in trained.failures().get("artefact", "")


def test_files_that_do_not_say_that_their_tensors_are_torchs_are_named(
    trained: Run, tmp_path: Path
) -> None:
    saved = trained.end(tmp_path / "student")
    file = saved.folder / "model.safetensors"
    save_file(load_file(file), file)
    trained.read_back(saved)
    assert "model.safetensors has format None" in trained.failures().get("artefact", "")


def test_the_class_of_each_family_is_known_by_its_name() -> None:
    assert {name: _class_of(name) for name in FAMILIES} == {
        name: family.hf_class.lower() for name, family in FAMILIES.items()
    }


def test_the_chat_template_and_its_special_tokens_are_saved(trained: Run, tmp_path: Path) -> None:
    template = ChatTemplate(
        texts={"tool_use": "tools", "default": "plain"},
        special_tokens={"eos_token": "<end>"},
        where="test",
    )
    saved = dataclasses.replace(trained.end(tmp_path / "student"), template=template)
    for text, end, words in (
        ("plain", "<end>", ""),
        ("plain", "<other>", "has eos_token '<other>'"),
        ("plain", '<end>", "clean_up": "x', "has 'clean_up', which nothing asked for"),
        ("plain", None, "has eos_token None"),
        ("tools", "<end>", "chat_template.jinja is another text"),
        (None, "<end>", "chat_template.jinja is missing"),
    ):
        for name, content in (
            ("chat_template.jinja", text),
            ("tokenizer_config.json", end and f'{{"eos_token": "{end}"}}'),
        ):
            (saved.folder / name).unlink(missing_ok=True)
            if content is not None:
                (saved.folder / name).write_text(content)
        trained.read_back(saved)
        assert words in trained.failures().get("artefact", "")
        assert trained.results["artefact"].failed == bool(words)


def test_the_saved_configuration_says_what_its_source_says(trained: Run, tmp_path: Path) -> None:
    """Read by code that shares nothing with the reader that the student was made by."""
    saved = trained.end(tmp_path / "student")
    source = tmp_path / "source.json"
    raw = json.loads((saved.folder / "config.json").read_text())
    for changed, words in (
        ({}, ""),
        ({"eos_token_id": [0, 3]}, "ends: "),
        ({"max_position_embeddings": 77}, "positions: "),
        ({"architectures": None}, ""),
        ({"architectures": ["LlamaModel"]}, "classes: "),
        ({"rope_parameters": {"rope_theta": 123.0}}, "theta: 10000.0, expected 123.0"),
    ):
        source.write_text(json.dumps(raw | changed))
        trained.read_back(dataclasses.replace(saved, source=str(source)))
        found = trained.failures().get("artefact", "")
        assert words in found and bool(words) == bool(found), found


def test_a_hash_that_is_not_that_of_the_saved_tensors_is_named(
    trained: Run, tmp_path: Path
) -> None:
    saved = trained.end(tmp_path / "student", torch.bfloat16)
    right = {n: p.detach().bfloat16() for n, p in trained.trainer.student.named_parameters()}
    for tensors, words in (
        (right, ""),
        (dict(trained.trainer.student.named_parameters()), "it is "),
    ):
        trained.read_back(dataclasses.replace(saved, sha256=tensors_sha256(tensors)))
        assert words in trained.failures().get("artefact", "")
        assert bool(words) == trained.results["artefact"].failed


def one_bit(tensors: Tensors) -> Tensors:
    tensors["model.norm.weight"].view(torch.int32)[-1] ^= 1
    return tensors


def less(tensors: Tensors) -> Tensors:
    del tensors["model.norm.weight"]
    return tensors


def more(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.extra.weight": torch.zeros(3)}


def other_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def halved(tensors: Tensors) -> Tensors:
    return {name: tensor.half() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            one_bit,
            "1 of 26 tensors are not the student's in float32, bit for bit, first norm.weight",
        ),
        (less, "missing model.norm.weight"),
        (more, "unexpected model.layers.0.extra.weight"),
        (other_head, "lm_head.weight equal to model.embed_tokens.weight"),
        (halved, "26 of 26 tensors are not in float32"),
    ],
)
def test_files_with_other_tensors_are_named(
    change: Callable[[Tensors], Tensors], words: str, trained: Run, tmp_path: Path
) -> None:
    saved = trained.end(tmp_path / "student")
    file = saved.folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    trained.read_back(saved)
    assert words in trained.failures()["artefact"]


def test_a_config_of_another_model_is_named(trained: Run, tmp_path: Path) -> None:
    saved = trained.end(tmp_path / "student")
    file = saved.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    trained.read_back(saved)
    assert "rms_norm_eps is 0.001, expected 1e-06" in trained.failures()["artefact"]


def test_a_folder_without_weights_is_a_failure(trained: Run, tmp_path: Path) -> None:
    saved = trained.end(tmp_path / "student")
    (saved.folder / "model.safetensors").unlink()
    trained.read_back(saved)
    assert "student cannot be read" in trained.failures()["artefact"]


def test_the_untrained_student_is_another_one(trained: Run, tmp_path: Path) -> None:
    saved = trained.end(tmp_path / "student")
    (saved.folder / "config.json").rename(tmp_path / "kept")
    (saved.folder / "model.safetensors").unlink()
    saved.folder.rmdir()
    save_decoder(new_decoder(trained.trainer.student.config, seed=0), saved.folder, torch.float32)
    trained.read_back(saved)
    assert "are not the student's in float32" in trained.failures()["artefact"]


@pytest.mark.parametrize(
    ("rate", "level", "words"),
    [
        (
            1e-3,
            Level.FAIL,
            "it holds the weights that the run began with, and updates of up to 0.001",
        ),
        (
            1e-45,
            Level.UNKNOWN,
            "updates of at most 1e-45 vanish in the rounding to bfloat16; student.save_as",
        ),
        (0.0, Level.UNKNOWN, "no update was applied with a learning rate above 0"),
    ],
)
def test_a_student_that_is_still_the_untrained_one_fails_where_its_updates_exceed_rounding(
    rate: float, level: Level, words: str, world: World, tmp_path: Path
) -> None:
    run = make_run(world).begin()
    with torch.no_grad():
        for parameter in run.trainer.student.parameters():
            # No zero among them, which any update would move.
            parameter.copy_(torch.where(parameter == 0, 0.5, parameter))
    run.untrained = samples_of(run.trainer.student)
    run.end(tmp_path / "student", torch.bfloat16, rate)
    verdict = run.results["artefact"].verdict
    assert verdict.level is level and words in verdict.reason, verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_less_than_half_the_spacing_vanishes_and_more_does_not(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 1.5, 3.0, 0.0199, 1e-20, 4096.0]).to(dtype).double()
    half = half_spacing(values, dtype)
    away = values.sign()
    assert torch.equal((values + 0.99 * half * away).to(dtype).double(), values)
    assert not bool(((values + 1.01 * half * away).to(dtype).double() == values).any())
    assert float(half_spacing(torch.zeros(1), dtype)) == 0


def test_equal_numbers_of_other_bits_are_not_the_same() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, torch.zeros(2)) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double()) and not same_bits(zero, torch.zeros(1, 2))
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())


# Whole runs


def test_the_reported_loss_is_that_of_the_saved_student(kit: Kit, tmp_path: Path) -> None:
    run = finish(kit, tmp_path, student__save_as="bf16")
    view = Follower(run).read_all()
    live, saved = [e for e in view.evals if e.subject == "student"]
    assert (live.saved, saved.saved) == (False, True) and live.step == saved.step == 6
    assert live.loss != saved.loss and live.loss == pytest.approx(saved.loss, rel=1e-3)
    receipt = run.read_receipt()
    assert receipt is not None and receipt["heldout_loss_nats"]["student"] == saved.loss
    assert view.checks["artefact"].level == "pass"
    spec = spec_from_dict(run.read_effective()["spec"])
    heldout = check_inputs(spec).load_tokens(spec.data).heldout
    held = heldout_rows(heldout, spec.data.seq_len, spec.eval.rows)
    decoder = load_decoder(run.student)
    loss, _ = heldout_loss(decoder.hidden, head_of(decoder), [held], torch.device("cpu"))
    assert saved.loss == pytest.approx(loss, rel=1e-6)
    assert receipt["model_sha256"]["student"] == tensors_sha256(
        dict(load_decoder(run.student, torch.bfloat16).named_parameters())
    )
    assert examine(run).verdicts["student"].level is Level.PASS


def test_in_fp32_the_saved_student_has_the_live_ones_loss(kit: Kit, tmp_path: Path) -> None:
    run = finish(kit, tmp_path)
    losses = [e.loss for e in Follower(run).read_all().evals if e.subject == "student"]
    assert len(losses) == 2 and losses[0] == losses[1]


def test_a_run_whose_saved_student_is_another_fails_keeps_its_checkpoint_and_can_be_mended(
    kit: Kit, tmp_path: Path
) -> None:
    with planted("saved_one_of_start").plant():
        run, code = carried_out(kit, tmp_path)
    view = Follower(run).read_all()
    assert code == 1 and view.finished is not None and view.finished.state == "failed"
    assert "check artefact: fail: 1 of" in view.finished.reason
    assert view.student is None and not run.receipt.exists()
    assert [path.name for path in published(run.checkpoints)] == ["step-00000006"]
    with pytest.raises(BadInput, match="a completed run"):
        publish(run, Wanted(folder=tmp_path / "out", name="tiny"), lambda text: None)
    assert resumed_here(run.path).returncode == 0
    view = Follower(run).read_all()
    assert view.checks["artefact"].level == "pass" and view.student is not None


def test_a_student_that_was_reported_as_another_is_not_published(kit: Kit, tmp_path: Path) -> None:
    with planted("saved_through_fp8").plant():
        run = finish(kit, tmp_path, checks__on_fail="report")
    with pytest.raises(BadInput, match="saved student, as the run read it back"):
        examine(run)


def test_a_student_that_transformers_runs_is_read_back_too(kit: Kit, tmp_path: Path) -> None:
    save_other(tmp_path / "other", "gpt_neox", vocab_size=300)
    changes = {
        "student__config": str(tmp_path / "other" / "config.json"),
        "student__save_as": "bf16",
    }
    run = finish(kit, tmp_path / "sound", **changes)
    assert Follower(run).read_all().checks["artefact"].level == "pass"
    with planted("saved_through_fp8").plant():
        run, code = carried_out(kit, tmp_path / "spoilt", **changes)
    assert code == 1 and Follower(run).read_all().checks["artefact"].level == "fail"


@pytest.fixture
def by_transformers(kit: Kit, tmp_path: Path) -> Artefact:
    """A student of a native family that transformers ran, as it saves one."""
    folder, how = tmp_path / "student", ModelSection(engine="transformers")
    save_decoder(load_decoder(kit.teacher, how=how), folder, torch.float32)
    return Artefact(folder=folder, dtype=torch.float32, how=how, start={}, rate=0.0)


def test_what_transformers_saved_is_the_same_to_the_native_decoder(
    by_transformers: Artefact,
) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    assert not wanted.native and read_config(by_transformers.folder).native
    assert _read_otherwise(by_transformers, wanted) == ""


def test_a_student_that_the_native_decoder_reads_as_another_is_named(
    by_transformers: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    read = ModelConfig.from_dict

    def other_rotation(raw: Mapping[str, object], where: object) -> ModelConfig:
        return dataclasses.replace(read(raw, where), rope_theta=300.0)

    monkeypatch.setattr(ModelConfig, "from_dict", other_rotation)
    assert "gives other logits than transformers" in _read_otherwise(by_transformers, wanted)


def test_a_student_that_the_native_decoder_refuses_is_named(by_transformers: Artefact) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    file = by_transformers.folder / "model.safetensors"
    tensors = load_file(file)
    # transformers converts any type while it loads.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, file, {"format": "pt"})
    found = _read_otherwise(by_transformers, wanted)
    assert "from now on, refuses it" in found and "model.norm.weight" in found


def test_a_run_of_transformers_on_a_native_family_ends_with_a_student_that_generates(
    kit: Kit, tmp_path: Path
) -> None:
    run = finish(
        kit,
        tmp_path,
        student__path=str(kit.teacher),
        student__config="",
        teacher__allow_identical=True,
        model__engine="transformers",
    )
    assert Follower(run).read_all().checks["artefact"].level == "pass"
    model = open_model(run.path, device="cpu", precision="fp32")
    assert model.decoder.config.native
