"""Determine how an attempt ended: exit code, report, and whether it is queued again.

The run's status.json decides if this attempt wrote it; otherwise the codes and signals of the ranks do.
torchrun's own exit code (1 for every failure) is never used.
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
from torchrelay.runners.distributed.launcher import read_status
from torchrelay.tools.launch.request import GRACE_SECS

PREEMPTED, LOST, FAILED, INTERRUPTED = PreemptedError.exit_code, PeerError.exit_code, 1, 130
TABLE = (0, 1, 2, 3, 4, 5, LOST, PREEMPTED, NoProgressError.exit_code, INTERRUPTED)
RUN_AGAIN = (PREEMPTED, LOST)
"""Exit codes after which the same command resumes: preempted, or a rank was lost."""


@dataclass(frozen=True)
class RankEnd:
    """A failed rank; `code` is negative for a signal, `text` is its own reason."""

    rank: int
    host: str
    code: int
    text: str = ""

    @property
    def how(self) -> str:
        """Description: `ended with exit code 4`, `was killed by SIGKILL`."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was killed by {Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


@dataclass(frozen=True)
class Evidence:
    """Facts about a finished attempt.

    `well`: all agents had exit code 0. `status` is the content of status.json if this attempt wrote it, else
    empty. `asked` is the signal that the launcher received, if any. `code` is the exit code of an agent, used
    if it is in `TABLE` and no note was left.
    """

    well: bool
    status: Mapping[str, Any]
    first: RankEnd | None = None
    asked: str | None = None
    code: int = LOST


@dataclass(frozen=True)
class LaunchOutcome:
    """The exit code with a one-line reason."""

    code: int
    why: str

    @property
    def again(self) -> bool:
        """Return True if the same command would resume."""
        return self.code in RUN_AGAIN


def verdict_of(found: Evidence) -> LaunchOutcome:
    """Determine the outcome of an attempt."""
    state = found.status.get("state")
    if found.well and state != "PREEMPTED":
        return LaunchOutcome(0, _ended_well(found.status))
    if state == "PREEMPTED":
        return LaunchOutcome(PREEMPTED, f"preempted ({_reasons(found.status)}); the same command resumes")
    first = found.first
    if state == "FAILED":
        code = _in_table(found.status.get("exit_code"))
        if code in (FAILED, LOST) and first is not None and first.code < 0:
            return LaunchOutcome(LOST, _whose(first))  # a killed rank broke the step of another one
        return LaunchOutcome(code, f"{found.status.get('error', 'the run failed')}")
    if state in ("FINISHED", "STOPPED"):
        if first is not None and first.code > 0:
            return LaunchOutcome(_in_table(first.code), f"the run ended, then {_whose(first)}")
        return LaunchOutcome(0, f"{_ended_well(found.status)}; a process failed after that")
    return _of_ranks(found)


def _ended_well(status: Mapping[str, Any]) -> str:
    return f"stopped ({_reasons(status)})" if status.get("state") == "STOPPED" else "finished"


def _reasons(status: Mapping[str, Any]) -> str:
    reasons = status.get("stop")
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) else "unknown reason"


def _in_table(code: object) -> int:
    """Return the code if it is a known failure, else `FAILED`."""
    return code if type(code) is int and code in TABLE and code else FAILED


def _of_ranks(found: Evidence) -> LaunchOutcome:
    """Return the outcome of an attempt without a status, from the ends of its ranks."""
    first = found.first
    if found.asked is not None and (first is None or first.code < 0):
        code = INTERRUPTED if found.asked == "SIGINT" else PREEMPTED
        return LaunchOutcome(code, f"ended by {found.asked}; the same command resumes from the last save")
    if first is None and found.code in TABLE and found.code not in (0, LOST):
        return LaunchOutcome(found.code, f"a rank ended with exit code {found.code}")
    if first is None:
        return LaunchOutcome(LOST, "a torchrun agent ended without a reason from its ranks")
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
    """Collect the facts about a finished attempt from its `directory`; `code` is an agent's exit code."""
    return Evidence(well, status_of(directory), first_failure(directory, nodes), asked, code)


def status_of(directory: Path) -> dict[str, Any]:
    """Return the run's status.json if a rank of this attempt wrote it, else an empty dictionary."""
    writer = read_status(directory, "run.json")
    run = writer.get("run")
    if not isinstance(run, str) or "\0" in run:
        return {}
    try:
        status = RunDirectory(run).status()
    except StorageError:
        return {}
    same = all(status.get(key) == writer.get(key) for key in ("host", "pid"))
    return status if same else {}


