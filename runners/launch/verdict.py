"""How an attempt ended, in one exit code of the guide's table. Pure.

The run's status.json decides where it speaks of this very attempt; torchrun's own code (1 for everything)
never does. What no run could note is told by the codes and signals of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals
from typing import Any

from torchrelay.errors import NoProgressError, PeerError, PreemptedError
from torchrelay.records import dataclass

PREEMPTED, LOST, FAILED, INTERRUPTED = PreemptedError.exit_code, PeerError.exit_code, 1, 130
TABLE = (0, 1, 2, 3, 4, 5, LOST, PREEMPTED, NoProgressError.exit_code, INTERRUPTED)
RUN_AGAIN = (PREEMPTED, LOST)
"""The codes after which the same command goes on by itself: it left early, or a rank was lost."""


@dataclass(frozen=True)
class RankEnd:
    """A rank that did not end well; `code` is negative for a signal, `text` what it said of why."""

    rank: int
    host: str
    code: int
    text: str = ""

    @property
    def how(self) -> str:
        """In words: `ended with 4`, `was killed by SIGKILL`."""
        if self.code >= 0:
            return f"ended with {self.code}"
        try:
            return f"was killed by {Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt that is over.

    `well`: all agents ended with 0. `status` is the content of status.json where it is of this attempt, else
    empty. `asked` is the signal with which the launcher itself was asked to end, None where it was not.
    `code` is an agent's, of which one in the table counts where no note was left.
    """

    well: bool
    status: Mapping[str, Any]
    first: RankEnd | None = None
    asked: str | None = None
    code: int = LOST


@dataclass(frozen=True)
class Verdict:
    """The exit code, and why in one line."""

    code: int
    why: str

    @property
    def again(self) -> bool:
        """Whether the same command would go on by itself."""
        return self.code in RUN_AGAIN


def verdict_of(found: Evidence) -> Verdict:
    """The code of an attempt."""
    state = found.status.get("state")
    if found.well and state != "PREEMPTED":
        return Verdict(0, _ended_well(found.status))
    if state == "PREEMPTED":
        return Verdict(PREEMPTED, f"preempted ({_reasons(found.status)}): the same command goes on")
    if state == "FAILED":
        return _failed(found)
    if state in ("FINISHED", "STOPPED"):
        return _after_the_run(found)
    return _of_ranks(found)


def _failed(found: Evidence) -> Verdict:
    """A step that another rank's death has broken counts as a lost rank, not as a failure of the program."""
    code = _in_table(found.status.get("exit_code"))
    if code in (FAILED, LOST) and found.first is not None and found.first.code < 0:
        return Verdict(LOST, _whose(found.first))
    return Verdict(code, f"{found.status.get('error', 'it failed')}")


def _ended_well(status: Mapping[str, Any]) -> str:
    state = status.get("state")
    return f"stopped ({_reasons(status)})" if state == "STOPPED" else "finished"


def _reasons(status: Mapping[str, Any]) -> str:
    reasons = status.get("stop")
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) else "no reason noted"


def _in_table(code: object) -> int:
    return code if type(code) is int and code in TABLE and code else FAILED


def _after_the_run(found: Evidence) -> Verdict:
    """The run is over and has said so; the program went on, and something ended it otherwise."""
    if found.first is not None and found.first.code > 0:
        return Verdict(_in_table(found.first.code), f"the run is over, then {_whose(found.first)}")
    return Verdict(0, f"{_ended_well(found.status)}; a process ended badly after that")


def _of_ranks(found: Evidence) -> Verdict:
    """No run has said how it ended."""
    first = found.first
    if found.asked is not None and (first is None or first.code < 0):
        code = INTERRUPTED if found.asked == "SIGINT" else PREEMPTED
        return Verdict(code, f"ended by {found.asked}: the same command goes on from what was saved")
    if first is None and found.code in TABLE and found.code not in (0, LOST):
        return Verdict(found.code, f"a rank ended with {found.code}, of which no note could be left")
    if first is None:
        return Verdict(LOST, "an agent of torchrun ended, and none of its ranks said why")
    if first.code < 0:
        return Verdict(LOST, _whose(first))
    return Verdict(_in_table(first.code), _whose(first))


def _whose(first: RankEnd) -> str:
    return f"rank {first.rank} on {first.host} {first.how}"
