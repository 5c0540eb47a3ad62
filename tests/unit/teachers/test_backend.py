"""Which backend a teacher gets, with the arithmetic, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decision import Decision
from engine.errors import BadInput
from engine.models.config import ModelConfig
from engine.runtime.device import choose_precision
from engine.teachers.backend import choose_backend, choose_teacher_precision
from tests.support.packed_models import make_config

GIB = 2**30
DENSE, PACKED = round(31.2 * GIB), round(9.1 * GIB)
CONFIG = make_config()


def choose(
    wanted: str = "auto",
    *,
    available: float | None = 80,
    blocks: bool = True,
    packed: int | None = PACKED,
    config: ModelConfig | None = CONFIG,
) -> Decision:
    return choose_backend(
        wanted,
        config=config,
        quantised_blocks=blocks,
        dense_bytes=DENSE,
        packed_bytes=packed if blocks else None,
        available_bytes=None if available is None else round(available * GIB),
    )


def test_auto_is_dense_where_that_fits() -> None:
    found = choose(available=80)
    assert found.choice == "dequantized" and not found.overridden
    assert "with dense weights the run needs 31.2 GiB of 80.0 GiB available" in found.reason
    assert found.rejected[0][0] == "quantized" and "9.1 GiB" in found.rejected[0][1]
    assert found.override == "--set teacher.backend=quantized"


def test_auto_is_blocks_where_dense_does_not_fit() -> None:
    found = choose(available=22.9)
    assert found.choice == "quantized" and not found.overridden
    assert "with weights in blocks the run needs 9.1 GiB of 22.9 GiB available" in found.reason
    assert found.rejected[0] == (
        "dequantized",
        "with dense weights the run needs 31.2 GiB of 22.9 GiB available",
    )
    assert found.override == "--set teacher.backend=dequantized"


def test_auto_without_blocks_is_dense_and_says_that_it_does_not_fit() -> None:
    found = choose(available=22.9, blocks=False)
    assert found.choice == "dequantized"
    assert "31.2 GiB of 22.9 GiB available" in found.reason
    assert "the file has no quantized blocks, so no smaller backend exists" in found.reason


def test_auto_where_nobody_knows_the_memory_is_dense_and_says_so() -> None:
    found = choose(available=None)
    assert found.choice == "dequantized"
    assert "needs 31.2 GiB, and the available memory is unknown" in found.reason


def test_what_the_user_set_is_taken_with_the_same_arithmetic() -> None:
    dense = choose("dequantized", available=22.9)
    assert dense.choice == "dequantized" and dense.overridden
    assert "31.2 GiB of 22.9 GiB available" in dense.reason
    packed = choose("quantized", available=80)
    assert packed.choice == "quantized" and packed.overridden
    assert "9.1 GiB of 80.0 GiB available" in packed.reason
    assert packed.rejected[0][1].endswith("available, and is faster")


def test_a_need_in_blocks_that_nobody_computed_is_not_made_up() -> None:
    found = choose(available=22.9, packed=None)
    assert found.choice == "quantized" and "GiB" not in found.reason


def test_blocks_that_are_not_there_are_refused_with_what_to_do() -> None:
    with pytest.raises(BadInput, match=r"expected a GGUF or \.apr file") as caught:
        choose("quantized", blocks=False)
    assert "engine convert" in str(caught.value.hint)


def test_no_teacher_is_none_and_says_whose_wish_that_was() -> None:
    absent, off = choose(config=None), choose("none", config=None)
    assert absent.choice == off.choice == "none"
    assert "no teacher.path is given" in absent.reason and not absent.overridden
    assert "switched off by the user" in off.reason and off.overridden


@given(
    available=st.none() | st.integers(0, 100 * GIB),
    dense=st.integers(0, 100 * GIB),
    blocks=st.booleans(),
)
def test_auto_never_takes_blocks_that_are_absent_or_not_needed(
    available: int | None, dense: int, blocks: bool
) -> None:
    found = choose_backend(
        "auto",
        config=CONFIG,
        quantised_blocks=blocks,
        dense_bytes=dense,
        packed_bytes=dense // 3 if blocks else None,
        available_bytes=available,
    )
    fits = available is None or dense <= available
    assert (found.choice == "quantized") == (blocks and not fits)
    assert found.choice not in [value for value, _ in found.rejected]


def test_tf32_is_for_gpus_that_have_it() -> None:
    found = choose_teacher_precision("tf32", device="cuda", capability=(8, 0))
    assert found.choice == "tf32" and found.overridden
    for device, capability, named in (
        ("cuda", (7, 5), "compute capability 7.5"),
        ("cpu", None, "a CPU"),
    ):
        with pytest.raises(BadInput, match=rf"8\.0 or later, found {named}"):
            choose_teacher_precision("tf32", device=device, capability=capability)


@pytest.mark.parametrize("wanted", ["auto", "fp32", "bf16"])
def test_other_precisions_are_chosen_as_the_students_are(wanted: str) -> None:
    found = choose_teacher_precision(wanted, device="cpu", capability=None)
    assert found == choose_precision("teacher.precision", wanted, "cpu")
