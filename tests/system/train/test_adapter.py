"""Students with low-rank adapters: only these are trained and saved, as peft saves them; merged they are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BadInput, SpecError, WeightsError
from engine.formats.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from engine.formats.open import open_weights
from engine.log.events import Evaluated, Judged, RunFinished, StepDone
from engine.log.folder import RunFolder
from engine.log.read import LogReader
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.names import hf_names
from engine.models.read_config import read_config
from engine.plan.run_plan import require_fp8_matmuls
from engine.spec import load_spec
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit
from tests.support.running import engine, engine_here

LORA: dict[str, Any] = {
    "student__config": "",
    "student__adapter": "lora",
    "student__adapter_rank": 4,
    "student__adapter_alpha": 8.0,
    "train__steps": 6,
    "train__lr": 1e-2,
    "checkpoint__every": 3,
}


@pytest.fixture(scope="module")
def base(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save_decoder(new_decoder(read_config(kit.student), seed=3), folder, torch.float32)
    return folder


def of(run: RunFolder, kind: type) -> list[Any]:
    events = LogReader(run.path / "events.jsonl").poll(1 << 30)
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def adapted(kit: Kit, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("adapted")
    run, code = carried_out(kit, folder, **LORA, student__path=str(base))
    assert code == 0
    return run


def test_a_run_trains_adapters_alone_and_its_audit_passes(adapted: RunFolder) -> None:
    judged = of(adapted, Judged)
    assert not [one for one in judged if one.level == "fail"]
    passed = {one.id for one in judged if one.level == "pass"}
    assert {"step_student", "step_loss", "step_gradients", "step_weights"} <= passed
    losses = [one.loss for one in of(adapted, StepDone)]
    assert losses[-1] < losses[0]
    heldout = {(one.subject, one.saved): one.loss for one in of(adapted, Evaluated)}
    assert heldout["student", True] < heldout["untrained", False]
    names = {path.name for path in adapted.student.iterdir()}
    assert {ADAPTER_CONFIG, ADAPTER_FILE} <= names and "model.safetensors" not in names
    about = json.loads((adapted.student / ADAPTER_CONFIG).read_text())
    assert about["peft_type"] == "LORA" and about["r"] == 4 and about["lora_alpha"] == 8.0
    with open_weights(adapted.student / ADAPTER_FILE) as weights:
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert weights.tensors[name].shape[0] == 4
    checkpoint = next(iter(sorted(adapted.checkpoints.iterdir())))
    with open_weights(checkpoint / "student.safetensors") as weights:
        assert all("lora_" in name for name in weights.tensors)


def test_merged_it_gives_the_logits_that_the_adapted_student_gave(
    adapted: RunFolder, base: Path, tmp_path: Path
) -> None:
    merged = load_decoder(adapted.student)
    tokens_BT = torch.arange(24)[None] % 200
    with torch.no_grad():
        plain = load_decoder(base)
        assert not torch.allclose(merged.logits(tokens_BT), plain.logits(tokens_BT), atol=1e-3)
        live = _with_adapter(plain, adapted)
        assert torch.allclose(merged.logits(tokens_BT), live.logits(tokens_BT), atol=1e-5)
    done = engine_here("convert", adapted.student, tmp_path / "merged", "--quant", "f32")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        again = load_decoder(tmp_path / "merged").logits(tokens_BT)
        assert torch.allclose(again, merged.logits(tokens_BT), atol=1e-5)


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_two_ranks_train_the_adapters_that_one_does(
    kit: Kit, base: Path, tmp_path: Path, resumed: bool
) -> None:
    common = LORA | {"student__path": str(base), "eval__every": 3}
    alone, code = carried_out(kit, tmp_path / "alone", **common, train__rows=4)
    assert code == 0
    (tmp_path / "pair").mkdir()
    spec = kit.spec(
        tmp_path / "pair", **common, train__rows=2, train__stop_after=4 if resumed else 0
    )
    pair = RunFolder(tmp_path / "pair" / "run")
    done = engine("distill", spec, "--gpus", 2, "--out", pair.path, "--json")
    assert done.returncode == 0, done.stderr
    if resumed:
        whole = ("--set", "train.stop_after=0", "--allow-change", "train.stop_after")
        done = engine("distill", "--resume", pair.path, *whole, "--json")
        assert done.returncode == 0, done.stderr
    for name in ("loss", "grad_norm", "rows"):
        one, two = ([getattr(step, name) for step in of(run, StepDone)] for run in (alone, pair))
        # fp32 sums in another order.
        assert two == pytest.approx(one, rel=2e-5), name
    judged = {one.id: one.level for one in of(pair, Judged)}
    assert judged["step_gradients"] == judged["step_weights"] == "pass"
    with (
        open_weights(alone.student / ADAPTER_FILE) as wanted,
        open_weights(pair.student / ADAPTER_FILE) as found,
    ):
        for name in wanted.tensors:
            assert torch.allclose(found.get(name), wanted.get(name), atol=1e-4), name


# Of peft's own use of transformers; a key of the configuration that peft does not know must not warn.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_loads_it_with_the_same_logits_and_merges_it_to_the_same(
    adapted: RunFolder, base: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tokens_BT = torch.arange(24)[None] % 200
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        adapted.student,
    ).eval()
    with torch.no_grad():
        wanted = load_decoder(adapted.student).logits(tokens_BT)
        assert torch.allclose(theirs(input_ids=tokens_BT).logits, wanted, atol=1e-4)
        merged = theirs.merge_and_unload()(input_ids=tokens_BT).logits
        assert torch.allclose(merged, wanted, atol=1e-4)


def test_a_run_goes_on_from_an_adapter(
    kit: Kit, base: Path, adapted: RunFolder, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(adapted.student), "train__steps": 2, "checkpoint__every": 0}
    run, code = carried_out(kit, tmp_path / "runs", **how)
    assert code == 0
    began = {one.subject: one.loss for one in of(run, Evaluated) if not one.saved}
    ended = next(one.loss for one in of(adapted, Evaluated) if one.saved)
    assert began["untrained"] == pytest.approx(ended, abs=1e-5)
    about = json.loads((run.student / ADAPTER_CONFIG).read_text())
    assert Path(about["base_model_name_or_path"]) == base
    _, code = carried_out(kit, tmp_path / "other", **how | {"student__adapter_rank": 8})
    assert code == 65


def test_an_adapter_is_not_merged_into_a_base_of_other_weights(
    kit: Kit, adapted: RunFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapted.student, folder)
    save_decoder(new_decoder(read_config(kit.student), seed=4), folder / "other", torch.float32)
    about = json.loads((folder / ADAPTER_CONFIG).read_text())
    about["base_model_name_or_path"] = "other"
    (folder / ADAPTER_CONFIG).write_text(json.dumps(about))
    with pytest.raises(WeightsError, match="expected the base that it was trained on"):
        load_decoder(folder)


def _with_adapter(decoder: Decoder, run: RunFolder) -> Decoder:
    """Return a decoder with an adapter as peft applies it: its tensors by name, x + s B A x."""
    about = json.loads((run.student / ADAPTER_CONFIG).read_text())
    scale = about["lora_alpha"] / about["r"]
    names = {hf.removesuffix(".weight"): ours for ours, hf in hf_names(decoder.config).items()}
    with open_weights(run.student / ADAPTER_FILE) as weights:
        for name in weights.tensors:
            if ".lora_A." not in name:
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = (weights.get(name.replace("lora_A", part)) for part in ("lora_A", "lora_B"))
            module = decoder.get_submodule(names[path].removesuffix(".weight"))
            module.register_forward_hook(
                lambda _, given, made, a=a, b=b: made + scale * (given[0] @ a.T @ b.T)
            )
    return decoder


def test_a_run_that_resumes_has_the_same_adapters(
    kit: Kit, base: Path, adapted: RunFolder, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(base)}
    run, code = carried_out(kit, tmp_path, **how, train__stop_after=3)
    assert code == 0
    assert resumed_here(run.path).returncode == 0
    whole = (adapted.student / ADAPTER_FILE).read_bytes()
    assert (run.student / ADAPTER_FILE).read_bytes() == whole


def test_recomputed_layers_and_attention_alone_train_every_adapter(
    kit: Kit, base: Path, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(base), "student__adapter_targets": "attention"}
    run, code = carried_out(kit, tmp_path, **how, student__checkpointing="on")
    assert code == 0
    (artefact,) = [one for one in of(run, Judged) if one.id == "artefact"]
    assert artefact.level == "pass" and "every adapter moved" in artefact.text
    with open_weights(run.student / ADAPTER_FILE) as weights:
        assert {name.split(".")[-3] for name in weights.tensors} == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        }


def test_an_adapter_of_another_base_is_refused(
    adapted: RunFolder, kit: Kit, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    save_decoder(new_decoder(read_config(kit.student), seed=4), other, torch.float32)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / ADAPTER_FILE).write_bytes((adapted.student / ADAPTER_FILE).read_bytes())
    about = json.loads((adapted.student / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps(about | {"base_model_name_or_path": str(other)})
    )
    with pytest.raises(WeightsError, match="the base that it was trained on"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "expected LORA"),
        ({"use_dora": True}, "expected plain LoRA, found use_dora"),
        ({"r": 5}, r"lora_A.*5"),
    ],
)
def test_an_adapter_that_is_not_covered_is_refused(
    change: dict[str, Any], said: str, adapted: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / ADAPTER_FILE).write_bytes((adapted.student / ADAPTER_FILE).read_bytes())
    about = json.loads((adapted.student / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(about | change))
    with pytest.raises(WeightsError, match=said):
        load_decoder(tmp_path)


def test_an_adapter_without_a_base_is_refused(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"expected student\.path, the base"):
        load_spec(kit.spec(tmp_path, **{**LORA, "student__path": ""}))


def test_a_base_that_is_the_teacher_is_refused(kit: Kit, tmp_path: Path) -> None:
    run, code = carried_out(kit, tmp_path, **LORA, student__path=str(kit.teacher))
    assert code == 65
    (finished,) = of(run, RunFinished)
    assert "other weights than the teacher's" in finished.reason


def test_a_replay_trains_the_same_adapters(adapted: RunFolder, trainer_here: None) -> None:
    done = engine_here("verify", adapted.path, "--all")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def in_blocks(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in Q8_0 blocks, whose rows are 32 numbers."""
    folder = tmp_path_factory.mktemp("blocks")
    save_decoder(
        new_decoder(read_config(kit.student), seed=3),
        folder / "model",
        torch.float32,
        extra_files=[kit.teacher / "tokenizer.json"],
    )
    done = engine_here("convert", folder / "model", folder / "base.gguf", "--quant", "q8_0")
    assert done.returncode == 0, done.stderr
    return folder / "base.gguf"


