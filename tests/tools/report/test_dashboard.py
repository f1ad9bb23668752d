"""The dashboard: live, read-only, for this machine alone unless a token is asked for, ended at once."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import look, needs_browser
from dashboards import dashboard
from report_runs import noted
from torchrun import interruptible

from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main
from torchrelay.tools.report.server import DashboardServer, Rendered, RunIndex, signature
from torchrelay.tools.serving.web import access_at, read_token

TOKEN = "0123456789abcdef"


def ask(
    server: DashboardServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    """One request, its path sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.socket.getsockname()[1], timeout=100)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def test_the_list_and_a_page_are_served(story: RunDirectory) -> None:
    """Runs are listed with state and best epoch, and each has its page; headers forbid everything else."""
    with dashboard(RunIndex(story.path.parent)) as server:
        status, headers, body = ask(server, "/")
        assert status == 200
        assert 'href="/run/story"' in body
        assert "val/acc 0.6333 at epoch 5" in body
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        status, headers, body = ask(server, "/run/story")
        assert status == 200
        assert "story finished at epoch 5" in body
        assert ask(server, "/run/story", If_None_Match=headers["ETag"])[0] == 304
        assert ask(server, "/run/story", "HEAD")[2] == ""


def test_a_page_is_made_anew_when_files_change(story: RunDirectory) -> None:
    """An unchanged run keeps its tag; a new epoch gives another one, and the page has it."""
    now = [0.0]
    with dashboard(RunIndex(story.path.parent), rendered=Rendered(lambda: now[0])) as server:
        first = ask(server, "/run/story")
        now[0] += 100
        assert ask(server, "/run/story")[1]["ETag"] == first[1]["ETag"]
        story.log_metrics(10**6, {"epoch": 6, "time": time.time(), "metrics": {"val/acc": 0.875}})
        _, headers, body = ask(server, "/run/story")
        assert headers["ETag"] != first[1]["ETag"]
        assert "0.875" in body


def test_work_is_bounded() -> None:
    """However often a page is asked for while files change, it is made an eighth of the time at most."""
    now, made = [0.0], []

    def render(here: str) -> str:
        made.append(now[0])
        now[0] += 1.0
        return f"page {len(made)} {here}"

    rendered = Rendered(lambda: now[0])
    for step in range(1000):
        rendered.page("x", f"state {step}", render)
        now[0] += 0.1
    assert 5 <= len(made) <= 1 + now[0] / 8


@pytest.mark.parametrize(
    "path",
    [
        "/run/..",
        "/run/../story",
        "/run/%2e%2e",
        "/run/%2e%2e%2fstory",
        "/run/story/../story",
        "/run/",
        "/run/story/",
        "//run/story",
        "/run/story%00",
        "/run/Story",
        "/run/outside",
        "/run/link",
        "/status.json",
        "/run/story/run.json",
        "/run/%ff",
        "*",
    ],
)
def test_only_listed_names_are_served(story: RunDirectory, path: str) -> None:
    """No spelling of a path leads to anything but the list and the runs in it; links are not followed."""
    store = story.path.parent / "store"
    store.mkdir()
    outside = story.path.rename(story.path.parent / "outside")
    (store / "link").symlink_to(outside)
    (store / "story").symlink_to(outside)
    with dashboard(RunIndex(store)) as server:
        status, _, body = ask(server, path)
        assert status == 404
        assert "report" not in body


def test_runs_are_compared(story: RunDirectory) -> None:
    """A page compares runs of the list, and follows their files; other names, and one alone, have none."""
    now = [0.0]
    other = noted(story.path.with_name("other one"), {"val/acc": [0.5]})
    with dashboard(RunIndex(story.path.parent), rendered=Rendered(lambda: now[0])) as server:
        assert 'value="other%20one"' in ask(server, "/")[2]
        path = "/compare/story/other%20one"
        status, headers, body = ask(server, path)
        assert status == 200
        assert "story and other one compared" in body
        now[0] += 100
        assert ask(server, path, If_None_Match=headers["ETag"])[0] == 304
        other.log_metrics(0, {"epoch": 2, "time": time.time(), "metrics": {"val/acc": 0.875}})
        assert "0.875" in ask(server, path)[2]
        for wrong in (
            "/compare/",
            "/compare/story",
            "/compare/story/story",
            "/compare/story/nope",
            "/compare",
        ):
            assert ask(server, wrong)[0] == 404, wrong


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "127.0.0.1.evil.example", ""]
)
def test_names_that_were_made_to_lead_here_are_refused(story: RunDirectory, host: str) -> None:
    """A page of another site that rebinds its name to this machine gets nothing."""
    with dashboard(RunIndex(story.path.parent)) as server:
        port = server.socket.getsockname()[1]
        assert ask(server, "/", Host=host.format(port=port))[0] == 421
        for own in ("127.0.0.1", "localhost", "[::1]"):
            assert ask(server, "/", Host=f"{own}:{port}")[0] == 200


