"""How much memory an action took beyond what the process had before."""

from __future__ import annotations

from pathlib import Path


class ExtraMemory:
    """`with ExtraMemory() as extra`: afterwards `extra.nbytes` is the peak of RSS above its start.

    Mapped files count as far as they were touched. None where the kernel does not tell.
    """

    nbytes: int | None = None

    def __enter__(self) -> ExtraMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
            self._before: int | None = _status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.nbytes = max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")
