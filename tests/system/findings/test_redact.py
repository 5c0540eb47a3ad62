"""Secrets are never kept: tokens planted wherever text comes from, and looked for in every byte written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.findings.bundle import Bundle
from engine.findings.check import check_bundle
from engine.log.events import FactsRead, Note
from engine.receipts.context import allowed_environment, checkout_state
from engine.redact import Redactor, is_secret_name
from tests.support.findings import ask, hanging_run
from tests.support.judged import check_event
from tests.support.run_folders import Scene, started

# Put together here, so that no scanner of this repository takes them for real ones.
HUGGING_FACE = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
AWS_ID = "AKIA" + "IOSFODNN7EXAMPLE"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
BEARER = "abcdef0123456789" + "abcdef"
PASSWORD = "s3cr3t-pass" + "w0rd"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0." + "c2lnbmF0dXJl"
OWN = "an-unusual-form-" + "of-a-key"
GITHUB = "ghp_" + "0123456789abcdefghijABCDEFGHIJ"
PLANTED = (HUGGING_FACE, AWS_ID, AWS_SECRET, BEARER, PASSWORD, JWT, OWN, GITHUB)


@pytest.mark.parametrize(
    ("text", "secret", "sort"),
    [
        (f"HF_TOKEN={HUGGING_FACE}", HUGGING_FACE, "Hugging Face token"),
        (f"/models/{HUGGING_FACE}/x", HUGGING_FACE, "Hugging Face token"),
        (AWS_ID, AWS_ID, "AWS key"),
        (f"aws_secret_access_key = {AWS_SECRET}", AWS_SECRET, "value of a secret setting"),
        (f"Authorization: Bearer {BEARER}", BEARER, "authorization header"),
        (f"sent bearer {BEARER}", BEARER, "bearer token"),
        (f"https://me:{PASSWORD}@host/x.git", PASSWORD, "URL credentials"),
        (f"https://{GITHUB}@github.com/x", GITHUB, "URL credentials"),
        (f"cloned with {GITHUB}", GITHUB, "GitHub token"),
        (f"s3://b/k?X-Amz-Signature={BEARER}&n=1", BEARER, "URL signature"),
        (JWT, JWT, "JWT"),
        (f'{{"password": "{PASSWORD}"}}', PASSWORD, "value of a secret setting"),
        (f'"{{\\"api_key\\": \\"{PASSWORD}\\"}}"', PASSWORD, "value of a secret setting"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
            "MIIabc",
            "private key",
        ),
    ],
)
def test_each_form_of_a_secret_is_found_and_named(text: str, secret: str, sort: str) -> None:
    done = Redactor({}).text(f"before {text} after")
    assert secret not in done.text and sort in done.found, done
    assert done.text.startswith("before ") and "[redacted: " in done.text


@pytest.mark.parametrize(
    "text",
    [
        '{"tokens": 2048, "tokens_per_s": 123456789.5, "max_token": 123456789}',
        '{"data.tokenizer": "/models/qwen/tokenizer.json", "sha256": "' + "ab" * 32 + '"}',
        "git@github.com:me/project.git, https://host/path?step=3, mail me@host",
        "the token distribution is even; basic authentication was not asked for",
        "https://pypi.org/simple/@scope/x",
        "HF_TOKEN=$HF_TOKEN engine distill; HF_TOKEN is not set; use --token to give it",
        "eos_token: <|endoftext|>, pad_token=[PAD], loss per token: 2.31, max_token=77",
        "PWD=/home/me/project",
        "if token == 'x': token = stream.next(3)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    done = Redactor({}).text(text)
    assert done.text == text and not done.found


@pytest.mark.parametrize(
    "text",
    [
        "QX_TOKEN=@",
        "train --api-key @ --steps 3",
        '{"a": 1, "dbPassword": "@", "b": 2}',
        '{"pass_phrase": 1, "passphrase": ["@", "@"]}',
        "secret: |\n  @\nsteps: 3",
        "- client_secret: '@'",
        "X-Auth-Token: @",
        "Authorization: @",
        "https://h/x?a=1&access_token=@&b=2",
        "q=%7B%22password%22%3A%22@%22%7D",
        "<password>@</password>",
        "ENV HUB_TOKEN @",
        'os.environ["WANDB_API_KEY"] = "@"',
        '["x", "--hub-token", "@"]',
    ],
)
@pytest.mark.parametrize("value", ["x~7", "q9", "Zz0-" * 9])
def test_what_stands_behind_a_telling_name_goes_whatever_its_length(text: str, value: str) -> None:
    done = Redactor({}).text(f"before\n{text.replace('@', value)}\nafter")
    assert value not in done.text, done.text
    assert done.text.startswith("before\n") and done.text.endswith("\nafter") and done.found


@pytest.mark.parametrize(
    "name",
    ["AWS_SESSION_TOKEN", "admin_token", "login-token", "developerToken", "SUPER_TOKEN"],
)
def test_a_name_that_merely_ends_like_that_of_a_special_token_tells(name: str) -> None:
    for text in (f"{name}=@", f'{{"{name}": "@"}}', f"--{name} @"):
        done = Redactor({}).text(text.replace("@", OWN))
        assert OWN not in done.text and done.found, done


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        *(
            (f"{before}{'a1B2' * 20}", "a1B2")
            for before in (
                *("xoxb-", "xapp-1-", "glpat-", "gldt-", "glrt-", "glcbt-64_", "GR1348941", "npm_"),
                *("nvapi-", "pypi-", "sq0csp-", "github_pat_", "sk-ant-api03-", "sk_live_", "AIza"),
                *("hf_", f"SG.{'a1B2' * 5}.", f"eyJ{'a1B2' * 5}.{'a1B2' * 9}."),
                *("hooks.slack.com/services/T", "discord.com/api/webhooks/17/"),
                "api.telegram.org/bot12345:",
            )
        ),
        *((f"{before}{'Q1' * 8}", "Q1") for before in ("AKIA", "ASIA", "AROA", "ABIA", "A3TX")),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nMIIabc\n", "MIIabc"),
    ],
)
def test_what_a_service_gives_out_is_found_by_its_form(text: str, secret: str) -> None:
    assert secret not in Redactor({}).text(f"before {text} after").text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("password = ('a@1', 'a@2')\nsteps = 3", "\nsteps = 3"),
        ("secrets: [a@1, a@2", "secrets: ["),
        ('{:token=>"a@1"} and <b>more</b>', "} and <b>more</b>"),
        ("secret: |\n\n    a@1\n    a@2\nsteps: 3", "\nsteps: 3"),
        ("password: <a@1\nsteps: 3", "\nsteps: 3"),
        ("token=[a@1]", "token="),
        (json.dumps({"text": "secret: [a@1", "x": [1]}), '", "x": [1]}'),
        ("--token a@1 --steps 3", " --steps 3"),
        ("session key: a@1", "session key: "),
    ],
)
def test_a_value_goes_to_its_end_and_no_further(text: str, kept: str) -> None:
    done = Redactor({}).text(text).text
    assert "a@" not in done and kept in done, done


def test_the_value_of_a_secret_variable_is_found_whatever_its_form() -> None:
    redactor = Redactor({"MY_API_KEY": OWN, "PLAIN": "kept-as-it-is", "SHORT_TOKEN": "abc"})
    done = redactor.text(f"x {OWN} kept-as-it-is abc")
    assert done.text == "x [redacted: value of a secret variable] kept-as-it-is abc"


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access_key", "WANDB_API_KEY", "PASSWORD"])
def test_names_that_say_secret(name: str) -> None:
    assert is_secret_name(name)
    assert not is_secret_name("TOKENIZERS_PARALLELISM") and not is_secret_name("MONKEY")


def test_arguments_behind_a_secret_option_go_whatever_they_are() -> None:
    argv, found = Redactor({}).argv(
        ["x", "--token", "abc", "--hub-token=defghijkl", "--steps", "3"]
    )
    assert argv[:3] == ("x", "--token", "[redacted: argument of a secret option]")
    assert "defghijkl" not in argv[3] and argv[4:] == ("--steps", "3") and sum(found.values()) == 2


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False)))
def test_json_stays_json(value: dict[str, object]) -> None:
    text = json.dumps({**value, "password": PASSWORD, "url": f"https://a:{PASSWORD}@h/"})
    done = Redactor({}).text(text)
    assert PASSWORD not in done.text
    assert json.loads(done.text).keys() == json.loads(text).keys() or done.found


@given(st.text())
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    redactor = Redactor({"A_TOKEN": OWN})
    once = redactor.text(f"{text} {HUGGING_FACE} https://a:b@c {OWN}").text
    assert redactor.text(once).text == once


def test_only_listed_variables_are_taken() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0",
        "WORLD_SIZE": "2",
        "DS_API_KEY": PASSWORD,
        "HF_TOKEN": HUGGING_FACE,
        "TORCH_AUTH_TOKEN": PASSWORD,
        "LD_LIBRARY_PATH": f"/x/{PASSWORD}/lib",
        "HOME": "/home/me",
    }
    found = allowed_environment({**environ, "MY_SECRET": PASSWORD})
    assert set(found["variables"]) == {"CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LD_LIBRARY_PATH"}
    assert PASSWORD not in json.dumps(found) and found["redacted"]


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", f"https://me:{PASSWORD}@host/project.git")
    (folder / "train.py").write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x")
    return folder


def test_the_state_of_a_checkout_is_a_commit_and_one_hash_of_what_differs(checkout: Path) -> None:
    clean = checkout_state(checkout)
    assert len(clean["commit"]) == 40 and clean["dirty_sha256"] is None
    assert clean["remote"] == "https://[redacted: URL credentials]@host/project.git"
    seen = set()
    for text in ("a = 2\n", "a = 3\n"):
        (checkout / "train.py").write_text(text)
        seen.add(checkout_state(checkout)["dirty_sha256"])
    (checkout / "train.py").write_text("a = 1\n")
    for text in ("b", "c"):
        (checkout / "unknown.py").write_text(text)
        seen.add(checkout_state(checkout)["dirty_sha256"])
    assert len(seen) == 4 and None not in seen
    assert (
        checkout_state(checkout, only="nothing-of-it")["why"] == "its files are in no git checkout"
    )


def test_a_folder_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout_state(tmp_path)["why"] == "not a git checkout"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_state(tmp_path)["why"] == "git is not installed"


def test_planted_tokens_are_in_no_byte_of_a_bundle_and_the_bundle_says_what_was_taken_out(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", HUGGING_FACE)
    monkeypatch.setenv("MY_SERVICE_KEY_TOKEN", OWN)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/{OWN}/lib")
    monkeypatch.setenv("CUDA_CACHE_PATH", f"https://u:{PASSWORD}@cache/x")
    monkeypatch.chdir(checkout)
    run = hanging_run(tmp_path / f"run-{HUGGING_FACE}")
    (run.path / "spec.toml").write_text(
        f'[teacher]\npath = "https://me:{PASSWORD}@hub/{GITHUB}/model"\n'
    )
    run.effective.write_text(
        json.dumps({"spec": {"teacher": {"path": f"/m/{HUGGING_FACE}"}}, "sets": [f"a={AWS_ID}"]})
    )
    run.stderr.write_text(
        f"GET https://x Authorization: Bearer {BEARER}\naws_secret_access_key={AWS_SECRET}\n{JWT}\n"
    )
    (run.path / "stacks").mkdir()
    (run.path / "stacks" / "1.txt").write_text(f"argv: --token {OWN}\n")
    scene = Scene(tmp_path / "chatty").open()
    scene.events(
        started("chatty", 3),
        Note(level="info", text=f"password={PASSWORD} {OWN} Bearer {BEARER}"),
        Note(level="info", text=f"key {AWS_ID}, secret_key: {AWS_SECRET}, {JWT}"),
        check_event(id="x", level="fail", text=f"token={PASSWORD}", cost_s=0.0, step=0),
    )
    scene.device(FactsRead(facts={"url": f"https://{GITHUB}@host"}))
    chatty = scene.close().run

    folder = tmp_path / "evidence"
    asked = ("--evidence", folder)
    said = [
        ask("why", "new", run.path, "--seen", "alert gpu_idle", "--slug", "leaks", *asked),
        ask("why", "new", chatty.path, "--slug", "chatty", *asked),
        ask("why", "note", f"I used {JWT}", "--finding", "leaks", *asked),
        ask("why", "export", "--finding", "leaks", *asked),
        ask("why", "export", "--finding", "chatty", *asked),
    ]
    assert all(ran.code == 0 for ran in said), [ran.err for ran in said]

    bundles = [Bundle(p) for p in folder.iterdir() if p.is_dir()]
    written = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for secret in PLANTED:
        where = [p.name for p, data in written.items() if secret.encode() in data]
        assert not where, (secret[:6], where)
        assert not any(secret in str(p) for p in written)
        assert not any(secret in ran.out + ran.err for ran in said), secret[:6]
    sorts = set()
    for bundle in bundles:
        checked = check_bundle(bundle)
        assert not checked.faults
        assert any("redacted, otherwise whole" in note for note in checked.notes), "it is told"
        for file in bundle.load().files.values():
            sorts |= {*file.redacted}
            assert bool(file.redacted) == bool(file.whole_sha256)
    assert {"Hugging Face token", "URL credentials", "value of a secret variable"} & sorts
    # A file that is marked as redacted is held to its hash like any other.
    for bundle in bundles:
        name = next(n for n, file in bundle.load().files.items() if file.redacted)
        (bundle.path / name).write_bytes(b"[redacted: JWT]\n")
        assert check_bundle(bundle).verdict.level.name == "FAIL"
