"""Pages in a real browser: eight widgets on one, a drag that becomes evidence, notebooks and reports without a kernel.

Takes minutes and wants Chromium, so it runs with `make notebooks` and in the soak.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.log.folder import is_run
from engine.report.chart import PAINTS
from engine.report.page import report
from tests.support import notebook_lab
from tests.support.findings import hanging_run
from tests.support.hostile_logs import hostile_run
from tests.support.lacks import needs
from tests.support.notebook_lab import (
    CHROMIUM,
    DEADLINE_S,
    HIGH,
    NOTEBOOKS,
    WIDE,
    command,
    comms,
    open_notebook,
    run_cell,
    status,
    sync_api,
    until,
)
from tests.support.paths import EVIDENCE

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
EIGHT = (
    """\
import os
from pathlib import Path
from IPython.display import display
from workbench.notebook import Live, Whys
runs = Path(os.environ["APR_NOTEBOOK_RUNS"])
first = Live(os.environ["APR_NOTEBOOK_SPEC"], set=["train.steps=400"], out=runs / "eight")
first.start()
panels = [first, *(Live(runs / "eight") for _ in range(7))]""",
    "display(*panels)",
    """\
whys = Whys.of(runs / "hang", "alert gpu_idle", folder=runs / "evidence")
whys""",
    """\
for panel in (*panels, whys):
    panel.close()""",
)
"""A page of eight widgets on one run, a finding about another, and the end of all."""
COUNT = """() => {
  const real = HTMLCanvasElement.prototype.getContext;
  window.drawn = 0;
  HTMLCanvasElement.prototype.getContext = function (...kind) {
    window.drawn += 1;
    return real.apply(this, kind);
  };
}"""
"""Counts charts that are drawn: each asks for its canvas's pen once."""
CHART_S = 0.01
"""CPU seconds of the page for each chart drawn, with all else that it does: a click waits for 32 of them at most."""
STILL = """() => {
  const still = [...document.querySelectorAll('img')].filter(i => i.src.startsWith('data:image/svg'));
  return still.filter(i => i.complete && i.naturalWidth > 300 && i.offsetParent !== null).length;
}"""
"""Figures that are drawn, as a browser says."""


def spent(session: sync_api.CDPSession) -> float:
    """CPU seconds of the thread that draws the page and answers a click."""
    found = session.send("Performance.getMetrics")["metrics"]
    numbers = {metric["name"]: metric["value"] for metric in found}
    return float(numbers["ThreadTime"])


