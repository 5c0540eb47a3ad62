"""Settings from the environment: each becomes a `--set`, anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import SpecError
from engine.spec import RunSpec
from engine.spec.environment import ALIASES, sets_from_environment


@pytest.mark.parametrize(
    ("environ", "sets"),
    [
        ({}, []),
        ({"MANAGED_MEMORY": ""}, []),
        ({"MANAGED_MEMORY": "1"}, ["memory.allocator=managed"]),
        ({"MANAGED_MEMORY": "0"}, ["memory.allocator=native"]),
        ({"APR_DISTILL_TEACHER_BACKEND": "auto"}, ["teacher.backend=auto"]),
        ({"APR_DISTILL_TEACHER_BACKEND": "cudatrainer"}, ["teacher.backend=dequantized"]),
        ({"APR_DISTILL_TEACHER_BACKEND": "realizar-q4k"}, ["teacher.backend=quantized"]),
        (
            {"APR_DISTILL_TEACHER_BACKEND": "auto", "MANAGED_MEMORY": "0", "HOME": "/"},
            ["memory.allocator=native", "teacher.backend=auto"],
        ),
    ],
)
def test_each_alias_is_one_setting(environ: dict[str, str], sets: list[str]) -> None:
    assert sets_from_environment(environ) == sets


def test_all_wrong_values_are_named_at_once_with_the_allowed_ones() -> None:
    environ = {"MANAGED_MEMORY": "yes", "APR_DISTILL_TEACHER_BACKEND": "CUDATRAINER"}
    with pytest.raises(SpecError) as caught:
        sets_from_environment(environ)
    first, second = caught.value.problems
    assert first == "MANAGED_MEMORY: the environment — expected one of 1, 0, found 'yes'"
    assert "expected one of auto, cudatrainer, realizar-q4k, found 'CUDATRAINER'" in second


@given(variable=st.sampled_from(sorted(ALIASES)), value=st.text(min_size=1))
def test_no_value_is_ignored(variable: str, value: str) -> None:
    key, values = ALIASES[variable]
    if value in values:
        assert sets_from_environment({variable: value}) == [f"{key}={values[value]}"]
    else:
        with pytest.raises(SpecError):
            sets_from_environment({variable: value})


def test_every_alias_names_a_setting_that_allows_its_values() -> None:
    spec = RunSpec().to_dict()
    for key, values in ALIASES.values():
        section, name = key.split(".")
        field = type(getattr(RunSpec(), section)).__dataclass_fields__[name]
        assert name in spec[section]
        assert set(values.values()) <= set(field.metadata["allowed"])
