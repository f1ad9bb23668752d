"""Managers used bare: outside of a runner, again and again, on live sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stage import RecordingHandler, totals, warned
from toy import EXPECTED, toy

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskGroup,
    UploadTaskGroupBuilder,
    max_epochs,
)
from torchrelay.errors import NotAllowedNowError, RelayError, UnknownEpochError, UsageError


def test_set_params_remembers_what_was_said(tmp_path: Path) -> None:
    """None keeps an earlier path_prefix and path_type; the handler is told names, prefix and type."""
    handler = RecordingHandler()
    manager = MultiNodeCheckpointManager(tmp_path, handler)
    manager.set_params(["a", "b"], path_prefix="/elsewhere", path_type="kind")
    manager.set_params(["a", "b"])
    manager.set_params(["a", "b"], path_type="other")
    told = [(params["path_prefix"], params["path_type"]) for params in handler.params]
    assert told == [("/elsewhere", "kind"), ("/elsewhere", "kind"), ("/elsewhere", "other")]
    assert all(params["node_names"] == ["a", "b"] for params in handler.params)
    assert all(params["db_prefix"] == str(tmp_path) for params in handler.params)
    assert handler.params[0]["db_type"]


def test_a_handler_is_told_the_stored_name_of_a_single_node(tmp_path: Path) -> None:
    """The single-node manager's own name, whatever the job calls its node."""
    handler = RecordingHandler()
    manager = CheckpointManager(tmp_path, "temp_node", handler)
    assert JobRunner(toy(0), manager).train(LocalSession()) == 4
    assert handler.params[0]["node_names"] == ["temp_node"]
    assert manager.get_ckpt_db_name("temp_node", 3) == manager.get_ckpt_db_name("trainer_0", 3)
    assert manager.get_ckpt_db_name("stranger", 3) is None
    assert manager.files("temp_node", 3) and manager.files("stranger", 3) == []


def test_without_a_handler_the_users_epoch_stands(tmp_path: Path) -> None:
    """get_resume_from_epoch_id gives it back, cp_accessible is True, write and report do nothing."""
    manager = MultiNodeCheckpointManager(tmp_path)
    assert [manager.get_resume_from_epoch_id(epoch) for epoch in (None, 0, 3)] == [None, 0, 3]
    assert manager.cp_accessible() is True
    manager.write_checkpoint_metadata(1)
    manager.report_checkpoint_stats("checkpoint_save")
    manager.set_params(["a"])
    assert list(tmp_path.iterdir()) == []


def test_nodes_are_checked(tmp_path: Path) -> None:
    """No node, a node twice, or other nodes than at first are refused with the names."""
    manager = MultiNodeCheckpointManager(tmp_path)
    with pytest.raises(UsageError, match="empty"):
        manager.init([])
    with pytest.raises(UsageError, match="repetitions"):
        manager.init(["a", "a"])
    manager.init(["a", "b"])
    with pytest.raises(UsageError, match="a, b, not b, a"):
        manager.init(["b", "a"])


def test_a_second_init_is_an_empty_group_with_the_first_set(tmp_path: Path) -> None:
    """The checkpoint set of the first init is kept; a name that came later is told once, not saved."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    assert JobRunner(toy(0), manager).train(session) == 4
    group = manager.init(["trainer_0"])
    assert isinstance(group, TaskGroup) and group.tasks() == ()
    session.run(group)


def test_loads_on_a_live_session_go_back_and_forth(tmp_path: Path) -> None:
    """Loading replaces what the session holds, in any order, also from another directory."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path / "a")
    assert JobRunner(toy(0, 1), manager).train(session) == 4
    for epoch in (4, 1, 3, 2, 2):
        session.run(manager.load(epoch))
        assert totals(session) == {EXPECTED[epoch - 1]}
    with pytest.raises(UnknownEpochError):
        session.run(manager.load(9))
    assert totals(session) == {EXPECTED[1]}
    other = MultiNodeCheckpointManager(tmp_path / "b")
    other.init(["trainer_0", "trainer_1"])
    session.run(other.load(1, path_prefix=str(tmp_path / "a")))
    assert totals(session) == {EXPECTED[0]}
    assert not (tmp_path / "b").exists()


def test_load_blobs_from_checkpoint_takes_what_is_there(tmp_path: Path) -> None:
    """Names that the epoch has are loaded on every node, the rest is ignored."""
    manager = MultiNodeCheckpointManager(tmp_path)
    assert JobRunner(toy(0, 1), manager).train(LocalSession()) == 4
    session = LocalSession(["trainer_0", "trainer_1"])
    session.run(manager.load_blobs_from_checkpoint(["total", "nothing"], 2))
    assert totals(session) == {EXPECTED[1]}
    assert set(session.workspace("trainer_1").own_names()) == {"total"}


