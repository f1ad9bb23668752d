"""Report steps: called every so often while a node's tasks run, and once more after they ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchrelay.jobs.blobs import Step
from torchrelay.jobs.job import Reporter
from torchrelay.runners.siblings import Siblings


@contextmanager
def reporting(
    reporters: Iterable[Reporter], siblings: Siblings, call: Callable[[Step], object]
) -> Iterator[None]:
    """Run each reporter in a thread of its own while the block runs.

    The block must end after everything that is reported on has ended, its threads included. Then each
    reporter gets its last call, also when the block failed, and is joined. A reporter that fails
    itself is not called again.
    """
    ended = threading.Event()
    loops = [_loop(reporter, ended, call) for reporter in reporters]
    threads = [threading.Thread(target=siblings.guarded, args=(loop,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _loop(reporter: Reporter, ended: threading.Event, call: Callable[[Step], object]) -> Callable[[], None]:
    def loop() -> None:
        while not ended.wait(reporter.interval):
            call(reporter.step)
        call(reporter.step)  # whenever the end came, even during a call: this one begins after it

    return loop
