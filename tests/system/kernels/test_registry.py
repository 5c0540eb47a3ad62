"""The registry, compiling for a GPU that is not here; launches are tested where there is one."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import InternalError
from engine.kernels.compile_record import CompileRecord, KernelCounts
from engine.kernels.compiler import Variant, key_for
from engine.kernels.prewarm import warm_up
from engine.kernels.registry import KernelRegistry, check_arguments, pointer_type
from tests.support.perf import within
from tests.support.small_kernels import deaf, scaled

ARCH = 90


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_hits_and_misses_are_counted_for_each_kernel() -> None:
    registry = KernelRegistry(ARCH)
    for variant in (scaled(128), scaled(128), scaled(64), deaf(1e-5), scaled(128)):
        registry.get_or_compile(variant)
    summary = [replace(counts, seconds=0.0) for counts in registry.summary()]
    assert summary == [
        KernelCounts(kernel="deaf", hits=0, misses=1, disk_hits=0, after_warm_up=0, seconds=0.0),
        KernelCounts(kernel="scaled", hits=2, misses=2, disk_hits=0, after_warm_up=0, seconds=0.0),
    ]


def test_warming_twice_compiles_once_and_counts_no_hit() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(scaled())
    registry.warm(scaled())
    (counts,) = registry.summary()
    assert (counts.hits, counts.misses) == (0, 1)
    assert registry.requested() == {scaled()}


def test_what_would_be_launched_can_be_noted_instead() -> None:
    registry = KernelRegistry(ARCH)
    with registry.noting() as noted:
        registry.launch(scaled(), (1,))
        registry.launch(deaf(1e-5), (1,))
    assert noted == [scaled(), deaf(1e-5)]
    assert registry.requested() == frozenset()
    with ThreadPoolExecutor(1) as pool, registry.noting() as noted:
        # Another thread's launches are its own: this one is not noted, and has nowhere to run or is refused.
        error = pool.submit(registry.launch, scaled(), (1,)).exception()
    assert error is not None
    assert noted == []


@pytest.mark.perf
def test_a_miss_says_its_key_its_time_and_whether_the_disk_had_it() -> None:
    first, second = KernelRegistry(ARCH), KernelRegistry(ARCH)
    first.warm(scaled())
    second.warm(scaled())
    (compiled,), (loaded,) = first.drain(), second.drain()
    key = key_for(scaled(), ARCH)
    assert (compiled.key, compiled.digest) == (str(key), key.digest) == (loaded.key, loaded.digest)
    assert (compiled.disk_hit, loaded.disk_hit) == (False, True)
    assert loaded.seconds > 0
    within(loaded.seconds, compiled.seconds)
    assert (second.summary()[0].misses, second.summary()[0].disk_hits) == (1, 1)
    assert compiled.lines()[0].startswith("compiled in ")
    assert loaded.lines()[0].startswith("loaded from disk in ")


def test_drain_gives_each_record_once() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(scaled(64))
    registry.warm(scaled(128))
    assert ["BLOCK=64" in registry_record.key for registry_record in registry.drain()] == [
        True,
        False,
    ]
    assert registry.drain() == []


def late(registry: KernelRegistry, variant: Variant) -> CompileRecord:
    registry.drain()
    registry.seal()
    registry.get_or_compile(variant)
    (record,) = registry.drain()
    return record


def test_a_compile_after_warm_up_names_the_differing_field() -> None:
    registry = KernelRegistry(ARCH)
    for variant in (scaled(256, 1e-5), scaled(128, 1e-6), deaf(1e-6)):
        registry.warm(variant)
    record = late(registry, scaled(64, 1e-6))
    assert record.after_warm_up
    assert record.differs == (("BLOCK", "64", "128"),)
    assert record.lines()[0].startswith("compiled after warm-up in ")
    assert record.lines()[1] == "  differs from a warmed one in BLOCK (64, not 128)"
    assert [counts.after_warm_up for counts in registry.summary()] == [0, 1]


def test_every_differing_field_of_the_most_similar_one_is_named() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(scaled(256, 1e-5, warps=8))
    record = late(registry, scaled(64, 1e-5, warps=4))
    assert record.differs == (("BLOCK", "64", "256"), ("warps", "4", "8"))


def test_what_was_compiled_late_is_not_taken_for_warmed() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(scaled(128))
    late(registry, scaled(64))
    registry.get_or_compile(scaled(64, 1e-5))
    (record,) = registry.drain()
    assert record.differs == (("BLOCK", "64", "128"), ("EPS", "1e-05", "1e-06"))


def test_a_late_kernel_of_which_nothing_was_warmed_says_so() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(deaf(1e-6))
    record = late(registry, scaled())
    assert record.differs == ()
    assert record.lines()[1] == "  no variant of this kernel was warmed"


def test_before_warm_up_ends_a_miss_is_no_fault() -> None:
    registry = KernelRegistry(ARCH)
    registry.warm(scaled(128))
    registry.warm(scaled(64))
    assert [(record.after_warm_up, record.differs) for record in registry.drain()] == [
        (False, ())
    ] * 2


def test_threads_that_want_one_variant_compile_it_once() -> None:
    registry, together = KernelRegistry(ARCH), threading.Barrier(8)

    def ask(_: int) -> int:
        together.wait()
        return id(registry.get_or_compile(scaled()))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    (counts,) = registry.summary()
    assert (counts.misses, counts.hits) == (1, 0)
    assert len(registry.drain()) == 1


def test_warm_up_compiles_each_variant_once_and_tells_its_progress() -> None:
    registry = KernelRegistry(ARCH)
    wanted = [scaled(block, eps) for block in (32, 64, 128) for eps in (1e-5, 1e-6)]
    reported: list[tuple[int, int]] = []
    warm_up(
        wanted + wanted, registry=registry, workers=3, progress=lambda *done: reported.append(done)
    )
    assert registry.requested() == frozenset(wanted)
    assert len(registry.drain()) == len(wanted)
    assert reported == [(done, 6) for done in range(1, 7)]


def test_kernels_that_compile_together_are_parsed_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11.7 fails at random where two threads make syntax trees (SystemError)."""
    parse, inside, together = ast.parse, list[int](), threading.Event()

    def watched(*arguments: Any, **options: Any) -> ast.AST:
        inside.append(threading.get_ident())
        try:
            if len(set(inside)) > 1:
                together.set()
            together.wait(0.05)  # Time for another thread to come in.
            return parse(*arguments, **options)
        finally:
            inside.remove(threading.get_ident())

    monkeypatch.setattr(ast, "parse", watched)
    wanted = [scaled(block, eps) for block in (32, 64) for eps in (1e-5, 1e-6)]
    warm_up(wanted, registry=KernelRegistry(ARCH), workers=4)
    assert not together.is_set()


