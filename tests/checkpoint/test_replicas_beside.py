"""All bytes of replicas are hashed beside the write of a save that waits, and compared before its commit."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paired_sessions import PairedSession, paired_sessions
from ranks import on_ranks

from torchrelay import MultiNodeCheckpointManager
from torchrelay.checkpoint import save as save_module
from torchrelay.checkpoint.disk import workers
from torchrelay.checkpoint.disk.workers import beside
from torchrelay.checkpoint.replicas import WholeBytes
from torchrelay.errors import SaveFailedError, StorageError
from torchrelay.jobs.blobs import Blob
from torchrelay.jobs.random_streams import RandomStreams

RANKS = 2
BETWEEN = 100_000
"""An element of the weight that no sample meets."""


class Replica(PairedSession):
    """A process played by a thread, with a layer that all should have alike."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.layer = torch.nn.Linear(512, 1024)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(1.0)
        self.workspace(f"trainer_{self.peers.rank}").register(Blob("model", self.layer), self.layer)

    @property
    def element(self) -> torch.Tensor:
        """A view of what no sample meets."""
        return self.layer.weight.data.view(-1)[BETWEEN : BETWEEN + 1]

    def streams(self, node: str) -> RandomStreams:
        return RandomStreams.derive(0, self.peers.rank)


class Run:
    """Ranks that save epochs to one directory; a save gives what each of them met."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = [
            Replica(one.peers.rank, [f"trainer_{rank}" for rank in range(RANKS)], meetings)
            for one, meetings in ((one, (one.peers._meeting, one._flags)) for one in paired_sessions(RANKS))
        ]
        self.managers = [MultiNodeCheckpointManager(folder, reuse=False) for _ in self.ranks]

    def save(self, epoch: int) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return on_ranks(RANKS, lambda rank: self.ranks[rank].run(self.managers[rank].save(epoch)))

    @property
    def epochs(self) -> list[int]:
        return list(self.managers[0].engine.ledger.view().epochs())

    @property
    def tries(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_difference_between_the_samples_keeps_a_first_save_from_being_committed(run: Run) -> None:
    """All ranks name leaf and node, the try's space is given back, and the next save compares all again."""
    run.ranks[1].element.add_(1)
    for epoch in (1, 2):
        told = run.save(epoch)
        assert [type(one) for one in told] == [SaveFailedError] * RANKS, told
        assert all("model.weight differs on trainer_1" in str(one) for one in told), told
        assert (run.epochs, run.tries) == ([], [])
    run.ranks[1].element.sub_(1)
    run.save(3)
    assert run.epochs == [3]
    run.ranks[1].element.add_(1)
    run.save(4)
    assert run.epochs == [3, 4], "samples are compared between comparisons of all bytes"


def test_all_bytes_are_hashed_beside_the_write(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of the two waits for the other to have begun: one after the other they would not end."""
    begun = {kind: threading.Barrier(2) for kind in range(RANKS)}
    write, hash_rest = save_module._write_node, WholeBytes.hash_rest

    def meet(kind: int) -> None:
        begun[kind].wait(20.0)

    def written(job: Any, plan: Any, name: str, state: Any, before: Any) -> Any:
        meet(state.rank)
        return write(job, plan, name, state, before)

    def hashed(self: WholeBytes) -> None:
        (rank,) = self._left
        meet(rank)
        hash_rest(self)

    monkeypatch.setattr(save_module, "_write_node", written)
    monkeypatch.setattr(WholeBytes, "hash_rest", hashed)
    run.save(1)
    assert run.epochs == [1]


def test_what_hashing_meets_on_one_rank_fails_the_save_of_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hear of it, nothing is committed or left, and the next save goes well."""
    broken: list[BaseException] = [MemoryError("no memory for a digest")]
    hash_rest = WholeBytes.hash_rest

    def hashed(self: WholeBytes) -> None:
        if 1 in self._left and broken:
            raise broken.pop()
        hash_rest(self)

    monkeypatch.setattr(WholeBytes, "hash_rest", hashed)
    told = run.save(1)
    assert not broken
    assert all("no memory for a digest" in str(one) for one in told), told
    assert (run.epochs, run.tries) == ([], [])
    run.save(2)
    assert run.epochs == [2]


def test_a_failed_write_is_told_and_not_the_hashing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full nobody goes on to compare: all ranks hear of the disk."""

    def full(job: Any, plan: Any, name: str, state: Any, before: Any) -> Any:
        raise StorageError("no space left") from OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(save_module, "_write_node", full)
    told = run.save(1)
    assert all("no space left" in str(one) for one in told), told
    assert (run.epochs, run.tries) == ([], [])


@pytest.fixture(params=["a thread", "no thread"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a second thread, and in a process that gets no more of them."""
    if request.param == "no thread":

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(workers.threading.Thread, "start", start)
    yield


def test_both_are_done_and_one_is_answered(threads: None) -> None:
    """The work's answer comes back; the other thing is done by then."""
    done: list[str] = []
    assert beside(lambda: done.append("other"), lambda: done.append("work") or 7) == 7
    assert sorted(done) == ["other", "work"]


@pytest.mark.parametrize("fails", ["other", "work"])
def test_what_either_raises_is_raised(threads: None, fails: str) -> None:
    """Whichever of the two failed."""

    def one(name: str) -> None:
        if name == fails:
            raise ValueError(name)

    with pytest.raises(ValueError, match=fails):
        beside(lambda: one("other"), lambda: one("work"))
