"""The notebooks in a real JupyterLab in a real browser: pixels that change, a flip by a click, a restart of the kernel.

Takes minutes and wants Chromium, so it runs with `make notebooks` and in the soak.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import notebook_lab
from tests.support.lacks import needs
from tests.support.notebook_lab import (
    CHROMIUM,
    DEADLINE_S,
    command,
    open_notebook,
    status,
    sync_api,
    until,
)
from tests.support.running import environment

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("default"),
    needs("Chromium", CHROMIUM),
]
folder, lab, page, shoot = (
    notebook_lab.folder,
    notebook_lab.lab,
    notebook_lab.page,
    notebook_lab.shoot,
)
CHARTS = "[...document.querySelectorAll('.apr-live canvas')].map(c => c.toDataURL()).join()"


def pixels(page: sync_api.Page) -> str:
    return hashlib.sha256(page.evaluate(CHARTS).encode()).hexdigest()


def test_the_first_run_is_seen_growing_and_survives_the_kernel(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[..., Path]
) -> None:
    open_notebook(page, lab, "01_first_run.ipynb")
    command(page, "notebook:run-all-cells")
    page.wait_for_selector(".apr-live canvas")
    seen = {pixels(page)}

    def look() -> bool:
        seen.add(pixels(page))
        if len(seen) == 5:
            shoot("01-running")
        return "COMPLETED" in status(page)

    until(look, "the end of the run")
    assert len(seen) >= 5, f"the charts had {len(seen)} different pictures"
    page.locator(".apr-live").scroll_into_view_if_needed()
    shoot("01-completed")
    # The still is there, and the live widget hides it.
    assert page.locator("[data-apr-static]").count() == 1
    assert not page.locator("[data-apr-static]").is_visible()
    until(lambda: page.locator(".jp-OutputArea-output table").count() >= 2, "the tables")

    command(page, "docmanager:save")
    command(page, "notebook:restart-kernel")
    page.click(".jp-Dialog .jp-mod-accept")
    until(lambda: "no kernel behind this view" in status(page), "the word of the lost kernel")
    page.locator(".apr-live").scroll_into_view_if_needed()
    shoot("01-restarted")

    # The page loaded again has no model to show; the figure that was kept is what a person sees.
    command(page, "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    open_notebook(page, lab, "01_first_run.ipynb")
    page.wait_for_selector("[data-apr-static] img")
    assert "COMPLETED | step 2500/2500" in page.locator("[data-apr-static]").inner_text()
    page.locator("[data-apr-static]").scroll_into_view_if_needed()
    shoot("01-reopened")

    command(page, "notebook:run-all-cells")
    page.wait_for_selector(".apr-live canvas")
    until(lambda: "COMPLETED" in status(page), "the same run")
    assert [path.name for path in (folder / "runs").glob("first*")] == ["first"]


def test_a_flip_is_started_by_a_click_and_its_verdict_read_from_the_page(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[..., Path]
) -> None:
    open_notebook(page, lab, "02_dispatch_flip.ipynb")
    for _ in range(6):
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-cell-and-select-next')")
    button = page.get_by_role("button", name="run flip")
    button.wait_for()
    until(lambda: "compute.slow_by  A" in page.inner_text(".jp-Notebook"), "the plan")
    shoot("02-plan")
    button.click()
    verdict = re.compile(r"^ *(B_SLOWER|B_FASTER|EQUIVALENT|INCONCLUSIVE|INVALID) \(", re.M)
    found = until(lambda: verdict.search(page.inner_text(".jp-Notebook")), "the verdict")
    shoot("02-verdict", whole=True)
    # B waits twice as long again in every step: a machine that is busy with other tests can tell, too.
    assert found[1] == "B_SLOWER"
    (written,) = (folder / "runs" / "flips").glob("*/verdict.json")
    assert f'"verdict": "{found[1]}"' in written.read_text()


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("03_five_whys.ipynb", "tests judged again"),
        ("04_reading_a_past_run.ipynb", "'(pass|unknown)'"),
        ("05_a_7b_teacher_on_one_gpu.ipynb", "of the limit on an H200"),
        ("06_from_a_chat_file_to_a_student.ipynb", "teacher: [A-Z0-9]"),
    ],
)
def test_a_notebook_runs_top_to_bottom_without_an_error(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[..., Path], name: str, last: str
) -> None:
    if name.startswith("04"):
        asked = ["--out", str(folder / "runs" / "past"), "--set", "train.steps=300"]
        command_line = [
            sys.executable,
            "-m",
            "engine",
            "distill",
            str(folder / "spec.toml"),
            *asked,
        ]
        subprocess.run(command_line, check=True, timeout=DEADLINE_S, env=environment())
    open_notebook(page, lab, name)
    command(page, "notebook:run-all-cells")

    def ended() -> bool:
        text = page.inner_text(".jp-Notebook")
        assert "Traceback (most recent call last)" not in text
        return bool(re.search(last, text))

    until(ended, f"{last!r}")
    if name[:2] in ("04", "05"):
        page.wait_for_selector(".js-plotly-plot .main-svg")
    shoot(name[:2], whole=True)
    if name.startswith("03"):
        words = " ".join(page.inner_text(".jp-Notebook").split())
        assert "root cause: exit failed of fast: RATE=0.05 ends it" in words
        assert "c1 refuted: SEED: 0 -> 1" in words and "c2 confirmed: RATE: 5 -> 0.05" in words
