"""Whether a process still runs, seen from outside of its interpreter.

A watcher's thread is scheduled at least twice a second however busy its process is: it looks, or it asks
for Python's lock every 5 ms. So its count of context switches stands still only where the kernel does
not run the process at all: stopped, in a freezer, or traced.
"""

from __future__ import annotations

from pathlib import Path

from torchrelay.records import dataclass

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in a freezer, or in a system call that does not return",
}


@dataclass(frozen=True)
class Pulse:
    """A thread at one moment: the kernel's letter for its state, and how often it was scheduled."""

    state: str
    switches: int

    def meaning(self) -> str:
        """Say what the state is."""
        return f"state {self.state}, {_STATES.get(self.state, 'not scheduled')}"


def pulse_of(pid: int, thread: int) -> Pulse | None:
    """Look at a thread; None where it is gone or the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        switches = int(rows["voluntary_ctxt_switches"]) + int(rows["nonvoluntary_ctxt_switches"])
        return Pulse(rows["State"].split()[0], switches)
    except (KeyError, ValueError, IndexError):
        return None


class Stillness:
    """For how long a pulse has not moved, counted in the looks of whoever looks."""

    def __init__(self) -> None:
        self.secs = 0.0
        self.pulse: Pulse | None = None

    def look(self, pulse: Pulse | None, passed_secs: float) -> float:
        """Note what is seen now and how long ago the last look was; return the seconds without a move."""
        still = pulse is not None and self.pulse is not None and pulse.switches == self.pulse.switches
        self.secs = self.secs + passed_secs if still else 0.0
        self.pulse = pulse
        return self.secs


class Ticks:
    """The own time between looks; a pause of this very process is no silence of the others."""

    def __init__(self, now: float, longest_secs: float) -> None:
        self._before = now
        self._longest_secs = longest_secs

    def passed(self, now: float) -> float:
        """Seconds since the last call that this process was awake for."""
        passed, self._before = now - self._before, now
        return min(passed, self._longest_secs)
