"""All bytes of replicas are hashed beside the write of a save that waits, and compared before its commit."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_in
from paired_sessions import PairedPeers, PairedSession, paired_sessions
from ranks import on_ranks

from torchrelay import MultiNodeCheckpointManager
from torchrelay.checkpoint.save import pipeline as save_module
from torchrelay.checkpoint.save import replicas
from torchrelay.checkpoint.save.staging import StagedCopies
from torchrelay.checkpoint.storage import work as workers
from torchrelay.checkpoint.storage.work import beside
from torchrelay.errors import SaveFailedError, StorageError
from torchrelay.jobs.blobs import Blob
from torchrelay.jobs.random import RandomStreams

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


def _full(job: Any, plan: Any, name: str, state: Any, before: Any) -> Any:
    raise StorageError("no space left") from OSError(errno.ENOSPC, "no space left")


class Run:
    """Ranks that save epochs to one directory; a save gives what each of them met."""

    def __init__(self, folder: Path, every: tuple[int | None, ...] = (None,) * RANKS) -> None:
        self.folder = folder
        self.ranks = [
            Replica(one.peers.rank, [f"trainer_{rank}" for rank in range(RANKS)], meetings)
            for one, meetings in ((one, (one.peers._meeting, one._flags)) for one in paired_sessions(RANKS))
        ]
        self.managers = [MultiNodeCheckpointManager(folder, reuse=False, compare_every=one) for one in every]

    def rank_of(self, leaf: Any) -> int:
        """Whose leaf this is."""
        held = [{one.data_ptr() for one in rank.layer.parameters()} for rank in self.ranks]
        return next(rank for rank, some in enumerate(held) if leaf.content.data_ptr() in some)

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
    begun = {rank: threading.Barrier(2) for rank in range(RANKS)}
    writers: dict[int, str] = {}
    write, hash_one, hashing = save_module._write_node, replicas._hash_one, set[int]()

    def written(job: Any, plan: Any, name: str, state: Any, before: Any) -> Any:
        writers[state.rank] = threading.current_thread().name
        begun[state.rank].wait(20.0)
        return write(job, plan, name, state, before)

    def hashed(name: str, left: Any, digests: Any) -> None:
        rank = run.rank_of(left[name])
        if rank not in hashing:
            hashing.add(rank)
            begun[rank].wait(20.0)
        hash_one(name, left, digests)

    monkeypatch.setattr(save_module, "_write_node", written)
    monkeypatch.setattr(replicas, "_hash_one", hashed)
    run.save(1)
    assert run.epochs == [1] and hashing == set(range(RANKS))
    assert "torchrelay-hash" not in writers.values(), "who calls save writes, and hears of Ctrl-C"


def test_what_nobody_hashed_is_hashed_before_it_is_compared(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison never takes what it has not looked at for alike."""
    run.ranks[1].element.add_(1)
    monkeypatch.setattr(replicas.WholeBytes, "each_left", _nothing_once(replicas.WholeBytes.each_left))
    told = run.save(1)
    assert all("model.weight differs on trainer_1" in str(one) for one in told), told
    assert run.epochs == []


