"""Every kind of data through the commands: the same tokens, and one clear line where it is wrong."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from engine.spec import load_spec
from tests.support.finished_runs import carry_out
from tests.support.kit import Kit
from tests.support.running import engine_here

RECORDS = [{"body": f"def f{i}(x):\n    return x + {i}\n" * 20, "id": i} for i in range(40)]
LINES = "".join(json.dumps(one) + "\n" for one in RECORDS).encode()


def as_parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), out, row_group_size=7)
    return out.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.json": lambda: json.dumps(RECORDS, indent=1).encode(),
    "a.jsonl.gz": lambda: gzip.compress(LINES, mtime=0),
    "a.jsonl.zst": lambda: zstandard.compress(LINES),
    "a.parquet": as_parquet,
}


def words(kit: Kit, data: object) -> list[object]:
    return ["--teacher", kit.teacher, "--student", kit.student, "--data", data]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, make in FILES.items():
        (tmp_path / name).write_bytes(make())
    return tmp_path


def test_a_first_spec_of_every_kind_has_the_same_tokens(kit: Kit, here: Path) -> None:
    sizes = []
    for name in [*FILES, "*.parquet"]:
        done = engine_here("init", *words(kit, name), "--columns", "body", "--force", "--json")
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)["data"]
        assert data.pop("path") == name and data["documents"] == 40
        sizes.append(data)
        assert load_spec(here / "kd.toml")[0].data.columns == "body"
        checked = engine_here("distill", "kd.toml", "--check-inputs", "--json")
        assert checked.returncode == 0, checked.stderr
    assert sizes == sizes[:1] * len(sizes)


def test_a_run_on_parquet_trains_on_the_tokens_of_its_lines(kit: Kit, here: Path) -> None:
    hashes = set()
    for name in ("a.jsonl", "*.parquet"):
        done = engine_here("init", *words(kit, name), "--columns", "body", "--force")
        assert done.returncode == 0, done.stderr
        sets = ("train.steps=1", "train.rows=2", "eval.rows=2")
        sets += ("compute.device=cpu", "compute.threads=1")
        run, code = carry_out(Path("kd.toml"), here / f"run-{len(name)}", *sets)
        assert code == 0
        lines = [json.loads(line) for line in run.events.read_text().splitlines()]
        hashes |= {line["train_sha256"] for line in lines if "train_sha256" in line}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_is_one_line_and_65(kit: Kit, here: Path, name: str) -> None:
    unknown = engine_here("init", *words(kit, name))
    assert unknown.returncode == 65
    assert "'body', 'id'" in unknown.stderr and "hint: " in unknown.stderr
    absent = engine_here("init", *words(kit, name), "--columns", "text")
    assert absent.returncode == 65 and "data.columns" in absent.stderr
    wrong = engine_here("init", *words(kit, name), "--columns", "id")
    assert wrong.returncode == 65 and "of type int" in wrong.stderr
    # Of plain lines a cut costs the last one alone.
    whole = FILES[name]()
    (here / name).write_bytes(b"{" if name == "a.jsonl" else whole[:-40])
    cut = engine_here("init", *words(kit, name), "--columns", "body")
    assert cut.returncode == 65
    (here / name).unlink()
    os.mkfifo(here / name)
    fifo = engine_here("init", *words(kit, name), "--columns", "body")
    assert fifo.returncode == 65 and "FIFO" in fifo.stderr
    for done in (unknown, absent, wrong, cut, fifo):
        lines = [line for line in done.stderr.splitlines() if not line.startswith("hint: ")]
        assert len(lines) == 1 and name in lines[0] and not done.stdout, done.stderr
    assert not (here / "kd.toml").exists()


def test_a_link_into_a_cache_keeps_the_ending_that_says_what_it_is(kit: Kit, here: Path) -> None:
    done = engine_here("init", *words(kit, "a.jsonl"), "--columns", "body")
    assert done.returncode == 0, done.stderr
    (here / "blobs").mkdir()
    (here / "a.jsonl").rename(here / "blobs/7f3a")
    (here / "a.jsonl").symlink_to("blobs/7f3a")
    assert load_spec(here / "kd.toml")[0].data.corpus == str(here / "a.jsonl")
    checked = engine_here("distill", "kd.toml", "--check-inputs")
    assert checked.returncode == 0, checked.stderr
