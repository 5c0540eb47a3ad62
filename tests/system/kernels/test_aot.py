"""Every kernel compiles for every GPU it is meant for, and is not worse than what was kept."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

import engine.kernels
from engine.kernels.compiler import ARCHITECTURES, Constant, Variant
from engine.loss import fused
from evidence.kernels import aot
from evidence.kernels.aot import AotFigure, figure, regressions
from tests.support.first_stage import first_stage
from tests.support.paths import TESTS
from tests.support.small_kernels import crowded, scaled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def modules() -> list[ModuleType]:
    """Those of the kernels, imported."""
    names = (info.name for info in pkgutil.iter_modules(engine.kernels.__path__))
    return [importlib.import_module(f"{engine.kernels.__name__}.{name}") for name in names]


def functions_of(module: ModuleType) -> list[JITFunction]:
    """The `@triton.jit` functions that a module defines, kernels and what they call."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    ]


@functools.cache  # asked for each kernel when this file is collected
def some_variants(arch: int) -> tuple[Variant, ...]:
    """One of each function, writing bf16 where one of its variants does: what a quick look compiles."""
    found: dict[Any, Variant] = {}
    for variant in aot.all_variants(arch):
        kept = found.setdefault(variant.function, variant)
        if "*bf16" in variant.types and "*bf16" not in kept.types:
            found[variant.function] = variant
    return tuple(found.values())


def idle_functions() -> list[str]:
    """The `@triton.jit` functions of the kernels that no variant is of and none of it calls."""
    functions = [function for module in modules() for function in functions_of(module)]
    listed = {variant.function for arch in ARCHITECTURES for variant in aot.all_variants(arch)}
    return [
        f"{function.__module__}.{function.__name__}"
        for function in functions
        if function not in listed
        and not any(
            re.search(rf"\b{function.__name__}[(),]", other.src)
            for other in functions
            if other is not function
        )
    ]


NAMES = {
    name: [arch for arch in ARCHITECTURES if name in {v.name for v in some_variants(arch)}]
    for name in {v.name: None for arch in ARCHITECTURES for v in some_variants(arch)}
}
"""Every kernel, and the targets it is meant for."""


def once(arch: int) -> tuple[Variant, ...]:
    """One variant of every kernel whose turn it is: each kernel is compiled for one of its targets."""
    wanted = {
        name
        for place, (name, targets) in enumerate(NAMES.items())
        if targets[place % len(targets)] == arch
    }
    return tuple(variant for variant in some_variants(arch) if variant.name in wanted)


# One test for each target, so that workers share them.
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "variants",
    [
        once,
        *(pytest.param(some, marks=pytest.mark.soak) for some in (some_variants, aot.all_variants)),
    ],
)
def test_every_kernel_compiles_and_is_no_worse_than_what_was_kept(
    arch: int, variants: Callable[[int], tuple[Variant, ...]]
) -> None:
    figures = [figure(variant, arch) for variant in variants(arch)]
    version, kept = aot.read_kept()
    if version != triton.__version__:
        pytest.skip(
            f"compiled; figures of triton {version} are not compared with {triton.__version__}"
        )
    worse = regressions(figures, kept)
    assert not worse, "\n".join(worse)


def test_every_kernel_is_compiled_for_one_of_its_targets() -> None:
    for arch in ARCHITECTURES:
        some, every = some_variants(arch), aot.all_variants(arch)
        assert {variant.function for variant in some} == {variant.function for variant in every}
    for name, meant in NAMES.items():
        targets = [a for a in ARCHITECTURES if name in {v.name for v in once(a)}]
        assert len(targets) == 1 and targets[0] in meant, f"{name}: {targets}"


def test_nothing_is_kept_of_kernels_that_are_gone() -> None:
    version, kept = aot.read_kept()
    assert version == triton.__version__
    now = {str(variant) for arch in ARCHITECTURES for variant in aot.all_variants(arch)}
    assert kept.keys() <= now, f"`{aot.COMMAND}` drops them"


def test_registers_spills_and_shared_memory_are_read_from_the_machine_code() -> None:
    plain, spilling = figure(scaled(), 90), figure(crowded(64, warps=1), 90)
    assert 8 <= plain.registers <= 32
    assert plain.stack_bytes == 0
    assert spilling.registers == 255
    assert spilling.stack_bytes > 0
    assert plain.seconds > 0


