"""Define the public checkpoint managers, their options, and the builder of upload tasks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from torchrelay.checkpoint.format.position import Patterns
from torchrelay.checkpoint.log.retention import BestEpochs
from torchrelay.checkpoint.manager.base import Manager, db_name
from torchrelay.checkpoint.save.change_detection import Verify
from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import check_node_name
from torchrelay.jobs.job import TaskGroup
from torchrelay.metadata.handlers import MetadataHandler

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CheckpointManager(Manager):
    """Save and load a job's only node, stored as `node_name` whichever name the job gives it.

    Args:
        db_prefix: directory or URL (`s3://bucket/run`) of the checkpoints.
        node_name: name under which the node is stored.
        metadata_handler: object that is notified of commits and chooses where to resume; None: the log
            decides.

    The other options are those of `MultiNodeCheckpointManager`.

    Example:
        manager = CheckpointManager("runs/a/checkpoints", "trainer_0", keep_last=3)
    """

    def __init__(
        self,
        db_prefix: str | Path,
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        *of_caffe2: Any,
        takeover_secs: float = 15.0,
        **options: Unpack[ManagerOptions],
    ) -> None:
        others: dict[str, Any] = {"takeover_secs": takeover_secs, **options}
        super().__init__(db_prefix, metadata_handler, *of_caffe2, **others)
        self.node_name = check_node_name(node_name)

    def stored_name(self, node: str) -> str:
        """Return `node_name`, for every node."""
        return self.node_name

    def _check_nodes(self, nodes: Sequence[str] | None) -> tuple[str, ...]:
        names = super()._check_nodes(nodes or [self.node_name])
        if len(names) > 1:
            raise UsageError(
                f"CheckpointManager stores one node, the job has {len(names)} ({', '.join(names)}): "
                "use MultiNodeCheckpointManager"
            )
        return names

    def get_ckpt_db_name(self, node: str, epoch: int) -> str | None:
        """Return the logical path of the node's part of an epoch.

        Args:
            node: the stored name, or the job's name of the node.
            epoch: number of the epoch.

        Returns:
            `prefix/node_name.epoch`; None for any other node.

        Example:
            >>> CheckpointManager("runs/a", "trainer_0").get_ckpt_db_name("trainer_0", 3)
            'runs/a/trainer_0.3'
        """
        if node != self.node_name and (self._nodes is None or node not in self._nodes):
            return None
        return db_name(epoch, self.node_name, self.db_prefix)

    def files(self, node: str, epoch: int) -> list[str]:
        """List the committed files of an epoch of the current branch.

        Args:
            node: the stored name, or the job's name of the node.
            epoch: number of the epoch.

        Returns:
            Paths or URLs; empty for any other node, and for an epoch that is not committed.

        Example:
            paths = manager.files("trainer_0", epoch=3)
        """
        return super().files(node, epoch) if self.get_ckpt_db_name(node, epoch) else []


_own, _base = (inspect.signature(one.__init__) for one in (CheckpointManager, Manager))
CheckpointManager.__init__.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[
        *(one for one in _own.parameters.values() if one.kind < one.KEYWORD_ONLY),
        *(one for one in _base.parameters.values() if one.kind is one.KEYWORD_ONLY),
    ]
)
"""The signature with the keyword options of `Manager`."""


class MultiNodeCheckpointManager(Manager):
    """Save and load all nodes of a job, each under its own name, as one epoch.

    An epoch exists once every node's part is durable and the log has its commit record.

    Args:
        db_prefix: directory or URL (`s3://bucket/run`) of the checkpoints.
        metadata_handler: object that is notified of commits and chooses where to resume; None: the log
            decides.
        keep_last: number of newest epochs to keep. Without any `keep_*` option all epochs are kept.
        keep_every: also keep every epoch whose number is a multiple of this.
        keep_best: also keep the best by a metric: `("val/acc", "max")`, or `("val/acc", "max", 3)` for three.
            The newest epoch that can be resumed from is always kept.
        keep_optimizer_last: number of kept epochs that keep their optimizer; others can be loaded, not
            resumed.
        takeover_secs: seconds without a heartbeat after which another job may take the directory over.
        asynchronous: write and commit in the background. A save returns once training can no longer change
            the saved bytes; one save is in flight at a time.
        staging_limit: bytes per process that asynchronous saves may stage; None: half of its share of free
            memory.
        verify_staging: which of the bytes staged in the background are compared: "samples" or "full".
        reuse: reference tensors that have not changed since the previous epoch instead of writing them again.
            None: only for synchronous saves, because the comparison delays training. At most 8 older attempts
            are referenced, each while half of it is in use.
        include: patterns of leaves to save (`"debug"`, `"*.inv_freq"`); None: all. Random states always are.
        exclude: patterns of leaves to leave out; a resume needs the same patterns and keeps the program's
            values.
        share_reads: for several hosts: each reads a share of tensors that all nodes load (8 MiB and more in
            all) and sends it to the others, which verify it. Give all processes the same value.
        compare_every: epochs between full comparisons of replicas (10); other saves compare samples. A
            difference fails the save and names the tensors.
        single_writer: "external" skips the check that the storage keeps a second writer out (UsageError where
            it does not). Something else must then ensure that one job at a time writes, tags or pins there.
        tier: local directory to save to first, `Tier(near="/local/nvme/run")`, with background upload to
            `db_prefix`; see `Tier`.
        rename: new names by stored names for loads, `{"old.": "new."}`, in optimizers too.
        resume_exclude: patterns of leaves that keep the program's value where the stored one does not fit.
        resume_strict: raise for blobs that are new or no longer registered, instead of a warning.

    Example:
        manager = MultiNodeCheckpointManager("s3://bucket/run", keep_last=3, asynchronous=True)
    """


class ManagerOptions(TypedDict, total=False):
    """Options of `MultiNodeCheckpointManager` that a JobRunner passes; None is the manager's default."""

    keep_last: int | None
    keep_every: int | None
    keep_best: BestEpochs
    keep_optimizer_last: int | None
    asynchronous: bool | None
    staging_limit: int | None
    verify_staging: Verify | None
    reuse: bool | None
    include: Patterns
    exclude: Patterns
    share_reads: bool | None
    compare_every: int | None
    single_writer: SingleWriter
    tier: Tier | None
    rename: Mapping[str, str] | None
    resume_exclude: Patterns
    resume_strict: bool | None


def check_options(owner: str, given: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise TypeError, as Python does, for an option that neither managers nor `owner` itself have."""
    known = sorted({*ManagerOptions.__annotations__, *others})
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")


class UploadTaskGroupBuilder:
    """Base class for tasks that upload the last epoch, after the loop and before `download`.

    Implement `build`. An error in the group fails the job before `download` and `exit` run.
    """

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """Return the tasks that upload an epoch; called once per run.

        Args:
            epoch: the newest committed epoch.
            checkpoint_manager: the runner's manager, or None; its `files(node, epoch)` lists a node's files.

        Returns:
            The group of tasks to run.

        Example:
            class Upload(UploadTaskGroupBuilder):
                def build(self, epoch, checkpoint_manager):
                    with TaskGroup() as group:
                        ...  # tasks that copy checkpoint_manager.files(node, epoch)
                    return group
        """
        raise NotImplementedError(
            "subclass UploadTaskGroupBuilder and implement build(epoch, checkpoint_manager)"
        )
