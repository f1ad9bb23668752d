"""Where large bodies are read and large answers written, so that the event loop is not held up by them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
SMALL_BYTES = 16 << 10
"""What is shorter is done at once: handing it over would take longer."""
SMALL_ELEMENTS = 2048


class Desk:
    """One daemon thread that does one work at a time, and so needs the memory of one."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = (
            SimpleQueue()
        )
        threading.Thread(target=self._run, name="torchrelay serve bodies", daemon=True).start()

    async def do(self, work: Callable[[], T]) -> T:
        """What `work` returns, or its error; it may go on when nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future, result, error)

        self._works.put((lambda: None if future.cancelled() else work(), tell))
        return await future

    def _run(self) -> None:
        while True:
            work, tell = self._works.get()
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            tell(result, error)
            del work, tell, result, error


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future what came of it, unless nobody waits any more."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
