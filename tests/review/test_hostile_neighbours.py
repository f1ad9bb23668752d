"""Files of others where a tracker is to write, servers that never answer, passwords that are hard to read."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.sinks.text import CsvSink, JsonlSink, TrackedRun
from torchrelay.runners.training import observers
from torchrelay.runners.training.journal import SaveWarning
from torchrelay.tools.cli.main import main
from torchrelay.tools.cli.runs import library

SINKS: dict[str, Callable[[Path], CsvSink | JsonlSink]] = {"csv": CsvSink, "jsonl": JsonlSink}


@pytest.fixture
def tracked(tmp_path: Path) -> TrackedRun:
    return TrackedRun(tmp_path, "run", "job", "id")


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(
    "content", ["name,salary\nbob,3\n", '{"text": "to be learned"}\n', "no line", "\0" * 99]
)
def test_a_file_of_somebody_else_is_never_written_over(
    kind: str, content: str, tmp_path: Path, tracked: TrackedRun
) -> None:
    """`csv:FILE` and `jsonl:FILE` refuse a file that holds anything but metrics, and leave it as it is."""
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(StorageError, match="choose another file"):
        SINKS[kind](path).open(tracked, 0)
    assert path.read_text() == content


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("torn", ["", "epoch,step,loss\n1,", '{"attempt": 0, "epo'])
def test_what_a_crash_left_is_gone_on_with(kind: str, torn: str, tmp_path: Path, tracked: TrackedRun) -> None:
    """An empty file, and a first line that was torn, are a tracker's own."""
    path = tmp_path / "own"
    path.write_text(torn if torn[:1] == {"csv": "e", "jsonl": "{"}[kind] else "")
    sink = SINKS[kind](path)
    sink.open(tracked, 1)
    sink.log(1, 1, {"loss": 0.5})
    assert len(sink.rows()) == 1


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "a\r\nb", 'a"b,c', "\u2028", "step"])
def test_a_metric_of_any_name_is_read_back(name: str, tmp_path: Path, tracked: TrackedRun) -> None:
    """A name that has ends of lines in it neither breaks the table nor gets lost at a rewind."""
    sink = CsvSink(tmp_path / "table.csv")
    sink.open(tracked, 0)
    for epoch in (1, 2, 3):
        sink.log(epoch, epoch, {name: float(epoch)})
    again = CsvSink(tmp_path / "table.csv")
    again.open(tracked, 1)
    again.rewind(2, 2)
    assert again.rows() == {1: {name: 1.0}, 2: {name: 2.0}}


@pytest.mark.parametrize("kind", SINKS)
def test_a_pipe_where_a_tracker_writes_is_refused(kind: str, tmp_path: Path, tracked: TrackedRun) -> None:
    """A pipe that nobody reads does not hold the run up."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="regular file"):
        SINKS[kind](tmp_path / "pipe").open(tracked, 0)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:a?secret@host:port/db",
        "postgresql://u:a@secret@host/db",
        "postgresql://u:a/b@secret@host/db",
        "postgresql://us/er:secret@host/db",
        "mysql://u:a@secret@host/db",
        "postgresql://host/db?password=secret&password=secret",
    ],
)
def test_a_password_that_nobody_can_tell_from_the_rest_is_not_shown(url: str) -> None:
    """URLs whose password has characters that end it are refused, and no part of it is printed."""
    parse_url = pytest.importorskip("torchrelay.metadata.sql.handler").parse_url
    pytest.importorskip("sqlalchemy")
    with pytest.raises(UsageError) as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


@contextmanager
def mute_server() -> Iterator[int]:
    """A PostgreSQL server, as far as the handshake goes, that never answers a query; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    met.append(listening.accept()[0])
                    met[-1].recv(4096)
                    met[-1].sendall(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")

        met: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
    for one in met:
        one.close()


def test_index_gives_a_server_up_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that takes the connection and no more ends `torchrelay index` with one line and 5."""
    pytest.importorskip("psycopg")
    job = Job("indexed", blobs={"state": [0]})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run").train()
    monkeypatch.setattr(library, "_DEADLINE_SECS", 0.1)
    capsys.readouterr()
    with mute_server() as port:
        began = time.monotonic()
        database = f"postgresql://user:secret@127.0.0.1:{port}/db?sslmode=disable"
        assert main(["runs", "index", str(tmp_path / "run"), "--database", database]) == 5
        assert time.monotonic() - began < 60
    said = capsys.readouterr().err
    assert "did not answer within" in said and "secret" not in said


class Stuck:
    """A tracker that never returns from one of its methods, or leaves like a program."""

    def __init__(self, verb: str) -> None:
        self.told: list[str] = []
        self.threads: set[int] = set()
        self._verb, self.reached, self.never = verb, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("open", "log", "rewind", "close"):
            raise AttributeError(name)

        def called(*_given: object) -> None:
            self.told.append(name)
            self.threads.add(threading.get_ident())
            if name == self._verb:
                self.reached.set()
                self.never.wait(60)
            if self._verb == "exit" and name == "log":
                raise SystemExit("no answer from http://me:secret@host:5000/x")

        return called


@pytest.mark.parametrize("verb", ["open", "rewind", "log", "close"])
def test_a_tracker_that_never_returns_is_given_up(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training waits for it once, says so, and ends well; the other trackers have every epoch."""
    sink = Stuck(verb)
    tell = observers.Trackers._call

    def told(self: observers.Trackers, to: Any, what: str, *given: Any) -> bool:
        late = to is sink and what == verb  # all others may take their time
        monkeypatch.setattr(observers, "PATIENCE_SECS", 0.2 if late else 60.0)
        return tell(self, to, what, *given)

    monkeypatch.setattr(observers.Trackers, "_call", told)
    job = Job("stuck", blobs={"state": [0]})
    job.epoch(lambda ctx: ctx.log("loss", 1.0))
    job.stop_when(max_epochs(3))
    with pytest.warns(SaveWarning, match=f"Stuck failed at {verb}: it was not finished after 0.2 s"):
        assert JobRunner(job, tmp_path / "run", best=None, trackers=[sink, "csv"]).train() == 3
    assert sink.reached.wait(60)
    sink.never.set()
    assert sink.told.count(verb) == 1 and len(sink.threads) == 1
    assert list(CsvSink(tmp_path / "run/trackers/metrics.csv").rows()) == [1, 2, 3]


def test_a_tracker_that_leaves_like_a_program_ends_no_run(tmp_path: Path) -> None:
    """SystemExit out of a tracker, which some libraries raise, is a failure like any other."""
    job = Job("leaves", blobs={"state": [0]})
    job.epoch(lambda ctx: ctx.log("loss", 1.0))
    job.stop_when(max_epochs(3))
    with pytest.warns(
        SaveWarning, match="failed at log: SystemExit: no answer from http://me:\\*\\*\\*@host:5000/x"
    ):
        assert JobRunner(job, tmp_path / "run", best=None, trackers=[Stuck("exit")]).train() == 3


def test_a_password_in_a_url_of_the_command_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run.json`, and so `show`, have the command that was typed without the passwords of its URLs."""
    words = [
        "train.py", "--db=postgresql://me:a@secret/b@host/db", "mlflow:http://me:secret@host:5000/x",
        "postgresql://h/db?sslpassword=secret&sslmode=disable", "http://host:5000/x", "a:b@c",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    RunDirectory(tmp_path / "run").create("job", None, 1)
    assert main(["show", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out + (tmp_path / "run/run.json").read_text()
    assert "secret" not in said and "postgresql://me:***@host/db" in said
    assert "http://host:5000/x a:b@c" in said and "sslpassword=***&sslmode=disable" in said
