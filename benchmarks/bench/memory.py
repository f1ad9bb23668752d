"""How much memory an action took beyond what the process had before, and which memory it finds."""

from __future__ import annotations

import mmap
from pathlib import Path

STATUS = Path("/proc/self/status")
SPARE = 1 << 30
"""Free memory that is left alone."""


def ready_memory(nbytes: int) -> None:
    """Touch so much free memory and give it back, as far as there is some; the page cache stays as it is.

    A virtual machine may return free memory to its host after a second. The next use then waits for the host,
    up to 2 s per GiB instead of 0.15 s. Without this call an engine that needs memory would be
    measured by its place in the order (benchmarks/README.md).
    """
    size = min(nbytes, _field(Path("/proc/meminfo"), "MemFree") - SPARE) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        populated = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, size, flags=populated).close()


class ExtraMemory:
    """`with ExtraMemory() as extra`: afterwards `extra.nbytes` is the peak of RSS above its start.

    Mapped files count as far as they were touched. None if the kernel does not report them.
    """

    nbytes: int | None = None

    def __enter__(self) -> ExtraMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
            self._before: int | None = _field(STATUS, "VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.nbytes = max(0, _field(STATUS, "VmHWM") - self._before)


def _field(path: Path, name: str) -> int:
    """Bytes, of a file whose lines have names and KiB."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {name} in {path}")
