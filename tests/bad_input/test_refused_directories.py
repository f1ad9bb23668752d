"""Run directories that cannot be: refused before any task runs, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bad_input import Trial, noted, refused, remount, small_disk, tree
from paired_sessions import Meeting, PairedPeers
from ranks import on_ranks

from torchrelay import JobRunner, MultiNodeCheckpointManager
from torchrelay.errors import DamagedError, FormatError, StorageError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.training import startup


def refuse(tmp_path: Path, where: Any, *words: str, kind: Any = UsageError, code: int = 2) -> str:
    trial = Trial()
    return refused(kind, code, *words, below=tmp_path, ran=trial.ran, work=lambda: trial.train(where))


def test_a_file(tmp_path: Path) -> None:
    """A run directory that is a file, or would lie below one, is refused; the file is kept."""
    (tmp_path / "run").write_text("precious")
    refuse(tmp_path, tmp_path / "run", str(tmp_path / "run"), "is a file")
    refuse(tmp_path, tmp_path / "run" / "a" / "b", f"{tmp_path / 'run'} is a file")
    assert (tmp_path / "run").read_text() == "precious"


@pytest.mark.parametrize(
    "where",
    ["", "  ", "nosuch://bucket/run", "s3://", "a\nb", "a\0b", "\x1b[2J", "/"],
)
def test_paths_that_are_none(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty paths, URLs of nothing, control characters and the root are refused; nothing is made of them."""
    monkeypatch.chdir(tmp_path)
    text = refuse(tmp_path, where)
    assert "\n" not in text and "\0" not in text and "\x1b" not in text
    if where.strip() not in ("", "/"):
        refused(UsageError, 2, "prefix", below=tmp_path, work=lambda: MultiNodeCheckpointManager(where))


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    """`file://` in front of a path changes nothing."""
    runner = JobRunner(Trial().job, f"file://{tmp_path}/run")
    assert runner.run_directory is not None and runner.run_directory.path == tmp_path / "run"


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """A name that no file system takes is refused, named with the system's reason."""
    refuse(tmp_path, tmp_path / ("a" * 300), "too long", "another path")


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    """A dangling link and a loop of links are refused; the links are kept."""
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    refuse(tmp_path, tmp_path / "dangling", "is a dangling link", "remove it")
    refuse(tmp_path, tmp_path / "loop", "symbolic links")
    refuse(tmp_path, tmp_path / "dangling" / "run", "is a dangling link")


