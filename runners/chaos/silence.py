"""Which failed calls lose nothing, so that they may pass in silence."""

from __future__ import annotations

from torchrelay.runners.chaos.fault import Fault

_SPARED = ("HINT", "writer.json", ".probe-", ".tmp-", "stats.json", "live.json", "/logs/attempt_")
"""Files that prove nothing, notes for those who look on among them: a failure there may pass in silence."""
_HARMLESS = ("open", "read", "release", "range", "mkdir")
"""Reads whose bytes were proved in the end, advice, and directories: one that is missing shows at once."""
_REPEATED = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET")
"""What a store may answer and then not again: the call is made again, and its effect looked up before."""


def may_be_silent(fault: Fault, struck: str, run: str) -> bool:
    """Whether the failed call loses nothing: advice, a read that was tried again, a file that proves nothing.

    Whoever may not read the directory above the checkpoints did not make their name in it; that of a run is
    made and removed again before the run begins.
    """
    if fault.what in ("short", "EINTR") or (fault.what == "zero" and not fault.lasting):
        return True
    kind, _, path = struck.partition(" ")
    above = path == run and (kind == "rmdir" or (kind == "opendir" and fault.what == "EACCES"))
    return kind in _HARMLESS or above or any(name in path for name in _SPARED)


def may_be_silent_in_store(fault: Fault, struck: str) -> bool:
    """The same of calls to a store.

    Listings decide nothing, so neither do those that fail or lack names; what cannot be read is read again.
    """
    kind, _, path = struck.partition(" ")
    again = not fault.lasting and (fault.what in _REPEATED or kind in ("look", "read"))
    return again or kind in ("list", "mkdir") or any(name in path for name in _SPARED)
