"""Bytes from one process to all others, for those who move tensors and not agreements."""

from __future__ import annotations

from typing import Protocol


class Wire(Protocol):
    """Connections of their own between the processes of a session, beside those of the training.

    All processes make the same calls in the same order; decisions travel by `Peers`.
    """

    rank: int

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send `memory` (1-D bytes) of process `source` to all; the others' is filled.

        It has the same size everywhere and is not empty. Nothing is verified. Raises PeerError when
        a process is lost or does not come in time; the wire is of no use then.
        """
