"""A run whose teacher and student are of families that only transformers has, from its spec to a published student."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cli.main import main
from engine.errors import BadInput, WeightsError
from engine.evaluate.model import open_model
from engine.generation.generate import generate
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.models.load import load_decoder, save_decoder
from engine.models.read_config import read_config
from engine.models.transformers_config import library_warnings, quiet
from engine.spec.sections import ModelSection
from tests.support.budgets import budget_of, spec_of
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit, taught_on
from tests.support.other_models import GROUPED, LIBRARY, OTHERS, save_other
from tests.support.preparing import make_store

VOCABULARY = 300


def folder_of(kit: Kit, folder: Path, family: str, *, taught: bool = False, **changes: Any) -> Path:
    """A model folder with the kit's tokenizer, as `save_pretrained` writes it."""
    save_other(folder, family, vocab_size=VOCABULARY, **changes)
    shutil.copyfile(kit.teacher / "tokenizer.json", folder / "tokenizer.json")
    if taught:
        decoder = taught_on(kit, load_decoder(folder))
        shutil.rmtree(folder)
        save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    return folder


@pytest.fixture(scope="module")
def run(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Cohere, whose logits are scaled, teaches a fresh GPT-NeoX; stopped after four of six steps and resumed."""
    root = tmp_path_factory.mktemp("others")
    teacher = folder_of(kit, root / "cohere", "cohere", taught=True, logit_scale=0.5)
    student = folder_of(kit, root / "gpt_neox", "gpt_neox", hidden_size=48)
    settings: dict[str, object] = {
        "teacher__path": str(teacher),
        "student__config": str(student / "config.json"),
        "checkpoint__every": 2,
    }
    found, code = carried_out(kit, root / "stopped", **settings, train__stop_after=4)
    assert code == 0
    done = resumed_here(found.path)
    assert done.returncode == 0 and found.receipt.exists(), done.stderr
    return found


def test_the_run_says_what_runs_the_models_and_what_is_lost(run: RunFolder) -> None:
    view = Follower(run).read_all()
    found = {one.knob: one for one in view.decisions}
    assert found["model.engine"].choice == "transformers"
    assert "CohereForCausalLM" in found["model.engine"].reason
    assert "packed attention" in found["model.engine"].reason
    assert found["teacher.logits"].choice == "of the model"
    assert found["student.logits"].choice == "head(hidden)"
    assert found["student.graphs"].choice == "off"


def test_the_audit_says_that_the_architecture_is_not_compared_and_judges_the_rest(
    run: RunFolder,
) -> None:
    view = Follower(run).read_all()
    stages = {id: check for id, check in view.checks.items() if id.startswith("step_")}
    for id in ("step_teacher", "step_student", "step_gradients"):
        assert stages[id].level == "unknown" and "transformers" in stages[id].text
    assert stages["step_gradients"].text.startswith("gradients of the hidden states match")
    assert stages["step_loss"].level == stages["step_weights"].level == "pass", stages
    assert not [check for check in view.checks.values() if check.level == "fail"]


def test_a_resumed_run_ends_with_the_bytes_of_one_that_was_not_stopped(
    kit: Kit, run: RunFolder, tmp_path: Path
) -> None:
    spec = json.loads(run.effective.read_text())["spec"]
    whole, code = carried_out(
        kit,
        tmp_path,
        teacher__path=spec["teacher"]["path"],
        student__config=spec["student"]["config"],
        checkpoint__every=2,
    )
    assert code == 0
    one, other = ((each.student / "model.safetensors").read_bytes() for each in (run, whole))
    assert one == other


def test_the_published_student_is_the_same_in_transformers(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "published"
    assert main(["publish", str(run.path), str(out), "--unevaluated", "--unverified"]) == 0
    assert "no .gguf file" in capsys.readouterr().err
    theirs = LIBRARY.AutoModelForCausalLM.from_pretrained(out).eval()
    ours = open_model(out, device="cpu", precision="fp32")
    tokens_BT = (torch.arange(60).view(2, 30) * 7) % VOCABULARY
    with torch.no_grad():
        assert torch.equal(ours.decoder.logits(tokens_BT), theirs(input_ids=tokens_BT).logits)
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(out)
    text = "def f1(x):\n    return"
    assert tokenizer(text)["input_ids"] == list(ours.tokenizer.encode_documents([text])[0])


@pytest.mark.parametrize("family", ["gpt_neox", "mamba", "gemma2"])
def test_generated_text_is_that_of_whole_forward_passes(
    kit: Kit, family: str, tmp_path: Path
) -> None:
    model = open_model(folder_of(kit, tmp_path / family, family), device="cpu", precision="fp32")
    prompts = [[5, 7, 11, 13], [17, 19]]
    found: dict[int, list[int]] = {0: [], 1: []}
    for one in generate(model.decoder, prompts, max_tokens=6, slots=2):
        found[one.prompt].append(one.token)
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model.decoder(torch.tensor([tokens]))[0, -1].argmax()))
        assert tokens[len(prompt) :] == found[number]


def give_own_head(folder: Path, shift: float = 1.0) -> None:
    """Add a head to the files of a model whose config.json ties it to the embedding."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = next(
        name for name in tensors if re.search(r"(wte|embeddings|embed_tokens)\.weight$", name)
    )
    save_file(tensors | {"lm_head.weight": tensors[embedding] + shift}, file, {"format": "pt"})


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "llama", "gemma2", "bloom"])
def test_a_head_of_its_own_under_tied_embeddings_is_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    how = ModelSection(engine="transformers")
    small = {} if family in OTHERS else GROUPED
    save_other(tmp_path / "model", family, tie_word_embeddings=True, **small)
    give_own_head(tmp_path / "model", shift=0.0)
    assert load_decoder(tmp_path / "model", how=how).config.tie_word_embeddings
    give_own_head(tmp_path / "model")
    with pytest.raises(WeightsError, match=r"lm_head\.weight equal to") as caught:
        load_decoder(tmp_path / "model", how=how)
    assert "embed" in caught.value.message or "wte" in caught.value.message
    assert "tie_word_embeddings to false" in (caught.value.hint or "")


