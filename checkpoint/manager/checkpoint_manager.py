"""Managers of checkpoints: of one run, of several nodes; what they are given; uploads of the last epoch."""

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
    """Stores its job's only node under `node_name`, whatever the job calls it."""

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
        """The one name."""
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
        """The logical name `prefix/node_name.epoch`, asked by either name of the node."""
        if node != self.node_name and (self._nodes is None or node not in self._nodes):
            return None
        return db_name(epoch, self.node_name, self.db_prefix)

    def files(self, node: str, epoch: int) -> list[str]:
        """The committed files of an epoch, asked by either name of the node; none for any other name."""
        return super().files(node, epoch) if self.get_ckpt_db_name(node, epoch) else []


_own, _base = (inspect.signature(one.__init__) for one in (CheckpointManager, Manager))
CheckpointManager.__init__.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[
        *(one for one in _own.parameters.values() if one.kind < one.KEYWORD_ONLY),
        *(one for one in _base.parameters.values() if one.kind is one.KEYWORD_ONLY),
    ]
)
"""As it is shown: the options are those of `Manager`."""


class MultiNodeCheckpointManager(Manager):
    """Saves and loads all nodes of a job, each under its own name, as one epoch.

    An epoch exists once every node's part is durable and the log has its commit record; without a
    handler nothing else is needed to find it again.
    """


class ManagerOptions(TypedDict, total=False):
    """Options of the managers that a JobRunner hands on; None is the manager's own default.

    `keep_last`, `keep_every`, `keep_best`, `keep_optimizer_last`: what is kept. `asynchronous`,
    `staging_limit` (bytes), `verify_staging`: saves behind the training. `reuse`: whether unchanged
    leaves are referred to. `include`, `exclude`: which leaves are saved. `share_reads`: whether hosts
    read for each other. `compare_every`: epochs between comparisons of all bytes of the replicas.
    `single_writer`: who sees to it that one job writes. `tier`: a near place before the checkpoints' own.
    `rename`: names of today by names in older epochs. `resume_exclude`: leaves that stay as the program made
    them where they do not fit any more. `resume_strict`: refuse blobs that are new or gone.
    """

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
    """Builds the group that uploads an epoch; called once, after the loop and before `download`.

    Subclass it. Errors of the group propagate: the job fails before `download` and `exit`.
    """

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """Return the tasks that upload `epoch`, the newest committed one.

        `checkpoint_manager` is the runner's manager (None when it has none); `manager.files(node, epoch)`
        lists what a node committed.
        """
        raise NotImplementedError(
            "subclass UploadTaskGroupBuilder and implement build(epoch, checkpoint_manager)"
        )
