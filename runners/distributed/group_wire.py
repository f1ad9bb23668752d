"""Bytes from one rank to all over a process group of CPU memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchrelay.errors import PeerError


class GroupWire:
    """A `Wire` over a gloo group that nobody else uses; the group's timeout limits each broadcast."""

    def __init__(self, group: Any, rank: int) -> None:
        self.rank = rank
        self._group = group

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send or receive in place; see `jobs.wire`."""
        try:
            dist.broadcast(torch.frombuffer(memory, dtype=torch.uint8), src=source, group=self._group)
        except RuntimeError as error:
            lost = PeerError(
                f"{len(memory)} bytes from rank {source} did not come: {error}; start again, or load without "
                "share_reads"
            )
            lost.consequence = True
            raise lost from error
