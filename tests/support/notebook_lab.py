"""A JupyterLab server for tests, with a page of a real browser in it.

Screenshots are kept in the folder that APR_SCREENSHOTS names, else with pytest's temporary files.
"""

from __future__ import annotations

import contextlib
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

from tests.support.kit import Kit
from tests.support.paths import NOTEBOOKS
from tests.support.running import environment

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TOKEN = "a-token-of-this-test"
DEADLINE_S = 900.0
WIDE, HIGH = 1400, 1500
PANEL = "document.querySelector('.jp-WindowedPanel-outer')"


@pytest.fixture(scope="module")
def folder(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notebooks, and a spec whose run takes some seconds, so that it can be watched."""
    folder = tmp_path_factory.mktemp("lab")
    kit.spec(folder, train__steps=2500, eval__every=250, checkpoint__every=0)
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    """JupyterLab on a port of its choice; yields the address with its token."""
    settings = environment() | {
        "APR_NOTEBOOK_SPEC": str(folder / "spec.toml"),
        "APR_NOTEBOOK_RUNS": str(folder / "runs"),
        "APR_NOTEBOOK_FLIP": "compute.slow_by=3",
        "APR_NOTEBOOK_BUDGET": "10m",
        "APR_NOTEBOOK_EVIDENCE": str(NOTEBOOKS.parent / "evidence"),
        # A separate lock, so that tests running beside this one may start flips too.
        "XDG_STATE_HOME": str(folder / "state"),
        "JUPYTER_CONFIG_DIR": str(folder / ".jupyter"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"),
        "IPYTHONDIR": str(folder / ".ipython"),
    }
    # The question about news would cover the corner of every screenshot.
    answered = folder / "settings" / "@jupyterlab" / "apputils-extension"
    answered.mkdir(parents=True)
    (answered / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
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
    """Wait until `seen` returns something true, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := seen()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def page(lab: str) -> Iterator[sync_api.Page]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH})
        page.set_default_timeout(DEADLINE_S * 1000)
        yield page
        browser.close()


@pytest.fixture
def shoot(
    page: sync_api.Page, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Path]]:
    folder = Path(os.environ.get("APR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def take(name: str, *, whole: bool = False) -> Path:
        """Take a screenshot; with `whole` of the entire notebook, in a window high enough for it."""
        path = folder / f"{name}.png"
        if whole:
            high = page.evaluate(f"{PANEL}.scrollTop = 0, {PANEL}.scrollHeight")
            page.set_viewport_size({"width": WIDE, "height": min(high + 200, 9000)})
            page.wait_for_timeout(1000)
        page.screenshot(path=path)
        page.set_viewport_size({"width": WIDE, "height": HIGH})
        return path

    yield take
    take(f"last-{re.sub('[^a-z0-9]+', '-', request.node.name)[-40:]}")


def open_notebook(page: sync_api.Page, lab: str, name: str) -> None:
    page.goto(f"{lab}/lab/workspaces/{name[:2]}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    # A cell that is run before there is a kernel is silently not executed.
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"{kernel}?.status === 'idle'")


def command(page: sync_api.Page, name: str) -> None:
    page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)


def run_cell(page: sync_api.Page, index: int) -> None:
    """Run one cell, made active by a click; returns when it is done."""
    page.evaluate(
        """async index => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.deselectAll();
          notebook.activeCellIndex = index;
          await window.jupyterapp.commands.execute('notebook:run-cell');
        }""",
        index,
    )


def comms(page: sync_api.Page) -> list[str]:
    """Return the comms that the kernel of this notebook holds open."""
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    found = page.evaluate(f"{kernel}.requestCommInfo({{}}).then(reply => reply.content.comms)")
    return sorted(found)


def status(page: sync_api.Page) -> str:
    return str(page.locator(".apr-live .apr-status").first.inner_text())
