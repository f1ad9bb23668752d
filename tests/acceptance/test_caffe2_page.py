"""Statements of docs/guides/migrate-caffe2.md that no other test runs, row by row."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import warned
from torchrun import torchrun

from torchrelay import (
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    RelayError,
    Task,
    epoch_limiter,
    load_blobs,
    max_epochs,
    open_checkpoint,
)
from torchrelay.errors import SaveFailedError

NODES = ("trainer_0", "trainer_1")


def counting(epochs: int, log: list[str] | None = None) -> Job:
    """A job of two nodes, each of which counts its own epochs."""
    said = [] if log is None else log
    with Job("counting") as job:
        for number, name in enumerate(NODES):
            with Node(name):
                Task(lambda ws, n=number: ws.update(total=torch.tensor([n * 10])), group=job.init_group)
                Task(lambda ws: ws.update(total=ws["total"] + 1))
        with Node(NODES[0]):
            Task(lambda: said.append("setup"), group=job.setup_group)
            Task(lambda: said.append("init"), group=job.init_group)
    epoch_limiter(job, epochs)
    return job


def total(session: LocalSession) -> list[int]:
    return [int(session.workspace(name)["total"]) for name in NODES]


def test_the_setup_group_runs_at_every_start(tmp_path: Path) -> None:
    """`init_group` runs where a run begins, `setup_group` there and where it goes on."""
    log: list[str] = []
    JobRunner(counting(1, log), tmp_path / "run", code=False).train(LocalSession())
    assert log == ["setup", "init"]
    JobRunner(counting(2, log), tmp_path / "run", code=False).train(LocalSession())
    assert log == ["setup", "init", "setup"]


def test_nodes_of_one_process_run_one_after_the_other() -> None:
    """The tasks of a node of a LocalSession are over before those of the next begin, in one thread."""
    log: list[tuple[str, int]] = []
    with Job("turns") as job:
        for name in NODES:
            with Node(name):
                for _ in range(2):
                    Task(lambda ws: log.append((ws.node, threading.get_ident())) or None)
    job.stop_when(max_epochs(2))
    JobRunner(job).train(LocalSession())
    turns = [name for name in NODES for _ in range(2)]
    assert [node for node, _ in log] == turns * 2, "in each epoch"
    assert len({thread for _, thread in log}) == 1


SHARDED = """
import sys
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
import torchrelay
from torchrelay import Job, JobRunner, max_epochs

session = torchrelay.init()
for kind in ("fsdp", "zero"):
    model = torch.nn.Linear(4, 4)
    if kind == "fsdp":
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    job = Job(kind, blobs={"model": model, "optimizer": optimizer}, nodes_to_checkpoint=["trainer_0"])
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    try:
        JobRunner(job, f"run_{kind}", code=False).train(session)
    except torchrelay.RelayError as error:
        print(kind, "refused:", str(error), flush=True)
