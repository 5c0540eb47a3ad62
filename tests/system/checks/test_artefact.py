"""The check of the saved student, on real runs and on files that were changed after they were written."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint_folders import published
from engine.checks.artefact import (
    Artefact,
    _logits_difference,
    same_bits,
)
from engine.data.batches import heldout_rows
from engine.drills.planting import replaced
from engine.errors import BadInput
from engine.evaluate.model import open_model
from engine.export.publish import Wanted, publish
from engine.export.required_evidence import examine
from engine.formats.safetensors import tensors_sha256
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.packed import head_of
from engine.models.read_config import read_config
from engine.plan.inputs import check_inputs
from engine.spec import spec_from_dict
from engine.spec.sections import ModelSection, TrainSection
from engine.train import finish as finish_module
from engine.train.heldout import heldout_loss
from engine.verdict import Level
from tests.support.checked_runs import Run, World, make_run, make_world
from tests.support.file_metadata import difference, read_metadata
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


def test_files_beside_the_tensors_are_those_that_were_trained_with(whole: Path) -> None:
    """Read by code that shares nothing with their writer."""
    spec = spec_from_dict(RunFolder(whole).read_effective()["spec"])
    source = spec.student.path or spec.student.config
    saved, asked = read_metadata(whole / "student" / "config.json"), read_metadata(source)
    assert saved is not None and asked is not None and difference(asked, saved) == ""
    config = json.loads((whole / "student" / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    assert config["dtype"] == "float32" and config["architectures"] == [family.hf_class]
    with safe_open(whole / "student" / "model.safetensors", "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    teacher = Path(spec.teacher.path)
    stored, trained_with = (
        json.loads((folder / "tokenizer.json").read_text())
        for folder in (whole / "student", teacher)
    )
    assert stored == trained_with


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
            "1 of 26 tensors differ from the student's in float32, first norm.weight",
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


def test_a_head_that_was_untied_is_named(trained: Run, tmp_path: Path) -> None:
    saved = trained.end(tmp_path / "student")
    weights, config = saved.folder / "model.safetensors", saved.folder / "config.json"
    tensors = load_file(weights)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    trained.read_back(saved)
    assert "tie_word_embeddings" in trained.failures()["artefact"]


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
    assert "differ from the student's in float32" in trained.failures()["artefact"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_student_that_is_still_the_untrained_one_is_unknown(
    dtype: torch.dtype, world: World, tmp_path: Path
) -> None:
    run = make_run(world).begin()
    run.end(tmp_path / "student", dtype)
    verdict = run.results["artefact"].verdict
    assert (
        verdict.level is Level.UNKNOWN
        and "the saved student equals the untrained one" in verdict.reason
    )
    assert ("student.save_as=fp32" in verdict.reason) == (dtype == torch.bfloat16)


def test_equal_numbers_of_other_bits_are_not_the_same() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, torch.zeros(2)) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double()) and not same_bits(zero, torch.zeros(1, 2))
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())


# Whole runs


def saving(change: Callable[[Decoder], None]) -> AbstractContextManager[None]:
    """Have another student saved than the trained one."""

    def make(save: Callable[..., None]) -> Callable[..., None]:
        def spoilt(student: Decoder, *others: Any, **named: Any) -> None:
            other = copy.deepcopy(student)
            with torch.no_grad():
                change(other)
            save(other, *others, **named)

        return spoilt

    return replaced(finish_module, "save_decoder", make)


def one_of_start(student: Decoder) -> None:
    start = new_decoder(student.config, seed=TrainSection().seed)
    name = "layers.0.attention.q.weight"
    student.get_parameter(name).copy_(start.get_parameter(name))


def through_fp8(student: Decoder) -> None:
    for parameter in student.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn).to(parameter.dtype))


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
    with saving(one_of_start):
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
    with saving(through_fp8):
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
    with saving(through_fp8):
        run, code = carried_out(kit, tmp_path / "spoilt", **changes)
    assert code == 1 and Follower(run).read_all().checks["artefact"].level == "fail"


@pytest.fixture
def by_transformers(kit: Kit, tmp_path: Path) -> Artefact:
    """A student of a native family that transformers ran, as it saves one."""
    folder, how = tmp_path / "student", ModelSection(engine="transformers")
    save_decoder(load_decoder(kit.teacher, how=how), folder, torch.float32)
    return Artefact(folder=folder, dtype=torch.float32, how=how, start={})


def test_what_transformers_saved_is_the_same_to_the_native_decoder(
    by_transformers: Artefact,
) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    assert not wanted.native and read_config(by_transformers.folder).native
    assert _logits_difference(by_transformers, wanted) == ""


def test_a_student_that_the_native_decoder_reads_as_another_is_named(
    by_transformers: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    read = ModelConfig.from_dict

    def other_rotation(raw: Mapping[str, object], where: object) -> ModelConfig:
        return dataclasses.replace(read(raw, where), rope_theta=300.0)

    monkeypatch.setattr(ModelConfig, "from_dict", other_rotation)
    assert "gives other logits than transformers" in _logits_difference(by_transformers, wanted)


def test_a_student_that_the_native_decoder_refuses_is_named(by_transformers: Artefact) -> None:
    wanted = read_config(by_transformers.folder, by_transformers.how)
    file = by_transformers.folder / "model.safetensors"
    tensors = load_file(file)
    # transformers converts any type while it loads.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, file, {"format": "pt"})
    found = _logits_difference(by_transformers, wanted)
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
