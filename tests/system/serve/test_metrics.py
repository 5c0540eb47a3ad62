"""Runs as metrics: read by Prometheus's own parsers, with a sample of each reading that is known and of no other."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from engine.watch.metrics import CONTENT_TYPE
from tests.support.run_folders import completed, corrupt, killed, running
from tests.support.running import engine_here
from tests.support.served import TOKEN, serving

openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
older = pytest.importorskip("prometheus_client.parser")


def samples(text: str, run: str) -> dict[str, float]:
    found = {}
    for family in openmetrics.text_string_to_metric_families(text):
        for one in family.samples:
            if one.labels["run"] == run:
                rest = [value for key, value in one.labels.items() if key not in ("run", "host")]
                found["/".join([one.name, *rest])] = one.value
    return found


def test_every_run_has_its_samples_in_both_formats(tmp_path: Path) -> None:
    completed(tmp_path / "runs" / "whole", nan=(60,))
    killed(tmp_path / "runs" / "shot")
    corrupt(tmp_path / "runs" / 'odd "name"')
    scene = running(tmp_path / "runs" / "live", done=10)
    done = engine_here("runs", tmp_path / "runs", "--metrics")
    assert done.returncode == 0 and done.stdout.endswith("# EOF\n")
    assert list(older.text_string_to_metric_families(done.stdout))
    whole, shot = samples(done.stdout, "whole"), samples(done.stdout, "shot")
    assert whole["apr_run_step"] == 60 and whole["apr_run_state/completed"] == 1
    assert whole["apr_run_loss"] != whole["apr_run_loss"], "NaN"
    assert shot["apr_run_verdict/ended"] == 1 and shot["apr_run_alive"] == 0
    assert "apr_run_heldout_loss" not in shot
    live = samples(done.stdout, "live")
    assert live["apr_run_step"] == 10 and live["apr_run_state/running"] == 1
    assert samples(done.stdout, 'odd "name"')["apr_run_state/unreadable"] == 1
    only = engine_here("runs", tmp_path / "runs", "--metrics", "--filter", "state:killed").stdout
    assert samples(only, "shot") and not samples(only, "whole")
    scene.close()


def test_a_server_answers_with_the_token_as_a_scraper_sends_it(tmp_path: Path) -> None:
    completed(tmp_path / "runs" / "whole")
    with serving([tmp_path / "runs"]) as served:
        for token, code in ((TOKEN, 200), ("other", 403), ("", 403)):
            client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
            client.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            answer = client.getresponse()
            text = answer.read().decode()
            assert answer.status == code
            if code == 200:
                assert answer.headers["content-type"] == CONTENT_TYPE
                assert samples(text, "whole")["apr_run_step"] == 60
            client.close()
