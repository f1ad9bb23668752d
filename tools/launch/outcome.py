"""How an attempt ended: what it left, the exit code it comes to, what is said, whether it is queued again.

The run's status.json decides where it speaks of this very attempt; torchrun's own code (1 for everything)
never does. What no run could note is told by the codes and signals of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from torchrelay.errors import NoProgressError, PeerError, PreemptedError, RelayError, StorageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher_status import heard
from torchrelay.tools.launch.request import GRACE_SECS

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
class LaunchOutcome:
    """The exit code, and why in one line."""

    code: int
    why: str

    @property
    def again(self) -> bool:
        """Whether the same command would go on by itself."""
        return self.code in RUN_AGAIN


def verdict_of(found: Evidence) -> LaunchOutcome:
    """The code of an attempt."""
    state = found.status.get("state")
    if found.well and state != "PREEMPTED":
        return LaunchOutcome(0, _ended_well(found.status))
    if state == "PREEMPTED":
        return LaunchOutcome(PREEMPTED, f"preempted ({_reasons(found.status)}): the same command goes on")
    if state == "FAILED":
        return _failed(found)
    if state in ("FINISHED", "STOPPED"):
        return _after_the_run(found)
    return _of_ranks(found)


def _failed(found: Evidence) -> LaunchOutcome:
    """A step that another rank's death has broken counts as a lost rank, not as a failure of the program."""
    code = _in_table(found.status.get("exit_code"))
    if code in (FAILED, LOST) and found.first is not None and found.first.code < 0:
        return LaunchOutcome(LOST, _whose(found.first))
    return LaunchOutcome(code, f"{found.status.get('error', 'it failed')}")


def _ended_well(status: Mapping[str, Any]) -> str:
    state = status.get("state")
    return f"stopped ({_reasons(status)})" if state == "STOPPED" else "finished"


def _reasons(status: Mapping[str, Any]) -> str:
    reasons = status.get("stop")
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) else "no reason noted"


def _in_table(code: object) -> int:
    return code if type(code) is int and code in TABLE and code else FAILED


def _after_the_run(found: Evidence) -> LaunchOutcome:
    """The run is over and has said so; the program went on, and something ended it otherwise."""
    if found.first is not None and found.first.code > 0:
        return LaunchOutcome(_in_table(found.first.code), f"the run is over, then {_whose(found.first)}")
    return LaunchOutcome(0, f"{_ended_well(found.status)}; a process ended badly after that")


def _of_ranks(found: Evidence) -> LaunchOutcome:
    """No run has said how it ended."""
    first = found.first
    if found.asked is not None and (first is None or first.code < 0):
        code = INTERRUPTED if found.asked == "SIGINT" else PREEMPTED
        return LaunchOutcome(code, f"ended by {found.asked}: the same command goes on from what was saved")
    if first is None and found.code in TABLE and found.code not in (0, LOST):
        return LaunchOutcome(found.code, f"a rank ended with {found.code}, of which no note could be left")
    if first is None:
        return LaunchOutcome(LOST, "an agent of torchrun ended, and none of its ranks said why")
    if first.code < 0:
        return LaunchOutcome(LOST, _whose(first))
    return LaunchOutcome(_in_table(first.code), _whose(first))


def _whose(first: RankEnd) -> str:
    return f"rank {first.rank} on {first.host} {first.how}"


LAST_LINES = 15
_TAIL_BYTES = 16 << 10


def evidence_of(
    directory: Path, *, well: bool, nodes: int, asked: str | None = None, code: int = LOST
) -> Evidence:
    """What is known of the attempt whose notes lie in `directory`, now that its agents are gone.

    `code` is what an agent ended with, where that tells anything (`agent`).
    """
    return Evidence(well, status_of(directory), first_failure(directory, nodes), asked, code)


def status_of(directory: Path) -> dict[str, Any]:
    """The status.json of the run, where a rank of this attempt wrote it; else empty.

    A status of another job that holds the run directory, or of an earlier attempt, says nothing of this one.
    """
    told = heard(directory, "run.json")
    run = told.get("run")
    if not isinstance(run, str) or "\0" in run:
        return {}
    try:
        status = RunDirectory(run).status()
    except StorageError:
        return {}
    same = all(status.get(key) == told.get(key) for key in ("host", "pid"))
    return status if same else {}


def first_failure(directory: Path, nodes: int) -> RankEnd | None:
    """The rank that failed first: as the ranks agreed, else as torchrun saw it."""
    ended = _ended_ranks(directory, nodes)
    agreed = heard(directory, "failure.json")
    rank, code = agreed.get("rank"), agreed.get("exit_code")
    if isinstance(rank, int) and isinstance(code, int):
        # Of a rank that was lost, torchrun knows how.
        seen = next((one.code for one in ended if one.rank == rank and code == LOST), code)
        return RankEnd(rank, str(agreed.get("host")), seen, str(agreed.get("text", "")))
    return ended[0] if ended else None


