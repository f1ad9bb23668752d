"""Lines for the person who watches: one per epoch, on rank 0.

On a terminal rich colours them; in a pipe or file they are plain, with no control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO


class Progress:
    """Prints to `stream` (stderr by default), so that a program's own output stays its own."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self._stream = stream

    def line(self, text: str) -> None:
        """One line."""
        if not self.enabled:
            return
        stream = self._stream or sys.stderr
        if stream.isatty():
            self._pretty(text, stream)
        else:
            stream.write(f"torchrelay: {text}\n")  # one write: ranks share the stream, lines must stay whole
            stream.flush()

    def _pretty(self, text: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.markup import escape

        Console(file=stream, highlight=True).print(f"[bold green]torchrelay[/] {escape(text)}")

    def epoch(
        self, epoch: int, steps: int, metrics: Mapping[str, float], saved: bool | None, secs: float
    ) -> None:
        """What an epoch brought; `secs` it took with its save."""
        words = [f"epoch {epoch}", f"step {steps}"]
        words += [f"{name} {value:.4g}" for name, value in sorted(metrics.items())]
        words += {True: ["saved"], False: ["NOT saved"], None: []}[saved]
        self.line(" | ".join([*words, f"{secs:.1f} s"]))

    def close(self) -> None:
        """Nothing to end: every line stands by itself."""
