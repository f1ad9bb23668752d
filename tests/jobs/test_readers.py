"""Readers: a saved position, limits per run, the end found only by an empty read."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.data.readers import DatasetReader, ReaderWithLimit
from torchrelay.jobs.job import Job
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import Workspace


class Ctx:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace


class Pipe:
    """A queue between stages that ends when all its writers have."""

    def __init__(self, writers: int) -> None:
        self._queue: queue.Queue = queue.Queue()
        self._writers, self._lock = writers, threading.Lock()

    def fill(self, items) -> None:
        for item in items:
            self._queue.put(item)
        with self._lock:
            self._writers -= 1
            if self._writers == 0:
                self._queue.put(None)

    def __iter__(self):
        while (item := self._queue.get(timeout=100)) is not None:
            yield item
        self._queue.put(None)  # for the next reader


def read_in_threads(reader: ReaderWithLimit, task: Workspace, threads: int) -> int:
    """Read as a task with instances does: each thread in a child of the task's workspace."""

    def count(_: int) -> int:
        return sum(len(batch) for batch in reader.batches(task.child()))

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(count, range(threads)))


def finished(reader: ReaderWithLimit, node: str = "trainer_0") -> bool:
    return reader.data_finished().ask(Ctx(Workspace(node))).stop


# DatasetReader