def _ended_ranks(directory: Path, nodes: int) -> list[RankEnd]:
    """The ranks that ended badly, those first that are likely to be the cause of the others' end."""
    found: list[Mapping[str, Any]] = []
    for node in range(nodes):
        failures = heard(directory, f"agent_{node}.json").get("failures")
        if isinstance(failures, list):
            found += [one for one in failures if isinstance(one, dict) and _is_end(one)]
    return [RankEnd(one["rank"], str(one.get("host")), one["code"]) for one in by_likelihood(found)]


def by_likelihood(ends: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Ends of ranks (`code`, and `time` in seconds), the likely cause of the others first."""
    begun = min((one["time"] for one in ends), default=0)
    return sorted(ends, key=lambda one: (_likelihood(one["code"], one["time"] - begun), one["time"]))


def _is_end(one: Mapping[str, Any]) -> bool:
    return all(isinstance(one.get(key), int) for key in ("rank", "code", "time"))


def _likelihood(code: int, secs: float) -> int:
    """0 where a rank is likely to have failed by itself, `secs` after the first one; more where it is less.

    torchrun ends the ranks that are left by SIGTERM, and by SIGKILL when that has not helped for long.
    """
    if code == -SIGTERM or (code == -SIGKILL and secs >= GRACE_SECS - 1):
        return 3
    if code == LOST:
        return 2
    return 0 if code < 0 else 1


def last_lines(directory: Path, rank: int) -> tuple[Path, list[str]] | None:
    """The end of what a rank printed, and in which file: of stderr, of stdout where that is empty."""
    for kind in ("err", "out"):
        path = directory / f"rank_{rank}.{kind}"
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        if any(line.strip() for line in lines):
            return path, lines[-LAST_LINES:]
    return None


def told_lines(found: Evidence, verdict: LaunchOutcome, directory: Path) -> Iterator[str]:
    """One line where all is well; where a rank failed also which, how, and what it said last."""
    if verdict.code == 0:
        yield f"{verdict.why}; the logs lie in {directory}"
        return
    yield f"exit code {verdict.code}: {verdict.why}"
    first = found.first
    if first is None or verdict.code in (PREEMPTED, INTERRUPTED):
        yield f"the logs lie in {directory}"
        return
    why = f" ({first.text})" if first.text and first.text not in verdict.why else ""
    yield f"first to fail: rank {first.rank} on {first.host} {first.how}{why}"
    shown = last_lines(directory, first.rank)
    if shown is None:
        yield f"it printed nothing; the logs lie in {directory}"
        return
    path, lines = shown
    yield f"its last lines, of {path}:"
    yield from (f"    {line}" for line in lines)


MOST_IDLE = 3
"""So many starts in a row may be ended before any run began; a run counts its own starts from there on."""


def wants_requeue(verdict: LaunchOutcome, restart: int, budget: int) -> bool:
    """Whether a job is to be queued again after its start number `restart` (0: the first).

    A preempted run always is, as often as it takes; with a budget of restarts at most so often, and then a
    lost rank counts, too. A run that gets no further ends by itself, with 93.
    """
    if budget and restart >= budget:
        return False
    return verdict.code == PREEMPTED or (verdict.again and budget > 0)


def idle_starts(launch: Path, restart: int) -> int:
    """How many starts in a row, `restart` the last of them, were over before any run had begun.

    `launch` is the directory of the launch. A program that is no run of torchrelay never begins one.
    """
    idle = 0
    while idle <= restart and not heard(launch / f"attempt_{restart - idle}", "run.json"):
        idle += 1
    return idle


def without_end(verdict: LaunchOutcome, idle: int, budget: int) -> LaunchOutcome:
    """The verdict of a start: 93 where it would be repeated for ever, and nothing tells of progress."""
    if verdict.code != PREEMPTED or budget or idle < MOST_IDLE:
        return verdict
    return LaunchOutcome(
        NoProgressError.exit_code,
        f"{idle} starts in a row were ended before a run began, so that nothing shows that they get further: "
        "give them a longer time limit or a shorter notice; for a program that saves by itself say "
        "--max-restarts",
    )


def status_at(run: str | None) -> Mapping[str, Any]:
    """The status that lies in a run directory; empty without one, for a URL, and where it cannot be read."""
    if run is None or "://" in run:
        return {}
    try:
        return RunDirectory(run).status()
    except RelayError:
        return {}


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status that a run has got since `before` was read; empty where it is still an earlier attempt's."""
    return {} if after == before else after


def agreed(verdict: LaunchOutcome, status: Mapping[str, Any]) -> LaunchOutcome:
    """The verdict of a host, which is not 0 where the run says that it failed.

    The ranks of this host may all have ended well before one of another host failed; hosts whose codes
    differ would not all be started again.
    """
    if verdict.code == 0 and status.get("state") == "FAILED":
        return verdict_of(Evidence(False, status))
    return verdict