def test_an_evaluation_reads_a_node_that_it_is_not(tmp_path: Path) -> None:
    """A process that is none of the nodes loads `trainer_1:total`; training afterwards does not save it."""
    manager = MultiNodeCheckpointManager(tmp_path)
    assert JobRunner(toy(0, 1), manager).train(LocalSession()) == 4
    session = LocalSession(["evaluator"])
    reader = MultiNodeCheckpointManager(tmp_path)
    names = ["trainer_1:total"]
    assert reader.load_blobs_locally(["trainer_0", "trainer_1"], names, 3, session) is True
    assert int(session.blob("trainer_1:total")) == EXPECTED[2]
    assert session.workspace()["trainer_1:total"] is session.blob("trainer_1:total")
    job = Job(blobs={"own": torch.ones(1)})
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    fresh = MultiNodeCheckpointManager(tmp_path / "evaluation")
    assert JobRunner(job, fresh).train(session) == 1


def test_several_jobs_through_one_manager(tmp_path: Path) -> None:
    """Runs from scratch, resumed, by other jobs of the same nodes: the last state is always the right one."""
    manager, session = MultiNodeCheckpointManager(tmp_path), LocalSession()
    with warned():
        for resume in (None, 2, None, 0, 4):
            assert JobRunner(toy(0, 1), manager, resume_from_epoch=resume).train(session) == 4
            assert totals(session) == {145}
            session = LocalSession() if resume == 0 else session


def test_saving_by_hand(tmp_path: Path) -> None:
    """save_checkpoints outside of train saves the state as it is now; a failure would only warn."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    runner = JobRunner(toy(0), manager)
    assert runner.train(session) == 4
    session.workspace()["total"] = torch.tensor([7])
    runner.save_checkpoints(5, session)
    fresh = LocalSession()
    assert runner.load_blobs_from_checkpoints(["total"], 5, fresh) is True
    assert totals(fresh) == {7}
    assert JobRunner(toy(0), MultiNodeCheckpointManager(tmp_path), 5).train(LocalSession()) >= 5


def test_two_managers_do_not_fight_after_a_run(tmp_path: Path) -> None:
    """A manager releases its directory when train ends, so another one need not wait."""
    one, other = MultiNodeCheckpointManager(tmp_path), MultiNodeCheckpointManager(tmp_path)
    with warned():
        for manager in (one, other, one, other):
            assert JobRunner(toy(0), manager).train(LocalSession()) == 4


def test_an_upload_without_a_manager_gets_none(tmp_path: Path) -> None:
    """The builder is asked once with the last epoch, whatever the runner saves with."""
    asked: list[tuple[int, object]] = []

    class Builder(UploadTaskGroupBuilder):
        def build(self, epoch, checkpoint_manager):
            asked.append((epoch, checkpoint_manager))
            return TaskGroup(name="nothing")

    JobRunner(toy(0), upload_task_group_builder=Builder()).train(LocalSession())
    assert asked == [(4, None)]


def test_an_upload_gets_the_newest_committed_epoch(tmp_path: Path) -> None:
    """Where the last save failed, the epoch before it is uploaded, for it is what there is."""
    handler = RecordingHandler()
    handler.closed_at = {4}
    asked: list[int] = []

    class Builder(UploadTaskGroupBuilder):
        def build(self, epoch, checkpoint_manager):
            asked.append(epoch)
            return TaskGroup(name="nothing")

    manager = MultiNodeCheckpointManager(tmp_path, handler)
    with warned():
        assert JobRunner(toy(0), manager, upload_task_group_builder=Builder()).train(LocalSession()) == 4
    assert asked == [3]


def test_one_train_at_a_time(tmp_path: Path) -> None:
    """A train inside of a train is refused, and the outer one fails with that as its reason."""
    job = Job()
    inner = JobRunner(toy(0))
    job.epoch(lambda: inner.train(LocalSession()))
    job.stop_when(max_epochs(1))
    with pytest.raises(RelayError, match="another train") as caught:
        JobRunner(job).train(LocalSession())
    assert isinstance(caught.value, NotAllowedNowError) or isinstance(
        caught.value.__cause__, NotAllowedNowError
    )


def test_names_do_not_grow_with_epochs(tmp_path: Path) -> None:
    """W18: neither the workspace nor the shards of later epochs hold more than those of the first."""
    session = LocalSession()
    with Job() as job, Node("trainer_0"):
        with job.init_group:
            Task(lambda ws: ws.update(x=torch.zeros(4)))
        Task(lambda ws: ws.update(temporary=1))
    job.stop_when(max_epochs(12))
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(job, manager).train(session)
    assert session.workspace().own_names() == ("x",)
    sizes = [Path(manager.files("trainer_0", epoch)[0]).stat().st_size for epoch in range(13)]
    assert len(set(sizes)) == 1
