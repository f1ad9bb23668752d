"""Sending the last epoch elsewhere: the extension point of Caffe2's UploadTaskGroupBuilder."""

from __future__ import annotations

from typing import Any

from torchrelay.jobs.job import TaskGroup


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
