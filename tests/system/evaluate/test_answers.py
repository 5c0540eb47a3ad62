"""Evaluation: the statistics against their definitions, problems in the public formats, a model that knows
the answers and one that knows nothing, and everything that must not become a figure.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine.data.batches import Batches
from engine.data.tokens import starts_of
from engine.errors import BadInput, NoAnswer
from engine.evaluate import humaneval as module
from engine.evaluate.humaneval import Settings, evaluate, self_test
from engine.evaluate.model import Model, open_model
from engine.evaluate.passk import mean_pass_at_k, pass_at_k
from engine.evaluate.perplexity import perplexity, read_documents
from engine.evaluate.problems import Problem, Problems, read_problems
from engine.evaluate.report import compare, report, report_of_file
from engine.evaluate.results import Result, open_results, read_results
from engine.evaluate.sandbox import Sandbox, Trial
from engine.evaluate.statistics import bootstrap, mcnemar, wilson
from engine.formats.tokenizer import open_tokenizer
from engine.generation.sampling import Sampling
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.read_config import read_config
from engine.spec import LossSection, TrainSection
from engine.train.trainer import Trainer
from tests.support.kit import Kit
from tests.support.lacks import open_sandbox_here
from tests.support.streams import make_stream

TASKS = [
    ("double", "x", "Twice x.", "return 2 * x", ["(2) == 4", "(-3) == -6"]),
    ("last", "xs", "The last one.", "return xs[-1]", ["([1, 2]) == 2", "('ab') == 'b'"]),
    ("pair", "a, b", "Both, as a tuple.", "return (a, b)", ["(1, 'x') == (1, 'x')"]),
    ("squares", "n", "Squares below n.", "return [i * i for i in range(n)]", ["(3) == [0, 1, 4]"]),
]


def humaneval_lines() -> list[dict[str, str]]:
    return [
        {
            "task_id": f"Own/{index}",
            "prompt": f'\n\ndef {name}({args}):\n    """{text}"""\n',
            "entry_point": name,
            "canonical_solution": f"    {code}\n",
            "test": "METADATA = {}\n\ndef check(candidate):\n"
            + "".join(f"    assert candidate{test}\n" for test in tests),
        }
        for index, (name, args, text, code, tests) in enumerate(TASKS)
    ]


def mbpp_lines() -> list[dict[str, Any]]:
    return [
        {
            "task_id": 601 + index,
            "text": f"Write a function {name}: {text}",
            "code": f"def {name}({args}):\n    {code}\n",
            "test_list": [f"assert {name}{test}" for test in tests],
            "test_setup_code": "",
        }
        for index, (name, args, text, code, tests) in enumerate(TASKS)
    ]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return open_sandbox_here()


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Problems:
    folder = tmp_path_factory.mktemp("problems")
    return read_problems(write_lines(folder / "own.jsonl", humaneval_lines()), "humaneval")


@pytest.fixture(scope="session")
def knowing(kit: Kit, problems: Problems, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the first three answers by heart."""
    tokenizer = open_tokenizer(kit.teacher)
    parts: list[list[int]] = []
    for problem in problems.problems[:3]:
        prompt, answer = tokenizer.encode_documents([problem.prompt, problem.reference])
        parts.append([*prompt.tolist(), *answer.tolist(), tokenizer.end_of_text_id])
    tokens = np.array([one for part in parts for one in part] * 20, dtype=np.uint16)
    owners = [index for index, part in enumerate(parts) for _ in part]
    documents = np.array(
        [turn * len(parts) + owner for turn in range(20) for owner in owners], dtype=np.int32
    )
    decoder = new_decoder(read_config(kit.teacher), seed=3)
    trainer = Trainer(
        student=decoder,
        teacher=None,
        batches=Batches(
            make_stream(tokens, starts_of(np.bincount(documents))),
            seq_len=96,
            rows_per_batch=4,
            seed=1,
        ),
        train=TrainSection(steps=110, rows=4, lr=1e-2, warmup_steps=4),
        loss=LossSection(alpha=1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )
    for _ in trainer.steps():
        pass
    folder = tmp_path_factory.mktemp("knowing") / "model"
    save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    return folder


@pytest.fixture
def ignorant(kit: Kit, tmp_path: Path) -> Path:
    folder = tmp_path / "ignorant"
    decoder = new_decoder(read_config(kit.teacher), seed=11)
    save_decoder(decoder, folder, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    return folder


SETTINGS = Settings(max_tokens=24)


def judged(
    model: Model, problems: Problems, sandbox: Sandbox, path: Path, **how: Any
) -> list[Result]:
    results = open_results(path, {"benchmark": problems.benchmark})
    try:
        evaluate(model, problems, sandbox, results, SETTINGS, **how)
    finally:
        results.close()
    return read_results(path)[1]


# The statistics


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_picks_with_a_right_one(count: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    picks = list(itertools.combinations([True] * right + [False] * (count - right), k))
    assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, picks)) / len(picks))