def test_a_home_directory_is_meant_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` means the home directory and never a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert JobRunner(Trial().job, "~/run").run_directory.path == tmp_path / "home" / "run"  # type: ignore[union-attr]


def test_a_read_only_disk(tmp_path: Path) -> None:
    """On a read-only disk the run is refused with the system's reason, new or used."""
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        Trial().train(disk / "used")
        remount(disk, "ro")
        refuse(tmp_path, disk / "new", "Read-only", str(disk / "new"), kind=StorageError, code=5)
        refuse(tmp_path, disk / "used", "Read-only", str(disk / "used"), kind=StorageError, code=5)


def test_a_full_disk(tmp_path: Path) -> None:
    """On a full disk the run is refused with the system's reason and the remedy; the probe is gone."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        (disk / "filler").write_bytes(bytes(900 << 10))
        refuse(tmp_path, disk / "run", "No space left", "free space", kind=StorageError, code=5)
        assert list(disk.iterdir()) == [disk / "filler"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    """Without the right to write the run is refused."""
    (tmp_path / "closed").mkdir(mode=0o555)
    refuse(tmp_path, tmp_path / "closed" / "run", "Permission", kind=StorageError, code=5)


def test_a_run_of_another_job(tmp_path: Path) -> None:
    """A directory belongs to the job that began it; both jobs are named, the run is not touched."""
    Trial(name="first").train(tmp_path / "run")
    trial = Trial(name="second")
    refused(
        UsageError, 2, "'first'", "'second'", "another", below=tmp_path, ran=trial.ran,
        work=lambda: trial.train(tmp_path / "run"),
    )  # fmt: skip


def test_a_bare_prefix_of_another_job(tmp_path: Path) -> None:
    """So does a bare prefix, by its job.json."""
    Trial(name="first").train(MultiNodeCheckpointManager(tmp_path / "prefix"))
    trial = Trial(name="second")
    refused(
        UsageError, 2, "'first'", "'second'", below=tmp_path, ran=trial.ran,
        work=lambda: trial.train(MultiNodeCheckpointManager(tmp_path / "prefix")),
    )  # fmt: skip


def test_a_log_of_another_job_below_our_run(tmp_path: Path) -> None:
    """A log that another job left in the run directory is refused before anything is written."""
    Trial(name="first").train(MultiNodeCheckpointManager(tmp_path / "run" / "checkpoints"))
    trial = Trial(name="second")
    refused(
        UsageError, 2, "'first'", "'second'", below=tmp_path, ran=trial.ran,
        work=lambda: trial.train(tmp_path / "run"),
    )  # fmt: skip


def test_records_of_another_job_in_the_log(tmp_path: Path) -> None:
    """Records with another job's uuid are never taken for ours, whole logs of them are refused."""
    for name in ("ours", "theirs"):
        Trial().train(tmp_path / name)
    ours, theirs = (tmp_path / name / "checkpoints" / "log" for name in ("ours", "theirs"))
    for path in ours.glob("0*.json"):
        path.write_bytes((theirs / path.name).read_bytes())
    refuse(tmp_path, tmp_path / "ours", "no record that can be trusted", kind=DamagedError, code=5)


def test_a_log_without_its_job(tmp_path: Path) -> None:
    """A log of which neither job.json nor any record can be read is refused: nobody knows whose it is."""
    Trial().train(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "job.json").unlink()
    for record in (tmp_path / "run" / "checkpoints" / "log").glob("0*.json"):
        record.write_bytes(b"{}")
    refuse(tmp_path, tmp_path / "run", "job.json", "copy", kind=DamagedError, code=5)


def test_a_directory_that_not_all_hosts_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not see rank 0's probe is named with the directory; no probe stays behind."""
    monkeypatch.setattr(startup, "VISIBLE_WITHIN_SECS", 0.2)
    (tmp_path / "host1").mkdir()
    meeting = Meeting(2)
    before = tree(tmp_path)

    class Session:
        def __init__(self, rank: int) -> None:
            self.peers = PairedPeers(rank, 2, meeting)
            self.local_nodes = (type("Place", (), {"host": f"gpu{rank:02d}"})(),)

    def check(rank: int) -> None:
        run = RunDirectory(tmp_path / f"host{rank}" / "run")
        startup.check_run_directory(run, Trial().job, Session(rank))  # type: ignore[arg-type]

    errors = on_ranks(2, check)
    assert [type(error) for error in errors] == [UsageError, UsageError]
    assert all("gpu01" in str(error) and "host" in str(error) and "share" in str(error) for error in errors)
    assert tree(tmp_path).keys() == before.keys()


def test_what_stands_in_the_place_of_our_files(tmp_path: Path) -> None:
    """A pipe in place of run.json is refused at once instead of being waited for."""
    Trial().train(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    os.mkfifo(tmp_path / "run" / "run.json")
    refuse(tmp_path, tmp_path / "run", "run.json", "not a regular file", kind=StorageError, code=5)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", '{"format":3}', '{"format":{"major":1},"job":1,"uuid":"u"}', "[" * 10**5],
)
def test_an_identity_that_is_none(tmp_path: Path, content: str) -> None:
    """A run.json that nobody wrote hinders no start: the epochs tell the run's id, and it is said."""
    Trial().train(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    before = run.identity()
    (tmp_path / "run" / "run.json").write_text(content)
    with noted() as said:
        assert Trial(epochs=3).train(tmp_path / "run").committed == 3
    after = run.identity()
    assert before and after and (after["uuid"], after["job"]) == (before["uuid"], before["job"])
    assert "run.json" in " ".join(said)


def test_an_identity_of_another_version(tmp_path: Path) -> None:
    """A run.json of another major version is refused with both versions."""
    Trial().train(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": {"major": 2}}))
    refuse(tmp_path, tmp_path / "run", "another version", kind=FormatError, code=5)
