"""A rank as its monitor knows it, without torch: a connection, a thread that looks, a phase, some work.

monitored_rank.py WHAT; the port, the token and the rank come as a line on stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time

from torchrelay.jobs.runtime import phase
from torchrelay.runners.distributed.liveness import connect_to


def tell(text: str) -> None:
    """One line in one write: two threads tell."""
    os.write(1, f"{text}\n".encode())


def main(what: str) -> None:
    """Introduce a thread that looks every 0.1 s, print what the monitor tells, and do `what`."""
    port, token, rank = json.loads(sys.stdin.readline())
    line = connect_to("127.0.0.1", port, 5)
    introduced, ready = threading.Event(), threading.Event()

    def look() -> None:
        hello = {"token": token, "rank": rank, "thread": threading.get_native_id(), "phase": phase.show()}
        line.send(hello)
        introduced.set()
        ready.wait()  # what the monitor has to say comes after it
        while True:
            for message in line.receive():
                if "failure" in message:
                    tell(json.loads(message["failure"])["traceback"])
            if line.closed:
                tell("closed")
                return
            time.sleep(0.1)

    threading.Thread(target=look, daemon=True).start()
    introduced.wait()
    with phase.during(f"doing {what}"):
        tell("ready")
        ready.set()
        if what == "hold":
            ctypes.PyDLL(None).usleep(2_500_000)
            tell("held")
        elif what == "compute":
            sum(range(150_000_000))
            tell("held")
        elif what == "uninterruptible":
            _wait_uninterruptibly(rank)
        elif what == "leave":
            sys.stdin.readline()
            line.send({"left": True})
            return
        signal.pause()


def _wait_uninterruptibly(rank: int) -> None:
    """Wait for a child that waits in turn to open a FIFO before it becomes a program: the kernel says D."""
    with tempfile.TemporaryDirectory() as place:
        os.mkfifo(fifo := f"{place}/{rank}")
        os.posix_spawn(
            "/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
        )


if __name__ == "__main__":
    main(sys.argv[1])
