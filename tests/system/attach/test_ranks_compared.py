"""What the probe makes of the records of several ranks, written by its own functions: no process trains."""

from __future__ import annotations

from pathlib import Path

from tests.system.attach.test_pace import probed

MADE = """
from zlib import crc32
from apr_watch.ranks import Record, Records, judge, write

NAMES = ["0.weight", "0.bias"]

def record(step, values, layout="a", batches=(), tokens=()):
    digests = [f"{crc32(repr(v).encode()):08x}" for v in values]
    return Record(0, step, layout, digests, list(batches), list(tokens))

def layout(*wrappers):
    return Of(why="", name="AdamW", names=NAMES, wrappers=list(wrappers))

def ddp(**about):
    return Of(**dict(has_hook=False, is_local=False, ranks=[0, 1]) | about)

def said(layout, mine, other, began=((0.0, 0.0), (0.0, 0.0)), **more):
    first = {rank: record(1, values) for rank, values in enumerate(began)}
    return [line[:2] for line in judge(layout, {0: record(2, mine, **more), 1: other}, first)]
"""


def test_ranks_that_differ_are_a_contradiction_under_ddp_alone() -> None:
    code = """
alone, wrapped = layout(None, None), layout(ddp(), ddp())
print(said(wrapped, (1.0, 2.0), record(2, (1.0, 2.0))), said(wrapped, (1.0, 2.0), record(2, (1.0, 2.5))))
print(said(alone, (1.0, 2.0), record(2, (1.0, 2.0))), said(alone, (1.0, 2.0), record(2, (1.0, 2.5))))
print(said(layout(ddp(has_hook=True), None), (1.0, 2.0), record(2, (1.5, 2.0))))
print(said(layout(*[ddp(is_local=True)] * 2), (1.0, 2.0), record(2, (1.5, 2.0))))
print(said(alone, (1.0, 2.0), record(2, (1.0, 2.5)), began=((0.0, 0.0), (0.0, 0.5))))
print(said(wrapped, (1.0, 2.0), record(2, (1.0, 2.5), layout="b")))
"""
    assert probed(MADE + code).splitlines() == [
        "[('rank_drift', 'pass')] [('rank_drift', 'fail')]",
        "[('rank_drift', 'pass')] [('rank_drift', 'suspicion')]",
        "[('rank_drift', 'unknown'), ('rank_drift', 'pass')]",
        "[('rank_drift', 'suspicion')]",
        "[('rank_drift', 'fact')]",
        "[('rank_drift', 'unknown')]",
    ]


def test_the_same_batches_are_suspected_where_ranks_began_as_one_model() -> None:
    """Of each batch the hash of its indices, and of what was read; the same indices may be of other data."""
    code = """
def of_data(mine, other, **more):
    found = said(layout(None, None), (1.0, 2.0), record(2, (1.0, 2.0), batches=other), batches=mine, **more)
    return [degree for id, degree in found if id == "rank_data"]

one, two = [["i", "c"], ["j", "d"]], [["k", "e"], ["l", "f"]]
print(of_data(one, one), of_data(one, two), of_data(one[:1], one[:1]), of_data(one[:1] * 2, one[:1] * 2))
print(of_data(one, [["i", "e"], ["j", "f"]]), of_data([["", "c"], ["", "d"]], [["", "e"], ["", "f"]]))
print(of_data([["i", ""]] * 2, [["i", ""]] * 2), of_data(one, one, began=((0.0, 0.0), (0.0, 1.0))))
"""
    assert probed(MADE + code).splitlines() == [
        "['suspicion'] ['pass'] [] []",
        "[] ['pass']",
        "[] []",
    ]


def test_labels_that_each_rank_counts_alone_are_named_and_those_of_all_ranks_pass() -> None:
    code = """
def of_tokens(divisor, *others, wrapper=ddp(), counts=((20, 40), (60, 80))):
    mine, other = ([[1 / by, 1 / by, n, n] for n in each] for each, by in zip(counts, (divisor, *others)))
    found = said(layout(wrapper, wrapper), (1.0, 2.0), record(2, (1.0, 2.0), tokens=other), tokens=mine)
    return [degree for id, degree in found if id == "token_weights"]

print(of_tokens(60, 140), of_tokens(100, 100), of_tokens(200, 200))
print(of_tokens(60, 140, counts=((60,), (140,))), of_tokens(60, 140, wrapper=ddp(has_hook=True)))
print(of_tokens(100, 100, wrapper=ddp(ranks=[0, 1, 2])), of_tokens(60, 62, counts=((20, 40), (21, 41))))
"""
    assert probed(MADE + code).splitlines() == [
        "['suspicion'] ['pass'] ['suspicion']",
        "['fact'] []",
        "['pass'] []",
    ]


def test_records_of_a_rank_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Also where the last one is not whole yet."""
    code = f"""
folder = {str(tmp_path)!r}
first, second = record(1, (0.5, float("inf")), batches=[["i", "c"]]), record(2, (0.1, -3.0))
others = Records(folder)
others.read([1, 2])
print(others.of(1, 0, 1))
write(folder, 1, [first])
path = folder + "/ranks/1.compared"
whole = open(path, "rb").read()
write(folder, 1, [second])
line = open(path, "rb").read()[len(whole):]
open(path, "wb").write(whole + line[:20])
others.read([1])
print(others.of(1, 0, 1) == first, others.of(1, 0, 2))
open(path, "ab").write(line[20:])
others.read([1])
print(others.of(1, 0, 2) == second, others.of(2, 0, 1))
"""
    assert probed(MADE + code).splitlines() == ["None", "True None", "True None"]
