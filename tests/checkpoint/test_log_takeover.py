"""Who may take a log over, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from log_helpers import MemoryStorage, entry, take

from torchrelay.checkpoint.format.names import attempt_directory
from torchrelay.checkpoint.format.position import State
from torchrelay.checkpoint.log import chain as log_append
from torchrelay.checkpoint.log import lease
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import Right, WriterIdentity, judge, process_start
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DirectoryInUseError, NoProvableEpochError

HOLD = """
import sys
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.log.writer import LogWriter
writer = LogWriter.take(LocalStorage(sys.argv[1]), "job", period_secs=0.05)
print("ready", flush=True)
sys.stdin.read()
"""
LONG_SECS = 30.0


@pytest.fixture
def holder(tmp_path):
    """A second process that holds the log in tmp_path and moves its counter."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


ME = WriterIdentity("job", "gpu07", "boot-1", "pid:[1]", 40, "1000", "torchrun:abc", (1,), "launch-1")


def held_by(released=False, **changes):
    identity = replace(ME, pid=os.getpid(), pid_start=process_start(os.getpid()), restarts=(1,))
    holder = {**replace(identity, **changes).json(), "nonce": "n1", "since": "then"}
    return LogView(State(holder=holder, released=released), slot=3, generation=2)


def right(view, me=ME, *, certain=True, live=()):
    return judge(view, me, certain=certain, live_here=live).right


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (LogView(), Right.AT_ONCE),
        (held_by(), Right.WATCH),
        (held_by(released=True), Right.AT_ONCE),
        (held_by(restarts=(0,)), Right.WATCH),
        (held_by(restarts=(0,), boot_id="boot-2"), Right.AT_ONCE),
        (held_by(restarts=(0,), boot_id="boot-2", launch="another"), Right.WATCH),
        (held_by(restarts=(0,), boot_id="boot-2", launch=""), Right.WATCH),
        (held_by(restarts=(2,), boot_id="boot-2"), Right.WATCH),
        (held_by(restarts=(0,), boot_id="boot-2", launcher_id="torchrun:other"), Right.WATCH),
        (held_by(restarts=(0,), boot_id="boot-2", launcher_id=None), Right.WATCH),
        (held_by(pid_start="1"), Right.AT_ONCE),
        (held_by(pid_start="1", boot_id="boot-2"), Right.WATCH),
        (held_by(pid_start="1", pid_namespace="pid:[2]"), Right.WATCH),
        (held_by(pid_start="1", boot_id=""), Right.WATCH),
        (held_by(pid=2**22 + 1), Right.AT_ONCE),
        (held_by(pid=ME.pid, pid_start=ME.pid_start), Right.AT_ONCE),
    ],
)
def test_the_rules(view, expected):
    """At once: released, a gone process, or elsewhere a restart of the same launch. Else watch."""
    assert right(view) is expected


def test_a_requeued_slurm_job_takes_over_and_a_second_step_of_it_does_not():
    """Slurm ends a job before it starts it again; two steps of one job each count their own restarts."""
    held = held_by(boot_id="boot-2", launcher_id="slurm:7", restarts=(0, 0))
    requeued = replace(ME, launcher_id="slurm:7", restarts=(1, 0), launch="launch-2")
    step = replace(ME, launcher_id="slurm:7", restarts=(0, 1), launch="launch-2")
    assert right(held, requeued) is Right.AT_ONCE
    assert right(held, step) is Right.WATCH


def test_nothing_is_believed_behind_a_damaged_record():
    """When the newest record is damaged it may be a takeover: the holder is watched whatever is read."""
    assert right(held_by(released=True), certain=False) is Right.WATCH


