"""Two hosts with a near directory each, in one process: a thread per host, real ledgers, small epochs.

An epoch has a file of each host's node; what `save` writes is put where that host would have written it.
"""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from epochs import Writing, parameter, tensor, value
from paired_sessions import Meeting, PairedPeers
from tiers import WAIT_SECS, until

from torchrelay.checkpoint.coordinator.retention import Retaining
from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.retention import KEEP_ALL, Keeping
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.tiering.multi_host import HostsLedger


class NearPlaces:
    """One start: `nears` in the order of ranks; node `trainer_<n>` belongs to the n-th of `nodes`."""

    def __init__(
        self,
        nears: Sequence[Path],
        far: Storage | Path,
        *,
        nodes: Sequence[Path] | None = None,
        keeping: Keeping = KEEP_ALL,
        lag: int = 100,
        opened: bool = True,
        **options: Any,
    ) -> None:
        # As in other processes, whose predecessors are gone.
        log_writer._LIVE = weakref.WeakValueDictionary()
        self.nears, self.nodes = list(nears), list(nodes or nears)
        self.meeting, self.told = Meeting(len(nears)), list[str]()
        place = LocalStorage(far) if isinstance(far, Path) else far
        self.ledgers = [
            HostsLedger(TierStorage(near, place), Tier(near, lag=lag, **options), keeping, 0.0)
            for near in nears
        ]
        self.retaining = [Retaining(ledger, keeping) for ledger in self.ledgers]
        for ledger in self.ledgers:
            ledger.job_name, ledger.in_run = "test", True
        self.look = self.all(lambda ledger, peers: ledger.look(peers))[0]
        if opened:
            self.all(lambda ledger, peers: ledger.open(peers))

    def all(self, work: Callable[[HostsLedger, Any], Any]) -> list[Any]:
        """Every rank's answer; raises what they raise alike."""
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> None:
            peers = PairedPeers(rank, len(self.ledgers), self.meeting)
            try:
                answers[rank] = work(self.ledgers[rank], peers)
            except BaseException as error:
                errors[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"host {rank}")
            for rank in range(len(self.ledgers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECS)
        if errors:
            self.stop()
            raise errors[min(errors)]
        return [answers[rank] for rank in range(len(self.ledgers))]

    @property
    def first(self) -> HostsLedger:
        return self.ledgers[0]

    def save(self, epoch: int, number: float) -> CommittedPosition:
        """Commit an epoch; each host's node has its file there."""
        self.all(lambda ledger, peers: ledger.wait_for_room(peers))
        writing = Writing.__new__(Writing)
        writing.storage, writing.log, writing.manifests = self.first.storage, _AsLog(self), {}  # type: ignore[assignment]
        own = tensor("own", torch.full((5,), float(number)))
        leaves = [parameter("model.weight", torch.full((64, 8), float(number))), own, value("total", number)]
        entry = writing.save(epoch, leaves, len(self.nodes), scopes={"own": "rank"})
        self.all(lambda ledger, peers: self.retaining[peers.rank].now(peers))
        return entry

    def scatter(self, entry: CommittedPosition) -> None:
        """Put the files of a try that was written at rank 0's place where their hosts have them."""
        there = self.nears[0] / "data" / entry.attempt_name
        for number, near in enumerate(self.nodes):
            if near != self.nears[0]:
                target = near / "data" / entry.attempt_name
                target.mkdir(parents=True, exist_ok=True)
                for file in there.glob(f"trainer_{number}.*"):
                    shutil.move(file, target / file.name)

    def replicate(self) -> None:
        """Return when all is replicated."""
        until(lambda: self.first.replicator is not None and self.first.replicator.wait(0, 0.01))

    def newest(self) -> Position:
        """The newest epoch that is proved by all."""
        return self.all(lambda ledger, peers: ledger.newest(peers, self.told.append))[0].position

    def stop(self) -> None:
        """As processes that are killed: nothing more is sent or written."""
        for ledger in self.ledgers:
            for one in (ledger._sender, ledger.replicator):
                if one is not None:
                    one.stop()
            for writer in (ledger.writer, ledger._remote_writer):
                if writer is not None:
                    writer.close()

    def close(self) -> None:
        self.all(lambda ledger, peers: ledger.close())


class _AsLog:
    def __init__(self, places: NearPlaces) -> None:
        self._places = places

    @property
    def view(self) -> Any:
        return self._places.first.view()

    @property
    def generation(self) -> int:
        return self._places.first.generation

    def commit(self, entry: CommittedPosition) -> None:
        self._places.scatter(entry)
        self._places.first.commit(entry)
        for ledger in self._places.ledgers:
            ledger._committed(entry)


def damage(near: Path, attempt_name: str) -> Path:
    """Flip a bit of the only shard that a host has of a try."""
    (shard,) = (near / "data" / attempt_name).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard
