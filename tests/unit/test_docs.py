"""The documentation says what the code does: pages made from tables are current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import DOCS, HEAD, PAGES
from tests.support.paths import ROOT

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_what_the_code_says(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8").removeprefix(HEAD)
    assert text == PAGES[name](), f"docs/{name} is not current: run `make docs`"


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "AGENTS.md",
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "SECURITY.md",
        *sorted(DOCS.rglob("*.md")),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_menu_and_every_entry_is_a_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
