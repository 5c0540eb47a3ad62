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

import pytest
from conftest import Kit
from running import environment

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default")]
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
TOKEN = "a-token-of-this-test"
DEADLINE_S = 150.0
CHARTS = "[...document.querySelectorAll('.apr-live canvas')].map(c => c.toDataURL()).join()"

if CHROMIUM is None:
    pytest.skip("no chromium here", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notebooks and a spec whose run takes some seconds, so that it can be watched."""
    folder = tmp_path_factory.mktemp("lab")
    kit.spec(folder, train__steps=2500, eval__every=250, checkpoint__every=0)
    for name in ("01_first_run.ipynb", "02_dispatch_flip.ipynb"):
        shutil.copy(NOTEBOOKS / name, folder)
    return folder


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    """JupyterLab on a port of its choice; the address with its token."""
    settings = environment() | {
        "APR_NOTEBOOK_SPEC": str(folder / "spec.toml"),
        "APR_NOTEBOOK_RUNS": str(folder / "runs"),
        "APR_NOTEBOOK_FLIP": "compute.slow_by=3",
        "APR_NOTEBOOK_BUDGET": "60s",
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
    assert [path.name for path in (folder / "runs").iterdir()] == ["first"]


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
