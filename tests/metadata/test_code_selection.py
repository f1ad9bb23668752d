"""Which files are source, with git and without."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from source_trees import fill, git, held

from torchrelay.errors import UsageError
from torchrelay.metadata.code.git import without_credentials
from torchrelay.metadata.code.snapshot import Snapshot, Sources, sources_of, take

FILES = {
    "train.py": "1",
    "pkg/net.py": "2",
    "conf/a.yaml": "3",
    ".gitignore": "*.log.txt\n/secret.py\n/build/\n!keep.log.txt\n",
    "pkg/.gitignore": "made.py\n",
    "out.log.txt": "no",
    "keep.log.txt": "4",
    "secret.py": "no",
    "build/x.py": "no",
    "pkg/made.py": "no",
    "pkg/__pycache__/net.pyc": "no",
    "__pycache__/x.py": "no",
    "weights.pt": "no source by its name",
    ".env": "TOKEN=1",
    ".venv/lib/x.py": "no",
    "runs/a/run.json": "{}",
    "runs/a/checkpoints/x.json": "no",
    "runs/a/code/y.py": "no",
}
SOURCE = {"train.py", "pkg/net.py", "conf/a.yaml", "keep.log.txt"}


def names(found: Snapshot) -> set[str]:
    return {*found.manifest.files, *found.manifest.links}


def test_without_git_suffixes_and_gitignore_decide(tmp_path: Path) -> None:
    """Source by suffix, less what a .gitignore names, hidden files, caches, environments and runs."""
    fill(tmp_path, FILES)
    assert names(take(Sources([tmp_path]))) == SOURCE


def test_with_git_tracked_and_untracked_files_count(tmp_path: Path) -> None:
    """All that git knows, and what it neither knows nor ignores where it looks like source."""
    fill(tmp_path, {**FILES, "tracked.bin": b"\0\1"})
    git(tmp_path, "init", "-q")
    before = take(Sources([tmp_path]))
    assert names(before) == SOURCE
    git(tmp_path, "add", "tracked.bin", ".gitignore")
    assert names(take(Sources([tmp_path]))) == {*SOURCE, "tracked.bin", ".gitignore"}
    git(tmp_path, "add", ".")
    (tmp_path / "conf/a.yaml").unlink()  # git still lists it
    assert "conf/a.yaml" not in names(take(Sources([tmp_path])))


def test_committing_does_not_change_the_code_id(tmp_path: Path) -> None:
    """The id is of the files, whatever git thinks of them."""
    fill(tmp_path, {"a.py": "1", "b.py": "2"})
    ids = [take(Sources([tmp_path])).manifest.code_id]
    for words in (
        ["init", "-q"],
        ["add", "a.py"],
        ["commit", "-qm", "x"],
        ["add", "."],
        ["commit", "-qm", "y"],
    ):
        git(tmp_path, *words)
        ids.append(take(Sources([tmp_path])).manifest.code_id)
    assert len(set(ids)) == 1


def test_a_folder_that_the_repository_around_ignores_is_looked_at_without_git(tmp_path: Path) -> None:
    """A project below an ignored folder has source all the same."""
    fill(tmp_path, {".gitignore": "*\n", "mine/train.py": "1"})
    git(tmp_path, "init", "-q")
    assert names(take(Sources([tmp_path / "mine"]))) == {"train.py"}


def test_submodules_are_archived_with_their_commit(tmp_path: Path) -> None:
    """What a submodule has checked out is source; its commit is recorded. So is a repository within."""
    inner = fill(tmp_path / "inner", {"lib.py": "1"})
    outer = fill(tmp_path / "outer", {"train.py": "2"})
    for one in (inner, outer):
        git(one, "init", "-q")
        git(one, "add", ".")
        git(one, "commit", "-qm", "x")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "third/lib")
    shutil.copytree(inner, outer / "nested")
    found = take(Sources([outer]))
    assert names(found) == {".gitmodules", "train.py", "third/lib/lib.py", "nested/lib.py"}
    assert found.submodules == {"third/lib": git(inner, "rev-parse", "HEAD").strip(), "nested": ""}


def test_links_within_the_source_are_kept_and_others_left_out(tmp_path: Path) -> None:
    """A link inside is a link in the archive; one that leads out is named, and never read."""
    fill(tmp_path / "root", {"real/a.py": "1"})
    fill(tmp_path, {"outside/secret.py": "2"})
    for name, target in {"alias": "real", "out": "../outside", "out.py": "../outside/secret.py"}.items():
        (tmp_path / "root" / name).symlink_to(target)
    os.mkfifo(tmp_path / "root/pipe.py")
    for with_git in (False, True):
        if with_git:
            git(tmp_path / "root", "init", "-q")
            git(tmp_path / "root", "add", "alias")
        found = take(Sources([tmp_path / "root"]))
        assert set(found.manifest.files) == {"real/a.py"}
        assert found.manifest.links == {"alias": "real"}
        for name in ("out", "out.py"):
            assert found.left_out[name] == "a link that leads out of the source"


def test_large_files_that_git_does_not_know_are_left_out_and_named(tmp_path: Path) -> None:
    """A result beside the source does not count as source only because of its suffix."""
    fill(tmp_path, {"a.py": "1", "results.json": b" " * (1 << 20) + b"{}"})
    found = take(Sources([tmp_path]))
    assert names(found) == {"a.py"}
    assert "1048578 bytes" in found.left_out["results.json"]


def test_too_much_source_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    """The error names them and what to do; excluding them helps."""
    fill(tmp_path, {"a.py": "1", "big/b.py": b"#" * 2000, "big/c.py": b"#" * 3000})
    with pytest.raises(UsageError, match=r"largest are big/c.py .* big/b.py .* exclude"):
        take(Sources([tmp_path], limit_bytes=4000))
    assert names(take(Sources([tmp_path], exclude=["big/"], limit_bytes=4000))) == {"a.py"}


def test_included_patterns_are_source_too(tmp_path: Path) -> None:
    """What has no suffix of source is taken where it was asked for."""
    fill(tmp_path, {"a.py": "1", "mesh/x.stl": b"\0", "mesh/y.bin": b"\0"})
    assert names(take(Sources([tmp_path], include=["*.stl"]))) == {"a.py", "mesh/x.stl"}


def test_git_that_is_missing_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command is not installed a repository is a directory like others."""
    fill(tmp_path, FILES)
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    found = take(Sources([tmp_path]))
    assert (names(found), found.git) == (SOURCE, {})


