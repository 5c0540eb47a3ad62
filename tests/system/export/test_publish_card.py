"""What a card says of licences, files and data, read as somebody who has nothing but the card."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.evaluate.model import weights_sha256
from engine.export.licence import Base, bases_of, inherited, licence_files
from engine.export.publish import Wanted, publish
from engine.export.required_evidence import read_evaluation
from engine.formats.open import open_weights
from engine.log.folder import RunFolder
from engine.receipts.context import view_of
from engine.units import format_count
from tests.support.card_oracle import contradicts_the_files
from tests.support.finished_runs import finish, results_file
from tests.support.kit import Kit


def model(folder: Path, *lines: str, text: str | None = None) -> str:
    folder.mkdir()
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", "words"]))
    if text is not None:
        (folder / "LICENSE").write_text(text)
    return str(folder)


def bases(student: str, teacher: str) -> tuple[Base, ...]:
    return bases_of({"student": {"path": student}, "teacher": {"path": teacher}}, {})


def texts(found: tuple[Base, ...], given: str | None = None) -> dict[str, str]:
    files = licence_files(found, inherited(found, given))
    return {name: f"{one.licence_file.read_text()} of {one.role}" for name, one in files.items()}  # type: ignore[union-attr]


def test_a_text_of_a_licence_is_that_of_the_base_that_has_it(tmp_path: Path) -> None:
    silent = model(tmp_path / "s", "license: apache-2.0")
    having = model(tmp_path / "t", "license: Apache-2.0", text="Apache")
    same = model(tmp_path / "u", "license: apache-2.0", text="Apache")
    named = model(tmp_path / "v", "license: apache-2.0", text="Apache, by others")
    mit = model(tmp_path / "m", "license: mit", text="MIT")
    assert texts(bases(silent, having)) == {"LICENSE": "Apache of teacher"}
    assert texts(bases(same, having)) == {"LICENSE": "Apache of student base"}
    both = {
        "LICENSE-student-base": "Apache, by others of student base",
        "LICENSE-teacher": "Apache of teacher",
    }
    assert texts(bases(named, having)) == both
    assert texts(bases(mit, having)) == {
        "LICENSE-student-base": "MIT of student base",
        "LICENSE-teacher": "Apache of teacher",
    }
    assert texts(bases(silent, silent)) == texts(bases(mit, mit), given="bsd-3-clause") == {}


def test_a_licence_that_the_hub_has_no_identifier_for_keeps_its_name(tmp_path: Path) -> None:
    research = model(tmp_path / "r", "license: other", "license_name: qwen-research")
    community = model(tmp_path / "c", "license: other", "license_name: llama3.2")
    found = inherited(bases(research, research), None)
    assert (found.identifier, found.name) == ("other", "qwen-research")
    differing = inherited(bases(research, community), None)
    assert differing.identifier == "other" and differing.name is None
    assert "qwen-research" in differing.why and "llama3.2" in differing.why


@pytest.fixture(scope="module")
def whole(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finish(kit, tmp_path_factory.mktemp("card"))


def card(run: RunFolder, folder: Path, **how: Any) -> str:
    publish(
        run,
        Wanted(folder=folder, name=folder.name, unverified=True, apr="none", **how),
        lambda text: None,
    )
    return (folder / "README.md").read_text()


def test_a_card_says_which_text_was_learnt_and_where_the_licence_is(
    whole: RunFolder, kit: Kit, tmp_path: Path
) -> None:
    said = card(whole, tmp_path / "tiny", licence="mit")
    documents = f"of `{kit.corpus.name}`"
    assert documents in said and str(kit.corpus) not in said
    assert "The licence's text is not in this folder" in said
    assert re.search(r"^license: \"mit\"$", said, re.MULTILINE)


def test_a_file_without_a_tensor_of_the_type_that_it_is_named_for_says_why(
    whole: RunFolder, tmp_path: Path
) -> None:
    """Rows of the tiny student are no multiple of 256 values."""
    files = card(whole, tmp_path / "tiny").split("## Files")[1]
    assert "no row fills a block of Q4_K" in files
    files = card(whole, tmp_path / "full", gguf="f32").split("## Files")[1]
    assert "no row fills" not in files


@pytest.mark.parametrize(
    "given", [["--license", ""], ["--license", "My Own"], ["--base-model", "a b"]]
)
def test_a_licence_or_a_base_that_the_hub_would_refuse_is_refused_here(
    given: list[str], whole: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(whole.path), str(tmp_path / "tiny"), *given]) == 64
    assert given[0] in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_the_front_matter_is_what_yaml_reads_as_it_was_meant(
    whole: RunFolder, tmp_path: Path
) -> None:
    import yaml

    front = card(whole, tmp_path / "tiny", licence="mit", base_models=("org/base",)).split("---")[1]
    read = yaml.safe_load(front)
    assert read["license"] == "mit" and read["base_model"] == ["org/base"]
    (index,) = read["model-index"]
    assert index["name"] == "tiny" and json.dumps(index["results"])
    for one in index["results"]:
        assert all(isinstance(metric["value"], float) for metric in one["metrics"])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ('{"temperature": 0.0, "top_k": 0, "top_p": 1.0}', "greedy"),
        ('{"temperature": 0.8, "top_k": 0, "top_p": 0.95}', "at temperature 0.8, top_p 0.95"),
        ("{}", "not recorded"),
    ],
)
def test_a_share_of_programs_says_how_they_were_drawn(
    sampling: str, words: str, whole: RunFolder, tmp_path: Path
) -> None:
    path = results_file(tmp_path / "r.jsonl", whole, right=3, judged=10, problems=10)
    path.write_text(
        path.read_text().replace('{"samples": 1}', f'{{"samples": 1, "sampling": {sampling}}}')
    )
    assert words in read_evaluation(path, weights_sha256(whole.student)).detail


def test_what_a_card_says_of_its_files_and_its_bases_is_held_against_them(
    whole: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))
    folder = Path(shutil.copytree(run.student, tmp_path / "student"))
    with open_weights(folder) as weights:
        parameters = sum(math.prod(one.shape) for one in weights.tensors.values())
    size = parameters * 4 + 1000
    (folder / "s.apr").write_bytes(bytes(size))
    teacher = view_of(run).models["teacher"].sha256
    right = (
        f"A qwen2 model of {format_count(parameters)} parameters (2 layers).\n"
        f"- `teacher` (teacher): licence mit (its README.md), tensors sha256 `{teacher}`\n"
        "| s.apr | apr in f32: 38 F32; 32.00 bits per weight |\n"
    )
    assert contradicts_the_files(right, folder, run) == ""
    for old, new, words in (
        (f"{format_count(parameters)} parameters", "9.9M parameters", "9.9M parameters, where"),
        ("32.00 bits", "64.00 bits", f"64.00 bits per weight in s.apr, which has {size:,} bytes"),
        (teacher, "0" * 64, "the teacher has the hash 000000000000"),
    ):
        assert words in contradicts_the_files(right.replace(old, new), folder, run)
    said = (
        "Licence of this model: **mit** (inherited: mit of `teacher` (teacher)).\n"
        "The licence's text is not in this folder: no base model has it in its folder.\n"
    )
    assert contradicts_the_files(right + said, folder, run) == ""
    base = tmp_path / "base"
    base.mkdir()
    (base / "LICENSE").write_text("a licence")
    effective = run.read_effective()
    effective["spec"]["teacher"]["path"] = str(base)
    run.effective.write_text(json.dumps(effective))
    assert "no text of a licence" in contradicts_the_files(right + said, folder, run)
    given = said.replace("(inherited: mit of `teacher` (teacher))", "(given)")
    assert contradicts_the_files(right + given, folder, run) == ""
