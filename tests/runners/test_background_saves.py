"""Asynchronous saves as the run sees them: one in flight, told at the next boundary, drained at the end."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served import wait_until
from tear_job import Trainee, torn, train
from torchrun import REPOSITORY, Job, script_file

from torchrelay import (
    CheckpointManager,
    JobRunner,
    MultiNodeCheckpointManager,
    UploadTaskGroupBuilder,
    max_epochs,
    open_checkpoint,
)
from torchrelay import Job as RelayJob
from torchrelay.checkpoint.save import background
from torchrelay.checkpoint.save import pipeline as saving
from torchrelay.checkpoint.save.background import Background
from torchrelay.checkpoint.save.staging import Copier
from torchrelay.errors import SaveFailedError, StorageError, UsageError
from torchrelay.jobs import runtime
from torchrelay.jobs.job import TaskGroup
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.training.journal import Journal, SaveWarning


class Handler:
    """Notes what it is told, with the thread that tells it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.threads: set[threading.Thread] = set()

    def _note(self, what: str, detail: Any) -> None:
        self.told.append((what, detail))
        self.threads.add(threading.current_thread())

    def set_params(self, **params: Any) -> None:
        """Nothing to know."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        return user_epoch

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True

    def write(self, epoch: int) -> None:
        self._note("write", epoch)

    def report(self, action: str, stats: Any) -> None:
        self._note("report", dict(stats.nodes[0].secs))


def small_job(epochs: int, note: Callable[[int], None] = lambda epoch: None) -> RelayJob:
    job = RelayJob("small", blobs={"weights": torch.zeros(4)})

    @job.epoch
    def work(ctx: Any) -> None:
        note(ctx.epoch)
        ctx["weights"] = torch.full((4,), float(ctx.epoch))

    job.stop_when(max_epochs(epochs))
    return job


def failing_commits(monkeypatch: pytest.MonkeyPatch, epochs: set[int]) -> list[int]:
    """Make the commits of these epochs fail in the background; returns those that did."""
    failed: list[int] = []
    commit = saving.commit

    def fail(job: Any, *rest: Any) -> None:
        if job.position.epoch in epochs:
            failed.append(job.position.epoch)
            raise StorageError("the disk is full")
        commit(job, *rest)

    monkeypatch.setattr(saving, "commit", fail)
    return failed


def test_the_handler_is_told_on_the_main_thread_in_order(tmp_path: Path) -> None:
    """Writes and reports come at the boundary after the commit, every phase of a save in the report."""
    handler = Handler()
    seen: list[int] = []

    def note(epoch: int) -> None:
        seen.append(len([1 for what, _ in handler.told if what == "write"]))

    manager = MultiNodeCheckpointManager(tmp_path, handler, asynchronous=True)
    assert JobRunner(small_job(3, note), manager).train() == 3
    assert [detail for what, detail in handler.told if what == "write"] == [0, 1, 2, 3]
    assert seen == [0, 1, 2], "an epoch is told at the first boundary after it"
    assert handler.threads == {threading.main_thread()}
    phases = [set(detail) for what, detail in handler.told if what == "report"]
    assert phases == [{"plan", "stage", "hash", "write", "fsync", "commit"}] * 4


def test_a_save_goes_on_when_the_boundary_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread does not share the interpreter with the boundary, and does not wait any longer than that."""
    monkeypatch.setattr(runtime, "MOST_SECS", 60.0)
    begun: list[threading.Event] = []
    outcome, done = background._Flight._outcome, Journal.epoch_done

    def begin(flight: Any) -> Any:
        begun[-1].set()
        return outcome(flight)

    def noted(*values: Any) -> None:
        held.append(not begun[-1].wait(0.1))
        done(*values)

    def note(epoch: int) -> None:
        if begun:
            assert begun[-1].wait(30), "the epoch has begun, the save before it has not"
        begun.append(threading.Event())

    held: list[bool] = []
    monkeypatch.setattr(background._Flight, "_outcome", begin)
    monkeypatch.setattr(Journal, "epoch_done", noted)
    job = small_job(3, note)
    assert JobRunner(job, tmp_path / "run", save_initial=False, asynchronous=True).train() == 3
    assert held == [True] * 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_behind_a_save_in_flight_an_epoch_is_noted_by_the_thread_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Readers find it in the next epoch; of the status the content is synced, never the name."""
    noting, synced, noted = threading.local(), [], []
    note_epoch, fsync = Journal._note_epoch, os.fsync

    def note(self: Journal, *given: Any, **how: Any) -> None:
        noted.append(threading.current_thread() is threading.main_thread())
        noting.now = True
        try:
            note_epoch(self, *given, **how)
        finally:
            noting.now = False

    def sync(descriptor: int) -> None:
        if getattr(noting, "now", False):
            synced.append(Path(f"/proc/self/fd/{descriptor}").is_dir())
        fsync(descriptor)

    monkeypatch.setattr(Journal, "_note_epoch", note)
    monkeypatch.setattr(os, "fsync", sync)
    run = RunDirectory(tmp_path / "run")
    job = small_job(3, lambda epoch: wait_until(lambda: epoch == 1 or run.status()["epoch"] == epoch - 1))
    assert JobRunner(job, run.path, asynchronous=asynchronous).train() == 3
    assert noted == [not asynchronous] * 3
    assert synced.count(False) >= 3 and not any(synced)
    assert run.status()["state"] == "FINISHED"


def test_an_epoch_is_noted_before_its_save_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the process then: of an epoch that a later start goes on from the metrics are there."""
    run, commit, lines = RunDirectory(tmp_path / "run"), saving.commit, []

    def look(*given: Any) -> Any:
        lines.append([line["epoch"] for line in run.metrics()])
        return commit(*given)

    monkeypatch.setattr(saving, "commit", look)
    runner = JobRunner(small_job(3), run.path, save_initial=False, asynchronous=True)
    assert runner.train() == 3
    assert lines == [[1], [1, 2], [1, 2, 3]]


