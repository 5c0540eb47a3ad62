"""Whether a run did the work of another one until that failed, by the rows, losses and counters of their steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_of

from engine.log.events import Watched, Worked
from engine.log.folder import RunFolder
from engine.log.work import work_left_out
from tests.support.flip_pairs import SEEN
from tests.support.run_folders import Scene, step
from tests.unit.flips.test_proposals import PROBED


def run_of(path: Path, worked: list[Worked]) -> RunFolder:
    scene = Scene(path).open()
    scene.events(*worked)
    return scene.close().run


def counted(numbers: list[int], fails: bool = False, **others: list[int]) -> list[Worked]:
    """Steps of a loop whose counter `i` has these values."""
    found = []
    for n, number in enumerate(numbers):
        counters = {"main.i": number} | {f"main.{name}": one[n] for name, one in others.items()}
        failed = fails and n == len(numbers) - 1
        found.append(Worked(step=n + 1, counters=counters, failed=failed))
    return found


SIX = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("step()", "step(); i += i == 2", "it assigns `i`, which counts the steps of A"),
        ("step()", "step(); i = str(i)", "it assigns `i`, which counts the steps of A"),
        ("for i in x:", "for i in y:", ""),
        ("x = i", "x = i + 1", ""),
        ("--batch 8", "--batch 4", ""),
        ("i += 1", "i += 1; fix()", ""),
    ],
)
def test_a_change_may_not_set_what_counts_the_steps(
    tmp_path: Path, was: str, now: str, said: str
) -> None:
    """A condition of the step that fails would not be met any more."""
    runs = run_of(tmp_path / "a", counted([0, 1, 2, 3], True)), run_of(tmp_path / "b", counted(SIX))
    assert work_left_out(*runs, was, now) == said


@pytest.mark.parametrize(
    "now", ["a.i += 0", "self.state.i = 0", "state['i'] += 0", "fix(); i += 0"]
)
def test_a_change_may_not_stop_what_counts_the_steps(tmp_path: Path, now: str) -> None:
    """A counter may be an attribute, and may have been assigned by the same line in A."""
    for name in ("main.i", "train.self.state.i"):
        folder = tmp_path / name
        a, b = (
            run_of(
                folder / arm,
                [Worked(step=n, counters={name: i} if i else {}) for n, i in enumerate(of, 1)],
            )
            for arm, of in (("a", SIX[:4]), ("b", [0, *[1] * 5]))
        )
        said = f"it assigns `{name.partition('.')[2]}`, which counts the steps of A"
        assert work_left_out(a, b, "i += 1", now) == said
        assert not work_left_out(a, a, "i += 1", "i += 1; fix()")


@pytest.mark.parametrize(
    ("a", "b", "is_left_out"),
    [
        ([2.0, 1.0], [2.0, 1.0, math.nan], True),
        # The step in which A fails may be the first, and a loss that is no number may be usual.
        ([2.0, math.nan], [2.0, math.nan, math.nan], True),
        ([math.inf, 2.0, 1.0], [math.inf, 2.0, 1.0, 0.5], False),
        ([2.0, math.nan], [2.0, 1.0, 0.5], False),
    ],
)
def test_steps_on_losses_that_are_no_numbers_are_no_work(
    tmp_path: Path, a: list[float], b: list[float], is_left_out: bool
) -> None:
    """A check of the loss that is turned off does not end what it found."""
    assert bool(work_left_out(*losses_of(tmp_path, a, b))) is is_left_out


def test_steps_of_the_engine_are_on_the_same_rows_unless_the_data_were_changed(
    tmp_path: Path,
) -> None:
    runs = []
    for name, digests in (("a", ["1", "2"]), ("b", ["1", "3", "4"])):
        scene = Scene(tmp_path / name).open()
        scene.events(*(step(n, 2.0, rows_digest=one) for n, one in enumerate(digests, 1)))
        runs.append(scene.close().run)
    found = work_left_out(runs[0], runs[1], same_rows=True)
    assert found == "step 2 of B is on other rows than A's"
    assert not work_left_out(runs[0], runs[1])


OBSERVED = replace(SEEN, step=2, sign="")


def on(*rows: str, fails: bool = False, **more: list[object]) -> list[Worked]:
    """Steps on these rows; `more` has other fields of each of them."""
    return [
        Worked(
            step=n + 1,
            rows=one.split(),
            failed=fails and n + 1 == len(rows),
            **{name: values[n] for name, values in more.items()},  # type: ignore[arg-type]
        )
        for n, one in enumerate(rows)
    ]


def said_of(
    tmp_path: Path,
    a: list[Worked],
    b: list[Worked],
    losses: tuple[list[float | None], list[float | None]] = ([], []),
    **how: object,
) -> str | None:
    runs = []
    for name, worked, of in (("a", a, losses[0]), ("b", b, losses[1])):
        scene = Scene(tmp_path / name).open()
        scene.events(*worked, *(step(n, loss) for n, loss in enumerate(of, 1)))
        runs.append(scene.close().run)
    return work_left_out(*runs, **{"observed": OBSERVED} | how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "kind", "said"),
    [
        (on("a b", "c d", fails=True), on("a b", "c d", "e f"), "", None),
        # A row is mended, left out, doubled, or the others moved up.
        (on("a b", "c d", fails=True), on("a b", "x d", "e f"), "", None),
        (on("a b", "c d", fails=True), on("a b", "d", "e f"), "", "rows are 1 in step 2"),
        (on("a b", "c d", fails=True), on("a b", "d d", "e f"), "", "differ from A's in step 2"),
        (on("a b", "c d", fails=True), on("a b", "d e", "f g"), "", "differ from A's in step 2"),
        (on("a b", "c d", fails=True), on("a b", "a b", "a b"), "", "differ from A's in step 2"),
        (on("a b", "c d", fails=True), on("e f", "g h", "i j"), "", "differ from A's in step 1"),
        # After a change of data as many different ones count.
        (on("a b", "c d", fails=True), on("a b", "d e", "f g"), "data", "in which A failed are missing"),
        (on("a b", "c d", fails=True), on("a b", "d e", "a b", "d e"), "data", None),
        (on("a b", "c d", fails=True), on("a b", "a b", "a b"), "data", "2 distinct rows, A 4"),
        (on("a b", "c d", fails=True), on("e f", "g h", "i j"), "data", "only a run to the end"),
        (on("a", "b", asked=[[0], [1]]), on("a", "c", "d", asked=[[0], [2], [3]]), "data", "did not yield 1"),
        (on("a", "b", called=[["p"], ["q"]]), on("a", "b", called=[["p"], ["p"]]), "", "model is trained on"),
        (on("a", "b", evaluated=[[], ["p", "q"]]), on("a", "b"), "", "evaluated on 0 rows by step 2"),
        (on("a", "b", evaluated=[[], ["p", "q"]]), on("a", "b", evaluated=[[], ["p"] * 9]), "", "1 of A's 2"),
        (on("a", "b", evaluated=[[], ["p", "q"]]), on("a", "b", evaluated=[[], ["p", "x"]]), "", None),
    ],
)  # fmt: skip
def test_the_rows_of_a_run_are_those_of_the_other_one(
    tmp_path: Path, a: list[Worked], b: list[Worked], kind: str, said: str | None
) -> None:
    found = said_of(tmp_path, a, b, kind=kind)
    assert not found if said is None else found is not None and said in found, found


SAME = on("a", "b", "c", fails=True), on("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("losses", "kind", "said"),
    [
        (([2.0, 1.0], [2.01, 1.5, 1.4, 1.3, 1.2]), "", None),
        (([2.0, 1.0], [3.0, 1.5, 1.4, 1.3, 1.2]), "", "its first loss is 3"),
        (([2.0, 1.0], [3.0, 1.5, 1.4, 1.3, 1.2]), "objective", None),
        (([2.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0]), "objective", "whatever the rows"),
        (([2.0, 1.0], [2.0, 1.5, 1.0, 1.0, 1.0]), "", "is 1.0 from step 3 on"),
        (([2.0, 1.0], [None, None, None, None, None]), "", "loss of step 1 is not known"),
    ],
)
def test_a_run_trains_for_what_the_other_one_did(
    tmp_path: Path, losses: tuple[list[float | None], ...], kind: str, said: str | None
) -> None:
    found = said_of(tmp_path, *SAME, losses, kind=kind)  # type: ignore[arg-type]
    assert not found if said is None else found is not None and said in found, found


def course(first: float, last: float, n: int, noise: float = 0.02) -> list[float]:
    """Losses that go from `first` to `last` by the same factor each step, and fluctuate."""
    return [first * (last / first) ** (at / n) * (1 + noise * (-1) ** at) for at in range(n)]


def losses_of(path: Path, a: list[float], b: list[float]) -> list[RunFolder]:
    runs = []
    for name, losses in (("a", a), ("b", b)):
        scene = Scene(path / name).open()
        scene.events(*(step(n, loss) for n, loss in enumerate(losses, 1)))
        runs.append(scene.close().run)
    return runs


LEARNS_AND_FAILS = [*course(2.0, 0.5, 20), 40.0]
GROWS = course(1.0, 60.0, 20)


@pytest.mark.parametrize(
    ("a", "b", "kind", "said"),
    [
        # A had learnt: so must B, as far as one loss of both can say it.
        (LEARNS_AND_FAILS, course(2.0, 0.4, 30), "", None),
        (LEARNS_AND_FAILS, course(2.0, 1.2, 30), "", None),
        (LEARNS_AND_FAILS, course(2.0, 1.999, 30), "", "its loss fell by"),
        (LEARNS_AND_FAILS, course(2.0, 1.999, 30), "model", "its loss fell by"),
        (LEARNS_AND_FAILS, course(2.0, 1.999, 30), "objective", None),
        # A learnt nothing, or diverged from the first step on: nothing to compare with.
        ([*course(1.0, 1.0, 20), 40.0], course(1.0, 1.0, 30), "", None),
        (GROWS, course(1.0, 0.999, 30), "", None),
        # B fails as A did, but later.
        (GROWS, course(1.0, 12.0, 30), "", "it may fail later"),
        (GROWS, course(1.0, 12.0, 30), "objective", "it may fail later"),
        ([1.0, 3.0, 9.0, 90.0], course(1.0, 3.0, 30, noise=0.2), "", "it may fail later"),
        # A failed otherwise, or too few losses are known.
        (course(1.0, 0.9, 20), course(1.0, 1.2, 30), "", None),
        (GROWS[:6], course(1.0, 12.0, 9), "", None),
    ],
)
def test_a_run_learns_as_the_other_one_did(
    tmp_path: Path, a: list[float], b: list[float], kind: str, said: str | None
) -> None:
    found = work_left_out(*losses_of(tmp_path, a, b), kind=kind, observed=SEEN)
    assert not found if said is None else found is not None and said in found, found


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (course(1.0, 0.4, 30), None),
        (course(1.0, 0.999, 30), "its loss did not fall in 30 steps"),
        (course(1.0, 0.999, 6), None),
    ],
)
def test_a_setting_that_scales_updates_must_leave_some(
    tmp_path: Path, b: list[float], said: str | None
) -> None:
    """A learning rate of nothing ends every divergence."""
    runs = losses_of(tmp_path, GROWS, b)
    found = work_left_out(*runs, observed=SEEN, scales_updates=True)
    assert not found if said is None else found is not None and said in found, found


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ("check(x)", None),
        ("y = fix(check(x))", None),
        ("pass", "does not call `check`"),
        ("step % 2 and check(x)", "or not always"),
        ("check(x) if x else None", "or not always"),
        ("[check(x) for _ in []]", "or not always"),
        ("with suppress(ValueError): check(x)", "or not always"),
        ("if check(x): pass", None),
        ("check = print; check(x)", "it assigns `check`"),
        ("from math import exp as check; check(x)", "it assigns `check`"),
    ],
)
def test_the_call_that_failed_is_made(tmp_path: Path, now: str, said: str | None) -> None:
    a = on("a", "b", fails=True, calls=[[], ["train.py:7 check"]])
    found = said_of(tmp_path, a, SAME[1], key="train.py:7", was="check(x)", now=now)
    assert not found if said is None else found is not None and said in found, found


def test_an_identity_is_judged_as_often(tmp_path: Path) -> None:
    a, b = (on("a", "b", judged=[{"x": 1}, {"x": n}]) for n in (3, 1))  # type: ignore[list-item]
    seen = replace(OBSERVED, kind="identity", id="x")
    assert "has 1 results, and 3 in A" in (said_of(tmp_path, a, b, observed=seen) or "")


def test_a_training_elsewhere_is_another_one(tmp_path: Path) -> None:
    runs = []
    for place in ("train.py:9", "decoy.py:3"):
        scene = Scene(tmp_path / place).open()
        scene.events(
            Watched(**PROBED, device="cpu", parameters=1, world=1, places={"step": place}),
            *counted(SIX),
        )
        runs.append(scene.close().run)
    found = work_left_out(runs[0], runs[1])
    assert found is not None and "at other lines" in found


RISES, FALLS = [1.0, 2.0, 1.5, 40.0], [1.0, 0.9, 0.8, 0.7, 0.6]


@pytest.mark.parametrize(
    ("losses", "kind", "more", "said"),
    [
        # The same losses, and multiples of them: a limit was raised, or the loss divided.
        ([*RISES, 2.0], "", {}, "of the code that raises, not of the training"),
        (
            [x / 8 for x in [*RISES, 2.0]],
            "objective",
            {},
            "the scale of its loss and the code that raises",
        ),
        # Other losses on the same rows: a logarithm rises in that step too, a training that does not diverge does not.
        (
            [math.log1p(x) for x in [*RISES, 2.0]],
            "objective",
            {},
            "which is also largest in step 4",
        ),
        (FALLS, "objective", {}, None),
        ([1.0, 1.8, 1.2, 3.0, 2.0], "", {}, None),
        # What the model answered, or was called with, without gradients.
        ([*RISES, 2.0], "", {"answers": [[], [], [], [0.5], []]}, None),
        ([*RISES, 2.0], "", {"answers": [[], [], [], [0.25], []]}, "not of the training"),
    ],
)
def test_another_number_was_computed_where_the_script_had_judged_one(
    tmp_path: Path, losses: list[float], kind: str, more: dict[str, list[object]], said: str | None
) -> None:
    rows = ["a", "b", "c", "d", "e"]
    given = {name: [*of[:3], [0.25], *of[4:]] for name, of in more.items()}
    a, b = on(*rows[:4], **given), on(*rows, **more)
    a.append(Worked(step=5, rows=[], failed=True, raised=True, held=[40.0]))
    found = said_of(tmp_path, a, b, (RISES, losses), kind=kind)  # type: ignore[arg-type]
    assert not found if said is None else found is not None and said in found, found
    # An exception that nobody raised is no judgement.
    unraised = [*a[:4], replace_of(a[4], raised=False)]
    again = said_of(tmp_path / "x", unraised, b, (RISES, losses), kind=kind)  # type: ignore[arg-type]
    assert not again, again


@pytest.mark.parametrize(
    ("held", "said"), [([3.0, 9.5], "until step 2"), ([3.0, 9.0], None), ([], "until step 2")]
)
def test_the_number_that_the_script_held_is_compared(
    tmp_path: Path, held: list[float], said: str | None
) -> None:
    """It may have raised before it did the step."""
    a = on("a", "b", fails=True, raised=[False, True], held=[[], held])  # type: ignore[list-item]
    found = said_of(tmp_path, a, on("a", "b", "c"), ([1.0], [1.0, 9.5, 1.0]))
    assert not found if said is None else found is not None and said in found, found


@pytest.mark.parametrize(("pieces", "is_enough"), [((40, 70, 90), False), ((40, 79, 110), True)])
def test_rows_that_overlap_are_counted_by_their_pieces(
    tmp_path: Path, pieces: tuple[int, ...], is_enough: bool
) -> None:
    """Crops of a shorter text differ, and share their pieces."""
    a = on("", "", called=[["p", "q"], ["r", "s"]], pieces=[40, 80])  # type: ignore[list-item]
    names = [["p", "t"], ["r", "v"], ["w", "x"]]
    b = on("", "", "", called=names, pieces=pieces)  # type: ignore[arg-type]
    found = said_of(tmp_path, a, b, kind="data")
    assert (
        not found if is_enough else found == "its first 4 rows have 70 distinct parts, A's have 80"
    )


LIMITED = """\
LIMIT = 4.0
for step in range(10):
    loss = model(x)
    if loss > LIMIT:
        raise RuntimeError("diverged")
