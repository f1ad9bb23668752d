"""What one rank meets alone becomes everybody's error: nobody waits for a rank that is elsewhere."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paired_sessions
import pytest
import torch
from paired_sessions import Meeting, PairedPeers, PairedSession
from ranks import on_ranks
from torchrun import REPOSITORY, torchrun

from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, Task, max_epochs
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.manager import engine as engine_module
from torchrelay.checkpoint.save import agreement
from torchrelay.checkpoint.save import pipeline as save_module
from torchrelay.checkpoint.save.agreement import SpecExchange
from torchrelay.errors import BlobError, FencedError, RelayError, SaveFailedError, UsageError
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import warn
from torchrelay.runners.training import job_runner

RANKS = 2


class Free:
    """Stands for the lock of a process: every thread here is a process of its own."""

    def acquire(self, *, blocking: bool) -> bool:
        return True

    def release(self) -> None:
        pass


@pytest.fixture(autouse=True)
def threads_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread may train, and ranks that are out of step fail soon."""
    monkeypatch.setattr(job_runner, "_training", {os.getpid(): Free()})
    monkeypatch.setattr(paired_sessions, "PATIENCE", 5.0)


class Session(PairedSession):
    """A process played by a thread, with random states of its own."""

    def streams(self, node: str) -> RandomStreams:
        return RandomStreams.derive(0, self.peers.rank)

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        pass


def sessions() -> list[Session]:
    """Two processes."""
    meetings = Meeting(RANKS), Meeting(RANKS)
    return [Session(rank, [f"trainer_{r}" for r in range(RANKS)], meetings) for rank in range(RANKS)]


def counting(epochs: int = 3) -> Job:
    """A job that counts its epochs."""
    job = Job("count", blobs={"total": lambda ctx: torch.zeros(1)})
    job.epoch(lambda ctx: ctx["total"].add_(1))
    job.stop_when(max_epochs(epochs))
    return job


def on_rank(rank: int, broken: list[BaseException], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, which raises once, in the thread of one rank."""
    lock = threading.Lock()

    def work(*values: Any, **options: Any) -> Any:
        with lock:
            if threading.current_thread().name.endswith(f"rank {rank}") and broken:
                raise broken.pop()
        return real(*values, **options)

    return work


def all_ranks(work: Callable[[int], Any]) -> list[Any]:
    """Run in a thread per rank, named after it; a rank that hangs fails the test."""

    def named(rank: int) -> Any:
        threading.current_thread().name = f"rank {rank}"
        return work(rank)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(RANKS, named)


def test_replicas_that_one_rank_cannot_digest_fail_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the comparison on one rank is a save that failed on all; the next epoch is saved."""
    broken: list[BaseException] = [MemoryError("no memory for a digest")]
    monkeypatch.setattr(agreement, "digests_of", on_rank(1, broken, agreement.digests_of))
    both = sessions()
    manager = [MultiNodeCheckpointManager(tmp_path) for _ in both]
    results = all_ranks(lambda rank: JobRunner(counting(), manager[rank]).train(both[rank]))
    assert not broken
    assert results == [3, 3]
    assert [one.committed for one in results] == [3, 3]


def test_leaves_that_one_rank_cannot_list_fail_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that raises has nothing to compare; all count the same failure and go on together."""
    broken: list[BaseException] = [BlobError("no such leaf")]
    monkeypatch.setattr(engine_module, "capture", on_rank(1, broken, engine_module.capture))
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path) for _ in both]

    def run(rank: int) -> Any:
        with pytest.raises(BlobError, match="no such leaf"):
            both[rank].run(managers[rank].save(1))
        both[rank].run(managers[rank].save(2))
        return managers[rank].engine.ledger.view().epochs()

    for rank, session in enumerate(both):
        session.workspace(f"trainer_{rank}")["total"] = torch.zeros(1)
    assert [tuple(one) for one in all_ranks(run)] == [(2,), (2,)]
    assert not broken


def test_ranks_that_ask_for_different_epochs_are_named(tmp_path: Path) -> None:
    """Nobody's epoch wins in silence: all ranks end, and nothing is rewound."""
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path) for _ in both]
    all_ranks(lambda rank: JobRunner(counting(), managers[rank]).train(both[rank]))

    def run(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            JobRunner(counting(5), managers[rank]).train(both[rank], resume_from_epoch=1 + rank)
        return str(caught.value)

    for text in all_ranks(run):
        assert "rank 0: 1, resume='auto'; rank 1: 2, resume='auto'" in text
    assert tuple(managers[0].engine.ledger.view().epochs()) == (0, 1, 2, 3)


def test_a_rank_whose_plan_differs_is_named_and_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of different versions would write other bytes than the manifest says."""
    plan = SpecExchange.plan

    def other(self: SpecExchange, *about: Any) -> Any:
        found = plan(self, *about)
        return replace(found, hash="other") if threading.current_thread().name == "rank 1" else found

    monkeypatch.setattr(SpecExchange, "plan", other)
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path) for _ in both]

    def run(rank: int) -> Any:
        both[rank].workspace(f"trainer_{rank}")["total"] = torch.zeros(1)
        with pytest.raises(SaveFailedError, match="the plan of rank 1 differs"):
            both[rank].run(managers[rank].save(1))
        return managers[rank].engine.ledger.view().epochs()

    assert [tuple(one) for one in all_ranks(run)] == [(), ()]


def test_a_rank_that_reports_no_shard_fails_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest lists exactly the files of the plan, or is not written."""
    write_node = save_module._write_node

    def silent(*about: Any) -> Any:
        report = write_node(*about)
        return replace(report, shards=()) if report.rank == 1 else report

    monkeypatch.setattr(save_module, "_write_node", silent)
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path) for _ in both]

    def run(rank: int) -> Any:
        both[rank].workspace(f"trainer_{rank}")["total"] = torch.zeros(1)
        with pytest.raises(SaveFailedError, match=r"do not match the plan: trainer_1 \(main\)"):
            both[rank].run(managers[rank].save(1))
        return managers[rank].engine.ledger.view().epochs()

    assert [tuple(one) for one in all_ranks(run)] == [(), ()]