KEPT = {"k()[] 4 warps, 1 stages": {"sm_90": [40, 0, 1024]}}
NOW = AotFigure(
    variant="k()[] 4 warps, 1 stages",
    arch=90,
    registers=40,
    stack_bytes=0,
    shared_bytes=1024,
    seconds=0.1,
)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (NOW, None),
        (replace(NOW, registers=48, shared_bytes=0), None),
        (replace(NOW, registers=49), "49 registers, were 40"),
        (replace(NOW, stack_bytes=8), "8 bytes of stack, were 0"),
        (replace(NOW, shared_bytes=1025), "1025 bytes of shared memory, were 1024"),
        (replace(NOW, arch=80), "no figures kept"),
        (replace(NOW, variant="other"), "no figures kept"),
    ],
)
def test_a_regression_is_named(now: AotFigure, message: str | None) -> None:
    worse = regressions([now], KEPT)
    assert len(worse) == (message is not None)
    assert message is None or message in worse[0]


def test_figures_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "KEPT", tmp_path / "kernels" / "aot.json")
    aot.write_kept([NOW, replace(NOW, arch=80, stack_bytes=16)])
    assert aot.read_kept() == (
        triton.__version__,
        {NOW.variant: {"sm_90": [40, 0, 1024], "sm_80": [40, 16, 1024]}},
    )
    assert json.loads(aot.KEPT.read_text())["command"] == aot.COMMAND


def test_every_kernel_is_launched_by_something() -> None:
    assert idle_functions() == []


def test_every_file_with_kernels_has_a_parity_test() -> None:
    # The interpreted tests compare with the slow oracle; they run in a process of their own.
    tests = "\n".join(
        path.read_text() for path in (TESTS / "unit" / "kernels" / "interpreted").glob("test_*.py")
    )
    texts = {module.__name__: inspect.getsource(module) for module in modules()}
    launchers = {
        module.__name__ for module in modules() if hasattr(module, "launch") or functions_of(module)
    }
    texts[fused.__name__] = inspect.getsource(fused)
    launchers.add(fused.__name__)
    for module in modules():
        if not functions_of(module):
            continue
        # A file is tested through the one that launches its kernels.
        reached = {module.__name__}
        for _ in range(len(launchers)):
            reached |= {
                name
                for name in launchers
                if any(f"from {file} import" in texts[name] for file in reached)
            }
        imports = [
            line
            for name in reached
            for line in (
                f"from {name} import",
                "from {} import {}\n".format(*name.rsplit(".", 1)),
            )
        ]
        assert any(line in tests for line in imports), (
            f"{module.__name__}: no test in tests/unit/kernels/interpreted imports it, or what launches it"
        )


def one_of_each_kernel() -> list[Variant]:
    return list({variant.function: variant for variant in aot.all_variants(90)}.values())


# Each constant takes a compilation: every third kernel here, the rest in the soak.
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=pytest.mark.soak if place % 3 else ())
        for place, variant in enumerate(one_of_each_kernel())
    ],
    ids=lambda variant: variant.name,
)
def test_every_constant_of_a_kernel_reaches_its_code(variant: Variant) -> None:
    """A constant that is in the key and not in the code is one that the code has a fixed value for."""
    whole = first_stage(variant, 90)
    for name, value in variant.constants:
        changed = replace_constant(variant, name, other(value))
        try:
            code = first_stage(changed, 90)
        except triton.CompilationError:
            continue  # The code has opinions about it.
        assert code != whole, f"{variant}: {name} has no effect"


def other(value: Constant) -> Constant:
    """Another value of the same kind; a power of two stays one."""
    if isinstance(value, bool):
        return not value
    # A width that may be absent is a number of whole blocks.
    return f"{value}x" if isinstance(value, str) else value * 2 or 256


def replace_constant(variant: Variant, name: str, value: Constant) -> Variant:
    return Variant(
        variant.function,
        variant.types,
        tuple((n, value if n == name else v) for n, v in variant.constants),
        variant.warps,
        variant.stages,
        variant.fp_fusion,
    )
