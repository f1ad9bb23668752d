"""A pseudo-terminal: what a program, or this process, draws on it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x09\x0b-\x1f\x7f]")


def controls(text: str) -> list[str]:
    """The control characters and sequences in a text, line feeds aside."""
    return _CONTROL.findall(text)


class Terminal:
    """Use as a context manager; `drawn` is all that came until now."""

    def __init__(self, columns: int = 160) -> None:
        self._main, self.side = os.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._data = b""
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._reader.join(60)
        os.close(self._main)
        os.close(self.side)

    @property
    def drawn(self) -> str:
        """All that was written to the terminal until now."""
        return self._data.decode(errors="replace")

    def stream(self) -> TextIO:
        """The terminal as a stream of this process."""
        return os.fdopen(os.dup(self.side), "w", buffering=1)

    def run(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_secs: float = 100
    ) -> tuple[int, str]:
        """Run a program whose stderr is the terminal; its code, and what it wrote to stdout, a pipe."""
        done = subprocess.run(
            command, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=self.side, text=True, timeout=timeout_secs, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def wait_for(self, text: str, timeout_secs: float = 60) -> None:
        """Wait until a text was drawn."""
        end = time.monotonic() + timeout_secs
        while text not in self.drawn:
            assert time.monotonic() < end, f"no {text!r} in {self.drawn!r}"
            time.sleep(0.02)

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._main], [], [], 0.05)
            if ready:
                self._data += os.read(self._main, 65536)
            elif self._over:
                return
