"""How an attempt ended, in lines for whoever looks on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchrelay.runners.launch.evidence import last_lines
from torchrelay.runners.launch.verdict import INTERRUPTED, PREEMPTED, Evidence, Verdict


def told_lines(found: Evidence, verdict: Verdict, directory: Path) -> Iterator[str]:
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
