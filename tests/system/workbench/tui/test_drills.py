"""Drills and the doctor on screens: last results, one carried out, and what the machine says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.cli.doctor import report_lines
from engine.errors import InternalError
from engine.log.folder import RunFolder
from engine.machine.doctor import diagnose
from engine.verdict import Level
from tests.support.doctor_around import AROUND
from tests.support.machines import MACHINES
from tests.support.paths import ROOT
from tests.support.screens import CUT_WORD, at_sizes, on_screen, poll, press, shows, words_of
from workbench import engine_commands
from workbench.doctor_rows import diagnosis, rows_of
from workbench.drill_rows import DrillsFeed, known_drills, results_in
from workbench.tui.screens.lists import DrillsScreen
from workbench.tui.screens.run import RunScreen
from workbench.tui.widgets.row_list import RowList

SIZES = ((160, 45), (40, 12))
DRILL = "plan_that_cannot_fit"


def result(drill: str, level: str, **fields: Any) -> dict[str, Any]:
    return {"drill": drill, "level": level, "evidence": f"{level} it is", **fields}


def write(file: Path, *results: dict[str, Any], unix_s: float | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    value: dict[str, Any] = {"level": "pass", "drills": results}
    file.write_text(json.dumps(value if unix_s is None else {"unix_s": unix_s, **value}))


def test_every_drill_is_listed_with_its_incident_and_what_must_name_it() -> None:
    known = {one.id: one for one in known_drills()}
    assert "OOM_MEMCG" in known["memory_leak"].must_be_named_by[0]
    assert known["memory_leak"].needs == ("memory group", "kill counters")
    assert len(known) > 10


def test_the_newest_result_counts_but_not_over_one_that_could_be_carried_out(
    tmp_path: Path,
) -> None:
    write(tmp_path / "evidence" / "cpu.json", result("a", "pass"), result("b", "fail"))
    write(tmp_path / "drills" / "old" / "drills.json", result("a", "fail"), unix_s=1e9)
    write(tmp_path / "drills" / "new" / "drills.json", result("a", "unknown"), unix_s=2e9)
    (tmp_path / "evidence" / "healthy.json").write_text('{"runs": []}')
    (tmp_path / "evidence" / "broken.json").write_text("{")
    found = results_in(tmp_path / "evidence", tmp_path / "drills")
    assert {id_: one.result.level for id_, one in found.items()} == {"a": "fail", "b": "fail"}
    assert found["a"].at_unix_s == 1e9 and found["b"].at_unix_s is None


def test_a_drill_without_a_result_says_how_to_get_one(tmp_path: Path) -> None:
    write(tmp_path / "cpu.json", result("deadlock", "pass", named_by="alert stalled", after_s=1.5))
    rows = {row.key: row for row in DrillsFeed([tmp_path]).poll().rows}
    assert rows["deadlock"].tone == "good"
    assert "  named by alert stalled, 1.5 s after its effect" in rows["deadlock"].lines
    assert any("time not recorded" in line for line in rows["deadlock"].lines)
    assert rows[DRILL].tone == "quiet" and "NOT RUN" in rows[DRILL].text
    assert any(f"engine drill {DRILL}" in line for line in rows[DRILL].lines)


def test_an_engine_that_lists_no_drills_is_an_error_and_no_empty_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = ["sh", "-c", "echo no such thing >&2; exit 3"]
    monkeypatch.setattr(engine_commands, "ENGINE", failing)
    with pytest.raises(InternalError, match="no such thing"):
        known_drills()


def test_drills_and_doctor_have_a_form_for_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "evidence" / "drills" / "cpu.json", result("identical_teacher", "pass"))

    async def script(pilot: Pilot[None]) -> None:
        async def at_each_size(key: str) -> list[str]:
            await press(pilot, key)
            return list((await at_sizes(pilot, SIZES)).values())

        for listed in await at_each_size("D"):
            assert "last results: 1 pass" in listed and "+ identical_teacher" in listed
            assert CUT_WORD.findall(listed) == []
        for detail in await at_each_size("z"):
            assert "incident: student and teacher" in detail
        for doctor in await at_each_size("I"):
            assert "doctor: " in doctor and "Verdict" in doctor

    on_screen([tmp_path], SIZES[0], script)


# `make drills` carries every drill out, and a contract is run from its screen in each run of the tests.
@pytest.mark.soak
def test_a_drill_is_carried_out_and_its_run_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "D")
        screen = pilot.app.screen
        assert isinstance(screen, DrillsScreen)
        assert screen.query_one(RowList).select(DRILL)
        await press(pilot, "n")
        job = screen.context.jobs.of("drill")
        assert job is not None and job.arguments[:2] == ("drill", DRILL)
        job._process.wait(timeout=240)
        await poll(pilot)
        assert f"engine drill {DRILL}" in words_of(pilot) and "ended with code 0" in words_of(pilot)
        assert await shows(pilot, "named by refusal memory"), words_of(pilot)
        await press(pilot, "o")
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.run.name == DRILL

    on_screen([tmp_path], (120, 40), script)
    (folder,) = (tmp_path / "drills").glob(f"*-{DRILL}")
    assert RunFolder(folder / DRILL).events.is_file()


def test_read_only_carries_out_no_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "D", "n")
        assert "run now" not in words_of(pilot)

    on_screen([tmp_path], (120, 40), script, read_only=True)
    assert not (tmp_path / "drills").exists()


def test_the_doctor_tells_what_is_broken_missing_and_with_which_source() -> None:
    missing = diagnose(MACHINES["gb10"].facts, [], AROUND)
    rows = {row.key: row for row in rows_of(Level.UNKNOWN, report_lines(missing, 100))}
    assert next(iter(rows.values())).text == "Verdict: UNKNOWN"
    assert rows["Verdict"].tone == "unsure" and "Broken" not in rows
    assert rows["Cannot be measured here"].tone == "unsure"
    assert "Rules out" in " ".join(rows["Cannot be measured here"].lines)
    assert "memory.allocator: managed" in rows["Memory allocator"].lines[1]
    assert any("(PATH)" in line for line in rows["Around a run"].lines)
    assert "  py-spy: py-spy is not on the PATH" in rows["Around a run"].lines
    broken = report_lines(replace(missing, broken=("CUDA does not work",)), 100)
    assert {row.key: row for row in rows_of(Level.FAIL, broken)}["Broken"].tone == "bad"


def test_a_doctor_that_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_commands, "ENGINE", ["sh", "-c", "echo no torch >&2; exit 3"])
    with pytest.raises(InternalError, match="expected a report, found code 3: no torch"):
        diagnosis()
