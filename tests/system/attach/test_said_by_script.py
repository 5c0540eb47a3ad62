"""What a script says itself by `import apr_watch`: recorded below `engine watch`, and nothing without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.log.events import Evaluated, Logged, StepDone
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import LogReader
from engine.log.text import event_text, result_lines
from tests.support.attached import PROBE, Ran, run_watched, watched_once

SAYS = """
import apr_watch
net = model().eval()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 8)
apr_watch.log(held_out=9.5, rows=torch.tensor(3))
for number in range(3):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    say(loss=loss.item())
    apr_watch.log(held_out=loss, accuracy=0.5 + number, wrong="a word", both=x, none=None)
save(net)
"""

NAMES = """
net = model()
optimizer = torch.optim.SGD([
    {"params": net[0].parameters(), "lr": 0.5, "weight_decay": 0.25}, {"params": net[3].parameters()}], lr=0.1)
for part in (1.0, float("nan")):
    (net(torch.ones(2, 8)).mean() * part).backward()
optimizer.step()
apr_watch.log(**{'a"b\\\\': 1.0, "eval/é ~": float("inf"), "": 2.0})
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One process with a training that says numbers, and one of odd names."""
    ran = watched_once(tmp_path_factory, "said", SAYS + NAMES, path=PROBE, forked=True)
    assert len(ran.trainings) == 2
    return ran


def test_numbers_of_the_script_stand_in_the_log_at_the_step_that_was_done_last(
    watched: Ran,
) -> None:
    losses = [said["loss"] for said in watched.said[:3]]
    run = RunFolder(watched.folder / "run")
    events = LogReader(run.events).poll()
    held = [(e.step, e.loss) for e in events if isinstance(e, Evaluated)]
    assert held == [(0, 9.5), *enumerate(losses, 1)]
    logged = [e for e in events if isinstance(e, Logged)]
    unknown = {"wrong": None, "both": None, "none": None}
    assert [(e.step, e.values) for e in logged] == [
        (0, {"rows": 3.0}),
        *((number, {"accuracy": number - 0.5, **unknown}) for number in (1, 2, 3)),
    ]
    assert event_text(logged[1]).startswith("step 1: accuracy 0.5000, wrong ")
    view = Follower(run).read_all()
    assert view.logged["accuracy"] == (3, 2.5) and view.logged["rows"] == (0, 3.0)
    # Without a unit, which the script alone knows.
    assert result_lines(view) == [f"held-out loss at step 3: {losses[-1]:.4f}"]


def test_what_cannot_be_recorded_is_never_raised(tmp_path: Path) -> None:
    script = """
import apr_watch
class Bad:
    def __float__(self):
        raise ValueError("mine")
apr_watch.log(loss=Bad(), held_out=Bad())
apr_watch.log()
apr_watch.log(**{str(n): n for n in range(5000)})
say(done=1)
"""
    ran = run_watched(tmp_path, script)
    assert (ran.returncode, ran.stderr, len(ran.said)) == (0, "", 1)


def test_a_name_may_be_anything(watched: Ran) -> None:
    run = RunFolder(watched.folder / "run-2")
    view = Follower(run).read_all()
    assert dict(view.logged) == {'a"b\\': (1, 1.0), "eval/é ~": (1, float("inf")), "": (1, 2.0)}
    # Each loss, and each group's rate and decay.
    (step,) = [e for e in LogReader(run.events).poll() if isinstance(e, StepDone)]
    assert (
        step.rates == [0.5, 0.1] and step.losses[0] is not None and step.losses[1] != step.losses[1]
    )
    assert view.watched is not None
    assert [(g["parameters"], g["lr"], g["weight_decay"]) for g in view.watched.groups] == [
        (8 * 16 + 16, 0.5, 0.25),
        (16 + 1, 0.1, 0.0),
    ]


def test_the_module_is_installed_under_its_own_name() -> None:
    """It is there for a script that runs without `engine watch`, and imports neither torch nor the engine."""
    words = (
        "import sys, apr_watch\n"
        "apr_watch.log(loss=1.0)\n"
        "print(sorted({'torch', 'engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
