"""The small values that everything uses: errors, verdicts, decisions, and numbers as text."""

from __future__ import annotations

import errno
import math
import os
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decision import Decision
from engine.errors import (
    BadInput,
    CheckpointError,
    CorpusError,
    DiskFull,
    EngineError,
    InternalError,
    RunLogError,
    SpecError,
    TokenizerError,
    UsageError,
    WeightsError,
    write_error,
)
from engine.units import (
    NOT_MEASURED,
    format_bytes,
    format_count,
    format_seconds,
    format_value,
)
from engine.verdict import Level, Verdict, lowest

# Errors.

INPUTS = (BadInput, WeightsError, TokenizerError, CorpusError, CheckpointError, RunLogError)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (EngineError, 70),
        (UsageError, 64),
        (InternalError, 70),
        (DiskFull, 65),
        *((kind, 65) for kind in INPUTS),
    ],
)
def test_the_exit_code_belongs_to_the_class(kind: type[EngineError], code: int) -> None:
    error = kind("what happened", hint="try this")
    assert error.exit_code == code
    assert str(error) == "what happened\nhint: try this"
    assert str(kind("what happened")) == "what happened"
    assert (error.message, error.hint) == ("what happened", "try this")


@pytest.mark.parametrize("kind", [*INPUTS, SpecError, DiskFull])
def test_the_house_form_is_what_where_expected_found(kind: type[BadInput]) -> None:
    error = kind.expected("vocabulary", "a/b.json", "32000 ids", "31999", hint="retokenise")
    assert type(error) is kind
    assert error.message == "vocabulary: a/b.json — expected 32000 ids, found 31999"
    assert error.hint == "retokenise"


def test_a_spec_error_holds_every_problem() -> None:
    error = SpecError(["a.b: one", "c.d: two"], hint="see the docs")
    assert error.problems == ("a.b: one", "c.d: two")
    assert str(error) == "a.b: one\nc.d: two\nhint: see the docs"
    assert SpecError("one problem").problems == ("one problem",)
    assert SpecError(x for x in ("a", "b")).problems == ("a", "b")


@pytest.mark.parametrize("error", [SpecError(["a", "b"], hint="h"), DiskFull("m", hint="h")])
def test_an_error_survives_the_way_between_processes(error: EngineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_full_disk_with_the_hint_for_it(code: int) -> None:
    error = write_error(
        "log", "a.jsonl", "to write", OSError(code, os.strerror(code)), when_full="make room"
    )
    assert type(error) is DiskFull and error.hint == "make room"
    assert error.message == f"log: a.jsonl — expected to write, found {os.strerror(code)}"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOENT, errno.EROFS])
def test_any_other_failure_is_not_called_a_full_disk(code: int) -> None:
    error = write_error("log", "a", "x", OSError(code, "why"), when_full="make room")
    assert type(error) is RunLogError and error.hint is None and "found why" in error.message
    assert "found odd" in write_error("log", "a", "x", OSError("odd")).message


# Verdicts.


def test_verdicts_are_ordered_fail_unknown_pass() -> None:
    assert Level.FAIL < Level.UNKNOWN < Level.PASS


@pytest.mark.parametrize(
    ("level", "code", "text"),
    [(Level.PASS, 0, "pass: r"), (Level.FAIL, 1, "fail: r"), (Level.UNKNOWN, 2, "unknown: r")],
)
def test_a_verdict_has_an_exit_code_and_a_line(level: Level, code: int, text: str) -> None:
    assert (Verdict(level, "r").exit_code, str(Verdict(level, "r"))) == (code, text)


def test_the_verdict_of_nothing_is_unknown() -> None:
    assert lowest([]).level is Level.UNKNOWN and lowest([]).reason == "nothing was checked"


@given(levels=st.lists(st.sampled_from(Level), min_size=1))
def test_a_set_is_as_good_as_its_worst_and_gives_the_first_reason_for_it(
    levels: list[Level],
) -> None:
    verdicts = [Verdict(level, f"number {index}") for index, level in enumerate(levels)]
    worst = lowest(iter(verdicts))
    assert worst.level == min(levels)
    assert worst.reason == f"number {levels.index(min(levels))}"


# Decisions.