def test_pass_at_k_of_nothing_or_of_too_few_is_none() -> None:
    assert mean_pass_at_k([], 1) is None
    assert mean_pass_at_k([(1, 1), (0, 0)], 1) is None
    assert mean_pass_at_k([(10, 3), (10, 0)], 1) == pytest.approx(0.15)


def test_wilson_is_the_interval_of_its_definition() -> None:
    """Its ends p solve |successes/n - p| = 1.96 sqrt(p (1 - p) / n)."""
    for successes, count in ((1, 10), (82, 164), (163, 164)):
        found = wilson(successes, count)
        assert found is not None
        for p in found:
            half = 1.959963984540054 * math.sqrt(p * (1 - p) / count)
            assert abs(successes / count - p) == pytest.approx(half)
    none, every = wilson(0, 164), wilson(164, 164)
    assert none is not None and none.low == 0 and 0.02 < none.high < 0.03
    assert every is not None and every.high == 1 and 0.97 < every.low < 0.98
    assert wilson(0, 0) is None


def test_mcnemar_is_the_chance_of_so_uneven_coins() -> None:
    for first, second in itertools.product(range(7), range(7)):
        count = first + second
        tosses = [sum(one) for one in itertools.product((0, 1), repeat=count)]
        far = [one for one in tosses if abs(2 * one - count) >= abs(first - second)]
        assert mcnemar(first, second) == pytest.approx(len(far) / len(tosses))
    assert mcnemar(0, 2000) == pytest.approx(0.0, abs=1e-300)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.Generator(np.random.Philox(5))
    covered = 0
    for _ in range(30):
        counts = random.integers(50, 500, 40).astype(float)
        found = bootstrap((random.normal(2.0, 0.5, 40) * counts).tolist(), counts.tolist())
        assert found is not None
        covered += found.low < 2.0 < found.high
    assert covered >= 24
    assert bootstrap([1.0], [1.0]) is None


# The problems


def test_the_public_formats_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "own.jsonl", humaneval_lines())
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_problems(plain, "humaneval") == read_problems(packed, "humaneval")
    found = read_problems(write_lines(tmp_path / "mbpp.jsonl", mbpp_lines()), "mbpp")
    assert [one.task_id for one in found.problems] == ["601", "602", "603", "604"]
    assert "assert double(2) == 4" in found.problems[0].prompt


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test": None}, "test to be a string"),
        ({"entry_point": "a b"}, "a Python identifier"),
        ({"task_id": "Own/1"}, "Own/1 again"),
    ],
)
def test_a_bad_problem_is_refused_with_its_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [*humaneval_lines()]
    lines[0] = {**lines[0], **change}
    with pytest.raises(BadInput, match=said):
        read_problems(write_lines(tmp_path / "bad.jsonl", lines), "humaneval")


