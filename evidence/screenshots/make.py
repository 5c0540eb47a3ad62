"""Real screens of real runs, as SVG: `.venv/bin/python evidence/screenshots/make.py RUNS RUN`.

Opens the workbench on what is there, without a terminal, and saves what it draws: the list of runs
in the folder RUNS, the screen of the run folder RUN at two sizes, and a flip of it before it starts.
"""

import asyncio
import sys
from pathlib import Path

from workbench.tui.app import WorkbenchApp

HERE = Path(__file__).parent


async def save(path: Path, size: tuple[int, int], name: str, *keys: str) -> None:
    app = WorkbenchApp([path], refresh_s=3600.0)
    async with app.run_test(size=size) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
        (HERE / name).write_text(app.export_screenshot(title="apr-workbench"))


async def main(runs: Path, run: Path) -> None:
    await save(run, (120, 40), "run.svg")
    await save(run, (80, 24), "run-80x24.svg")
    await save(runs, (120, 20), "runs.svg")
    await save(run, (120, 40), "flip.svg", "F")


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
