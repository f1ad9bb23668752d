"""What a job, an engine or a manager may ask of the session that executes them.

The sessions themselves live in the `runners` room; this protocol is the arrow's direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchrelay.jobs.peers import Peers
from torchrelay.jobs.places import NodePlace
from torchrelay.jobs.random_streams import RandomStreams
from torchrelay.jobs.wire import Wire
from torchrelay.jobs.workspace import Workspace


class Session(Protocol):
    """Executes task groups on the nodes of a job; each process hosts some of the nodes.

    A distributed session hosts one node per process; a local session hosts all nodes, one after
    another, and swaps their random streams.
    """

    peers: Peers

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job in the order of their ranks."""

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that this process hosts."""

    def place(self, node_names: Sequence[str]) -> None:
        """Give the declared nodes of a job their places; raises UsageError for more nodes than ranks."""

    def workspace(self, node: str | None = None) -> Workspace:
        """The GLOBAL workspace of a hosted node (by default the only or first one)."""

    def streams(self, node: str) -> RandomStreams:
        """The random streams of a hosted node as they are now."""

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        """Make a hosted node continue from these random streams."""

    def wire(self) -> Wire | None:
        """What moves bytes between the processes, made at the first call; None where there is only one.

        All processes call this in the same order.
        """

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, SessionGroup, Task or callable on the nodes it names; blocks until done."""
