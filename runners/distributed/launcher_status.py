"""Outputs of a process that ends: the first failure, final calls, and files for its launcher.

    run.json       the run, written once its log is held: then its status.json describes this attempt
    failure.json   the first failure that the ranks agreed on
    agent_N.json   how the agent of a node ended, and which of its ranks failed

The files are in the attempt's directory (`TORCHRELAY_LAUNCH_DIR`); without one nothing is written. Write
errors are ignored, because training does not depend on them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.records import dataclass

_MOST_TRACEBACK = 64 << 10


@dataclass(frozen=True)
class Failure:
    """The first failure of a job: rank, host, task, traceback and exit code."""

    rank: int
    host: str
    task: str
    traceback: str
    exit_code: int

    def encode(self) -> bytes:
        """Encode the failure for the store; a very long traceback keeps its end."""
        fields = asdict(self) | {"traceback": self.traceback[-_MOST_TRACEBACK:]}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Decode a failure."""
        return cls(**json.loads(data))

    def headline(self) -> str:
        """Return rank, host, task and the last line of the traceback."""
        lines = self.traceback.strip().splitlines()
        return f"rank {self.rank} on {self.host} failed in {self.task}: {lines[-1] if lines else 'unknown'}"

    def report(self, rank: int) -> str:
        """Return the text that `rank` prints."""
        if "\n" not in self.traceback.strip():
            return f"torchrelay: [rank {rank}] {self.headline()}\n"
        head = f"torchrelay: [rank {rank}] first failure: rank {self.rank} on {self.host}, in {self.task}"
        return f"{head}\n{self.traceback.rstrip()}\n"


SECS = 4.0
NOTE_SECS = 2.0


class Calls(list[Callable[..., None]]):
    """Functions to call before the process ends, each in a thread of its own."""

    def forget(self, call: Callable[..., None]) -> None:
        """Remove a call; does nothing if it is not registered."""
        if call in self:
            self.remove(call)

    def make(self, *values: Any, secs: float) -> None:
        """Call all in parallel with these values, each for at most `secs`; never raises."""
        _within(secs, [partial(call, *values) for call in self])


notes = Calls()
"""Called with a reason and an exit code before a thread ends the process because of a failure."""
final_calls = Calls()


def end_process(code: int) -> None:
    """Flush the output and end this process at once, also while its threads are busy.

    The files of a remote run are uploaded first, for at most four seconds.
    """
    final_calls.make(secs=SECS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nothing reads it any more
            continue
    os._exit(code)


def write_stderr(text: str) -> None:
    """Write to stderr; never raises, because the reader may have gone with the launcher."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def write_stderr_within(text: str, secs: float = SECS) -> None:
    """Write to stderr for at most `secs`, because a reader that has stopped reading must not block the exit.

    Nothing is written if no thread can be started.
    """
    _within(secs, [lambda: write_stderr(text)])


def _within(secs: float, calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads, each for at most `secs`; errors are ignored."""

    def quietly(call: Callable[[], None]) -> None:
        with suppress(Exception):
            call()

    threads = []
    for call in calls:
        thread = threading.Thread(target=quietly, args=(call,), daemon=True)
        with suppress(RuntimeError):  # no more threads available; the process ends all the same
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(secs)


DIRECTORY = "TORCHRELAY_LAUNCH_DIR"
LAUNCH_ID = "TORCHRELAY_LAUNCH_ID"
ATTEMPT = "TORCHRELAY_LAUNCH_ATTEMPT"
NODE = "TORCHRELAY_LAUNCH_NODE"
NODE_IN = "TORCHRELAY_LAUNCH_NODE_IN"
"""Name of the variable in which a scheduler gives an agent its node number, from 0, instead of NODE."""
LAUNCHER = "TORCHRELAY_LAUNCHER_PID"
_MOST = 1 << 20


def write_run(run: Path) -> None:
    """Write which run this process works on; the newest call counts."""
    _write("run.json", {"run": str(run), "host": socket.gethostname(), "pid": os.getpid()})


def write_failure(rank: int, host: str, text: str, exit_code: int) -> None:
    """Write the first failure of the job; only the first rank that calls it does so."""
    _write("failure.json", {"rank": rank, "host": host, "text": text, "exit_code": exit_code}, once=True)


def write_agent(node: int, end: Mapping[str, Any]) -> None:
    """Write how an agent of torchrun ended."""
    _write(f"agent_{node}.json", end)


def read_status(directory: Path, name: str) -> dict[str, Any]:
    """Read a status file; empty if it is missing or unreadable."""
    try:
        with (directory / name).open("rb") as file:
            found = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(name: str, what: Mapping[str, Any], *, once: bool = False) -> None:
    """Publish a JSON file in the launch directory, if there is one."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    path = Path(directory, name)
    own = path.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError):
        own.write_text(json.dumps(what))
        if once:
            with suppress(FileExistsError):
                path.hardlink_to(own)
            own.unlink()
        else:
            own.replace(path)
