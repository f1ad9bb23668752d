"""The manager of a job with any number of nodes."""

from __future__ import annotations

from torchrelay.checkpoint.manager_base import Manager


class MultiNodeCheckpointManager(Manager):
    """Saves and loads all nodes of a job, each under its own name, as one epoch.

    An epoch exists once every node's part is durable and the log has its commit record; without a
    handler nothing else is needed to find it again.
    """
