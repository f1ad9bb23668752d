"""Crashes of stories: at every boundary between two operations, and again in a life that follows a crash."""

from __future__ import annotations

import random
from dataclasses import dataclass

from judging import Judge
from stories import Boundary, Record, Story, going_on, recorded, still
from weak_disk import Tree, WeakDisk

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.errors import RelayError

LATER = 1 << 20
"""Nonces of a second life."""


@dataclass(frozen=True)
class Effort:
    """How many power cuts at a boundary, draws of what proves nothing, and second lives per story."""

    cuts: int = 64
    draws: int = 1
    lives: int = 6
    seed: int = 1


def told(story: Story, disk: WeakDisk, first: int = 1, record: Record | None = None) -> Record:
    """Let a story happen."""
    record = record or Record()
    with still(first), recorded(disk, record):
        story(disk, record)
    return record


def crash_everywhere(judge: Judge, record: Record, effort: Effort, where: str) -> None:
    """Kill, and cut the power, at every boundary of a recorded story."""
    for index, at in enumerate(record.boundaries):
        if judge.fed_up:
            return
        place = f"{where}: {index} {at.verb}"
        judge.check(at.snapshot.kept(), record, at.acknowledged, at.linked, place)
        for tree in at.snapshot.cuts(effort.cuts, effort.seed + index, effort.draws):
            judge.check(tree, record, at.acknowledged, at.linked, place)


def crash_twice(judge: Judge, record: Record, effort: Effort, where: str) -> None:
    """At some boundaries another process goes on, with what a kill or a power cut left, and crashes too."""
    rng = random.Random(effort.seed)
    for turn in range(effort.lives):
        at = record.boundaries[turn * len(record.boundaries) // effort.lives]
        cuts = list(at.snapshot.cuts(effort.cuts, effort.seed + turn))
        disks = [WeakDisk.at(at.snapshot), WeakDisk.of(rng.choice(cuts))]
        for kind, disk in zip(("killed", "cut"), disks, strict=True):
            if judge.fed_up:
                return
            place = f"{where}, {kind} at {at.verb}"
            later = _second_life(judge, disk, record, at, place)
            if later is not None:
                crash_everywhere(judge, later, effort, place)


def _second_life(judge: Judge, disk: WeakDisk, record: Record, at: Boundary, place: str) -> Record | None:
    try:
        later = record.after(at, open_log(disk).slot)
        return told(going_on, disk, LATER, later)
    except RelayError as error:
        judge.complain("recovers", f"{type(error).__name__}: {error}", place)
        return None


def files_of(disk: WeakDisk) -> Tree:
    """What processes see."""
    return disk.snapshot().kept()
