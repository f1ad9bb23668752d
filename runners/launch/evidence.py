"""What an attempt has left: the notes of its ranks and agents, the run's status, the files of its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.distributed.launcher_status import heard
from torchrelay.runners.launch.agent_words import GRACE_SECS
from torchrelay.runners.launch.verdict import LOST, Evidence, RankEnd

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
