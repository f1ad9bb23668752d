"""The same stories on a store of objects: creations are conditional, there is no rename, answers get lost."""

from __future__ import annotations

from contextlib import suppress

import pytest
from crashing import LATER, told
from judging import Judge
from stories import STORIES, Record, going_on
from weak_objects import ObjectStore

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.errors import RelayError


@pytest.mark.parametrize("name", ["plain", "marked", "restarted"])
def test_no_lost_answer_and_no_crash_on_an_object_store_loses_anything(name, tell):
    """The answer of each change is lost in turn, and the process ends at each: the next one finds all."""
    judge = Judge(disk_of=ObjectStore.of)
    whole = ObjectStore()
    told(STORIES[name], whole)
    for lost in range(whole.changes):
        disk, record = ObjectStore(lose=frozenset([lost])), Record()
        with suppress(RelayError):
            told(STORIES[name], disk, 1, record)
        assert disk.changes > lost
        for at in record.boundaries:
            judge.check(at.snapshot.kept(), record, at.acknowledged, at.linked, f"{lost}: {at.verb}")
        at = record.boundaries[-1]
        after = ObjectStore.at(at.snapshot)
        told(going_on, after, LATER, record.after(at, open_log(after).slot))
    tell(f"object store, {name}: {whole.changes} lost answers, {judge.distinct:,} distinct states")
    assert judge.violations == []
