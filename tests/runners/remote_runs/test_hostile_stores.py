"""Stores that list too little or links, are used while a process is gone, or are configured late."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from sftp_server import MISSING, sftp
from store_servers import skip_without
from stored_jobs import Hosts, in_memory, train, weights

import torchrelay
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import open_file_system
from torchrelay.errors import UsageError
from torchrelay.runners.remote_runs import local_copies as mirrors
from torchrelay.runners.remote_runs.download import RunFiles, bring, found_in
from torchrelay.runners.remote_runs.local_copies import Mirror
from torchrelay.runners.remote_runs.names import for_a_look, travels


def test_a_listing_that_lags_makes_no_other_run(
    url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose listings show nothing goes on with the run under its identity, and counts its attempts."""
    train(url, 1)
    before = in_memory(url)
    hosts.on("two")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", lambda *_, **__: [])
        assert train(url, 2) == 2
    found = in_memory(url)
    assert found["run.json"] == before["run.json"]
    assert json.loads(found["status.json"])["attempt"] == 1


def test_links_in_a_store_are_not_followed(tmp_path: Path) -> None:
    """What links point to, files as folders, is not brought; the link is told of."""
    run, secret, into = tmp_path / "run", tmp_path / "secret", tmp_path / "into"
    for folder in (run, secret, into):
        folder.mkdir()
    (secret / "notes.json").write_text("secret")
    (run / "notes.json").write_text("{}")
    (run / "link.json").symlink_to(secret / "notes.json")
    (run / "config").symlink_to(secret)
    files = RunFiles.open(f"local://{run}", "the run")
    found, left_out = found_in(files, for_a_look)
    bring(files, found, into)
    assert [one.name for one in into.rglob("*")] == ["notes.json"]
    assert sorted(left_out) == ["config", "link.json"] and "a link" in left_out["config"]


def test_links_that_a_server_tells_of() -> None:
    """A client of sftp tells links by their type."""
    files = RunFiles.open("memory://hostile/links", "the run")
    told: list[dict[str, Any]] = [{"type": "link", "size": 3}, {"type": "other"}, {"type": "file"}]
    assert [files._listed(one, "x").link for one in told] == [True, True, False]


def test_sftp_takes_what_was_set_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set after fsspec was imported count; what the URL says counts more."""
    pytest.importorskip("asyncssh")
    monkeypatch.setenv("FSSPEC_SFTP_PORT", "2222")
    assert open_file_system("sftp://me@host/place", "the place")[0]._options["port"] == 2222
    assert open_file_system("sftp://me@host:23/place", "the place")[0]._options["port"] == 23


def test_a_run_over_sftp(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run lies at an sftp URL; another host goes on with it. The client's options are set late."""
    skip_without(MISSING)
    train(tmp_path / "whole", 3)
    with sftp() as server:
        for name, text in server.seen_at(server.port).items():
            monkeypatch.setenv(name, text)
        url = f"{server.url}runs/hello"
        assert train(url, 2) == 2
        folder = Path(f"/{url.split('/', 3)[3]}")
        (folder / "mine.json").symlink_to("/etc/hostname")
        there = hosts.on("two")
        with pytest.warns(UserWarning, match="mine.json is not downloaded: it is a link"):
            assert train(url, 3) == 3
        assert not list(there.rglob("mine.json"))
        assert torch.equal(weights(url), weights(tmp_path / "whole"))
        assert json.loads((folder / "status.json").read_text())["state"] == "FINISHED"


def test_parts_that_a_killed_job_left_are_given_up(
    url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the log ends uploads of the run's files that were begun before; not those of epochs."""
    root = url.partition("://")[2]
    begun = [(f"{root}/logs/x.log", "1"), (f"{root}/checkpoints/data/e00000001-7f3a9c/x", "2")]
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(RunFiles, "unfinished", lambda *_: begun)
    monkeypatch.setattr(RunFiles, "give_up", lambda _, one: ended.append(one))
    train(url, 1)
    assert ended == begun[:1]


def test_two_archives_of_one_name_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hosts that save states under one name, neither to write over the other, one is refused."""
    url = f"memory://archives-{secrets.token_hex(4)}/states.zip"
    torchrelay.save_states(url, torch.nn.Linear(2, 2), overwrite=False)
    first = read(url)
    stat, asked = ObjectStorage.stat, list[str]()

    def free_at_first(storage: ObjectStorage, path: str) -> int | None:
        asked.append(path)
        return None if len(asked) == 1 else stat(storage, path)

    monkeypatch.setattr(ObjectStorage, "stat", free_at_first)
    with pytest.raises(UsageError, match="exists already"):
        torchrelay.save_states(url, torch.nn.Linear(3, 3), overwrite=False)
    assert read(url) == first
    torchrelay.save_states(url, torch.nn.Linear(3, 3), overwrite=True)
    assert read(url) != first


def read(url: str) -> bytes:
    return bytes(fsspec.filesystem("memory").cat_file("/" + url.partition("://")[2]))


def test_whole_seconds_hide_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes within the second of its version, at the same length, is brought later."""
    now = [100.0]
    monkeypatch.setattr(mirrors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ls = LocalFileSystem.ls

    def whole(system: Any, path: str, detail: bool = False, **options: Any) -> Any:
        found = ls(system, path, detail=detail, **options)
        return [{**one, "mtime": int(one["mtime"])} for one in found] if detail else found

    monkeypatch.setattr(LocalFileSystem, "ls", whole)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "status.json"
    mirror = Mirror(f"local://{tmp_path}/run", tmp_path / "here")
    copied: list[str] = []
    copy = RunFiles.copy_into
    monkeypatch.setattr(
        RunFiles, "copy_into", lambda files, name, *rest: (copied.append(name), copy(files, name, *rest))[1]
    )

    def look(text: str, secs: float) -> str:
        file.write_text(text)
        os.utime(file, (1000, 1000))
        now[0] += secs
        return (mirror.run("", travels).path / "status.json").read_text()

    assert [look("{1}", 0.0), look("{2}", 0.5), look("{3}", 5.0)] == ["{1}", "{2}", "{3}"]
    assert look("{3}", 5.0) == "{3}" and len(copied) == 3, "and then it is believed"
