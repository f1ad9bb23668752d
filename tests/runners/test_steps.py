"""ctx.steps: counted, ended early by limits and requests, ended together by all processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_sessions import paired_sessions
from ranks import on_ranks
from torch.utils.data import DataLoader

from torchrelay.errors import TaskFailedError, UsageError
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.task import Task
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import GRACE_SECS, Interrupted, Requests


def on_processes(size, work):
    """Run `work(ctx)` in the only task of an epoch of each process; the sessions and the results."""
    sessions = paired_sessions(size)
    results = on_ranks(size, lambda rank: work(sessions[rank].context()))
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        raise failed[0]
    return sessions, results


def epoch_of(state=None, nodes=None):
    session = LocalSession(nodes)
    session.run_state = state or RunState()
    session.run_state.begin_epoch(1)
    return session


def ask_to_stop(ctx, reason):
    """As a STOP file does: the running epoch ends at the next step that all agree upon."""
    state = ctx.session.run_state
    state.requests = Requests()
    state.requests.stop(reason)


def test_steps_are_counted_from_one_and_epochs_start_anew():
    """ctx.step is the step being run, ctx.total_steps goes on over epochs, init does not count."""
    session = LocalSession()
    seen = []

    def step(ctx):
        seen.extend((ctx.epoch, ctx.step, ctx.total_steps) for _ in ctx.steps(range(2)))

    session.run(step)
    for epoch in (1, 2):
        session.run_state.begin_epoch(epoch)
        session.run(step)
    assert seen == [(0, 1, 1), (0, 2, 2), (1, 1, 1), (1, 2, 2), (2, 1, 3), (2, 2, 4)]


def test_several_loops_of_an_epoch_add_up_and_evaluation_does_not_count():
    """Two counted loops are one count; count=False leaves it alone."""
    session = epoch_of()

    def step(ctx):
        list(ctx.steps("abc"))
        assert list(ctx.steps("xyz", count=False)) == ["x", "y", "z"]
        list(ctx.steps("d"))
        return ctx.step

    assert session.run(step).fetch() == 4


def test_a_loop_that_is_left_by_break_has_counted_the_step_it_was_in():
    """Break after the second batch: two steps."""
    session = epoch_of()

    def step(ctx):
        for batch in ctx.steps(range(10)):
            if batch == 1:
                break
        return ctx.step

    assert session.run(step).fetch() == 2


def test_the_limit_on_steps_is_a_total_and_ends_the_running_epoch():
    """limit_steps=5 with 3 steps per epoch ends the second epoch after 2; evaluation still runs whole."""
    session = epoch_of(RunState(limit_steps=5))

    def step(ctx):
        return len(list(ctx.steps(range(3)))), len(list(ctx.steps(range(4), count=False)))

    assert session.run(step).fetch() == (3, 4)
    session.run_state.begin_epoch(2)
    assert session.run(step).fetch() == (2, 4)
    assert session.run_state.ended_early == "the limit of 5 steps is reached"
    session.run_state.begin_epoch(3)
    assert session.run(step).fetch() == (0, 4)


def test_the_limit_on_time_counts_earlier_attempts_and_ends_at_the_next_step():
    """With 90 s used before and 10 s per step, a limit of 120 s ends the epoch after the third step."""
    now = [1000.0]
    state = RunState(limit_secs=120, elapsed_before_secs=90, clock=lambda: now[0])
    session = epoch_of(state)

    def step(ctx):
        for _ in ctx.steps(range(100)):
            now[0] += 10
        return ctx.step

    assert session.run(step).fetch() == 3
    assert "time limit of 120" in state.ended_early


def test_emulated_nodes_end_an_epoch_at_the_same_step():
    """A stop that the first node meets at step 3 ends the second at step 3 too."""
    session = epoch_of(nodes=["a", "b"])

    def step(ctx):
        for _ in ctx.steps(range(10)):
            if ctx.node == "a" and ctx.step == 3:
                ask_to_stop(ctx, "enough")
        return ctx.step

    assert session.run(step).fetch_all() == {"a": 3, "b": 3}
    assert session.run_state.ended_early == "enough"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=3))
def test_uneven_loaders_end_together_with_the_shortest(lengths):
    """All processes take as many steps as the shortest loader has batches, each its own batches."""
    _, results = on_processes(len(lengths), lambda ctx: list(ctx.steps(range(lengths[ctx.rank]))))
    assert results == [list(range(min(lengths)))] * len(lengths)


def test_surplus_batches_are_dropped_and_said_once(caplog):
    """The process with more batches says so in the first epoch and never again."""

    def work(ctx):
        for epoch in (1, 2):
            ctx.session.run_state.begin_epoch(epoch)
            list(ctx.steps(range(2 + ctx.rank)))

    on_processes(2, work)
    assert [record.args for record in caplog.records] == [("trainer_1",)]


@pytest.mark.parametrize("make", [lambda n: range(n), lambda n: EpochLoader(torch.arange(2 * n), 2, seed=0)])
def test_a_stop_request_of_one_process_ends_all_at_one_step(make):
    """Asked during step 3 of rank 1, both end after step 4: the agreement overlaps with a step."""

    def work(ctx):
        loader = make(8)
        if isinstance(loader, EpochLoader):
            loader.placed(ctx.rank, 2)
        for _ in ctx.steps(loader):
            if ctx.rank == 1 and ctx.step == 3:
                ask_to_stop(ctx, "SIGTERM")
        return ctx.step

    sessions, results = on_processes(2, work)
    assert results == [4, 4]
    assert [s.run_state.ended_early for s in sessions] == ["another process asked to stop", "SIGTERM"]


def test_an_even_loader_is_asked_about_only_every_agree_every_steps():
    """20 steps with agree_every=5 post 4 agreements, and a stop is met at the next of them."""

    def work(ctx):
        ctx.session.run_state = RunState(agree_every=5)
        ctx.session.run_state.begin_epoch(1)
        loader = EpochLoader(torch.arange(40), 2, seed=0).placed(ctx.rank, 2)
        whole, posted = len(list(ctx.steps(loader))), ctx.session.posted
        ctx.session.run_state.begin_epoch(2)
        for _ in ctx.steps(loader):
            if ctx.rank == 0 and ctx.step == 2:
                ask_to_stop(ctx, "enough")
        return whole, posted, ctx.step, loader.samples_done

    _, results = on_processes(2, work)
    assert results == [(20, 4, 6, 12)] * 2


def test_a_limit_ends_an_epoch_loader_where_its_position_says():
    """A loop that a limit ends after 3 of 5 steps leaves samples_done at 3 steps; the next takes the rest."""
    session = epoch_of(RunState(limit_steps=3))
    loader = EpochLoader(torch.arange(10), 2, seed=0)
    seen = session.run(lambda ctx: [batch.indices.tolist() for batch in ctx.steps(loader)]).fetch()
    assert (len(seen), loader.samples_done) == (3, 6)
    session.run_state = RunState()
    seen += session.run(lambda ctx: [batch.indices.tolist() for batch in ctx.steps(loader)]).fetch()
    assert sorted(index for indices in seen for index in indices) == list(range(10))


def test_emulated_nodes_share_the_steps_of_an_epoch_loader():
    """Each node's loader gives its share; together every sample is seen once."""
    session = epoch_of(nodes=["a", "b"])
    loaders = {"a": EpochLoader(torch.arange(9), 4, seed=0), "b": EpochLoader(torch.arange(9), 4, seed=0)}

    def step(ctx):
        return [i for batch in ctx.steps(loaders[ctx.node]) for i in batch.indices.tolist()]

    shares = session.run(step).fetch_all()
    assert sorted(shares["a"] + shares["b"]) == list(range(9))