def test_a_note_that_cannot_be_written_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a warning as ever."""
    run = RunDirectory(tmp_path / "run")

    def refuse(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(RunDirectory, "log_metrics", refuse)
    runner = JobRunner(small_job(2), run.path, save_initial=False, asynchronous=True)
    with pytest.warns(SaveWarning, match="could not be written: the disk is full"):
        assert runner.train() == 2
    assert open_checkpoint(run.path).position.epoch == 2


def test_a_warning_that_is_an_error_holds_nobody_at_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors such a note fails its save, at the next boundary as ever."""
    log_metrics = RunDirectory.log_metrics

    def refuse(run: RunDirectory, generation: int, line: Any) -> None:
        if line["epoch"] == 2:
            raise StorageError("the disk is full")
        log_metrics(run, generation, line)

    monkeypatch.setattr(RunDirectory, "log_metrics", refuse)
    with warnings.catch_warnings(), pytest.raises(SaveWarning, match=r"2 was NOT saved .*the disk is full"):
        warnings.simplefilter("error", SaveWarning)
        train(tmp_path / "run", 4, asynchronous=True)
    assert open_checkpoint(tmp_path / "run").position.epoch == 1


def test_a_failure_is_counted_at_the_next_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch that could not be committed warns one epoch later; the run and later saves go on."""
    failed = failing_commits(monkeypatch, {1})
    said: list[tuple[int, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = JobRunner(
            small_job(3, lambda epoch: said.extend((epoch, str(one.message)) for one in caught)),
            tmp_path / "run",
            asynchronous=True,
        ).train()
    assert failed == [1]
    assert result.committed == 3
    assert [epoch for epoch, text in said if "epoch 1 was NOT saved" in text] == [3]
    assert open_checkpoint(tmp_path / "run", epoch=2).value is not None
    with pytest.raises(Exception, match="no epoch"):
        open_checkpoint(tmp_path / "run", epoch=1)


@pytest.mark.parametrize("limit", [None, 0])
def test_what_retention_gave_up_is_gone_before_the_next_epoch_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """With `keep_last=1` there is room for two epochs, also where nothing is staged."""
    there: list[list[str]] = []
    check_room = saving.check_room

    def look(*args: Any) -> None:
        there.append(sorted(one.name for one in (tmp_path / "checkpoints" / "data").iterdir()))
        check_room(*args)

    monkeypatch.setattr(saving, "check_room", look)
    manager = MultiNodeCheckpointManager(
        tmp_path / "checkpoints", asynchronous=True, keep_last=1, staging_limit=limit
    )
    assert JobRunner(small_job(4), manager).train() == 4
    assert [len(names) for names in there] == [0, 1, 1, 1, 1]


def test_too_many_failures_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three background saves that fail in a row are as bad as three others, the last one included."""
    failing_commits(monkeypatch, {1, 2, 3})
    runner = JobRunner(small_job(3), tmp_path / "run", asynchronous=True)
    with pytest.warns(UserWarning, match="NOT saved"), pytest.raises(SaveFailedError, match="3 saves failed"):
        runner.train()


