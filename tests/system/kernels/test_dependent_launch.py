"""What a kernel that begins early does before the one ahead of it has ended, by its machine-independent code."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import decode_launch, small_m
from engine.kernels.compiler import Variant, compile_for
from engine.kernels.dependent_launch import EARLY_ARCH, can_be_early
from engine.kernels.small_m_table import config_for
from engine.quant.blocks import BLOCK_TYPES

WRITES = re.compile(r"\b(st\.global|red\.|atom\.)")
READS = re.compile(r"\b(ld\.global|cp\.async)")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


# Compiled once for the tests that look at it.
@functools.cache
def before_and_after(variant: Variant) -> tuple[str, str]:
    """Of its PTX, what comes before the first wait and what comes after the last."""
    body, _ = compile_for(variant, EARLY_ARCH)
    assert body.metadata.launch_pdl == variant.early
    text = body.asm["ptx"]
    parts = text[text.index(".entry") :].split("griddepcontrol.wait")
    assert len(parts) > 1, f"{variant.name} never waits"
    return parts[0], parts[-1]


def products() -> list[Variant]:
    found = []
    for names, m in ((("Q4_K",), 1), (("Q4_K", "Q4_K", "Q6_K"), 1), (("Q6_K",), 8), (("Q5_K",), 8)):
        types = [BLOCK_TYPES[name] for name in names]
        config = config_for(types[0], 3584, 3584, m, EARLY_ARCH)
        found.append(small_m.product(types, config, torch.float32, None, early=True))
    return found


def between() -> dict[str, Variant]:
    """One of each kernel between products, the last of its name."""
    wanted = [each for each in decode_launch.variants(EARLY_ARCH) if each.early]
    return {each.name: each for each in wanted}


@pytest.mark.soak
def test_nothing_is_written_before_the_wait_and_the_next_may_begin_only_after_it() -> None:
    assert set(between()) == {"norm", "attend", "join", "gate"}
    for variant in [*products(), *between().values()]:
        before, after = before_and_after(variant)
        assert not WRITES.search(before), variant.name
        assert "griddepcontrol.launch_dependents" not in before, variant.name
        assert "griddepcontrol.launch_dependents" in after, variant.name


# Inputs of products, and gate and up, are all that these read but for weights, which come with them. Wide
# products take seconds to compile.
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=() if place in (0, 4) else pytest.mark.soak)
        for place, variant in enumerate([*products(), between()["gate"]])
    ],
    ids=lambda variant: variant.name,
)
def test_what_the_kernel_ahead_writes_is_not_read_before_the_wait(variant: Variant) -> None:
    before, after = before_and_after(variant)
    assert not READS.search(before), variant.name
    assert READS.search(after), variant.name


def test_the_first_norm_waits_for_what_it_norms() -> None:
    first = next(
        each
        for each in decode_launch.variants(EARLY_ARCH)
        if each.name == "norm" and dict(each.constants)["SPLITS"] == 0
    )
    before, _ = before_and_after(first)
    assert not READS.search(before)


def test_kernels_begin_early_where_the_gpu_and_its_cuda_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, arch, expected in (
        ("13.0", 90, True),
        ("12.4", 100, True),
        ("12.3", 90, False),
        ("13.0", 89, False),
        (None, 90, False),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert can_be_early(arch) is expected, (version, arch)
