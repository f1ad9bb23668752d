"""What a rank says and is warned of: in a file of its own, and on stderr in the form of all lines.

While a run is on, Python's warnings have that form, too: one line, with rank and host on all ranks but 0.
What a program prints itself stays where it goes; whoever wants that in files has `torchrun --redirects`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.metadata.fs import append_bytes
from torchrelay.runners.monitoring.text import stamped

MAX_BYTES = 8 << 20
"""Of a file; one older file is kept beside it, so a rank takes at most 16 MiB in an attempt."""
_KEPT = 1000
"""So many lines wait for the file to be known."""
_OURS = Path(__file__).parents[1]
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}


class RankLog(logging.Handler):
    """`logs/attempt_N/rank_R.log` of this process, from `begin` to `end`; nothing here raises or syncs.

    The file is opened for each line, so that a directory can be unmounted or replaced beneath a run.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        super().__init__(logging.INFO)
        self.who = f"r{rank}/{size}" if rank == 0 else f"r{rank}@{host}"
        self._rank = rank
        self._path: Path | None = None
        self._waiting: list[str] = []
        self._hooks: list[Callable[[], None]] = []

    # The file

    def open(self, logs: Path, attempt: int) -> None:
        """Write there from now on, also what was said before."""
        folder = logs / f"attempt_{attempt}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank_{self._rank}.log"
        waiting, self._waiting = self._waiting, []
        self._append(waiting)

    def line(self, text: str, level: str = "I") -> None:
        """Note a line."""
        line = stamped(text, level=level, who=self.who)
        if self._path is not None:
            self._append([line])
        elif len(self._waiting) < _KEPT:
            self._waiting.append(line)

    def _append(self, lines: list[str]) -> None:
        if self._path is None or not lines:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        try:
            if append_bytes(self._path, data) > MAX_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
        except OSError:  # a full disk must not end a run for the sake of its log
            return

    # What is listened to

    def begin(self) -> None:
        """Listen to the `torchrelay` logger and to warnings."""
        logger = logging.getLogger("torchrelay")
        logger.addHandler(self)
        self._hooks = [lambda: logger.removeHandler(self), self._listen(), self._give_form()]

    def end(self) -> None:
        """Let go; what somebody else has put in the place of ours stays. A second call does nothing."""
        hooks, self._hooks = self._hooks, []
        for undo in reversed(hooks):
            undo()

    def emit(self, record: logging.LogRecord) -> None:
        """Take what our logger says; on stderr too, unless the program has set up logging by itself."""
        letter = _LETTERS.get(record.levelno, "I")
        self.line(record.getMessage(), letter)
        if letter != "I" and not logging.getLogger().handlers:
            with suppress(Exception):
                sys.stderr.write(stamped(record.getMessage(), level=letter, who=self.who) + "\n")

    def _listen(self) -> Callable[[], None]:
        """Note each warning that is shown, then show it as before."""
        before = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            if self._hooks:  # else somebody put this back after the end
                self.line(_warning(message, category, filename, lineno), "W")
            before(message, category, filename, lineno, *rest, **more)

        def undo() -> None:
            if warnings.showwarning is show:
                warnings.showwarning = before

        warnings.showwarning = show
        return undo

    def _give_form(self) -> Callable[[], None]:
        before = warnings.formatwarning

        def form(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
            text = _warning(message, category, filename, lineno)
            return stamped(text, level="W", who=self.who) + "\n"

        def undo() -> None:
            if warnings.formatwarning is form:
                warnings.formatwarning = before

        warnings.formatwarning = form
        return undo


def _warning(message: Any, category: Any, filename: str, lineno: int) -> str:
    if Path(filename).is_relative_to(_OURS):  # where in our source says nothing to people
        return str(message)
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"
