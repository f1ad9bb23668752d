"""The runs below a URL for the dashboard: looked at when a page is asked for, and not all the time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.dashboard.run_store import MOST_RUNS, RunStore
from torchrelay.runners.remote_runs.mirror import Wanted, mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look

NOT_OLDER_SECS = 5.0
"""Pages ask again every few seconds, in many browsers; the store is asked once meanwhile."""


class FarRuns(RunStore):
    """What RunStore is of a directory. A store that does not answer shows what was seen last.

    Raises UsageError for a URL that is none, StorageError for a store that does not answer at the start.
    """

    def __init__(self, url: str) -> None:
        self._mirror = mirror_of(url)
        self.root = self._mirror.root
        self.shown = self._mirror.url
        self._single = self._mirror.is_run()
        self._names: list[str] = []
        self._looked = float("-inf")
        self._lock = threading.Lock()
        if not self._single and not self.names():
            raise UsageError(f"no run lies at {url}, or below it: give the URL of a run, or of several")

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        with self._lock:
            if not self._single and time.monotonic() - self._looked > NOT_OLDER_SECS:
                try:
                    self._names = self._mirror.names()[:MOST_RUNS]
                except StorageError:
                    if not self._names:
                        raise
                self._looked = time.monotonic()
        return [self._mirror.root.name] if self._single else self._names

    def runs(self) -> list[RunDirectory]:
        """The same, with what a list shows of them."""
        if self._single:
            return [self._run("", for_a_look)]
        return [self._run(name, for_a_glance) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has, with what its page shows; None for any other text."""
        if name not in self.names():
            return None
        return self._run("" if self._single else name, for_a_look)

    def _run(self, name: str, wanted: Wanted) -> RunDirectory:
        try:
            return self._mirror.run(name, wanted, NOT_OLDER_SECS)
        except StorageError:
            return RunDirectory(Path(self._mirror.root, name), f"{self.shown}/{name}".rstrip("/"))
