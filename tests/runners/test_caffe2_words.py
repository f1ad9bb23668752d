"""What Caffe2's users type and torchrelay took otherwise, or not at all."""

from __future__ import annotations

import warnings

import pytest
import torch
from torchrun import torchrun

from torchrelay import (
    CheckpointManager,
    FileMetadataHandler,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskGroup,
    db_name,
    get_ckpt_filename,
    max_epochs,
    open_checkpoint,
)
from torchrelay.errors import DamagedError, SaveFailedError, UsageError


def counting(**options: object) -> Job:
    job = Job("words", **options)
    job.init(lambda ws: ws.update(n=0))
    job.epoch(lambda ws: ws.update(n=ws["n"] + 1))
    return job


def test_stop_conditions_of_the_constructor_end_the_job(tmp_path) -> None:
    """`Job(stop_conditions=[...])` is `stop_when`, and `checkpoint_manager=` the manager."""
    manager = MultiNodeCheckpointManager(tmp_path)
    runner = JobRunner(counting(stop_conditions=[max_epochs(2)]), checkpoint_manager=manager)
    assert not manager.check_db_exists(2)
    assert runner.train(LocalSession()) == 2
    assert [epoch for epoch in range(5) if manager.check_db_exists(epoch)] == [0, 1, 2]


def test_a_manager_is_given_once(tmp_path) -> None:
    """A place and a manager at once are refused."""
    with pytest.raises(UsageError, match="are the same argument"):
        JobRunner(Job("x"), tmp_path, checkpoint_manager=MultiNodeCheckpointManager(tmp_path))


@pytest.mark.parametrize(
    "make", [MultiNodeCheckpointManager, lambda at, given: CheckpointManager(at, "n", given)]
)
def test_a_db_type_in_its_old_place_is_refused_by_name(tmp_path, make) -> None:
    """'minidb' where the handler is now is no handler, and neither is any other text."""
    with pytest.raises(UsageError, match="not Caffe2's db_type"):
        make(tmp_path / "m", "minidb")
    with pytest.raises(UsageError, match="an object with set_params"):
        make(tmp_path / "m", object())
    handler = FileMetadataHandler(tmp_path / "h")
    with pytest.raises(UsageError, match="not Caffe2's db_type"):
        MultiNodeCheckpointManager(tmp_path / "m", "minidb", handler)
    with pytest.raises(UsageError, match="not Caffe2's db_type"):
        CheckpointManager(tmp_path / "m", "n", "minidb", handler)
    with pytest.raises(UsageError, match="too many positional arguments"):
        MultiNodeCheckpointManager(tmp_path / "m", handler, 3)


def test_the_outputs_of_a_task_may_be_called() -> None:
    """`task.outputs()[0]` is `task.outputs[0]`."""
    with TaskGroup():
        task = Task(lambda ws: ws.update(a=1), outputs=["a"])
    assert task.outputs() is task.outputs
    with LocalSession() as session:
        session.run(task)
        assert task.outputs()[0].fetch() == 1


def test_init_takes_the_names_of_an_epoch_elsewhere(tmp_path) -> None:
    """`init(retrieve_from_epoch, path_prefix=)` looks in that directory; the next save has these names."""
    here, there = tmp_path / "here", tmp_path / "there"
    JobRunner(counting(stop_conditions=[max_epochs(2)]), CheckpointManager(there, "n")).train(LocalSession())
    session, manager = LocalSession(), CheckpointManager(here, "n")
    session.run(manager.init(["trainer_0"], retrieve_from_epoch=2, path_prefix=str(there)))
    session.run(manager.load(2, path_prefix=str(there)))
    session.run(manager.save(3))
    assert session.workspace()["n"] == open_checkpoint(here, 3).value("n") == 2


