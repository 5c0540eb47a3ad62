"""What is proposed about a watched run: its alerts first, by an option of the script where it has one."""

from __future__ import annotations

from typing import Any

import pytest

from engine.flips.proposals import IDEAS, Proposal, options_for, proposals
from engine.flips.script_settings import read_script_settings
from engine.flips.watched import difference
from engine.log.events import Compiled, Event, Judged, StepDone, Watched
from engine.log.folder import WatchedCommand
from engine.log.view import RunView
from engine.watch.rules import RULES
from tests.support.judged import alert_event, is_alert
from tests.support.run_events import fold_events, numbered

PROBED: dict[str, Any] = {
    "pid": 1,
    "python": "3",
    "executable": "p",
    "torch": "2",
    "optimizer": "AdamW",
}


def watched(device: str = "cpu", world: int = 1) -> Watched:
    return Watched(**PROBED, device=device, parameters=1, world=world)


def alert(id: str, severity: str = "warning") -> Judged:
    return alert_event(id=id, level=severity, text=f"{id} is so", flip="", no_flip="-")


def found(*events: Event, words: tuple[str, ...] = ("python", "t.py")) -> tuple[Proposal, ...]:
    command = WatchedCommand(arguments=words, folder="/", commit=None)
    view = RunView()
    for source in ("watch", "events"):
        is_watch = source == "watch"
        of_source = [one for one in events if is_alert(one) == is_watch]
        view = fold_events(view, source, numbered(of_source))  # type: ignore[arg-type]
    return proposals(view, command=command)


def test_the_idea_of_an_alert_comes_first_with_its_reason() -> None:
    first, *rest = found(watched(), alert("data_wait"))
    assert first.assignment == "loader.workers=4"
    assert first.source == "alert data_wait: data_wait is so"
    assert rest and not any(one.source.startswith("alert") for one in rest if not one.impossible)


def test_a_script_without_a_loader_is_given_no_workers_and_what_nothing_suggests_is_told_apart() -> (
    None
):
    steps = [StepDone(step=n, step_s=1.0, rows=1) for n in (1, 2)]
    one = {each.assignment: each for each in found(watched("cuda:0"), *steps)}
    assert "loader.workers=4" not in one
    possible = [each for each in one.values() if not each.impossible]
    assert possible and not any(each.seen for each in possible)


def test_an_option_of_the_command_is_taken_as_it_is_spelt_and_more_than_it_has() -> None:
    first, *_ = found(watched(), alert("data_wait"), words=("python", "t.py", "--num-workers=4"))
    assert first.assignment == "--num-workers 8"


def test_a_script_of_training_arguments_takes_their_options() -> None:
    words = ("python", "t.py", "--per_device_train_batch_size", "2")
    one = found(watched("cuda:0"), alert("data_wait"), words=words)
    assert one[0].assignment == "--dataloader_num_workers 4"
    assert "--torch_compile True" in [each.assignment for each in one if not each.impossible]


def test_an_option_that_a_script_lacks_is_said_to_be_given_by_hand() -> None:
    (one,) = [each for each in found(watched("cuda:0")) if "torch_compile" in each.assignment]
    assert one.impossible == "the command has no such option: give the script one"


def test_a_stall_of_ranks_has_those_of_the_network() -> None:
    stalled = alert("stalled", "error")
    names = [one.assignment for one in found(watched("cuda:0", 2), stalled) if not one.impossible]
    assert {"NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1", "loader.workers=0"} <= set(names[:5])
    alone = {one.assignment: one.impossible for one in found(watched("cuda:0"), stalled)}
    assert alone["NCCL_P2P_DISABLE=1"] == "the run has one rank"
    assert "loader.workers=0" not in [one.assignment for one in found(watched())]


def test_a_variable_that_the_environment_has_already_is_not_to_be_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, why in (("1", "it is 1 already"), ("8", ""), (None, "")):
        monkeypatch.delenv("OMP_NUM_THREADS")
        if value is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        one = {each.assignment: each.impossible for each in found(watched(), alert("stalled"))}
        assert one["OMP_NUM_THREADS=1"] == why
        monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_compiling_is_turned_off_only_where_something_was_compiled() -> None:
    compiled = Compiled(
        kernel="f",
        key="k",
        digest="",
        compile_s=1.0,
        disk_hit=None,
        after_warm_up=True,
        compiler="torch.compile",
    )
    late = alert("compile_after_warm_up")
    assert found(watched(), late, compiled)[0].assignment == "TORCH_COMPILE_DISABLE=1"
    without = {one.assignment: one.impossible for one in found(watched(), late)}
    assert without["TORCH_COMPILE_DISABLE=1"] == "torch.compile compiled nothing in the run"


def test_each_idea_can_be_flipped_and_names_alerts_that_there_are() -> None:
    known = {rule.id for rule in RULES}
    for idea in IDEAS:
        assert set(idea.alerts) <= known, idea
        assert difference(idea.assignment)
        option, text = options_for(idea.assignment)
        if option == "--set":
            read_script_settings([text])


def test_nothing_is_proposed_about_a_run_whose_command_is_not_on_record() -> None:
    assert found(watched(), alert("data_wait"), words=()) == ()
