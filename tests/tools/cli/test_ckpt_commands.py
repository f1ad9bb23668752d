"""`torchrelay ckpt`: proves, explains and mends; changes nothing where a job may be writing."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from epochs import Writing, moment, parameter

from torchrelay import Context, Job, JobRunner, LocalSession, max_epochs
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping, delete_left
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main

COMMAND = [sys.executable, "-m", "torchrelay", "ckpt"]
LEAVES = [parameter("w", torch.arange(6.0)), moment("m", torch.arange(3.0))]


def make(root: Path) -> Path:
    """Branch 0 has epochs 2 (without its optimizer) to 6, 4 quarantined; branch 1, of 5, has 6 and 6+12."""
    run = RunDirectory(root)
    run.create("asked", None, 1)
    run.write_status("FINISHED", epoch=6)
    with Writing(run.checkpoints, "asked") as writing:
        for epoch in range(5):
            writing.save(epoch, LEAVES)
        Keeping(last=3, optimizer_last=2).retire(writing.log)
        delete_left(writing.log)
        writing.log.quarantine(Key(0, Position(4)), "a test said so")
        writing.save(5, LEAVES)
        writing.save(5, LEAVES, step=30)
        writing.save(6, LEAVES)
        writing.log.rewind(Position(5), {"epoch": 5})
        writing.save(6, LEAVES)
        writing.save(6, LEAVES, step=12)
    run.log_event(0, "save failed", epoch=9, error="No space left on device", in_a_row=1)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def shard(run: Path, position: str, branch: int = 0) -> Path:
    view = open_log(LocalStorage(run / "checkpoints"))
    entry = view.entry(Key(branch, Position.parse(position)))
    assert entry is not None
    return next((run / "checkpoints/data" / entry.attempt_name).glob("*.main.safetensors"))


def spoil(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# why


@pytest.mark.parametrize(
    ("epoch", "standing", "words"),
    [
        ("6+12", "chosen", ["mid-epoch", "the newest one with verified headers"]),
        ("6", "older", ["a start takes the newest, epoch 6+12", "committed on branch 1"]),
        ("6,branch=0", "abandoned", ["branch 1 began at epoch 5", "loads as 6,branch=0", "never chosen"]),
        ("5+30", "retired", ["epoch 6 was committed, which completes it"]),
        ("4", "quarantined", ["a test said so"]),
        ("2", "not resumable", ["its files of optim were retired by keep_optimizer_last=2", "left: main"]),
        ("1", "retired", ["it was retired by keep_last=3", "branch 0"]),
        ("9", "unknown", ["it was never committed", "a save of it failed: No space left on device"]),
    ],
)
def test_why_tells_what_became_of_an_epoch(
    run: Path, capsys: pytest.CaptureFixture[str], epoch: str, standing: str, words: list[str]
) -> None:
    """Every way in which an epoch is not used has its word, its reason, and what the log says of it."""
    code, out, _ = told(capsys, "why", run, epoch)
    assert code == 0
    assert f"  {standing}: " in out.splitlines()[0]
    assert all(word in out for word in words), out
    assert out.splitlines()[-1] == "the next launch would resume from epoch 6+12 of branch 1"


def test_why_without_an_epoch_goes_down_to_the_one_that_is_chosen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newer damaged positions are told with file and reason; the last line is what a start would do."""
    spoil(shard(run, "6+12", 1), 200)
    shard(run, "6", 1).unlink()
    code, out, _ = told(capsys, "why", run)
    heads = [line for line in out.splitlines() if line.startswith("epoch")]
    assert code == 0 and len(heads) == 3
    assert "epoch 6+12 (branch 1)  damaged: data/e00000006s000012-" in heads[0]
    assert "epoch 6 (branch 1)  damaged: " in heads[1] and "is missing" in heads[1]
    assert "epoch 5 (branch 0)  chosen: " in heads[2]
    assert out.splitlines()[-1].endswith("resume from epoch 5 of branch 0, after 2 newer that are damaged")
    told_json = json.loads(told(capsys, "why", run, "--json")[1])
    assert told_json["start"]["epoch"] == 5
    assert [one["standing"] for one in told_json["epochs"]] == ["damaged", "damaged", "chosen"]


