"""Every rule of the protocol is needed, and the models see it: without it they report a violation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
from crashing import LATER, Effort, crash_everywhere, crash_twice, files_of, told
from judging import Judge
from rules import CRASH_RULES, ORDER_RULES
from stories import STORIES, Record, Run, going_on, small_log, still
from test_interleavings import MEETINGS, explored
from weak_disk import WeakDisk

from torchrelay.checkpoint.log import chain
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import KEEP_ALL, delete_left
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.errors import RelayError


@pytest.mark.parametrize("name", CRASH_RULES)
def test_a_crash_shows_that_a_rule_is_missing(name):
    """Without the rule some crash of a story loses, mixes or blocks something."""
    rule, judge = CRASH_RULES[name], Judge(enough=1)
    disk = WeakDisk(missing=frozenset([rule.missing]))
    with (
        small_log() if rule.story == "long" else nullcontext(),
        rule.without() if rule.without else nullcontext(),
    ):
        try:
            record = told(STORIES[rule.story], disk)
        except RelayError as error:
            judge.complain("goes on", str(error), rule.story)
        else:
            crash_everywhere(judge, record, Effort(), rule.story)
            crash_twice(judge, record, Effort(lives=len(record.boundaries)), rule.story)
    assert judge.violations


@pytest.mark.parametrize("name", ORDER_RULES)
def test_an_order_shows_that_a_rule_is_missing(name):
    """Without the rule some order of two processes forks, loses or falsely acknowledges something."""
    rule = ORDER_RULES[name]
    with rule.without() if rule.without else nullcontext():
        explorer = explored(replace(MEETINGS[rule.meeting], limit=100_000), exclusive=rule.exclusive)
    assert explorer.wrong


def accepted_mixtures():
    """Of logs with the slots of one history up to some one and another's beyond: opened, and tried."""
    record = told(STORIES["restarted"], WeakDisk())
    at = next(one for one in record.boundaries if one.acknowledged == 4)
    logs = []
    for first in (LATER, 2 * LATER):
        disk = WeakDisk.at(at.snapshot)
        told(going_on, disk, first, record.after(at, 4))
        logs.append(files_of(disk))
    one, other = logs
    slots = sorted(path for path in one.keys() & other.keys() if path.startswith("log/0"))
    accepted = 0
    for last in slots[5:-1]:
        mixed = {**other, **{path: one[path] for path in slots if path <= last}}
        try:
            accepted += not open_log(WeakDisk.of(mixed)).notices
        except RelayError:
            continue
    return accepted, len(slots[5:-1])


def test_two_histories_are_told_apart_by_the_chain():
    """Slots of two histories never pass for one log; without the check of the chain all of them do."""
    assert accepted_mixtures()[0] == 0
    with patch.object(chain, "_check_link", lambda *_: None):
        accepted, tried = accepted_mixtures()
    assert accepted == tried >= 3


def deleted_behind_damage():
    """Whether a sweep takes the files of an acknowledged epoch when its commit record is damaged."""
    disk, record = WeakDisk(), Record()
    with still():
        run = Run(disk, record)
        for epoch in range(2):
            run.save(epoch, change_all=True)
        run.writer.close()
    hidden = open_log(disk).newest().attempt_name
    disk.rot(f"log/{open_log(disk).slot:020d}.json")
    with still(LATER):
        writer = LogWriter.take(disk, "job", patience_secs=0.0)
        writer.retire(KEEP_ALL.chosen)
        delete_left(writer)
        writer.close()
    return hidden not in disk.list("data")


def test_nothing_is_an_orphan_while_damage_hides_a_part_of_the_log():
    """A try that only a damaged record names stays; without that rule the sweep takes it."""
    assert not deleted_behind_damage()
    with patch.object(LogView, "certain", True):
        assert deleted_behind_damage()
