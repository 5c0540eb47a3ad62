"""Every notebook runs top to bottom against the real engine, and what is committed has no outputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kit import Kit
from tests.support.notebook_pages import drawn
from tests.support.paths import NOTEBOOKS
from tests.support.running import environment

ALL = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))

# What Jupyter's own libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True, scope="module")
def without_grammar() -> Iterator[None]:
    """Notebooks hold no internationalised addresses, and the package that jsonschema checks them with takes seven
    seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rfc3987_syntax", None)
        yield


@pytest.fixture(scope="module")
def place(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of the notebooks for a run of seconds; all of them share one folder of runs."""
    folder = tmp_path_factory.mktemp("notebooks")
    spec = kit.spec(folder, train__steps=6, eval__every=3, checkpoint__every=0)
    return environment() | {
        "APR_NOTEBOOK_SPEC": str(spec),
        "APR_NOTEBOOK_RUNS": str(folder / "runs"),
        "APR_NOTEBOOK_FLIP": "compute.slow_by=3",
        "APR_NOTEBOOK_BUDGET": "24s",
        "APR_NOTEBOOK_EVIDENCE": str(NOTEBOOKS.parent / "evidence"),
        # A lock of its own, so that tests beside this one may flip too.
        "XDG_STATE_HOME": str(folder / "state"),
    }


def executed(name: str, place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / name, 4)
    folder = Path(place["APR_NOTEBOOK_RUNS"]).parent
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook: Any) -> list[dict[str, Any]]:
    found = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return [o.get("data", {"text/plain": o.get("text", "")}) for o in found]


def said(notebook: Any) -> str:
    return "\n".join(str(data.get("text/plain", "")) for data in outputs(notebook))


def stills(notebook: Any) -> list[str]:
    return [
        d["text/html"] for d in outputs(notebook) if "data-apr-static" in d.get("text/html", "")
    ]


# Tests of Live start a run, too, and two other notebooks are run in a kernel.
@pytest.mark.soak
def test_the_first_run_is_started_watched_and_read(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed("01_first_run.ipynb", place, monkeypatch)
    assert "COMPLETED | step 6/6" in said(notebook)
    # The figure was replaced after the end, so a notebook that is opened again shows the whole run.
    (still,) = stills(notebook)
    assert "<svg" in drawn(still) and "held-out loss of the saved student at step 6" in still
    assert len(still) < 80_000


@pytest.mark.soak
def test_a_flip_is_run_to_its_verdict(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed("02_dispatch_flip.ipynb", place, monkeypatch)
    (verdict,) = list(Path(place["APR_NOTEBOOK_RUNS"], "flips").glob("*/verdict.json"))
    assert "compute.slow_by" in verdict.read_text()
    words = ("B_SLOWER", "INCONCLUSIVE")
    assert any(word in said(notebook) for word in words)
    # A Live and a Flip, each with the still of its end.
    assert "pair" in stills(notebook)[-1] and "<svg" in drawn(stills(notebook)[-1])


def test_a_past_run_is_read(
    ended_run: Path, place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    past = place | {"APR_NOTEBOOK_RUNS": str(ended_run.parent)}
    notebook = executed("04_reading_a_past_run.ipynb", past, monkeypatch)
    assert "COMPLETED" in said(notebook)
    (figure,) = [d for d in outputs(notebook) if "application/vnd.plotly.v1+json" in d]
    assert "<svg" in drawn(figure["text/html"])


@pytest.mark.soak
def test_the_cause_of_a_planted_failure_is_found_by_real_runs_and_closed(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed("03_five_whys.ipynb", place, monkeypatch)
    words = said(notebook)
    assert "c1  refuted: SEED: 0 -> 1" in words and "c2  confirmed: RATE: 5 -> 0.05" in words
    assert "RATE=0.05 ends it" in words
    assert "pass: root cause" in words and "2 tests judged again" in words
    assert Path(place["APR_NOTEBOOK_RUNS"], "evidence", "LOG.md").is_file()


def test_the_committed_run_of_a_big_gpu_is_read_anywhere(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed("05_a_7b_teacher_on_one_gpu.ipynb", place, monkeypatch)
    words = said(notebook)
    assert "teacher.backend = quantized" in words and "21.9 GiB predicted, 21.95 GiB" in words
    assert "33,255 tokens/s, 74% of the limit" in words and "backward" in words
    assert "tensor_util_pct" in words and "within: COMPLETED | step 60/60" in words
    assert drawn(stills(notebook)[0]).count("<svg") == 7


@pytest.mark.soak
def test_the_notebook_of_a_big_gpu_makes_and_runs_what_it_shows(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = place | {"APR_NOTEBOOK_SHAPE": "tiny"}
    words = said(executed("05_a_7b_teacher_on_one_gpu.ipynb", small, monkeypatch))
    assert "run here: tiny" in words and "within: COMPLETED | step 60/60" in words
    assert "teacher.backend = " in words and "GiB predicted" in words


@pytest.mark.soak
def test_a_chat_file_becomes_a_student_that_is_asked(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = place | {"APR_NOTEBOOK_STEPS": "20"}
    words = said(executed("06_from_a_chat_file_to_a_student.ipynb", short, monkeypatch))
    assert "COMPLETED | step 20/20" in words and "<|im_start|>assistant\n⟦" in words
    # Every other step is on what the student wrote.
    assert "step 20: the student wrote" in words and "rollout" in words
    assert "   teacher: The capital of Italy is Rome." in words or "   teacher: Rome" in words


@pytest.mark.parametrize("name", ALL)
def test_a_committed_notebook_has_prose_and_no_outputs(name: str) -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / name, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.cells[0].source.startswith("# ") and len(code) <= 10
    assert os.path.getsize(NOTEBOOKS / name) < 20_000
