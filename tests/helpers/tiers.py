"""Near and far places in one process: small epochs, storages that stop by a schedule, what is in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from epochs import Writing, parameter, tensor, value

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import KEEP_ALL, Keeping
from torchrelay.checkpoint.log.tiered_storage import TierStorage, read_notes
from torchrelay.checkpoint.log.writer import WhenFenced, ignore_fencing
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.tiering.session_log import TierLedger
from torchrelay.errors import StorageError
from torchrelay.runners.session.local import LocalSession

WAIT_SECS = 60.0
CHANGES = {"open_exclusive", "link_exclusive", "replace", "mkdir", "sync_dir", "delete"}
CHANGES |= {"write_at", "sync_file"}  # of what is opened


class Scheduled:
    """A storage that calls `before(verb, number)` before every change, numbered from 1."""

    def __init__(self, inner: Any, before: Callable[[str, int], None]) -> None:
        self._inner, self._before = inner, before
        self._lock, self.calls = threading.Lock(), 0

    def _call(self, verb: str) -> None:
        with self._lock:
            self.calls += 1
            number = self.calls
        self._before(verb, number)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in CHANGES:
            return found

        def changed(*values: Any, **named: Any) -> Any:
            self._call(name)
            answer = found(*values, **named)
            return Scheduled(answer, lambda verb, _: self._call(verb)) if name == "open_exclusive" else answer

        return changed


class Gate:
    """A far place that stands still, from the moment it is closed, until it is opened."""

    def __init__(self, place: Path) -> None:
        self.open = threading.Event()
        self.open.set()
        self.storage = Scheduled(LocalStorage(place), self._before)

    def _before(self, verb: str, number: int) -> None:
        if threading.current_thread().name.startswith("torchrelay"):
            assert self.open.wait(WAIT_SECS)


class Away:
    """A far place that can be away."""

    def __init__(self, place: Path) -> None:
        self.away = False
        self.storage = Scheduled(LocalStorage(place), self._before)

    def _before(self, verb: str, number: int) -> None:
        if self.away and threading.current_thread().name.startswith("torchrelay"):
            raise StorageError("the far place is away")


class Places:
    """One start of a run with a near directory: takes both logs; `save` commits an epoch near."""

    def __init__(
        self,
        near: Path,
        far: Storage | Path,
        *,
        lag: int = 100,
        keeping: Keeping = KEEP_ALL,
        when_fenced: WhenFenced = ignore_fencing,
        **options: Any,
    ) -> None:
        place = LocalStorage(far) if isinstance(far, Path) else far
        self.peers = LocalSession(["trainer_0"]).peers
        self.tier = Tier(near, lag=lag, **options)
        self.storage = TierStorage(near, place)
        self.ledger = TierLedger(self.storage, self.tier, keeping, 0.0)
        self.ledger.job_name = "test"
        self.ledger.in_run, self.ledger.when_fenced = True, when_fenced
        self.look = self.ledger.look(self.peers)
        self.ledger.open(self.peers)

    def save(self, epoch: int, number: float, *, nodes: int = 2, step: int = 0) -> CommittedPosition:
        number = float(number)
        writing = Writing.__new__(Writing)
        writing.storage, writing.log, writing.manifests = self.storage, _AsLog(self.ledger), {}  # type: ignore[assignment]
        own = tensor("own", torch.full((5,), number))
        leaves = [parameter("model.weight", torch.full((64, 8), number)), own, value("total", number)]
        return writing.save(epoch, leaves, nodes, step=step, scopes={"own": "rank"})

    @property
    def replicator(self) -> Any:
        return self.ledger.replicator

    def replicate(self) -> None:
        """Return when all is replicated and noted: nothing is written near any more, until the next save."""
        assert self.replicator.wait(0, WAIT_SECS), self.replicator.take_failures()
        until(self._is_noted)

    def _is_noted(self) -> bool:
        notes = read_notes(self.storage.local)
        far = self.replicator._remote.view
        return notes is not None and {entry.attempt_name for entry in far.entries} <= notes.replicated

    def crash(self) -> None:
        """Let go of everything without a word, as a process that is gone; nothing more is sent."""
        self.replicator.stop()
        for writer in (self.ledger.writer, self.ledger._remote_writer):
            writer.close()

    def close(self) -> None:
        self.ledger.close()


class _AsLog:
    def __init__(self, ledger: TierLedger) -> None:
        self._ledger = ledger

    @property
    def view(self) -> Any:
        return self._ledger.view()

    @property
    def generation(self) -> int:
        return self._ledger.generation

    def commit(self, entry: CommittedPosition) -> None:
        self._ledger.commit(entry)


def numbers_in(place: Storage | Path) -> dict[str, float]:
    """What the epochs of the current line hold, each proved to its last byte from this place alone."""
    storage = LocalStorage(place) if isinstance(place, Path) else place
    found = {}
    for entry in open_log(storage, "test").line():
        proof = verify_epoch(storage, entry, level="full")
        assert proof.verified, proof.summary
        manifest, shards = proof.check()
        values = {
            torch.frombuffer(header.read(key), dtype=torch.float32)[0].item()
            for row in manifest.files
            for header in shards.open(row).headers
            for key in header.entries
        }
        assert len(values) == 1, f"a mixture: {values}"
        found[str(entry.position)] = values.pop()
    return found


def until(condition: Any) -> None:
    end = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
