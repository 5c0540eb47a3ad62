"""Every input has a limit: more costs one line and exit 65, and neither minutes nor memory."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import io
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.demo
from engine import limits
from engine.cli.main import build_parser, main
from engine.crash import run_command
from engine.data.sources import Piece, list_pieces
from engine.spec import options
from engine.spec.sections import RunSpec, section_type
from tests.support.perf import within

pytestmark = pytest.mark.perf
Said = tuple[int, list[str]]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Said:
    """Exit code and lines on stderr of a command that takes seconds and not more."""
    capsys.readouterr()
    began = time.monotonic()
    code = main([str(one) for one in arguments])
    within(time.monotonic() - began, 40)
    return code, capsys.readouterr().err.splitlines()


def test_every_number_of_a_spec_has_two_ends() -> None:
    for section in dataclasses.fields(RunSpec):
        for field in dataclasses.fields(section_type(section.name)):
            if type(field.default) in (int, float):
                meta = field.metadata
                assert meta["low"] is not None or meta["above"] is not None, field.name
                assert meta["high"] is not None or meta["most"] is not None, field.name


NUMBERS = [o.key for o in options() if o.type_name in ("int", "float")]


@pytest.mark.parametrize(
    "value", ["7" * 39, "-4611686018427387905", "7" * 5000, "0x" + "f" * 3000], ids=lambda v: v[:6]
)
def test_each_number_far_beyond_its_use_is_refused_in_a_line(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(
        capsys, "spec", *(word for key in NUMBERS for word in ("--set", f"{key}={value}"))
    )
    assert code == 65, (value, lines)
    for key in NUMBERS:
        about = [line for line in lines if f"--set {key}: " in line]
        assert len(about) == 1 and len(about[0]) < 300, (key, lines)


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nsteps = " + "[" * 3000,
        "[train]\nsteps = " + "[\n" * 3000 + "]\n" * 3000,
        "[train]\nsteps = " + "[" * 12 + "]" * 12,
        "train = " + "{a=" * 2000,
        "[train]\nsteps = " + "9" * 5001,
        "[train]\nsteps = 0b" + "1" * 9000,
        '[run]\nname = "a\\u0000b"',
        '[student]\nconfig = "a\\u0000b"',
        '[data]\ncorpus = "' + "x" * 15000 + '"',
        '[teacher]\npath = "~nobody-has-this-name/x"',
        "#\n" * 200000,
        '"' + "k" * 300 + '" = 1',
        '"a\\nb\\u001b[31m" = 1',
        "[[train]]\n" * 500,
        "train = 1979-05-27T07:32:00Z",
    ],
    ids=lambda text: text[:24].strip() or "space",
)
def test_a_spec_beyond_the_limits_is_refused_in_lines(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "kd.toml"
    spec.write_text(text)
    code, lines = run(capsys, "distill", spec, "--check")
    assert code == 65 and 1 <= len(lines) <= 8, lines
    assert all(len(line) < 500 and line.isprintable() for line in lines), lines


@pytest.mark.parametrize(
    "argument",
    [
        "train.steps=" + "[" * 3000,
        "train.steps=" + "[" * 20 + "]" * 20,
        "train.steps=" + "{a=" * 1000,
        "train.steps=" + "8" * 4900,
        "k" * 5000 + "=1",
        "data.corpus=" + "y" * 100_000,
        "data.corpus=" + "y" * 300,
        'data.corpus="\\u0000"',
        "train.rows=4611686018427387904",
        "no equals " + "x" * 9000,
        "student.path=~nobody-has-this-name",
    ],
    ids=lambda text: text[:24],
)
def test_a_set_beyond_the_limits_is_refused_in_lines(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(capsys, "spec", "--set", argument)
    assert code == 65 and 1 <= len(lines) <= 3, lines
    assert all(len(line) < 500 for line in lines)


def test_a_set_sets_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, "spec", "--set", "train.steps=3\nlr = 7")
    assert code == 65 and any("train.steps: expected a number" in line for line in lines), lines


def test_a_batch_that_no_memory_holds_is_refused_by_its_product(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = ["--set", "train.rows=60000", "--set", "data.seq_len=1000000"]
    code, lines = run(capsys, "spec", *sets)
    assert code == 65 and any("train.rows x data.seq_len" in line for line in lines), lines


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "sparse", "loop"])
def test_only_a_regular_file_is_read_as_a_spec(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kd.toml"
    special(path, kind)
    code, lines = run(capsys, "distill", path, "--check")
    assert code == 65 and len(lines) == 1, lines


def special(path: Path, kind: str) -> None:
    """Something at `path` that is not a file to read."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 42)


CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def config_refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said of a student whose config.json is `text`."""
    (folder / "config.json").write_text(text)
    (folder / "kd.toml").write_text(
        '[student]\nconfig = "config.json"\n[loss]\nalpha = 1.0\n[data]\nseq_len = 16\n'
    )
    code, lines = run(capsys, "distill", folder / "kd.toml", "--check", "--out", folder / "run")
    assert code == 65 and not (folder / "run").exists(), lines
    return lines


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1_000_000_000},
        {"num_hidden_layers": 2**70},
        {"vocab_size": 2**40},
        {"num_attention_heads": 2**40, "hidden_size": 2**40, "num_key_value_heads": 2**40},
        {"hidden_size": -(10**3000)},
        {"intermediate_size": 10**4000},
        {"max_position_embeddings": 2**62},
        {"head_dim": 2**33},
        {"eos_token_id": list(range(5000))},
        {"bos_token_id": 10**4000},
        {"rope_theta": 10**4000},
        {
            "num_hidden_layers": 64,
            "hidden_size": 1 << 18,
            "intermediate_size": 1 << 20,
            "vocab_size": 1 << 24,
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_count_of_a_model_beyond_its_limit_is_refused_before_a_list_is_as_long(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = config_refused(tmp_path, json.dumps(CONFIG | change), capsys)
    assert all(len(line) < 600 for line in lines), lines


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 50_000,
        '{"vocab_size": ' + "1" * 5000 + "}",
        "[]",
        "",
        '{"x": "' + "y" * 5_000_000 + '"}',
    ],
    ids=["lists", "tables", "digits", "list", "empty", "long"],
)
def test_a_config_that_is_no_object_is_refused_in_a_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(config_refused(tmp_path, text, capsys)) == 1


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "sparse", "loop"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_only_regular_files_are_read_of_a_model(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO / "teacher", model)
    (model / name).unlink()
    special(model / name, kind)
    code, lines = run(capsys, "inspect", model)
    assert code == 65 or name != "model.safetensors", lines
    (tmp_path / "text.txt").write_text("some words\n" * 40)
    code, lines = run(capsys, "eval", "ppl", model, "--data", tmp_path / "text.txt")
    assert code == 65 and len(lines) <= 2, lines


DEMO = Path(engine.demo.__path__[0])


def said_of_text(
    source: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Said, Said]:
    """What training and judging say of a text."""
    spec = source.parent / "kd.toml"
    student = DEMO / "student.json"
    spec.write_text(
        f'[teacher]\npath = "{model}"\n[student]\nconfig = "{student}"\n[data]\ncorpus = "{source}"\n'
    )
    out = source.parent / "run"
    return (
        run(capsys, "distill", spec, "--check", "--out", out),
        run(capsys, "eval", "ppl", model, "--data", source),
    )


@pytest.mark.parametrize("kind", ["fifo", "device", "sparse", "loop", "socket"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "folder/a.txt"])
def test_only_regular_files_of_a_sane_size_are_read_as_text(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    special(source, kind)
    asked = source if source.parent == tmp_path else source.parent
    for code, lines in said_of_text(asked, DEMO / "teacher", capsys):
        assert code == 65 and len(lines) <= 2, lines


def test_a_line_that_is_all_of_a_large_file_is_not_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(limits.CORPUS_DOCUMENT, most=1000)
    monkeypatch.setattr(limits, "CORPUS_DOCUMENT", small)
    for name in ("a.txt", "a.jsonl", "folder/a.md"):
        source = tmp_path / name
        source.parent.mkdir(exist_ok=True)
        source.write_text("z" * 5000)
        asked = source if source.parent == tmp_path else source.parent
        for code, lines in said_of_text(asked, DEMO / "teacher", capsys):
            assert code == 65 and "at most 1,000 bytes" in lines[0], lines


def test_lines_within_the_limit_of_a_file_beyond_it_are_read_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some words\n\n" * 5000)
    whole = [piece.text for piece in list_pieces(str(source)) if isinstance(piece, Piece)]
    small = dataclasses.replace(limits.CORPUS_DOCUMENT, most=10_000)
    monkeypatch.setattr(limits, "CORPUS_DOCUMENT", small)
    again = [piece.text for piece in list_pieces(str(source)) if isinstance(piece, Piece)]
    assert again == whole and "".join(map(str, whole)) == source.read_text()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "sparse", "loop"])
def test_only_regular_files_are_read_as_problems_results_and_prompts(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    special(path, kind)
    model = DEMO / "teacher"
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(PROBLEM) + "\n")
    for arguments in (
        ("eval", "humaneval", model, "--data", path, "--results", tmp_path / "r.jsonl"),
        *[("eval", "humaneval", model, "--data", good, "--results", path)][: kind != "loop"],
        ("generate", model, "--prompt-file", path),
    ):
        code, lines = run(capsys, *arguments)
        assert code == 65 and len(lines) <= 2, (arguments, lines)


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (b"def add(", 0, ""),
        (b"\xff", 65, "expected UTF-8, found byte 0"),
        (b"x" * 40_000_000, 65, "standard input"),
    ],
    ids=["text", "bytes", "long"],
)
def test_a_prompt_may_come_over_a_pipe(
    given: bytes,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    found, lines = run(
        capsys, "generate", DEMO / "teacher", "--prompt-file", "-", "--max-tokens", "2"
    )
    assert found == code and any(said in line for line in lines)


PROBLEM = {
    "task_id": "T/0",
    "prompt": "def one():\n",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(f):\n    assert f() == 1\n",
}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"task_id": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"task_id": ' + b"7" * 6000 + b"}",
        b"\x1f\x8b" + bytes(40),
        b"\x1f\x8b\x08",
        json.dumps(PROBLEM | {"entry_point": "\x00"}).encode(),
        b"\xff\xfe" * 50,
        b"\n" * 100_000,
    ],
    ids=["lists", "deep", "digits", "gzip", "cut gzip", "nul", "bytes", "blank"],
)
def test_a_file_of_problems_that_is_none_is_refused_in_a_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    code, lines = run(capsys, "eval", "humaneval", DEMO / "teacher", "--data", path)
    assert code == 65 and len(lines) <= 2, lines


def test_a_gzip_is_unpacked_up_to_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl.gz"
    block = gzip.compress(bytes(8 << 20))
    path.write_bytes(block * 384)  # 3 GiB of zeros in 3 MB
    before = peak_bytes()
    code, lines = run(capsys, "eval", "mbpp", DEMO / "teacher", "--data", path)
    assert code == 65 and "decompressed" in lines[0], lines
    assert peak_bytes() - before < 4 * limits.PROBLEM_TEXT.most


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_memory_that_torch_does_not_get_is_bad_input_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    def command() -> int:
        torch.empty(1 << 60, dtype=torch.uint8)
        return 0

    assert run_command("engine eval", command) == 65
    assert len(capsys.readouterr().err.splitlines()) == 1


TOKENIZER = json.loads((DEMO / "teacher" / "tokenizer.json").read_text())


def split(pattern: str) -> dict[str, object]:
    one = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "type": "Sequence",
        "pretokenizers": [one, *TOKENIZER["pre_tokenizer"]["pretokenizers"]],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"model": TOKENIZER["model"] | {"merges": [["no", "such"]]}},
        {"model": {"type": "Unigram", "unk_id": 9, "vocab": []}},
        {"model": {}},
        {"added_tokens": [{"id": 0}]},
        {"added_tokens": None},
        {"normalizer": "[" * 9},
    ],
    ids=[
        *["merges", "unigram", "no model", "added", "null", "text"],
    ],
)
def test_a_tokenizer_that_the_library_does_not_open_is_refused_in_a_line(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | change))
    (tmp_path / "a.txt").write_text("q some words abababab!\n" * 40)
    before = peak_bytes()
    code, lines = run(
        *(capsys, "eval", "ppl", DEMO / "teacher"),
        *("--data", tmp_path / "a.txt", "--tokenizer", path),
    )
    assert code == 65 and len(lines) <= 2 and "tokenizer" in lines[0], lines
    assert peak_bytes() - before < 2 << 30


@pytest.mark.parametrize(
    "change",
    [{}, {"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": split("[0-9]{1,3}")}],
    ids=["known", "lowercase", "expression"],
)
def test_a_sound_tokenizer_gives_the_ids_it_gave(change: dict[str, object], tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Inner

    from engine.formats.tokenizer import open_tokenizer

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | change))
    text = "Some WORDS, 12345 and\n\n  more — naïve 中文 😀"
    wanted = Inner.from_file(str(path)).encode(text, add_special_tokens=False).ids
    assert open_tokenizer(path).encode_documents([text])[0].tolist() == wanted


BROKEN = {
    "cut": '{"spec": {"train": {"steps": 3',
    "empty": "",
    "deep": '{"spec": ' + "[" * 90_000,
    "digits": '{"spec": {"train": {"steps": ' + "4" * 6000 + "}}}",
    "list": "[]",
    "no spec": "{}",
    "spec is a list": '{"spec": [1]}',
    "section is a number": '{"spec": {"train": 4}}',
    "nul": '{"spec": {"teacher": {"path": "a\\u0000"}}}',
    "bytes": "\udcff\udcfe",
    "rows": '{"spec": {"train": {"rows": 4611686018427387905}}}',
    "long": json.dumps({"spec": {"run": {"name": "n" * 9_000_000}}}),
}


@pytest.mark.parametrize("how", [*BROKEN, "fifo", "device", "folder", "sparse"])
def test_a_run_whose_settings_are_broken_is_refused_in_lines(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "effective.json"
    if how in BROKEN:
        path.write_bytes(BROKEN[how].encode("utf-8", "surrogateescape"))
    else:
        special(path, how)
    for arguments in (
        ("distill", "--resume", folder),
        ("distill", "--resume", folder, "--set", "train.steps=9"),
        ("gate", folder),
    ):
        code, lines = run(capsys, *arguments)
        assert code == 65 and 1 <= len(lines) <= 4, (arguments, lines)
        assert all(len(line) < 600 for line in lines), lines


@pytest.mark.parametrize("how", [*BROKEN, "fifo", "device", "folder", "sparse"])
def test_small_files_of_the_tools_that_are_broken_are_refused_in_a_line(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        if how in BROKEN:
            path.write_bytes(BROKEN[how].encode("utf-8", "surrogateescape"))
        else:
            special(path, how)
        return path

    finding = broken(tmp_path / "2026-01-01-x" / "finding.json").parent
    flip = broken(tmp_path / "flip" / "pairs.jsonl").parent
    if how != "folder":
        broken(flip / "plan.json")
    for arguments in (
        ("why", "check", "--all", "--evidence", finding),
        ("flip", "--resume", flip),
        ("why", "show", "--finding", finding),
    ):
        code, lines = run(capsys, *arguments)
        assert code in (1, 2, 65) and len(lines) <= 6, (arguments, code, lines)


@pytest.mark.parametrize(
    "value", ["9" * 5000, "9" * 25, "-" + "9" * 25, "nan", "1e400", "x" * 3000]
)
@pytest.mark.parametrize(
    "words",
    [
        ("flip", "a", "--steps"),
        ("flip", "a", "--pairs"),
        ("tail", "a", "-n"),
        ("contracts", "run", "--jobs"),
        ("prepare", "a", "--top-k"),
        ("distill", "a", "--smoke"),
        ("distill", "a", "--gpus"),
        ("generate", "a", "--max-tokens"),
        ("generate", "a", "--temperature"),
        ("eval", "ppl", "a", "--data", "b", "--length"),
        ("eval", "mbpp", "a", "--data", "b", "--samples"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}" if isinstance(words, tuple) else words[:6],
)
def test_a_number_of_a_command_line_beyond_its_use_is_refused(
    words: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words[:-1], f"{words[-1]}={value}" if words[-1][:2] == "--" else words[-1] + value])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 64 and "expected a" in said and len(said) < 300


def test_every_number_of_every_command_has_a_range() -> None:
    def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in {id(one): one for one in action.choices.values()}.values():
                    yield from parsers(inner)

    free = [
        f"{parser.prog} {action.option_strings}"
        for parser in parsers(build_parser())
        for action in parser._actions
        if action.type in (int, float) and action.choices is None
    ]
    assert not free