def test_adapters_of_a_base_in_blocks_are_those_of_the_same_base_as_floats(
    kit: Kit, in_blocks: Path, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(in_blocks), "checkpoint__every": 0}
    run, code = carried_out(kit, tmp_path / "blocks", **how)
    assert code == 0
    judged = of(run, Judged)
    assert not [one for one in judged if one.level == "fail"]
    assert {"step_student", "step_gradients"} <= {one.id for one in judged if one.level == "pass"}
    floats, code = carried_out(kit, tmp_path / "floats", **how, student__adapter_base="floats")
    assert code == 0
    pairs = zip(of(run, StepDone), of(floats, StepDone), strict=True)
    for one, other in pairs:
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    tokens_BT = torch.arange(24)[None] % 200
    with torch.no_grad():
        both = [load_decoder(each.student).logits(tokens_BT) for each in (run, floats)]
    assert torch.allclose(*both, atol=1e-2)


def test_a_base_in_blocks_is_adapted_in_its_attention_alone(
    kit: Kit, in_blocks: Path, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(in_blocks), "student__adapter_targets": "q_proj,v_proj"}
    run, code = carried_out(kit, tmp_path, **how)
    assert code == 0
    levels = {one.id: one.level for one in of(run, Judged)}
    assert levels["step_student"] == levels["step_gradients"] == levels["artefact"] == "pass"


def test_adapters_of_a_base_in_fp8_learn_and_pass_the_audit(
    kit: Kit, base: Path, adapted: RunFolder, tmp_path: Path
) -> None:
    how = LORA | {"student__path": str(base), "student__adapter_base": "fp8"}
    run, code = carried_out(kit, tmp_path, **how)
    assert code == 0
    judged = of(run, Judged)
    assert not [one for one in judged if one.level == "fail"]
    assert {"step_student", "step_weights"} <= {one.id for one in judged if one.level == "pass"}
    losses, exact = ([one.loss for one in of(each, StepDone)] for each in (run, adapted))
    assert losses != exact
    # Eight bits keep three of the mantissa: 1/16 of each value.
    assert losses == pytest.approx(exact, rel=1 / 16)
    # The base recognises an adapter that was trained on its rounded weights.
    load_decoder(run.student)


def test_a_base_in_fp8_is_refused_on_a_gpu_without_its_matmuls() -> None:
    require_fp8_matmuls(None)
    require_fp8_matmuls((8, 9))
    with pytest.raises(BadInput, match=r"student.adapter_base: fp8 — expected .*8.9, found 8.6"):
        require_fp8_matmuls((8, 6))
