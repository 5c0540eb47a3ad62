"""What a machine may lack: one table for the reasons of skipped tests.

    skip_for("bubblewrap", error)                                   in a test or a fixture
    pytestmark = needs("chromium", CHROMIUM is not None)            over a test or a file

The suite ends with a line that says what was skipped for lack of what, and how to get it. With
`--known-skips FILE` each skip is compared with that list, which holds what a machine skips that has nothing of
the table: a skip that is not in it fails the suite. `--write-skips FILE` writes the list anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from engine.evaluate.sandbox import Sandbox

LACKS = {
    "a CUDA GPU": "run `pytest -m gpu -n 4` on a machine with one",
    "two CUDA GPUs": "run `pytest -m gpu -n 4` on a machine with two",
    "bubblewrap": "apt-get install bubblewrap, as a user who may make user namespaces",
    "Chromium": "apt-get install chromium",
    "tmux": "apt-get install tmux",
    "a C compiler": "apt-get install gcc",
    "py-spy": "pip install -e .[stacks], where the kernel lets a process read another",
    "llama.cpp": "make peers",
    "JupyterLab": "pip install -e .[dev]",
    "pyarrow and zstandard": "pip install -e .[data,dev]",
    "TensorBoard and W&B": "pip install -e .[import]",
    "Starlette and uvicorn": "pip install -e .[serve]",
    "the MCP SDK": "pip install -e .[agent]",
    "zsh": "apt-get install zsh",
    "fish": "apt-get install fish",
    "man": "apt-get install man-db",
    "the gguf package": "pip install -e .[dev]",
    "TRL": "make frameworks",
    "Lightning": "make frameworks",
    "loops in Triton's interpreter": "pip install 'triton>=3.7'",
    "an ordinary user": "run the tests as one, not as root",
    "root": "run the tests as root, who may mount file systems",
    "a memory control group": "run the tests as root, outside a container",
    "listed system calls": "run the tests on x86-64 or AArch64",
}
"""What is lacked, in the words of the skip, and how to get it."""

_MODULES = {
    "JupyterLab": ("anywidget", "comm", "ipywidgets", "nbclient", "nbformat", "plotly"),
    "pyarrow and zstandard": ("pyarrow", "zstandard"),
    "Starlette and uvicorn": ("starlette", "uvicorn"),
    "the MCP SDK": ("anyio", "mcp", "mcp_types"),
    "TensorBoard and W&B": ("tensorboard", "wandb"),
    "the gguf package": ("gguf",),
}
"""Modules that come with what is lacked: a file of tests that imports one is skipped where it is not there."""

_SAID = "this machine lacks "


def reason_of(what: str, detail: object = "") -> str:
    """Return the reason of a skip for lack of `what`, a row of `LACKS`."""
    assert what in LACKS, what
    return f"{_SAID}{what}" + (f": {detail}" if detail else "")


def skip_for(what: str, detail: object = "") -> NoReturn:
    """Skip the test that calls this, or asks for the fixture that does."""
    pytest.skip(reason_of(what, detail))


def needs(what: str, is_there: object) -> pytest.MarkDecorator:
    """A mark that skips unless the machine has `what`."""
    return pytest.mark.skipif(not is_there, reason=reason_of(what))


def open_sandbox_here(**limits: Any) -> Sandbox:
    """Return the sandbox for generated programs, or skip where it does not work."""
    from engine.errors import NoAnswer
    from engine.evaluate.sandbox import open_sandbox

    try:
        return open_sandbox(**limits)
    except NoAnswer as error:
        skip_for("bubblewrap", error.message)


def lack_of(reason: str) -> str | None:
    """Return the row of `LACKS` that a skip was for; None when it is another reason."""
    said = reason.removeprefix("Skipped: ")
    if not said.startswith(_SAID):
        return None
    return next((what for what in LACKS if said.removeprefix(_SAID).split(":")[0] == what), None)


Skip = tuple[str, str]
"""A test function, and what was lacked or else the whole reason."""


def skips_of(reports: Iterable[Any]) -> Counter[Skip]:
    """Count the skips by function and lack. A file that is skipped whole is reported by each worker: once."""
    found: Counter[Skip] = Counter()
    seen = set()
    for report in reports:
        if report.nodeid in seen or not isinstance(report.longrepr, tuple):
            continue
        seen.add(report.nodeid)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        found[report.nodeid.split("[")[0], lack_of(reason) or reason] += 1
    return found


def read_list(path: Path) -> Counter[Skip]:
    lines = [line.split("\t") for line in path.read_text().splitlines() if line]
    return Counter({(function, what): int(count) for function, what, count in lines})


def as_list(skips: Counter[Skip]) -> str:
    return "".join(f"{name}\t{what}\t{count}\n" for (name, what), count in sorted(skips.items()))


def sentence(skips: Counter[Skip]) -> str:
    """One line: what was skipped for lack of what, and how to get it."""
    counts: Counter[str] = Counter()
    for (_, what), count in skips.items():
        counts[what] += count
    parts = [
        f"{count} for lack of {what} ({LACKS[what]})" if what in LACKS else f"{count}: {what}"
        for what, count in counts.most_common()
    ]
    return "skipped: " + ("; ".join(parts) or "nothing")


def unlisted(skips: Counter[Skip], known: Counter[Skip]) -> list[str]:
    """Lines about skips that are not in the list, or more often than there."""
    return [
        f"{name}: {count} skipped: {what}; {known[name, what]} in the list"
        for (name, what), count in sorted(skips.items())
        if count > known[name, what]
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skips")
    group.addoption("--known-skips", type=Path, help="fail where a test skips that is not in FILE")
    group.addoption("--write-skips", type=Path, help="write the skips of this run to FILE")
    group.addoption("--say-skips", type=Path, help="write the sentence about skips to FILE, too")


def what_is_lacked(error: ImportError) -> str | None:
    """Return the row of `LACKS` that a failed import is for; None for a fault of the file that imports."""
    # The workbench's own notebook package names the extra to install.
    if "apr-workbench[notebook]" in str(error):
        return "JupyterLab"
    name = (error.name or "").partition(".")[0]
    return next((what for what, modules in _MODULES.items() if name in modules), None)


class File(pytest.Module):
    """A file of tests, which is skipped where the machine lacks what it imports."""

    def collect(self) -> Iterable[Any]:
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            if isinstance(cause, ImportError) and (what := what_is_lacked(cause)) is not None:
                pytest.skip(reason_of(what, cause), allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> File:
    made: File = File.from_parent(parent, path=module_path)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    import torch  # seconds, which a run without a GPU test does not wait for

    if not torch.cuda.is_available():
        why = reason_of("a CUDA GPU", f"torch {torch.__version__} sees none")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=why))


def _reports(config: pytest.Config) -> list[Any]:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    return [] if terminal is None else terminal.stats.get("skipped", [])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workerinput") or config.option.known_skips is None:
        return
    if (
        unlisted(skips_of(_reports(config)), read_list(config.option.known_skips))
        and not exitstatus
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skips, option = skips_of(_reports(config)), config.option
    if option.write_skips is not None:
        option.write_skips.write_text(as_list(skips))
    if option.known_skips is not None:
        for line in unlisted(skips, read_list(option.known_skips)):
            terminalreporter.write_line(
                f"a skip that is not in {option.known_skips}: {line}", red=True
            )
    if option.say_skips is not None:
        option.say_skips.parent.mkdir(parents=True, exist_ok=True)
        option.say_skips.write_text(sentence(skips) + "\n")
    if skips:
        terminalreporter.write_line(sentence(skips))
