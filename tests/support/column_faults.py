"""Write the columns of a log while operations fail, or the process is killed at one; with `faults.c` preloaded.

`python column_faults.py FOLDER CODE` prints the number of operations that failed, and every broken promise.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path

from engine.log.folder import RunFolder
from engine.log.read import LogReader
from engine.log.view import RunView
from tests.support.fault_scenarios import Scenario, fail_each
from tests.support.faults import CODES, KILL, WAYS, Shim
from tests.support.run_events import picture
from tests.support.small_logs import followed, long_log, small_sizes


class Keeping(Scenario):
    """A viewer stores the segments of a log, of which one already has a stale file."""

    def prepare(self) -> None:
        self.run = RunFolder(self.folder)
        long_log(self.run.events, 40)
        self.keep()
        with self.run.events.open("r+b") as file:
            file.truncate(2000)
        (self.folder / "columns" / "events-000001530.partial").write_bytes(b"half")
        long_log(self.run.events, 60)
        self.wanted = self.run.events.read_bytes()

    def keep(self) -> RunView:
        return followed(RunView(), "events", LogReader(self.run.events), files=True, keep=True)

    def act(self) -> None:
        self.keep()

    def check(self, failed: bool, persistent: bool) -> None:
        assert not failed, "the viewer was told"
        assert self.run.events.read_bytes() == self.wanted
        for use in (True, False):
            view = followed(RunView(), "events", LogReader(self.run.events), files=use)
            self.done.append(picture(view))
        assert self.done[-1] == self.done[-2], "something else is shown"
        assert picture(self.keep()) == self.done[-1]
        segments = list((self.folder / "columns").glob("*.segment"))
        assert len(segments) >= (len(self.wanted) - 4000) // 3000, "the next one cannot go on"


def kill_each(shim: Shim, folder: Path) -> tuple[int, list[str]]:
    problems = []
    for nth in count(1):
        place = folder / "place"
        place.mkdir()
        scenario = Keeping(place)
        scenario.prepare()
        child = os.fork()
        if not child:
            with shim.armed(place, nth, KILL):
                scenario.act()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        try:
            scenario.check(False, False)
        except AssertionError as problem:
            problems.append(f"killed at operation {nth}: {problem}")
        shutil.rmtree(place)
        if status == 0:
            return nth - 1, problems
    raise AssertionError


def main() -> None:
    folder, code = Path(sys.argv[1]), sys.argv[2]
    shim, points, problems = Shim(), 0, []
    with small_sizes():
        if code == "KILL":
            points, problems = kill_each(shim, folder)
        else:
            for how in WAYS:
                done, found = fail_each(Keeping, shim, folder, CODES[code], how)
                points, problems = points + done, problems + found
    print(json.dumps({"points": points, "problems": problems}))


if __name__ == "__main__":
    main()
