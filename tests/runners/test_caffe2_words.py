"""What Caffe2's users type and torchrelay took otherwise, or not at all."""

from __future__ import annotations

import warnings

import pytest

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
from torchrelay.errors import SaveFailedError, UsageError


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
    with pytest.raises(UsageError, match="they are one argument"):
        JobRunner(Job("x"), tmp_path, checkpoint_manager=MultiNodeCheckpointManager(tmp_path))


@pytest.mark.parametrize(
    "make", [MultiNodeCheckpointManager, lambda at, given: CheckpointManager(at, "n", given)]
)
def test_a_db_type_in_its_old_place_is_refused_by_name(tmp_path, make) -> None:
    """'minidb' where the handler is now is no handler, and neither is any other text."""
    with pytest.raises(UsageError, match="leave Caffe2's db_type out"):
        make(tmp_path / "m", "minidb")
    with pytest.raises(UsageError, match="an object with set_params"):
        make(tmp_path / "m", object())
    handler = FileMetadataHandler(tmp_path / "h")
    with pytest.raises(UsageError, match="leave Caffe2's db_type out"):
        MultiNodeCheckpointManager(tmp_path / "m", "minidb", handler)
    with pytest.raises(UsageError, match="leave Caffe2's db_type out"):
        CheckpointManager(tmp_path / "m", "n", "minidb", handler)
    with pytest.raises(UsageError, match="give what follows by its name"):
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