@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_reference_solutions_pass_and_empty_ones_fail(
    benchmark: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    lines = humaneval_lines() if benchmark == "humaneval" else mbpp_lines()
    found = read_problems(write_lines(tmp_path / "own.jsonl", lines), benchmark)
    assert self_test(sandbox, found.problems) == {}


def changed(count: int, **change: str) -> list[dict[str, str]]:
    return [
        line | change if index < count else line for index, line in enumerate(humaneval_lines())
    ]


WRONG = {"canonical_solution": "    return 0\n"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (changed(2, **WRONG), "Own/1: its reference solution does not pass here: fail"),
        (changed(1, **WRONG)[:1], "Own/0: its reference solution does not pass here"),
        (
            changed(1, test="def check(candidate):\n    assert candidate(1) != 1\n"),
            "Own/0: an empty solution: pass",
        ),
        (
            changed(1, test="def check(candidate):\n    candidate(1)\n"),
            "Own/0: an empty solution: pass",
        ),
    ],
)
def test_a_harness_that_cannot_tell_right_from_wrong_is_refused(
    lines: list[dict[str, str]], said: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    found = read_problems(write_lines(tmp_path / "own.jsonl", lines), "humaneval")
    with pytest.raises(NoAnswer, match=said):
        self_test(sandbox, found.problems)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (WRONG, "fail, an assertion does not hold: assert candidate(2) == 4"),
        ({"test": "def check(candidate)\n"}, "harness, the tests do not compile"),
        ({"test": "import absent_module\n"}, "No module named 'absent_module'"),
    ],
)
def test_a_problem_whose_reference_does_not_pass_is_left_out_with_the_reason(
    change: dict[str, str], said: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "own.jsonl", changed(1, **change))
    problems = read_problems(lines, "humaneval").problems
    found = self_test(sandbox, problems, unfit=1)
    assert list(found) == ["Own/0"]
    assert found["Own/0"].startswith("its reference solution does not pass here: ")
    assert said in found["Own/0"]


def test_no_more_problems_are_left_out_than_was_allowed_and_none_unless_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [
        Problem(task_id=str(index), prompt="", head="", reference="right", tests="")
        for index in range(6)
    ]

    def left_out(wrong: int, allowed: int) -> dict[str, str]:
        def trials(_: Sandbox, some: list[Any], texts: list[str]) -> list[Trial]:
            return [
                Trial("pass" if text and int(one.task_id) >= wrong else "fail", "it is")
                for one, text in zip(some, texts, strict=True)
            ]

        monkeypatch.setattr(module, "trials", trials)
        return self_test(Sandbox(bwrap="", version=""), many, unfit=allowed)

    assert left_out(0, 0) == {} and list(left_out(3, 3)) == ["0", "1", "2"]
    for wrong, allowed in ((1, 0), (4, 3), (6, 6)):
        with pytest.raises(NoAnswer, match="expected every reference solution to pass"):
            left_out(wrong, allowed)


