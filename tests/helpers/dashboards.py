"""A dashboard in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

from torchrelay.tools.report.run_data import ReadLimits
from torchrelay.tools.report.server import DashboardServer, Rendered, RunIndex


@contextmanager
def dashboard(
    store: RunIndex, token: str | None = None, rendered: Rendered | None = None
) -> Iterator[DashboardServer]:
    """It answers until the block ends, and reads no weights."""
    server = DashboardServer(store, "127.0.0.1", 0, token, ReadLimits(norm_bytes=0), rendered)
    begun = threading.Event()
    server.ready = begun.set
    thread = threading.Thread(target=server.run, args=([server.socket],), daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        server.socket.close()
    assert not thread.is_alive()
