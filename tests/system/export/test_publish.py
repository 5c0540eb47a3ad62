"""Publishing: what a run has to show before its student is given to others, what the folder then holds,
and that it appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.demo as demo_package
from engine.cli.main import main
from engine.errors import BadInput
from engine.evaluate.model import open_model
from engine.evaluate.statistics import wilson
from engine.export.card import Card
from engine.export.card import _training_lines as training_lines
from engine.export.licence import bases_of, inherited
from engine.export.manifest import MANIFEST, check_manifest
from engine.export.publish import Published, Wanted, publish
from engine.export.required_evidence import examine, heldout_of_the_run
from engine.formats.open import open_weights
from engine.generation.complete import end_ids
from engine.generation.generate import generate
from engine.log.folder import RunFolder
from engine.verdict import Level, Verdict
from engine.verify.kept_outcome import NAME as OUTCOME
from engine.verify.kept_outcome import digest_log, keep_outcome
from tests.support.card_oracle import contradicts_the_evidence, contradicts_the_files
from tests.support.finished_runs import finish, results_file
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def whole(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finish(kit, tmp_path_factory.mktemp("publish"))


@pytest.fixture
def run(whole: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))


def published(run: RunFolder, folder: Path, **how: Any) -> Published:
    wanted = Wanted(folder=folder, name="tiny", unverified=True)
    done = publish(run, replace(wanted, **how), lambda text: None)
    assert wrong_of_the_card(done) == ""
    return done


def wrong_of_the_card(done: Published) -> str:
    card = (done.folder / "README.md").read_text()
    return contradicts_the_evidence(card, done.proof) or contradicts_the_files(
        card, done.folder, done.proof.run
    )


def without_evaluations(run: RunFolder) -> None:
    """As of a run that was killed before it wrote a receipt, and that evaluated nothing."""
    run.receipt.unlink()
    records = [json.loads(line) for line in run.events.read_text().splitlines()]
    kept = [record for record in records if record["kind"] not in ("eval", "run_finished")]
    lines = [json.dumps(record | {"seq": seq}) for seq, record in enumerate(kept)]
    run.events.write_text("\n".join(lines) + "\n")


# The demo's student is made by the same commands from the same kind of run.
@pytest.mark.soak
def test_a_published_student_loads_in_transformers_and_gives_the_same_text(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out" / "tiny"
    assert main(["publish", str(run.path), str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    ways = {way["id"]: way for way in printed["verification"]["ways"]}
    sure = ["files", "engine", "transformers", "gguf tiny-Q4_K_M.gguf"]
    assert {name: ways[name]["level"] for name in sure} == dict.fromkeys(sure, "pass"), ways
    assert ways["transformers"]["numbers"]["steps"] == 50
    # Where llama.cpp is not installed, that is what is said.
    for way in (ways["llama float"], ways["llama tiny-Q4_K_M.gguf"]):
        assert way["level"] == "pass" or "is not installed" in way["reason"]

    # The text that both gave is the one that the run's own student gives.
    model = open_model(run.path, device="cpu", precision="fp32")
    ids = model.tokenizer.encode_documents([printed["verification"]["prompt"]])[0]
    found = generate(model.decoder, [[int(one) for one in ids]], max_tokens=50, slots=1)
    text = model.tokenizer.decode([one.token for one in found])
    assert text and printed["verification"]["text"] == text


def test_the_folder_holds_the_run_and_every_figure_of_its_card(
    run: RunFolder, tmp_path: Path
) -> None:
    results = results_file(tmp_path / "r.jsonl", run, right=3, judged=10, problems=10)
    done = published(run, tmp_path / "tiny", evaluations=(results,))
    receipt = run.read_receipt()
    assert receipt is not None
    names = {path.name for path in done.folder.iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "tiny.apr", "tiny-Q4_K_M.gguf"),
        *("receipt.json", "spec.toml", "effective.json", "data_receipt.json", MANIFEST),
        "evaluation_humaneval.jsonl",
    }
    for name, recorded in receipt["student_files"].items():
        manifest = json.loads((done.folder / MANIFEST).read_text())["files"]
        assert manifest[name] == recorded
    model = open_model(done.folder, device="cpu", precision="fp32")
    ends = json.loads((done.folder / "generation_config.json").read_text())["eos_token_id"]
    assert (ends,) == end_ids(model.decoder, model.tokenizer)
    assert (done.folder / "receipt.json").read_bytes() == run.receipt.read_bytes()
    data = json.loads((done.folder / "data_receipt.json").read_text())
    assert data["order_sha256"] == receipt["data"]["order_sha256"]
    assert check_manifest(done.folder).level == Level.PASS
    card = (done.folder / "README.md").read_text()
    for loss in receipt["heldout_loss_nats"].values():
        assert f"{loss:.4f}" in card
    interval = wilson(3, 10)
    assert interval is not None
    assert f"30.0% [{interval.low:.1%}, {interval.high:.1%}]" in card
    assert "**Not verified**" in card and "Unevaluated" not in card
    front = card.split("---")[1]
    (index,) = json.loads(re.findall(r"model-index: (.*)", front)[0])
    assert {one["dataset"]["type"] for one in index["results"]} == {"heldout", "openai_humaneval"}
    with open_weights(done.folder / "tiny-Q4_K_M.gguf") as weights:
        assert weights.metadata["general.name"] == "tiny"


def test_what_is_missing_is_named_with_the_command_that_makes_it(
    run: RunFolder, tmp_path: Path
) -> None:
    without_evaluations(run)
    with pytest.raises(BadInput) as caught:
        published(run, tmp_path / "tiny")
    said = caught.value.message
    assert "a completed run" in said and "a receipt of the run" in said
    assert f"engine distill --resume {run.path}" in said
    assert f"engine eval ppl {run.path} --data TEXT --json" in said
    assert not (tmp_path / "tiny").exists()
    done = published(run, tmp_path / "tiny", unevaluated=True)
    card = (done.folder / "README.md").read_text()
    assert "> **Unevaluated.**" in card and "- an evaluation of the student" in card
    assert '- "unevaluated"' in card and "None: nothing was measured." in card
    assert "model-index" not in card


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def another_receipt(run: RunFolder, **changes: object) -> None:
    receipt = run.read_receipt()
    assert receipt is not None
    run.receipt.write_text(json.dumps(receipt | changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: flipped(run.student / "model.safetensors"), "sha256 of model.safetensors"),
        (lambda run: (run.student / "merges.txt").write_text("x"), "merges.txt is not in the rec"),
        (lambda run: another_receipt(run, steps=7), "sha256 of receipt.json, as logged"),
    ],
)
def test_what_contradicts_is_refused_whatever_is_asked(
    change: Any, words: str, run: RunFolder, tmp_path: Path
) -> None:
    change(run)
    with pytest.raises(BadInput, match=re.escape(words)):
        published(run, tmp_path / "tiny", unevaluated=True)
    assert not (tmp_path / "tiny").exists()


def test_an_evaluation_of_other_weights_or_one_that_is_not_finished_is_refused(
    run: RunFolder, tmp_path: Path
) -> None:
    half = results_file(tmp_path / "half.jsonl", run, right=3, judged=4, problems=10)
    with pytest.raises(BadInput, match="6 of 10 programs without one"):
        examine(run, [half])
    other = results_file(tmp_path / "other.jsonl", run, right=3, judged=10, problems=10)
    about, *lines = other.read_text().splitlines()
    record = json.loads(about) | {"weights_sha256": "0" * 64}
    other.write_text("\n".join([json.dumps(record), *lines]) + "\n")
    with pytest.raises(BadInput, match="expected an evaluation of these weights"):
        examine(run, [other])
    (tmp_path / "notes.txt").write_text("pass@1 is 99 %\n")
    with pytest.raises(BadInput, match="results of `engine eval"):
        examine(run, [tmp_path / "notes.txt"])


def test_perplexity_as_it_was_printed_is_evidence(
    run: RunFolder, kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("part_00.py", "part_01.py"):
        shutil.copyfile(kit.corpus / name, texts / name)
    assert main(["eval", "ppl", str(run.path), "--data", str(texts), "--json"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "ppl.json").write_text(printed)
    without_evaluations(run)
    done = examine(run, [tmp_path / "ppl.json"])
    (found,) = done.evaluations
    assert found.metrics[0].value == json.loads(printed)["loss"]["value"]
    assert {one.what for one in done.missing} == {
        "a completed run (it is vanished)",
        "a receipt of the run",
    }


def test_a_folder_that_is_there_is_not_written_to(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    with pytest.raises(BadInput, match="expected a new path"):
        published(run, tmp_path / "tiny")
    assert not list((tmp_path / "tiny").iterdir())


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (("engine.export.card.math", SimpleNamespace(exp=lambda loss: 2**loss)), "a perplexity of"),
        (
            (
                "engine.export.required_evidence.heldout_of_the_run",
                lambda *given: spoilt_evaluation(*given),
            ),
            "held-out tokens, where",
        ),
        (
            ("engine.export.card._model_index", lambda card: with_the_teacher(card)),
            "model-index a loss",
        ),
        (("engine.export.card._model_index", lambda card: []), "0 times the loss of the student"),
        (
            ("engine.export.card._training_lines", lambda card: swapped(training_lines(card))),
            "loss: 0.7 cross entropy",
        ),
    ],
)
def test_other_figures_of_a_card_than_those_of_the_log_are_seen(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: tuple[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(*planted)
    wanted = Wanted(folder=tmp_path / "tiny", name="tiny", unverified=True, unevaluated=True)
    assert words in wrong_of_the_card(publish(run, wanted, lambda text: None))


def with_the_teacher(card: Card) -> Any:
    metrics = [
        {"type": metric.name, "value": round(metric.value, 6)}
        for one in card.proof.evaluations
        for metric in one.metrics
    ]
    name = card.proof.evaluations[0].title
    return [{"dataset": {"name": name}, "metrics": metrics}]


def swapped(lines: list[str]) -> list[str]:
    return [line.replace("0.3 cross entropy + 0.7", "0.7 cross entropy + 0.3") for line in lines]


def spoilt_evaluation(receipt: Any, view: Any) -> Any:
    exact = heldout_of_the_run(receipt, view)
    assert exact is not None
    return replace(exact, detail=f"{sum(e.labelled or 0 for e in view.evals):,} tokens, nats")


def test_a_publication_that_fails_leaves_nothing(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.export.publish.write_manifest", full)
    with pytest.raises(BadInput, match="No space left"):
        published(run, tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_files_are_left_out_or_of_another_type_when_asked(run: RunFolder, tmp_path: Path) -> None:
    done = published(run, tmp_path / "tiny", gguf="none", apr="bf16")
    made = {path.name for path in done.folder.iterdir() if path.suffix in (".gguf", ".apr")}
    assert made == {"tiny-BF16.apr"}


def keep(run: RunFolder, verdict: Verdict, steps: int) -> str:
    """Keep an outcome of `engine verify`; returns its day."""
    log = digest_log(run)
    assert log is not None
    return keep_outcome(run, log, verdict, steps, "").at[:10]


def replay_in(folder: Path) -> list[str]:
    """The lines of a card about the replay."""
    lines = (folder / "README.md").read_text().splitlines()
    start = "- replay of the run (`engine verify`): "
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def test_the_card_says_whether_the_run_was_verified(run: RunFolder, tmp_path: Path) -> None:
    said: list[str] = []
    wanted = Wanted(folder=tmp_path / "a", name="tiny", unverified=True, gguf="none", apr="none")
    publish(run, wanted, said.append)
    assert replay_in(tmp_path / "a") == ["not verified"]
    assert not (tmp_path / "a" / OUTCOME).exists()
    assert f"replay of the run: not verified; engine verify {run.path}" in said

    day = keep(run, Verdict(Level.PASS, "why"), 6)
    said.clear()
    publish(run, replace(wanted, folder=tmp_path / "b"), said.append)
    assert replay_in(tmp_path / "b") == [f"pass, 6 steps to the bit, {day}"]
    assert (tmp_path / "b" / OUTCOME).read_bytes() == (run.path / OUTCOME).read_bytes()
    assert f"replay of the run: pass, 6 steps to the bit, {day}" in said

    with run.events.open("ab") as log:
        log.write(b'{"a line": "that is not whole"')
    publish(run, replace(wanted, folder=tmp_path / "c"), said.append)
    stale = f"stale, the log has changed since {day}"
    assert replay_in(tmp_path / "c") == [stale] and not (tmp_path / "c" / OUTCOME).exists()
    assert f"replay of the run: {stale}; engine verify {run.path}" in said


def test_a_run_whose_replay_differs_is_refused_unless_published_unevaluated(
    run: RunFolder, tmp_path: Path
) -> None:
    day = keep(run, Verdict(Level.FAIL, "steps: step 3: loss"), 3)
    with pytest.raises(BadInput, match="a run whose replay agrees with its log") as caught:
        published(run, tmp_path / "tiny")
    assert f"fail: steps: step 3: loss, {day}" in caught.value.message
    assert f"make it: engine verify {run.path}" in caught.value.message
    assert not (tmp_path / "tiny").exists()
    done = published(run, tmp_path / "tiny", unevaluated=True)
    assert replay_in(done.folder) == [f"fail: steps: step 3: loss, {day}"]
    assert "> **Unevaluated.**" in (done.folder / "README.md").read_text()


def readme(folder: Path, licence: str) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text(f"---\nlicense: {licence}\nlanguage: en\n---\nmit\n")
    (folder / "LICENSE").write_text("the words of it")
    return folder


def test_a_licence_is_inherited_where_the_bases_say_one_and_unknown_else(
    run: RunFolder, tmp_path: Path
) -> None:
    student, teacher = readme(tmp_path / "s", "apache-2.0"), readme(tmp_path / "t", "'apache-2.0'")
    silent = tmp_path / "silent"
    silent.mkdir()

    def licence(first: Path | str, second: Path | str, given: str | None = None) -> str:
        spec = {"student": {"path": str(first)}, "teacher": {"path": str(second)}}
        return inherited(bases_of(spec, {}), given).identifier

    assert licence(student, teacher) == licence("", teacher) == "apache-2.0"
    assert licence(student, silent) == licence(silent, teacher) == licence("", "") == "unknown"
    assert licence(student, readme(tmp_path / "m", "mit")) == "other"
    assert licence(silent, "", given="mit") == "mit"
    assert licence(tmp_path / "gone", "") == "unknown"
    done = published(run, tmp_path / "tiny")
    card = (done.folder / "README.md").read_text()
    assert 'license: "unknown"' in card and "The terms of use are unknown" in card


def test_a_student_of_the_demos_teacher_inherits_its_licence() -> None:
    demo = Path(demo_package.__file__).parent
    spec = {"student": {"path": ""}, "teacher": {"path": str(demo / "teacher")}}
    licence = inherited(bases_of(spec, {}), None)
    assert licence.identifier == "apache-2.0" and "inherited" in licence.why
    # Whose text it learnt from is said beside it.
    assert "PSF-2.0" in (demo / "teacher" / "README.md").read_text()


def test_a_base_in_a_cache_of_the_hub_has_its_name_there(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots"
    folder.mkdir(parents=True)
    readme(folder / "abc", "apache-2.0")
    (base,) = bases_of({"student": {"path": str(folder / "abc")}}, {"student_start": "0" * 64})
    assert (base.name, base.on_hub, base.sha256) == ("Qwen/Qwen2.5-0.5B", True, "0" * 64)


def test_a_folder_that_was_published_is_what_its_manifest_says(
    run: RunFolder, tmp_path: Path
) -> None:
    folder = published(run, tmp_path / "tiny").folder
    (folder / ".gitattributes").write_text("*.gguf filter=lfs\n")
    assert check_manifest(folder).level == Level.PASS
    (folder / "notes.md").write_text("added")
    assert check_manifest(folder).level == Level.UNKNOWN
    (folder / "notes.md").unlink()
    (folder / "tokenizer.json").unlink()
    assert check_manifest(folder).reason == "tokenizer.json is missing"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN"], "expected RUN and DIR, or --verify DIR"),
        (["RUN", "x", "--verify", "y"], "expected no RUN as well"),
        (["RUN", "x", "--name", "../up"], "expected letters, digits"),
    ],
)
def test_a_command_line_that_is_wrong_exits_64(
    arguments: list[str], words: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run.path) if one == "RUN" else one for one in arguments]
    assert main(["publish", *given]) == 64
    assert words in capsys.readouterr().err