"""


@pytest.mark.ranks
def test_shards_of_all_nodes_are_refused_where_some_are_saved(tmp_path: Path) -> None:
    """FSDP and ZeRO with `nodes_to_checkpoint` end with the reason, and no epoch."""
    done = torchrun(SHARDED, warm=True, ranks=2, cwd=tmp_path)
    assert done.rc == 0, done
    for kind in ("fsdp", "zero"):
        assert done.out.count(f"{kind} refused: ") == 2, done
        assert "is in shards, and nodes_to_checkpoint leaves out other nodes" in done.out.split(kind)[1]
        assert not list((tmp_path / f"run_{kind}").rglob("*.safetensors"))


def test_nodes_of_an_epoch_are_committed_together_or_not_at_all(tmp_path: Path) -> None:
    """One node that cannot be saved leaves no epoch of the others."""

    class Unsaveable:
        pass

    with Job("two") as job:
        for name in NODES:
            with Node(name):
                Task(lambda ws: ws.update(total=torch.zeros(1), held=0), group=job.init_group)

        def spoil(ctx: Any) -> None:
            ctx.workspace["held"] = Unsaveable() if ctx.epoch == 2 else 0

        with Node(NODES[1]):
            Task(spoil)
    job.stop_when(max_epochs(3))
    manager = MultiNodeCheckpointManager(tmp_path)
    with warned() as said:
        assert JobRunner(job, manager).train(LocalSession()) == 3
    assert any("epoch 2 was NOT saved" in one for one in said)
    assert [manager.check_db_exists(epoch) for epoch in range(5)] == [True, True, False, True, False]
    assert [bool(manager.files(name, 2)) for name in NODES] == [False, False]
    assert all(manager.files(name, 3) for name in NODES)


def test_a_runner_stays_as_it_was_made(tmp_path: Path) -> None:
    """Where a run went on from is in its result; the runner keeps what it was given."""
    manager = MultiNodeCheckpointManager(tmp_path)
    for wish, begun in ((None, None), (1, 1)):
        runner = JobRunner(counting(2), manager, resume_from_epoch=wish)
        result = runner.train(LocalSession())
        assert (int(result), result.resumed_from, runner.resume_from_epoch) == (2, begun, wish)


def test_a_bare_name_means_all_nodes_that_have_it(tmp_path: Path) -> None:
    """`load_blobs_from_checkpoints(["total"])` gives each node its own value."""
    JobRunner(counting(2), MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    for names, expected in ((["total"], [1, 11]), (["to*"], [1, 11]), (["trainer_1:total"], [None, 11])):
        session = LocalSession(list(NODES))
        runner = JobRunner(counting(2), MultiNodeCheckpointManager(tmp_path))
        assert runner.load_blobs_from_checkpoints(names, 1, session)
        found = [dict(session.workspace(name)).get("total") for name in NODES]
        assert [None if one is None else int(one) for one in found] == expected


def test_files_of_a_node_are_safetensors(tmp_path: Path) -> None:
    """`manager.files(node, epoch)` gives the files, which any reader of safetensors opens."""
    from safetensors.torch import load_file

    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(counting(1), manager).train(LocalSession())
    (file,) = manager.files("trainer_1", 1)
    assert load_file(file)["total"].tolist() == [11]


def test_a_checkpoint_exists_when_its_commit_record_does(tmp_path: Path) -> None:
    """Files of an epoch alone are no epoch, although each of them can be opened."""
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(counting(2), manager).train(LocalSession())
    files = manager.files("trainer_0", 2)
    records = sorted((tmp_path / "log").glob("*.json"))
    (commit,) = [one for one in records if '"commit"' in one.read_text() and "e00000002" in one.read_text()]
    for record in records[records.index(commit) :]:
        record.unlink()
    assert all(Path(file).is_file() for file in files)
    again = MultiNodeCheckpointManager(tmp_path)
    assert [again.check_db_exists(epoch) for epoch in (1, 2)] == [True, False]
    assert open_checkpoint(tmp_path).epoch == 1


def test_three_saves_that_fail_in_a_row_end_a_run_directory(tmp_path: Path) -> None:
    """Each failed save is told with its epoch; the third in a row ends the run."""
    run, job = tmp_path / "run", Job("failing", blobs={"n": {"held": 0}})

    @job.epoch
    def epoch(ctx: Any) -> None:
        ctx["n"]["held"] = 0 if ctx.epoch < 2 else object()

    job.stop_when(max_epochs(9))
    with warned() as said, pytest.raises(SaveFailedError, match="3 saves failed in a row"):
        JobRunner(job, run, code=False).train(LocalSession())
    assert [one.split(" was NOT saved")[0] for one in said if "NOT saved" in one][:2] == [
        "epoch 2",
        "epoch 3",
    ]
    assert open_checkpoint(run).epoch == 1


def test_names_that_appear_after_init_are_said_to_be_unsaved(tmp_path: Path) -> None:
    """A late name of a workspace is told once, with its node."""
    with Job("late") as job, Node("trainer_0"):
        Task(lambda ws: ws.update(total=1), group=job.init_group)
        Task(lambda: None)
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    job.stop_when(max_epochs(1))
    JobRunner(job, manager).train(session)
    session.workspace("trainer_0")["late"] = 2
    with warned() as said:
        session.run(manager.save(2))
        session.run(manager.save(3))
    (told,) = [one for one in said if "will not be saved" in one]
    assert "'late' appeared on" in told and "trainer_0" in told
    assert "total" in open_checkpoint(tmp_path, 3).blobs and "late" not in open_checkpoint(tmp_path, 3).blobs


def test_decorators_do_nothing_that_tasks_cannot(tmp_path: Path) -> None:
    """A job by `@job.init` and `@job.epoch` and one by `Task` leave the same order and the same values."""
    by_decorators, by_tasks = Job("same"), Job("same")
    logs: tuple[list[str], list[str]] = ([], [])

    def steps(log: list[str]) -> dict[str, Any]:
        return {
            "setup": lambda: log.append("setup"),
            "init": lambda ws: (log.append("init"), ws.update(n=torch.zeros(1)))[0],
            "epoch": lambda ws: (log.append("epoch"), ws["n"].add_(1))[0],
            "download": lambda: log.append("download"),
            "exit": lambda: log.append("exit"),
        }

    for name, step in steps(logs[0]).items():
        getattr(by_decorators, name)(step)
    for name, step in steps(logs[1]).items():
        Task(step, group=getattr(by_tasks, f"{name}_group"))
    found = []
    for job, where in ((by_decorators, "one"), (by_tasks, "other")):
        job.stop_when(max_epochs(2))
        JobRunner(job, MultiNodeCheckpointManager(tmp_path / where)).train(LocalSession())
        found.append(
            {name: one.tolist() for name, one in open_checkpoint(tmp_path / where).load_tensors("n").items()}
        )
    assert found == [{"n": [2.0]}] * 2
    assert logs[0] == logs[1] == ["setup", "init", "epoch", "epoch", "download", "exit"]


@pytest.mark.parametrize("kind", ["minidb", "leveldb", "lmdb"])
def test_old_databases_are_not_read(tmp_path: Path, kind: str) -> None:
    """A file or a directory of another format is one clear error."""
    path = tmp_path / "old"
    if kind == "minidb":
        path.write_bytes(b"\x05\x00\x00\x00\x10\x00\x00\x00fc_w\n" + bytes(range(200)))
    else:
        path.mkdir()
        (path / ("CURRENT" if kind == "leveldb" else "data.mdb")).write_bytes(b"MANIFEST-000002\n" * 40)
    with pytest.raises((RelayError, OSError), match="old"):
        load_blobs(path)
