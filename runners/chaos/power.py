"""Power cuts: a save stands still before its calls, and the device is copied as it is in that moment.

Each copy is then mounted, which recovers it, and must hold what was acknowledged when it was made.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos import images
from torchrelay.runners.chaos.calls import CHANGING
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.images import FileSystem
from torchrelay.runners.chaos.pool import Worker
from torchrelay.runners.chaos.scenarios import Copy, Prepared
from torchrelay.runners.chaos.stillness import await_stillness
from torchrelay.runners.chaos.strikes import LIMIT_SECS, judge_left
from torchrelay.runners.chaos.tally import Outcome, Verdict

_POLL_SECS = 0.0002


@dataclass(frozen=True)
class Cuts:
    """Moments of a scenario, by the number of the call that had not happened yet."""

    prepared: Prepared
    system: FileSystem
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Cut:
    number: int
    image: Path
    oracle: bytes


def draw(prepared: Sequence[Prepared], system: FileSystem, trials: int, seed: int) -> list[Cuts]:
    """So many cuts, spread over the scenarios; the same for the same seed, each scenario in several runs."""
    chance = random.Random(f"{seed}/power/{system.name}")  # noqa: S311 - chance, no secret
    found: list[Cuts] = []
    share = -(-trials // max(1, len(prepared)))
    for one in prepared:
        numbers = [call.number for call in one.calls if call.kind in CHANGING]
        wanted = min(share, trials - sum(len(cuts.numbers) for cuts in found))
        while wanted > 0:
            chosen = sorted(chance.sample(numbers, min(len(numbers), wanted)))
            found.append(Cuts(one, system, tuple(chosen)))
            wanted -= len(chosen)
    return found


def cut(worker: Worker, cuts: Cuts) -> list[Outcome]:
    """Run the scenario once, copy the device at each moment, and check all copies."""
    home = worker.fresh()
    home.mkdir()
    try:
        return [_check(worker, cuts, one, home) for one in _taken(worker, cuts, home)]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _taken(worker: Worker, cuts: Cuts, home: Path) -> list[_Cut]:
    image = images.make(cuts.system, home / "image")
    with images.mounted(cuts.system, image, home / "mnt") as where:
        copy = cuts.prepared.copy(where / "run")
        outside = home / "oracle"
        if copy.oracle.exists():
            shutil.copyfile(copy.oracle, outside)
            copy.oracle.unlink()
        copy = Copy(copy.scenario, copy.run, outside)
        images.settle(where)
        found = list(_standing_still(worker, cuts, copy, image, home))
    image.unlink()
    return found


def _standing_still(worker: Worker, cuts: Cuts, copy: Copy, image: Path, home: Path) -> Iterator[_Cut]:
    """Let the run go from call to call; the whole process stands still while the device is copied."""
    plan = worker.plan
    plan.arm(copy.run, Fault("pause", 1, lasting=True))
    pid = worker.nursery.begin(copy.train(plan, LIMIT_SECS + len(cuts.numbers)))
    done, wanted = 0, set(cuts.numbers)
    while _is_there(pid):
        number = plan.paused
        if number <= done:
            time.sleep(_POLL_SECS)
            continue
        if number in wanted:
            yield _copied(pid, number, copy, image, home)
        done = number
        plan.resume(number)
    ended = worker.nursery.end()
    if not ended.well or ended.value["error"]:
        raise StorageError(f"the run on {cuts.system.name} failed undisturbed: {ended.reason} {ended.value}")


def _copied(pid: int, number: int, copy: Copy, image: Path, home: Path) -> _Cut:
    os.kill(pid, signal.SIGSTOP)
    await_stillness(pid, LIMIT_SECS)
    try:
        oracle = copy.oracle.read_bytes() if copy.oracle.exists() else b""
        images.copy(image, home / f"cut{number}")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return _Cut(number, home / f"cut{number}", oracle)


def _is_there(pid: int) -> bool:
    """Whether a child of the nursery still runs; it is reaped there, so a zombie is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def _check(worker: Worker, cuts: Cuts, one: _Cut, home: Path) -> Outcome:
    """Recover a copy, prove what was acknowledged, and go on there."""
    kind, name = f"power {cuts.system.name}", f"{cuts.prepared.scenario.name}/{cuts.system.name}@{one.number}"
    oracle = home / f"cut{one.number}.oracle"
    oracle.write_bytes(one.oracle)
    try:
        with images.mounted(cuts.system, one.image, home / f"cut{one.number}.mnt") as where:
            copy = Copy(cuts.prepared.scenario, where / "run", oracle)
            verdict, reason = judge_left(worker.nursery.run(copy.check(LIMIT_SECS)))
    except StorageError as error:
        verdict, reason = Verdict.FAILED, str(error)
    one.image.unlink()
    return Outcome(kind, name, verdict, reason)
