"""R1 to R15: what the ancestor's runner did and its own tests did not ask, in any setup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from stage import Log, RecordingHandler, RecordingManager, Stage, raises, totals, warned
from toy import EXPECTED

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    StopAnswer,
    Task,
    TaskGroup,
    UploadTaskGroupBuilder,
    Workspace,
    epoch_limiter,
    max_epochs,
)
from torchrelay.errors import DamagedError, TaskFailedError, UnknownEpochError

HANDLER = ("set_params", "last_epoch", "cp_accessible", "write", "report")


class Asked:
    """A stop condition that writes down when it is asked."""

    name, rule, limit = "asked", "any", False

    def __init__(self, log: Log, last: int) -> None:
        self.log, self.last = log, last

    def ask(self, ctx) -> StopAnswer:
        self.log("fetch stops")
        return StopAnswer(ctx.epoch >= self.last, "enough")


def recording_job(log: Log, epochs: int) -> Job:
    job = Job()
    job.init(lambda ws: (ws.update(n=0), log("init_group")))
    job.epoch(lambda ctx: (ctx.workspace.update(n=ctx.epoch), log(f"epoch {ctx.epoch}")))
    job.download(lambda: log("download"))
    job.exit(lambda: log("exit"))
    job.stop_when(Asked(log, epochs))
    return job


class RecordingUpload(UploadTaskGroupBuilder):
    def __init__(self, log: Log) -> None:
        self.log = log

    def build(self, epoch: int, checkpoint_manager) -> TaskGroup:
        self.log(f"build upload {epoch}")
        group = TaskGroup(name="upload")
        Task(lambda: self.log("upload"), group=group)
        return group


def heard(stage: Stage, events: list[str]) -> list[str]:
    """What a process hears of the whole order: handlers are called on rank 0 only."""
    return [event for event in events if stage.first or not event.startswith(HANDLER)]


def lap(epoch: int) -> list[str]:
    saved = ["cp_accessible", f"save {epoch}", f"write {epoch}", "report checkpoint_save"]
    return [f"epoch {epoch}", "fetch stops", *saved] if epoch else saved


def r1_call_order(stage: Stage) -> None:
    """From scratch and resumed, everything is called in the ancestor's order."""
    log = Log()
    manager = RecordingManager(stage.root, RecordingHandler(log), log)
    runner = JobRunner(recording_job(log, 2), manager, upload_task_group_builder=RecordingUpload(log))
    assert runner.train(stage.session()) == 2
    begin = ["set_params", "last_epoch"]
    end = ["build upload 2", "upload", "download", "exit"]
    fresh = [*begin, "init_group", "manager.init", *lap(0), *lap(1), *lap(2), *end]
    assert log.events == heard(stage, fresh), log.events

    log = Log()
    manager = RecordingManager(stage.root, RecordingHandler(log), log)
    runner = JobRunner(recording_job(log, 2), manager, 1, upload_task_group_builder=RecordingUpload(log))
    assert runner.train(stage.session()) == 2
    loaded = ["manager.init", "load 1", "report checkpoint_load"]
    assert log.events == heard(stage, [*begin, *loaded, *lap(2), *end]), log.events


