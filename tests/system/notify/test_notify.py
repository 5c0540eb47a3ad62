"""Messages about runs: what is sent, to whom, once, without secrets, and that no receiver delays anything."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.watch.notices as notices
from engine.log.events import ALERT, FAIL, SUSPICION, Event, Judged, Note, Notified
from engine.log.fold import Follower
from engine.log.folder import create_run
from engine.log.read import LogReader
from engine.log.write import LogWriter
from engine.notify.message import Message
from engine.notify.receivers import Receiver, choose_receivers, config_file, read_receivers
from engine.notify.send import Delivery
from engine.watch.notices import Notices
from tests.support.kit import Kit
from tests.support.perf import within
from tests.support.receiving import Receiving, receiving
from tests.support.running import engine, engine_here

TOKEN = "T0KENxyz987secret"
MESSAGE = Message(
    event="ended",
    run="kd <é>",
    host="node-1",
    step=1200,
    level="WRONG",
    verdict="WRONG since step 3: @everyone; look",
    do="start again",
    folder="/runs/kd",
    look="apr-workbench /runs/kd",
)


@pytest.fixture
def server() -> Iterator[Receiving]:
    with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = config_file()
    path.parent.mkdir(parents=True)
    return path


def notified(run: Path) -> list[Notified]:
    return [one for one in LogReader(run / "watch.jsonl").poll() if isinstance(one, Notified)]


def holds_token(run: Path) -> list[Path]:
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 3
    return [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_each_service_gets_its_format(server: Receiving) -> None:
    receivers = [
        Receiver(name=form, url=f"{server.url}/{form}", format=form)
        for form in ("json", "slack", "discord", "ntfy")
    ]
    assert [(o.sent, o.text) for o in Delivery(MESSAGE, receivers).wait()] == [
        (True, "HTTP 200")
    ] * 4
    got = {one.path[1:]: one for one in server.got}
    assert got["json"].json == MESSAGE.as_dict()
    assert MESSAGE.as_dict()["text"].splitlines() == [
        "WRONG since step 3: @everyone; look",
        "do: start again",
        "step 1,200",
        "look: apr-workbench /runs/kd",
    ]
    assert got["slack"].json["text"].startswith("kd &lt;é&gt; on node-1: the run ended\nWRONG")
    assert got["discord"].json["content"].startswith("kd <é> on node-1: the run ended\nWRONG")
    assert got["discord"].json["allowed_mentions"] == {"parse": []}
    title = got["ntfy"].headers["Title"].removeprefix("=?UTF-8?B?").removesuffix("?=")
    assert base64.b64decode(title).decode() == "kd <é> on node-1: the run ended"
    assert got["ntfy"].body.decode() == MESSAGE.text


def test_a_service_is_known_by_its_host_unless_the_file_says_otherwise(config: Path) -> None:
    hosts = {
        "hooks.slack.com": "slack",
        "discord.com": "discord",
        "ptb.discord.com": "discord",
        "ntfy.sh": "ntfy",
        "example.org": "json",
        "notslack.com.example.org": "json",
    }
    config.write_text(
        "".join(f'[r{n}]\nwebhook = "https://{h}/x/{TOKEN}"\n' for n, h in enumerate(hosts))
        + '[mine]\nwebhook = "https://example.org/topic"\nformat = "ntfy"\n'
    )
    found = read_receivers()
    assert [one.format for one in found.values()] == [*hosts.values(), "ntfy"]
    assert found["r0"].where == "slack https://hooks.slack.com"
    assert TOKEN not in repr(found)


@pytest.mark.perf
def test_receivers_that_misbehave_are_ended_and_the_others_are_served(server: Receiving) -> None:
    names = ["hang", "500", "redirect", "endless", "ok"]
    receivers = [Receiver(name=n, url=f"{server.url}/{n}", format="json") for n in names]
    receivers.append(Receiver(name="closed", url="http://127.0.0.1:1/", format="json"))
    receivers.append(Receiver(name="sleeps", command=("sleep", "600")))
    begun_s = time.monotonic()
    found = {one.receiver.name: (one.sent, one.text) for one in Delivery(MESSAGE, receivers).wait()}
    within(time.monotonic() - begun_s, 5.0)
    assert found == {
        "hang": (False, "no answer within 4 s"),
        "500": (False, "HTTP 500"),
        "redirect": (False, "HTTP 307, a redirection, which is not followed"),
        "endless": (True, "HTTP 200"),
        "ok": (True, "HTTP 200"),
        "closed": (False, "Connection refused"),
        "sleeps": (False, "no answer within 4 s"),
    }
    assert "/elsewhere" not in [one.path for one in server.got]


def test_a_command_gets_the_message_on_stdin_and_in_variables(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = "import os, sys; open(sys.argv[1], 'w').write(os.environ['APR_NOTIFY_DO'] + sys.stdin.read())"
    mail = Receiver(name="mail", command=(sys.executable, "-c", script, str(out)))
    absent = Receiver(name="absent", command=(str(tmp_path / TOKEN / "none"),))
    fails = Receiver(name="fails", command=("sh", "-c", "exit 7"))
    found = Delivery(MESSAGE, [mail, absent, fails]).wait()
    assert out.read_text() == f"start again{json.dumps(MESSAGE.as_dict())}"
    assert [one.text for one in found] == [
        "exit 0",
        "it could not be started: No such file or directory",
        "exit 7",
    ]


def test_a_watched_command_sends_one_message_at_its_end_and_keeps_no_secret(
    server: Receiving, tmp_path: Path
) -> None:
    url = f"{server.url}/hook?token={TOKEN}"
    words = ["--runs", tmp_path, "--name", "run", "--notify", url, "--", "sh", "-c"]
    done = engine("watch", *words, "env; exit 3")
    assert done.returncode == 3
    assert TOKEN not in done.stdout, "the command has it in its environment"
    assert TOKEN not in done.stderr
    (message,) = [one.json for one in server.got]
    assert server.got[0].path.endswith(TOKEN)
    assert (message["event"], message["level"], message["run"]) == ("ended", "ENDED", "run")
    assert message["look"] == f"apr-workbench {tmp_path / 'run'}"
    (record,) = notified(tmp_path / "run")
    assert (record.message, record.sent, record.failed) == ("ended", ["url-1"], {})
    assert not holds_token(tmp_path / "run")


def test_a_distillation_sends_its_end_and_a_dead_receiver_is_one_record(
    kit: Kit, server: Receiving, tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        f'[dead]\nwebhook = "http://127.0.0.1:1/{TOKEN}"\n'
        f'[other]\nwebhook = "{server.url}/other"\n'
        f'[hangs]\nwebhook = "{server.url}/hang"\n'
    )
    monkeypatch.setenv("HOOK", f"{server.url}/hook/{TOKEN}")
    spec = kit.spec(tmp_path, train__steps=2, notify__to="$HOOK, dead, hangs")
    done = engine("distill", spec, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (message,) = [one.json for one in server.got if one.path == f"/hook/{TOKEN}"]
    assert (message["event"], message["step"]) == ("ended", 2)
    assert message["verdict"].startswith("HEALTHY: completed 2 steps")
    assert "/other" not in [one.path for one in server.got]
    (record,) = notified(tmp_path / "run")
    assert record.sent == ["$HOOK"]
    assert record.failed == {
        "dead": "json http://127.0.0.1: Connection refused",
        "hangs": "json http://127.0.0.1: no answer within 4 s",
    }
    warnings = [
        one.text
        for one in LogReader(tmp_path / "run" / "watch.jsonl").poll()
        if isinstance(one, Note) and "127.0.0.1" in one.text
    ]
    assert not warnings
    assert not holds_token(tmp_path / "run")


def alert(id: str, level: str) -> Judged:
    return Judged(by=ALERT, id=id, level=level, text=f"{id} is {level}", step=1)


def test_a_verdict_that_gets_worse_and_a_stall_are_sent_once_a_run_and_not_again_after_a_resume(
    server: Receiving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "EVALUATE_EVERY_S", 0.0)
    run = create_run(tmp_path / "run", "", {"spec": {}})
    receiver = Receiver(name="team", url=server.url, format="json")

    def session(*told: Event) -> list[str]:
        before = len(server.got)
        follower = Follower(run)
        with LogWriter(run.watch, writer="supervisor") as watch:
            one = Notices(run, [receiver], watch.write)
            for event in told:
                watch.write(event)
                # A tick that logs a delivered message waits until its own line is read.
                for _ in range(len(told) + 2):
                    follower.read_all()
                    one.tick(follower)
            one.close(follower, ended=False)
        return [f"{got.json['event']} {got.json['level']}" for got in server.got[before:]]

    first = session(alert("throttled", SUSPICION), alert("gpu_lost", FAIL), alert("stalled", FAIL))
    assert sorted(first) == ["stalled WRONG", "worse SUSPECT", "worse WRONG"]
    assert session(alert("gpu_lost", FAIL), alert("stalled", FAIL)) == []
    assert sorted(one.message for one in notified(run.path)) == [
        "stalled",
        "worse SUSPECT",
        "worse WRONG",
    ]


@pytest.mark.parametrize(
    "text",
    [
        f'[a]\nwebhook = "ftp://example.org/{TOKEN}"',
        f'[a]\nwebhook = "https:/{TOKEN}"',
        f'[a]\nwebhook = "https://example.org:{TOKEN}/"',
        f'[a]\nwebhook = "https://example.org/{TOKEN} x"',
        f'[a]\nwebhook = "https://example.org/{TOKEN}"\nformat = "teams"',
        f'[a]\nwebhook = "https://example.org/{TOKEN}"\ndesktop = true',
        f'[a]\ncommand = "{TOKEN}"',
        "[a]\nformat = 'ntfy'",
        "[all]\ncommand = ['true']",
        "a = 1",
        "[a",
    ],
)
def test_a_bad_file_is_refused_in_a_line_without_its_secrets(config: Path, text: str) -> None:
    config.write_text(text)
    for words in (["notify"], ["notify", "--test"], ["watch", "--", "true"]):
        done = engine_here(*words)
        assert done.returncode == 65, done.stderr
        assert "expected" in done.stderr and TOKEN not in done.stderr + done.stdout


def test_a_spec_may_not_hold_a_url_and_names_receivers_that_there_are(
    kit: Kit, tmp_path: Path
) -> None:
    for to in (f"https://example.org/{TOKEN}", "$NO_SUCH_VARIABLE", "nobody-there"):
        spec = kit.spec(tmp_path, notify__to=to)
        done = engine_here("distill", spec, "--out", tmp_path / "run")
        assert done.returncode == 65 and "notify" in done.stderr
        assert TOKEN not in done.stderr
        assert not (tmp_path / "run").exists()


def test_receivers_are_listed_and_tested_without_their_secrets(
    server: Receiving, config: Path
) -> None:
    config.write_text(
        f'[team]\nwebhook = "{server.url}/{TOKEN}"\n[mail]\ncommand = ["true", "{TOKEN}"]\n'
    )
    done = engine_here("notify")
    assert done.stdout == "team: json http://127.0.0.1\nmail: command true\n"
    done = engine_here("notify", "--test", "--json")
    assert done.returncode == 0 and TOKEN not in done.stdout
    found = json.loads(done.stdout)["receivers"]
    assert [(one["name"], one["sent"], one["answer"]) for one in found] == [
        ("team", True, "HTTP 200"),
        ("mail", True, "exit 0"),
    ]
    assert server.events == ["test"]
    done = engine_here("notify", "--test", f"{server.url}/500", "team")
    assert done.returncode == 1
    assert "url-1: json http://127.0.0.1: HTTP 500" in done.stdout


def test_user_and_password_of_a_url_are_sent_as_a_header(server: Receiving) -> None:
    url = server.url.replace("//", f"//me:{TOKEN}@")
    (found,) = Delivery(MESSAGE, choose_receivers(url, {})).wait()
    assert found.sent and found.receiver.where == "json http://127.0.0.1"
    coded = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    assert server.got[0].headers["Authorization"] == f"Basic {coded}"


def test_what_notifies_loads_no_http_in_the_process_that_watches() -> None:
    code = "import sys, engine.watch.notices; print([m for m in ('torch', 'ssl', 'http.client') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
