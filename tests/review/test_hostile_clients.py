"""Clients that mean harm to a server, and surroundings that do not listen to it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

import torch
from served import linear, served, serving

from torchrelay.runners.programs.request import RequestLimits, ServeOptions
from torchrelay.tools.serving import serve as serving_module
from torchrelay.tools.serving.batching import PendingRequest, Queue
from torchrelay.tools.serving.handlers import TensorHandler
from torchrelay.tools.serving.serve import tell


def test_what_was_given_up_leaves_the_queue():
    """Samples of clients that are gone hold no memory and no place while the model computes for long."""
    queue, model = (
        Queue(RequestLimits(max_batch=2, max_delay_secs=0, queue=4)),
        served(TensorHandler(linear())),
    )

    def asked(count: int) -> PendingRequest:
        one = PendingRequest(model, [{"x": torch.ones(3)}] * count, lambda one: None)
        assert queue.put(one)
        return one

    gone, stays, also_gone = asked(1), asked(1), asked(2)
    queue.give_up(gone)
    queue.give_up(also_gone)
    assert len(queue) == 1
    asked(3)
    assert queue.take()[0].asked is stays
    queue.take()
    assert len(queue) == 0


@pytest.mark.parametrize(
    "head",
    [
        "GET /health HTTP/1.1\r\nContent-Length: 1000000\r\n",
        "HEAD /ready HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
        "POST /predict HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 3\r\n"
        "Transfer-Encoding: chunked\r\n",
    ],
)
def test_bodies_that_nobody_reads_end_the_connection(head: str):
    """Who dribbles a body behind a question without one, or says its length twice, keeps no connection."""
    with (
        serving(served(TensorHandler(linear()))) as here,
        socket.create_connection(("127.0.0.1", here.port), timeout=30) as client,
    ):
        client.sendall(f"{head}Host: localhost:{here.port}\r\n\r\n0\r\n\r\n".encode())
        answer = b""
        try:
            while data := client.recv(65536):
                answer += data
        except ConnectionResetError:
            pass  # it was closed with bytes unread
        assert b"connection: close" in answer.lower()


@pytest.fixture
def full_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A pipe in the place of stderr full, which nobody empties."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield stream
        monkeypatch.undo()
        os.set_blocking(writing, False)
    os.close(reading)


def test_a_log_that_nobody_reads_stops_nobody(full_pipe: Any):
    """What a full pipe does not take is dropped: the event loop does not wait for a reader."""
    telling = threading.Thread(target=tell, args=("what", "more" * 10_000), daemon=True)
    telling.start()
    telling.join(60)
    assert not telling.is_alive()


def test_failures_are_told_in_short(capsys: pytest.CaptureFixture[str]):
    """A long traceback is told by its end, in ASCII."""
    tell("it failed", "\N{SNOWMAN}" * 1000 + "the end")
    told = capsys.readouterr().err
    assert told.startswith("it failed\n")
    assert told.endswith("the end")
    assert len(told) <= 4096
    assert told.isascii()


def test_a_thread_within_torch_does_not_abort_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where a model never returns the process ends with 0 by itself, before the interpreter tears it down."""

    class Stuck:
        def run(self, ready: Any) -> None:
            ready()

        def ended(self) -> bool:
            return False

    class Source:
        follows = False

        def first(self) -> Any:
            return served(TensorHandler(linear()))

        def newer(self, found: Any) -> None:
            return None

    ends: list[int] = []
    monkeypatch.setattr("torchrelay.tools.serving.app.Running", lambda *args: Stuck())
    monkeypatch.setattr(os, "_exit", ends.append)
    assert serving_module.serve(ServeOptions(port=0), Source) == 0
    assert ends == [0]