def test_a_token_is_needed_where_one_was_given(story: RunDirectory) -> None:
    """Without it nothing is shown; an address with it sets a cookie and redirects without it."""
    with dashboard(RunIndex(story.path.parent), TOKEN) as server:
        assert ask(server, "/")[0] == 401
        assert ask(server, "/?token=0123456789abcdeX")[0] == 401
        assert ask(server, "/", Authorization="Bearer wrong-wrong-wrong")[0] == 401
        assert ask(server, "/", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = ask(server, f"/run/story?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "/run/story")
        assert {"HttpOnly", "SameSite=strict"} <= set(headers["Set-Cookie"].split("; "))
        assert ask(server, "/run/story", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
        assert ask(server, f"//evil.example?token={TOKEN}")[1].get("Location") == "/"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(story: RunDirectory, method: str) -> None:
    """Every method but GET and HEAD is refused, and looking leaves the files as they were."""
    before = signature(story), sorted(story.path.rglob("*"))
    with dashboard(RunIndex(story.path.parent)) as server:
        assert ask(server, "/run/story", method)[0] == 405
        ask(server, "/run/story")
    assert (signature(story), sorted(story.path.rglob("*"))) == before


@pytest.mark.parametrize(
    ("host", "token", "said"),
    [
        ("0.0.0.0", None, "--token"),
        ("example.org", None, "--token"),
        ("127.0.0.1", "short", "at least 16 ASCII characters"),
        ("127.0.0.1", "with space and more", "without spaces"),
    ],
)
def test_open_doors_are_refused(host: str, token: str | None, said: str) -> None:
    """Other addresses than this machine's need a token, and a token has to be one."""
    with pytest.raises(UsageError, match=said):
        access_at(host, 1, read_token(token, None))


def test_mistakes_are_one_line(tmp_path: Path, capsys) -> None:
    """A store that is not there, and a port that is taken, are reported in one line with exit code 2."""
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["dashboard", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "not there" in error
    assert "choose another --port" in error
    assert "Traceback" not in error


def test_a_run_that_cannot_be_read_has_a_page(story: RunDirectory) -> None:
    """Damage is shown, in the list and on the page; the server continues."""
    for path in story.path.glob("*.json"):
        path.write_text("{")
    with dashboard(RunIndex(story.path.parent)) as server:
        assert "unreadable" in ask(server, "/")[2]
        status, _, body = ask(server, "/run/story")
        assert status == 200
        assert "could not be read" in body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_at_once(story: RunDirectory, number: int) -> None:
    """Ctrl-C and a polite kill end the server at once, with 0, even while a client holds a line open."""
    command = [sys.executable, "-m", "torchrelay", "dashboard", str(story.path.parent), "--port", "0"]
    with interruptible():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=100) as silent:
            silent.sendall(b"GET / HT")
            process.send_signal(number)
            assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@needs_browser
def test_a_browser_sees_a_new_epoch_by_itself(story: RunDirectory, tmp_path: Path) -> None:
    """The page asks again, puts in what is new, keeps what was opened, and the console stays empty."""
    seen: list[str] = []
    rendered = Rendered(lambda: 1000.0 * len(seen))  # as if long pauses lay between requests
    with dashboard(RunIndex(story.path.parent), rendered=rendered) as server:
        page = server.pages.of_runs

        def told(name: str):
            seen.append(name)
            if len(seen) == 2:  # the page is open and asks for the first time
                story.log_metrics(10**6, {"epoch": 6, "time": time.time(), "metrics": {"val/acc": 0.875}})
            return page(name)

        server.pages.of_runs = told
        shown = look(f"{server.url}run/story", tmp_path / "browser", millis=10_000)
        assert len(seen) >= 3
        assert 'data-refreshed="1"' in shown.dom
        assert "0.875" in shown.dom
        assert shown.console == []