def test_a_function_called_like_a_built_in_one_is_the_programs(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    line = mbpp_lines()[0] | {
        "code": "def sum(a, b):\n    return a * b\n",
        "test_list": ["assert sum(3, 4) == 12", "assert set([sum(1, 2)]) == set([2])"],
    }
    found = read_problems(write_lines(tmp_path / "own.jsonl", [line]), "mbpp")
    assert self_test(sandbox, found.problems) == {}


def test_tests_may_use_the_programs_classes_types_and_modules(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    lines = [
        {
            "task_id": 1,
            "text": "How tall is a tree?",
            "code": "class Node:\n    def __init__(self, data):\n        self.data, self.left = data, None\n"
            "def tall(root):\n    return 1 + tall(root.left) if root else 0\n",
            "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
            "test_list": ["assert tall(root) == 2", "assert tall(Node(3)) == 1"],
        },
        {
            "task_id": 2,
            "text": "Only those of a type.",
            "code": "def only(values, kind):\n    return [v for v in values if type(v) is kind]\n",
            "test_setup_code": "",
            "test_list": ["assert only((1, 'a', 2.5), float) == [2.5]"],
        },
        {
            "task_id": 3,
            "text": "The size of a tuple.",
            "code": "import sys\nimport os.path as place\n"
            "def size(values):\n    return sys.getsizeof(values)\n",
            "test_setup_code": "end = place.basename('a/b')",
            "test_list": ["assert size((1, end)) == sys.getsizeof((1, 'b'))"],
        },
    ]
    found = read_problems(write_lines(tmp_path / "own.jsonl", lines), "mbpp")
    assert self_test(sandbox, found.problems) == {}


def test_an_array_of_problems_is_read_as_lines_are(tmp_path: Path) -> None:
    lines = [
        {key: line[key] for key in ("task_id", "code", "test_list")}
        | {"prompt": line["text"], "test_imports": ["import math"], "source_file": "own.ipynb"}
        for line in mbpp_lines()
    ]
    path = tmp_path / "array.json"
    path.write_text(json.dumps(lines, indent=1))
    as_lines = read_problems(write_lines(tmp_path / "own.jsonl", lines), "mbpp")
    assert read_problems(path, "mbpp").problems == as_lines.problems
    path.write_text(json.dumps([*lines, {"task_id": 9}]))
    with pytest.raises(
        BadInput, match=r"array.json, problem 5 — expected test_list to be a list of strings"
    ):
        read_problems(path, "mbpp")
    path.write_text(json.dumps(lines)[:-1])
    with pytest.raises(BadInput, match="expected JSON"):
        read_problems(path, "mbpp")


# Models


def test_a_model_that_knows_the_answers_passes_and_no_other_does(
    knowing: Path, ignorant: Path, problems: Problems, sandbox: Sandbox, tmp_path: Path
) -> None:
    lines = judged(open_model(knowing), problems, sandbox, tmp_path / "a.jsonl")
    found = report(problems, SETTINGS.samples, lines)
    assert {one.task_id for one in lines if one.outcome == "pass"} == {"Own/0", "Own/1", "Own/2"}
    assert found.known and found.pass_at_k == {1: 0.75} and found.interval == wilson(3, 4)
    others = judged(open_model(ignorant), problems, sandbox, tmp_path / "b.jsonl")
    none = report(problems, SETTINGS.samples, others)
    assert none.known and none.passed == 0 and none.pass_at_k == {1: 0.0}
    assert all(one.outcome == "fail" and one.reason for one in others)
    compared = compare(lines, others)
    assert compared == (0, 3, 0, 1, mcnemar(3, 0))


@pytest.mark.parametrize("benchmark", ["humaneval", pytest.param("mbpp", marks=pytest.mark.soak)])
def test_a_random_model_scores_below_one_percent(
    benchmark: str, ignorant: Path, sandbox: Sandbox, tmp_path: Path
) -> None:
    lines = humaneval_lines() if benchmark == "humaneval" else mbpp_lines()
    problems = read_problems(write_lines(tmp_path / "own.jsonl", lines), benchmark)
    # Likeliest and drawn: gibberish of both kinds is run.
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        settings = Settings(
            max_tokens=24, sampling=sampling, samples=3 if sampling.temperature else 1
        )
        results = open_results(tmp_path / f"{sampling.temperature}.jsonl", {"benchmark": benchmark})
        try:
            evaluate(open_model(ignorant), problems, sandbox, results, settings)
        finally:
            results.close()
        found = report(problems, settings.samples, read_results(results.path)[1])
        assert found.known and found.attempts == 4 * settings.samples
        assert found.pass_at_k[1] < 0.01


def test_the_batch_size_and_a_second_time_change_nothing(
    knowing: Path, problems: Problems, sandbox: Sandbox, tmp_path: Path
) -> None:
    model = open_model(knowing)

    def results_of(name: str, rows: int) -> list[Result]:
        lines = judged(model, problems, sandbox, tmp_path / name, rows=rows)
        return sorted(lines, key=lambda one: one.task_id)

    assert results_of("a", 8) == results_of("b", 8) == results_of("c", 1) == results_of("d", 3)


def test_a_killed_evaluation_goes_on_without_doing_anything_twice(
    knowing: Path,
    problems: Problems,
    sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, path = open_model(knowing), tmp_path / "results.jsonl"
    whole = judged(model, problems, sandbox, path)
    lines = path.read_bytes().splitlines(keepends=True)
    # Killed in the middle of a line, after a judge that died.
    harness = json.loads(lines[2]) | {"outcome": "harness", "reason": "died"}
    path.write_bytes(b"".join([*lines[:2], json.dumps(harness).encode() + b"\n", lines[3][:20]]))
    tried: list[str] = []
    whole_trial = Sandbox.try_program

    def counted(self: Sandbox, program: str, tests: str) -> Trial:
        tried.append(program)
        return whole_trial(self, program, tests)

    monkeypatch.setattr(Sandbox, "try_program", counted)
    again = judged(model, problems, sandbox, path)
    assert len(tried) == 3 and whole[0].completion not in "".join(tried)
    assert sorted(again[-3:], key=str) == sorted(
        [one for one in whole if one.task_id != whole[0].task_id], key=str
    )
    assert again[0] == whole[0] and len(again) == 5
    assert report(problems, SETTINGS.samples, again) == report(problems, SETTINGS.samples, whole)
    with pytest.raises(BadInput, match="results of this evaluation, with benchmark"):
        open_results(path, {"benchmark": "other"})


def test_a_nan_in_the_model_is_no_score(
    knowing: Path, problems: Problems, sandbox: Sandbox, tmp_path: Path
) -> None:
    model = open_model(knowing)
    model.decoder.norm.weight[0] = float("nan")
    with pytest.raises(NoAnswer, match="NaN") as caught:
        judged(model, problems, sandbox, tmp_path / "results.jsonl")
    assert caught.value.exit_code == 2
    found = report(problems, SETTINGS.samples, read_results(tmp_path / "results.jsonl")[1])
    assert not found.known and found.attempts == 0 and found.pass_at_k == {}


def test_zero_attempts_and_dead_judges_are_unknown(problems: Problems) -> None:
    assert not report(problems, SETTINGS.samples, []).known
    lines = [
        Result(
            task_id=one.task_id,
            sample=0,
            completion="",
            outcome="pass" if index else "harness",
            reason="died",
            tokens=1,
            ended="stop",
        )
        for index, one in enumerate(problems.problems)
    ]
    found = report(problems, SETTINGS.samples, lines)
    assert not found.known and found.harness == ("Own/0: died",) and found.pass_at_k == {}
    with pytest.raises(NoAnswer, match="Own/0"):
        compare(lines, [replace(one, outcome="fail") for one in lines])


def test_several_programs_a_problem_are_one_trial_of_it_each(problems: Problems) -> None:
    settings = replace(SETTINGS, samples=10)
    lines = [
        Result(
            task_id=one.task_id,
            sample=sample,
            completion="",
            outcome="pass" if sample < 5 * index else "fail",
            reason="",
            tokens=1,
            ended="stop",
        )
        for index, one in enumerate(problems.problems[:3])
        for sample in range(10)
    ]
    some = replace(problems, problems=problems.problems[:3])
    found = report(some, settings.samples, lines)
    assert found.pass_at_k[1] == pytest.approx(0.5)
    assert found.pass_at_k[10] == pytest.approx(2 / 3)
    assert found.interval == wilson(1.5, 3)
    none = report(some, settings.samples, [replace(one, outcome="fail") for one in lines])
    assert none.interval == wilson(0, 3) and none.interval is not None and none.interval.high > 0.5


def test_nothing_in_the_data_marks_a_pass(ignorant: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {**line, "passed": True, "outcome": "pass", "result": "passed"}
        for line in humaneval_lines()
    ]
    found = read_problems(write_lines(tmp_path / "own.jsonl", lines), "humaneval")
    results = judged(open_model(ignorant), found, sandbox, tmp_path / "results.jsonl")
    assert [one.outcome for one in results] == ["fail"] * 4


# The command


@pytest.mark.usefixtures("sandbox")
def test_the_command_prints_the_figures_and_compares(
    knowing: Path, ignorant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_lines(tmp_path / "own.jsonl", humaneval_lines()))

    def command(model: Path, name: str, *more: str) -> dict[str, Any]:
        results = str(tmp_path / name)
        given = ["eval", "humaneval", str(model), "--data", data, "--results", results, "--json"]
        assert main([*given, "--max-tokens", "24", *more]) == 0
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    first = command(ignorant, "a.jsonl")
    assert first["pass_at_k"] == {"1": 0.0} and first["mode"] == "measured"
    second = command(knowing, "b.jsonl", "--against", str(tmp_path / "a.jsonl"))
    assert second["passed"] == 3 and second["compared"]["only_first"] == 3
    assert second["compared"]["p"] == mcnemar(3, 0)
    assert len(second["per_problem_results"]) == 4
    assert command(knowing, "b.jsonl") | {"compared": None} == second | {"compared": None}
    # Against the model itself: it is judged too, and its results lie beside the others.
    both = command(knowing, "b.jsonl", "--against", str(ignorant))
    assert both["compared"] == second["compared"]
    beside = read_results(tmp_path / "ignorant-humaneval.jsonl")[1]
    assert {one.task_id for one in beside} == {f"Own/{index}" for index in range(4)}
    same = command(knowing, "b.jsonl", "--against", str(tmp_path / "ignorant-humaneval.jsonl"))
    assert same["compared"] == both["compared"]


@pytest.mark.usefixtures("sandbox")
def test_a_problem_that_is_left_out_is_named_in_every_receipt_and_counted_in_none(
    knowing: Path,
    ignorant: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = str(write_lines(tmp_path / "own.jsonl", changed(1, **WRONG)))
    given = ["eval", "humaneval", str(knowing), "--data", data, "--max-tokens", "24"]
    given += ["--results", str(tmp_path / "r.jsonl")]
    assert main(given) == 2
    assert "Own/0: its reference solution does not pass here" in capsys.readouterr().err
    given += ["--unfit", "1"]
    assert main([*given, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["problems"] == 3 and printed["passed"] == 2 and printed["pass_at_k"] == {"1": 2 / 3}
    )
    assert printed["without"] == ["Own/0"] and list(printed["left_out"]) == ["Own/0"]
    assert "Own/0" not in [one["task_id"] for one in printed["per_problem_results"]]
    # It goes on where it was stopped, and a model beside it is asked the same problems.
    assert main([*given, "--against", str(ignorant)]) == 0
    out, err = capsys.readouterr()
    assert "3 are finished" in err
    assert (
        "excluded by the self-test: Own/0: its reference solution does not pass here: fail" in out
    )
    assert (
        "2 of 3 programs, 3 problems" in out
        and "\nwithout" not in out
        and "2 solved by this model alone" in out
    )
    for path in (tmp_path / "r.jsonl", tmp_path / "ignorant-humaneval.jsonl"):
        found, about = report_of_file(path)
        assert found.known and found.problems == 3 and about["without"] == ["Own/0"]
    # In other words it is the same; with another problem left out it is not.
    monkeypatch.setattr(module, "self_test", lambda *_, **__: {"Own/0": "no"})
    assert main(given) == 0
    monkeypatch.setattr(module, "self_test", lambda *_, **__: {"Own/1": "no"})
    assert main(given) == 65
    assert "with without ['Own/1'], found ['Own/0']" in capsys.readouterr().err


@pytest.mark.usefixtures("sandbox")
def test_results_of_other_problems_are_no_second_model(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_lines(tmp_path / "own.jsonl", humaneval_lines()))
    other = tmp_path / "other.jsonl"
    open_results(other, {"benchmark": "humaneval", "data_sha256": "0" * 64}).close()
    given = ["eval", "humaneval", str(knowing), "--data", data, "--against", str(other)]
    assert main([*given, "--results", str(tmp_path / "a.jsonl")]) == 64
    assert "expected data_sha256" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_a_file_of_results_alone_says_how_many_are_missing(
    knowing: Path, problems: Problems, sandbox: Sandbox, tmp_path: Path
) -> None:
    about = {"benchmark": "humaneval", "problems": 4, "settings": {"samples": 1}}
    results = open_results(tmp_path / "a.jsonl", about)
    try:
        evaluate(open_model(knowing), problems, sandbox, results, SETTINGS)
    finally:
        results.close()
    found, said = report_of_file(results.path)
    assert (
        found == report(problems, SETTINGS.samples, read_results(results.path)[1]) and found.known
    )
    assert said["problems"] == 4
    first, *lines = results.path.read_text().splitlines()
    results.path.write_text("\n".join([first, *lines[:3]]) + "\n")
    half, _ = report_of_file(results.path)
    assert not half.known and half.attempts == 3 and half.pass_at_k == {}
    results.path.write_text("{}\n")
    with pytest.raises(BadInput):
        report_of_file(results.path)


@pytest.mark.usefixtures("sandbox")
def test_a_judge_that_dies_makes_the_command_exit_2(
    knowing: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = str(write_lines(tmp_path / "own.jsonl", humaneval_lines()))
    monkeypatch.setattr(module, "self_test", lambda *_, **__: {})
    monkeypatch.setattr(Sandbox, "try_program", lambda *_: Trial("harness", "it died"))
    monkeypatch.setattr(
        "engine.evaluate.sandbox.open_sandbox", lambda: Sandbox(bwrap="", version="")
    )
    results = str(tmp_path / "results.jsonl")
    given = ["eval", "humaneval", str(knowing), "--data", data, "--results", results, "--json"]
    assert main([*given, "--max-tokens", "24"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["mode"] == "unknown" and printed["passed"] is None and printed["pass_at_k"] == {}


def test_without_a_sandbox_the_command_exits_2_and_runs_nothing(
    knowing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data = str(write_lines(tmp_path / "own.jsonl", humaneval_lines()))
    results = tmp_path / "results.jsonl"
    given = ["eval", "humaneval", str(knowing), "--data", data, "--results", str(results)]
    assert main(given) == 2
    assert "no bwrap on the path" in capsys.readouterr().err
    assert not results.exists()


def test_generate_prints_the_answer_it_has_learnt(
    knowing: Path, problems: Problems, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = problems.problems[0]
    assert main(["generate", str(knowing), "--prompt", problem.prompt, "--stop", "\n"]) == 0
    assert capsys.readouterr().out == problem.reference.split("\n")[0] + "\n"
    given = ["generate", str(knowing), "--prompt", problem.prompt, "--json", "--max-tokens", "40"]
    assert main(given) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"].startswith(problem.reference) and printed["ended"] in (
        "end_of_text",
        "length",
    )


# Perplexity


def test_perplexity_is_the_mean_surprise_of_every_token(kit: Kit) -> None:
    documents = read_documents(str(kit.corpus))[0][:3]
    model = open_model(kit.teacher)
    found = perplexity(model, documents, length=50)
    decoder, nats, count = load_decoder(kit.teacher), 0.0, 0
    for document in documents:
        (ids,) = model.tokenizer.encode_documents([document.text])
        tokens = torch.tensor([*ids.tolist(), model.tokenizer.end_of_text_id])
        for start in range(0, len(tokens) - 1, 50):
            row = tokens[start : start + 51]
            with torch.no_grad():
                logits = decoder(row[None, :-1])[0]
            nats += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
            count += len(row) - 1
    assert found.tokens == count == sum(one.tokens for one in found.documents)
    assert found.loss.value == pytest.approx(nats / count, rel=1e-5)
    assert found.loss.interval is not None
    assert found.loss.interval.low <= found.loss.value <= found.loss.interval.high


def test_a_model_against_itself_differs_by_nothing(kit: Kit, ignorant: Path) -> None:
    documents = read_documents(str(kit.corpus))[0][:3]
    teacher = open_model(kit.teacher)
    same = perplexity(teacher, documents, against=open_model(kit.teacher))
    assert same.kl is not None and same.kl.value == 0
    assert same.agreement is not None and same.agreement.value == 1
    assert same.difference is not None and same.difference.value == 0
    other = perplexity(open_model(ignorant), documents, against=teacher)
    assert other.kl is not None and other.difference is not None and other.agreement is not None
    assert other.kl.value > 1 and other.difference.value > 1 and other.agreement.value < 0.5


def test_kl_is_that_of_the_definition(kit: Kit, ignorant: Path) -> None:
    documents = read_documents(str(kit.corpus))[0][:1]
    model, against = open_model(ignorant), open_model(kit.teacher)
    found = perplexity(model, documents, against=against)
    (ids,) = model.tokenizer.encode_documents([documents[0].text])
    limit = model.decoder.config.max_position_embeddings
    tokens = torch.tensor([*ids.tolist(), model.tokenizer.end_of_text_id])
    total = 0.0
    for start in range(0, len(tokens) - 1, limit):
        row = tokens[start : start + limit + 1]
        with torch.no_grad():
            q, p = (one.decoder(row[None, :-1])[0].softmax(-1) for one in (model, against))
        total += float(torch.nn.functional.kl_div(q.log(), p, reduction="sum"))
    assert found.kl is not None
    assert found.kl.value == pytest.approx(total / found.tokens, rel=1e-4)
    assert found.kl.interval is None


def test_a_loss_that_is_not_finite_is_no_figure(kit: Kit) -> None:
    model = open_model(kit.teacher)
    model.decoder.norm.weight[0] = float("nan")
    with pytest.raises(NoAnswer, match="expected a finite number, found nan"):
        perplexity(model, read_documents(str(kit.corpus))[0][:1])


def test_the_perplexity_command_prints_both_sides(
    kit: Kit, ignorant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "ppl", str(ignorant), "--data", str(kit.corpus / "part_00.py")]
    assert main([*given, "--against", str(kit.teacher), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kl"]["value"] > 0 and printed["perplexity"] == pytest.approx(
        math.exp(printed["loss"]["value"])
    )
    assert len(printed["weights_sha256"]) == len(printed["data_sha256"]) == 64
    assert main([*given, "--against", str(kit.teacher), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed, "the same numbers twice"
    assert main([*given, "--against", str(kit.teacher)]) == 0
    said = capsys.readouterr().out
    assert "top-1 agreement" in said and "part_00.py" in said and "no interval" in said
