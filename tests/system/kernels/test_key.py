from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.compiler import Variant, key_for
from tests.support.small_kernels import _deaf, _scaled, scaled

TYPES = st.sampled_from(["*fp32", "*bf16", "*u8", "i32", "i64", "fp32"])
NUMBERS = st.sampled_from([0, 1, -1, 0.0, -0.0, 1.0, True, False, 1e-5, 1e-6, "1", "rows", 128])
VARIANTS = st.builds(
    lambda function, types, block, eps, warps, stages, fused: Variant(
        function, types, (("BLOCK", block), ("EPS", eps)), warps, stages, fused
    ),
    st.sampled_from([_scaled, _deaf]),
    st.tuples(TYPES, TYPES, TYPES),
    NUMBERS,
    NUMBERS,
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 3]),
    st.booleans(),
)


@given(VARIANTS, VARIANTS)
def test_two_variants_are_equal_exactly_when_their_keys_and_digests_are(
    one: Variant, other: Variant
) -> None:
    a, b = one.key("sm_90", "triton 0"), other.key("sm_90", "triton 0")
    assert (one == other) == (a == b) == (a.digest == b.digest) == (not a.differing(b))
    assert one != other or hash(one) == hash(other)


@given(VARIANTS, st.data())
def test_a_change_of_any_one_thing_changes_the_key_and_is_named(
    variant: Variant, data: st.DataObject
) -> None:
    what = data.draw(st.sampled_from(["BLOCK", "EPS", "x_ptr", "n", "warps", "stages", "fusion"]))
    constants, types = dict(variant.constants), list(variant.types)
    if what in constants:
        constants[what] = data.draw(NUMBERS.filter(lambda v: repr(v) != repr(constants[what])))
    place = {"x_ptr": 0, "n": 2}.get(what)
    if place is not None:
        types[place] = data.draw(TYPES.filter(lambda t: t != types[place]))
    changed = Variant(
        variant.function,
        tuple(types),
        tuple(constants.items()),
        variant.warps * (2 if what == "warps" else 1),
        variant.stages + (what == "stages"),
        variant.fp_fusion ^ (what == "fusion"),
    )
    one, other = variant.key("sm_90", "triton 0"), changed.key("sm_90", "triton 0")
    assert variant != changed
    assert one.digest != other.digest
    assert [name for name, _, _ in one.differing(other)] == [
        "fp_fusion" if what == "fusion" else what
    ]


def test_target_and_compiler_are_in_the_key() -> None:
    keys = [
        scaled().key(target, compiler)
        for target, compiler in itertools.product(("sm_89", "sm_90"), ("triton 1", "triton 2"))
    ]
    assert len({key.digest for key in keys}) == 4
    assert keys[0].differing(keys[3]) == (
        ("target", "sm_89", "sm_90"),
        ("compiler", "triton 1", "triton 2"),
    )


def test_what_changes_the_compilers_output_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key_for(scaled(), 90)
    assert "ptxas" in plain.compiler
    monkeypatch.setenv("TRITON_ENABLE_LLVM_DEBUG", "1")
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert key_for(scaled(), 90).digest != plain.digest


def test_the_text_of_a_kernel_and_of_what_it_calls_is_in_the_key(tmp_path: Path) -> None:
    text = """
import triton, triton.language as tl
@triton.jit
def _called(x):
    return x + 1
@triton.jit
def _scaled(x_ptr, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, _called(tl.load(x_ptr + place)) * 2, mask=place < n)
"""
    sources = [
        key.source
        for key in (
            Variant(_load(tmp_path, name, body), ("*fp32", "i32"), (("BLOCK", 64),)).key(
                "sm_90", ""
            )
            for name, body in (
                ("a", text),
                ("b", text),
                ("c", text.replace("* 2", "* 3")),
                ("d", text.replace("x + 1", "x + 2")),
            )
        )
    ]
    assert sources[0] == sources[1]
    assert len(set(sources)) == 3


def _load(folder: Path, name: str, text: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._scaled


def test_a_constant_that_prints_as_something_else_than_it_compiles_to_is_refused() -> None:
    with pytest.raises(AssertionError, match="BLOCK"):
        scaled(block=numpy.int64(128))  # type: ignore[arg-type]


def test_a_key_prints_what_it_is_of() -> None:
    assert str(scaled(eps=1e-5).key("sm_90", "triton 0")) == (
        "scaled(*fp32, *fp32, i32)[BLOCK=128, EPS=1e-05] 4 warps, 3 stages, sm_90"
    )