def r2_the_handler_overrides_the_user(stage: Stage) -> None:
    """The handler's answer wins in both directions: None is from scratch, 3 resumes from 3."""
    assert JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root)).train(stage.session()) == 4

    def run(answer: object, user: int | None) -> list[str]:
        log = Log()
        job = stage.toy()
        job.init(lambda: log("init"))
        job.epoch(lambda ctx: log(f"epoch {ctx.epoch}"))
        manager = MultiNodeCheckpointManager(stage.root, RecordingHandler(last=answer))
        session = stage.session()
        with warned() as texts:
            assert JobRunner(job, manager, resume_from_epoch=user).train(session) == 4
        assert totals(session) == {145}
        assert answer is not None or not stage.first or any("from scratch" in text for text in texts)
        return log.events

    assert run(3, None) == ["epoch 4"]
    assert run(None, 2) == ["init", "epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert run(1, 3) == ["epoch 2", "epoch 3", "epoch 4"]


def r3_epoch_0_resumes(stage: Stage) -> None:
    """0 is the state after init: init does not run again, all epochs do."""
    manager = MultiNodeCheckpointManager(stage.root)
    assert JobRunner(stage.toy(), manager).train(stage.session()) == 4
    job = stage.toy()
    inits: list[int] = []
    job.init(lambda: inits.append(1))
    session = stage.session()
    assert JobRunner(job, MultiNodeCheckpointManager(stage.root), resume_from_epoch=0).train(session) == 4
    assert inits == [] and totals(session) == {145}


def r4_an_inaccessible_store_skips_the_save(stage: Stage) -> None:
    """cp_accessible False: a warning, no save, no write, and training goes on."""
    handler = RecordingHandler()
    handler.closed_at = {0, 2}
    manager = MultiNodeCheckpointManager(stage.root, handler)
    session = stage.session()
    with warned() as texts:
        assert JobRunner(stage.toy(), manager).train(session) == 4
    assert totals(session) == {145}
    assert [bool(manager.files("trainer_0", epoch)) for epoch in range(5)] == [False, True, False, True, True]
    if stage.first:
        assert handler.written == [1, 3, 4]
        assert [a for a, _ in handler.reports] == ["checkpoint_save"] * 3
        skipped = [text for text in texts if "cannot be accessed" in text]
        assert [text.split()[1] for text in skipped] == ["0", "2"]


def r5_stops_are_fetched_before_the_save(stage: Stage) -> None:
    """A save that changes the stop blob does not change the decision of its own epoch."""
    job = Job()
    job.init(lambda ws: ws.update(stop=False))
    job.epoch(lambda: None)
    job.stop_when("stop")

    def change(epoch: int, session) -> None:
        for place in session.local_nodes:
            session.workspace(place.name)["stop"] = epoch == 2

    manager = RecordingManager(stage.root, RecordingHandler(), Log(), after_save=change)
    assert JobRunner(job, manager).train(stage.session()) == 3


def r6_either_of_two_conditions_stops(stage: Stage) -> None:
    """Both are asked every epoch, the first that says so ends the loop, its reason is kept."""
    for first, second in ((2, 5), (5, 2)):
        log = [Log(), Log()]
        job = Job()
        job.epoch(lambda: None)
        for number, last in enumerate((first, second)):
            condition = Asked(log[number], last)
            condition.name = f"condition {number}"
            job.stop_when(condition)
        result = JobRunner(job).train(stage.session())
        assert result == 2 and [reason.split()[0] for reason in result.stop] == ["enough"]
        assert log[0].events and log[0].events == log[1].events


def r7_a_failed_load_ends_the_run(stage: Stage) -> None:
    """Resuming from an epoch that is absent, damaged or does not fit raises; nothing is trained."""
    manager = MultiNodeCheckpointManager(stage.root)
    assert JobRunner(stage.toy(), manager).train(stage.session()) == 4
    session = stage.session()

    def attempt(epoch: int, kind: type[Exception], text: str, job: Job | None = None, **options: Any) -> None:
        job = job or stage.toy()
        epochs: list[int] = []
        job.epoch(lambda ctx: epochs.append(ctx.epoch))
        with raises(kind, text):
            JobRunner(job, MultiNodeCheckpointManager(stage.root, **options), epoch).train(stage.session())
        assert epochs == []

    attempt(7, UnknownEpochError, "there are: 0, 1, 2, 3, 4")
    (file,) = manager.files("trainer_0", 2)
    session.peers.exchange("all have seen the files", None)
    if stage.first:
        Path(file).unlink()
    session.peers.exchange("deleted", None)
    attempt(2, DamagedError, "missing")
    other = stage.toy()
    other.blobs(extra=torch.ones(3))
    attempt(3, Exception, "extra", other, resume_strict=True)
    assert JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root), 3).train(stage.session()) == 4


def r8_without_a_manager(stage: Stage) -> None:
    """Saving and loading by hand raise ValueError; training works."""
    session = stage.session()
    runner = JobRunner(stage.toy())
    with raises(ValueError, "needs a checkpoint manager"):
        runner.save_checkpoints(1, session)
    with raises(ValueError, "needs a checkpoint manager"):
        runner.load_blobs_from_checkpoints(["total"], 1, session)
    assert runner.train(session) == 4 and totals(session) == {145}


class BrokenUpload(UploadTaskGroupBuilder):
    def build(self, epoch: int, checkpoint_manager) -> TaskGroup:
        def fail() -> None:
            raise OSError("the store is gone")

        group = TaskGroup(name="upload")
        Task(fail, group=group)
        return group


