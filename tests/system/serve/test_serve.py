"""The page of runs: who gets an answer, what of the folders is shown, and that it is live."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.errors import BadInput
from engine.log.events import Note
from engine.log.notes import change_notes
from engine.serve.access import read_token
from engine.serve.app import listen
from tests.support.findings import asked, flip, hanging_run
from tests.support.judged import alert_event
from tests.support.paths import ROOT
from tests.support.run_folders import Scene, completed, corrupt, evaluated, killed, running
from tests.support.running import engine, environment
from tests.support.served import TOKEN, Served, serving

SECRET = "the-text-of-a-file-outside"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of an ended run, a killed one and a broken one; a folder outside has a secret."""
    base = tmp_path_factory.mktemp("served")
    completed(base / "runs" / "whole")
    killed(base / "runs" / "shot")
    corrupt(base / "runs" / "broken")
    (base / "secret.txt").write_text(SECRET)
    with serving([base / "runs"]) as found:
        yield found


# Who gets an answer


def test_the_token_becomes_a_cookie_and_leaves_the_url(served: Served) -> None:
    answer = served.ask(f"/?filter=a&token={TOKEN}", headers={})
    assert answer.status == 303
    assert answer.headers["Location"] == f"http://127.0.0.1:{served.port}/?filter=a"
    cookie = answer.headers["Set-Cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert served.ask("/").status == 200


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/page.css", "/news?page=/", "/page/x", "/x", "/compare?runs=x"]
)
def test_nothing_is_answered_without_the_token(served: Served, path: str) -> None:
    for headers in ({}, {"Cookie": f"apr-serve-{served.port}=wrong"}, {"Cookie": f"x={TOKEN}"}):
        answer = served.ask(path, headers=headers)
        assert (answer.status, "token" in answer.text) == (403, True)
    mark = "&" if "?" in path else "?"
    assert served.ask(f"{path}{mark}token=wrong").status == 403
    assert served.ask(f"{path}{mark}token=%ff%00").status == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{}", "[::1]:{}", ""],
)
def test_a_host_of_another_name_is_refused(served: Served, host: str) -> None:
    answer = served.ask("/", headers={"Host": host.format(served.port), **served.cookie})
    assert answer.status == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{}"]
)
def test_another_origin_is_refused(served: Served, origin: str) -> None:
    headers = {"Origin": origin.format(served.port), **served.cookie}
    assert served.ask("/", headers=headers).status == 403
    own = {"Origin": f"http://127.0.0.1:{served.port}", **served.cookie}
    assert served.ask("/", headers=own).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(served: Served, method: str) -> None:
    assert served.ask("/", method=method).status == 405


def test_each_answer_has_the_headers_that_restrict_it(served: Served) -> None:
    paths = ["/", "/page.js", "/page.css", "/nothing", served.page_of("whole")]
    for answer in [*map(served.ask, paths), served.ask("/", headers={})]:
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
        assert "'unsafe-inline'" not in policy.replace("style-src-attr 'unsafe-inline'", "")
        assert "'unsafe-eval'" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Server" not in answer.headers


# What is shown


def test_the_list_has_each_run_with_its_verdict(served: Served) -> None:
    page = served.text("/")
    rows = dict(re.findall(r'class="name"[^>]*>(\w+)<.*?class="says">(.*?)<', page))
    assert rows["whole"].startswith("HEALTHY: completed 60 steps")
    assert rows["shot"] == "ENDED at step 30: killed by SIGKILL, sender not known"
    assert "expected line number 20" in rows["broken"]
    assert list(rows)[-1] == "whole"


def test_a_filter_keeps_the_runs_that_it_fits(served: Served) -> None:
    page = served.text("/?filter=state:killed")
    assert "1 of 3 runs" in page and ">shot<" in page and ">whole<" not in page
    assert "a word after state:" in served.text("/?filter=state:")


def test_the_page_of_a_run_is_that_of_its_report(served: Served, tmp_path: Path) -> None:
    page = served.text(served.page_of("whole"))
    assert "HEALTHY: completed 60 steps" in page and page.count("<svg") > 3
    assert "<h1>run whole</h1>" in page
    assert "a line was lost" in served.text(served.page_of("broken"))


