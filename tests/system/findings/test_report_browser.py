"""A report in Chromium: its charts can be read and zoomed, it fits narrow screens, and it prints on two pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.log.events import GpuSample
from engine.report.page import report
from tests.support import chromium
from tests.support.chromium import needs_chromium, sync_api
from tests.support.run_folders import completed, running

pytestmark = needs_chromium
browser = chromium.browser


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    page = folder / "page.html"
    page.write_text(report(completed(folder / "run", total=400, nan=(200,)).path))
    return page.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1600])
def test_a_page_fits_its_window_and_breaks_no_rule_of_its_policy(
    browser: sync_api.Browser, file: str, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file)
    page.locator("canvas").first.wait_for()
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("canvas").count() == 7 and not page.locator("svg").first.is_visible()
    page.close()


@pytest.mark.parametrize("width", [390, 1600])
def test_the_table_of_gpus_and_a_comparison_fit_their_window(
    browser: sync_api.Browser, width: int, tmp_path: Path
) -> None:
    scene = running(tmp_path / "run")
    used = {"gpu_mem_used_bytes": 60.0, "gpu_mem_total_bytes": 80.0, "family_gpu_mem_bytes": 20.0}
    scene.device(*(GpuSample(index=at, gpu_util_pct=50.0, **used) for at in range(8))).close()
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    file = tmp_path / "page.html"
    file.write_text(report(scene.run.path))
    page.goto(file.as_uri())
    assert page.locator(".gpus tr").count() == 9
    widths = (
        page.locator(".gpus tr")
        .nth(8)
        .locator(".meter")
        .evaluate_all(
            "bars => bars.map(bar => [...bar.children].map(part => part.offsetWidth / bar.clientWidth))"
        )
    )
    for found, expected in zip(widths, [[0.5], [0.25, 0.5]], strict=True):
        assert found == pytest.approx(expected, abs=0.02)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    file.write_text(report(scene.run.path, completed(tmp_path / "other").path))
    page.goto(file.as_uri())
    page.locator("canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == [] and not page.locator("svg").first.is_visible()
    page.close()


def test_charts_are_read_zoomed_and_switched_by_pointer_and_by_keys(
    browser: sync_api.Browser, file: str
) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(file)
    canvas = page.locator('figure[data-chart="training"] canvas')
    whole = page.get_by_role("button", name="whole run")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    reading = page.locator(".reading")
    sync_api.expect(reading).to_contain_text(re.compile(r"step 20\d, "))
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 120, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 90, steps=3)
    page.mouse.up()
    sync_api.expect(whole).to_be_enabled()
    span = canvas.evaluate("canvas => canvas.range.x1 - canvas.range.x0")
    assert 0 < span < 200
    page.keyboard.press("Escape")
    sync_api.expect(whole).to_be_disabled()
    loss = page.locator('figure[data-chart="training"] .legend button').first
    loss.click()
    assert loss.get_attribute("aria-pressed") == "false"
    page.close()


def test_without_scripts_the_charts_are_there_and_in_print_too_on_two_pages(
    browser: sync_api.Browser, file: str, tmp_path: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(file)
    assert plain.locator("svg").first.is_visible()
    context.close()
    page = browser.new_page()
    page.goto(file)
    page.locator("canvas").first.wait_for()
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf())) <= 2
    page.emulate_media(media="print")
    assert page.locator("svg").first.is_visible()
    page.close()
