"""Lives that end, begin or break at odd places."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import (
    Context,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    max_epochs,
)
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import FencedError, NotAllowedNowError, RelayError, StorageError, UsageError


@pytest.fixture
def counters() -> Callable[[], list[threading.Thread]]:
    """What moves a writer's counter although it was not there when the test began."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t not in before and "writer-counter" in t.name]


def counting(epochs: int = 3, **blobs: Any) -> Job:
    """A job that counts its epochs."""
    job = Job("count", blobs={"total": torch.zeros(1), **blobs})

    @job.epoch
    def add(ctx: Any) -> None:
        ctx["total"].add_(1)

    job.stop_when(max_epochs(epochs))
    return job


def test_a_manager_whose_directory_disappears_fails_its_saves_only(counters: Any, tmp_path: Path) -> None:
    """Saves into a directory that is gone warn; the run ends well, and session and manager are free again."""
    job, session = counting(), LocalSession()
    job.epoch(lambda ctx: shutil.rmtree(tmp_path / "cp", ignore_errors=True) if ctx.epoch == 2 else None)
    manager = MultiNodeCheckpointManager(tmp_path / "cp")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert JobRunner(job, manager).train(session) == 3
    assert any("NOT saved" in str(one.message) for one in said)
    assert not counters()
    assert JobRunner(counting(), MultiNodeCheckpointManager(tmp_path / "other")).train(session) == 3


def test_a_failed_run_in_a_directory_that_is_gone_tells_its_own_failure(tmp_path: Path) -> None:
    """What cannot be released does not hide why the run failed, and the session may train again."""
    job, session = counting(), LocalSession()

    @job.epoch
    def lose(ctx: Any) -> None:
        if ctx.epoch == 2:  # what the start was is written beside the first one
            shutil.rmtree(tmp_path / "run")
            raise ZeroDivisionError("the user's own")

    with pytest.warns(UserWarning), pytest.raises(RelayError, match="the user's own"):
        JobRunner(job, tmp_path / "run").train(session)
    assert JobRunner(counting(), tmp_path / "other").train(session) == 3


def test_a_fenced_job_leaves_the_status_of_the_other_alone(tmp_path: Path) -> None:
    """A job whose directory was taken over stops with FencedError and writes no status any more."""
    job = counting()
    checkpoints = LocalStorage(tmp_path / "run" / "checkpoints")

    @job.epoch
    def overtaken(ctx: Any) -> None:
        if ctx.epoch == 2:
            runner.manager.engine.ledger.writer._beat.stop()
            _forget_writers()
            taken.append(LogWriter.take(checkpoints, "count", other_launch(), patience_secs=0.05))
            (tmp_path / "run" / "status.json").write_text('{"state": "RUNNING", "who": "the other"}')

    taken: list[LogWriter] = []
    runner = JobRunner(job, tmp_path / "run")
    with pytest.raises(FencedError):
        runner.train()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["who"] == "the other"
    taken[0].close()


def test_a_fenced_job_that_is_preempted_leaves_the_status_alone_too(tmp_path: Path) -> None:
    """SIGTERM comes before the step at which it would tell: it ends with FencedError all the same."""
    job = counting()
    checkpoints = LocalStorage(tmp_path / "run" / "checkpoints")
    taken: list[LogWriter] = []

    @job.epoch
    def overtaken(ctx: Any) -> None:
        for number in ctx.steps(iter(range(3))):  # cannot be continued in its middle, so nothing is saved
            if (ctx.epoch, number) == (2, 1):
                writer = runner.manager.engine.ledger.writer
                writer._beat.stop()
                _forget_writers()
                taken.append(LogWriter.take(checkpoints, "count", other_launch(), patience_secs=0.05))
                (tmp_path / "run" / "status.json").write_text('{"state": "RUNNING", "who": "the other"}')
                os.kill(os.getpid(), signal.SIGTERM)
                writer._beat_now(7)

    runner = JobRunner(job, tmp_path / "run")
    with pytest.raises(FencedError):
        runner.train()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["who"] == "the other"
    taken[0].close()


def other_launch() -> WriterIdentity:
    """Another process, as far as a log can tell."""
    me = WriterIdentity.here("count", {})
    return WriterIdentity("count", "elsewhere", "", "", 1, "", me.launcher_id)


def _forget_writers() -> None:
    from torchrelay.checkpoint.log import writer as log_writer

    log_writer._LIVE.clear()


def test_a_save_by_hand_does_not_keep_the_directory(counters: Any, tmp_path: Path) -> None:
    """`save_checkpoints` outside of a train call releases the log again, for whoever comes next."""
    session = LocalSession()
    runner = JobRunner(counting(1), MultiNodeCheckpointManager(tmp_path))
    runner.train(session)
    runner.save_checkpoints(5, session)
    assert not counters()
    again = MultiNodeCheckpointManager(tmp_path)
    assert JobRunner(counting(7), again).train(LocalSession(), resume_from_epoch=5) == 7


def test_a_job_without_nodes_does_not_run_on_those_of_an_earlier_job(tmp_path: Path) -> None:
    """A session that played another job's nodes plays `trainer_0` for a job that declares none."""
    session = LocalSession()
    with Job("two") as two:
        for name in ("reader", "writer"):
            with Node(name):
                Task(lambda ws: None)
    two.stop_when(max_epochs(1))
    JobRunner(two).train(session)
    JobRunner(counting(1), tmp_path / "run").train(session)
    assert [place.name for place in session.nodes] == ["trainer_0"]
    assert JobRunner(counting(2), tmp_path / "run").train(LocalSession()) == 2