def test_runs_are_compared_as_in_a_report(served: Served) -> None:
    key = {name: served.page_of(name).removeprefix("/page/") for name in ("whole", "shot")}
    address = f"/compare?runs={key['whole']},{key['shot']}"
    page = served.text(address)
    assert "<h1>compare A whole, B shot</h1>" in page and f'data-page="{address}"' in page
    assert (
        page.count('class="verdict ') == 2 and f'<a href="/page/{key["shot"]}">B shot</a>' in page
    )
    # Each run is a field of the form in the list.
    form = served.text(f"/compare?runs={key['whole']}&runs={key['shot']}&runs={key['shot']}")
    assert form == page
    assert served.text("/").count('type="checkbox"') == 3
    for many in ("", f"{key['whole']},", ",".join([key["whole"], *map(str, range(6))])):
        answer = served.ask(f"/compare?runs={many}")
        assert answer.status == 404 and "two to 6 runs to compare" in answer.text


PATHS = [
    *("..", "../..", "../secret.txt", "../../secret.txt", "....//secret.txt", "..\\secret.txt"),
    *("%2e%2e/secret.txt", "..%2fsecret.txt", "%2e%2e%2fsecret.txt", "..%5csecret.txt"),
    *("..%252fsecret.txt", "%252e%252e%252fsecret.txt", "..%c0%afsecret.txt", "..%ef%bc%8fsecret"),
    *(
        "/etc/passwd",
        "//etc/passwd",
        "%2fetc%2fpasswd",
        "file:///etc/passwd",
        "file%3a///etc/passwd",
    ),
    *(
        "whole/../../secret.txt",
        "whole/events.jsonl",
        "whole",
        "shot/effective.json",
        "~/.ssh/id_rsa",
    ),
    *("%00", "whole%00.html", "..%00/secret.txt", "%0a%0dSet-Cookie:x=y", "..%2f?page=/"),
    *("page.js/../../access.py", "page.js%00", "access.py", "__init__.py", "..;/secret.txt"),
    *(".%2e/secret.txt", "%2e./secret.txt", "x" * 4000, "%ff%fe", "*", "http://127.0.0.1:1/"),
]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_no_path_leads_outside(served: Served, path: str) -> None:
    assert len(PATHS) == 40
    for url in (
        f"/{path}",
        f"/page/{path}",
        f"/news?page={path}",
        f"/news?page=/page/{path}",
        f"/compare?runs={path}",
        f"/news?page=/compare?runs={path}",
    ):
        answer = served.ask(url)
        text = answer.text
        assert answer.status in (400, 404) and SECRET not in text and "root:" not in text, url


def test_no_link_leads_outside(tmp_path: Path) -> None:
    away = completed(tmp_path / "away")
    runs = tmp_path / "runs"
    (runs / "deep").mkdir(parents=True)
    completed(runs / "near")
    os.symlink(away.path, runs / "folder")
    os.symlink(away.path, runs / "deep" / "folder")
    inner = completed(runs / "file")
    inner.events.unlink()
    os.symlink(away.events, inner.events)
    with serving([runs]) as served:
        page = served.text("/")
        assert re.findall(r'class="name"[^>]*>([^<]+)<', page) == ["near"]
        near = served.page_of("near")
        assert "HEALTHY" in served.text(near)
    (runs / "near" / "spec.toml").unlink()
    os.symlink(away.spec, runs / "near" / "spec.toml")
    with serving([runs]) as served:
        assert "0 of 0 runs" in served.text("/")
        assert "expected no link out of the folders that are served" in served.text(near)


def test_flips_and_findings_are_rows_with_pages_of_their_own(tmp_path: Path) -> None:
    flip(tmp_path / "flips" / "threads")
    bundle = asked(hanging_run(tmp_path / "runs" / "hang"))
    with serving([tmp_path / "runs", tmp_path / "flips", tmp_path / "evidence"]) as served:
        # The run itself, and what the finding keeps of it.
        assert "2 of 2 runs" in served.text("/")
        page = served.text(served.page_of("threads"))
        assert "<h1>flip threads</h1>" in page and "Plan, registered" in page and "<svg" in page
        page = served.text(served.page_of(bundle.path.name))
        assert "Causes and tests" in page and "compute.threads" in page