def test_one_position_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save waits for the one before, and nothing of a run is in flight when it has ended."""
    running: list[int] = []
    most: list[int] = []
    write = saving._write_all

    def counted(*given: Any) -> Any:
        running.append(1)
        most.append(len(running))
        try:
            return write(*given)
        finally:
            running.pop()

    monkeypatch.setattr(saving, "_write_all", counted)
    before = set(threading.enumerate())  # managers that other tests left stand by until they are collected
    train(tmp_path / "run", 5, asynchronous=True)
    assert most == [1] * 6
    own = (background.SAVES, background.STANDS_BY)
    assert not [one for one in set(threading.enumerate()) - before if one.name in own]


def test_the_upload_finds_the_last_epoch_committed(tmp_path: Path) -> None:
    """Saves are drained before upload, download and exit."""
    found: list[int] = []

    class Upload(UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
            found.append(open_checkpoint(tmp_path / "run").position.epoch)
            return TaskGroup()

    JobRunner(small_job(2), tmp_path / "run", None, Upload(), asynchronous=True).train()
    assert found == [2]


def test_a_failing_task_drains_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch that was in flight when the next one failed is committed before the error is raised."""
    write = saving._write_node
    slow = threading.Event()
    monkeypatch.setattr(saving, "_write_node", lambda *given: (slow.wait(0.1), write(*given))[1])

    def fail(epoch: int) -> None:
        if epoch == 2:
            raise RuntimeError("out of luck")

    with pytest.raises(Exception, match="out of luck"):
        JobRunner(small_job(3, fail), tmp_path / "run", asynchronous=True).train()
    assert open_checkpoint(tmp_path / "run").position.epoch == 1
    assert JobRunner(small_job(3), tmp_path / "run", asynchronous=True).train() == 3


def test_a_write_behind_the_gate_fails_the_save_and_makes_its_blob_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes parameters without the gate is named; from then on that blob is copied in time."""
    begun: list[frozenset[str]] = []
    begin, copy_late, written = Background.begin, Copier.copy_late, threading.Event()

    def noted(self: Background, *given: Any) -> None:
        self.wait()
        begun.append(frozenset(self.blocking))
        begin(self, *given)

    def after_the_write(*given: Any) -> None:
        if len(begun) == 3:  # epochs 0, 1, 2
            assert written.wait(30)
        copy_late(*given)

    monkeypatch.setattr(Background, "begin", noted)
    monkeypatch.setattr(Copier, "copy_late", after_the_write)
    spoiled: list[int] = []

    def spoil(ctx: Any, trainee: Trainee) -> None:
        if ctx.epoch == 3 and not spoiled:
            spoiled.append(ctx.epoch)
            trainee.model[3].weight.data.mul_(1.5)
            written.set()

    with pytest.warns(UserWarning, match=r"'model\.3\.weight' changed while being copied"):
        truth = train(tmp_path / "run", 5, asynchronous=True, before_step=spoil)
    assert spoiled == [3]
    assert begun == [frozenset()] * 3 + [frozenset({"model"})] * 3
    with pytest.raises(Exception, match="no epoch"):
        open_checkpoint(tmp_path / "run", epoch=2)
    assert [epoch for epoch in (1, 3, 4, 5) if torn(tmp_path / "run", epoch, truth[epoch])] == []


def test_before_mutation_makes_such_a_write_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same write after ctx.before_mutation() neither fails nor tears."""
    copy_late = Copier.copy_late
    slow = threading.Event()

    def slowly(*given: Any) -> None:
        slow.wait(0.1)
        copy_late(*given)

    monkeypatch.setattr(Copier, "copy_late", slowly)

    def change(ctx: Any, trainee: Trainee) -> None:
        ctx.before_mutation()
        trainee.model[3].weight.data.mul_(1.5)

    truth = train(tmp_path / "run", 3, asynchronous=True, before_step=change)
    assert [epoch for epoch in truth if torn(tmp_path / "run", epoch, truth[epoch])] == []


