"""What users say of epochs and their files, the same for a run directory as for a manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from torchrelay.checkpoint.format.manifest.position import Patterns
from torchrelay.checkpoint.log.retention import BestEpochs
from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.checkpoint.storage.open import Tier

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.change_detection import Verify


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
