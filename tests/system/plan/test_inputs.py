"""Whatever is wrong with an input: one clear line that says expected and found, exit 65, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.log.fold import Follower
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit, tiny_config
from tests.support.lacks import skip_for
from tests.support.running import (
    DEADLINE_S,
    engine,
    engine_here,
    environment,
    wait_for,
    wait_until_ended,
)

LFS_POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 988097824
"""


def copy_of(teacher: Path, folder: Path) -> Path:
    copy = folder / "teacher"
    shutil.copytree(teacher, copy)
    return copy


def weights_are(content: bytes) -> Callable[[Path], None]:
    return lambda teacher: (teacher / "model.safetensors").write_bytes(content) and None


def truncate(teacher: Path) -> None:
    weights = teacher / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def other_shapes(teacher: Path) -> None:
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


def drop_a_tensor(teacher: Path) -> None:
    weights = teacher / "model.safetensors"
    raw = weights.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header["model.norm.renamed"] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


CASES: list[tuple[str, Callable[[Path], None], str]] = [
    ("no weights", lambda t: (t / "model.safetensors").unlink(), "model.safetensors"),
    ("no config", lambda t: (t / "config.json").unlink(), "config.json"),
    ("no tokenizer", lambda t: (t / "tokenizer.json").unlink(), "tokenizer.json"),
    ("lfs pointer", weights_are(LFS_POINTER.encode()), "git lfs pull"),
    ("html page", weights_are(b"<!DOCTYPE html><html>404</html>" * 9), "HTML page"),
    ("damaged gguf", weights_are(b"GGUF" + bytes(64)), "GG03 gguf:"),
    ("pickle", weights_are(b"PK\x03\x04" + bytes(64)), "PK01"),
    ("empty", weights_are(b""), "found"),
    ("truncated", truncate, "1,000"),
    ("other shapes", other_shapes, "gate_proj"),
    ("renamed tensor", drop_a_tensor, "model.norm.renamed"),
    ("config not json", lambda t: (t / "config.json").write_text("{") and None, "config.json"),
    (
        "other family",
        lambda t: (
            (t / "config.json").write_text(json.dumps(tiny_config(model_type="gpt2"))) and None
        ),
        "GPT2LMHeadModel",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "says"), [(c[1], c[2]) for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_broken_teacher_is_refused_before_a_run_folder_exists(
    kit: Kit, tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    teacher = copy_of(kit.teacher, tmp_path)
    spoil(teacher)
    refused(kit.spec(tmp_path, teacher__path=str(teacher)), tmp_path, says)


def refused(spec: Path, folder: Path, says: str, *arguments: object) -> None:
    """`engine distill` refuses with exit 65, one message with the words, no traceback and no run folder."""
    done = engine_here("distill", spec, "--out", folder / "run", *arguments)
    assert done.returncode == 65, done.stderr
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not (folder / "run").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(kit: Kit, tmp_path: Path) -> None:
    config = tmp_path / "small.json"
    config.write_text(json.dumps(tiny_config(vocab_size=256)))
    refused(kit.spec(tmp_path, student__config=str(config)), tmp_path, "ids below 256")


def test_a_student_vocabulary_larger_than_the_teachers_is_refused(kit: Kit, tmp_path: Path) -> None:
    config = tmp_path / "large.json"
    config.write_text(json.dumps(tiny_config(vocab_size=301)))
    refused(kit.spec(tmp_path, student__config=str(config)), tmp_path, "at most the teacher's 300")


def test_a_student_equal_to_its_teacher_is_refused(kit: Kit, tmp_path: Path) -> None:
    run, code = carried_out(kit, tmp_path, student__config="", student__path=str(kit.teacher))
    ended = Follower(run).read_all().finished
    assert code == 65 and ended is not None and "found the same values" in ended.reason


def test_an_empty_corpus_is_refused(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    refused(kit.spec(tmp_path, data__corpus=str(tmp_path / "nothing")), tmp_path, "found")


def test_a_file_that_is_not_utf8_is_named_with_its_byte(kit: Kit, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(kit.corpus, corpus)
    (corpus / "latin.py").write_bytes(b"# caf\xe9\n")
    refused(kit.spec(tmp_path, data__corpus=str(corpus)), tmp_path, "latin.py, byte 5")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("loss.alpha=1.2", "loss.alpha: expected a number in [0, 1], found 1.2"),
        ("loss.alpha=-0.1", "loss.alpha: expected a number in [0, 1], found -0.1"),
        ("loss.temperature=0", "loss.temperature: expected a number above 0, found 0"),
        ("loss.temperature=-2", "loss.temperature: expected a number above 0, found -2"),
        ("data.seq_len=4096", "positions"),
        ("teacher.path=/nowhere", "found nothing there"),
    ],
)
def test_a_setting_out_of_range_is_refused(
    kit: Kit, tmp_path: Path, setting: str, says: str
) -> None:
    refused(kit.spec(tmp_path), tmp_path, says, "--set", setting)


def test_an_output_folder_that_exists_is_refused_and_untouched(kit: Kit, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "mine.txt").write_text("mine")
    done = engine_here("distill", kit.spec(tmp_path), "--out", run)
    assert done.returncode == 65 and "expected a new folder, found one that exists" in done.stderr
    assert os.listdir(run) == ["mine.txt"]


def test_too_little_room_is_refused_before_anything_is_written(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.errors import DiskFull
    from engine.plan.inputs import check_inputs
    from engine.spec import load_spec

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"expected .* free for 4 checkpoints"):
        check_inputs(load_spec(kit.spec(tmp_path))[0], tmp_path / "run")


# Ten seconds: `test_fault_files` fails every operation of a run for want of room.
@pytest.mark.soak
def test_a_disk_that_fills_up_while_training_ends_the_run_with_its_last_checkpoint_whole(
    kit: Kit, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True
    )
    if made.returncode != 0:
        skip_for("root", made.stderr.decode().strip())
    try:
        run = small / "run"
        spec = kit.spec(tmp_path, train__steps=100000, eval__every=0, checkpoint__every=20)
        launched = subprocess.Popen(
            [sys.executable, "-m", "engine", "distill", str(spec), "--out", str(run)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        wait_for(run, lambda view: bool(view.checkpoints))
        with (small / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(4096)):
                    pass
            except OSError:
                pass
        _, stderr = launched.communicate(timeout=DEADLINE_S)
        assert launched.returncode == 65, stderr
        (small / "ballast").unlink()
        follower = wait_until_ended(run)
        assert "no room" in stderr or "No space" in stderr or "free" in stderr, stderr
        resumed = engine("distill", "--resume", run, "--detach")
        assert resumed.returncode == 0, resumed.stderr
        newest = max(c.step for c in follower.view.checkpoints)
        wait_for(run, lambda view: view.started is not None and view.started.resumed_from == newest)
        assert engine_here("stop", run, "--now").returncode == 0
        wait_until_ended(run)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_usage_errors_exit_64_and_help_is_there_for_every_command() -> None:
    assert engine_here("distill").returncode == 64
    assert engine_here("nonsense").returncode == 64
    for command in ("distill", "tail", "runs", "stop", "spec"):
        done = engine_here(command, "--help")
        assert done.returncode == 0 and f"usage: engine {command}" in done.stdout
    assert engine_here("tail", "/nowhere").returncode == 65