def test_why_knows_when_no_start_is_possible(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 where nothing can be proved, 5 where the newest cannot be read now, because it may be whole."""
    read, fired = LocalStorage.read_range, []

    def failing(self: LocalStorage, path: str, offset: int, length: int) -> bytes:
        if "s000012" in path:
            fired.append(path)
            raise StorageError(f"cannot read {path}: Input/output error")
        return read(self, path, offset, length)

    monkeypatch.setattr(LocalStorage, "read_range", failing)
    code, out, _ = told(capsys, "why", run)
    assert fired and code == 5 and "epoch 6+12 cannot be read" in out.splitlines()[-1]
    assert "epoch 6+12 (branch 1)  unknown: cannot read" in out
    monkeypatch.undo()
    for file in (run / "checkpoints/data").glob("*/manifest.json"):
        file.write_bytes(b"{}")
    code, out, _ = told(capsys, "why", run)
    assert code == 3 and "no epoch of the current branch can be verified" in out.splitlines()[-1]


def test_why_tells_what_a_run_fell_back_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a fallback the damaged epoch is told with the reason that the start gave."""

    def train(epochs: int) -> None:
        job = Job("fell", blobs={"total": torch.zeros(300)})
        job.epoch(lambda ctx: ctx["total"].add_(1))
        job.stop_when(max_epochs(epochs))
        with LocalSession() as session:
            JobRunner(job, tmp_path / "run").train(session)

    train(3)
    spoil(shard(tmp_path / "run", "3"), 100)
    with pytest.warns(UserWarning, match="epoch 3 is damaged"):
        train(4)
    code, out, _ = told(capsys, "why", tmp_path / "run", "3,branch=0")
    assert code == 0
    assert "epoch 3 (branch 0)  quarantined: found damaged: data/" in out and "the header is" in out
    assert "abandoned after damage: branch 1 began at epoch 2" in out
    assert "the next launch would train nothing: the run finished at epoch 4 of branch 1;" in out


def test_a_run_goes_on_after_its_newest_epoch_was_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quarantined by hand, or by a start that was killed before its rewind: the next begins a branch."""

    def train(epochs: int) -> list[int]:
        ran: list[int] = []
        job = Job("quarantined", blobs={"total": torch.zeros(300)})

        @job.epoch
        def add(ctx: Context) -> None:
            ran.append(ctx.epoch)
            ctx["total"] += ctx.epoch

        job.stop_when(max_epochs(epochs))
        with LocalSession() as session:
            assert JobRunner(job, tmp_path / "run").train(session).committed == epochs
            assert not ran or session.blob("total")[0] == sum(range(epochs + 1))
        return ran

    train(3)
    spoil(shard(tmp_path / "run", "3"))
    assert told(capsys, "verify", tmp_path / "run", "--quarantine")[0] == 5
    assert train(5) == [3, 4, 5]
    assert "epoch 3 (branch 0)  quarantined: " in told(capsys, "why", tmp_path / "run", "3,branch=0")[1]
    assert train(5) == []
    assert told(capsys, "verify", tmp_path / "run", "--epoch", "3")[0] == 0


@pytest.mark.parametrize("epoch", ["nine", "-1", "7,branch=x", "last", "1+", "1e3"])
def test_what_is_no_epoch(run: Path, capsys: pytest.CaptureFixture[str], epoch: str) -> None:
    """One line and exit code 2."""
    code = subprocess.run(
        [*COMMAND, "why", str(run), "--", epoch], capture_output=True, text=True, timeout=100, check=False
    ) if epoch.startswith("-") else None  # fmt: skip
    if code is None:
        assert told(capsys, "why", run, epoch)[0] == 2
    else:
        assert code.returncode == 2 and "invalid epoch" in code.stderr


# verify


def test_verify_tells_every_outcome(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is proved, quarantined or abandoned is said per epoch; a block is found at level full only."""
    spoil(shard(run, "5"))
    code, out, _ = told(capsys, "verify", run)
    assert code == 5
    assert "epoch 4  branch 0  verified (quarantined)  (was quarantined" in out
    assert "epoch 6  branch 0  verified (abandoned)" in out
    assert "epoch 5  branch 0  damaged  data/" in out and ": block 0 of w, at byte " in out
    assert told(capsys, "verify", run, "--level", "headers")[0] == 0


def test_verify_ends_with_3_when_no_start_could_use_any(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage of some is 5; of all that a run could go on from, 3, although abandoned ones are whole."""
    for position, branch in (("3", 0), ("5", 0), ("6", 1)):
        shard(run, position, branch).unlink()
    assert told(capsys, "verify", run)[0] == 5
    shard(run, "6+12", 1).unlink()
    code, out, _ = told(capsys, "verify", run)
    assert code == 3 and "epoch 6  branch 0  verified" in out
    assert told(capsys, "verify", run, "--epoch", "6")[0] == 5


def test_verify_quarantines_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log says so afterwards, so no start tries it; nothing is deleted, and a second time is quiet."""
    spoil(shard(run, "6+12", 1))
    assert told(capsys, "verify", run, "--level", "headers", "--quarantine")[0] == 0
    code, _, err = told(capsys, "verify", run, "--quarantine")
    assert code == 5 and "epoch 6+12,branch=1 is quarantined" in err
    view = open_log(LocalStorage(run / "checkpoints"))
    assert view.state.released and view.newest() == view.find(6)
    slot = view.slot
    assert "6+12" not in told(capsys, "verify", run, "--quarantine")[2]
    assert open_log(LocalStorage(run / "checkpoints")).slot == slot
    assert shard(run, "6+12", 1).exists()
    out = told(capsys, "why", run, "6+12")[1]
    assert "found damaged: data/" in out and ": block 0 of w" in out


def test_quarantine_and_repair_give_way_to_a_writer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a job holds the log both end with 4 and change nothing; looking is always possible."""
    spoil(shard(run, "6+12", 1))
    (run / "checkpoints/log/HINT").unlink()
    writer = LogWriter.take(LocalStorage(run / "checkpoints"), "asked")
    (run / "checkpoints/log/HINT").unlink()
    slot = writer.view.slot
    assert told(capsys, "verify", run, "--quarantine")[0] == 4
    assert told(capsys, "repair", run)[0] == 4
    assert told(capsys, "repair", run, "--dry-run")[0] == 0
    assert told(capsys, "why", run)[0] == 0
    assert open_log(LocalStorage(run / "checkpoints")).slot == slot
    writer.close()


def test_progress_is_shown_to_people_only(run: Path) -> None:
    """A terminal sees how far it is; a pipe gets nothing but the lines."""
    master, slave = pty.openpty()
    with subprocess.Popen([*COMMAND, "verify", str(run)], stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        out = process.communicate(timeout=100)[0].decode()
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "epoch 6+12, 7 of 7" in shown and shown.endswith("\r\x1b[K")
    assert "\x1b" not in out and out.splitlines()[-1] == "7 of 7 epochs verified"


# repair


def test_repair_says_what_it_would_do_and_does_it_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dry: nothing changes. Then all is mended but orphans, which go when told; then all is in order."""
    checkpoints = run / "checkpoints"
    (checkpoints / "log/HINT").write_bytes(b"17\n")
    (checkpoints / "writer.json").unlink()
    (run / "run.json").unlink()
    (run / "status.json").write_text("{")
    (checkpoints / "data/e00000009-abcdef").mkdir()
    middle = str(
        next((checkpoints / "data").glob("e00000005s*")).relative_to(checkpoints)
    )  # retired by a commit
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, out, _ = told(capsys, "repair", run, "--dry-run", "--delete-orphans")
    assert code == 0 and {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert out.count("to repair  ") == 5 and out.count("would be deleted  orphan") == 1
    found: dict[str, Any] = json.loads(told(capsys, "repair", run, "--json")[1])
    assert sorted(one["path"] for one in found["done"]) == [
        "../run.json", "../status.json", middle, "log/HINT", "writer.json"
    ]  # fmt: skip
    assert [one["kind"] for one in found["left"]] == ["orphan"]
    directory = RunDirectory(run)
    identity = directory.identity() or {}
    assert (identity["job"], identity["world_size"]) == ("asked", 1)
    assert directory.status()["state"] == "STOPPED" and directory.status()["epoch"] == 6
    assert "deleted  orphan  data/e00000009-abcdef" in told(capsys, "repair", run, "--delete-orphans")[1]
    code, out = told(capsys, "repair", run, "--delete-orphans")[:2]
    assert code == 0 and out.startswith("nothing to repair; ")


def test_a_run_goes_on_after_its_notes_were_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command continues a run whose run.json, status.json, hint and counter were lost."""

    def train(epochs: int) -> int:
        job = Job("notes", blobs={"total": torch.zeros(3)})
        job.epoch(lambda ctx: ctx["total"].add_(1))
        job.stop_when(max_epochs(epochs))
        with LocalSession() as session:
            return int(JobRunner(job, tmp_path / "run").train(session))

    run = tmp_path / "run"
    train(2)
    uuid = (RunDirectory(run).identity() or {})["uuid"]
    for name in ("run.json", "status.json", "checkpoints/log/HINT", "checkpoints/writer.json"):
        (run / name).unlink()
    assert told(capsys, "repair", run)[0] == 0
    assert (RunDirectory(run).identity() or {})["uuid"] == uuid
    assert train(3) == 3


def test_a_lost_base_that_nothing_tells_of_is_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What epochs need and nobody can make again is said with its file, and the code is that of damage."""
    with Writing(tmp_path / "ckpt", "based") as writing:
        for epoch in range(66):
            writing.save(epoch, LEAVES[:1])
    (base,) = (tmp_path / "ckpt/log").glob("base-*")
    base.unlink()
    for path in sorted((tmp_path / "ckpt/log").glob("0*.json"))[1:65]:
        path.unlink()
    shutil.rmtree(next((tmp_path / "ckpt/data").glob("e00000007-*")))
    code, out, _ = told(capsys, "repair", tmp_path / "ckpt", "--dry-run")
    assert code == 5 and f"left alone  lost base  log/{base.name}" in out


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_the_group_has_the_looking_verbs_too(
    run: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """`ckpt ls` is `ls`."""
    code, out, _ = told(capsys, verb, run)
    assert code == 0
    assert main([verb, str(run)]) == 0 and capsys.readouterr().out == out
