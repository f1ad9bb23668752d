"""C2 to C9 on as many nodes as there are: what the ancestor's tests asserted, on real ranks too."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from run_cases import RUN_CASES
from runner_cases import ANY_SIZE
from stage import RecordingHandler, Stage, raises, totals, warned
from toy import EXPECTED

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    TaskGroup,
    UploadTaskGroupBuilder,
    Workspace,
    epoch_limiter,
    open_checkpoint,
)
from torchrelay.errors import UsageError

TOY_NAMES = {"val", "val_cursor", "total"}


def c1_a_single_node_manager_serves_one_node(stage: Stage) -> None:
    """A manager for one node refuses a job of several, before anything is trained."""
    ran: list[int] = []
    job = stage.toy()
    job.epoch(lambda: ran.append(1))
    with raises(UsageError, "MultiNodeCheckpointManager"):
        JobRunner(job, CheckpointManager(stage.root, "temp_node")).train(stage.session())
    assert ran == []


def c2_multi_node_manager(stage: Stage) -> None:
    """Resume from every epoch ends in the same total; a live session loads any epoch, in any order."""
    job = stage.toy().compile()
    session, manager = stage.session(), MultiNodeCheckpointManager(stage.root)
    assert JobRunner(job, manager).train(session) == 4
    assert totals(session) == {145}
    for epoch in (1, 2, 3, 4):
        session, manager = stage.session(), MultiNodeCheckpointManager(stage.root)
        assert JobRunner(job, manager, resume_from_epoch=epoch).train(session) == 4
        assert totals(session) == {145}
    for epoch in (4, 1, 3, 2):
        session.run(manager.load(epoch))
        assert totals(session) == {EXPECTED[epoch - 1]}
    for node in stage.nodes:
        names = [Path(file).name for epoch in range(5) for file in manager.files(node, epoch)]
        assert names == [f"{node}.{epoch}.main.safetensors" for epoch in range(5)]


def c3_checkpoint_names(stage: Stage) -> None:
    """A manager whose init group was built, not run, knows the logical name of every node's epoch."""
    job = stage.toy().compile()
    manager = MultiNodeCheckpointManager(stage.root)
    assert job.nodes_to_checkpoint() == stage.nodes
    manager.init(job.nodes_to_checkpoint())
    for node in stage.nodes:
        assert manager.get_ckpt_db_name(node, 5) == str(stage.root / f"{node}.5")
    assert not stage.root.exists()


def c4_only_init_state_is_saved(stage: Stage) -> None:
    """The names that the GLOBAL workspace holds when init ends are saved in every epoch, and no others."""
    session = stage.session()
    assert JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root)).train(session) == 4
    for place in session.local_nodes:
        assert set(session.workspace(place.name).own_names()) == TOY_NAMES
    for epoch in range(5):
        assert set(open_checkpoint(stage.root, epoch).blobs) - {"rng"} == TOY_NAMES


def c5_partial_load_across_nodes(stage: Stage) -> None:
    """Some blobs of some nodes load into a session that never trained; a missing epoch is False."""
    assert JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root)).train(stage.session()) == 4
    session = stage.session()
    runner = JobRunner(stage.toy(), MultiNodeCheckpointManager(stage.root))
    names = [f"{node}:total" for node in stage.nodes[-2:]]
    for epoch, expected in enumerate(EXPECTED, 1):
        assert runner.load_blobs_from_checkpoints(names, epoch, session) is True
        assert {int(session.blob(name)) for name in names} == {expected}
    assert runner.load_blobs_from_checkpoints(names, 5, session) is False
    assert {int(session.blob(name)) for name in names} == {EXPECTED[-1]}
    for place in session.local_nodes:
        assert {name.rpartition(":")[2] for name in session.workspace(place.name).own_names()} <= {"total"}


class CopyUpload(UploadTaskGroupBuilder):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.built: list[int] = []

    def build(self, epoch: int, checkpoint_manager) -> TaskGroup:
        self.built.append(epoch)
        group = TaskGroup(name="upload")
        for node in self.stage.nodes:
            files = checkpoint_manager.files(node, epoch)
            target = self.stage.root / "upload" / node

            def copy(target: Path = target, files: list[str] = files) -> None:
                target.mkdir(parents=True)
                for file in files:
                    shutil.copy(file, target)

            Task(copy, node=node, group=group)
        return group


def c6_upload(stage: Stage) -> None:
    """The upload is built once, with the last epoch, before the download group; its copies are whole."""
    builder, order = CopyUpload(stage), []
    job = stage.toy()
    job.download(lambda: order.append(list(builder.built)))
    manager = MultiNodeCheckpointManager(stage.root / "ckpt")
    session = stage.session()
    assert JobRunner(job, manager, upload_task_group_builder=builder).train(session) == 4
    assert builder.built == [4]
    assert order and all(built == [4] for built in order)
    for node in stage.nodes:
        (file,) = manager.files(node, 4)
        assert (stage.root / "upload" / node / Path(file).name).read_bytes() == Path(file).read_bytes()


def c7_save_failure_is_not_fatal(stage: Stage) -> None:
    """A bare manager whose prefix cannot be used warns at every save, and all epochs run."""
    session, handler = stage.session(), RecordingHandler()
    if stage.first:
        stage.root.mkdir(parents=True, exist_ok=True)
        (stage.root / "file").write_text("in the way")
    session.peers.exchange("the file is there", None)
    manager = MultiNodeCheckpointManager(stage.root / "file" / "below", handler)
    with warned() as texts:
        assert JobRunner(stage.toy(), manager).train(session) == 4
    assert totals(session) == {145}
    assert handler.written == []
    assert len([text for text in texts if "NOT saved" in text]) == (5 if stage.first else 0)
    assert [path.name for path in stage.root.iterdir()] == ["file"]


def c8_download_group(stage: Stage) -> None:
    """Without a manager, on a node with a colon: download runs after the epochs, tasks write through."""
    order: list[str] = []
    with Job() as job, Node("trainer:0"):
        with job.init_group:
            Task(lambda ws: ws.update({n: torch.ones(8) for n in ("in1", "in2", "out", "result")}))

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
    session = stage.session()
    assert JobRunner(job).train(session) == 1
    if "trainer:0" in [place.name for place in session.local_nodes]:
        workspace = session.workspace("trainer:0")
        assert torch.equal(workspace["result"], torch.full((8,), 2.0))
        assert order == ["epoch", "download", "exit"]
    else:
        assert order == []


def c9_a_manager_is_used_again(stage: Stage) -> None:
    """One session and manager for everything: every call rewinds and ends in the same total."""
    session, manager = stage.session(), MultiNodeCheckpointManager(stage.root)
    job = stage.toy().compile()
    assert JobRunner(job, manager).train(session) == 4
    for epoch in (1, 2, 3, 4):
        assert JobRunner(job, manager, resume_from_epoch=epoch).train(session) == 4
        assert totals(session) == {145}


ON_RANKS = [
    c1_a_single_node_manager_serves_one_node,
    c2_multi_node_manager,
    c3_checkpoint_names,
    c4_only_init_state_is_saved,
    c5_partial_load_across_nodes,
    c6_upload,
    c7_save_failure_is_not_fatal,
    c8_download_group,
    c9_a_manager_is_used_again,
    *ANY_SIZE,
    *RUN_CASES,
]
