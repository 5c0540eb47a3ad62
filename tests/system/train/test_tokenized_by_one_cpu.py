"""A run tells of texts that one CPU of many tokenized, which TOKENIZERS_PARALLELISM=false does."""

from __future__ import annotations

import pytest

from engine.formats.tokenizer import open_tokenizer
from engine.train import data
from tests.support.kit import Kit


@pytest.mark.parametrize(
    ("took_s", "cpu_s", "cpus", "busy", "told"),
    [
        (10.0, 10.0, 2, False, True),
        (10.0, 18.0, 2, False, False),
        (10.0, 10.0, 1, False, False),
        (10.0, 10.0, 2, True, False),
        (1.0, 1.0, 2, False, False),
    ],
)
def test_texts_that_one_cpu_of_many_tokenizes_are_told(
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    took_s: float,
    cpu_s: float,
    cpus: int,
    busy: bool,
    told: bool,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr("os.getloadavg", lambda: (cpus + 2.0 if busy else 0.0,) * 3)
    tokenizer = open_tokenizer(kit.teacher)
    tokenizer.encode_documents(["def f(x):"])
    assert 0 < tokenizer.encoded_s < 5
    tokenizer.encoded_s, tokenizer.encoded_cpu_s = took_s, cpu_s
    assert bool(data.one_cpu_of_many(tokenizer)) == told