def test_concurrent_tasks_do_not_count_steps():
    """One loop counts; another thread's is refused with the remedy, its evaluation form is legal."""
    session = LocalSession()
    with pytest.raises(UsageError, match="count=False"):
        session.run(Task(lambda ctx: list(ctx.steps([1])), concurrent=True))
    task = Task(lambda ctx: list(ctx.steps([1, 2], count=False)), concurrent=True)
    session.run(task)
    assert task.result.fetch() == [1, 2]


def test_a_sampler_is_told_the_epoch():
    """A DistributedSampler behind a loader shuffles differently in each epoch."""
    data = torch.arange(16)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    session = LocalSession()
    seen = []
    for epoch in (1, 2):
        session.run_state.begin_epoch(epoch)
        session.run(lambda ctx: seen.extend(tuple(batch.tolist()) for batch in ctx.steps(loader)))
    assert seen[0] != seen[1]
    assert sampler.epoch == 1


def test_what_lies_deeper_in_a_loader_is_told_the_epoch():
    """A DistributedSampler in a batch sampler, and IterableDatasets in each other, shuffle for the epoch."""

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, dataset=None):
            self.dataset, self.told = dataset, []

        def set_epoch(self, epoch):
            self.told.append(epoch)

        def __iter__(self):
            return iter(range(2))

    sampler = torch.utils.data.DistributedSampler(range(4), 1, 0)
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    inner = Stream()
    loaders = [DataLoader(range(4), batch_sampler=batches), DataLoader(Stream(inner))]
    session = epoch_of()
    session.run_state.begin_epoch(3)
    for loader in loaders:
        session.run(lambda ctx, loader=loader: list(ctx.steps(loader)))
    assert (sampler.epoch, loaders[1].dataset.told, inner.told) == (2, [2], [2])


