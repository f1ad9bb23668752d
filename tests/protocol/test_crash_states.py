"""Crashes at every operation of the real engine and log, on a disk that forgets what POSIX lets it forget."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from crashing import Effort, crash_everywhere, crash_twice, told
from judging import Judge
from stories import STORIES, small_log
from weak_disk import WeakDisk

AT_LEAST = 5_000
"""Distinct states per story, beyond those of the stories before."""
SEEN: set[int] = set()
"""What the stories before have looked at."""


@pytest.mark.parametrize("name", STORIES)
def test_no_crash_loses_or_mixes_anything(name, tell):
    """Killed or cut from power anywhere, and again in the life after: the acknowledged is there and whole."""
    judge, effort = Judge(_seen=SEEN), Effort(lives=2 if name == "long" else 6)
    with small_log() if name == "long" else nullcontext():
        record = told(STORIES[name], WeakDisk())
        crash_everywhere(judge, record, effort, name)
        crash_twice(judge, record, effort, name)
    tell(f"crash states of the protocol, {name}: {judge.distinct:,} new crash states")
    assert judge.violations == []
    assert judge.distinct >= AT_LEAST
