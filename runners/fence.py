"""Ends a process whose checkpoint directory another job has taken, wherever its threads are.

Nothing of such a process can be saved any more, and the other job does its work. A save would tell, but the
next one may be hours away; the writer's counter knows within a second, and tells it here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from torchrelay.errors import FencedError
from torchrelay.runners.distributed.environment import current_world
from torchrelay.runners.distributed.launcher_status import end_process, tell_stderr_within
from torchrelay.runners.session.run_state import RunState

GRACE_SECS = 6.0
"""For the process to end by itself; a busy machine leaves room to be gone within 15 all the same."""


class FenceGuard:
    """Guards one train call, until `close`.

    A fenced process raises FencedError at its next step; the ranks of a launched job hear of it as of any
    failure. What has not ended after the grace is ended with FencedError's code, but for an interactive
    interpreter, which is more than this job.
    """

    def __init__(
        self, state: RunState, *, grace_secs: float = GRACE_SECS, end: Callable[[int], None] = end_process
    ) -> None:
        self._state, self._grace_secs, self._end = state, grace_secs, end
        self._over = threading.Event()

    def fenced(self, error: FencedError) -> None:
        """Told by the writer's counter; returns at once."""
        self._state.fenced = error
        threading.Thread(target=self._see_to_it, args=(error,), name="torchrelay-fence", daemon=True).start()

    def close(self) -> None:
        """The train call is over."""
        self._over.set()

    def _see_to_it(self, error: FencedError) -> None:
        shown = f"{type(error).__name__}: {error}"
        world = current_world()
        known = world is not None and world.blame("the checkpoint log", error, shown)
        if self._over.wait(self._grace_secs) or _interactive():
            return
        if not known:
            tell_stderr_within(f"torchrelay: {shown}\n")
        self._end(error.exit_code)


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
