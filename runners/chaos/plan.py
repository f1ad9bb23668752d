"""The plan that the preloaded library follows: a small file that this process and the struck ones share."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.chaos.fault import Fault

VARIABLE = "TORCHRELAY_CHAOS_PLAN"
"""Where a process that is started under the library finds its plan."""
_MAGIC = 0x53544C46
_FORM = struct.Struct("=I5i2q4q2i1024s1024s1024s1024s")
"""The fields of `struct plan` in faults.c, in its order and without gaps."""
_TEXT = 1024
_CALLS, _FIRED, _PAUSED, _RESUMED = 40, 48, 56, 64
_STRUCK = 80
_ACTS = {"": 0, "kill": 1, "short": 3, "zero": 4, "stall": 5, "pause": 6}
_FAIL = 2
_WHENS = {"before": 0, "after": 1, "middle": 2}


class PlanFile:
    """A plan in a file; armed for one trial after another, never while a process follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_FORM.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def arm(
        self, root: Path, fault: Fault | None, *, log: Path | None = None, reads: bool | None = None,
        stall_secs: float = 0.02,
    ) -> None:  # fmt: skip
        """Count calls below `root`, and let `fault` happen.

        `log` gets a line per call; reads of files count too where `reads`, or else the fault, says so.
        Raises UsageError for paths that the library has no room for.
        """
        texts = [b"", *(_text(one) for one in (str(root.resolve()), str(root.absolute()), str(log or "")))]
        counted = fault is not None and fault.reads if reads is None else reads
        what = 0 if fault is None else _FAIL if fault.errno else _ACTS[fault.what]
        data = _FORM.pack(
            _MAGIC, what, _WHENS[fault.when] if fault else 0, fault.errno if fault else 0,
            int(fault.lasting) if fault else 0, int(counted), fault.at if fault else 0,
            int(stall_secs * 1e6), 0, 0, 0, 0, 0, 0, *texts,
        )  # fmt: skip
        self._map[:] = data

    @property
    def calls(self) -> int:
        """How many calls were counted."""
        return self._number(_CALLS)

    @property
    def fired(self) -> int:
        """How often the fault happened."""
        return self._number(_FIRED)

    @property
    def struck(self) -> str:
        """The first call that the fault happened to: its sort and its path."""
        return self._map[_STRUCK : _STRUCK + _TEXT].partition(b"\0")[0].decode(errors="replace")

    @property
    def paused(self) -> int:
        """The number of the call that stands still now, or did last; 0 before the first."""
        return self._number(_PAUSED)

    def resume(self, number: int) -> None:
        """Let call `number` go on."""
        struct.pack_into("=q", self._map, _RESUMED, number)

    def close(self) -> None:
        """Let go of the file and remove it."""
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _number(self, offset: int) -> int:
        return int(struct.unpack_from("=q", self._map, offset)[0])


def _text(path: str) -> bytes:
    data = os.fsencode(path)
    if len(data) >= _TEXT:
        raise UsageError(f"{path:.80}... is longer than {_TEXT - 1} bytes: choose a shorter path")
    return data
