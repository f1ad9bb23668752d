"""A list of independent reads, done by two threads where there is enough to do.

One thread copies from the kernel while the other verifies; measured in docs/performance.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
WORTH_IT = 32 << 20
"""Bytes from which on a second thread pays."""


def each(work: Callable[[T], None], items: Sequence[T], nbytes: int) -> None:
    """Call `work` with every item, begun in their order; the first error ends it and is raised."""
    if nbytes < WORTH_IT or len(items) < 2:
        for item in items:
            work(item)
        return
    left = iter(items)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                item = next(left, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    helper = threading.Thread(target=run, name="torchrelay-read", daemon=True)
    helper.start()
    run()
    helper.join()
    if errors:
        raise errors[0]