def r9_upload_errors_propagate(stage: Stage) -> None:
    """The base builder raises NotImplementedError; whatever fails there ends the job before download."""
    with raises(NotImplementedError, "subclass"):
        UploadTaskGroupBuilder().build(1, None)
    cases = [
        (UploadTaskGroupBuilder(), NotImplementedError if stage.first else Exception, "subclass"),
        (BrokenUpload(), TaskFailedError, "the store is gone"),
    ]
    for number, (builder, kind, text) in enumerate(cases):
        job, ran = stage.toy(), []
        job.download(lambda ran=ran: ran.append("download"))
        job.exit(lambda ran=ran: ran.append("exit"))
        manager = MultiNodeCheckpointManager(stage.root / str(number))
        with raises(kind, text):
            JobRunner(job, manager, upload_task_group_builder=builder).train(stage.session())
        assert ran == []


def r10_stats_tell_the_slowest(stage: Stage) -> None:
    """One path key per node with a positive duration; phases, and the slowest node, in stats.json."""
    handler = RecordingHandler()
    manager = MultiNodeCheckpointManager(stage.root, handler)
    assert JobRunner(stage.toy(), manager).train(stage.session()) == 4
    assert JobRunner(stage.toy(), manager, resume_from_epoch=3).train(stage.session()) == 4
    (file,) = manager.files("trainer_0", 4)
    told = json.loads((Path(file).parent / "stats.json").read_text())
    phases = {"plan", "stage", "hash", "write", "fsync"}
    assert [node["node"] for node in told["nodes"]] == list(stage.nodes)
    assert all(phases <= set(node["secs"]) for node in told["nodes"])
    assert all(min(node["secs"].values()) >= 0 for node in told["nodes"])
    assert "commit" in told["nodes"][0]["secs"]
    seconds = {node["node"]: sum(node["secs"].values()) for node in told["nodes"]}
    assert told["slowest"] == max(seconds, key=lambda node: seconds[node])
    assert told["bytes"] > 0
    if not stage.first:
        return
    actions = [action for action, _ in handler.reports]
    assert actions == ["checkpoint_save"] * 5 + ["checkpoint_load", "checkpoint_save"]
    epochs = [0, 1, 2, 3, 4, 3, 4]
    for epoch, (_, stats) in zip(epochs, handler.reports, strict=True):
        assert set(stats) == {manager.get_ckpt_db_name(node, epoch) for node in stage.nodes}
        assert all(secs > 0 for secs in stats.values())


def r11_a_partial_load_with_a_shard_gone_is_false(stage: Stage) -> None:
    """The middle node's file is missing: False for its blobs, nothing changed; the others load."""
    manager = MultiNodeCheckpointManager(stage.root)
    assert JobRunner(stage.toy(), manager).train(stage.session()) == 4
    middle = stage.nodes[stage.size // 2]
    (file,) = manager.files(middle, 2)
    session = stage.session()
    session.peers.exchange("all have seen the files", None)
    if stage.first:
        Path(file).unlink()
    session.peers.exchange("deleted", None)
    handler = RecordingHandler()
    runner = JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root, handler))
    every = [f"{node}:total" for node in stage.nodes]
    assert runner.load_blobs_from_checkpoints(every, 2, session) is False
    hosted = [place.name for place in session.local_nodes]
    assert all(session.workspace(name).own_names() == () for name in hosted)
    others = [name for name in every if not name.startswith(middle)]
    if others:
        assert runner.load_blobs_from_checkpoints(others, 2, session) is True
        assert int(session.blob(others[0])) == EXPECTED[1]
    assert runner.load_blobs_from_checkpoints(every, 3, session) is True
    assert runner.load_blobs_from_checkpoints(every, 9, session) is False
    if stage.first:
        assert {action for action, _ in handler.reports} == {"checkpoint_partial_load"}