@pytest.mark.usefixtures("trainer_here")
def test_a_check_says_that_a_tied_head_is_another_matrix(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(kit.teacher, tmp_path / "model")
    give_own_head(folder)
    changes = {"student__path": str(folder), "student__config": "", "model__engine": "transformers"}
    assert main(["distill", str(kit.spec(tmp_path, **changes)), "--check"]) == 65
    said = capsys.readouterr()
    assert "lm_head.weight equal to model.embed_tokens.weight" in said.out + said.err
    # As the refusal says, such a model is one without the tie.
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    for engine in ("transformers", "native"):
        assert not load_decoder(folder, how=ModelSection(engine=engine)).config.tie_word_embeddings


def with_unknown_key(kit: Kit, folder: Path) -> Path:
    """A model with a key of RoPE that transformers warns of, and runs without."""
    shutil.copytree(kit.teacher, folder)
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta", 10_000.0), "unheard_of": 3}
    config.write_text(json.dumps(raw | {"rope_parameters": rope}))
    return folder


WITH_STUDENT: dict[str, object] = {
    "student__config": "",
    "model__engine": "transformers",
    "teacher__backend": "none",
    "loss__alpha": 1.0,
}


@pytest.mark.usefixtures("trainer_here")
def test_what_transformers_warns_of_is_in_the_log_and_in_the_check_once(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = WITH_STUDENT | {"student__path": str(with_unknown_key(kit, tmp_path / "model"))}
    found, code = carried_out(kit, tmp_path / "run", **changes)
    assert code == 0
    notes = [one for one in Follower(found).read_all().notes if "unheard_of" in one.text]
    assert [one.level for one in notes] == ["warning"]
    assert notes[0].text.startswith("transformers warns: Unrecognized keys")
    assert main(["distill", str(kit.spec(tmp_path, **changes)), "--check"]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("warning: transformers warns: Unrecognized keys") == 1


def test_what_transformers_warned_of_before_a_refusal_is_in_the_log(
    kit: Kit, tmp_path: Path
) -> None:
    folder = shutil.copytree(kit.teacher, tmp_path / "model")
    give_own_head(folder)
    changes = WITH_STUDENT | {"student__path": str(folder)}
    found, code = carried_out(kit, tmp_path / "run", **changes)
    assert code == 65
    texts = [one.text for one in Follower(found).read_all().notes if one.level == "warning"]
    assert any("will NOT tie them" in text for text in texts), texts


@pytest.mark.filterwarnings("always")
def test_warnings_are_kept_once_and_the_handlers_of_the_process_are_as_before() -> None:
    logger = logging.getLogger("transformers")
    before = logger.level, list(logger.handlers), logger.propagate, warnings.showwarning
    library_warnings()
    with quiet():
        for _ in range(2):
            logging.getLogger("transformers.test").warning("two\nlines of %s", "a test")
            with quiet():
                warnings.warn("of Python, in a test", UserWarning, stacklevel=1)
        logging.getLogger("transformers.test").info("nothing to warn of")
    assert library_warnings() == [
        "transformers warns: two lines of a test",
        "transformers warns: of Python, in a test",
    ]
    assert library_warnings() == []
    assert before == (logger.level, list(logger.handlers), logger.propagate, warnings.showwarning)


def test_several_gpus_and_8_bit_teachers_are_refused_in_one_line(kit: Kit, tmp_path: Path) -> None:
    other = folder_of(kit, tmp_path / "gpt_neox", "gpt_neox")
    for changes, said in (
        ({"compute__gpus": 2, "compute__device": "cuda"}, "compute.gpus"),
        ({"teacher__precision": "fp8"}, "teacher.precision"),
    ):
        spec = kit.spec(tmp_path, teacher__path=str(other), **changes)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(["distill", str(spec), "--check-inputs"])
        assert code == 65, err.getvalue()
        assert said in err.getvalue() and "Traceback" not in err.getvalue()


def test_a_stored_teacher_of_another_family_gives_the_losses_of_one_that_computes(
    kit: Kit, tmp_path: Path
) -> None:
    teacher = folder_of(kit, tmp_path / "gpt2", "gpt2", taught=True)
    settings: dict[str, object] = {"teacher__path": str(teacher), "train__steps": 3}
    store = make_store(kit.spec(tmp_path, **settings), tmp_path / "store")
    assert store.rows
    computing, _ = carried_out(kit, tmp_path / "computing", **settings)
    stored, code = carried_out(
        kit, tmp_path / "stored", **settings, teacher__cache=str(tmp_path / "store")
    )
    assert code == 0
    one, other = (Follower(run).read_all().steps.values("loss") for run in (computing, stored))
    assert one == other and len(one) == 3


def test_logits_that_are_not_of_a_head_are_not_stored_as_hidden_states(
    kit: Kit, tmp_path: Path
) -> None:
    teacher = folder_of(kit, tmp_path / "cohere", "cohere", taught=True, logit_scale=0.5)
    spec = kit.spec(tmp_path, teacher__path=str(teacher))
    with pytest.raises(BadInput, match="top_k or sampled"):
        make_store(spec, tmp_path / "store")
    assert make_store(spec, tmp_path / "few", form="top_k", count=5).rows


def test_the_memory_plan_counts_what_such_a_model_needs_beyond_ours(tmp_path: Path) -> None:
    save_other(tmp_path / "model", "gemma2", vocab_size=VOCABULARY)
    other = read_config(tmp_path / "model")
    spec = spec_of(checks__enabled=True)
    items = {item.name: item.bytes for item in budget_of(spec, other, other).items}
    tokens = spec.train.rows * spec.data.seq_len
    assert items["logits of the student"] == tokens * VOCABULARY * (5 * 2 + 4)
    assert items["logits of the teacher"] == tokens * VOCABULARY * 3 * 2
    plain = {item.name for item in budget_of(spec).items}
    assert "logits of the student" not in plain
