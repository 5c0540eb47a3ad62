"""`engine eval` as it is used: what is wrong with the question is said before anything slow begins, one
evaluation writes one file, a report is of each program's last try, and an evaluation without a figure says so
to programs too.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli.main import main
from engine.errors import BadInput
from engine.evaluate import humaneval as module
from engine.evaluate.model import open_model, weights_sha256
from engine.evaluate.problems import read_problems
from engine.evaluate.results import Result, open_results, read_results
from engine.evaluate.sandbox import Sandbox, Trial
from engine.models.load import load_decoder, save_decoder
from tests.support.kit import Kit

COUNT = 3


def problem(index: int, prompt: str = "def f(x):\n") -> dict[str, str]:
    return {
        "task_id": f"Own/{index}",
        "prompt": prompt,
        "entry_point": "f",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "own.jsonl", [problem(index) for index in range(COUNT)])


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(index: int, outcome: str = "fail", **changes: Any) -> Result:
    fields = {"task_id": f"Own/{index}", "sample": 0, "completion": "", "outcome": outcome}
    return Result(**{**fields, "reason": "it is", "tokens": 1, "ended": "stop", **changes})


@pytest.fixture
def eval_(
    kit: Kit, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """The command on the kit's teacher, with a sandbox that runs nothing; its exit code, and what was
    begun of what takes long."""
    begun: list[str] = []

    def self_test(*_: Any, **__: Any) -> dict[str, str]:
        begun.append("self-test")
        return {}

    def trial(self: Sandbox, program: str, exam: Any) -> Trial:
        begun.append("program")
        return Trial("fail", "it is wrong")

    monkeypatch.setattr(module, "self_test", self_test)
    monkeypatch.setattr(Sandbox, "try_program", trial)
    monkeypatch.setattr(
        "engine.evaluate.sandbox.open_sandbox", lambda: Sandbox(bwrap="", version="")
    )

    def run(*more: str, model: Path = kit.teacher, data: Path = data) -> tuple[int, list[str]]:
        begun.clear()
        given = ["eval", "humaneval", str(model), "--data", str(data), *more]
        if "--results" not in more:
            given += ["--results", str(tmp_path / "r.jsonl")]
        return main([*given, "--max-tokens", "4"]), list(begun)

    return run


Eval = Callable[..., tuple[int, list[str]]]


def test_what_is_wrong_with_the_models_or_the_results_is_said_before_the_self_test(
    eval_: Eval, kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert eval_(model=gone) == (65, [])
    assert eval_("--against", str(gone)) == (65, [])
    assert "gone" in capsys.readouterr().err
    open_results(tmp_path / "r.jsonl", {"benchmark": "other"}).close()
    assert eval_() == (65, [])
    assert "results of this evaluation" in capsys.readouterr().err
    assert eval_("--results", str(tmp_path / "new.jsonl"))[0] == 0


def test_a_prompt_without_room_is_named_with_what_leaves_it_out(
    eval_: Eval, kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = open_model(kit.teacher).decoder.config.max_position_embeddings
    long = written(
        tmp_path / "long.jsonl", [problem(0), problem(1, "def f(x):\n" + "    #~\n" * most)]
    )
    assert eval_(data=long) == (65, [])
    said = capsys.readouterr().err
    assert "Own/1 (" in said and "Own/0" not in said and "--without TASK_ID" in said
    assert eval_("--without", "Own/1", data=long)[0] == 0
    printed = capsys.readouterr().out
    assert "excluded by --without: Own/1" in printed and "1 problems" in printed
    assert eval_("--without", "Own/1", "--without", "Own/0", data=long)[0] == 64


def test_the_longest_prompt_never_leaves_fewer_tokens_than_one(kit: Kit, tmp_path: Path) -> None:
    model = open_model(kit.teacher)
    most = model.decoder.config.max_position_embeddings
    (ids,) = model.tokenizer.encode_documents(["def f(x):\n"])
    short = read_problems(written(tmp_path / "a.jsonl", [problem(0)]), "humaneval")
    assert module.token_limit(model, short, None) == min(512, most - len(ids))
    assert module.token_limit(model, short, 7) == 7
    with pytest.raises(BadInput, match=r"Own/0 \("):
        module.token_limit(model, short, most)


def test_a_report_has_each_program_once_in_the_order_of_the_problems(
    eval_: Eval, kit: Kit, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_("--json")[0] == 0
    whole = json.loads(capsys.readouterr().out)
    path = tmp_path / "r.jsonl"
    head, *lines = path.read_text().splitlines()
    died = json.loads(lines[1]) | {"outcome": "harness", "reason": "it died"}
    path.write_text("\n".join([head, json.dumps(died), *lines[:0:-1]]) + "\n")
    assert eval_("--json") == (0, ["self-test", "program"])
    assert json.loads(capsys.readouterr().out) == whole
    assert [one["task_id"] for one in whole["per_problem_results"]] == ["Own/0", "Own/1", "Own/2"]
    assert len(read_results(path)[1]) == COUNT + 1


def test_programs_that_had_not_ended_are_counted(
    eval_: Eval, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_("--json")[0] == 0
    printed = json.loads(capsys.readouterr().out)
    ended = [one["ended"] for one in printed["per_problem_results"]]
    assert printed["cut"] == ended.count("length") and printed["settings"]["max_tokens"] == 4
    assert eval_()[0] == 0
    said = capsys.readouterr().out
    assert (
        printed["cut"] > 0
        and f"{printed['cut']} programs were cut off" in said
        and "limit of 4" in said
    )


def test_a_comparison_says_in_what_it_is_not_of_like_and_refuses_several_programs(
    eval_: Eval, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = read_problems(data, "humaneval")
    sha256 = problems.sha256

    def other(**settings: object) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        about = {"benchmark": "humaneval", "data_sha256": sha256, "settings": settings}
        results = open_results(path, about)
        for index in range(COUNT):
            results.add(line(index))
        results.close()
        return str(path)

    assert eval_("--against", other(samples=2)) == (64, [])
    assert "expected samples 1, found 2" in capsys.readouterr().err
    assert eval_("--against", other(samples=1, max_tokens=99))[0] == 0
    assert "its evaluation differs: max_tokens 4 here, 99 there" in capsys.readouterr().out


def test_one_evaluation_at_a_time_writes_a_file_of_results(tmp_path: Path) -> None:
    about = {"benchmark": "humaneval"}
    first = open_results(tmp_path / "r.jsonl", about)
    with pytest.raises(BadInput, match="another evaluation that writes it"):
        open_results(tmp_path / "r.jsonl", about)
    first.add(line(0))
    first.close()
    again = open_results(tmp_path / "r.jsonl", about)
    assert len(again.done) == 1
    again.close()


def test_a_text_of_the_user_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("a note without an end of line")
    with pytest.raises(BadInput):
        open_results(path, {"benchmark": "humaneval"})
    assert path.read_text() == "a note without an end of line"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line(0, "great")], "an outcome 'great'"),
        # As many programs as were asked for, and one problem without any.
        ([line(0, "pass"), line(1, "pass"), line(1, "pass", sample=1)], None),
    ],
)
def test_a_file_of_results_that_is_not_one_program_a_problem_is_no_figure(
    lines: list[Result], words: str | None, tmp_path: Path
) -> None:
    from engine.evaluate.report import report_of_file

    about = {"benchmark": "humaneval", "problems": COUNT, "settings": {"samples": 1}}
    results = open_results(tmp_path / "r.jsonl", about)
    for one in lines:
        results.add(one)
    results.close()
    if words is None:
        assert not report_of_file(results.path)[0].known
        return
    with pytest.raises(BadInput, match=words):
        report_of_file(results.path)


@pytest.fixture
def broken(kit: Kit, tmp_path: Path) -> Path:
    """Finite weights whose product is not."""
    decoder: Any = load_decoder(kit.teacher)
    with torch.no_grad():
        decoder.layers[0].mlp.up.weight.mul_(1e25)
        decoder.layers[0].mlp.down.weight.mul_(1e25)
    save_decoder(decoder, tmp_path / "broken", torch.float32, [kit.teacher / "tokenizer.json"])
    return tmp_path / "broken"


def test_a_model_without_finite_logits_says_so_to_programs_too(
    eval_: Eval, broken: Path, kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_("--json", model=broken)[0] == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["mode"] == "unknown" and "finite logits" in printed["error"]
    assert "pass_at_k" not in printed
    text = str(kit.corpus / "part_00.py")
    assert main(["eval", "ppl", str(broken), "--data", text, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["mode"] == "unknown" and "finite number" in printed["error"]


def test_the_record_of_a_perplexity_says_what_it_depends_on(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "ppl", str(kit.teacher), "--data", str(kit.corpus / "part_00.py"), "--json"]
    assert main([*given, "--length", "32", "--against", str(kit.teacher)]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["length"] == 32 and printed["against_weights_sha256"] == weights_sha256(
        kit.teacher
    )
    assert "fewer than 20" in printed["interval"]
    # How far it is, counted in tokens: one document may be all of the text.
    assert f"{printed['tokens']:,}/{printed['tokens']:,} tokens" in err
    assert main([*given, "--length", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"]["value"] != printed["loss"]["value"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": 5}, r"line 2 — expected prompt to be a string, as in humaneval, found 5"),
        ({"test": None}, r"line 2 — expected test to be a string, as in humaneval, found null"),
        ({"task_id": "Own/0"}, r"line 2 — expected each task_id once, found Own/0 again"),
    ],
)
def test_a_bad_problem_is_shown_as_it_is(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [problem(0), {**problem(1), **change}]
    with pytest.raises(BadInput, match=words):
        read_problems(written(tmp_path / "bad.jsonl", lines), "humaneval")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"task_id": None},
            "expected task_id to be an integer or a string, as in mbpp, found null",
        ),
        ({"task_id": ""}, "expected task_id to be an integer or a string"),
        ({"task_id": [1]}, r"found \[1\]"),
        ({"task_id": True}, "found true"),
        ({"test_list": []}, "test_list with at least one test"),
    ],
)
def test_a_bad_problem_of_mbpp_is_shown_as_it_is(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"task_id": 1, "text": "", "code": "", "test_list": ["assert f()"]}
    path = written(tmp_path / "own.jsonl", [whole])
    assert read_problems(path, "mbpp").problems[0].task_id == "1"
    with pytest.raises(BadInput, match=words):
        read_problems(written(path, [whole | change]), "mbpp")


def test_a_file_of_the_other_benchmark_or_of_another_kind_says_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", [problem(0)])
    with pytest.raises(BadInput) as other:
        read_problems(path, "mbpp")
    assert other.value.hint == "it looks like a problem of `engine eval humaneval`"
    path.write_bytes(b"PAR1\x15\x04")
    with pytest.raises(BadInput) as kind:
        read_problems(path, "mbpp")
    assert "one JSON object per line" in (kind.value.hint or "")


def test_a_lock_is_gone_with_its_writer(tmp_path: Path) -> None:
    results = open_results(tmp_path / "r.jsonl", {"benchmark": "humaneval"})
    results.close()
    with (tmp_path / "r.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
