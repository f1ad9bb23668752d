"""Requests, clients and run directories that are made to harm whoever serves or reads reports."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboards import dashboard

from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.report import run_data
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import report_page
from torchrelay.tools.report.run_data import ReadLimits
from torchrelay.tools.report.server import RunIndex

EVIL = "</script><img src=x onerror=alert(1)>\" ' \u202e\x1b[31m"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "store" / "run")
    made.create("job", ("val/acc", "max"), 1)
    made.write_status("FINISHED", attempt=0, epoch=1, generation=0)
    made.log_metrics(0, {"epoch": 1, "time": 1.0, "metrics": {"val/acc": 0.5}})
    made.log_event(0, "start", attempt=0)
    return made


@contextmanager
def served(root: Path) -> Iterator[int]:
    with dashboard(RunIndex(root)) as server:
        yield server.socket.getsockname()[1]


def answer(port: int, head: bytes) -> bytes:
    """All that comes back for a request line (and more) behind which stands the right Host header."""
    with socket.create_connection(("127.0.0.1", port), 60) as line:
        line.sendall(head + b"\r\nHost: 127.0.0.1:%d\r\n\r\n" % port)
        return b"".join(iter(lambda: line.recv(65536), b""))


def test_requests_that_are_none_are_answered_and_nothing_is_said(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Odd methods, addresses, versions and headers get one line; none leaves a traceback or a descriptor."""
    odd = {
        b"GET http://[x HTTP/1.1": b" 404 ",
        b"GET /run/%00 HTTP/1.1": b" 404 ",
        b"GET /run/\xff\xfe HTTP/1.1": b" 400 ",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1": b" 404 ",
        b"BREW / HTTP/1.1": b" 405 ",
        b"GET / HTTP/1.1" + b"\r\nA: b" * 200: b" 200 ",
        b"GET / HTTP/1.1\r\nHost: evil.example": b" 400 ",
        b"\x16\x03\x01\x02": b"Bad Request",
    }
    with served(run.path.parent) as port:
        before = len(os.listdir("/proc/self/fd"))
        for head, said in odd.items():
            assert said in answer(port, head)[:60], head[:60]
        assert answer(port, b"HEAD /nope HTTP/1.1").endswith(b"\r\n\r\n"), "HEAD has no body"
        for _ in range(600):
            if len(os.listdir("/proc/self/fd")) <= before:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("descriptors are left")
    assert capsys.readouterr() == ("", "")


def test_notes_that_lead_out_of_the_run_are_not_shown(run: RunDirectory, tmp_path: Path) -> None:
    """A run whose notes are links to somebody's files is no run of the store."""
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"job": "the secret"}))
    (run.path / "run.json").unlink()
    (run.path / "run.json").symlink_to(secret)
    with served(run.path.parent) as port:
        assert b"the secret" not in answer(port, b"GET / HTTP/1.1")
        assert b" 404 " in answer(port, b"GET /run/run HTTP/1.1")[:60]


@pytest.mark.parametrize("odd", [["a"], {"a": []}, "x", None, -1, 1e308, EVIL, True])
@pytest.mark.parametrize("key", ["generation", "kind", "epoch", "time", "metrics", "attempt", "state"])
def test_no_value_in_a_note_breaks_a_page(run: RunDirectory, key: str, odd: object) -> None:
    """Whatever stands under a key of events, metrics and status: there is a page, and nothing in it runs."""
    line = {"time": 2.0, "kind": "end", "epoch": 2, "metrics": {EVIL: 1.0, "val/acc": 0.1}, EVIL: EVIL}
    for name in ("events.0.jsonl", "metrics.0.jsonl"):
        with open(run.path / name, "a") as file:
            file.write(json.dumps({**line, key: odd}) + "\n")
    status = json.loads((run.path / "status.json").read_text())
    (run.path / "status.json").write_text(json.dumps({**status, key: odd}))
    page = report_page([gather(run, ReadLimits(norm_bytes=0))])
    assert "<img" not in page and "\x1b" not in page and "\u202e" not in page


def test_files_of_very_many_lines_are_read_in_part(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the first ones and says so."""
    monkeypatch.setattr(run_data, "MOST_LINES", 10)
    for epoch in range(2, 20):
        run.log_metrics(0, {"epoch": epoch, "time": 1.0, "metrics": {"val/acc": 0.5}})
    facts = gather(run, ReadLimits(norm_bytes=0))
    assert len(facts.course.points) == 10
    assert any("only the first 10 lines" in text for text in facts.trouble)
