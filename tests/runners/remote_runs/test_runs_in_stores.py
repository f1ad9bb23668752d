"""A run at a URL: what lies there, going on elsewhere, ends that are told of, and who may put what."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lifecycle_cases import run, written
from stored_jobs import Hosts, in_memory, job_of, put, remove, train, weights

from torchrelay import JobRunner, LocalSession, Tier
from torchrelay.checkpoint.log import writer
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import DirectoryInUseError, FencedError, RelayError, UsageError
from torchrelay.lifecycle import StepFailedError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.distributed.launcher import final_calls
from torchrelay.runners.remote_runs import upload
from torchrelay.runners.remote_runs.download import RunFiles
from torchrelay.runners.remote_runs.local_copies import lock_workspace, make_workspace, workspace_of
from torchrelay.runners.remote_runs.upload import BYTES_PER_SEC, Putter
from torchrelay.runners.session import stop_requests
from torchrelay.runners.training.extras import remote_run


def status_at(url: str) -> dict[str, object]:
    found = json.loads(in_memory(url)["status.json"])
    assert isinstance(found, dict)
    return found


def epochs_at(url: str, folder: Path) -> list[int]:
    """The epochs of the run's curve, as files at the URL tell it."""
    folder.mkdir()
    for name, data in in_memory(url).items():
        if name.startswith("metrics."):
            (folder / name).write_bytes(data)
    return [line["epoch"] for line in RunDirectory(folder).metrics()]


def test_a_run_lies_at_its_url(url: str, hosts: Hosts) -> None:
    """Everything that a run directory has is at the URL when train returns, and the result names the URL."""
    result = train(url, 2, trackers=["csv"])
    assert result.run_dir == url
    found = in_memory(url)
    assert {"run.json", "status.json", "metrics.0.jsonl", "events.0.jsonl", "captured.0.json"} <= set(found)
    assert {"logs/attempt_0/rank_0.log", "trackers/metrics.csv", "metadata.jsonl"} <= set(found)
    assert status_at(url)["state"] == "FINISHED"
    assert not [name for name in found if name.startswith((".", "STOP"))], "probes and locks stay here"
    assert train(url, 2) == 2, "and the same command says that it is finished"


def test_a_run_that_has_ended_is_loaded_on_another_host(url: str, hosts: Hosts) -> None:
    """Its last epoch by train, its best one by `load_best`, on a host that has never seen the run."""
    train(url, 3)
    before = in_memory(url)
    hosts.on("elsewhere")
    job = job_of(3)
    (model,) = (blob.source for blob in job.blobs if blob.name == "model")
    runner = JobRunner(job, url, best=("train/loss", "min"), code=False)
    assert runner.train(LocalSession()) == 3 and torch.equal(model.weight, weights(url, 3))
    assert in_memory(url) == before
    epoch = runner.load_best()
    assert torch.equal(model.weight, weights(url, epoch))
    hosts.on("a third")
    job = job_of(3)
    (model,) = (blob.source for blob in job.blobs if blob.name == "model")
    assert JobRunner(job, url, best=("train/loss", "min"), code=False).load_best() == epoch
    assert torch.equal(model.weight, weights(url, epoch))


