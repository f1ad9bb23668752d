"""Calls into storages that hang are told from those that are slow."""

from __future__ import annotations

import os
import sys
import threading
from itertools import count
from time import monotonic

import pytest

from torchrelay.checkpoint.storage import local, work
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.work import LEAST_RATE, PATIENCE_SECS, StorageCall


@pytest.mark.parametrize(
    ("verb", "nbytes", "secs"),
    [("write", 0, PATIENCE_SECS), ("sync", 100 * LEAST_RATE, PATIENCE_SECS + 100), ("delete", 0, 300.0)],
)
def test_a_call_may_take_as_long_as_its_bytes_need(verb, nbytes, secs):
    """Beyond a minute, and what a very slow storage needs for the bytes, a call hangs."""
    call = StorageCall(verb, "x", nbytes, since=1000.0)
    assert not call.hangs(1000.0 + secs - 1)
    assert call.hangs(1000.0 + secs + 1)


def test_a_write_that_does_not_return_is_named(tmp_path, monkeypatch):
    """While the system does not answer, another thread sees verb and path; afterwards nothing is left."""
    inside, go, real = threading.Event(), threading.Event(), os.pwrite

    def stuck(*arguments):
        inside.set()
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(local.os, "pwrite", stuck)
    handle = LocalStorage(tmp_path).open_exclusive("a")
    writer = threading.Thread(target=handle.write_at, args=(0, memoryview(b"abc")))
    writer.start()
    assert inside.wait(60) and work.hanging() is None
    monkeypatch.setattr(work, "PATIENCE_SECS", -1.0)
    said = work.hanging()
    go.set()
    writer.join(60)
    handle.close()
    assert said is not None and f"cannot write {tmp_path}/a: the storage has not answered" in said
    assert work.calls() == []


def test_a_call_that_fails_is_forgotten(tmp_path):
    """An error leaves nothing underway."""
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path).read_range("absent", 0, 1)
    with pytest.raises(ZeroDivisionError), work.call_in_flight("write", "x"):
        assert [(call.verb, call.path) for call in work.calls()] == [("write", "x")]
        assert work.calls()[0].since <= monotonic()
        raise ZeroDivisionError
    assert work.calls() == []


def test_an_interrupt_anywhere_leaves_nothing_underway():
    """Wherever in the bookkeeping of a call Ctrl-C comes: no call seems to go on afterwards."""
    before, places = sys.gettrace(), 0

    def interrupted(place):
        """Whether the interrupt came, at this event of those that the code of the module has."""
        events = count(1)

        def trace(frame, event, _):
            ours = frame.f_code.co_filename == work.__file__ and frame.f_code.co_name != "__del__"
            if ours and next(events) == place:
                raise KeyboardInterrupt
            return trace if ours else None

        sys.settrace(trace)
        try:
            with work.call_in_flight("write", "x", 5):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    while interrupted(places + 1):
        places += 1
        assert work.calls() == [], f"after an interrupt at event {places}"
    assert places > 8