@pytest.mark.parametrize("data", [list(range(7)), torch.arange(7), tuple(range(7))])
def test_batches_follow_each_other(data):
    """Batches are consecutive slices, the last may be shorter, and after the end there is nothing."""
    reader, ws = DatasetReader(data, batch_size=3), Workspace().child()
    assert [list(map(int, batch)) for batch in reader.batches(ws)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert reader.read(ws) is None


def test_position_made_in_a_job_is_saved_state():
    """In a Job the init group makes the position on the current node, and private runs move it for good."""
    with Job() as job, Node("trainer_1"):
        reader = DatasetReader("data", batch_size=2)
    (task,) = job.init_group.tasks()
    assert task.node == "trainer_1"
    ws = Workspace("trainer_1")
    ws["data"] = torch.arange(10)
    task.steps[0](ws)
    for expected in ([0, 1], [2, 3]):
        assert reader.read(ws.child()).tolist() == expected
    assert ws["data_cursor"] == 4
    ws["data_cursor"] = 8  # what a load does
    assert reader.read(ws.child().child()).tolist() == [8, 9]


def test_a_reader_that_the_resumed_epoch_lacks_does_not_begin_anew_in_each_run():
    """In a Job the position outlives private runs also where neither init nor a load has made it."""
    with Job():
        reader = DatasetReader(list(range(4)))
    ws = Workspace()
    reader.begin(ws.child())
    assert [reader.read(ws.child().child()) for _ in range(2)] == [[0], [1]]
    assert ws["reader_cursor"] == 2


def test_position_made_by_a_run_vanishes_with_it():
    """Without a Job each private run reads from the beginning, its instances share one position."""
    reader, ws = DatasetReader(list(range(4)), batch_size=2), Workspace()
    for _ in range(2):
        run = ws.child()
        assert reader.read(run.child()) == [0, 1]
        assert reader.read(run.child()) == [2, 3]
    assert "reader_cursor" not in ws


def test_two_readers_of_one_name_in_a_job_are_refused():
    """Two readers of a node cannot share a position by accident; with names of their own they are apart."""
    with Job():
        DatasetReader("data")
        with pytest.raises(UsageError, match="name="):
            DatasetReader("data")
        DatasetReader("data", name="again")
        with Node("trainer_1"):
            DatasetReader("data")


@pytest.mark.parametrize(
    "bad", [lambda: DatasetReader(3), lambda: DatasetReader([1], 0), lambda: DatasetReader([1], True)]
)
def test_bad_readers_are_refused(bad):
    """What cannot be read, and batches of no size, are refused at once."""
    with pytest.raises(UsageError):
        bad()


# Limits


@pytest.mark.parametrize(
    ("limit", "read", "end"), [(None, 100, True), (0, 0, False), (10, 10, False), (110, 100, True)]
)
@pytest.mark.parametrize("threads", [1, 8])
def test_s7_limits_over_100_records(limit, read, end, threads):
    """S7: None reads all, 0 nothing, 10 stops before the end, 110 finds it; threads share the limit."""
    ws = Workspace()
    ws["reader_cursor"] = 0
    reader = ReaderWithLimit(DatasetReader(list(range(100))), limit)
    assert read_in_threads(reader, ws.child(), threads) == read
    assert finished(reader) is end


def test_s7_time_limit_on_a_fake_clock():
    """S7: 4 threads x 0.25 s per read x 1 s over 50 records read 16, and the end is not found."""
    now = [0.0]

    def tick() -> None:
        now[0] += 0.25

    everybody_reads = threading.Barrier(4, action=tick)
    source = DatasetReader(list(range(50)))

    class Slow:
        def read(self, ws: Workspace):
            everybody_reads.wait(timeout=100)
            return source.read(ws)

    reader = ReaderWithLimit(Slow(), seconds=1, clock=lambda: now[0])
    assert read_in_threads(reader, Workspace().child(), 4) == 16
    assert now == [1.0]
    assert not finished(reader)


@pytest.mark.parametrize("seconds", [10_000, 0, None])
def test_s7_generous_time_reads_everything(seconds):
    """S7: with time enough, or no limit, all 50 records are read and the end is found."""
    reader = ReaderWithLimit(DatasetReader(list(range(50))), seconds=seconds, clock=lambda: 1.0)
    assert read_in_threads(reader, Workspace().child(), 4) == 50
    assert finished(reader)


def test_s8_a_pipeline_behind_a_limit():
    """S8: 2 threads read at most 25 records, 3 pass them on and 6 process them: 25 arrive, 6 end."""
    reader, task = ReaderWithLimit(DatasetReader(list(range(100))), 25), Workspace().child()
    read, passed = Pipe(2), Pipe(3)
    processed, ended = [], []

    def process() -> None:
        processed.extend(passed)
        ended.append(1)

    stages = [
        *[lambda: read.fill(reader.batches(task.child()))] * 2,
        *[lambda: passed.fill(read)] * 3,
        *[process] * 6,
    ]
    with ThreadPoolExecutor(len(stages)) as pool:
        for stage in [pool.submit(stage) for stage in stages]:
            stage.result(timeout=100)
    assert sorted(processed) == [[number] for number in range(25)]
    assert len(ended) == 6


def test_limit_reached_at_the_end_needs_an_empty_run():
    """9 items by 3: three productive runs without finding the end, then an empty one that finds it."""
    ws = Workspace()
    ws["reader_cursor"] = 0
    reader = ReaderWithLimit(DatasetReader(list(range(9))), 3)
    runs = []
    for _ in range(4):
        runs.append((sum(1 for _ in reader.batches(ws.child())), finished(reader)))
    assert runs == [(3, False), (3, False), (3, False), (0, True)]


def test_toy_totals_of_the_ancestor():
    """The fixture of C1: totals 103, 115, 136, 145, and the fourth run finds the end."""
    ws = Workspace("trainer_0")
    with Job() as job, Node("trainer_0"):
        reader = ReaderWithLimit(DatasetReader("val"), num_iter=3)
        job.add_stop_condition(reader.data_finished())
    ws.update(val=torch.arange(10), total=torch.tensor([100]))
    job.init_group.tasks()[0].steps[0](ws)
    totals = []
    while not job.stop_conditions[0].ask(Ctx(ws)).stop:
        run = ws.child()
        for batch in reader.batches(run):
            run["total"] = run["total"] + batch
        totals.append(run["total"].item())
    assert totals == [103, 115, 136, 145]


def test_loops_in_a_global_workspace_are_runs():
    """In a workspace that outlives its runs each loop counts anew, also after one that was left early."""
    ws = Workspace()
    ws["reader_cursor"] = 0
    reader = ReaderWithLimit(DatasetReader(list(range(20))), 3)
    for batch in reader.batches(ws):
        assert batch == [0]
        break
    assert [batch[0] for batch in reader.batches(ws)] == [1, 2, 3]
    assert [reader.read(ws), reader.read(ws), reader.read(ws), reader.read(ws)] == [[4], [5], [6], None]
    assert reader.read(ws) == [7]


def test_task_init_begins_a_run_of_global_instances():
    """`task_init=reader.begin` lets the instances of a GLOBAL task share limit and position."""
    ws, reader = Workspace(), ReaderWithLimit(DatasetReader(list(range(100))), 10)
    Task(lambda ws: None, task_init=reader.begin, num_instances=8)
    for _ in range(2):
        reader.begin(ws)
        assert read_in_threads(reader, ws, 8) == 10
    assert ws["reader_cursor"] == 20


def test_nodes_read_and_finish_each_for_itself():
    """Emulated nodes share the reader and nothing else."""
    reader = ReaderWithLimit(DatasetReader("data"))
    short, long = Workspace("trainer_0"), Workspace("trainer_1")
    short["data"], long["data"] = [1], [1, 2, 3]
    assert [len(list(reader.batches(ws.child()))) for ws in (short, long)] == [1, 3]
    limited = ReaderWithLimit(DatasetReader("data"), 2)
    for ws in (short, long):
        list(limited.batches(ws.child()))
    assert (finished(limited, "trainer_0"), finished(limited, "trainer_1")) == (True, False)
    assert not finished(limited, "trainer_2")


@pytest.mark.parametrize(
    "options",
    [{"num_iter": -1}, {"num_iter": True}, {"num_iter": 1.5}, {"seconds": -1}, {"seconds": float("nan")}],
)
def test_bad_limits_are_refused(options):
    """Limits are checked when the reader is made."""
    with pytest.raises(UsageError, match=next(iter(options))):
        ReaderWithLimit(DatasetReader([1]), **options)
    with pytest.raises(UsageError, match="read"):
        ReaderWithLimit([1])
