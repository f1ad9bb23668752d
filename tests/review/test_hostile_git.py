"""Repositories whose configuration names programs: git is asked about them, and nothing of theirs runs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from torchrelay.metadata.code import git as git_command
from torchrelay.metadata.code.git import Provenance, commit_hidden, listed, provenance_of, repository


def git(directory: Path, *words: str) -> str:
    own = ("-c", "user.name=n", "-c", "user.email=n@localhost", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *own, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "-q")
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", "first")
    return directory


def told(directory: Path) -> Provenance:
    with repository(directory) as repo:
        assert repo is not None
        return provenance_of(repo)


def program(tmp_path: Path, text: str) -> tuple[str, Path]:
    """A program and the file that it writes when it is run."""
    trace, path = tmp_path / "was-run", tmp_path / "program"
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {trace}\n{text}\n')
    path.chmod(0o755)
    return str(path), trace


def arm(directory: Path, run: str) -> None:
    """Configure a program wherever git can be told of one."""
    for name in ("core.fsmonitor", "core.pager", "diff.external", "diff.d.textconv", "diff.d.command"):
        git(directory, "config", name, run)
    for name in ("core.sshCommand", "filter.f.clean", "filter.f.process", "filter.a=b.clean", "gpg.program"):
        git(directory, "config", name, run)
    git(directory, "config", "diff.submodule", "diff")
    git(directory, "config", "filter.f.required", "true")
    info = Path(git(directory, "rev-parse", "--absolute-git-dir")) / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text("*.py filter=f diff=d\n*.txt filter=a=b\n")


def test_no_program_of_a_repository_or_its_submodule_runs(tmp_path: Path) -> None:
    """Listing, provenance and hidden refs start no filter, monitor, driver, pager or signer."""
    inner = committed(tmp_path / "inner", model="x = 1\n")
    outer = committed(tmp_path / "outer", main="x = 1\n")
    git(outer, "submodule", "add", "-q", str(inner), "lib")
    git(outer, "commit", "-q", "-m", "lib")
    run, trace = program(tmp_path, "cat")
    for one in (outer, outer / "lib"):
        arm(one, run)
    (outer / "notes.txt").write_text("new\n")
    (outer / "main.py").write_text("x = 22\n")
    (outer / "lib" / "model.py").write_text("x = 22\n")
    with repository(outer) as repo:
        assert repo is not None
        found = listed(repo)
        assert found is not None and {"main.py", "lib/model.py"} <= found.tracked
        assert b"+x = 22" in (provenance_of(repo).diff or b"")
        commit_hidden(repo, "ab" * 32, ["main.py", "notes.txt"])
    assert git(outer, "show", f"refs/torchrelay/{'ab' * 6}:notes.txt") == "new"
    assert not trace.exists()


def test_a_change_in_a_submodule_alone_is_seen(tmp_path: Path) -> None:
    """`dirty` looks into submodules, though git is not let into them."""
    inner = committed(tmp_path / "inner", model="x = 1\n")
    outer = committed(tmp_path / "outer", main="x = 1\n")
    git(outer, "submodule", "add", "-q", str(inner), "lib")
    git(outer, "commit", "-q", "-m", "lib")
    assert told(outer).dirty is False
    (outer / "lib" / "model.py").write_text("x = 22\n")
    assert told(outer).dirty is True


def test_objects_that_a_partial_clone_left_out_are_not_fetched(tmp_path: Path) -> None:
    """A missing object costs the difference, not a program that a remote's URL names."""
    repo = committed(tmp_path / "repo", main="x = 1\n")
    run, trace = program(tmp_path, "sleep 60")
    blob = git(repo, "rev-parse", "HEAD:main.py")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in (
        ("core.repositoryformatversion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", f"ext::{run}"),
        ("protocol.ext.allow", "always"),
    ):
        git(repo, "config", name, value)
    (repo / "main.py").write_text("x = 22\n")
    found = told(repo)
    assert found.dirty is True and found.diff is None
    assert not trace.exists()


def test_a_change_within_the_second_of_the_commit_is_seen(tmp_path: Path) -> None:
    """The copy of the index is as old as the index: git tells by that which files it must read again."""
    repo = committed(tmp_path / "repo", main="x = 1\n")
    then = (repo / "main.py").stat()
    (repo / "main.py").write_text("x = 2\n")
    for one in ("main.py", ".git/index"):
        os.utime(repo / one, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert told(repo).dirty is True


def test_what_git_started_does_not_outlive_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that keeps git's output open is ended with it, so nobody reads for ever."""
    run, trace = program(tmp_path, "sleep 600")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "git").write_text(f"#!/bin/sh\n{run} &\nexit 0\n")
    (bin_dir / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setattr(git_command, "PATIENCE_SECS", 0.1)
    kill = os.killpg

    def kill_what_has_begun(group: int, number: int) -> None:
        limit = time.monotonic() + 60
        while not trace.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        kill(group, number)

    monkeypatch.setattr(os, "killpg", kill_what_has_begun)
    with repository(tmp_path) as repo:
        assert repo is None
    assert trace.exists()