def r12_the_limit_is_the_total(stage: Stage) -> None:
    """epoch_limiter(n) returns n, also over a failure; a higher limit continues, a lower one ends at once."""

    def run(epochs: int, resume: int | None, fail_at: int = 0) -> tuple[list[int], int]:
        ran: list[int] = []

        def epoch(ctx) -> None:
            if ctx.epoch == fail_at:
                raise RuntimeError("killed")
            ran.append(ctx.epoch)

        with Job() as job:
            Task(epoch)
            epoch_limiter(job, epochs)
        manager = MultiNodeCheckpointManager(stage.root)
        last = int(JobRunner(job, manager, resume_from_epoch=resume).train(stage.session()))
        return sorted(set(ran)), last

    with raises(TaskFailedError, "killed"):
        run(5, None, fail_at=3)
    assert run(5, 2) == ([3, 4, 5], 5)
    assert run(5, 5) == ([], 5)
    assert run(7, 5) == ([6, 7], 7)
    assert run(2, 4) == ([], 4)


def r14_partial_load_then_training(stage: Stage) -> None:
    """A manager that was first used for a partial load can train afterwards, and really saves."""
    assert JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root)).train(stage.session()) == 4
    session, manager = stage.session(), MultiNodeCheckpointManager(stage.root)
    runner = JobRunner(stage.toy(), manager)
    assert runner.load_blobs_from_checkpoints(["trainer_0:total"], 1, session) is True
    with warned():
        assert runner.train(session) == 4
    assert totals(session) == {145}
    for epoch, expected in enumerate(EXPECTED, 1):
        fresh = stage.session()
        assert runner.load_blobs_from_checkpoints(["trainer_0:total"], epoch, fresh) is True
        assert int(fresh.blob("trainer_0:total")) == expected
    assert all(manager.files(node, epoch) for node in stage.nodes for epoch in range(5))


def r15_single_node_manager_loads_partially(stage: Stage) -> None:
    """The manager of one node has the same partial load, under the name that it stores."""
    manager = CheckpointManager(stage.root, "renamed")
    assert JobRunner(stage.toy(), manager).train(stage.session()) == 4
    session = stage.session()
    runner = JobRunner(stage.toy(), CheckpointManager(stage.root, "renamed"))
    assert runner.load_blobs_from_checkpoints(["total"], 2, session) is True
    assert totals(session) == {EXPECTED[1]}
    assert runner.load_blobs_from_checkpoints(["renamed:total"], 3, session) is True
    assert totals(session) == {EXPECTED[2]}
    assert runner.load_blobs_from_checkpoints(["total"], 9, session) is False


def handler_failures(stage: Stage) -> None:
    """A handler that raises in write or report only warns; one in set_params or last_epoch ends the run."""
    for number, verb in enumerate(("write", "report")):
        root = stage.root / str(number)
        for resume in (None, 2):
            manager = MultiNodeCheckpointManager(root, RecordingHandler(fails=verb))
            session = stage.session()
            with warned() as texts:
                assert JobRunner(stage.toy(), manager, resume_from_epoch=resume).train(session) == 4
            assert totals(session) == {145}
            runner = JobRunner(stage.toy(), manager)
            with warned() as more:
                assert runner.load_blobs_from_checkpoints(["trainer_0:total"], 1, stage.session()) is True
            assert not stage.first or verb != "report" or "failed at report" in more[0]
            told = [text for text in texts if f"handler failed at {verb}" in text]
            assert not stage.first or len(told) >= (5 if resume is None else 2)
    for number, verb in enumerate(("set_params", "last_epoch")):
        ran: list[int] = []
        job = Job()
        job.init(lambda ran=ran: ran.append(1))
        job.epoch(lambda: None)
        job.stop_when(max_epochs(1))
        manager = MultiNodeCheckpointManager(stage.root / f"ends{number}", RecordingHandler(fails=verb))
        with raises(Exception, "out of order"):
            JobRunner(job, manager).train(stage.session())
        assert ran == []


ANY_SIZE = [
    r1_call_order,
    r2_the_handler_overrides_the_user,
    r3_epoch_0_resumes,
    r4_an_inaccessible_store_skips_the_save,
    r5_stops_are_fetched_before_the_save,
    r6_either_of_two_conditions_stops,
    r7_a_failed_load_ends_the_run,
    r8_without_a_manager,
    r9_upload_errors_propagate,
    r10_stats_tell_the_slowest,
    r11_a_partial_load_with_a_shard_gone_is_false,
    r12_the_limit_is_the_total,
    r14_partial_load_then_training,
    handler_failures,
]


def workspace_names(workspace: Workspace) -> set[str]:
    """The names that a workspace holds itself."""
    return set(workspace.own_names())
