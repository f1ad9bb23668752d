"""Checks after every kill, from outside with torchrelay's own reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from fingerprint import state_sha256
from storm_job import MARKS, STEPS

import torchrelay
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.local import LocalStorage


@dataclass
class Findings:
    """How often what was checked, and everything that was not as promised."""

    epochs_proved: int = 0
    lost: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    restarts: int = 0
    not_newest: list[str] = field(default_factory=list)
    finished: int = 0
    other_end: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all promises were kept."""
        return not (self.lost or self.mixed or self.not_newest or self.other_end)

    @property
    def violations(self) -> list[str]:
        """All that was found."""
        return [*self.lost, *self.mixed, *self.not_newest, *self.other_end]


@dataclass(frozen=True)
class Watched:
    """One run directory and what was acknowledged outside of it."""

    run: Path
    outside: Path

    def view(self) -> LogView:
        """The log as it is now; an empty one when there is none yet."""
        return open_log(LocalStorage(self.run / "checkpoints"))

    def newest(self) -> int | None:
        """The newest committed epoch."""
        return max(self.view().epochs(), default=None)

    def acknowledged(self) -> int | None:
        """The newest epoch that the handler received."""
        return max((line["epoch"] for line in lines_of(self.outside / "oracle")), default=None)

    def starts(self) -> list[int]:
        """The epoch that each process which came to train began with."""
        return [line["epoch"] for line in lines_of(self.outside / "starts")]

    def tries(self) -> set[str]:
        """The tries on disk, committed or not."""
        data = self.run / "checkpoints" / "data"
        return {path.name for path in data.iterdir()} if data.is_dir() else set()


def lines_of(path: Path) -> list[dict[str, int]]:
    """The whole lines of a file of JSON lines; none when it does not exist."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def fingerprints(watched: Watched) -> dict[int, str]:
    """The SHA-256 of all state of each epoch of an undisturbed run."""
    epochs = watched.view().epochs()
    return {epoch: state_sha256(torchrelay.open_checkpoint(watched.run, epoch=epoch)) for epoch in epochs}


def check_disk(watched: Watched, reference: dict[int, str], findings: Findings, proved: set[str]) -> None:
    """Nothing acknowledged is lost, and every committed epoch is whole and is that epoch."""
    view = watched.view()
    told = watched.acknowledged()
    committed = set(view.epochs())
    findings.lost += [f"{watched.run.name}: {notice}" for notice in view.notices]
    missing = [epoch for epoch in range(-1 if told is None else told + 1) if epoch not in committed]
    if missing:
        findings.lost.append(f"{watched.run.name}: acknowledged up to {told}, not in the log: {missing}")
    for gone in proved - {entry.attempt_name for entry in view.entries}:
        findings.lost.append(f"{watched.run.name}: {gone} was committed and is no longer in the log")
    for entry in view.entries:
        if entry.attempt_name not in proved or entry is view.entries[-1]:
            findings.mixed += [f"{watched.run.name}: {text}" for text in _wrong_in(watched, entry, reference)]
            findings.epochs_proved += 1
            proved.add(entry.attempt_name)


def _wrong_in(watched: Watched, entry: CommittedPosition, reference: dict[int, str]) -> list[str]:
    """What is wrong with one epoch; its bytes are read and compared with their digests."""
    proof = verify_epoch(LocalStorage(watched.run / "checkpoints"), entry, level="full")
    epoch = entry.position.epoch
    if not proof.verified:
        return [f"epoch {epoch} is {proof.outcome.value}: {proof.reason}"]
    checkpoint = torchrelay.open_checkpoint(watched.run, epoch=epoch)
    wrong = _foreign(checkpoint, epoch)
    if state_sha256(checkpoint) != reference[epoch]:
        wrong.append(f"epoch {epoch} differs from the undisturbed run")
    return wrong


def _foreign(checkpoint: Checkpoint, epoch: int) -> list[str]:
    """The blobs whose content does not belong to an epoch."""
    wrong = [
        name
        for name, tensor in checkpoint.load_tensors([f"mark_{number}" for number in range(MARKS)]).items()
        if bool((tensor != epoch).any())
    ]
    for rank, node in enumerate(checkpoint.nodes):
        (own,) = checkpoint.load_tensors(f"{node}:own").values()
        if own.tolist() != [rank if epoch else 0, *[epoch] * (len(own) - 1)]:
            wrong.append(f"{node}:own")
    if checkpoint.value("said") != epoch:
        wrong.append("said")
    counts = checkpoint.load_tensors("optimizer.state.*.step", strict=False) if epoch else {}
    wrong += [name for name, steps in counts.items() if int(steps) != epoch * STEPS]
    return [f"epoch {epoch}: {name} is of another epoch" for name in wrong]


def check_start(watched: Watched, newest: int | None, starts_before: int, findings: Findings) -> bool:
    """Check that an attempt that came to train began right after the newest committed epoch.

    Returns whether it came so far.
    """
    starts = watched.starts()[starts_before:]
    if not starts:
        return False
    findings.restarts += 1
    expected = 1 if newest is None else newest + 1
    if starts != [expected]:
        findings.not_newest.append(f"{watched.run.name}: began with {starts}, committed was {newest}")
    return True


def check_end(watched: Watched, reference: dict[int, str], findings: Findings) -> None:
    """A run that came to its end has all epochs, and its last one is that of the undisturbed run."""
    found = fingerprints(watched)
    findings.finished += 1
    if found != reference:
        findings.other_end.append(f"{watched.run.name}: the finished run differs from the undisturbed one")
