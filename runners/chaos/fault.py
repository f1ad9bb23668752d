"""One fault: what happens, at which call, and how it is written so that a trial can be repeated."""

from __future__ import annotations

import errno
import re

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

ERRNOS = ("ENOSPC", "EIO", "EACCES", "EROFS", "ESTALE", "EINTR", "EMFILE", "EDQUOT")
STORE_ERRNOS = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET", "EACCES", "ENOSPC")
"""What fsspec makes of a store's answers 500, 503, of time-outs, lost connections, 403 and a full quota."""
WHATS = ("kill", "short", "zero", "stale", "stall", "pause")
WHENS = ("before", "after", "middle")
_FLAGS = ("lasting", "reads")
_FORM = re.compile(r"([A-Za-z]+)@([1-9][0-9]{0,8})((?::[a-z]+)*)")


@dataclass(frozen=True)
class Fault:
    """`what` is `kill`, `short`, `zero`, `stale` (a listing without names), `stall`, `pause` or an errno.

    It happens to call number `at`; where `lasting`, to all later calls of the same sort too. `when` is for
    kills and pauses: before or after the call, or in the middle of a write; in a store for errors too, which
    after the call are lost answers. With `reads` the reads of files are counted too.
    """

    what: str
    at: int
    when: str = "before"
    lasting: bool = False
    reads: bool = False

    @property
    def errno(self) -> int:
        """The number of the error that the call reports; 0 for what is no error."""
        return int(getattr(errno, self.what, 0))

    def __str__(self) -> str:
        """`kill@37:after`, `ENOSPC@12:lasting`; `fault_of` reads it again."""
        when = "" if self.when == "before" else f":{self.when}"
        flags = "".join(f":{name}" for name in ("lasting", "reads") if getattr(self, name))
        return f"{self.what}@{self.at}{when}{flags}"


def fault_of(text: str) -> Fault:
    """Read what `str` of a fault wrote; raises UsageError for anything else."""
    found = _FORM.fullmatch(text)
    what = found[1] if found else ""
    words = found[3].split(":")[1:] if found else []
    known = what in (*WHATS, *ERRNOS, *STORE_ERRNOS)
    if found is None or not known or any(word not in (*WHENS, *_FLAGS) for word in words):
        raise UsageError(
            f"{text!r:.80} is no fault: write kill@37:after, ENOSPC@12:lasting, stall@5, with one of "
            f"{', '.join(dict.fromkeys((*WHATS, *ERRNOS, *STORE_ERRNOS)))}"
        )
    when = next((word for word in words if word not in _FLAGS), "before")
    return Fault(what, int(found[2]), when, "lasting" in words, "reads" in words)
