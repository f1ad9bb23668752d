"""Google Cloud Storage as an emulator of PyPI serves it: objects are real, conditions are ignored."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store_servers import HOST, Served, daemons, free_port, listens, missing

BUCKET = "relay"
PROGRAM = Path(sys.executable).with_name("gcp-storage-emulator")
MISSING = missing(modules=("gcsfs",), files=(PROGRAM,))


@contextmanager
def gs() -> Iterator[Served]:
    """Serve one bucket, kept in memory, to one connection at a time."""
    with daemons("gs") as running:
        port = free_port()
        where = ("--host", HOST, "--port", port)
        running.start(PROGRAM, "start", *where, "--in-memory", "--default-bucket", BUCKET)
        running.wait_until(lambda: listens(port), "gcp-storage-emulator")
        # Without the second variable the client asks over gRPC first whether the bucket has directories.
        told = {"STORAGE_EMULATOR_HOST": f"http://{HOST}:{{port}}"}
        yield Served(f"gs://{BUCKET}/", port, {**told, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"})
