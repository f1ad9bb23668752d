"""C1 to C9: what the ancestor's own tests asserted, in one process."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
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
    Workspace,
    epoch_limiter,
)
from torchrelay.checkpoint.manager.base import Manager

TOY_NAMES = {"val", "val_cursor", "total"}


def total_of(session: LocalSession, node: str = "trainer_0") -> int:
    return int(session.workspace(node)["total"])


def run_with(builder) -> None:
    """The ancestor's helper: train, resume from every epoch, load every epoch backwards in time."""
    job = toy(0).compile()
    session, manager = builder()
    assert JobRunner(job, manager).train(session) == 4
    assert total_of(session) == 145
    for epoch in (1, 2, 3, 4):
        session, manager = builder()
        assert JobRunner(job, manager, resume_from_epoch=epoch).train(session) == 4
        assert total_of(session) == 145
    for epoch, expected in enumerate(EXPECTED, 1):
        session.run(manager.load(epoch))
        assert total_of(session) == expected


def test_c1_single_node_manager(tmp_path: Path) -> None:
    """Resume from every epoch ends in the same total; a live session loads any epoch, in any order."""
    run_with(lambda: (LocalSession(), CheckpointManager(tmp_path, "temp_node")))
    manager = CheckpointManager(tmp_path, "temp_node")
    for epoch in range(5):
        files = manager.files("temp_node", epoch)
        assert files
        assert all(Path(file).name.startswith(f"temp_node.{epoch}.") for file in files)


def test_c2_multi_node_manager(tmp_path: Path) -> None:
    """The same with the manager for several nodes; files carry the job's node names."""
    run_with(lambda: (LocalSession(), MultiNodeCheckpointManager(tmp_path)))
    manager = MultiNodeCheckpointManager(tmp_path)
    for epoch in range(5):
        assert [Path(f).name for f in manager.files("trainer_0", epoch)] == [
            f"trainer_0.{epoch}.main.safetensors"
        ]


def test_c3_checkpoint_names(tmp_path: Path) -> None:
    """A manager whose init group was built, not run, knows the logical name of every node's epoch."""
    job = toy(0, 1, 2).compile()
    manager = MultiNodeCheckpointManager(tmp_path)
    assert job.nodes_to_checkpoint() == ("trainer_0", "trainer_1", "trainer_2")
    manager.init(job.nodes_to_checkpoint())
    for node in range(3):
        name = manager.get_ckpt_db_name(f"trainer_{node}", 5)
        assert name == str(tmp_path / f"trainer_{node}.5")
    assert manager.get_ckpt_db_name("stranger", 5) is None


def trained_three_nodes(prefix: Path) -> tuple[LocalSession, MultiNodeCheckpointManager]:
    session, manager = LocalSession(), MultiNodeCheckpointManager(prefix)
    assert JobRunner(toy(0, 1, 2), manager).train(session) == 4
    return session, manager


def test_c4_only_init_state_is_saved(tmp_path: Path) -> None:
    """Exactly the names that the GLOBAL workspace holds when init ends are saved, in every epoch."""
    session, _ = trained_three_nodes(tmp_path)
    for node in range(3):
        workspace = session.workspace(f"trainer_{node}")
        assert set(workspace.own_names()) == TOY_NAMES, "epoch temporaries are gone, nothing grows"
    from torchrelay import open_checkpoint

    saved = [set(open_checkpoint(tmp_path, epoch=epoch).blobs) for epoch in range(5)]
    assert all(names - {"rng"} == TOY_NAMES for names in saved)


def test_c5_partial_load_across_nodes(tmp_path: Path) -> None:
    """Some blobs of some nodes load into a session that never trained; a missing epoch is False."""
    trained_three_nodes(tmp_path)
    session = LocalSession()
    runner = JobRunner(toy(0, 1, 2), MultiNodeCheckpointManager(tmp_path))
    names = ["trainer_1:total", "trainer_2:total"]
    runner.load_blobs_from_checkpoints(names, epoch=1, session=session)
    for epoch, expected in enumerate(EXPECTED, 1):
        assert runner.load_blobs_from_checkpoints(names, epoch=epoch, session=session) is True
        assert int(session.blob("trainer_1:total")) == expected
        assert int(session.blob("trainer_2:total")) == expected
    assert runner.load_blobs_from_checkpoints(names, epoch=5, session=session) is False
    assert int(session.blob("trainer_1:total")) == EXPECTED[-1], "the values of before are still there"
    assert "total" not in session.workspace("trainer_0")
    assert set(session.workspace("trainer_1").own_names()) == {"total"}