def test_a_notebook_from_elsewhere_and_an_exported_one_show_the_result(
    page: sync_api.Page,
    lab: str,
    folder: Path,
    shoot: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    monkeypatch.setenv("APR_NOTEBOOK_EVIDENCE", str(NOTEBOOKS.parent / "evidence"))
    notebook = nbformat.read(NOTEBOOKS / "05_a_7b_teacher_on_one_gpu.ipynb", 4)
    NotebookClient(notebook, timeout=DEADLINE_S).execute()
    nbformat.write(notebook, folder / "06_from_elsewhere.ipynb")
    # Nobody has signed it, so JupyterLab trusts nothing in it, and there was never a kernel of it here.
    open_notebook(page, lab, "06_from_elsewhere.ipynb")
    until(lambda: page.evaluate(STILL) >= 4, "the figures")
    assert "within: COMPLETED | step 60/60" in page.inner_text(".jp-Notebook")
    shoot("06-from-elsewhere", whole=True)

    exported = folder / "exported.html"
    exported.write_text(HTMLExporter().from_notebook_node(notebook)[0])
    assert page.context.browser is not None
    with page.context.browser.new_context(
        offline=True, viewport={"width": WIDE, "height": HIGH}
    ) as offline:
        alone = offline.new_page()
        # Its scripts are elsewhere on the web, and it does without them.
        alone.goto(exported.as_uri(), wait_until="domcontentloaded")
        until(lambda: alone.evaluate(STILL) >= 6, "the figures")
        assert "within: COMPLETED | step 60/60" in alone.inner_text("body")
        alone.screenshot(path=shoot("06-exported"), full_page=True)
        asked: list[str] = []
        alone.on("request", lambda request: asked.append(request.url))
        # Of a run its figures; of a finding its causes and tests, of which none is timed and has a figure.
        shown = {
            "distill/within": "svg",
            "2026-11-27-hang-at-step-zero": "h2:text-is('Causes and tests')",
        }
        for source, what in shown.items():
            one = folder / f"{Path(source).name}.html"
            one.write_text(report(NOTEBOOKS.parent / "evidence" / source))
            asked.clear()
            alone.goto(one.as_uri())
            assert asked == [one.as_uri()] and alone.locator(what).first.is_visible()
            alone.screenshot(path=shoot(f"report-{one.stem}"), full_page=True)


KEPT = """\
from IPython.display import HTML
from engine.report.chart import Series, line_chart
from workbench.notebook.panel import still_html
rows = ((0.0, 1.0), (1.0, 2.0))
HTML(still_html("kept", [line_chart("loss", [Series(name="x", rows=rows)], x_name="step")], ["said"]))"""
CORNER = """async png => {
  const picture = await createImageBitmap(await (await fetch(png)).blob());
  const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  pen.drawImage(picture, 0, 0);
  return [...pen.getImageData(2, 2, 1, 1).data.slice(0, 3)];
}"""
"""The colour of a picture's upper left corner: the ground of a chart."""


def ground(page: sync_api.Page, chart: str) -> str:
    """Whether a chart on the page is light or dark, by its pixels; anything else as numbers."""
    png = base64.b64encode(page.locator(chart).first.screenshot()).decode()
    assert page.context.browser is not None
    with page.context.browser.new_page() as reader:
        red, green, blue = reader.evaluate(CORNER, f"data:image/png;base64,{png}")
    found = f"#{red:02x}{green:02x}{blue:02x}"
    return dict(zip(PAINTS["ground"], ("light", "dark"), strict=True)).get(found, found)


def test_kept_figures_are_dark_where_the_page_is_dark(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[..., Path]
) -> None:
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(NOTEBOOKS / "01_first_run.ipynb", 4)
    notebook.cells = [nbformat.v4.new_code_cell(KEPT)]
    nbformat.write(notebook, folder / "11_kept.ipynb")
    open_notebook(page, lab, "11_kept.ipynb")
    command(page, "notebook:run-all-cells")
    still = "[data-apr-static] img"
    page.wait_for_selector(still)
    command(page, "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    exported = nbformat.read(folder / "11_kept.ipynb", 4)
    try:
        for theme, seen in (("Dark", "dark"), ("Light", "light")):
            page.evaluate(
                "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
                f"JupyterLab {theme}",
            )
            page.wait_for_selector(
                f"body[data-jp-theme-light={str(seen == 'light').lower()}]", state="attached"
            )
            for asked in ("light", "dark"):
                page.emulate_media(color_scheme=asked)
                assert ground(page, still) == seen, f"{asked} asked of the browser"
                shoot(f"11-{seen}-{asked}")
    finally:
        page.emulate_media(color_scheme="light")
    assert page.context.browser is not None
    with page.context.browser.new_context(offline=True) as offline, offline.new_page() as alone:
        for theme in ("light", "dark"):
            text, _ = HTMLExporter(theme=theme).from_notebook_node(exported)
            (folder / "kept.html").write_text(text)
            alone.emulate_media(color_scheme="dark" if theme == "light" else "light")
            alone.goto((folder / "kept.html").as_uri(), wait_until="domcontentloaded")
            assert ground(alone, still) == theme
        (folder / "report.html").write_text(report(EVIDENCE / "distill" / "within"))
        for asked in ("light", "dark"):
            alone.emulate_media(color_scheme=asked)
            alone.goto((folder / "report.html").as_uri())
            assert ground(alone, ".apr-chart") == asked
            alone.screenshot(path=shoot(f"11-report-{asked}"))


def test_eight_widgets_stay_responsive_beside_a_finding_and_nothing_is_left(
    page: sync_api.Page, lab: str, folder: Path, shoot: Callable[..., Path]
) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / "01_first_run.ipynb", 4)
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in EIGHT]
    hanging_run(folder / "runs" / "hang")
    nbformat.write(notebook, folder / "08_widgets.ipynb")
    open_notebook(page, lab, "08_widgets.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    until(lambda: page.locator(".apr-live canvas").count() >= 32, "eight widgets")
    until(lambda: "step" in status(page), "the first steps")
    shoot("08-running")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.evaluate(COUNT)
    begun = spent(session)
    everywhere = page.locator(".apr-live .apr-status").all_inner_texts
    until(lambda: all("COMPLETED" in text for text in everywhere()), "the end in all of them")
    # In CPU time, so that it is the page's own whatever else the machine does.
    thread_s, drawn = spent(session) - begun, page.evaluate("window.drawn")
    session.detach()
    assert 0 < thread_s < CHART_S * drawn, f"{thread_s} s of the page for {drawn} charts drawn"
    run_cell(page, 2)
    page.get_by_placeholder("KEY=VALUE").fill("compute.threads=1")
    page.get_by_role("button", name="add cause").click()
    until(lambda: "c1  open: compute.threads: 2 -> 1" in page.inner_text(".jp-Notebook"), "a cause")
    shoot("08-suspected")
    assert len(comms(page)) > 9 * 8
    run_cell(page, 3)
    until(lambda: not comms(page), "the end of every comm")
    until(lambda: not page.locator(".apr-live").count(), "the end of every widget")
    # What stays is what everyone sees who opens the notebook later.
    assert page.locator("[data-apr-static] img").first.is_visible()
    shoot("08-closed")


HOSTILE = (
    """\
import os
from pathlib import Path
from IPython.display import display
from workbench.notebook import Live
runs = sorted((Path(os.environ["APR_NOTEBOOK_RUNS"]) / "hostile").iterdir())
panels = [Live(run) for run in runs]""",
    "display(*panels)",
)
ACTED = """() => [
  ...document.querySelectorAll('.jp-OutputArea img[src="x"], .jp-OutputArea script'),
  ...document.querySelectorAll('.jp-OutputArea a[href^="javascript:"], .jp-OutputArea [onerror]'),
].map(one => one.outerHTML)"""
"""Elements in outputs that no widget of ours makes: the log would have made them."""


def test_hostile_logs_make_no_element_and_run_no_script(
    page: sync_api.Page, lab: str, folder: Path
) -> None:
    import nbformat

    runs = 0
    for seed in range(13):
        run = hostile_run(folder / "runs" / "hostile", seed)
        if not is_run(run.path):
            # Of this one effective.json is no file, so it is no run: who makes a widget of it is told so.
            shutil.rmtree(run.path)
            continue
        if runs == 0:
            run.path.rename(run.path.with_name("<img src=x onerror=alert(1)>"))
        runs += 1
    assert runs >= 12
    asked: list[str] = []

    def answer(dialog: sync_api.Dialog) -> None:
        # Where the notebook before is not saved, JupyterLab asks whether to leave it: no log does that.
        if dialog.type == "beforeunload":
            dialog.accept()
            return
        asked.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", answer)
    notebook = nbformat.read(NOTEBOOKS / "01_first_run.ipynb", 4)
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in HOSTILE]
    nbformat.write(notebook, folder / "09_hostile.ipynb")
    open_notebook(page, lab, "09_hostile.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    until(lambda: page.locator(".apr-live").count() == runs, "a widget for each run")
    states = page.locator(".apr-live .apr-status").all_inner_texts
    until(lambda: len(states()) == runs and all(states()), "what is said of each run")
    assert "<img src=x onerror=alert(1)>" in " ".join(states()), "it is shown, as text"
    assert page.evaluate(ACTED) == [] and asked == []


BUSY = """\
import os, time
from pathlib import Path
from IPython.display import display
from workbench.notebook import Live
runs = Path(os.environ["APR_NOTEBOOK_RUNS"])
live = Live(os.environ["APR_NOTEBOOK_SPEC"], set=["train.steps=400"], out=runs / "busy")
live.start()
display(live)
time.sleep(90)"""


def test_a_page_loaded_again_while_its_cell_runs_has_the_figures_of_when_it_was_saved(
    page: sync_api.Page, lab: str, folder: Path
) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / "01_first_run.ipynb", 4)
    notebook.cells = [nbformat.v4.new_code_cell(BUSY)]
    nbformat.write(notebook, folder / "10_busy.ipynb")
    open_notebook(page, lab, "10_busy.ipynb")
    command(page, "notebook:run-all-cells")
    still = page.locator("[data-apr-static]")
    until(lambda: still.count() and "| step" in (still.text_content() or ""), "a still of steps")
    command(page, "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    # A kernel that runs a cell answers no new page, so the widget itself comes when the cell is done.
    page.reload()
    page.wait_for_selector("[data-apr-static] img")
    assert "| step" in still.inner_text() and page.locator(".apr-live").count() == 0