def test_a_stop_blob_may_be_made_by_the_epoch_task(tmp_path) -> None:
    """What a PRIVATE epoch task puts under the name of a stop condition outlives it, and is not saved."""
    job = Job("stops")
    job.init(lambda ws: ws.update(n=0))

    def epoch(ws) -> None:
        ws["n"] += 1
        ws["done"], ws["other"] = ws["n"] == 3, 1

    job.epoch(epoch)
    job.add_stop_condition("done")
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert JobRunner(job, manager).train(session) == 3
    assert session.workspace()["done"] is True and "other" not in session.workspace()
    assert manager.blob_list() == ["n"]


def test_a_stop_blob_of_one_node_is_kept_there_alone() -> None:
    """A condition that is added on a node reads the blob of that node; another's vanishes as ever."""
    with Job("stops") as job:
        for name in ("a", "b"):
            with Node(name):
                Task(lambda ws: ws.update(done=True))
                if name == "b":
                    job.add_stop_condition("done")
    session = LocalSession()
    assert JobRunner(job).train(session) == 1
    assert ["done" in session.workspace(name) for name in ("a", "b")] == [False, True]


def test_names_and_times_of_what_a_manager_saves(tmp_path) -> None:
    """`blob_list`, `collect_checkpoint_stats`, `get_ckpt_filename` and `db_name` are there as in Caffe2."""
    manager = CheckpointManager(tmp_path, "n")
    with pytest.raises(UsageError, match=r"manager.init\(nodes\)"):
        manager.blob_list()
    JobRunner(counting(stop_conditions=[max_epochs(1)]), manager).train(LocalSession())
    stats: dict[str, float] = {"mine": 0.0}
    manager.collect_checkpoint_stats(stats)
    assert manager.blob_list() == ["n"] and get_ckpt_filename("n", 1) == "n.1"
    assert db_name(1, "n", tmp_path) == manager.get_ckpt_db_name("n", 1) == f"{tmp_path}/n.1"
    assert db_name(1, "n", tmp_path, "/elsewhere") == "/elsewhere/n.1"
    assert stats.keys() == {"mine", db_name(1, "n", tmp_path)} and stats[db_name(1, "n", tmp_path)] > 0


def test_a_path_type_is_refused_by_name(tmp_path) -> None:
    """It changes nothing where epochs are looked for, so it is not taken in silence; a handler is told it."""
    manager = CheckpointManager(tmp_path, "n")
    manager.set_params(["n"], path_type="hdfs")
    for call in (lambda: manager.load(1, path_type="hdfs"), lambda: manager.init(["n"], path_type="hdfs")):
        with pytest.raises(UsageError, match="path_prefix is a directory, or a URL"):
            call()


def test_a_result_says_where_it_went_on_from(tmp_path) -> None:
    """`result.resumed_from` is the epoch that was loaded: None, the last one, or the one asked for."""
    manager, results = MultiNodeCheckpointManager(tmp_path), []
    for epochs, wish in ((2, None), (3, 1)):
        job = counting(stop_conditions=[max_epochs(epochs)])
        results.append(JobRunner(job, manager, wish).train(LocalSession()))
    run = tmp_path / "run"
    for epochs in (1, 2, 2):
        results.append(JobRunner(counting(stop_conditions=[max_epochs(epochs)]), run).train(LocalSession()))
    assert [one.resumed_from for one in results] == [None, 1, None, 1, 2]


def test_a_bare_manager_gives_up_where_it_is_told_to(tmp_path) -> None:
    """`max_failed_saves` holds for bare managers too; without it they only warn."""
    below = tmp_path / "file"
    below.write_text("")
    for limit, ends in ((None, True), (2, False)):
        job = counting(stop_conditions=[max_epochs(4)])
        runner = JobRunner(job, MultiNodeCheckpointManager(below / "m"), max_failed_saves=limit)
        if ends:
            with pytest.warns(UserWarning):
                assert runner.train(LocalSession()) == 4
        else:
            with pytest.raises(SaveFailedError, match="2 saves failed in a row"), pytest.warns(UserWarning):
                runner.train(LocalSession())


