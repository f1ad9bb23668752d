"""Crashes of uploads at every step, and histories at random: the far place has whole epochs, none is lost."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
from tiers import WAIT_SECS, Away, Places, Scheduled, numbers_in, until

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.tiered_storage import PATH, read_notes
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_killed_at_every_step_of_the_upload(near: Path, far: Path, tmp_path: Path) -> None:
    """After kill -9 at any change of the far place it has whole epochs only; the next start completes it."""
    places = Places(near, far)
    places.save(0, 0)
    places.replicate()
    places.crash()
    steps = 0
    for number in range(1, 200):
        now = tmp_path / f"{number}"
        shutil.copytree(near, now / "near")
        shutil.copytree(far, now / "far")
        if not _killed_at(number, now / "near", now / "far"):
            break
        steps = number
        before = numbers_in(now / "far")
        assert before in ({"0": 0}, {"0": 0, "1": 1})
        again = Places(now / "near", now / "far")
        assert again.look.position in (Position(0), Position(1))  # the kill may come before the save near
        again.replicate()
        again.close()
        assert numbers_in(now / "far") == numbers_in(now / "near")
        assert set(before.items()) <= set(numbers_in(now / "far").items())
        shutil.rmtree(now)
    assert steps > 15, steps


def test_goes_on_where_it_was_cut_off(near: Path, far: Path) -> None:
    """What is noted as sent, and lies there, is not sent again."""
    written: list[str] = []

    def stop(verb: str, number: int) -> None:
        if verb == "sync_file":
            written.append(verb)
            if len(written) >= 2:  # it is tried again
                raise StorageError("cut off")

    places = Places(near, Scheduled(LocalStorage(far), lambda verb, number: None), uploads=1)  # type: ignore[arg-type]
    places.storage.remote._before = stop
    places.save(0, 0)
    until(lambda: places.replicator._failures)
    places.crash()
    notes = read_notes(LocalStorage(near))
    assert notes is not None and len(notes.sent) == 1
    first = far / next(iter(notes.sent))
    stamp = first.stat().st_ino
    again = Places(near, far)
    again.replicate()
    again.close()
    assert first.stat().st_ino == stamp and numbers_in(far) == {"0": 0}


def test_a_lost_note_costs_a_second_sending_only(near: Path, far: Path) -> None:
    """Without tier.json, or with nonsense in it, the far place is as right as with it."""
    for epoch, nonsense in enumerate([None, b"", b"{}", b'{"tier":{},"sha256":"0"}']):
        places = Places(near, far)
        places.save(epoch, epoch)
        places.replicate()
        places.close()
        (near / PATH).unlink()
        if nonsense is not None:
            (near / PATH).write_bytes(nonsense)
    assert numbers_in(far) == numbers_in(near) == {str(epoch): epoch for epoch in range(4)}


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    """Whatever happens in whatever order: no mixture, and what is replicated outlives all near disks."""
    rng = random.Random(seed)
    far, number = tmp_path / "far", 0.0
    promised: dict[str, float] = {}
    saved: dict[str, float] = {}
    for turn in range(12):
        near = tmp_path / rng.choice(["a", "a", "b"])
        if rng.random() < 0.25:
            shutil.rmtree(near, ignore_errors=True)
        down = Away(far)
        places = _begun(near, down)
        line = {str(entry.position): entry.attempt_name for entry in places.ledger.view().line()}
        assert all(line.get(position) in saved for position in line)
        assert set(promised) <= set(line), "a replicated epoch is lost"
        assert all(saved[line[position]] == promised[position] for position in promised)
        for _ in range(rng.randrange(5)):
            number += 1
            epochs = places.ledger.view().epochs()
            kind = rng.choice(["save", "save", "save", "rewind", "away", "replicate"])
            if kind == "rewind" and len(epochs) > 1 and not down.away:
                base = rng.choice(epochs)
                places.ledger.rewind(places.peers, Position(base), {"turn": turn, "number": number})
                promised = {key: one for key, one in promised.items() if int(key) <= base}
                places.replicate()
            elif kind == "away":
                down.away = not down.away
            elif kind == "replicate" and not down.away:
                places.replicate()
            else:
                entry = places.save(epochs[-1] + 1 if epochs else 0, number)
                saved[entry.attempt_name] = number
        if rng.random() < 0.5 and not down.away:
            places.replicate()
        far_line = open_log(LocalStorage(far), "test").line()
        promised = {str(entry.position): saved[entry.attempt_name] for entry in far_line}
        places.close() if rng.random() < 0.5 else places.crash()
        there = numbers_in(far)
        assert all(there[position] == one for position, one in promised.items())


def _begun(near: Path, down: Away) -> Places:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Places(near, down.storage)  # type: ignore[arg-type]


def _killed_at(number: int, near: Path, far: Path) -> bool:
    """Save and replicate an epoch in a process that kills itself at this change of the far place."""
    child = os.fork()
    if child == 0:
        gc.disable()  # what other tests left may end threads, which are not here
        try:

            def before(verb: str, count: int) -> None:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            places = Places(near, Scheduled(LocalStorage(far), before), uploads=2)  # type: ignore[arg-type]
            places.save(1, 1)
            places.replicate()
            places.crash()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + WAIT_SECS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the upload hangs")
        time.sleep(0.002)
    assert status in (0, signal.SIGKILL), f"ended by itself: {status}"
    return os.WIFSIGNALED(status)


def test_a_file_that_was_lost_and_cut_off_is_sent_again(near: Path, far: Path) -> None:
    """A note of a sent file is gone before that file is made anew: one of its size may be half of it."""
    gates, writes = {"sync_dir"}, list[str]()

    def stop(verb: str, number: int) -> None:
        if verb == "write_at" and "data" in gates:
            writes.append(verb)
        if verb in gates or len(writes) > 1:
            raise StorageError("cut off")

    scheduled = Scheduled(LocalStorage(far), stop)
    places = Places(near, LocalStorage(far), uploads=1)
    places.storage.remote = scheduled  # type: ignore[assignment]
    places.replicator._remote.storage = scheduled
    entry = places.save(0, 7)
    until(lambda: places.replicator._failures)
    places.crash()
    notes = read_notes(LocalStorage(near))
    lost = [path for path in notes.sent if path.endswith(".safetensors")] if notes is not None else []
    assert len(lost) == 2
    for path in lost:
        (far / path).unlink()  # the power fails, and their names were not durable yet
    gates = {"data"}
    again = Places(near, scheduled, uploads=1)  # type: ignore[arg-type]
    until(lambda: len(writes) > 1 and again.replicator._failures)
    again.crash()
    assert sum((far / path).exists() for path in lost) == 1
    last = Places(near, far)
    last.replicate()
    last.close()
    assert numbers_in(far) == {"0": 7} and entry.position == Position(0)


@pytest.mark.parametrize("ending", [".safetensors", "/manifest.json"])
def test_what_the_far_place_damages_is_sent_again(near: Path, far: Path, ending: str) -> None:
    """A file that was sent whole and is damaged there before its epoch is named is sent anew."""
    gates = {"sync_dir"}

    def stop(verb: str, number: int) -> None:
        if verb in gates:
            raise StorageError("cut off")

    scheduled = Scheduled(LocalStorage(far), stop)
    places = Places(near, LocalStorage(far))
    places.storage.remote = scheduled  # type: ignore[assignment]
    places.replicator._remote.storage = scheduled
    places.save(0, 7)
    until(lambda: places.replicator._failures)
    places.crash()
    notes = read_notes(LocalStorage(near))
    sent = [path for path in (notes.sent if notes is not None else ()) if path.endswith(ending)]
    damaged = bytearray((far / sent[0]).read_bytes())
    damaged[20] ^= 1
    (far / sent[0]).write_bytes(damaged)
    again = Places(near, far)
    again.replicate()
    assert any("does not have what was sent" in text for text in again.replicator.take_failures())
    again.close()
    assert numbers_in(far) == {"0": 7}