"""
LATER = """\
for step in range(10):
    loss = model(x)
if loss > LIMIT:
    raise RuntimeError("diverged")
"""
LOSSES = [1.0, 0.9], [1.0, 0.8, 0.7, 0.6, 0.5]


USED = "it changes `LIMIT`, which the script's own check uses"


@pytest.mark.parametrize(
    ("source", "key", "was", "now", "kind", "said"),
    [
        (LIMITED, "train.py:1", "LIMIT = 4.0", "LIMIT = 9.0", "", USED),
        (LIMITED, "train.py:1", "LIMIT = 4.0", "LIMIT = 9.0", "data", USED),
        (LIMITED, "train.py:4", "if loss > LIMIT:", "if False:", "", "it changes `train.py:4`"),
        (LIMITED, "train.py:3", "loss = model(x)", "loss = old(model(x))", "", "it changes `loss`, which"),
        (LIMITED, "train.py:3", "loss = model(x)", "loss = old(model(x))", "objective", None),
        (LIMITED, "{}", "", "--LIMIT 9", "", USED),
        (LIMITED, "LIMIT", "4", "9", "", USED),
        (LIMITED, "train.py:8", "opt = SGD(lr=1)", "opt = SGD(lr=2)", "", None),
        (LATER.replace("raise", "if bad: raise"), "train.py:9", "a = 1", "a = 2", "", "after its last step"),
    ],
)  # fmt: skip
def test_a_check_of_the_script_is_not_changed(
    tmp_path: Path, source: str, key: str, was: str, now: str, kind: str, said: str | None
) -> None:
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "raise" in text)
    seen = replace(OBSERVED, sign=f"failed RuntimeError at train.py:{line}: diverged")
    found = said_of(
        tmp_path,
        *SAME,
        LOSSES,
        key=key,
        was=was,
        now=now,
        kind=kind,
        observed=seen,
        sources={"train.py": source},
    )
    assert not found if said is None else found is not None and said in found, found


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_check_of_the_time_is_answered_by_a_faster_step(tmp_path: Path, factor: float) -> None:
    seen = replace(OBSERVED, sign="failed TimeoutError at train.py:5: over")
    runs = []
    for name, worked, step_s in (("a", SAME[0], 1.0), ("b", SAME[1], factor)):
        scene = Scene(tmp_path / name).open()
        losses = [replace_of(step(n, 1.0 / n), step_s=step_s) for n in range(1, 3)]
        runs.append(scene.events(*worked, *losses).close().run)
    found = work_left_out(*runs, observed=seen, sources={"train.py": LIMITED})
    assert bool(found) == (factor == 1.0), found


def test_a_model_that_answers_nothing_is_not_evaluated(tmp_path: Path) -> None:
    a, b = (
        on("a", "b", "c", answers=[[one] for one in answers])
        for answers in ([0.5, 0.4, 0.3], [0.0, 0.0, 0.0])
    )
    assert "answers 0 without gradients, whatever the rows" in (said_of(tmp_path, a, b) or "")
    assert not said_of(tmp_path / "reverse", b, a)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.0, 1.5, 0.0, 1.2], "its loss is exactly 0 in step 3"),
        ([2.0, 50.0, 9000.0, 1.0], "its own loss rises from 2 to 9e+03"),
        ([2.0, 1.8, 1.6, 1.4], None),
    ],
)
def test_an_objective_trains_on_every_row_and_does_not_explode(
    tmp_path: Path, losses: list[float], said: str | None
) -> None:
    a, b = on("a", "b", "c", fails=True), on("a", "b", "c", "d")
    found = said_of(tmp_path, a, b, ([2.0, 3.0, 40.0], losses), kind="objective")  # type: ignore[arg-type]
    assert not found if said is None else found is not None and said in found, found


@pytest.mark.parametrize(("id", "is_diluted"), [("data_wait", True), ("memory_pressure", False)])
def test_a_share_of_the_time_does_not_fall_because_everything_is_slower(
    tmp_path: Path, id: str, is_diluted: bool
) -> None:
    runs = []
    for name, seconds in (("a", 0.1), ("b", 0.6)):
        scene = Scene(tmp_path / name).open()
        scene.events(*(step(n, 2.0, step_s=seconds) for n in range(1, 9)))
        runs.append(scene.close().run)
    seen = replace(OBSERVED, kind="alert", id=id)
    found = work_left_out(runs[0], runs[1], observed=seen)
    assert ("6 times as long" in found) is is_diluted, found
