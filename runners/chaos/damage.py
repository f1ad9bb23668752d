"""Bytes that change after they were committed: flipped bits, files cut short. Loads must notice or not care.

A trial changes one file of a finished run, lets a reader load the newest epoch, and puts the file back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrelay.runners.chaos.forks import Order
from torchrelay.runners.chaos.pool import Worker
from torchrelay.runners.chaos.scenarios import Copy, Prepared, copy_of
from torchrelay.runners.chaos.strikes import LIMIT_SECS, judge_left
from torchrelay.runners.chaos.tally import Outcome, Verdict

LOOK = "torchrelay.runners.chaos.damage:look_at_all"
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


def draw(kind: str, run: Path, trials: int, seed: int) -> list[Damage]:
    """Changes of committed files: files in turn, so that small ones are hit as often, positions by chance."""
    chance = random.Random(f"{seed}/{kind}")  # noqa: S311 - chance, no secret
    files = [one for one in sorted((run / "checkpoints").rglob("*")) if one.is_file() and one.stat().st_size]
    found = []
    for number in range(trials):
        file = files[number % len(files)]
        path, size = str(file.relative_to(run)), file.stat().st_size
        found.append(Damage(kind, number, path, chance.randrange(size), chance.randrange(8)))
    return found


@contextmanager
def done_to(run: Path, damage: Damage) -> Iterator[None]:
    """The run with the damage in it."""
    file = run / damage.path
    whole = file.read_bytes()
    if damage.kind == "flip":
        changed = bytearray(whole)
        changed[damage.at] ^= 1 << damage.bit
        file.write_bytes(changed)
    else:
        file.write_bytes(whole[: damage.at])
    try:
        yield
    finally:
        file.write_bytes(whole)


# In the fork


def look_at_all(run: str, changes: list[dict[str, Any]]) -> list[list[str]]:
    """Load the run with each of the changes in it; verdict and reason of each."""
    return [list(_look(Path(run), Damage(**one))) for one in changes]


def _look(run: Path, damage: Damage) -> tuple[str, str]:
    from torchrelay.runners.chaos import checks, contents  # they import torch, which only the fork has

    with done_to(run, damage):
        try:
            return "survived", checks.look(str(run), str(run.with_name(f"{run.name}.oracle")))
        except contents.Mixed as error:
            return "undetected", str(error)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"


# In the driver


@dataclass(frozen=True)
class Batch:
    """Changes that one fork looks at, one after another."""

    prepared: Prepared
    changes: tuple[Damage, ...]


def look(worker: Worker, batch: Batch) -> list[Outcome]:
    """Carry out a batch; where the fork itself dies, all of it has failed."""
    copy = copy_of(batch.prepared, worker.fresh())
    try:
        arguments = {"run": str(copy.run), "changes": [asdict(one) for one in batch.changes]}
        ended = worker.nursery.run(Order(LOOK, arguments, limit_secs=_BATCH_SECS))
        if not ended.well:
            return [_outcome(copy, one, Verdict.FAILED, ended.reason) for one in batch.changes]
        return [
            _outcome(copy, one, Verdict(verdict), reason)
            for one, (verdict, reason) in zip(batch.changes, ended.value, strict=True)
        ]
    finally:
        copy.remove()


def _outcome(copy: Copy, damage: Damage, verdict: Verdict, reason: str) -> Outcome:
    name = f"{copy.scenario.name}/{damage.name}"
    where = f"byte {damage.at}" + (f", bit {damage.bit}" if damage.kind == "flip" else "")
    return Outcome(damage.kind, name, verdict, f"{damage.path}, {where}: {reason}")


@dataclass(frozen=True)
class Resumed:
    """A change in a run that is then resumed."""

    prepared: Prepared
    damage: Damage


def resume(worker: Worker, one: Resumed) -> Outcome:
    """Resume a damaged run: it goes on from what can be proved, or refuses; what it saves is right.

    The damage stays, as it would.
    """
    copy = copy_of(one.prepared, worker.fresh())
    try:
        file = copy.run / one.damage.path
        with done_to(copy.run, one.damage):
            changed = file.read_bytes()
        file.write_bytes(changed)
        verdict, reason = _judge_resumed(worker, copy)
        return _outcome(copy, one.damage, verdict, f"resumed: {reason}")
    finally:
        copy.remove()


def _judge_resumed(worker: Worker, copy: Copy) -> tuple[Verdict, str]:
    ended = worker.nursery.run(copy.train(None, LIMIT_SECS))
    if not ended.well:
        return judge_left(ended)
    said = ended.value
    if said["error"] and not said["ours"]:
        return Verdict.FAILED, f"{said['kind']}: {said['error']}"
    return Verdict.SURVIVED, said["error"] or "goes on"