class CopyUpload(UploadTaskGroupBuilder):
    def __init__(self, target: Path) -> None:
        self.target = target
        self.built: list[int] = []

    def build(self, epoch: int, checkpoint_manager: Manager) -> TaskGroup:
        self.built.append(epoch)
        group = TaskGroup(name="upload")
        for number in range(3):
            node = f"trainer_{number}"
            files = checkpoint_manager.files(node, epoch)

            def copy(node: str = node, files: list[str] = files) -> None:
                (self.target / node).mkdir(parents=True)
                for file in files:
                    shutil.copy(file, self.target / node)

            Task(copy, node=node, group=group)
        return group


def test_c6_upload(tmp_path: Path) -> None:
    """The upload is built once, with the last epoch, before the download group; its copies are whole."""
    order: list[str] = []
    builder = CopyUpload(tmp_path / "upload")
    job = toy(0, 1, 2)
    job.download(lambda: order.append(f"download after {builder.built}"))
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    assert JobRunner(job, manager, upload_task_group_builder=builder).train(LocalSession()) == 4
    assert builder.built == [4]
    assert set(order) == {"download after [4]"}
    for number in range(3):
        (file,) = manager.files(f"trainer_{number}", 4)
        copy = tmp_path / "upload" / f"trainer_{number}" / Path(file).name
        assert copy.read_bytes() == Path(file).read_bytes()


def test_c7_save_failure_is_not_fatal(tmp_path: Path) -> None:
    """A bare manager whose prefix cannot be used warns at every save, and all epochs run."""
    (tmp_path / "file").write_text("in the way")
    written: list[int] = []

    class Handler:
        def set_params(self, **_: object) -> None: ...
        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            return user_epoch

        def write(self, epoch: int) -> None:
            written.append(epoch)

        def report(self, action: str, stats: object) -> None: ...
        def cp_accessible(self, epoch: int | None = None) -> bool:
            return True

    session = LocalSession()
    manager = MultiNodeCheckpointManager(tmp_path / "file" / "below", Handler())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert JobRunner(toy(0), manager).train(session) == 4
    assert len([w for w in caught if "NOT saved" in str(w.message)]) == 5
    assert total_of(session) == 145
    assert written == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_c8_download_group() -> None:
    """Without a manager, on a node with a colon: download runs after the epochs, tasks write through."""
    order: list[str] = []
    with Job() as job, Node("trainer:0"):
        with job.init_group:
            Task(lambda ws: ws.update({n: torch.ones(8) for n in ("in1", "in2", "out", "result")}))
            Task(lambda: order.append("init"))

        def add(ws: Workspace) -> None:
            ws["out"] = ws["in1"] + ws["in2"]
            order.append("epoch")

        def download(ws: Workspace) -> None:
            ws["result"] = ws["out"].clone()
            order.append("download")

        Task(add)
        with job.download_group:
            Task(download)
        with job.exit_group:
            Task(lambda: order.append("exit"))
        epoch_limiter(job, 1)
    session = LocalSession()
    assert JobRunner(job).train(session) == 1
    workspace = session.workspace("trainer:0")
    assert torch.equal(workspace["out"], torch.full((8,), 2.0))
    assert torch.equal(workspace["result"], torch.full((8,), 2.0))
    assert order == ["init", "epoch", "download", "exit"]


def test_c9_a_manager_is_used_again(tmp_path: Path) -> None:
    """One workspace, session and manager for everything: every call rewinds and ends in the same total."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    job = toy(0).compile()
    assert JobRunner(job, manager).train(session) == 4
    for epoch in (1, 2, 3, 4):
        assert JobRunner(job, manager, resume_from_epoch=epoch).train(session) == 4
        assert total_of(session) == 145


@pytest.mark.parametrize("nodes", [(0,), (0, 1, 2)])
def test_c9_on_several_emulated_nodes(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    """Every node of a reused manager comes to the same total."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(tmp_path)
    job = toy(*nodes)
    for epoch in (None, 2, 3):
        assert JobRunner(job, manager, resume_from_epoch=epoch).train(session) == 4
        assert {total_of(session, f"trainer_{node}") for node in nodes} == {145}