def test_groups_are_given_by_their_names() -> None:
    """`Job(init_group=, epoch_group=, ...)` takes the caller's groups; the first positional is the name."""
    groups = {f"{one}_group": TaskGroup(name=one) for one in ("init", "epoch", "download", "exit")}
    job = Job(**groups)
    assert all(getattr(job, name) is group for name, group in groups.items())
    with pytest.raises(UsageError, match=r"TaskGroup.* name of a job"):
        Job(groups["init_group"])  # type: ignore[arg-type]


def shards() -> Job:
    """Two nodes, each with a blob that no other has, and one that both have."""
    with Job("shards") as job:
        for number, name in enumerate(("trainer_0", "trainer_1")):
            with Node(name):
                own = {f"of_{number}": torch.ones(1), "shard": torch.full((1,), float(number))}
                Task(lambda ws, own=own: ws.update(own), group=job.init_group)
                Task(lambda: None)
    job.stop_when(max_epochs(1))
    return job


def test_each_node_loads_the_names_that_it_has(tmp_path) -> None:
    """`load_blobs_from_checkpoint(names, epoch)` ignores on a node what only another one has."""
    JobRunner(shards(), MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    nodes = ["trainer_0", "trainer_1"]
    session, manager = LocalSession(nodes), MultiNodeCheckpointManager(tmp_path)
    manager.init(nodes)
    session.run(manager.load_blobs_from_checkpoint(["of_1", "shard", "nowhere"], 1))
    found = [{name: int(one) for name, one in session.workspace(node).items()} for node in nodes]
    assert found == [{"shard": 0}, {"of_1": 1, "shard": 1}]


def test_a_save_before_init_takes_what_is_there(tmp_path) -> None:
    """Without `init` the first save finds the names by itself."""
    session, manager = LocalSession(["n"]), MultiNodeCheckpointManager(tmp_path)
    session.workspace("n")["total"] = torch.tensor([7])
    session.run(manager.save(1))
    assert manager.blob_list() == ["total"]
    assert open_checkpoint(tmp_path, 1)["total"][:].tolist() == [7]


@pytest.mark.parametrize("what", ["truncated", "header"])
def test_a_damaged_shard_is_raised_by_a_partial_load(tmp_path, what: str) -> None:
    """A file that is cut, or whose header is damaged, is no False: DamagedError names it."""
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(shards(), manager).train(LocalSession())
    (file,) = (tmp_path / "data").glob("e00000001-*/trainer_1.*.main.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if what == "truncated" else whole[:20] + b"\x00" + whole[21:])
    session = LocalSession()
    with pytest.raises(DamagedError, match=r"trainer_1\.1\.main\.safetensors"):
        JobRunner(shards(), MultiNodeCheckpointManager(tmp_path)).load_blobs_from_checkpoints(
            ["trainer_1:of_1"], 1, session
        )
    assert "of_1" not in session.workspace("trainer_1")


COLLECTED = """
import torch, torch.distributed as dist
import torchrelay
from torchrelay import Job, JobRunner, max_epochs

session = torchrelay.init()
job = Job("collects")
job.init(lambda ctx: ctx.workspace.update(part=torch.tensor([float(ctx.rank)])))
job.epoch(lambda ws: ws.update(part=ws["part"] + 1))

@job.download
def collect(ctx):
    parts = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(parts, ctx["part"], group=ctx.group)
    print("collected", torch.cat(parts).tolist(), flush=True)

job.stop_when(max_epochs(2))
JobRunner(job).train(session)
session.close()
"""


@pytest.mark.ranks
def test_the_download_group_collects_what_ranks_have(tmp_path) -> None:
    """Parameters that lie scattered over three ranks come together on each, once, when training is over."""
    done = torchrun(COLLECTED, warm=True, ranks=3, cwd=tmp_path)
    assert done.rc == 0 and done.out.count("collected [2.0, 3.0, 4.0]") == 3, done
