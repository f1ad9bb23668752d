"""One shell per page: its lines run as a reader would type them, each with an end."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


class ShellError(Exception):
    """A line that did not end in time, or ended the shell."""


class Shell:
    """bash with its two streams as one; use it as a context manager, which ends it and what it started."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], cwd=folder, env=dict(env), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def run(self, line: str, secs: float) -> tuple[int, str]:
        """The exit code of a line and what it printed. Raises ShellError after `secs`, or if bash ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        end = secrets.token_hex(8)
        self._process.stdin.write(f"{line}\nprintf '\\n{end} %s\\n' $?\n".encode())
        self._process.stdin.flush()
        done = re.compile(rf"\n{end} (\d+)\n".encode())
        said, until = b"", time.monotonic() + secs
        while (found := done.search(said)) is None:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            said += data
            if not data:
                what = "ended the shell" if ready else f"has not ended after {secs:.0f} s"
                raise ShellError(f"`{line}` {what}; it printed:\n{said.decode(errors='replace')}")
        return int(found[1]), said[: found.start()].decode(errors="replace")
