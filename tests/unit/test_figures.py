"""Figures of speed in the docs are those of the kept measurements."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.paths import EVIDENCE, ROOT

SPEED = (ROOT / "docs/how-to/speed.md").read_text()
LOG = (EVIDENCE / "LOG.md").read_text()
OURS = ("engine", "engine packed")


def tokens_per_s(name: str) -> dict[str, float]:
    rows = json.loads((EVIDENCE / "distill" / name).read_text())["rows"]
    return {row["arm"]: row["tokens_per_s"] for row in rows if row["state"] == "measured"}


def run(name: str, arm: str) -> float:
    runs = json.loads((EVIDENCE / "distill" / name).read_text())["runs"]
    return next(float(one["tokens_per_s"]) for one in runs if one["arm"].startswith(arm))


def thousands(number: float) -> str:
    return f"{number / 1000:.1f}k"


def times_the_best_rival(found: dict[str, float]) -> str:
    return f"{found['engine'] / max(v for k, v in found.items() if k not in OURS):.2f} times"


def test_the_page_names_one_kept_run_beside_its_strongest_rival() -> None:
    found = tokens_per_s("kd.json")
    rivals = {arm: value for arm, value in found.items() if arm not in OURS}
    best = max(rivals, key=lambda arm: rivals[arm])
    said = " ".join(SPEED.split())
    words = f"{thousands(found['engine'])} tokens/s, {times_the_best_rival(found)} the best rival in the same run"
    rival = f"({best.title()}, compiled: {thousands(rivals[best])};"
    assert f"random weights, 8 x 1024 tokens a step: {words} {rival}" in said
    typed = run("typed.json", "typed"), run("typed.json", "fp8"), run("typed.json", "typed:memory")
    assert "{}, {} with the teacher in FP8, {} within 20 GiB".format(*map(thousands, typed)) in said
    assert f"{thousands(run('cached_compiled.json', 'cached'))} from stored teacher outputs" in said


@pytest.mark.parametrize(("name", "column"), [("kd.json", 0), ("kd_h100.json", 1)])
def test_the_table_of_rivals_is_that_of_the_kept_runs(name: str, column: int) -> None:
    found = tokens_per_s(name)
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in (
            line.strip("|").split("|") for line in SPEED.splitlines() if line.startswith("|")
        )
        if len(cells) == 3
    }
    shown = {
        "this engine, dense teacher": "engine",
        "this engine, teacher in blocks (24.5 GiB)": "engine packed",
        "Liger, chunked and compiled": "liger",
        "plain Transformers loop": "transformers",
        "TRL": "trl",
    }
    for words, arm in shown.items():
        wanted = thousands(found[arm]) if arm in found else "not installed"
        assert rows[words][column] == wanted, words
    assert rows["engine to the best of the others"][column] == times_the_best_rival(found)
    assert column == ("H100" in json.loads((EVIDENCE / "distill" / name).read_text())["machine"])


def test_the_page_of_adapters_gives_the_figures_of_the_kept_runs() -> None:
    said = " ".join((ROOT / "docs/how-to/adapters.md").read_text().split())
    for name, words in (
        ("adapters.json", "at {}: {:.2f} times the {} tokens/s of the same work"),
        ("adapters_bf16.json", "four rows a step: {}, {:.2f} times peft's {}, and"),
    ):
        found = json.loads((EVIDENCE / "distill" / name).read_text())
        ours = f"{thousands(found['ours']['tokens_per_s'])} tokens/s"
        peft = thousands(found["peft"]["tokens_per_s"])
        assert words.format(ours, found["times_as_fast"], peft) in said, name
    assert f"{100 * found['of_matmuls_alone']:.0f} % of what the matmuls alone would allow" in said
    small = json.loads((EVIDENCE / "distill" / "adapters.json").read_text())
    measured, planned = (max(small["ours"][f"{one}_gib"]) for one in ("measured", "planned"))
    assert f"in {measured:.1f} GiB ({planned:.1f} planned)" in said
    assert f"takes {small['peft']['peak_gib']:.1f} GiB" in said
    launched = small["ours_graphs_off"]["tokens_per_s"]
    assert f"{thousands(launched)} tokens/s without them" in said
    assert f"up to {small['ours']['tokens_per_s'] / launched:.1f} times as fast" in SPEED


def test_the_page_of_speed_gives_the_rates_of_attention_that_were_measured() -> None:
    rates = json.loads((EVIDENCE / "distill" / "attention.json").read_text())
    student, teacher = rates["qwen2.5-0.5b, 32768"], rates["qwen2.5-7b, 32768"]
    shares = [
        round(100 * kernel[1] / rates["matmul"])
        for kernel in (student["cudnn backward"], student["cudnn"], teacher["cudnn"])
    ]
    words = "heads of 64 at {} to {} % of a matmul's rate and a teacher's with heads of 128 at {} %"
    assert words.format(*shares) in " ".join(SPEED.split())


def test_no_page_gives_another_ratio_to_a_rival() -> None:
    allowed = {times_the_best_rival(tokens_per_s(name)) for name in ("kd.json", "kd_h100.json")}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), EVIDENCE / "LOG.md"):
        for paragraph in page.read_text().split("\n\n"):
            if re.search(r"\brivals?\b|best of the others", paragraph):
                ratios = re.findall(r"\d\.\d\d times", paragraph)
                assert set(ratios) <= allowed, (page.name, ratios)


def test_the_log_has_the_figures_of_the_kept_runs() -> None:
    for name in ("kd.json", "kd_h100.json"):
        for value in tokens_per_s(name).values():
            assert thousands(value) in LOG, (name, value)