@pytest.mark.parametrize("where", ["factory", "setup", "init", "condition", "upload", "download", "exit"])
@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_after_a_failure_anywhere_everything_can_be_used_again(
    counters: Any, tmp_path: Path, where: str, error: BaseException
) -> None:
    """Whatever the user raises, wherever: the same job, runner and session finish at the next call."""
    broken = [error]

    def fail(*_: Any) -> Any:
        if broken:
            raise broken.pop()

    def made(ctx: Any) -> Any:
        fail()
        return torch.nn.Linear(1, 1)

    job, session = counting(2, model=made if where == "factory" else torch.nn.Linear(1, 1)), LocalSession()
    if where in ("setup", "init", "download", "exit"):
        getattr(job, where)(lambda ctx: fail())
    if where == "condition":
        job.stop_when(lambda ctx: bool(fail()))

    class Upload:
        def build(self, epoch: int, manager: Any) -> Any:
            if where == "upload":
                fail()
            return Task(lambda: None)

    runner = JobRunner(job, tmp_path / "run", upload_task_group_builder=Upload())
    with pytest.raises(BaseException) as failed:
        runner.train(session)
    assert "odd" in str(failed.value) or isinstance(failed.value, KeyboardInterrupt)
    assert not counters()
    assert runner.train(session) == 2
    assert float(session.workspace()["total"]) == 2
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "FINISHED"


def test_an_interrupt_in_a_save_loses_nothing_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the shards and the commit ends the run; the next call resumes from the epoch before."""
    session, runner = LocalSession(), JobRunner(counting(), tmp_path / "run")
    writer_commit, fired = LogWriter.commit, []

    def interrupted(self: LogWriter, entry: Any) -> Any:
        if entry.position.epoch == 2 and not fired:
            fired.append(entry)
            raise KeyboardInterrupt
        return writer_commit(self, entry)

    monkeypatch.setattr(LogWriter, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.train(session)
    assert fired
    assert runner.train(session) == 3
    assert float(session.workspace()["total"]) == 3


def test_a_save_that_fails_at_its_manifest_gives_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full when the manifest comes keeps no shards of the epoch that was not saved."""
    real = LocalStorage.open_exclusive

    def full(self: LocalStorage, path: str) -> Any:
        if path.endswith("manifest.json") and "e00000002" in path:
            raise StorageError(f"cannot write {path}: No space left on device")
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "open_exclusive", full)
    with pytest.warns(UserWarning, match="No space left"):
        JobRunner(counting(), tmp_path / "run").train(LocalSession())
    assert len(list((tmp_path / "run" / "checkpoints" / "data").iterdir())) == 3


def test_metrics_that_are_not_numbers_survive_a_resume(tmp_path: Path) -> None:
    """NaN and infinity are remembered as what they are."""
    job = counting(1)

    @job.epoch
    def log(ctx: Any) -> None:
        ctx.log("a", float("nan"))
        ctx.log("b", float("inf"))

    JobRunner(job, tmp_path / "run").train(LocalSession())
    again = JobRunner(job, tmp_path / "run").train(LocalSession())
    assert str(again.metrics["a"]) == "nan" and again.metrics["b"] == float("inf")


def test_train_in_a_thread(tmp_path: Path) -> None:
    """A run in another thread than the main one is a run like any other."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(JobRunner(counting(), tmp_path / "run").train(LocalSession()))
    )
    thread.start()
    thread.join(30)
    assert results == [3]


def test_resume_with_other_nodes_is_refused_or_right(tmp_path: Path) -> None:
    """A job whose node was renamed does not take another node's values in silence."""

    def job(*names: str) -> Job:
        with Job("nodes") as made:
            for name in names:
                with Node(name):
                    with made.init_group:
                        Task(lambda ws: ws.update(count=torch.zeros(1)))
                    Task(lambda ws: ws["count"].add_(1))
        made.stop_when(max_epochs(epochs))
        return made

    epochs = 2
    JobRunner(job("a", "b"), tmp_path / "run").train(LocalSession())
    epochs = 3
    with pytest.raises(UsageError, match="count"):
        JobRunner(job("a", "c"), tmp_path / "run").train(LocalSession())
    assert JobRunner(job("a", "b"), tmp_path / "run").train(LocalSession()) == 3


def test_a_forked_process_that_leaves_its_task_is_stopped(tmp_path: Path) -> None:
    """A child that goes on as its parent writes nothing: notes and metrics are those of the parent."""
    parent, job = os.getpid(), Job("forked", blobs={"state": {}})

    @job.epoch
    def fork(ctx: Context) -> None:
        ctx.log("loss", ctx.epoch)
        if ctx.epoch == 1 and (child := os.fork()):
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    job.stop_when(max_epochs(3))
    code = 1
    try:
        result = JobRunner(job, tmp_path).train()
    except NotAllowedNowError:
        code = 7
    finally:
        if os.getpid() != parent:
            os._exit(code)
    lines = [(tmp_path / name).read_text().splitlines() for name in ("metrics.0.jsonl", "events.0.jsonl")]
    assert [json.loads(line)["epoch"] for line in lines[0]] == [1, 2, 3]
    assert (result.status, [json.loads(line)["kind"] for line in lines[1]]) == ("FINISHED", ["start", "end"])
