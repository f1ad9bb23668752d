"""A list of independent reads, done by some threads where there is enough to do.

Some wait for the device or copy from the kernel while another verifies; measured in docs/performance.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
WORTH_IT = 8 << 20
"""Bytes from which on more threads pay."""


def each(work: Callable[[T], None], items: Sequence[T], nbytes: int, threads: int) -> None:
    """Call `work` with every item, begun in their order; the first error ends it and is raised."""
    threads = min(threads, len(items))
    if nbytes < WORTH_IT or threads < 2:
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

    helpers = [threading.Thread(target=run, name="torchrelay-read", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
