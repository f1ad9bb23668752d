"""S7 and S9 through sessions and managers: limits with parallel instances, counters that are saved."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from torchrelay import (
    Counter,
    DatasetReader,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    ReaderWithLimit,
    Task,
    TaskGroup,
    Workspace,
    WorkspaceType,
    max_epochs,
)

PATIENCE_SECS = 30
LIMITS = [(None, 100, True), (0, 0, False), (10, 10, False), (110, 100, True)]


def read_in_session(
    reader: ReaderWithLimit, instances: int, kind: WorkspaceType = WorkspaceType.PRIVATE
) -> int:
    """The number of records that a task of so many instances reads in one run of a group."""
    read: list[object] = []
    group = TaskGroup(kind)

    def body(ws: Workspace) -> None:
        read.extend(reader.batches(ws))

    Task(body, num_instances=instances, task_init=reader.begin, group=group)
    LocalSession().run(group)
    return len(read)


@pytest.mark.parametrize("kind", list(WorkspaceType), ids=lambda kind: kind.value)
@pytest.mark.parametrize(("limit", "count", "finished"), LIMITS)
def test_s7_limits_in_a_session(limit: int | None, count: int, finished: bool, kind: WorkspaceType) -> None:
    """8 instances share one limit over 100 records, in PRIVATE and in GLOBAL workspaces."""
    reader = ReaderWithLimit(DatasetReader(list(range(100))), limit)
    assert read_in_session(reader, 8, kind) == count
    assert reader.found_end("trainer_0") is finished


def test_s7_time_limit_in_a_session() -> None:
    """4 instances, 0.25 s of a fake clock per read, 1 s, 50 records: 16 are read, the end is not found."""
    now = [0.0]

    def tick() -> None:
        now[0] += 0.25

    together = threading.Barrier(4, action=tick)
    source = DatasetReader(list(range(50)))

    class Slow:
        def read(self, ws: Workspace) -> object:
            together.wait(PATIENCE_SECS)
            return source.read(ws)

        def begin(self, ws: Workspace) -> None:
            source.begin(ws)

    reader = ReaderWithLimit(Slow(), seconds=1, clock=lambda: now[0])
    assert read_in_session(reader, 4) == 16
    assert not reader.found_end("trainer_0")


def test_s7_generous_time_limit_in_a_session() -> None:
    """With time enough all 50 records are read and the end is found."""
    reader = ReaderWithLimit(DatasetReader(list(range(50))), seconds=10_000)
    assert read_in_session(reader, 4) == 50
    assert reader.found_end("trainer_0")


def test_s9_a_counter_is_saved_and_loaded(tmp_path: Path) -> None:
    """Saved at 22, counted down 10 to 12, loaded back it is 22 again."""
    counter = Counter(22)
    job = Job(blobs={"counter": counter})
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    JobRunner(job, manager).train(session)
    for _ in range(10):
        counter.count_down()
    assert counter.value == 12
    session.run(manager.load(1))
    assert counter.value == 22