def test_a_save_like_the_last_one_meets_twice_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas and leaves, without reuse; where all bytes are due once more, and for a plan that is new."""
    topics: dict[int, list[str]] = {0: [], 1: []}
    exchange = PairedPeers.exchange

    def counted(self: PairedPeers, topic: str, value: Any, **options: Any) -> Any:
        topics[self.rank].append(topic)
        return exchange(self, topic, value, **options)

    monkeypatch.setattr(PairedPeers, "exchange", counted)
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path, reuse=False) for _ in both]

    def saved(epoch: int) -> list[str]:
        before = len(topics[0])
        all_ranks(lambda rank: both[rank].run(managers[rank].save(epoch)))
        assert topics[0] == topics[1]
        return [one for one in topics[0][before:] if one.startswith("save: ")]

    def put(value: torch.Tensor, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            both[rank].workspace(f"trainer_{rank}")["total"] = value.clone()

    writing = ["save: try", "save: write", "save: commit"]
    put(torch.zeros(1))
    whole = [*writing[:2], "save: all bytes of replicas", *writing[2:]]
    assert saved(1) == ["save: replicas", "save: leaves", "save: plan", *whole]
    put(torch.ones(1))
    assert saved(2) == ["save: replicas", "save: leaves", *writing]
    put(torch.ones(2))
    assert saved(3) == ["save: replicas", "save: leaves", "save: plan", *writing]
    put(torch.zeros(2))
    assert saved(4) == ["save: replicas", "save: leaves", *writing]


def test_a_manifest_that_one_rank_cannot_read_fails_a_partial_load_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error on one rank at a manifest is raised by all, and the ranks are in step after it."""
    both = sessions()
    runners = [JobRunner(counting(), MultiNodeCheckpointManager(tmp_path)) for _ in both]
    all_ranks(lambda rank: runners[rank].train(both[rank]))
    broken: list[BaseException] = [OSError(5, "Input/output error")]
    monkeypatch.setattr(codec, "read", on_rank(1, broken, codec.read))

    def load(rank: int) -> Any:
        return runners[rank].load_blobs_from_checkpoints(["total"], 2, both[rank])

    assert all(isinstance(one, (RelayError, OSError)) for one in all_ranks(load))
    assert not broken
    assert all_ranks(load) == [True, True]


def test_an_upload_that_one_rank_cannot_build_fails_on_all(tmp_path: Path) -> None:
    """A builder that raises on one rank is a failure of the run on all ranks."""

    class Upload:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def build(self, epoch: int, manager: Any) -> Task:
            if self.rank == 1:
                raise ValueError("no address")
            return Task(lambda: None)

    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path) for _ in both]
    results = all_ranks(
        lambda rank: JobRunner(counting(), managers[rank], upload_task_group_builder=Upload(rank)).train(
            both[rank]
        )
    )
    assert all("no address" in str(one) for one in results)


def test_a_writer_that_is_fenced_at_its_retention_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone looks after old epochs; what it learns of another job there ends all ranks."""
    broken: list[BaseException] = [FencedError("taken over")]
    monkeypatch.setattr(LogWriter, "retire", on_rank(0, broken, LogWriter.retire))
    both = sessions()
    managers = [MultiNodeCheckpointManager(tmp_path, keep_last=1) for _ in both]
    results = all_ranks(lambda rank: JobRunner(counting(), managers[rank]).train(both[rank]))
    assert [type(one) for one in results] == [FencedError, FencedError]


@pytest.mark.parametrize("where", ["setup", "init", "factory", "condition"])
def test_what_one_rank_raises_all_raise(tmp_path: Path, where: str) -> None:
    """A setup, init, factory or stop condition that raises on one rank fails the run on all."""

    def fail(rank: int) -> Any:
        if rank == 1:
            raise ValueError("odd")
        return torch.zeros(1)

    def job(rank: int) -> Job:
        made = counting()
        if where in ("setup", "init"):
            getattr(made, where)(lambda ctx: fail(rank) and None)
        elif where == "factory":
            made.blobs(other=lambda ctx: fail(rank))
        else:
            made.stop_when(lambda ctx: bool(fail(rank)))
        return made

    both = sessions()
    results = all_ranks(lambda rank: JobRunner(job(rank), tmp_path / "run").train(both[rank]))
    assert all("odd" in str(one) for one in results)


@pytest.mark.ranks
@pytest.mark.timeout(150)
def test_warnings_made_errors_and_a_state_that_one_rank_lacks_leave_the_ranks_in_step(tmp_path: Path) -> None:
    """On 2 real ranks none of our warnings is raised; a failing `state_dict` costs all ranks that epoch."""
    program = REPOSITORY / "tests/programs/one_rank_warns.py"
    done = torchrun(program, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=100)
    assert done.rc == 0, str(done)
    for rank in range(RANKS):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {
            "warned": ["FINISHED", [0, 1, 2]],
            "broken": ["FINISHED", [0, 1, 3]],
            "broken behind": ["FINISHED", [0, 1, 3]],
        }
    for text in (
        "differs between nodes",
        "appeared on trainer_1",
        "no leaf matches",
        "epoch 2 was NOT saved",
    ):
        assert text in done.out + done.err


def test_a_warning_that_is_made_an_error_is_raised_by_a_process_that_is_alone() -> None:
    """Nobody waits for it there, so the program has its way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="odd"):
            warn("odd")
