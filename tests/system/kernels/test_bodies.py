"""Bodies are planted in Triton's cache folder, compiled on this machine for one that is not here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.errors import InternalError
from engine.kernels.compiler import MANIFEST, _Source, compile_for, key_for
from tests.support.first_stage import first_stage
from tests.support.paths import ROOT
from tests.support.small_kernels import deaf, scaled

ARCH = 90
ASKED = scaled(eps=1e-6)
OTHER = scaled(eps=1e-5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(body: Any) -> Path:
    return Path(body.metadata_group["_scaled.cubin"]).parent


def plant(*suffixes: str) -> Path:
    """Lays files of the other body over those of the one that will be asked for. Returns the folder."""
    victim, other = folder_of(compile_for(ASKED, ARCH)[0]), folder_of(compile_for(OTHER, ARCH)[0])
    for suffix in suffixes:
        (victim / f"_scaled{suffix}").write_bytes((other / f"_scaled{suffix}").read_bytes())
    return victim


def test_a_body_is_compiled_once_and_then_comes_from_disk() -> None:
    body, disk_hit = compile_for(ASKED, ARCH)
    again, hit = compile_for(ASKED, ARCH)
    assert (disk_hit, hit) == (False, True)
    assert again.asm["cubin"] == body.asm["cubin"]
    assert body.name == key_for(ASKED, ARCH).symbol


def test_a_planted_stale_body_is_refused_naming_its_constant(cache: Path) -> None:
    victim, other = folder_of(compile_for(ASKED, ARCH)[0]), folder_of(compile_for(OTHER, ARCH)[0])
    for file in other.iterdir():
        (victim / file.name).write_text(file.read_text().replace(other.name, victim.name)) if (
            file.name.startswith("__grp__")
        ) else (victim / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InternalError) as refused:
        compile_for(ASKED, ARCH)
    message = str(refused.value)
    assert message.startswith(f"kernel scaled: {victim} — expected a body of scaled(")
    assert "EPS: expected 1e-06, found 1e-05" in message
    assert f"hint: delete {victim}" in message


@pytest.mark.parametrize("suffix", [".ttir", ".cubin", ".ptx", ".json"])
def test_one_planted_file_is_refused_by_its_hash(suffix: str) -> None:
    plant(suffix)
    with pytest.raises(InternalError, match=rf"_scaled\{suffix}: expected the file with SHA-256"):
        compile_for(ASKED, ARCH)


def test_a_flipped_bit_is_refused() -> None:
    folder = plant()
    path = folder / "_scaled.cubin"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InternalError, match=r"_scaled\.cubin: expected the file with SHA-256"):
        compile_for(ASKED, ARCH)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"key": 1, "sha256": {}}', "nonsense"])
def test_a_manifest_that_says_nothing_is_refused(text: str) -> None:
    (plant() / MANIFEST).write_text(text)
    with pytest.raises(InternalError, match=r"manifest-1\.json: expected a key and hashes"):
        compile_for(ASKED, ARCH)


def test_a_refused_body_is_not_replaced_and_its_folder_can_be_deleted() -> None:
    folder = plant(".cubin")
    for _ in range(2):
        with pytest.raises(InternalError):
            compile_for(ASKED, ARCH)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert compile_for(ASKED, ARCH)[1] is False
    assert compile_for(ASKED, ARCH)[1] is True


def test_a_body_of_a_killed_compilation_is_compiled_again() -> None:
    folder = plant(".cubin", ".ttir")
    (folder / MANIFEST).unlink()
    body, disk_hit = compile_for(ASKED, ARCH)
    assert disk_hit is False
    assert b"9.99999997E-7" in (folder / "_scaled.ttir").read_bytes()
    assert key_for(ASKED, ARCH).symbol.encode() in body.asm["cubin"]


def test_a_body_that_triton_keeps_for_itself_is_not_taken() -> None:
    ours = _Source(ASKED, "unused")
    triton.compile(
        ASTSource(ours.fn, ours.signature, ours.constants, ours.attrs),
        target=GPUTarget("cuda", ARCH, 32),
        options={"num_warps": ASKED.warps, "num_stages": ASKED.stages},
    )
    body, disk_hit = compile_for(ASKED, ARCH)
    assert disk_hit is False
    assert body.name == key_for(ASKED, ARCH).symbol


def test_processes_that_compile_at_once_leave_one_body_that_all_accept(cache: Path) -> None:
    program = (
        "from engine.kernels.compiler import compile_for\n"
        "from tests.support.small_kernels import scaled\n"
        "import hashlib\n"
        "print(hashlib.sha256(compile_for(scaled(eps=1e-6), 90)[0].asm['cubin']).hexdigest())\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            # Nothing in a body may come from the order of a set.
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": "."},
            cwd=ROOT,
        )
        for seed in (1, 2)
    ]
    hashes = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    body, disk_hit = compile_for(ASKED, ARCH)
    assert disk_hit is True
    assert hashes == {hashlib.sha256(body.asm["cubin"]).hexdigest()}


def test_a_kernel_deaf_to_a_constant_has_the_same_first_stage_for_two_values() -> None:
    assert first_stage(deaf(1e-6), ARCH) == first_stage(deaf(1e-5), ARCH)
    assert first_stage(ASKED, ARCH) != first_stage(OTHER, ARCH)
