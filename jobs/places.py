"""Where a node runs: one process of the job, seen from every other."""

from __future__ import annotations

from torchrelay.records import dataclass


@dataclass(frozen=True)
class NodePlace:
    """A node of the job and the process that plays it.

    `name` is the node's name (`trainer_3`), `rank` its index among the job's nodes, `host` the
    machine, `host_index` torchrun's group rank, `process` the rank of the process that hosts it
    (emulated nodes share process 0).
    """

    name: str
    rank: int
    world_size: int
    host: str = "localhost"
    host_index: int = 0
    local_rank: int = 0
    role: str = "default"
    process: int = 0

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank} on {self.host})"
