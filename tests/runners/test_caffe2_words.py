"""What Caffe2's users type and torchrelay took otherwise, or not at all."""

from __future__ import annotations

import pytest

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Task,
    TaskGroup,
    max_epochs,
    open_checkpoint,
)
from torchrelay.errors import UsageError


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
