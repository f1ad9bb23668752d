"""How much staging memory the first save will need, and how much there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch.optim import Optimizer

from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.kinds import local_part
from torchrelay.checkpoint.state.leaf import Role, spec_of
from torchrelay.errors import RelayError
from torchrelay.jobs.session import Session

STATES_PER_PARAMETER = 2
"""Tensors of its size that an optimizer will keep per parameter, before its first step has shown them."""
SLACK_BYTES = 1 << 20


def likely_bytes(session: Session) -> int:
    """The bytes that this process will stage of what is registered now; replicas write a share each."""
    total = 0
    for place in session.local_nodes:
        entries = session.workspace(place.name).entries()
        objects = {name: entry.value for name, entry in entries.items() if entry.blob is not None}
        with suppress(RelayError):  # the save itself will say what cannot be stored
            total += _bytes_of(objects, len(session.nodes))
    return total + total // 16 + SLACK_BYTES


def _bytes_of(objects: dict[str, object], replicas: int) -> int:
    shared = alone = 0
    for leaf in leaves_of(objects):
        spec = spec_of(leaf)
        if spec.kind == "tensor" and leaf.alias_of is None:
            split = leaf.role in (Role.PARAMETER, Role.OPTIMIZER)
            shared, alone = (shared + spec.nbytes, alone) if split else (shared, alone + spec.nbytes)
    for one in objects.values():
        if isinstance(one, Optimizer) and not local_part(one).state:
            sizes = [p.nbytes for group in one.param_groups for p in group["params"]]
            shared += STATES_PER_PARAMETER * sum(sizes)
    return shared // replicas + alone


def free_share(session: Session) -> int:
    """The share of the memory that is free on the host, for each process there."""
    own = session.local_nodes[0]
    processes = {place.process for place in session.nodes if place.host_index == own.host_index}
    return _free_bytes() // max(1, len(processes))


def _free_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
