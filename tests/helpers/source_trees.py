"""Trees of source for tests: files, git repositories of every kind, and a look at all that git holds."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchrelay import Job, JobRunner, LocalSession, max_epochs

IDENTITY = {
    **{f"GIT_{who}_NAME": "somebody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "somebody@localhost" for who in ("AUTHOR", "COMMITTER")},
}


def fill(directory: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a directory."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


def git(directory: Path, *words: str, identity: bool = True) -> str:
    """Run git as a user does, without this machine's settings."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", **(IDENTITY if identity else {})}
    done = subprocess.run(
        ["git", *words], cwd=directory, env=env, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def held(directory: Path) -> dict[str, tuple[int, str]]:
    """Every file below a directory, git's own too, by time of change and digest of its bytes."""
    return {
        str(path.relative_to(directory)): (
            path.lstat().st_mtime_ns,
            "" if path.is_dir() or path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(directory.rglob("*"))
    }


def small_job(name: str = "small", blobs: dict[str, Any] | None = None, epochs: int = 1) -> Job:
    """A job of one tensor whose epochs do nothing."""
    import torch

    job = Job(name, blobs={"w": torch.zeros(2)} if blobs is None else blobs)
    job.epoch(lambda: None)
    job.stop_when(max_epochs(epochs))
    return job


def train(run: Path, code: Any, job: Job | None = None, **options: Any) -> None:
    """Run a job in a session of its own."""
    with LocalSession() as session:
        JobRunner(small_job() if job is None else job, run, code=code, **options).train(session)
