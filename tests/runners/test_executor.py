"""Tasks of one node: order, hooks, instances, report steps, failures."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from torchrelay.errors import NotAllowedNowError, TaskFailedError, UsageError
from torchrelay.jobs.data.readers import DatasetReader, ReaderWithLimit
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.task import Counter, Task
from torchrelay.jobs.workspace import WorkspaceType
from torchrelay.runners.session.local import LocalSession

PATIENCE = 20.0


def run(group, session=None):
    session = session or LocalSession()
    session.run(group)
    return session


def test_s3_task_hooks_run_around_the_body_in_program_order():
    """All init blocks run before and all exit blocks after the whole body, each in their own order."""
    task = Task(
        [
            lambda ws: ws.update(two=ws["one"] + ws["one"]),
            lambda ws: ws.update(accum=ws["two"] + ws["three"]),
            lambda ws: ws.update(six=ws["accum"] + ws["one"]),
            lambda ws: ws.update(accum=ws["accum"] + ws["one"]),
            lambda ws: ws.update(seven_2=ws["accum"] + ws["one"]),
        ],
        outputs=["six", "seven_1", "seven_2"],
        task_init=[lambda ws: ws.update(one=1), lambda ws: ws.update(three=3)],
        task_exit=lambda ws: ws.update(seven_1=ws["accum"] + ws["one"]),
    )
    LocalSession().run(task)
    assert [output.fetch() for output in task.outputs] == [6, 7, 7]


@pytest.mark.parametrize("made_in", ["instance_init", "body"])
def test_s4_instances_share_what_task_init_made_and_nothing_else(made_in):
    """Ten instances of 15 turns: the shared counter has 150, each own counter 15, squared 10 * 225."""
    squares = Counter()
    lock = threading.Lock()

    def make(ws):
        ws["own"] = Counter()

    def body(ws):
        if made_in == "body":
            make(ws)
        for _ in range(15):
            ws["total"].count_up()
            ws["own"].count_up()

    def add_square(ws):
        with lock:
            squares.reset(squares.value + ws["own"].value ** 2)

    with TaskGroup(WorkspaceType.GLOBAL) as group:
        Task(
            body,
            num_instances=10,
            task_init=lambda ws: ws.update(total=Counter()),
            instance_init=make if made_in == "instance_init" else None,
            instance_exit=add_square,
        )
    session = run(group)
    assert (session.blob("total").value, squares.value) == (150, 2250)
    assert "own" not in session.workspace()


def test_s5_every_instance_constructs_its_own_stateful_step():
    """64 instances that loop four times: 64 constructions, 256 calls."""
    made, called = Counter(), Counter()

    class Stateful:
        def __init__(self):
            made.count_up()

        def __call__(self):
            called.count_up()

    def init(ws):
        ws["op"] = Stateful()

    LocalSession().run(Task(lambda ws: [ws["op"]() for _ in range(4)], instance_init=init, num_instances=64))
    assert (made.value, called.value) == (64, 256)


def test_s6_the_same_step_added_twice_runs_twice():
    """A step that is twice in one task counts from 0 to 2."""
    session = LocalSession()
    session.run(lambda ws: ws.update(n=0))

    def add(ws):
        ws["n"] += 1

    session.run(Task([add, add]))
    assert session.blob("n") == 2


@pytest.mark.parametrize(("limit", "instances", "expected"), [(25, (2, 3, 6), 25), (None, (8, 8, 8), 100)])
def test_s8_stages_in_threads_pass_on_all_that_the_limit_lets_through(limit, instances, expected):
    """Piped stages with several instances each process every record once; every instance exits once."""
    reader = ReaderWithLimit(DatasetReader(list(range(100))), num_iter=limit)
    first, second, done, exits = queue.Queue(), queue.Queue(), [], Counter()
    readers, middle, last = instances

    def read(ws):
        for batch in reader.batches(ws):
            first.put(batch)

    def move(ws):
        while (item := first.get(timeout=PATIENCE)) is not None:
            second.put(item)

    def finish(ws):
        while (item := second.get(timeout=PATIENCE)) is not None:
            done.append(item[0])

    def close(pipe, count):
        return lambda: [pipe.put(None) for _ in range(count)]

    with TaskGroup(WorkspaceType.PRIVATE) as group:
        Task(
            read,
            num_instances=readers,
            task_init=reader.begin,
            task_exit=close(first, middle),
            concurrent=True,
        )
        Task(move, num_instances=middle, task_exit=close(second, last), concurrent=True)
        Task(finish, num_instances=last, instance_exit=exits.count_up, concurrent=True)
    run(group)
    assert sorted(done) == list(range(expected))
    assert exits.value == last


def test_instances_begin_only_after_task_init_and_end_before_task_exit():
    """instance_init runs in all instances at once, after all of task_init; task_exit after all of them."""
    seen, meeting = [], threading.Barrier(3)

    def say(word):
        return lambda: seen.append(word)

    LocalSession().run(
        Task(
            say("body"),
            num_instances=3,
            task_init=[say("task_init"), say("task_init")],
            instance_init=[lambda: meeting.wait(PATIENCE), say("instance_init")],
            instance_exit=[lambda: meeting.wait(PATIENCE), say("instance_exit")],
            task_exit=say("task_exit"),
        )
    )
    assert seen[:2] == ["task_init"] * 2
    assert sorted(seen[2:-4]) == ["body"] * 3 + ["instance_init"] * 3
    assert seen[-4:] == ["instance_exit"] * 3 + ["task_exit"]


def test_tasks_of_a_node_run_in_the_order_of_their_declaration_with_local_hooks_around():
    """Local hooks run once per node and run, before the first and after the last task."""
    seen = []
    with TaskGroup() as group:
        Task(lambda: seen.append("a"))
        Task(lambda: seen.append("b"))
        group.local_exit(lambda: seen.append("exit"))
        group.local_init(lambda: seen.append("init"))
    session = run(group)
    session.run(group)
    assert seen == ["init", "a", "b", "exit"] * 2


def test_concurrent_tasks_overlap():
    """Two concurrent tasks and a plain one meet at one barrier."""
    meeting = threading.Barrier(3)
    with TaskGroup() as group:
        Task(lambda: meeting.wait(PATIENCE), concurrent=True)
        Task(lambda: meeting.wait(PATIENCE), concurrent=True)
        Task(lambda: meeting.wait(PATIENCE))
    run(group)
    assert not meeting.broken


def test_a_report_step_runs_meanwhile_and_once_more_after_everything():
    """The last report sees the end of all tasks, although an earlier report was under way at the end."""
    reporting, ended = threading.Event(), threading.Event()
    seen = []

    def report(ws):
        seen.append("done" in ws and ws["done"])  # the first report may come before the first task
        reporting.set()
        if len(seen) == 1:
            ended.wait(PATIENCE)  # still in this call when the task ends
            time.sleep(0.01)

    with TaskGroup() as group:
        Task(lambda ws: ws.update(done=False))
        Task(lambda: reporting.wait(PATIENCE))
        Task(lambda ws: (ws.update(done=True), ended.set()))
        group.report_step(report, interval=0.001)
    run(group)
    assert seen[0] is False
    assert seen[-1] is True


def test_a_report_step_with_a_long_interval_runs_once_at_the_end():
    """A group that is shorter than the interval still gets its one report, at once."""
    seen = []
    with TaskGroup() as group:
        Task(lambda ws: ws.update(x=1))
        group.report_step(lambda ws: seen.append(ws["x"]), interval=3600)
    began = time.monotonic()
    run(group)
    assert seen == [1]
    assert time.monotonic() - began < PATIENCE


def test_a_failed_step_names_node_task_and_step_and_keeps_its_cause():
    """TaskFailedError says who failed where; the user's exception and traceback are kept."""

    def divide():
        return 1 / 0

    with pytest.raises(TaskFailedError, match="step 'divide' of task 'arith' failed on trainer_0") as caught:
        LocalSession().run(Task(divide, name="arith"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "return 1 / 0" in caught.value.details
    assert "in invoke" not in caught.value.details
    assert "instances.py" not in caught.value.details


def test_a_failure_in_a_thread_ends_the_siblings_and_no_exit_hook_runs():
    """The first failure is raised; tasks that wait see ctx.cancelled, later ones do not start."""
    seen, waiting = [], threading.Event()

    def wait(ctx):
        waiting.set()
        while not ctx.cancelled:
            time.sleep(0.001)
        seen.append("told")

    def fail():
        waiting.wait(PATIENCE)
        raise RuntimeError("boom")

    with TaskGroup() as group:
        Task(wait, concurrent=True, task_exit=lambda: seen.append("never"))
        Task(fail, concurrent=True)
        Task(lambda ctx: [None for _ in ctx.steps(iter(int, 1))])  # endless
        Task(lambda: seen.append("never"))
        group.local_exit(lambda: seen.append("never"))
    threads = threading.active_count()
    with pytest.raises(TaskFailedError, match="boom"):
        run(group)
    assert seen == ["told"]
    assert threading.active_count() <= threads  # others' threads may end meanwhile


def test_a_failing_instance_ends_the_others():
    """Instances that wait for the one that failed end; its failure is the task's."""

    def body(ctx):
        if ctx.instance == 2:
            raise ValueError("two")
        while not ctx.cancelled:
            time.sleep(0.001)

    with pytest.raises(TaskFailedError, match="two"):
        LocalSession().run(Task(body, num_instances=4))


def test_a_failing_report_step_fails_the_group():
    """A report that raises is not called again, and its failure is the group's."""
    calls = Counter()

    def report():
        calls.count_up()
        raise RuntimeError("no report")

    def wait(ctx):
        while not ctx.cancelled:
            time.sleep(0.001)

    with TaskGroup() as group:
        Task(wait)
        group.report_step(report, interval=0.001)
    with pytest.raises(TaskFailedError, match="no report"):
        run(group)
    assert calls.value == 1


def test_an_interrupt_passes_and_ends_the_threads():
    """KeyboardInterrupt in the main thread is not swallowed or renamed; threads are joined."""
    threads = threading.active_count()

    def wait(ctx):
        while not ctx.cancelled:
            time.sleep(0.001)

    def interrupt():
        raise KeyboardInterrupt

    with TaskGroup() as group:
        Task(wait, concurrent=True)
        Task(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(group)
    assert threading.active_count() <= threads  # others' threads may end meanwhile


def test_errors_of_torchrelay_stay_what_they_are():
    """A mistake in the use of ctx is a UsageError, not a failed task."""
    with pytest.raises(UsageError, match="no metric 'x'"):
        LocalSession().run(lambda ctx: ctx.metric("x"))


def test_every_and_on_choose_tasks():
    """`every=n` runs in each n-th epoch, `on=` on the selected ranks, and their outputs say so."""
    seen = []
    group = TaskGroup()
    rare = Task(lambda ctx: seen.append((ctx.epoch, ctx.rank)), group=group, every=2, on="rank1")
    session = LocalSession(["a", "b"])
    for epoch in (1, 2, 3, 4):
        session.run_state.begin_epoch(epoch)
        session.run(group)
    assert seen == [(2, 1), (4, 1)]
    assert list(rare.result.fetch_all()) == ["b"]
    session.run_state.begin_epoch(5)
    session.run(group)
    with pytest.raises(NotAllowedNowError, match="selected no node"):
        rare.result.fetch()


def test_tasks_after_a_failure_run_without_the_others_and_their_failures_are_logged(caplog):
    """Only `on_failure` tasks run then; they know the exit code, and what they raise hides nothing."""
    seen = []
    group = TaskGroup(name="exit")
    Task(lambda ctx: seen.append(ctx.exit_code), group=group, on_failure=True)
    Task(lambda: 1 / 0, group=group, on_failure=True)
    Task(lambda: seen.append("not this"), group=group)
    LocalSession().run_on_failure(group, 6)
    assert seen == [6]
    assert "division by zero" in caplog.text
