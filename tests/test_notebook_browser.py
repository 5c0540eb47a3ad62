"""A real JupyterLab in a real browser: pixels that change, a flip by a click, a restart of the kernel.

Takes a minute or two and wants Chromium, so it runs with `make notebooks` and in the soak. Screenshots are
kept in the folder that APR_SCREENSHOTS names, else with pytest's temporary files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import Kit
from running import engine, environment

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default")]
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
TOKEN = "a-token-of-this-test"
DEADLINE_S = 150.0
EIGHT = (
    """\
import os
from pathlib import Path
from IPython.display import display
from workbench.notebook import Live
runs = Path(os.environ["APR_NOTEBOOK_RUNS"])
first = Live(os.environ["APR_NOTEBOOK_SPEC"], set=["train.steps=400"], out=runs / "eight")
first.start()
panels = [first, *(Live(runs / "eight") for _ in range(7))]""",
    "display(*panels)",
    "print('the window is', panels[-1].window)",
)
"""A page of eight widgets on one run, and what was selected in the last of them."""
LATE = """async () => {
  const late = [];
  for (let i = 0; i < 100; i++) {
    const begun = performance.now();
    await new Promise(done => setTimeout(done, 20));
    late.push(performance.now() - begun - 20);
  }
  return late.sort((a, b) => a - b);
}"""
"""How late a page's timers of 20 ms are, in milliseconds: what a click would wait."""
CHARTS = "[...document.querySelectorAll('.apr-live canvas')].map(c => c.toDataURL()).join()"