SCRIPTS = [
    "<script>alert(1)</script>",
    "<ScRiPt src=//x.example></sCrIpT>",
    "</pre><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</svg><script>alert(1)</script>",
    "</main><script>alert(1)</script>",
    "</a><a href=javascript:alert(1)>x</a>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><style>*{x:expression(alert(1))}</style>",
    "<style>@import '//x.example'</style>",
    "<style>body{display:none}</style>",
    "<link rel=stylesheet href=//x.example>",
    "<meta http-equiv=refresh content=0;url=//x.example>",
    "<base href=//x.example>",
    "<iframe src=javascript:alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<object data=//x.example>",
    "<embed src=//x.example>",
    "<form action=//x.example><button>x",
    "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)>",
    "<template><script>alert(1)</script></template>",
    "<math><mtext></mtext><script>alert(1)</script></math>",
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<?xml version=1.0?><script>alert(1)</script>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover=alert(1) x="',
    "' onmouseover=alert(1) x='",
    "` onmouseover=alert(1) x=`",
    '" style="background:url(//x.example)',
    "&lt;script&gt;alert(1)&lt;/script&gt;<b>",
    "{{constructor.constructor('alert(1)')()}}<i>",
    "\u202e<script>\u2066",
    "<script>\x00alert(1)</script>",
    'data: {"parts": {}}\n\ndata: <script>',
]
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "pre", "div", "s", "main"),
    *("dl", "dt", "dd", "details", "summary", "table", "tr", "td", "th", "figure", "title"),
    *("svg", "rect", "text", "line", "polyline", "polygon", "nav", "form", "input", "output"),
    *("link", "script", "article", "header", "p", "a", "b", "i", "q", "span", "button"),
}
"""Tags that pages have."""
SCRIPT_TAGS = {
    '<script src="/report.js" defer>',
    '<script src="/page.js" defer>',
    '<script type="application/json" id="series">',
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    runs = tmp_path_factory.mktemp("hostile")
    for number, text in enumerate(SCRIPTS):
        name = f"{number:02}-" + "".join(c for c in text if c not in "/\0")
        scene = Scene(runs / name).open().begin(3).steps(1, 3)
        written = msgspec.structs.replace(evaluated(3, "student", 2.0), sample=text, prompt=text)
        scene.events(
            written,
            Note(level="error", text=f"RuntimeError: {text}; at train.py:3"),
        )
        scene.watch(alert_event("loss_spike", "fail", text=text))
        scene.close()
        words = "".join(c for c in text if c.isprintable())
        change_notes(scene.run, add=[words.replace(" ", "")[:32]], note=words)
    with serving([runs]) as found:
        yield found, runs


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_no_text_of_a_run_is_markup(hostile: tuple[Served, Path], number: int) -> None:
    assert len(SCRIPTS) == 40
    served, _ = hostile
    page = served.text(f"/?filter={number:02}-")
    (path,) = re.findall(r'href="(/page/\w+)"', page)
    answer = served.ask(path)
    own = answer.text
    with served.following(path) as sent:
        pushed = next(sent)["parts"]["part-page"]
    (other,) = re.findall(r'href="/page/(\w+)"', served.text(f"/?filter={(number + 1) % 40:02}-"))
    both = f"/compare?runs={path.removeprefix('/page/')},{other}"
    compared = served.text(both)
    with served.following(both) as sent:
        pushed_both = next(sent)["parts"]["part-page"]
    for text in (page, own, pushed, compared, pushed_both):
        assert set(re.findall(r"</?([a-zA-Z][a-z0-9]*)", text)) <= TAGS
        scripts = Counter(re.findall("<script[^>]*>", text))
        assert set(scripts) <= SCRIPT_TAGS and set(scripts.values()) <= {1}
        assert not re.search(r"<[^>]* on\w+\s*=", text)
        assert not {c for c in text if not c.isprintable() and c not in "\n\t"}
    assert answer.headers["Content-Security-Policy"].startswith(
        "default-src 'none'; script-src 'self'"
    )
    assert compared.count("alert(1)") + compared.count("x.example") + compared.count("&lt;") > 3
    assert own.count("alert(1)") + own.count("x.example") + own.count("&lt;") > 3


# Live


def test_a_step_and_a_verdict_arrive_while_the_page_is_open(tmp_path: Path) -> None:
    scene = running(tmp_path / "runs" / "live", done=10)
    with (
        serving([tmp_path / "runs"]) as served,
        served.following(served.page_of("live")) as page,
        served.following("/") as rows,
    ):
        assert "step 10/60" in next(page)["parts"]["part-page"]
        assert len(next(rows)["order"]) == 2
        scene.steps(11, 12)
        assert "step 12/60" in next(page)["parts"]["part-page"]
        (row,) = next(rows)["parts"].values()
        assert "step 12/60" in row and "live" in row and "<b>✗" not in row
        scene.watch(alert_event("loss_spike", "fail", text="the loss jumped"))
        while "the loss jumped" not in row:
            row = "".join(next(rows)["parts"].values())
        assert "✗" in row and "WRONG" in row
    scene.close()


def test_an_open_page_that_has_the_newest_state_is_sent_nothing_again(served: Served) -> None:
    path = served.page_of("whole")
    have = re.findall(r'data-version="(\w+)"', served.text(path))[0]
    answer = served.ask(f"/news?page={path}&have={have}")
    assert (answer.status, answer.text) == (204, "")


def test_a_page_of_an_unknown_version_is_sent_whole(served: Served) -> None:
    for have in ("", "0123456789abcdef"):
        answer = served.ask(f"/news?page=/&have={have}")
        news = json.loads(answer.text)
        assert list(news["parts"]) == news["order"] and len(news["order"]) == 4


# The command


def test_a_restart_keeps_the_url_of_a_page_and_its_cookie(tmp_path: Path) -> None:
    completed(tmp_path / "runs" / "whole")
    with serving([tmp_path / "runs"]) as served:
        path = served.page_of("whole")
        before = re.findall(r'data-version="(\w+)"', served.text(path))
    with serving([tmp_path / "runs"], served.port) as again:
        assert again.port == served.port
        assert re.findall(r'data-version="(\w+)"', again.text(path)) == before


def test_the_token_is_kept_in_a_file_that_its_owner_alone_reads(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    token = read_token(file)
    assert len(token) > 40 and read_token(file) == token
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(BadInput, match="a file that only its owner can read"):
        read_token(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(BadInput, match="32 to 128"):
        read_token(file)


def test_a_port_that_is_taken_is_replaced_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, said = listen(0)
    assert not said
    taken = first.getsockname()[1]
    with pytest.raises(BadInput, match=f"port {taken}"):
        listen(taken)
    monkeypatch.setattr("engine.serve.app.PORT", taken)
    other, said = listen(None)
    assert f"port {taken} is taken" in said and other.getsockname()[0] == "127.0.0.1"
    for one in (first, other):
        one.close()


def test_the_command_serves_what_it_printed_and_ends_at_once(tmp_path: Path) -> None:
    completed(tmp_path / "runs" / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "serve", str(tmp_path / "runs"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    url = process.stdout.readline()
    port, token = re.findall(r"http://127.0.0.1:(\d+)/\?token=(\S+)", url)[0]
    served = Served(int(port), token)
    assert "1 of 1 runs" in served.text("/")
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "engine serve: stopped by SIGTERM\n")


def test_a_folder_that_is_not_there_and_a_missing_library_are_named(tmp_path: Path) -> None:
    done = engine("serve", tmp_path / "nothing", "--port", "0")
    assert (done.returncode, done.stdout) == (65, "")
    assert "expected a folder of runs, or one run, found nothing there" in done.stderr
    hidden = (
        "import sys; sys.modules['uvicorn'] = None; from engine.cli.main import main; "
        "sys.exit(main(['serve', '.']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert done.returncode == 65
    assert "pip install 'apr-workbench[serve]'" in done.stderr


def test_serving_loads_no_torch() -> None:
    code = "import sys, engine.serve.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
