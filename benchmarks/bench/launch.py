"""Starts the processes of one measurement, alone or as ranks, and ends them at the cap."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from bench.task import Answers, Asked

GRACE_SECS = 5.0
"""How long the other ranks may continue when one has failed."""


class NotMeasuredError(Exception):
    """Why there is no figure; `slow` if only the cap was exceeded."""

    def __init__(self, reason: str, *, slow: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow


def measure(
    asked: Asked,
    module: str,
    ranks: int,
    cap_secs: float,
    threads: int | None = None,
    paths: Sequence[str] | None = None,
) -> Answers:
    """The answers of fresh processes; raises NotMeasuredError when they fail or take longer than the cap.

    They import from `paths`, by default from the checkout of this file.
    """
    Path(asked.answers).unlink(missing_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            # In between they would leave a process that nobody knows.
            with _held_back(signal.SIGTERM), _held_back(signal.SIGINT):
                for place in _places(ranks):
                    process = subprocess.Popen(
                        asked.command(module),
                        env=_environment(place, ranks, threads, paths or sys.path[:2]),
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,
                    )
                    processes.append(process)
            in_time = _wait(processes, cap_secs)
        finally:
            _end(processes)
        errors.seek(0)
        told = errors.read()
    if not in_time:
        raise NotMeasuredError(f"longer than the cap of {cap_secs:g} s", slow=True)
    if any(process.returncode for process in processes) or not Path(asked.answers).exists():
        raise NotMeasuredError(_reason(told, processes))
    found: Answers = json.loads(Path(asked.answers).read_text())
    return found


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """A signal that comes inside of the block is answered at its end."""
    came: list[tuple[int, FrameType | None]] = []
    answer = signal.signal(number, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if answer is None else answer)
        if came and callable(answer):
            answer(*came[0])
        elif came:
            signal.raise_signal(number)


def _places(ranks: int) -> list[dict[str, str]]:
    """The environment of each process from a launcher; empty for one without ranks."""
    if not ranks:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]


def _environment(
    place: dict[str, str], ranks: int, threads: int | None, paths: Sequence[str]
) -> dict[str, str]:
    """All engines compute with as many threads, by default their share of the cores."""
    cores = threads or max(1, (os.cpu_count() or 1) // max(1, ranks))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(cores),
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        **place,
    }


def _wait(processes: list[subprocess.Popen[bytes]], cap_secs: float) -> bool:
    """Whether all ended, or one failed, before the cap."""
    end = time.monotonic() + cap_secs
    failed: float | None = None
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return True
        if any(codes):
            failed = failed or time.monotonic()
            if time.monotonic() > failed + GRACE_SECS:
                return True
        time.sleep(0.02)
    return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(told: str, processes: list[subprocess.Popen[bytes]]) -> str:
    """The first line of what went wrong that says something."""
    lines = [line.strip() for line in told.splitlines()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("[")]
    codes = ", ".join(str(process.returncode) for process in processes)
    return (errors or lines or [f"ended with {codes} and said nothing"])[-1][:300]
