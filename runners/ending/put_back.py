"""A task that is called again changes what it had changed before its loop: that is taken back.

What the state is like is told by values and by torch's version counters. What moves neither (a fused
optimizer before the loop, writes through `.data`) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value
from torchrelay.jobs.session import warn
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.steps import Agreeing

Look = dict[str, Any]


class PutBack:
    """Loads the position anew where a task comes back to its loop with another state than it began with.

    Made when the epoch goes on; `load` loads on all processes together. Emulated nodes of one process
    are only warned of, because a load is of all of them.
    """

    def __init__(self, session: SessionBase, load: Callable[[], None]) -> None:
        self._session = session
        self._load = load
        self._before = {place.name: look(session.workspace(place.name)) for place in session.local_nodes}

    def __call__(self, node: str, agreeing: Agreeing | None) -> None:
        """The task of `node` comes to the loop that was left; so do those of all other processes."""
        now = look(self._session.workspace(node))
        before = self._before[node]
        changed = sorted(name for name in now if now[name] != before.get(name))
        flags = (int(bool(changed)),)
        anywhere = flags if agreeing is None else agreeing.agree_flags(flags).wait()
        if not anywhere[0]:
            return
        if len(self._session.local_nodes) == 1:
            self._load()
            return
        warn(
            f"{', '.join(changed[:4])} of {node} changed before the loop that is continued, and so twice in "
            "this epoch: put that into a task of its own",
            stacklevel=2,
        )


def look(workspace: Workspace) -> Look:
    """What all that may be saved is like: values, and how often each tensor was written to."""
    entries = workspace.entries()
    saved = {name: one.value for name, one in entries.items() if one.origin is not Origin.LATER}
    return {
        leaf.name: leaf.content.json
        if isinstance(leaf.content, Value)
        else (leaf.content.data_ptr(), leaf.content._version)
        for leaf in leaves_of(saved)
    }
