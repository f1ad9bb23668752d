"""Two writers on one log: whoever is paused, wherever and however long, harms nothing and learns of it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from log_helpers import MemoryStorage, entry, take
from stores import Faulty, store_of

from torchrelay.checkpoint.format.position import Retirement
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.writer import tag_draft
from torchrelay.errors import DirectoryInUseError, FencedError

STARTERS = Path(__file__).resolve().parent.parent / "programs" / "starters.py"
PLACES = {"dict": MemoryStorage, "object store": lambda: store_of(Faulty())}


class Pausing:
    """A storage whose user is paused before the call number `at`: `meanwhile` runs then, once."""

    def __init__(self, storage):
        self.storage, self.at, self.calls, self.meanwhile, self.paused = storage, -1, 0, lambda: None, False

    def pause(self, at, meanwhile):
        self.at, self.meanwhile, self.calls = at, meanwhile, 0

    def __getattr__(self, name):
        found = getattr(self.storage, name)
        if not callable(found):
            return found

        def call(*args):
            if self.calls == self.at and not self.paused:
                self.paused = True
                self.meanwhile()
            self.calls += 1
            return found(*args)

        return call


def elsewhere(storage, name="elsewhere"):
    """A writer on another machine; it watches a counter that stands still for a moment."""
    log_writer._LIVE.clear()
    return take(
        storage, identity=replace(WriterIdentity.here("job"), host=name, boot_id=name), patience_secs=0.005
    )


def next_of(writer):
    """The entry that may follow on the writer's branch."""
    newest = writer.view.newest()
    epoch = 0 if newest is None else newest.position.epoch + 1
    return entry(epoch, branch=writer.view.current.id, nonce=f"{len(writer.identity.host):04x}{epoch:04x}")


ACTIONS = {
    "commit": lambda writer: writer.commit(next_of(writer)),
    "rewind": lambda writer: writer.rewind(entry(0).position, {"epoch": 0}),
    "retire": lambda writer: writer.retire([Retirement(entry(0).attempt_name)]),
    "tag": lambda writer: writer.append_draft(tag_draft("best", entry(0).key)),
    "release": lambda writer: writer.release(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_a_holder_that_is_paused_at_any_call(place, action):
    """Taken over before any of its calls, a writer had acted already, or is fenced and changed nothing."""
    outcomes = set()
    for at in itertools.count():
        storage = PLACES[place]()
        pausing = Pausing(storage)
        old = take(pausing)
        old.commit(entry(0))
        old.commit(entry(1))
        taken = []

        def meanwhile(storage=storage, taken=taken):
            other = elsewhere(storage)
            taken.extend(other.commit(next_of(other)).entries[-1:] for _ in range(3))
            taken.append(other)

        pausing.pause(at, meanwhile)
        try:
            ACTIONS[action](old)
            outcomes.add("acted")
        except FencedError as error:
            assert "elsewhere" in str(error)
            outcomes.add("fenced")
            with pytest.raises(FencedError):
                old.commit(entry(9))
        if not pausing.paused:
            break
        other = taken.pop()
        view = open_log(storage)
        assert view.generation == other.generation
        assert {one for (one,) in taken} <= set(view.entries)
        assert view.notices == ()
        assert other.commit(next_of(other)).notices == ()
    assert at > 3 and outcomes == {"acted", "fenced"}


@pytest.mark.parametrize("place", PLACES)
def test_a_commit_counts_for_whoever_was_told(place):
    """At whatever call a committing writer is paused, what it was told is saved is in the log for good."""
    for at in itertools.count():
        storage = PLACES[place]()
        pausing = Pausing(storage)
        old = take(pausing)
        old.commit(entry(0))
        wanted, others = next_of(old), []

        def meanwhile(storage=storage, others=others):
            others.append(elsewhere(storage))
            others[0].commit(next_of(others[0]))

        pausing.pause(at, meanwhile)
        try:
            old.commit(wanted)
            told = True
        except FencedError:
            told = False
        entries = open_log(storage).entries
        assert (wanted in entries) or not told
        assert told or len(entries) == 2
        if not pausing.paused:
            assert told
            return


@pytest.mark.parametrize("place", PLACES)
def test_two_starters_one_of_which_is_paused_at_any_call(place):
    """Whenever the second comes in, one of both can commit in the end, and the other is told."""
    for at in itertools.count():
        storage = PLACES[place]()
        pausing = Pausing(storage)
        others = []
        pausing.pause(at, lambda storage=storage, others=others: others.append(elsewhere(storage)))
        writers, refused = [], []
        try:
            writers.append(take(pausing))
        except DirectoryInUseError as error:
            refused.append(error)
        if not pausing.paused:
            return
        saved = []
        for number, writer in enumerate((*writers, *others)):
            try:
                saved.append(writer.commit(entry(0, nonce=f"{number:06x}")))
            except FencedError as error:
                refused.append(error)
        assert (len(saved), len(refused)) == (1, 1)
        assert open_log(storage).epochs() == (0,)
        for writer in (*writers, *others):
            writer.close()


@pytest.mark.parametrize("starters", [50])
def test_many_processes_start_at_once(starters, tmp_path):
    """Of fifty processes one gets the log and commits; all others name it in a DirectoryInUseError."""
    ended = subprocess.run(
        [sys.executable, str(STARTERS), str(tmp_path), str(starters)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    (winner,) = [one["pid"] for one in told if one["error"] is None]
    assert len(told) == starters
    for one in told:
        assert one["error"] is None or (one["kind"], f"pid {winner}," in one["error"]) == (
            "DirectoryInUseError",
            True,
        )
    view = open_log(log_writer_storage(tmp_path))
    assert (view.epochs(), view.slot, view.state.released, view.notices) == ((0,), 2, True, ())


def log_writer_storage(path):
    from torchrelay.checkpoint.storage.local import LocalStorage

    return LocalStorage(path)