def test_slurm_restarts_count_before_those_of_torchrun():
    """A requeued Slurm job is a higher restart even though torchrun counts from zero again."""
    slurm = {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}
    before = WriterIdentity.here(
        "job", {**slurm, "SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "3"}
    )
    after = WriterIdentity.here("job", {**slurm, "SLURM_RESTART_COUNT": "1"})
    assert (before.launcher_id, after.launcher_id) == ("slurm:7", "slurm:7")
    assert before.restarts < after.restarts
    run = {**slurm, "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert WriterIdentity.here("job", run).launcher_id == "torchrun:abc"
    assert WriterIdentity.here("job", {}).launcher_id is None
    assert WriterIdentity.here("job", {"TORCHELASTIC_RUN_ID": ""}).launcher_id is None


def test_a_live_writer_is_waited_for_and_then_named(tmp_path, holder):
    """Taking over a live writer watches its counter, then refuses naming job, host, pid, since and remedy."""
    with pytest.raises(DirectoryInUseError, match=rf"'job' on .* \(pid {holder.pid}, since .*stop that job"):
        LogWriter.take(LocalStorage(tmp_path), "job", patience_secs=LONG_SECS)
    assert open_log(LocalStorage(tmp_path)).slot == 0
    assert holder.poll() is None


def test_a_killed_writer_is_taken_over_at_once(tmp_path, holder):
    """After SIGKILL of the holder nobody waits, even while it is a zombie."""
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(holder.pid) is None
    begun = time.monotonic()
    writer = LogWriter.take(LocalStorage(tmp_path), "job", patience_secs=LONG_SECS)
    assert time.monotonic() - begun < LONG_SECS / 3
    assert (writer.generation, writer.view.slot) == (1, 1)
    writer.release()


def test_a_stopped_counter_is_taken_over_after_the_patience(monkeypatch):
    """A holder elsewhere whose counter stands still for the whole patience has lost the log."""
    storage = MemoryStorage()
    gone = take(storage, identity=replace(WriterIdentity.here("job"), boot_id="another machine"))
    monkeypatch.delitem(log_writer._LIVE, gone.nonce)
    begun = time.monotonic()
    writer = take(storage, patience_secs=0.2)
    assert time.monotonic() - begun >= 0.2
    assert writer.generation == 1


def test_a_process_does_not_take_over_from_itself():
    """A second writer of the same process is refused at once, until the first is released or closed."""
    storage = MemoryStorage()
    first = take(storage, patience_secs=LONG_SECS)
    with pytest.raises(DirectoryInUseError, match="another manager in this process"):
        take(storage, patience_secs=LONG_SECS)
    first.close()
    second = take(storage, patience_secs=LONG_SECS)
    second.release()
    assert take(storage, patience_secs=LONG_SECS).generation == 3


def test_a_dropped_writer_does_not_hold_the_log():
    """A writer that nobody refers to any more lets its process take over at once."""
    storage = MemoryStorage()
    take(storage).commit(entry(0))
    assert take(storage, patience_secs=LONG_SECS).generation == 2


def test_the_taker_syncs_the_log_before_it_appends():
    """A record that was visible but not durable yet is durable before anything stands on it."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(0))
    writer.close()
    del storage.durable[max(name for name in storage.durable if name.endswith("1.json"))]
    take(storage)
    assert open_log(storage.copy(power_cut=True)).newest() == entry(0)


def test_a_taker_sweeps_what_killed_writers_left_and_no_later_file(tmp_path, monkeypatch):
    """Nameless files that lay there before the takeover go; one that is written meanwhile stays."""
    storage = LocalStorage(tmp_path)
    take(storage).release()
    old = [tmp_path / "log" / ".tmp-00", tmp_path / ".tmp-11"]
    for path in old:
        path.write_bytes(b"{")
    later = tmp_path / "log" / ".tmp-22"

    def append(*given):
        later.write_bytes(b"{")
        return log_append.append(*given)

    monkeypatch.setattr(lease, "append", append)
    take(storage).release()
    assert not any(path.exists() for path in old) and later.exists()


@pytest.mark.parametrize("verb", ["link_exclusive", "replace"])
def test_a_guest_whose_nameless_file_was_swept_makes_it_anew(tmp_path, monkeypatch, verb):
    """A takeover between a guest's write and its naming costs the guest nothing."""
    storage, swept = LocalStorage(tmp_path), []
    whole = LocalStorage._write_whole

    def write(self, full, data, *, sync):
        whole(self, full, data, sync=sync)
        if not swept:
            swept.append(full)
            full.unlink()

    monkeypatch.setattr(LocalStorage, "_write_whole", write)
    getattr(storage, verb)("name", b"content")
    assert (tmp_path / "name").read_bytes() == b"content" and len(swept) == 1
    assert os.listdir(tmp_path) == ["name"]


def test_a_live_counter_moves_and_a_closed_one_stands():
    """The counter in writer.json moves every period while the writer lives, and not afterwards."""
    storage = MemoryStorage()
    writer = LogWriter.take(storage, "job", period_secs=0.01)
    first, until = storage.files["writer.json"], time.monotonic() + 60
    while storage.files["writer.json"] == first and time.monotonic() < until:
        time.sleep(0.005)
    assert storage.files["writer.json"] != first
    writer.close()
    last = storage.files["writer.json"]
    time.sleep(0.05)
    assert storage.files["writer.json"] == last


def test_epochs_whose_log_is_gone_are_kept():
    """A lost log is never begun again: the new one would take the epochs for leftovers and delete them."""
    storage = MemoryStorage()
    writer = take(storage)
    writer.commit(entry(1))
    writer.release()
    path = f"{attempt_directory(entry(1).attempt_name)}/manifest.json"
    storage.files[path] = b"{}"
    copy = {name: storage.files.pop(name) for name in [*storage.files] if name.startswith("log/")}
    with pytest.raises(NoProvableEpochError, match="restore memory"):
        take(storage)
    assert path in storage.files
    storage.files.update(copy)
    assert take(storage).view.epochs() == (1,)
