"""A filter of runs: what each term lets through, and what is said of a bad one."""

from __future__ import annotations

import math

import pytest

from engine.errors import BadInput
from engine.log.filters import Subject, parse_filter

NAMES = ("train.lr", "train.rows", "eval.rows", "loss.kernel", "student.graphs", "data.seq_len")
RUN = Subject(
    state="failed",
    tags=("baseline", "Good"),
    values={
        "train.lr": 0.002,
        "train.rows": 8,
        "eval.rows": 64,
        "loss.kernel": "eager",
        "student.graphs": True,
        "loss": 2.5,
        "step": 60,
    },
    words="sweep/lr-2 failed warning data_wait the loader is late",
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("lr>0.001", True),
        ("lr>0.002", False),
        ("lr>=2e-3", True),
        ("train.lr<0.01", True),
        ("lr<=0.001", False),
        ("lr=0.002", True),
        ("lr!=0.002", False),
        ("train.rows=8", True),
        ("kernel=eager", True),
        ("kernel!=EAGER", False),
        ("kernel!=fused", True),
        ("kernel<3", False),
        ("graphs=true", True),
        ("seq_len!=512", False),
        ("loss<3 step=60", True),
        ("state:FAILED", True),
        ("state:fail", False),
        ("tag:good", True),
        ("tag:goo", False),
        (r"/lr-\d+/", True),
        ("/LOADER is/", True),
        ("/^lr/", False),
        ("Sweep wait", True),
        ("sweep nobody", False),
        ("sweep/lr-2", True),
        ("lr>0.001 state:failed /late$/", True),
        ("lr>0.001 state:completed /late$/", False),
    ],
)
def test_all_terms_of_a_filter_must_hold(text: str, holds: bool) -> None:
    assert parse_filter(text, NAMES).matches(RUN) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr>", "expected a value after >, as in lr>0.001, found nothing"),
        ("lr>fast", "expected a number after >, found fast"),
        ("lr>nan", "expected a number after >, found nan"),
        ("lrr>1", "expected a setting of these runs, or loss, held-out, step (like lr), found lrr"),
        ("rows=8", "expected the section too, found rows in eval.rows and train.rows"),
        ("state:", "expected a word after state:, as in state:failed, found nothing"),
        ("stat:failed", "expected state: or tag: before the word, found stat:"),
        ("/late", "expected a regular expression between slashes"),
        ("//", "expected a regular expression between slashes"),
        ("/(/", "expected a regular expression, found"),
        (">3", "expected a word, /regex/, state:WORD, tag:WORD or a comparison"),
    ],
)
def test_a_bad_term_is_told_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_filter(f"sweep {text}", NAMES)
    assert f"filter: {text}" in refused.value.message
    assert said in refused.value.message


def test_a_loss_that_is_nan_is_neither_above_nor_below() -> None:
    run = Subject(state="failed", tags=(), values={"loss": math.nan}, words="")
    assert not parse_filter("loss<1e9").matches(run)
    assert not parse_filter("loss>-1e9").matches(run)


def test_without_names_a_setting_is_looked_up_as_it_is_written() -> None:
    assert parse_filter("train.lr=0.002").matches(RUN)
    assert not parse_filter("train.nothing=1").matches(RUN)
