"""Real screens of real runs, as SVG: `.venv/bin/python evidence/screenshots/make.py RUNS RUN WATCHED ON_GPU`.

`make.py RUNS` alone saves the six screens of VERDICTS, 120 columns by 40 rows. In each a new reader finds how the run
is, why, and what to do next, in the first two lines. RUNS has a run of the demo that is training (`healthy`) and one
whose trainer was ended by `kill -9` (`ended`); two scripts of tests/support/fixable_scripts.py that were watched, with
`kept_gradients` (`wrong`) and with `training_mode` (`suspect`); and a table of steps whose held-out loss rises again,
imported (`imported`).

Opens the workbench on what is there, without a terminal, and saves what it draws: the list of runs
in the folder RUNS; the run folder RUN at two sizes, in a light theme and in two for the colour-blind;
WATCHED, a run of `make demo-watch`, at two sizes; a flip of RUN before it starts; help;
each of the screens that can be opened from everywhere (findings, flips), and the newest
finding, as they are in the folder where this is started.
`live.svg`, the picture of README, is ON_GPU, a run on an H200: `engine distill engine/demo/demo.toml --set
train.rows=512 --set train.steps=1500 --set eval.every=100 --set watch.sample_seconds=0.5 --set checkpoint.every=500`.
"""

import asyncio
import os
import sys
from pathlib import Path

from workbench.tui.app import WorkbenchApp

HERE = Path(__file__).absolute().parent
TOGETHER = 3
"""How many runs are compared."""
WIDE = (120, 40)
VERDICTS = ("healthy", "wrong", "suspect", "ended", "imported")
"""Runs of which there is a screen each; the sixth is the list of them."""


async def save(
    path: Path, size: tuple[int, int], name: str, *keys: str, theme: str = "dark"
) -> None:
    """Open the workbench on `path`, standing beside it, press keys, and save the screen as `name`."""
    path = path.absolute()
    os.chdir(path.parent)
    app = WorkbenchApp([path], refresh_s=3600.0, theme=theme)
    async with app.run_test(size=size) as pilot:

        async def settle() -> None:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await pilot.pause()

        await settle()
        for key in keys:
            await pilot.press(key)
            await settle()
        (HERE / name).write_text(app.export_screenshot(title="apr-workbench"))


async def verdicts(runs: Path) -> None:
    """Save a run of each level, and the list with the cursor on the run that was killed."""
    for name in VERDICTS:
        await save(runs / name, WIDE, f"verdict-{name}.svg")
    await save(runs, WIDE, "verdict-list.svg", "1", "ctrl+home")


async def main(runs: Path, run: Path, watched: Path, on_gpu: Path) -> None:
    wide = WIDE
    # The cursor at the first step, on by five times ten columns, then the samples of text.
    keys = ("home", *["greater_than_sign"] * 5, "f11")
    await save(on_gpu, (150, 54), "live.svg", *keys)
    await save(run, (80, 24), "run-80x24.svg")
    await save(run, (200, 60), "run-200x60.svg")
    await save(run, wide, "run-light.svg", theme="light")
    await save(run, wide, "run-colourblind.svg", theme="colourblind-dark")
    await save(run, wide, "run-colourblind-light.svg", theme="colourblind-light")
    await save(runs, (80, 24), "runs-80x24.svg")
    await save(runs, (200, 60), "runs-200x60.svg")
    await save(runs, wide, "compare.svg", *["space"] * TOGETHER, "c")
    await save(run, wide, "flip.svg", "F")
    await save(run, wide, "help.svg", "question_mark")
    await save(watched, (80, 24), "watch-80x24.svg")
    await save(watched, (200, 60), "watch-200x60.svg")
    await save(run, wide, "flips.svg", "E")
    await save(run, wide, "whys.svg", "w")
    await save(run, wide, "finding.svg", "w", "enter", *["down"] * 5)


if __name__ == "__main__":
    paths = [Path(path).absolute() for path in sys.argv[1:5]]
    asyncio.run(verdicts(*paths) if len(paths) == 1 else main(*paths))
