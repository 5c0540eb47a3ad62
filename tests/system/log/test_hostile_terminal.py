"""Nothing of a run, its name, its logs, its receipt, a spec or a path is obeyed by the terminal that shows it.

Each command runs on a pseudo-terminal, where output is made for people, and what comes out is looked through."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from engine.log.events import (
    DecisionMade,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    Judged,
    Note,
    Phase,
    StackDump,
)
from engine.log.folder import RunFolder, create_run
from engine.log.write import encode
from tests.support.judged import alert_event
from tests.support.run_events import example_of, finished, numbered, opened, started, step
from tests.support.terminals import LEAVE_ALTERNATE, Terminal

HOSTILE = (
    "\x1b[2J\x1b[31mred"
    "\x1b]0;title\x07"
    "\x1b]8;;http://x.example\x1b\\link\x1b]8;;\x1b\\"
    "\x1b]52;c;cm0gLXJm\x07"
    "\x1bPdevice\x1b\\"
    "\x9b31m\x9d0;c1\x9c\x90x\x9c"
    "\u202eright to left\u2066\u200f\u2028"
    "\r\b\x7f\x05"
)
"""CSI, OSC 0, 8 and 52, DCS, the same as 8-bit controls, marks of writing direction, and single controls."""
NAME = "one" + HOSTILE.replace("/", "|")


def acts(text: str) -> set[str]:
    """What of a text a terminal would obey; its own line ends are made by the terminal."""
    return {ascii(c) for c in set(text.replace("\r\n", "\n")) if not c.isprintable() and c != "\n"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose every text is hostile, the name of its folder too."""
    run = create_run(
        tmp_path / NAME, "", {"spec": {HOSTILE: {HOSTILE: HOSTILE}}, "sets": [HOSTILE]}
    )
    h = HOSTILE
    texts: dict[str, list[Event]] = {
        "events": [
            opened(1.75e9, writer=h, boot_id=h),
            started(9),
            Phase(name=h, detail=h),
            DecisionMade(knob=h, choice=h, reason=h, rejected=[(h, h)], override=h),
            example_of(Judged, by="check", id=h, level=h, text=h),
            *(step(n, phases={h: 0.25}) for n in range(1, 6)),
            Note(level=h, text=h),
            finished(h, reason=h),
        ],
        "device": [
            opened(1.75e9),
            FactsRead(facts={h: h, "nvml_absent": h}),
            HostSample(
                load1=1.0, memory_held_bytes=1.0, memory_source=h, absent={"trainer_rss_bytes": h}
            ),
            GpuSample(index=0, clock_event_reasons=h, absent={"gpu_power_w": h, "gpu_util_pct": h}),
        ],
        "watch": [
            opened(1.75e9),
            alert_event(id=h, level=h, text=h, numbers=[(h, 1.0, h)], meaning=h, flip=h),
            example_of(StackDump, path=h, state=h, summary=h, python_stack=[h]),
        ],
    }
    for name, events in texts.items():
        lines = [encode(e, e.seq, e.t_s) for e in numbered(events)]  # type: ignore[arg-type]
        strange = json.dumps({"v": 1, "seq": len(lines), "t_s": 99.0, "kind": h, h: h}).encode()
        getattr(run, name).write_bytes(b"".join(lines) + strange + b"\n")
    part = {"knob": h, "choice": h, "reason": h, "overridden": False}
    receipt = {"run": h, "config": {h: h}, "decisions": [part]}
    receipt |= {"logs": {h: {"bytes": 1, "sha256": h}}, "student_files": {h: {"sha256": h}}}
    run.receipt.write_text(json.dumps(receipt))
    return run


COMMANDS = """
import os, sys
from engine.cli.main import main
run, spec = sys.argv[1:]
page = os.path.join(os.path.dirname(run), 'page.html')
broken = run + '-broken'
for command in (
    ['tail', run], ['tail', '-f', run], ['tail', '--json', run], ['tail', broken], ['tail', run + '-nowhere'],
    ['runs', os.path.dirname(run)], ['diagnose', '--all', run], ['diagnose', broken], ['checks', run],
    ['report', '--out', page, run], ['report', run + '-nowhere'], ['report', '--out', page, run],
    ['stop', run], ['stop', broken], ['evidence', 'receipt', run], ['why', 'check', '--all', '--evidence', run],
    ['distill', '--resume', run], ['distill', spec], ['distill', spec, '--check', '--set', run + '=1'],
    ['spec', run], ['inspect', run], ['tail', '--' + run], [run], ['why', 'show', run],
):
    try:
        code = main(command)
    except SystemExit as ended:
        code = ended.code
    print('CODE', command[0][:9].encode(), code, flush=True)
print('ALL DONE', flush=True)
"""


def test_no_command_lets_a_text_of_a_run_act_on_the_terminal(
    run: RunFolder, tmp_path: Path
) -> None:
    broken = create_run(tmp_path / (NAME + "-broken"), "", {})
    broken.events.write_bytes(
        b'{"v":1,"seq":0,"t_s":0.0,"kind":"note","level":' + HOSTILE.encode() + b"\n"
    )
    broken.watch.mkdir()
    spec = tmp_path / f"{NAME}.toml"
    spec.write_text(
        f"[train]\n{json.dumps(HOSTILE)} = {json.dumps(HOSTILE)}\n[{json.dumps(HOSTILE)}]\n"
    )
    terminal = Terminal(
        str(run.path), str(spec), code=COMMANDS, XDG_STATE_HOME=str(tmp_path / "state")
    )
    code = terminal.wait()
    assert code == 0 and "ALL DONE" in terminal.output, terminal.output[-2000:]
    assert not acts(terminal.output), acts(terminal.output)
    codes = [line.split()[-1] for line in terminal.output.splitlines() if line.startswith("CODE ")]
    assert len(codes) == 24 and set(codes) <= {"0", "1", "2", "64", "65"}, codes
    # They were shown, not left out.
    assert terminal.output.count("\\x1b]52;c;") > 20


def test_the_screen_lets_no_text_of_a_run_act_on_the_terminal(run: RunFolder) -> None:
    terminal = Terminal(str(run.path), columns=150, rows=45)
    terminal.read_until("loss", "right to left")
    for key in ("2", "3", "4", "5", "?"):
        terminal.press(key)
        terminal.read_for(0.3)
    terminal.press("\x1b")
    terminal.read_for(0.3)
    terminal.press("q")
    assert terminal.wait() == 0
    assert LEAVE_ALTERNATE in terminal.output
    # The program itself writes CSI, and OSC for the shape of the pointer.
    output = re.sub(r"\x1b\]22;[a-z]+\x07", "", terminal.output)
    for sequence in (
        "\x1b]0",
        "\x1b]8",
        "\x1b]52",
        "\x1bP",
        "\x07",
        "\x05",
        "\x7f",
        "x.example\x1b\\",
    ):
        assert sequence not in output, ascii(sequence)
    assert not {c for c in output if "\x80" <= c <= "\x9f" or c in "\u202e\u2066\u200f\u2028"}


def test_the_folder_of_the_tests_can_hold_the_name() -> None:
    assert os.path.basename(NAME) == NAME and len(NAME.encode()) < 240