def test_persistent_workers_are_warned_of_once(caplog):
    """Their random states are in no checkpoint, so a resume gives another order; said at the first loop."""
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    session = epoch_of()
    for _ in range(2):
        session.run(lambda ctx: list(ctx.steps(loader)))
    assert sum("persistent_workers=True" in one.getMessage() for one in caplog.records) == 1


def test_a_failure_inside_a_step_of_the_loop_is_the_task_s():
    """What the loop's body raises is named as any other failure."""

    def train(ctx):
        for batch in ctx.steps([1, 0]):
            1 / batch

    with pytest.raises(TaskFailedError, match=r"'train'.*division by zero"):
        LocalSession().run(train)


def test_agree_every_below_one_is_refused():
    """It counts steps."""
    with pytest.raises(UsageError, match="invalid agree_every=0"):
        RunState(agree_every=0)


LOADERS = {
    "an EpochLoader": lambda: EpochLoader(torch.arange(20), 2, seed=0),
    "a sequence": lambda: list(range(10)),
    "an iterator": lambda: iter(range(10)),
}


@pytest.mark.parametrize("made", LOADERS.values(), ids=LOADERS)
def test_windows_end_after_so_many_batches_and_with_the_loader(made):
    """10 batches in windows of 4: the 4th, the 8th and the last one close a window; else every batch does."""
    session = epoch_of()
    seen = session.run(lambda ctx: [ctx.step for _ in ctx.steps(made(), accumulate=4) if ctx.window_end])
    assert seen.fetch() == [4, 8, 10]
    session.run_state.begin_epoch(2)
    seen = session.run(lambda ctx: [ctx.step for _ in ctx.steps(made()) if ctx.window_end])
    assert seen.fetch() == list(range(1, 11))


def test_a_limit_on_steps_closes_the_window():
    """The limit of 6 steps is met exactly, and the program is told that no batch follows."""
    session = epoch_of(RunState(limit_steps=6))
    seen = session.run(lambda ctx: [ctx.step for _ in ctx.steps(range(10), accumulate=4) if ctx.window_end])
    assert seen.fetch() == [4, 6]


@pytest.mark.parametrize("made", LOADERS.values(), ids=LOADERS)
def test_a_stop_waits_for_the_end_of_the_window(made):
    """Asked for in the second of four batches, it ends the loop after the fourth, on one process or two."""

    def work(ctx):
        for _ in ctx.steps(made(), accumulate=4):
            if ctx.rank == 0 and ctx.step == 2:
                ask_to_stop(ctx, "enough")
        return ctx.step

    assert epoch_of().run(work).fetch() == 4
    assert on_processes(2, work)[1] == [4, 4]


def test_windows_and_agree_every_ask_at_ends_of_windows():
    """With agree_every=3 and windows of 2 all are asked at the ends of windows, at least 3 steps apart."""

    def work(ctx):
        ctx.session.run_state = RunState(agree_every=3)
        ctx.session.run_state.begin_epoch(1)
        loader = EpochLoader(torch.arange(40), 2, seed=0).placed(ctx.rank, 2)
        for _ in ctx.steps(loader, accumulate=2):
            if ctx.rank == 0 and ctx.step == 3:
                ask_to_stop(ctx, "enough")
        return ctx.step

    assert on_processes(2, work)[1] == [6, 6]


@pytest.mark.parametrize(("secs_left", "ends"), [(60.0, 4), (3.0, 2)])
def test_a_preemption_waits_for_the_window_where_there_is_time(secs_left, ends):
    """Too little time for a save after the window: all leave at once, and the open window is saved."""
    state = RunState()
    now = [0.0]
    state.requests = Requests(clock=lambda: now[0])
    session = epoch_of(state)
    reached = []

    def work(ctx):
        for _ in ctx.steps(range(10), accumulate=4):
            reached.append(ctx.step)
            if ctx.step == 2:
                state.requests.preempt("SIGTERM")
                now[0] = GRACE_SECS - secs_left if secs_left < GRACE_SECS else 0.0

    with pytest.raises(Interrupted):
        session.run(work)
    assert reached[-1] == ends


@pytest.mark.parametrize("given", [0, 1.5, True, "4"])
def test_a_window_is_a_number_of_batches(given):
    """Anything else is refused, and so is a window of steps that do not count."""
    session = epoch_of()
    with pytest.raises(UsageError, match="invalid accumulate"):
        session.run(lambda ctx: list(ctx.steps(range(4), accumulate=given)))
    with pytest.raises(UsageError, match="count=False"):
        session.run(lambda ctx: list(ctx.steps(range(4), count=False, accumulate=2)))
