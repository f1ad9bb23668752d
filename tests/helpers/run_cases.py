"""Runs in run directories, in any setup: endings, damage, retention, agreed by all processes."""

from __future__ import annotations

from pathlib import Path

from runner_cases import Asked
from stage import Log, Stage, raises, totals, warned

from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.errors import DamagedError, NoProvableEpochError, TaskFailedError


def remove_shards(stage: Stage, session, epochs: list[int], node: str) -> None:
    """Rank 0 removes a node's files of some epochs while the others wait."""
    manager = MultiNodeCheckpointManager(stage.root / "checkpoints")
    files = [file for epoch in epochs for file in manager.files(node, epoch)]
    session.peers.exchange("files seen", None)
    if stage.first:
        for file in files:
            Path(file).unlink()
    session.peers.exchange("files removed", None)


def train_but_for_the_tail(stage: Stage) -> None:
    """Train all epochs of the toy in the run directory; then exit fails, so that the run is not finished."""
    job = stage.toy()
    job.exit(lambda: 1 / 0)
    with raises(TaskFailedError, "division"):
        JobRunner(job, stage.root).train(stage.session())


def the_tail_resumes(stage: Stage) -> None:
    """A failure of one node in download: the same command runs download and exit only, then setup alone."""

    def start(fails: bool) -> tuple[int, list[str]]:
        log, job = Log(), stage.toy()
        job.setup(lambda: log("setup"))
        job.init(lambda: log("init"))
        job.epoch(lambda ctx: log(f"epoch {ctx.epoch}"))

        @job.download
        def download(ctx) -> None:
            log("download")
            if fails and ctx.rank == ctx.world_size - 1:
                raise OSError("no space")

        job.exit(lambda: log("exit"))
        job.exit(lambda: log("cleanup"), on_failure=True)
        try:
            last = int(JobRunner(job, stage.root).train(stage.session()))
        except TaskFailedError as error:
            assert fails and "no space" in str(error)
            last = -1
        return last, list(dict.fromkeys(log.events))

    epochs = [f"epoch {number}" for number in range(1, 5)]
    assert start(fails=True) == (-1, ["setup", "init", *epochs, "download", "cleanup"])
    assert start(fails=False) == (4, ["setup", "download", "exit", "cleanup"])
    assert start(fails=False) == (4, ["setup"])


def damage_falls_back_together(stage: Stage) -> None:
    """One node's newest shard is gone: all nodes use the epoch before it, with one warning on rank 0."""
    train_but_for_the_tail(stage)
    session = stage.session()
    remove_shards(stage, session, [4], stage.nodes[-1])
    with raises(DamagedError, "never replaced"):
        JobRunner(stage.toy(), stage.root, resume_from_epoch=4).train(stage.session())
    with warned() as texts:
        session = stage.session()
        assert JobRunner(stage.toy(), stage.root).train(session) == 4
    assert totals(session) == {145}
    assert len([text for text in texts if "epoch 4 is damaged" in text]) == int(stage.first)
    found = open_checkpoint(stage.root).load_tensors(f"{stage.nodes[-1]}:total")
    assert int(found["total"]) == 145


def nothing_provable_is_refused(stage: Stage) -> None:
    """All epochs damaged: every process gets the same NoProvableEpochError, nothing runs."""
    train_but_for_the_tail(stage)
    remove_shards(stage, stage.session(), [0, 1, 2, 3, 4], stage.nodes[0])
    ran: list[int] = []
    job = stage.toy()
    job.setup(lambda: ran.append(1))
    with warned(), raises(NoProvableEpochError, "can be verified"):
        JobRunner(job, stage.root).train(stage.session())
    assert ran == []
    with warned():
        assert JobRunner(stage.toy(), stage.root, resume="never").train(stage.session()) == 4


def keep_last_two(stage: Stage) -> None:
    """keep_last=2 keeps two tries on disk, and the run continues from the newest."""
    assert JobRunner(stage.toy(), stage.root, keep_last=2).train(stage.session()) == 4
    tries = sorted(path.name[:9] for path in (stage.root / "checkpoints" / "data").iterdir())
    assert tries == ["e00000003", "e00000004"]
    session = stage.session()
    assert JobRunner(stage.toy(), stage.root, resume_from_epoch=3, keep_last=2).train(session) == 4
    assert totals(session) == {145}


def limits_come_from_today(stage: Stage) -> None:
    """Raising max_epochs continues a finished run, lowering it ends at once, metrics are kept."""

    def start(epochs: int) -> tuple[int, list[str]]:
        log, job = Log(), Job("limits")
        job.epoch(lambda ctx: (ctx.log("epoch", ctx.epoch), log(f"epoch {ctx.epoch}")))
        job.exit(lambda: log("exit"))
        job.stop_when(max_epochs(epochs), Asked(Log(), 99))
        result = JobRunner(job, stage.root).train(stage.session())
        assert result.metrics["epoch"] == int(result)
        return int(result), log.events

    assert start(2) == (2, ["epoch 1", "epoch 2", "exit"])
    assert start(2) == (2, [])
    assert start(3) == (3, ["epoch 3", "exit"])
    assert start(1) == (3, [])


RUN_CASES = [
    the_tail_resumes,
    damage_falls_back_together,
    nothing_provable_is_refused,
    keep_last_two,
    limits_come_from_today,
]
