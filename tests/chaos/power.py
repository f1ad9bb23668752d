"""Power cuts: the device, a file system in a file, is copied while a save stands still before its calls.

Each copy is then mounted, which recovers it, and must hold what was acknowledged when it was made.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.chaos.faults import CHANGING, Fault
from torchrelay.chaos.processes import Worker, await_stillness
from torchrelay.chaos.scenarios import Copy, Prepared
from torchrelay.chaos.strikes import LIMIT_SECS, Outcome, Verdict, judge_left
from torchrelay.errors import StorageError
from torchrelay.records import dataclass

_COMMAND_SECS = 60.0


@dataclass(frozen=True)
class FileSystem:
    """How a file system is made and mounted. Its own commits are far apart: only syncs make durable."""

    name: str
    mib: int
    make: tuple[str, ...]
    options: str


FILE_SYSTEMS = {
    one.name: one
    for one in (
        FileSystem("ext4", 128, ("mkfs.ext4", "-q", "-F"), "noatime,commit=300"),
        FileSystem("xfs", 320, ("mkfs.xfs", "-q", "-f"), "noatime"),
        FileSystem("btrfs", 128, ("mkfs.btrfs", "-q", "-f"), "noatime,commit=300"),
    )
}


def why_not(system: FileSystem, directory: Path) -> str | None:
    """Why this file system cannot be tried here; None where it can, which is tried out."""
    if os.geteuid() != 0:
        return "mounting an image of a file system needs root"
    for program in (system.make[0], "losetup", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program}: install it (xfsprogs, btrfs-progs, e2fsprogs, mount)"
    try:
        image = make_image(system, directory / f"probe-{system.name}")
        with mounted(system, image, directory / f"probe-{system.name}.mnt"):
            pass
        image.unlink()
    except StorageError as error:
        return str(error)
    return None


def make_image(system: FileSystem, image: Path) -> Path:
    """An empty file system in a sparse file."""
    with open(image, "wb") as file:
        file.truncate(system.mib << 20)
    _run(*system.make, str(image))
    return image


@contextmanager
def mounted(system: FileSystem, image: Path, where: Path) -> Iterator[Path]:
    """The image, mounted. A file system that was cut off recovers here."""
    where.mkdir(exist_ok=True)
    device = _run("losetup", "-f", "--show", str(image)).strip()
    try:
        _run("mount", "-t", system.name, "-o", system.options, device, str(where))
        try:
            yield where
        finally:
            _run("umount", str(where))
    finally:
        with suppress(StorageError):
            _run("losetup", "-d", device)


def settle(where: Path) -> None:
    """Make durable what was written so far below a mounted image."""
    _run("sync", "-f", str(where))


def copy_image(image: Path, to: Path) -> None:
    """What the device holds now; what the file system only has in memory is not there."""
    _run("cp", "--sparse=always", "--reflink=auto", str(image), str(to))


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise StorageError(f"{' '.join(command)} did not end within {_COMMAND_SECS:g} s") from None
    if done.returncode:
        raise StorageError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


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
    chance = random.Random(f"{seed}/power/{system.name}")
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
    image = make_image(cuts.system, home / "image")
    with mounted(cuts.system, image, home / "mnt") as where:
        copy = cuts.prepared.copy(where / "run")
        outside = home / "oracle"
        if copy.oracle.exists():
            shutil.copyfile(copy.oracle, outside)
            copy.oracle.unlink()
        copy = Copy(copy.scenario, copy.run, outside)
        settle(where)
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
        copy_image(image, home / f"cut{number}")
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
    """Recover a copy, verify what was acknowledged, and resume there."""
    kind, name = f"power {cuts.system.name}", f"{cuts.prepared.scenario.name}/{cuts.system.name}@{one.number}"
    oracle = home / f"cut{one.number}.oracle"
    oracle.write_bytes(one.oracle)
    try:
        with mounted(cuts.system, one.image, home / f"cut{one.number}.mnt") as where:
            copy = Copy(cuts.prepared.scenario, where / "run", oracle)
            verdict, reason = judge_left(worker.nursery.run(copy.check(LIMIT_SECS)))
    except StorageError as error:
        verdict, reason = Verdict.FAILED, str(error)
    one.image.unlink()
    return Outcome(kind, name, verdict, reason)
