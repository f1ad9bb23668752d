"""Bytes that change after they were committed: flipped bits, files cut short. Loads must notice or not care.

A trial changes one file of a finished run, lets a reader load the newest epoch, and puts the file back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torchrelay.chaos.processes import Order, Worker
from torchrelay.chaos.scenarios import Ready, Trial, tree_of
from torchrelay.chaos.strikes import LIMIT_SECS, Outcome, Verdict, judge_left
from torchrelay.records import dataclass

LOOK = "torchrelay.chaos.damage:look_at_all"
_BATCH_SECS = 300.0


@dataclass(frozen=True)
class Damage:
    """A change of one file: a flipped bit of the byte at `at`, or the end cut off from there on."""

    kind: str
    number: int
    path: str
    at: int
    bit: int = 0

    @property
    def name(self) -> str:
        """`flip@17`: the 17th of a seed."""
        return f"{self.kind}@{self.number}"


def draw(kind: str, files: Sequence[tuple[str, int]], trials: int, seed: int) -> list[Damage]:
    """Changes of files (path, bytes) in turn, so that small ones are hit as often; places by chance."""
    chance = random.Random(f"{seed}/{kind}")
    found = []
    for number in range(trials):
        path, size = files[number % len(files)]
        found.append(Damage(kind, number, path, chance.randrange(size), chance.randrange(8)))
    return found


@contextmanager
def done_to(run: str, damage: Damage) -> Iterator[None]:
    """The run with the damage in it."""
    tree = tree_of(run)
    whole = tree.read(damage.path)
    tree.write(damage.path, changed(whole, damage))
    try:
        yield
    finally:
        tree.write(damage.path, whole)


def changed(whole: bytes, damage: Damage) -> bytes:
    """What the damage makes of a file."""
    if damage.kind != "flip":
        return whole[: damage.at]
    flipped = bytearray(whole)
    flipped[damage.at] ^= 1 << damage.bit
    return bytes(flipped)


# In the fork


def look_at_all(run: str, oracle: str, changes: list[dict[str, Any]]) -> list[list[str]]:
    """Load the run with each of the changes in it; verdict and reason of each."""
    return [list(_look(run, oracle, Damage(**one))) for one in changes]


def _look(run: str, oracle: str, damage: Damage) -> tuple[str, str]:
    from torchrelay.chaos.child import target  # they import torch, which only the fork has

    with done_to(run, damage):
        try:
            said = target.look(run, oracle)
            return ("refused" if said.endswith("refused") else "survived"), said
        except target.Mixed as error:
            return "undetected", str(error)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"


# In the driver


@dataclass(frozen=True)
class Batch:
    """Changes that one fork looks at, one after another."""

    prepared: Ready
    changes: tuple[Damage, ...]


def look(worker: Worker, batch: Batch) -> list[Outcome]:
    """Carry out a batch; where the fork itself dies, all of it has failed."""
    copy = batch.prepared.copy(worker.fresh())
    try:
        changes = [asdict(one) for one in batch.changes]
        arguments = {"run": copy.place, "oracle": str(copy.oracle), "changes": changes}
        ended = worker.nursery.run(Order(LOOK, arguments, limit_secs=_BATCH_SECS))
        if not ended.well:
            return [_outcome(copy, one, Verdict.FAILED, ended.reason) for one in batch.changes]
        return [
            _outcome(copy, one, Verdict(verdict), reason)
            for one, (verdict, reason) in zip(batch.changes, ended.value, strict=True)
        ]
    finally:
        copy.remove()


def _outcome(copy: Trial, damage: Damage, verdict: Verdict, reason: str) -> Outcome:
    name = f"{copy.scenario.name}/{damage.name}"
    where = f"byte {damage.at}" + (f", bit {damage.bit}" if damage.kind == "flip" else "")
    return Outcome(damage.kind, name, verdict, f"{damage.path}, {where}: {reason}")


@dataclass(frozen=True)
class Resumed:
    """A change in a run that is then resumed."""

    prepared: Ready
    damage: Damage


def resume(worker: Worker, one: Resumed) -> Outcome:
    """Resume a damaged run: it resumes from a valid epoch or refuses, and what it saves is correct.

    The damage stays, as it would.
    """
    copy = one.prepared.copy(worker.fresh())
    try:
        tree = tree_of(copy.place)
        tree.write(one.damage.path, changed(tree.read(one.damage.path), one.damage))
        verdict, reason = _judge_resumed(worker, copy)
        return _outcome(copy, one.damage, verdict, f"resumed: {reason}")
    finally:
        copy.remove()


def _judge_resumed(worker: Worker, copy: Trial) -> tuple[Verdict, str]:
    ended = worker.nursery.run(copy.undisturbed(LIMIT_SECS))
    if not ended.well:
        return judge_left(ended)
    said = ended.value
    if said["error"] and not said["ours"]:
        return Verdict.FAILED, f"{said['kind']}: {said['error']}"
    if said["error"]:
        return Verdict.REFUSED, said["error"]
    return Verdict.SURVIVED, "goes on"
