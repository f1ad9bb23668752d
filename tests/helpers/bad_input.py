"""What the tests of bad input share: a small job that notes what ran, and a look at what was left behind."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import RelayError


class Trial:
    """A job over one tensor; `ran` lists the user's tasks that ran, by group and epoch."""

    def __init__(
        self,
        blobs: dict[str, Any] | None = None,
        *,
        epochs: int = 2,
        name: str = "trial",
        setup: Callable[..., Any] | None = None,
        init: Callable[..., Any] | None = None,
        epoch: Callable[[Any], Any] | None = None,
        stop: bool = True,
        **options: Any,
    ) -> None:
        self.ran: list[str] = []
        self.job = Job(name, blobs={"w": torch.zeros(3)} if blobs is None else blobs, **options)
        self.job.setup(lambda: self.ran.append("setup"))
        for group, task in ((self.job.setup, setup), (self.job.init, init)):
            if task is not None:
                group(task)

        @self.job.epoch
        def train(ctx: Any) -> None:
            self.ran.append(f"epoch {ctx.epoch}")
            if epoch is not None:
                epoch(ctx)

        if stop:
            self.job.stop_when(max_epochs(epochs))

    def train(
        self, where: Any, epoch: Any = None, *, takeover_secs: float | None = None, **options: Any
    ) -> Any:
        """Train in a session of its own; `takeover_secs` is how long a holder of the log is watched."""
        runner = JobRunner(self.job, where, **options)
        if takeover_secs is not None and runner.manager is not None:
            runner.manager.engine.ledger.takeover_secs = takeover_secs
        with LocalSession() as session:
            return runner.train(session, epoch)


def tree(directory: Path) -> dict[str, int]:
    """Everything below a directory; of files the time of their last change in nanoseconds, too."""
    return {
        str(path.relative_to(directory)): 0 if path.is_dir() else path.lstat().st_mtime_ns
        for path in sorted(directory.rglob("*"))
    }


def refused(
    kind: type[RelayError],
    code: int,
    *words: str,
    below: Path,
    work: Callable[[], Any],
    ran: Sequence[str] = (),
) -> str:
    """Check that `work` raises this very error with these words, runs nothing, leaves nothing behind."""
    before = tree(below)
    with pytest.raises(RelayError) as caught:
        work()
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    assert caught.value.exit_code == code
    for word in words:
        assert word in text, f"no {word!r} in {text!r}"
    assert not ran, "a task of the user ran"
    assert tree(below) == before, "something was left behind"
    return text


def run_program(
    source: str, *arguments: str, cwd: Path, secs: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a training program as a user does."""
    (cwd / "program.py").write_text(source)
    return subprocess.run(
        warmed(["program.py", *arguments]),
        cwd=cwd,
        env=clean_environment({PLACE: server()}),
        capture_output=True,
        text=True,
        timeout=secs,
    )


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect all warnings as text, in order."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts.extend(str(one.message) for one in caught)


@contextmanager
def small_disk(at: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own; the test is skipped where this machine does not let us mount one."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"this machine lets us mount nothing: {done.stderr.strip()}")
    try:
        yield at
    finally:
        if at.is_mount():  # a test may have taken it away
            subprocess.run(["umount", str(at)], check=True)


def remount(at: Path, options: str) -> None:
    """Change the options of a mounted disk."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(at)], check=True)


def newest_try(run: Path, epoch: int) -> Path:
    """The directory of the newest try of an epoch."""
    tries = (run / "checkpoints" / "data").glob(f"e{epoch:08d}-*")
    return max(tries, key=lambda path: path.stat().st_mtime_ns)


def shard(run: Path, epoch: int) -> Path:
    """The main shard of the only node in an epoch."""
    return next(newest_try(run, epoch).glob("*.main.safetensors"))


def records(run: Path) -> list[Path]:
    """The log's slots in order."""
    return sorted((run / "checkpoints" / "log").glob("0*.json"))


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
