"""Open pages of `engine serve` in Chromium: they follow a run, keep what the reader does, and survive a restart."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import chromium
from tests.support.chromium import needs_chromium, sync_api
from tests.support.judged import alert_event
from tests.support.run_folders import completed, killed, running
from tests.support.served import TOKEN, serving

pytestmark = needs_chromium
browser = chromium.browser


def test_open_pages_follow_a_run_through_a_restart_of_the_server(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    completed(tmp_path / "runs" / "whole")
    killed(tmp_path / "runs" / "shot")
    scene = running(tmp_path / "runs" / "live", done=10)
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    said: list[str] = []
    context.on("console", lambda message: said.append(message.text))
    context.on("weberror", lambda error: said.append(str(error.error)))
    rows, page = context.new_page(), context.new_page()
    with serving([tmp_path / "runs"]) as served:
        port = served.port
        rows.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
        assert "token" not in rows.url
        live = rows.locator(".row", has_text="live")
        assert rows.locator(".row").first.inner_text() == live.inner_text()
        page.goto(f"http://127.0.0.1:{port}{live.get_attribute('href')}")
        page.get_by_text("● live").wait_for()
        page.locator("summary", has_text="All settings").or_(
            page.locator("summary").first
        ).first.click()
        unfolded = page.locator("details[open]").count()
        whole = page.locator(".bar button:enabled", has_text="whole run")
        # A series that is off, and a zoomed chart, stay so.
        page.locator(".legend button").first.click()
        first = page.locator("canvas").first
        box = first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 150, box["y"] + 90)
        page.mouse.down()
        page.mouse.move(box["x"] + 250, box["y"] + 90)
        page.mouse.up()
        whole.wait_for()
        drawn = first.evaluate("(one) => { one.kept = true; return one.toDataURL(); }")
        scene.steps(11, 14)
        page.get_by_text("step 14/60").first.wait_for()
        scene.watch(alert_event("loss_spike", "fail", text="the loss jumped"))
        page.get_by_text("the loss jumped").first.wait_for()
        assert first.evaluate("(one) => one.kept")
        assert page.locator("details[open]").count() == unfolded
        assert page.locator(".legend button[aria-pressed=false]").count() == 1
        whole.wait_for()
        whole.click()
        page.wait_for_function(
            "(old) => document.querySelector('canvas').toDataURL() !== old", arg=drawn
        )
        live.get_by_text("the loss jumped").wait_for()
        rows.locator("#filter").fill("state:killed")
        rows.get_by_text("1 of 3 runs").wait_for()
        assert rows.locator(".row").count() == 1
        rows.locator("#filter").fill("")
        rows.get_by_text("3 of 3 runs").wait_for()
        assert rows.locator(".row").count() == 3
        if shots := os.environ.get("APR_SCREENSHOTS"):
            rows.screenshot(path=Path(shots) / "serve-list.png", full_page=True)
            page.screenshot(path=Path(shots) / "serve-run.png", full_page=True)
    page.get_by_text("○ not connected").wait_for()
    told, said = said, []
    assert [one for one in told if "ERR_" not in one] == []
    scene.steps(15, 20)
    with serving([tmp_path / "runs"], port):
        page.get_by_text("step 20/60").first.wait_for()
        live.get_by_text("step 20/60").wait_for()
    context.close()
    scene.close()


def test_runs_that_are_ticked_are_compared_on_a_page_that_follows_them(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    completed(tmp_path / "runs" / "whole")
    scene = running(tmp_path / "runs" / "live", done=10)
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    said: list[str] = []
    context.on("console", lambda message: said.append(message.text))
    context.on("weberror", lambda error: said.append(str(error.error)))
    with serving([tmp_path / "runs"]) as served:
        page.goto(f"http://127.0.0.1:{served.port}/?token={TOKEN}")
        page.get_by_text("● live").wait_for()
        for name in ("live", "whole"):
            page.get_by_role("checkbox", name=name).check()
        scene.steps(11, 12)
        page.get_by_text("step 12/60").wait_for()
        page.get_by_role("button", name="compare").click()
        page.get_by_role("heading", name="compare A live, B whole").wait_for()
        page.get_by_text("● live").wait_for()
        assert page.locator("canvas").count() > 3
        assert page.locator(".bar button").count() == 1, "runs have no time in common"
        scene.steps(13, 14)
        page.get_by_text("step 14/60").wait_for()
        page.locator("canvas").first.focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator(".reading")).to_have_text("step 31")
        assert page.evaluate("openCharts.all.get('loss.A live').length") == 14
        assert said == []
        if shots := os.environ.get("APR_SCREENSHOTS"):
            page.screenshot(path=Path(shots) / "serve-compare.png")
        page.get_by_role("link", name="B whole").click()
        page.get_by_role("heading", name="run whole").wait_for()
    context.close()
    scene.close()
