"""Several runs in little room: every one is there, told apart, whatever their names and however wide it is."""

from __future__ import annotations

import pytest

from workbench.plot.series import series_style
from workbench.tui.names import cut_at_end, distinct_names, shortened, wrapped
from workbench.tui.run_lines import HeadedRun, heading_lines, result_lines, setting_lines

NAMES = (
    "kd-qwen3-14b-to-0.6b-alpha0.1-tau1.0-lr4e-3-seed0",
    "kd-qwen3-14b-to-0.6b-alpha0.5-tau1.0-lr4e-3-seed0",
    "kd-qwen3-14b-to-0.6b-alpha0.5-tau2.0-lr4e-3-seed1",
    "demo-20261122-111800",
    "demo-20261122-121500",
    "slow-rate",
)
ROWS = [
    ["state", "completed", "killed", "vanished", "not started", "RUNNING", "unreadable"],
    ["step", "60/60", "30/60", "30/60", "-", "1830/5000", "13/60"],
    ["loss", "2.1991", "2.8925", "nan", "-", "2.1132", "4.0882"],
    ["best held-out", "2.6290", "-", "-", "-", "2.5000", "-"],
]
LETTERS = "ABCDEF"


@pytest.mark.parametrize("width", range(9, 60, 3))
def test_names_that_differ_are_shown_differently(width: int) -> None:
    shown = distinct_names(NAMES, width)
    assert len(set(shown)) == len(NAMES)
    assert all(len(name) <= width for name in shown)


def test_a_name_that_is_unlike_the_others_is_cut_in_its_middle() -> None:
    assert distinct_names(NAMES, 13)[-2] == shortened("demo-20261122-121500", 13) == "demo-2…121500"
    assert distinct_names(("run", "run"), 2) == ["r…", "r…"], "the same name is the same"
    names = ("sweep-lr1-seed0", "sweep-lr2-seed0")
    assert distinct_names(names, 9) == ["…1-seed0", "…2-seed0"]


@pytest.mark.parametrize("count", range(2, 7))
@pytest.mark.parametrize("width", [34, 36, 60, 76, 84, 106, 200])
def test_every_run_and_every_result_is_in_the_table(count: int, width: int) -> None:
    rows = [row[: count + 1] for row in ROWS]
    lines = result_lines(range(count), NAMES[:count], rows, width)
    texts = [line.plain for line in lines]
    assert max(map(len, texts)) <= width
    words = "\n".join(texts)
    for row in rows:
        assert all(cell in words for cell in row), row
    for slot in range(count):
        coloured = [
            line.plain[span.start : span.end]
            for line in lines
            for span in line.spans
            if series_style(slot).colour in str(span.style)
        ]
        assert any(LETTERS[slot] in text for text in coloured), "its letter, in its colour"


def test_six_runs_are_rows_in_blocks_on_a_small_screen() -> None:
    lines = [line.plain for line in result_lines(range(6), NAMES, ROWS, 36)]
    assert [line.split()[0] for line in lines[:3]] == ["state", "A", "B"]


def test_a_setting_says_who_has_which_value() -> None:
    settings = [("loss.alpha", (((0, 2), "0.1"), ((1,), "0.5"))), ("data.tokenizer", (((0,), ""),))]
    lines = [line.plain for line in setting_lines((0, 3, 5), settings, 40)]
    assert lines == ["loss.alpha      AF 0.1  D 0.5", "data.tokenizer  A (empty)"]
    narrow = [line.plain for line in setting_lines((0, 3, 5), settings, 20)]
    assert narrow[:3] == ["loss.alpha", "  AF 0.1", "  D 0.5"]


PATH = "/models/checkpoints/qwen3-14b-instruct/teacher.gguf"


@pytest.mark.parametrize("width", range(26, 70))
def test_a_long_value_is_broken_and_loses_nothing(width: int) -> None:
    lines = setting_lines((0, 1), [("teacher.path", (((0,), PATH), ((1,), "teacher")))], width)
    rows = [line.plain for line in lines]
    assert max(map(len, rows)) <= width
    assert PATH in "".join(row.strip() for row in rows)


LINES = (
    f"student saved in {PATH} (4.4 MiB, sha256 d5486a8c7006), read back and compared",
    "  because the steps of a step and the matrices of a layer are known before the first",
    f"command    python {PATH} --config train.toml --resume checkpoints/step-000030",
    "22:41:03 the script ended with ValueError at train.py:5 in <module>: expected a row of 32 tokens",
)


@pytest.mark.parametrize("width", range(31, 90, 3))
@pytest.mark.parametrize("line", LINES)
def test_a_wrapped_line_loses_nothing(line: str, width: int) -> None:
    rows = wrapped(line, width)
    assert max(map(len, rows)) <= width
    assert "".join("".join(rows).split()) == "".join(line.split())
    if PATH not in line:
        assert " ".join(row.strip() for row in rows).split() == line.split()


def test_rows_after_the_first_begin_under_the_text_of_a_label() -> None:
    assert (
        wrapped("group 1    4.2k parameters, rate 0.001, decay 0.01", 40)[1]
        == " " * 11 + "decay 0.01"
    )
    assert wrapped("22:41:03 checkpoint saved at step 30, best", 32)[1] == " " * 9 + "step 30, best"
    assert wrapped("  because it does not fit the memory", 32)[1] == "    memory"


def test_a_sentence_is_cut_behind_a_word() -> None:
    sentence = "none of its processes exists and no end was recorded"
    for width in range(6, len(sentence)):
        cut = cut_at_end(sentence, width)
        assert len(cut) <= width
        assert sentence.startswith(f"{cut.removesuffix('…')} "), cut
    assert cut_at_end("unbreakable", 6) == "unbre…"


@pytest.mark.parametrize("width", [38, 78, 118, 158])
@pytest.mark.parametrize("count", [2, 6])
def test_the_heading_has_every_run_and_its_value(count: int, width: int) -> None:
    runs = [HeadedRun(slot, NAMES[slot], f"{slot}.1234") for slot in range(count)]
    lines = heading_lines(runs, width, first=["compare"], rows=2, ascii_only=False)
    texts = [line.plain for line in lines]
    assert len(texts) <= 2
    assert max(map(len, texts)) <= width
    assert all(f"{slot}.1234" in " ".join(texts) for slot in range(count))