@pytest.mark.parametrize(
    ("option", "value"), [("asynchronous", 1), ("staging_limit", -1), ("verify_staging", "some")]
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, option: str, value: Any) -> None:
    """Each names itself; and those of a run directory are no options beside a manager."""
    with pytest.raises(UsageError, match=option):
        CheckpointManager(tmp_path, "trainer_0", **{option: value})
    with pytest.raises(UsageError, match=f"{option} needs a run directory"):
        JobRunner(RelayJob(), MultiNodeCheckpointManager(tmp_path), **{option: value})


def test_a_staging_limit_without_asynchronous_saves_is_refused(tmp_path: Path) -> None:
    """It would have no effect."""
    with pytest.raises(UsageError, match="asynchronous=True"):
        JobRunner(RelayJob(), tmp_path, staging_limit=1 << 30)


def test_objects_can_be_copied_in_flight_and_keep_no_hooks(tmp_path: Path) -> None:
    """A module with the gate before its load_state_dict can be deep-copied; after the run it has no gate."""
    trainee = Trainee(3)
    guarded: list[int] = []

    def note(ctx: Any, trainee: Trainee) -> None:
        guarded.append(len(copy.deepcopy(trainee.model)._load_state_dict_pre_hooks))

    train(tmp_path / "run", 2, asynchronous=True, trainee=trainee, before_step=note)
    assert 1 in guarded
    parts = [trainee.optimizer._optimizer_load_state_dict_pre_hooks]
    parts += [part._load_state_dict_pre_hooks for part in trainee.model.modules()]
    assert not any(parts)


def test_without_threads_saves_are_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process gets no thread any more, the save happens in the one that there is."""

    class NoMore(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runtime, "threading", SimpleNamespace(**{**vars(threading), "Thread": NoMore}))
    truth = train(tmp_path / "run", 2, asynchronous=True)
    assert {epoch: torn(tmp_path / "run", epoch, truth[epoch]) for epoch in truth} == {1: [], 2: []}


def test_an_interrupt_while_the_thread_starts_leaves_nobody_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when the thread is there already: a save that nobody waits for is not begun."""
    begin, begun = threading.Thread.start, list[threading.Thread]()

    def start(self: threading.Thread) -> None:
        begin(self)
        if self.name == background.STANDS_BY:
            begun.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        JobRunner(small_job(2), tmp_path / "run", asynchronous=True).train()
    (thread,) = begun
    thread.join(60)
    assert not thread.is_alive() and not list(tmp_path.rglob("*.safetensors"))


def test_a_save_by_hand_is_committed_when_it_returns(tmp_path: Path) -> None:
    """Outside of a run nothing is left in flight."""
    from torchrelay import LocalSession

    manager = MultiNodeCheckpointManager(tmp_path, asynchronous=True)
    with LocalSession(["trainer_0"]) as session:
        session.workspace()["total"] = 3
        session.run(manager.init(["trainer_0"]))
        session.run(manager.save(7))
        assert open_checkpoint(tmp_path, epoch=7).value("total") == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from served import wait_until
from tear_job import train
from torchrelay.checkpoint.save import pipeline as save

folder = Path(sys.argv[1])
write = save._write_node

def write_and_die(job, *rest):
    if job.position.epoch == 3:
        print("in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(job, *rest)

save._write_node = write_and_die
train(folder / "run", 5, asynchronous=True)
"""


def test_a_kill_during_the_background_write_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """Epochs before the one in flight are there, whole; the same command goes on after them."""
    places = (str(REPOSITORY / name) for name in ("src", "tests/helpers", "scripts/trials"))
    script = script_file(KILLED, tmp_path)
    env = {"PYTHONPATH": ":".join(places)}
    with Job(script, str(tmp_path), warm=True, ranks=1, cwd=tmp_path, env=env) as job:
        done = job.wait(90)
    assert "in the middle" in done.out and done.rc != 0
    assert open_checkpoint(tmp_path / "run").position.epoch == 2
    whole = train(tmp_path / "whole", 5)
    rest = train(tmp_path / "run", 5, asynchronous=True, seed=77)
    assert sorted(rest) == [3, 4, 5]
    assert all(torch.equal(rest[5][name], value) for name, value in whole[5].items())