def test_a_kernel_that_does_not_compile_stops_warm_up_and_is_not_kept() -> None:
    registry = KernelRegistry(ARCH)
    broken = Variant(scaled().function, ("*fp32", "*fp32", "i32"), (("BLOCK", 128),))
    with pytest.raises(AssertionError, match=r"scaled"):
        warm_up([broken], registry=registry)
    with pytest.raises(AssertionError):
        registry.get_or_compile(broken)
    assert registry.requested() == frozenset()
    assert registry.drain() == []


GOOD = (torch.zeros(4), torch.zeros(4), 4)


def test_arguments_that_the_variant_was_compiled_for_are_accepted() -> None:
    check_arguments(scaled(), GOOD, device=-1)


def test_arguments_that_fit_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.Tensor, **_: Any) -> str:
        raise AssertionError("printing a tensor waits for the device")

    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    check_arguments(scaled(), GOOD, device=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4).double(), *GOOD[1:]), r"expected \*fp32, .* found torch.float64"),
        ((torch.zeros(5)[1:], *GOOD[1:]), r"a multiple of 16 bytes, found torch.float32 on cpu at"),
        ((4, *GOOD[1:]), r"expected \*fp32, .* found 4"),
        ((*GOOD[:2], torch.tensor(4)), "expected i32, .* found torch.int64"),
        ((*GOOD[:2], 1 << 31), "expected i32, .* found 2147483648"),
        ((*GOOD[:2], 4.0), r"expected i32, .* found 4\.0"),
    ],
)
def test_arguments_that_it_was_not_compiled_for_are_refused(
    arguments: tuple[torch.Tensor | int | float, ...], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        check_arguments(scaled(), arguments, device=-1)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(InternalError, match=r"on device 0 .* found torch.float32 on cpu"):
        check_arguments(scaled(), GOOD, device=0)


def test_pointer_types_have_tritons_names() -> None:
    assert pointer_type(torch.bfloat16) == "*bf16"
    assert pointer_type(torch.uint8) == "*u8"


@pytest.mark.gpu
def test_a_kernel_is_launched_through_the_registry_and_only_once_compiled() -> None:
    registry = KernelRegistry()
    x = torch.randn(1000, device="cuda")
    registry.warm(scaled())
    registry.drain()
    registry.seal()
    # Counts of 1 and of a multiple of 16 are what just-in-time compilation specialises on.
    for count in (1000, 1, 16, 999):
        y = torch.full_like(x, torch.nan)
        registry.launch(scaled(), (8,), x, y, count)
        torch.testing.assert_close(y[:count], x[:count] * 2 + 1e-6, rtol=0, atol=0)
        assert y[count:].isnan().all()
    assert registry.drain() == []
    (counts,) = registry.summary()
    assert (counts.hits, counts.misses) == (4, 1)


@pytest.mark.gpu
def test_a_launch_after_warm_up_that_compiles_is_recorded_with_its_difference() -> None:
    registry = KernelRegistry()
    x = torch.randn(1000, device="cuda")
    registry.warm(scaled(128))
    registry.seal()
    registry.launch(scaled(64), (16,), x, torch.empty_like(x), 1000)
    assert registry.drain()[-1].differs == (("BLOCK", "64", "128"),)