def test_a_repository_of_hooks_and_locks_is_only_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of another git, touched files and settings that would write the index change nothing."""
    fill(tmp_path, {"a.py": "1"})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    os.utime(tmp_path / "a.py", (1, 1))  # git would note the new time in its index
    fill(tmp_path, {".git/index.lock": ""})
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook
    before = held(tmp_path)
    found = take(Sources([tmp_path]))
    assert held(tmp_path) == before
    assert found.git[""].dirty is False


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://me:token@host/a/b.git", "https://host/a/b.git"),
        ("https://token@host:8443/a?access=1#x", "https://host:8443/a"),
        ("git@host:a/b.git", "host:a/b.git"),
        ("ssh://git:pw@host/a", "ssh://host/a"),
        ("../other", "../other"),
    ],
)
def test_credentials_of_remotes_are_not_recorded(url: str, kept: str) -> None:
    """A token in a URL must not be copied into run directories."""
    assert without_credentials(url) == kept


@pytest.mark.parametrize("code", [7, True, [1], {"a b": "."}, "missing", [], ["a", "a/b"], ["a", "c/a"]])
def test_source_that_cannot_be_is_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    """Wrong kinds, missing directories, roots within each other and names that stand twice are refused."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, {"a/b/x.py": "", "c/a/x.py": ""})
    with pytest.raises(UsageError):
        sources_of(code).labelled()


def test_runs_beside_the_source_are_no_source(tmp_path: Path) -> None:
    """Neither a run's directory nor one of checkpoints, also where the run lies in the root itself."""
    source = {"train.py": "1", "config/a.yaml": "2"}
    ours = {
        "run.json": "{}",
        "checkpoints/job.json": "{}",
        "code/x.json": "{}",
        "bare/job.json": "{}",
        "bare/log/1.json": "{}",
        "bare/data/x.json": "{}",
        "mine/job.json": "{}",
    }
    fill(tmp_path, {**source, **ours})
    for with_git in (False, True):
        if with_git:
            git(tmp_path, "init", "-q")
        assert names(take(Sources([tmp_path]))) == {*source, "mine/job.json"}