if CHROMIUM is None:
    pytest.skip("no chromium here", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notebooks and a spec whose run takes some seconds, so that it can be watched."""
    folder = tmp_path_factory.mktemp("lab")
    kit.spec(folder, train__steps=2500, eval__every=250, checkpoint__every=0)
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    notebook = nbformat.read(NOTEBOOKS / "01_first_run.ipynb", 4)
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in EIGHT]
    nbformat.write(notebook, folder / "08_widgets.ipynb")
    return folder


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    """JupyterLab on a port of its choice; the address with its token."""
    settings = environment() | {
        "APR_NOTEBOOK_SPEC": str(folder / "spec.toml"),
        "APR_NOTEBOOK_RUNS": str(folder / "runs"),
        "APR_NOTEBOOK_FLIP": "compute.slow_by=3",
        "APR_NOTEBOOK_BUDGET": "60s",
        "APR_NOTEBOOK_EVIDENCE": str(NOTEBOOKS.parent / "evidence"),
        # A lock of its own, so that tests beside this one may flip too.
        "XDG_STATE_HOME": str(folder / "state"),
        "JUPYTER_CONFIG_DIR": str(folder / ".jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"),
        "IPYTHONDIR": str(folder / ".ipython"),
    }
    log = folder / "lab.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={TOKEN}"),
                "--expose-app-in-browser",
            ],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=settings,
        )
    try:
        found = until(
            lambda: re.search(r"http://127\.0\.0\.1:(\d+)/lab", log.read_text()), "a port"
        )
        address = f"http://127.0.0.1:{found[1]}"
        until(lambda: answers(f"{address}/api?token={TOKEN}"), "the server")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(address, timeout=5).status == 200)
    return False


def until(seen, what):  # type: ignore[no-untyped-def]
    """What `seen` returns once it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := seen()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def page(lab: str) -> Iterator[sync_api.Page]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.set_default_timeout(DEADLINE_S * 1000)
        yield page
        browser.close()


@pytest.fixture
def shoot(
    page: sync_api.Page, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Path]]:
    folder = Path(os.environ.get("APR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def take(name: str) -> Path:
        path = folder / f"{name}.png"
        page.screenshot(path=path)
        return path

    yield take
    take(f"{request.node.name[:40]}-last")


def open_notebook(page: sync_api.Page, lab: str, name: str) -> None:
    page.goto(f"{lab}/lab/workspaces/{name[:2]}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    # A cell that is run before there is a kernel is not run at all.
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"{kernel}?.status === 'idle'")


def command(page: sync_api.Page, name: str) -> None:
    page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)


def pixels(page: sync_api.Page) -> str:
    return hashlib.sha256(page.evaluate(CHARTS).encode()).hexdigest()


def status(page: sync_api.Page) -> str:
    return str(page.locator(".apr-live .apr-status").first.inner_text())


def test_the_first_run_is_seen_growing_and_survives_the_kernel(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[[str], Path]
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
    shoot("01-restarted")

    # The page loaded again has no model to show; the figure that was kept is what a person sees.
    command(page, "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    open_notebook(page, lab, "01_first_run.ipynb")
    page.wait_for_selector("[data-apr-static] svg")
    assert "COMPLETED | step 2500/2500" in page.locator("[data-apr-static]").inner_text()
    page.locator("[data-apr-static]").scroll_into_view_if_needed()
    shoot("01-reopened")

    command(page, "notebook:run-all-cells")
    page.wait_for_selector(".apr-live canvas")
    until(lambda: "COMPLETED" in status(page), "the same run")
    assert [path.name for path in (folder / "runs").glob("first*")] == ["first"]


def test_a_flip_is_started_by_a_click_and_its_verdict_read_from_the_page(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[[str], Path]
) -> None:
    open_notebook(page, lab, "02_dispatch_flip.ipynb")
    for _ in range(6):
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-cell-and-select-next')")
    button = page.get_by_role("button", name="run flip")
    button.wait_for()
    until(lambda: "compute.slow_by  A" in page.inner_text(".jp-Notebook"), "the plan")
    shoot("02-plan")
    button.click()
    verdict = re.compile(r"^(B_SLOWER|B_FASTER|EQUIVALENT|INCONCLUSIVE|INVALID) \(", re.M)
    found = until(lambda: verdict.search(page.inner_text(".jp-Notebook")), "the verdict")
    shoot("02-verdict")
    (written,) = (folder / "runs" / "flips").glob("*/verdict.json")
    assert f'"verdict": "{found[1]}"' in written.read_text()


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("03_five_whys.ipynb", "pieces of evidence checked"),
        ("04_reading_a_past_run.ipynb", "'(pass|unknown)'"),
        ("05_a_7b_teacher_on_one_gpu.ipynb", "the figures above are those of the committed run"),
    ],
)
def test_a_notebook_runs_top_to_bottom_without_an_error(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[[str], Path], name: str, last: str
) -> None:
    if name.startswith("04") and not (folder / "runs" / "past").exists():
        done = engine("distill", folder / "spec.toml", "--out", folder / "runs" / "past")
        assert done.returncode == 0, done.stderr
    open_notebook(page, lab, name)
    command(page, "notebook:run-all-cells")

    def ended() -> bool:
        text = page.inner_text(".jp-Notebook")
        assert "Traceback (most recent call last)" not in text
        return bool(re.search(last, text))

    until(ended, f"{last!r}")
    shoot(name[:2])
    if name.startswith("03"):
        assert "root cause: set the rate" in page.inner_text(".jp-Notebook")


def test_eight_widgets_on_one_page_stay_responsive_and_a_drag_selects_a_time(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[[str], Path]
) -> None:
    open_notebook(page, lab, "08_widgets.ipynb")
    for _ in range(2):
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-cell-and-select-next')")
    until(lambda: page.locator(".apr-live canvas").count() >= 8, "eight widgets")
    until(lambda: "step" in status(page), "the first steps")
    late_ms = page.evaluate(LATE)
    assert late_ms[50] < 20 and late_ms[95] < 200, f"timers are late by {late_ms[50]} ms"
    shoot("08-running")
    everywhere = page.locator(".apr-live .apr-status").all_inner_texts
    until(lambda: all("COMPLETED" in text for text in everywhere()), "the end in all of them")
    chart = page.locator(".apr-live").last.locator("canvas").last
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    page.mouse.up()
    shoot("08-selected")
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-cell-and-select-next')")
    found = until(
        lambda: re.search(r"the window is \(([\d.]+), ([\d.]+)\)", page.inner_text(".jp-Notebook")),
        "the window",
    )
    begin, end = float(found[1]), float(found[2])
    assert 0 < end - begin < 600
