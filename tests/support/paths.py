"""Paths in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
DEMO = ROOT / "engine" / "demo"
EVIDENCE = ROOT / "evidence"
NOTEBOOKS = ROOT / "notebooks"