def test_going_on_on_another_host(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """An empty workspace ends in the same bits as a run that nothing interrupted, with one curve."""
    train(tmp_path / "whole", 5)
    train(url, 3, trackers=["csv"])
    hosts.on("two")
    assert train(url, 5, trackers=["csv"]) == 5
    assert torch.equal(weights(url), weights(tmp_path / "whole"))
    assert epochs_at(url, tmp_path / "curve") == [1, 2, 3, 4, 5]
    assert in_memory(url)["trackers/metrics.csv"].count(b"\n") == 6
    assert status_at(url)["attempt"] == 1


def test_a_rewind_on_another_host(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """An explicit epoch rewinds there too; what came after it is no part of the curve."""
    train(url, 3)
    hosts.on("two")
    assert train(url, 2, resume_from_epoch=1) == 2
    assert epochs_at(url, tmp_path / "curve") == [1, 2]


def test_curves_that_went_with_a_process_come_from_the_checkpoints(
    url: str, hosts: Hosts, tmp_path: Path
) -> None:
    """Lines that were never put are made again on another host, with the numbers that were measured."""
    train(url, 3)
    told = in_memory(url)["metrics.0.jsonl"].splitlines(keepends=True)
    put(f"{url}/metrics.0.jsonl", told[0])
    hosts.on("two")
    train(url, 4)
    assert epochs_at(url, tmp_path / "curve") == [1, 2, 3, 4]
    lines = RunDirectory(tmp_path / "curve").metrics()
    before = [json.loads(line)["metrics"] for line in told]
    assert [line["metrics"] for line in lines[:3]] == before
    assert [line.get("from_checkpoint") for line in lines] == [None, True, True, None]


def test_what_a_lost_process_left_here_is_put_up_by_the_next(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """On the same host longer files and a later status count; on the store's side everything else does."""
    train(url, 3)
    found = in_memory(url)
    put(f"{url}/metrics.0.jsonl", found["metrics.0.jsonl"].splitlines(keepends=True)[0])
    put(f"{url}/status.json", json.dumps({"state": "RUNNING", "generation": 0, "updated": 1.0}).encode())
    put(f"{url}/captured.0.json", b'{"by": "another"}')
    assert train(url, 3) == 3, "over already, and yet the rest is put"
    after = in_memory(url)
    assert after["metrics.0.jsonl"] == found["metrics.0.jsonl"]
    assert after["status.json"] == found["status.json"]
    assert after["captured.0.json"] == b'{"by": "another"}'


def test_a_deleted_run_begins_anew(url: str, hosts: Hosts) -> None:
    """What the store does not have any more is no run; what the workspace had of it lies beside."""
    train(url, 2)
    uuid = json.loads(in_memory(url)["run.json"])["uuid"]
    fsspec.filesystem("memory").rm("/" + url.partition("://")[2], recursive=True)
    assert train(url, 1) == 1
    assert json.loads(in_memory(url)["run.json"])["uuid"] != uuid
    assert "metrics.0.jsonl" in in_memory(url)
    beside = workspace_of(url).with_name("hello.before")
    assert json.loads((beside / "run.json").read_text())["uuid"] == uuid


def test_stop_by_url(url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object STOP ends the run at an epoch's end, and keeps it stopped; without it the run goes on."""
    monkeypatch.setattr(remote_run, "EVERY_SECS", 0.01)
    monkeypatch.setattr(upload, "_LEAST_SECS", 0.01)
    monkeypatch.setattr(stop_requests, "_LOOK_SECS", 0.0)
    seen = threading.Event()

    def each(ctx: object) -> None:
        if not seen.is_set():
            put(f"{url}/STOP", b"")
            assert _until(lambda: (workspace_of(url) / "STOP").exists())
            seen.set()

    result = train(url, 1000, each)
    assert (result.status, int(result) <= 2) == ("STOPPED", True)
    assert result.stop == (f"the file {url}/STOP",)
    assert status_at(url)["state"] == "STOPPED"
    assert train(url, 1000).status == "STOPPED", "it is still there"
    remove(f"{url}/STOP")
    assert train(url, 3).status == "FINISHED"
    assert "STOP" not in in_memory(url)


def _until(done: object, secs: float = 60.0) -> bool:
    end = time.monotonic() + secs
    while not done():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_failed_task_is_told_at_the_url(url: str, hosts: Hosts) -> None:
    """A run that fails puts up why, and the next start goes on."""

    def each(ctx: object) -> None:
        raise ValueError("no such number")

    with pytest.raises(RelayError, match="no such number"):
        train(url, 2, each)
    assert status_at(url)["state"] == "FAILED"
    assert b"no such number" in in_memory(url)["events.0.jsonl"]
    hosts.on("two")
    assert train(url, 2) == 2


class Blocked(MemoryFileSystem):
    """A store whose small files cannot be put while `shut` is set: refused, or not answered."""

    protocol = "memory"
    shut = threading.Event()
    hangs = threading.Event()
    open_again = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> object:
        if self.shut.is_set() and "/checkpoints/" not in path:
            if self.hangs.is_set():
                self.open_again.wait(120)
            raise OSError(22, "the store takes nothing")
        return super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> type[Blocked]:
    """memory:// is such a store."""
    for event in (Blocked.shut, Blocked.hangs, Blocked.open_again):
        event.clear()
    before = fsspec.get_filesystem_class("memory")
    fsspec.register_implementation("memory", Blocked, clobber=True)
    yield Blocked
    Blocked.open_again.set()
    fsspec.register_implementation("memory", before, clobber=True)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_takes_nothing_holds_nobody_up(
    url: str, hosts: Hosts, blocked: type[Blocked], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Training goes on, the end is bounded, what is missing is told and lies here; the next start puts it."""
    monkeypatch.setattr(remote_run, "END_SECS", 0.5)

    def each(ctx: object) -> None:
        (blocked.hangs.set if hangs else blocked.hangs.clear)()
        blocked.shut.set()

    with pytest.warns(UserWarning) as told:  # of several where the trouble is seen before the end
        assert train(url, 3, each) == 3
    texts = [str(one.message) for one in told]
    assert any(
        re.search(r"lacks the newest version of \d+ files \(.*uploaded in time", text) for text in texts
    ), texts
    assert status_at(url)["state"] == "RUNNING"
    blocked.open_again.set()
    blocked.shut.clear()
    monkeypatch.setattr(remote_run, "END_SECS", 60.0)
    assert train(url, 3) == 3
    assert status_at(url)["state"] == "FINISHED"


def test_trouble_is_told_once_and_passes(
    url: str, hosts: Hosts, blocked: type[Blocked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for a store that is away for a while; when it is back everything is there, without one."""
    monkeypatch.setattr(remote_run, "EVERY_SECS", 0.01)
    monkeypatch.setattr(upload, "_LEAST_SECS", 0.01)
    epoch = [0]

    def each(ctx: object) -> None:
        epoch[0] += 1
        if epoch[0] == 1:
            blocked.shut.set()
        if epoch[0] == 4:
            blocked.shut.clear()
        elif 1 < epoch[0] < 4:
            assert _until(lambda: here[0].reason)

    here: list[upload.BackgroundUploader] = []
    made = upload.BackgroundUploader.__init__

    def remember(self: upload.BackgroundUploader, *given: object, **more: object) -> None:
        made(self, *given, **more)  # type: ignore[arg-type]
        here.append(self)

    monkeypatch.setattr(upload.BackgroundUploader, "__init__", remember)
    with pytest.warns(UserWarning) as told:
        assert train(url, 5, each) == 5
    texts = [str(one.message) for one in told if "is not up to date" in str(one.message)]
    assert len(texts) == 1
    assert "the store takes nothing" in texts[0]
    assert status_at(url)["state"] == "FINISHED"


def test_a_fenced_job_puts_nothing(url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was overtaken leaves the winner's status and notes as they are."""
    monkeypatch.setattr(writer, "_LIVE", {})
    won: list[bytes] = []

    def each(ctx: object) -> None:
        writer._LIVE.clear()  # as if it were another process that is gone
        LogWriter.take(storage_of(f"{url}/checkpoints", "the place"), "stored", patience_secs=0.0).close()
        put(f"{url}/status.json", b'{"state": "RUNNING", "generation": 99}')
        won.append(in_memory(url)["status.json"])

    with pytest.raises(FencedError):
        train(url, 3, each)
    assert in_memory(url)["status.json"] == won[0]
    assert b"taken over" not in in_memory(url)["events.0.jsonl"]


def test_a_fenced_job_with_a_tier_puts_nothing(
    url: str, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a near directory of its own asks the store's log too before it puts anything."""
    monkeypatch.setattr(writer, "_LIVE", {})
    won: list[bytes] = []

    def each(ctx: object) -> None:
        if not won:
            writer._LIVE.clear()
            place = storage_of(f"{url}/checkpoints", "the place")
            LogWriter.take(place, "stored", patience_secs=0.0).close()
            put(f"{url}/status.json", b'{"state": "RUNNING", "generation": 99}')
            won.append(in_memory(url)["status.json"])

    with pytest.raises(FencedError):
        train(url, 3, each, tier=Tier(tmp_path / "near"))
    assert in_memory(url)["status.json"] == won[0]


def test_what_a_lost_end_with_a_tier_left_here_is_put(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """A run that is over is known again by the store's log, whatever its near directory counts."""
    train(url, 1)
    tier = Tier(tmp_path / "near")
    train(url, 2, tier=tier)
    right = in_memory(url)["status.json"]
    put(f"{url}/status.json", b'{"state": "RUNNING", "generation": 0}')
    assert train(url, 2, tier=tier) == 2
    assert json.loads(in_memory(url)["status.json"])["state"] == json.loads(right)["state"] == "FINISHED"


def test_a_job_that_is_refused_puts_nothing(url: str, hosts: Hosts) -> None:
    """While one job has the log another one, on another host, is refused, and the notes stay as they are."""
    train(url, 1)
    holder = LogWriter.take(storage_of(f"{url}/checkpoints", "the place"), "stored")
    before = in_memory(url)
    hosts.on("two")
    with pytest.raises(DirectoryInUseError):
        train(url, 2)
    assert in_memory(url) == before
    holder.release()
    assert train(url, 2) == 2


def test_final_calls_are_short() -> None:
    """A process that ends itself lets its runs put what they have, and waits for none that hangs."""
    said, hangs = threading.Event(), threading.Event()
    words = (said.set, lambda: hangs.wait(60))
    for one in words:
        final_calls.append(one)
    begun = time.monotonic()
    final_calls.make(secs=0.1)
    assert said.is_set()
    assert time.monotonic() - begun < 50
    hangs.set()
    for one in words:
        final_calls.forget(one)


def test_a_status_that_a_late_loser_put_over_ours_is_mended(url: str, hosts: Hosts) -> None:
    """Whoever holds the log has its own status there at the end, whoever wrote in between."""

    def each(ctx: object) -> None:
        put(f"{url}/status.json", b'{"state": "FAILED", "generation": -1}')

    train(url, 2, each)
    assert status_at(url)["state"] == "FINISHED"


def test_a_second_process_of_the_host_is_refused(
    url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace is one process's; the other one is told where, with the code for a run in use."""
    from torchrelay.runners.remote_runs import local_copies

    make_workspace(workspace_of(url))
    lock = lock_workspace(workspace_of(url))
    monkeypatch.setattr(local_copies, "LEAVING_SECS", 0.0)
    with pytest.raises(DirectoryInUseError, match="another process of this host"):
        train(url, 1)
    os.close(lock)
    assert train(url, 1) == 1


def test_links_and_strangers_in_a_workspace(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """A link is neither followed when files come nor when they go; other files of the user's go along."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    train(url, 1)
    here = workspace_of(url)
    (here / "status.json").unlink()
    (here / "status.json").symlink_to(secret)
    (here / "notes.txt").write_text("mine, too")
    (here / "odd").symlink_to(secret)
    with pytest.warns(UserWarning, match="links and special files are not uploaded"):
        assert train(url, 2) == 2
    assert secret.read_text() == "mine"
    found = in_memory(url)
    assert found["notes.txt"] == b"mine, too"
    assert "odd" not in found
    assert not any(data == b"mine" for data in found.values())
    put(f"{url}/config/resolved.yaml", b"a: 1\n")
    (here / "config").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
        train(url, 3)
    assert not (tmp_path / "resolved.yaml").exists()


def test_odd_names_in_a_store(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """Names that lead elsewhere become no files, and that is said; the run goes on."""
    train(url, 1)
    root = "/" + url.partition("://")[2]
    store = fsspec.filesystem("memory").store
    for name in ("config/../../../escaped", "../outside", "config/" + "x" * 300):
        store[f"{root}/{name}"] = type(store[f"{root}/run.json"])(
            fsspec.filesystem("memory"), f"{root}/{name}", b"evil"
        )
    hosts.on("two")
    with pytest.warns(UserWarning, match="is not possible as a local file name"):
        assert train(url, 2) == 2
    assert not [one for one in tmp_path.rglob("*") if one.name in ("escaped", "outside")]
    assert all(one.is_relative_to(tmp_path / "hosts") for one in hosts.files())


def test_files_that_are_too_large_stay_where_they_are(
    url: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beyond the bound is not brought, and what a start writes under its name not put over it."""
    from torchrelay.runners.remote_runs import download

    train(url, 1)
    put(f"{url}/values.jsonl", b"x" * 2_000_000)
    monkeypatch.setattr(download, "MOST_BYTES", 1_000_000)
    hosts.on("two")

    def each(ctx: object) -> None:
        (workspace_of(url) / "values.jsonl").write_text("new")

    with pytest.warns(UserWarning, match=r"values.jsonl is not downloaded: it has 2,000,000 bytes"):
        assert train(url, 2, each) == 2
    assert len(in_memory(url)["values.jsonl"]) == 2_000_000


def test_a_save_by_hand(url: str, hosts: Hosts) -> None:
    """`save_checkpoints` makes the run at the URL, too."""
    runner = JobRunner(job_of(1), url, code=False)
    with LocalSession() as session:
        session.place(runner.job.nodes())
        for name, source in (("w", torch.ones(3)),):
            session.workspace().update(**{name: source})
        runner.manager.init(["trainer_0"])
        runner.save_checkpoints(1, session)
    assert "run.json" in in_memory(url)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("memory://bucket/a/../b", "names that are none"),
        ("memory://", "names no place"),
        ("nonsense://bucket/run", "cannot be opened"),
        ("sftp://me:secret@host/run", "password"),
        ("memory://bucket//run", "names that are none"),
    ],
)
def test_urls_that_cannot_be(place: str, match: str) -> None:
    """Refused before anything is made, without showing a password."""
    with pytest.raises(UsageError, match=match) as refused:
        JobRunner(job_of(1), place)
    assert "secret" not in str(refused.value)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    """`file://` names a directory, and the run lies there as ever."""
    result = train(f"file://{tmp_path}/run", 1)
    assert result.run_dir == tmp_path / "run"
    assert (tmp_path / "run/status.json").exists()


def test_a_workspace_that_is_not_ours(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """A link in the place of a workspace is refused with the remedy; so is a place that cannot be written."""
    here = workspace_of(url)
    here.parent.mkdir(parents=True)
    here.symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"is a link: set TORCHRELAY_WORKSPACE"):
        train(url, 1)
    assert os.listdir(tmp_path) == ["hosts"]


def test_a_status_of_others_is_put_over(url: str, hosts: Hosts, tmp_path: Path) -> None:
    """A status that somebody put over ours is seen at the next look, and ours put again, nothing else."""
    files = RunFiles.open(url, "the run")
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "notes").write_text("mine")
    putter = Putter(files, tmp_path)
    for name, seen in putter.changed(patient=False).items():
        putter.put(name, seen)
    putter.look_at_status()
    assert putter.changed(patient=False) == {}
    put(f"{url}/status.json", b'{"state": "FAILED"}')
    putter.look_at_status()
    assert list(putter.changed(patient=False)) == ["status.json"]


def test_files_that_grow_are_put_the_more_rarely_the_longer_they_are(
    url: str, hosts: Hosts, tmp_path: Path
) -> None:
    """A file is due again after what it takes at the bound; whoever wants all of it now gets it."""
    now = [0.0]
    putter = Putter(RunFiles.open(url, "the run"), tmp_path, clock=lambda: now[0])
    for size in (BYTES_PER_SEC * 10, BYTES_PER_SEC * 10 + 1):
        (tmp_path / "values.jsonl").write_bytes(b"x" * size)
        (found,) = putter.changed(patient=False).items()
        putter.put(*found)
    (tmp_path / "values.jsonl").write_bytes(b"y")
    assert not putter.changed(patient=True)
    assert putter.changed(patient=False)
    now[0] = 10.1
    assert putter.changed(patient=True)


def test_a_configured_run_at_a_url(hosts: Hosts, url: str, tmp_path: Path) -> None:
    """A configuration whose run directory is a URL trains, goes on and is evaluated there."""
    words = [f"runner.train1.save_checkpoint_path={url}", f"runner.infer1.init_model_path={url}"]
    written(tmp_path)
    assert run(tmp_path, *words)["train1"].run_dir == url
    hosts.on("two")
    assert run(tmp_path, *words, "runner.train1.epochs=3")["train1"] == 3
    assert "config/resolved.yaml" in in_memory(url)
    assert [row["epoch"] for row in run(tmp_path, *words, mode=["infer1"])["infer1"]] == [0, 1, 2, 3]
    with pytest.raises(StepFailedError, match="`save_inference_path` is missing"):
        run(tmp_path, *words, "runner.train1.epochs=4", "runner.train1.save_inference_interval=1")
