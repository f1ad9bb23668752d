"""Rows of README.md about what surrounds a program: secrets in URLs, full pipes, limits."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import shown
from torchrelay.errors import UsageError

LS = [sys.executable, "-m", "torchrelay", "ls"]
JOB = """
import sys, torch
from torchrelay import Job, JobRunner, max_epochs

tensor = torch.zeros(300_000)
job = Job("limits", blobs=dict(tensor=tensor))
job.epoch(lambda ctx: tensor.add_(1))
job.stop_when(max_epochs(1))
JobRunner(job, sys.argv[1]).main([])
"""


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sftp://user:secret@host/run", "sftp://user:***@host/run"),
        ("ftp://user:se@cret@host:21/a@b", "ftp://user:***@host:21/a@b"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, text: str) -> None:
    """What stands before the host is no part of any message; an `@` in a path is."""
    assert shown(url) == text


def test_a_storage_with_a_password_hides_it() -> None:
    """Neither a storage nor the refusal of a URL repeats the password that it was given."""
    storage = ObjectStorage.open("local://user:secret@host/run", "the place")
    assert "secret" not in storage.url
    with pytest.raises(UsageError) as caught:
        ObjectStorage.open("foo://user:secret@host/run", "the place")
    assert "secret" not in str(caught.value) and "foo://user:***@host/run" in str(caught.value)


def test_an_output_that_is_full(tmp_path: Path) -> None:
    """What cannot be printed ends the command with a code and a line, never with a traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LS, str(tmp_path)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False
        )
    assert done.returncode and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """A relative path leads nowhere then; that is one line and 2."""
    place = tmp_path / "gone"
    place.mkdir()
    code = f"import os; os.rmdir(os.getcwd()); os.execv({LS[0]!r}, {[*LS, 'run']!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and "run does not exist" in done.stderr and "Traceback" not in done.stderr


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """A limit of file sizes is an error that names the place, not a process that a signal kills."""
    (tmp_path / "job.py").write_text(JOB)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=100, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 5 and "File too large" in done.stderr and str(tmp_path / "run") in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
