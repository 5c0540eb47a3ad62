"""A headless Chromium for tests: `from tests.support.chromium import browser, needs_chromium, sync_api`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.lacks import needs

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = needs("Chromium", CHROMIUM)


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