def test_a_decision_says_what_why_what_not_and_how_else() -> None:
    decision = Decision(
        knob="teacher.backend",
        choice="dequantized",
        reason="it fits",
        rejected=(("none", "a teacher was given"), ("cached", "no cache")),
    )
    assert decision.lines() == [
        "teacher.backend: dequantized",
        "  because it fits",
        "  not none: a teacher was given",
        "  not cached: no cache",
        "  override: --set teacher.backend=none",
    ]


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("set by the user", "set by the user"),
        ("", "set by the user"),
        ("fp32 asked for", "set by the user: fp32 asked for"),
    ],
)
def test_an_overridden_decision_says_that_the_user_made_it(reason: str, why: str) -> None:
    decision = Decision(knob="a.b", choice="c", reason=reason, overridden=True)
    assert decision.lines() == ["a.b: c", f"  {why}", "  override: --set a.b=VALUE"]


# Numbers as text.

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (0.25, "0.2 B"),
        (-0.25, "-0.2 B"),
        (1023, "1023 B"),
        (1023.4, "1023 B"),
        (1023.5, "1.0 KiB"),
        (1023.9, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (1023.94 * KIB, "1023.9 KiB"),
        (1023.96 * KIB, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (TIB - 1, "1.0 TiB"),
        (2000 * TIB, "2000.0 TiB"),
    ],
)
def test_bytes_read_as(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (3e-9, "3.0e-09 s"),
        (0.5e-6, "5.0e-07 s"),
        (0.6e-6, "1 µs"),
        (0.00025, "250 µs"),
        (0.000999, "999 µs"),
        (0.0009996, "1 ms"),
        (0.0123, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (1.25, "1.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1m00s"),
        (60, "1m00s"),
        (75, "1m15s"),
        (119.6, "2m00s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (7260, "2h01m"),
        (86_400, "24h00m"),
        (48 * 3600 - 0.6, "47h59m"),
        (48 * 3600 - 0.4, "2d00h"),
        (100 * 3600, "4d04h"),
        (-75, "-1m15s"),
        (-0.0, "0 ms"),
    ],
)
def test_seconds_read_as(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (-0.0, "0"),
        (7, "7"),
        (0.25, "0.25"),
        (0.004, "0.004"),
        (9.94, "9.9"),
        (9.96, "10"),
        (99.6, "100"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (1000, "1.0k"),
        (12_345, "12.3k"),
        (-12_345, "-12.3k"),
        (999_940, "999.9k"),
        (999_960, "1.0M"),
        (999_960_000, "1.0G"),
        (999_960_000_000, "1.0T"),
        (5e15, "5000.0T"),
    ],
)
def test_counts_read_as(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (-0.0, "0.0000"),
        (2.34567, "2.3457"),
        (-2.34567, "-2.3457"),
        (0.0001, "0.0001"),
        (0.00009, "9.000e-05"),
        (-3e-9, "-3.000e-09"),
        (9999.9999, "9999.9999"),
        (9999.99999, "1.000e+04"),
        (123456.0, "1.235e+05"),
    ],
)
def test_values_read_as(value: float, text: str) -> None:
    assert format_value(value) == text
    assert format_value(2.0, 2) == "2.00" and format_value(0.004, 2) == "4.000e-03"


FORMATS = [format_bytes, format_seconds, format_count, format_value]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_known_is_not_measured_and_what_is_no_number_is_written_out(form) -> None:  # type: ignore[no-untyped-def]
    assert form(None) == NOT_MEASURED
    assert form(math.nan) == "NaN"
    assert (form(math.inf), form(-math.inf)) == ("+inf", "-inf")


@pytest.mark.parametrize("form", FORMATS)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_as_zero_only_when_it_is_zero(form, value: float) -> None:  # type: ignore[no-untyped-def]
    text = form(value)
    if re.search("[1-9]", text) is None:
        assert value == 0 and not text.startswith("-")
    else:
        assert text.startswith("-") == (value < 0)


@given(value=st.floats(0, 1e15))
def test_no_text_rounds_up_into_the_next_unit(value: float) -> None:
    assert not re.match(r"1024(\.0)? (B|KiB|MiB|GiB)", format_bytes(value))
    assert not re.match(r"1000(\.0)?(k|M|G|$)", format_count(value))
    assert not re.match(r"(1000 (ms|µs)|60\.0 s|60m|\d+m60s|\d+h60m|48h)", format_seconds(value))