def _nothing_once(each_left: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """As if there were nothing left, the first time that each object is asked."""
    asked: set[int] = set()

    def nothing(whole: Any) -> Iterator[Any]:
        first = id(whole) not in asked
        asked.add(id(whole))
        return iter(()) if first else each_left(whole)

    return nothing


def test_what_hashing_meets_on_one_rank_fails_the_save_of_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hear of it, nothing is committed or left, and the next save goes well."""
    broken: list[BaseException] = [MemoryError("no memory for a digest")]
    hash_one = replicas._hash_one

    def hashed(name: str, left: Any, digests: Any) -> None:
        if run.rank_of(left[name]) == 1 and broken:
            raise broken.pop()
        hash_one(name, left, digests)

    monkeypatch.setattr(replicas, "_hash_one", hashed)
    told = run.save(1)
    assert not broken
    assert all("no memory for a digest" in str(one) for one in told), told
    assert (run.epochs, run.tries) == ([], [])
    run.save(2)
    assert run.epochs == [2]


def test_a_comparison_that_a_failed_save_left_out_is_made_by_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are due at epoch 10, whose write fails: epoch 11 compares them, epoch 12 samples again."""
    run.save(1)
    run.ranks[1].element.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(save_module, "_write_node", _full)
        assert all("no space left" in str(one) for one in run.save(10))
    assert all("model.weight differs on trainer_1" in str(one) for one in run.save(11))
    run.save(12)
    assert run.epochs == [1, 12]


def test_a_write_while_all_bytes_are_hashed_is_named_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous save says what one rank wrote too early, and not that replicas differ."""
    run = Run(tmp_path)
    run.managers = [MultiNodeCheckpointManager(tmp_path, asynchronous=True) for _ in range(RANKS)]
    for number, rank in enumerate(run.ranks):
        optimizer = torch.optim.SGD(rank.layer.parameters())
        rank.workspace(f"trainer_{number}").register(Blob("optimizer", optimizer), optimizer)
    copy, weight = StagedCopies.copy, run.ranks[1].layer.weight.data

    def written(stage: StagedCopies, also: Callable[[], None]) -> None:
        if stage.late[0].source.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            weight.add_(1)
        copy(stage, also)

    monkeypatch.setattr(StagedCopies, "copy", written)
    monkeypatch.setattr(PairedPeers, "apart", lambda peers: peers, raising=False)  # only the thread sends
    for manager in run.managers:
        manager.engine.ledger.in_run = True  # else a save returns when it is committed
    assert run.save(1) == [None] * RANKS
    for manager in run.managers:
        (outcome,) = manager.settle()
        assert "changed while being copied in the background" in str(outcome.error)


def test_all_bytes_are_compared_where_any_rank_asks_for_it(tmp_path: Path) -> None:
    """One rank compares every 5 epochs, one every 10: at epoch 5 both do, and are in step after it."""
    run = Run(tmp_path, every=(10, 5))
    run.save(1)
    run.ranks[1].element.add_(1)
    assert all("model.weight differs on trainer_1" in str(one) for one in run.save(5))
    run.ranks[1].element.sub_(1)
    run.save(6)
    assert run.epochs == [1, 6]


def test_a_failed_write_is_told_and_not_the_hashing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full nobody goes on to compare: all ranks hear of the disk."""
    monkeypatch.setattr(save_module, "_write_node", _full)
    told = run.save(1)
    assert all("no space left" in str(one) for one in told), told
    assert (run.epochs, run.tries) == ([], [])


@pytest.fixture(params=["a thread", "no thread"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a second thread, and in a process that gets no more of them."""
    if request.param == "no thread":

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(workers._Helper, "start", start)
    yield


def _beside(work: Callable[[], Any], others: list[Callable[[], object]]) -> Any:
    return beside(work, others, name="beside")


def test_all_is_done_and_one_is_answered(threads: None) -> None:
    """The work is done by the caller, its answer comes back, and the other things are done by then, once."""
    done: list[int] = []
    others = [lambda one=one: done.append(one) for one in range(20)]
    assert _beside(threading.get_ident, others) == threading.get_ident()
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("fails", ["other", "work"])
def test_what_either_raises_is_raised(threads: None, fails: str) -> None:
    """Whichever of the two failed."""

    def one(name: str) -> None:
        if name == fails:
            raise ValueError(name)

    with pytest.raises(ValueError, match=fails):
        _beside(lambda: one("work"), [lambda: one("other")])


def test_an_interrupt_waits_for_the_thing_that_a_helper_is_at() -> None:
    """Ctrl-C in the caller, which waits for a helper: it is raised when that has ended what it was at."""
    at_it, let_go, done = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        at_it.set()
        assert let_go.wait(20.0)
        done.append(1)

    with interrupted_in("_ended", at_it, let_go.set):
        with pytest.raises(KeyboardInterrupt):
            _beside(lambda: at_it.wait(20.0), [slow])
        assert done == [1]
