"""`engine init`: a spec that runs as written, from files that were looked at, and nothing where they are wrong."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from engine.plan import data_size
from engine.spec import load_spec
from tests.support.finished_runs import carry_out
from tests.support.kit import Kit, tiny_config
from tests.support.running import engine_here, environment


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return tmp_path


def flags(kit: Kit, **changes: object) -> list[object]:
    given = {"teacher": kit.teacher, "student": kit.student, "data": kit.corpus} | changes
    return [word for name, value in given.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("fresh", [True, False])
def test_the_spec_that_it_writes_is_sound_and_trains(kit: Kit, here: Path, fresh: bool) -> None:
    student = kit.student
    if not fresh:
        config = json.loads(kit.student.read_text())
        student = make_student(here / "student", config, kit)
    done = engine_here("init", *flags(kit, student=student, name="first"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "first.toml\n"
    text = (here / "first.toml").read_text()
    assert len(text.splitlines()) < 25 and "#" in text
    checked = engine_here("distill", "first.toml", "--check-inputs")
    assert checked.returncode == 0, checked.stderr
    sets = ("train.steps=2", "train.rows=2", "eval.rows=2")
    sets += ("compute.device=cpu", "compute.threads=1")
    run, code = carry_out(Path("first.toml"), here / "run", *sets)
    assert code == 0
    assert (run.student / "model.safetensors").is_file()


def test_an_on_policy_spec_trains_on_what_its_student_writes(kit: Kit, here: Path) -> None:
    refused = engine_here("init", *flags(kit), "--on-policy")
    assert refused.returncode == 65 and "found a shape without weights" in refused.stderr
    student = make_student(here / "student", json.loads(kit.student.read_text()), kit)
    done = engine_here("init", *flags(kit, student=student, name="first"), "--on-policy")
    assert done.returncode == 0, done.stderr
    sets = ("train.steps=2", "train.rows=2", "eval.rows=2", "data.seq_len=32")
    sets += ("rollout.max_new_tokens=8", "compute.device=cpu", "compute.threads=1")
    run, code = carry_out(Path("first.toml"), here / "run", *sets)
    assert code == 0
    assert '"kind":"wrote"' in run.events.read_text()


def test_an_adapter_spec_trains_a_frozen_student(kit: Kit, here: Path) -> None:
    refused = engine_here("init", *flags(kit), "--adapter")
    assert refused.returncode == 65 and "expected a trained student" in refused.stderr
    student = make_student(here / "student", json.loads(kit.student.read_text()), kit)
    done = engine_here("init", *flags(kit, student=student, name="first"), "--adapter")
    assert done.returncode == 0, done.stderr
    sets = ("train.steps=2", "train.rows=2", "eval.rows=2", "data.seq_len=32")
    run, code = carry_out(Path("first.toml"), here / "run", *sets, "compute.device=cpu")
    assert code == 0
    assert (run.student / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["conversations", "texts", "pairs"])
def test_conversations_are_packed_whole_and_texts_as_a_stream(here: Path, kind: str) -> None:
    demo = Path(engine.__file__).parent / "demo"
    lines = (demo / "chats.jsonl").read_text().splitlines()[:300]
    if kind != "conversations":
        said = [json.loads(line)["messages"] for line in lines]
        keys = ("prompt", "completion") if kind == "pairs" else ("text", "id")
        lines = [json.dumps(dict(zip(keys, [json.dumps(m), "x y"], strict=True))) for m in said]
    (here / "data.jsonl").write_text("\n".join(lines))
    words = ("--teacher", demo / "chat", "--student", demo / "chat" / "student.json")
    done = engine_here("init", *words, "--data", "data.jsonl", "--name", "first")
    assert done.returncode == 0, done.stderr
    spec, _ = load_spec(here / "first.toml")
    assert spec.data.packing == ("stream" if kind == "texts" else "documents")
    cut = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "cut" in line]
    assert not cut
    stream = ("--set", "data.packing=stream", "--set", "data.seq_len=64")
    checked = engine_here("distill", "first.toml", "--check-inputs", *stream)
    assert ("% of the labels follow a cut" in checked.stderr) == (kind != "texts")
    # 1,000 steps over 70 KiB.
    assert "after more than 10 a model mostly memorises it" in checked.stderr


def make_student(folder: Path, config: dict[str, object], kit: Kit) -> Path:
    import torch

    from engine.models.config import ModelConfig
    from engine.models.load import new_decoder, save_decoder

    decoder = new_decoder(ModelConfig.from_dict(config, "student"), seed=3)
    save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    return folder


def test_json_has_the_path_and_what_was_found(kit: Kit, here: Path) -> None:
    done = engine_here("init", *flags(kit), "--json")
    found = json.loads(done.stdout)
    assert found["path"] == str(here / "kd.toml")
    assert (found["teacher"]["family"], found["teacher"]["fresh"]) == ("qwen2", False)
    assert (found["student"]["family"], found["student"]["fresh"]) == ("qwen2", True)
    assert found["teacher"]["parameters"] > found["student"]["parameters"] > 20_000
    assert found["tokenizer"]["vocabulary"] <= 300
    data = found["data"]
    assert (data["documents"], data["exact"]) == (40, True)
    assert data["text_bytes"] == sum(path.stat().st_size for path in kit.corpus.iterdir())
    assert data["text_bytes"] > data["tokens"] > 1000


def test_a_file_that_exists_stays_without_force(kit: Kit, here: Path) -> None:
    (here / "kd.toml").write_text("mine")
    refused = engine_here("init", *flags(kit))
    assert refused.returncode == 65 and "expected a new file" in refused.stderr
    assert (here / "kd.toml").read_text() == "mine"
    assert engine_here("init", *flags(kit), "--force").returncode == 0
    assert load_spec(here / "kd.toml")[0].teacher.path == str(kit.teacher)


@pytest.mark.parametrize("missing", ["teacher", "student", "data"])
def test_without_a_terminal_a_missing_flag_is_named(kit: Kit, here: Path, missing: str) -> None:
    words = flags(kit)
    at = words.index(f"--{missing}")
    done = engine_here("init", *words[:at], *words[at + 2 :])
    assert done.returncode == 64
    assert f"expected --{missing}, found none" in done.stderr
    assert not list(here.iterdir())


def test_on_a_terminal_it_asks_until_it_can_use_the_answer(
    kit: Kit, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers = ["", "/nowhere", str(kit.teacher), str(kit.student), "", str(kit.corpus)]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(answers) + "\n"))
    done = engine_here("init")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "kd.toml\n"
    assert "found nothing at '/nowhere'" in done.stderr
    assert done.stderr.count("data (folder, file, glob, or python-stdlib): ") == 2
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert "expected --name, found no answer" in engine_here("init").stderr


def test_a_file_that_is_not_a_model_is_told_at_once(kit: Kit, here: Path) -> None:
    text = here / "notes.txt"
    text.write_text("not a model")
    pickled = here / "model.bin"
    pickled.write_bytes(b"\x80\x02}q\x00." * 20)
    other = here / "other.json"
    other.write_text(json.dumps(tiny_config(model_type="of_tomorrow")))
    for change, says in (
        ({"teacher": text}, "a file that begins with b'not a mo'"),
        ({"teacher": pickled}, "a pickle can run code"),
        ({"teacher": kit.student}, "--teacher: "),
        ({"student": other}, "of_tomorrow"),
        ({"student": text}, "a file that begins with b'not a mo'"),
        ({"student": kit.teacher}, "found the same values"),
        ({"data": here / "nothing"}, "--data: expected a file or folder, found nothing at"),
        ({"data": kit.teacher}, "found"),
    ):
        done = engine_here("init", *flags(kit, **change))
        assert done.returncode == 65, (change, done.stderr)
        assert says in done.stderr and "Traceback" not in done.stderr
        assert not (here / "kd.toml").exists()


def test_one_short_text_file_still_makes_a_spec_or_says_why_not(kit: Kit, here: Path) -> None:
    text = here / "text.txt"
    shutil.copyfile(kit.corpus / "part_00.py", text)
    one = engine_here("init", *flags(kit, data=text))
    assert one.returncode == 65
    assert "expected at least one held-out document" in one.stderr
    text.write_text("".join(path.read_text() + "\n" for path in sorted(kit.corpus.iterdir())))
    few = engine_here("init", *flags(kit, data=text))
    assert few.returncode == 0, few.stderr
    assert engine_here("distill", "kd.toml", "--check-inputs").returncode == 0


def test_a_path_with_quotes_and_a_home_folder_is_written_as_given(
    kit: Kit, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    shutil.copytree(kit.teacher, here / 'the "big" one')
    done = engine_here("init", *flags(kit, teacher='~/the "big" one'))
    assert done.returncode == 0, done.stderr
    assert load_spec(here / "kd.toml")[0].teacher.path == str(here / 'the "big" one')


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "new\nline"])
def test_a_name_that_is_no_file_name_is_refused(kit: Kit, name: str) -> None:
    assert engine_here("init", *flags(kit, name=name)).returncode == 64


def test_it_loads_no_torch(kit: Kit, here: Path) -> None:
    program = (
        "import sys; from engine.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = [sys.executable, "-c", program, "init", *map(str, flags(kit))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=here, env=environment())
    assert done.returncode == 0, done.stderr


def test_the_check_measures_a_small_corpus_and_estimates_a_large_one(
    kit: Kit, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_size, "SAMPLED_BYTES", 1 << 18)
    assert engine_here("init", *flags(kit)).returncode == 0
    small = json.loads(engine_here("distill", "kd.toml", "--check-inputs", "--json").stdout)["data"]
    assert small["exact"] and small["documents"] == 40
    line = (kit.corpus / "part_00.py").read_text()
    large = here / "large.jsonl"
    repeats = (3 << 17) // len(line)
    large.write_text("".join(json.dumps({"text": f"# {i}\n{line}"}) + "\n" for i in range(repeats)))
    words = ("--check-inputs", "--json", "--set", f"data.corpus={large}")
    found = json.loads(engine_here("distill", "kd.toml", *words).stdout)["data"]
    assert not found["exact"] and found["documents"] == repeats
    from engine.formats.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(str(kit.teacher))
    texts = [f"# {i}\n{line}" for i in range(repeats)]
    exact = sum(map(len, tokenizer.encode_documents(texts))) + repeats
    assert found["tokens"] == pytest.approx(exact, rel=0.02)


def test_a_corpus_too_small_for_one_row_is_found_by_the_check(kit: Kit, here: Path) -> None:
    assert engine_here("init", *flags(kit)).returncode == 0
    few = here / "few"
    few.mkdir()
    for path in sorted(kit.corpus.iterdir())[:8]:
        (few / path.name).write_text("x = 1\n")
        (few / f"{path.stem}_b.py").write_text(f"y = {path.stem!r}\n")
    sets = ("--set", f"data.corpus={few}", "--set", "data.heldout_fraction=0.5")
    done = engine_here("distill", "kd.toml", "--check-inputs", *sets)
    assert done.returncode == 65
    assert "expected at least 128 tokens, which is one row" in done.stderr