def first_failure(directory: Path, nodes: int) -> RankEnd | None:
    """Return the rank that failed first, as agreed by the ranks, else as seen by torchrun."""
    found: list[Mapping[str, Any]] = []
    for node in range(nodes):
        failures = read_status(directory, f"agent_{node}.json").get("failures")
        for one in failures if isinstance(failures, list) else []:
            keys = ("rank", "code", "time")
            if isinstance(one, dict) and all(isinstance(one.get(key), int) for key in keys):
                found.append(one)
    ended = [RankEnd(one["rank"], str(one.get("host")), one["code"]) for one in by_likelihood(found)]
    agreed = read_status(directory, "failure.json")
    rank, code = agreed.get("rank"), agreed.get("exit_code")
    if isinstance(rank, int) and isinstance(code, int):
        # For a lost rank torchrun knows the signal.
        seen = next((one.code for one in ended if one.rank == rank and code == LOST), code)
        return RankEnd(rank, str(agreed.get("host")), seen, str(agreed.get("text", "")))
    return ended[0] if ended else None


def by_likelihood(ends: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort ends of ranks (`code`, `time` in seconds), the likely cause of the others first."""
    begun = min((one["time"] for one in ends), default=0)
    return sorted(ends, key=lambda one: (_likelihood(one["code"], one["time"] - begun), one["time"]))


def _likelihood(code: int, secs: float) -> int:
    """Return 0 for a likely cause, more for consequences: torchrun sends SIGTERM, later SIGKILL."""
    if code == -SIGTERM or (code == -SIGKILL and secs >= GRACE_SECS - 1):
        return 3
    if code == LOST:
        return 2
    return 0 if code < 0 else 1


def last_lines(directory: Path, rank: int) -> tuple[Path, list[str]] | None:
    """Return the last lines of a rank and their file: stderr, or stdout if stderr is empty."""
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


def report_lines(found: Evidence, verdict: LaunchOutcome, directory: Path) -> Iterator[str]:
    """Yield the report: one line on success, else also the first failed rank with its last lines."""
    if verdict.code == 0:
        yield f"{verdict.why}; logs: {directory}"
        return
    yield f"exit code {verdict.code}: {verdict.why}"
    first = found.first
    if first is None or verdict.code in (PREEMPTED, INTERRUPTED):
        yield f"logs: {directory}"
        return
    why = f" ({first.text})" if first.text and first.text not in verdict.why else ""
    yield f"first to fail: rank {first.rank} on {first.host} {first.how}{why}"
    shown = last_lines(directory, first.rank)
    if shown is None:
        yield f"it printed nothing; logs: {directory}"
        return
    path, lines = shown
    yield f"its last lines, from {path}:"
    yield from (f"    {line}" for line in lines)


MOST_IDLE = 3
"""Launches in a row that may end before a run begins; afterwards the run detects crash loops."""


def wants_requeue(verdict: LaunchOutcome, restart: int, budget: int) -> bool:
    """Return True if a job should be queued again after its launch number `restart` (0: the first).

    Without a budget of restarts, every preempted run is; with one, also runs with a lost rank, up to
    `budget` times. A run without progress ends by itself with exit code 93.
    """
    if budget and restart >= budget:
        return False
    return verdict.code == PREEMPTED or (verdict.again and budget > 0)


def idle_starts(launch: Path, restart: int) -> int:
    """Count the launches up to `restart` that ended before any run began.

    `launch` is the directory of the launch. A program that does not use torchrelay never begins a run.
    """
    idle = 0
    while idle <= restart and not read_status(launch / f"attempt_{restart - idle}", "run.json"):
        idle += 1
    return idle


def without_end(verdict: LaunchOutcome, idle: int, budget: int) -> LaunchOutcome:
    """Return the outcome, or exit code 93 if the job would be repeated for ever without progress."""
    if verdict.code != PREEMPTED or budget or idle < MOST_IDLE:
        return verdict
    return LaunchOutcome(
        NoProgressError.exit_code,
        f"{idle} launches in a row were ended before a run began: give a longer --time-limit or a shorter "
        "--notice (for a program that does not use torchrelay: --max-restarts)",
    )


def status_at(run: str | None) -> Mapping[str, Any]:
    """Read the status of a run directory; empty if there is none, for a URL, or if unreadable."""
    if run is None or "://" in run:
        return {}
    try:
        return RunDirectory(run).status()
    except RelayError:
        return {}


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the new status, or an empty dictionary if it is still that of an earlier attempt."""
    return {} if after == before else after


def agreed(verdict: LaunchOutcome, status: Mapping[str, Any]) -> LaunchOutcome:
    """Return the outcome of a host, which is a failure if the run failed.

    The ranks of this host may have succeeded before one of another host failed, but all hosts need the same
    exit code to be restarted together.
    """
    if verdict.code == 0 and status.get("state") == "FAILED":
        return verdict_of(Evidence(False, status))
    return verdict
