"""A job that was paused until another took its directory acknowledges nothing more and ends with 4."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from s3_server import BUCKET, needs_s3, s3_server
from torchrun import Job, children_of, clean_environment, script_file

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import DirectoryInUseError, FencedError
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.training import saver
from torchrelay.runners.training.saver import FenceGuard

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
ENDS_WITHIN_SECS = 15.0
WAIT_SECS = 60.0


TWICE = """
import os, sys, time
import torch, torchrelay
from torchrelay import Job, JobRunner, max_epochs
torchrelay.init(seed=0)
weights = torch.zeros(4)
job = Job("twice", blobs=dict(weights=weights))
@job.epoch
def train(ctx):
    print("TRAINS", flush=True)
    while ctx.epoch == 2 and not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
job.stop_when(max_epochs(2))
JobRunner(job, sys.argv[1]).main()
"""


@pytest.mark.ranks
def test_a_second_launch_with_the_same_id_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """Two torchruns with one --rdzv-id: the second and its restart end with exit code 4."""

    def launch(name: str, restarts: int) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        at = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=100", "--nnodes=1"]
        script = script_file(TWICE, folder)
        run, go = str(tmp_path / "run"), str(tmp_path / "go")
        return Job(script, run, go, ranks=1, cwd=folder, max_restarts=restarts, rendezvous=at)

    with launch("first", 0) as first:
        first.wait_for("TRAINS", times=2)
        with launch("second", 1) as second:
            refused = second.wait()
        (tmp_path / "go").touch()
        finished = first.wait()
    assert finished.rc == 0, finished
    assert "TRAINS" not in refused.out, refused
    assert (refused.out + refused.err).count("is in use by job 'twice'") >= 2, refused
    assert "exitcode  : 4" in refused.err, refused


@contextmanager
def holders(folder: Path, stories: dict[str, str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A job for each place, doing what its story says, forked by one process."""
    words = [word for story in stories.items() for word in story]
    command = [sys.executable, str(PROGRAMS / "two_writers.py"), "--fork", str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment(env))
    try:
        yield process
    finally:
        for pid in [*children_of(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def await_text(path: Path, text: str) -> None:
    """Return when a process has printed a line; its end may come in a write of its own."""
    end = time.monotonic() + WAIT_SECS
    while not path.exists() or f"{text}\n" not in path.read_text():
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.02)


def await_stop(pid: int) -> None:
    """Return when a process is stopped."""
    end = time.monotonic() + WAIT_SECS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, f"{pid} does not stop"
        time.sleep(0.02)


def take_over(places: Iterable[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Another process takes the logs of these places; its pid, and what it could not do."""
    command = [sys.executable, str(PROGRAMS / "takers.py"), *places]
    taker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment(env))
    told, _ = taker.communicate(timeout=WAIT_SECS)
    return taker.pid, told.splitlines()


def check_stories(
    folder: Path, stories: dict[str, str], living: str, env: dict[str, str]
) -> tuple[dict[str, float], float]:
    """Pause all holders but the `living`, take over from all, continue: they are fenced.

    Returns how soon, and how many times slower than a quiet machine this one is.
    """
    with holders(folder, {**stories, living: "idle"}, env) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        for number, (pid, how) in enumerate(zip(pids, [*stories.values(), "idle"], strict=True)):
            stops_itself = how.startswith("commit")
            await_text(folder / f"{number}.1", "stopping" if stops_itself else "training")
            if number < len(stories):
                os.kill(pid, 0 if stops_itself else signal.SIGSTOP)
                await_stop(pid)
        saved = [(folder / f"{number}.1").read_text() for number in range(len(stories))]
        taker, refused = take_over([*stories, living], env)
        here = socket.gethostname()
        assert refused[:-1] == [""] * len(stories)
        assert refused[-1].startswith(
            f"DirectoryInUseError {living} is in use by job 'race' on {here} (pid {pids[-1]},"
        )
        begun = time.monotonic()
        for pid in pids[:-1]:
            os.kill(pid, signal.SIGCONT)
        took = {}
        for _ in stories:
            number, code, when = process.stdout.readline().split()
            errors = (folder / f"{number}.2").read_text()
            told = [
                (folder / f"{number}.{stream}").read_text()
                for number in range(len(pids))
                for stream in (1, 2)
            ]
            assert int(code) == 4, (number, told)
            assert f"was taken over by job 'race' on {here} (pid {taker}," in errors
            assert "Traceback" not in errors
            assert (folder / f"{number}.1").read_text() == saved[int(number)], "nothing more is acknowledged"
            took[list(stories.values())[int(number)]] = float(when) - begun
        assert process.poll() is None, "the living one goes on"
    for place in stories:
        view = open_log(storage_of(place, "the place"))
        assert (view.generation, view.state.released, view.notices) == (view.slot - 3, True, ())
    # Where more programs want to run than these tests start, each of the ended has so much less of a core.
    slower = max(1.0, os.getloadavg()[0] / 2 / (os.cpu_count() or 1))
    assert max(took.values()) < ENDS_WITHIN_SECS * slower, (took, slower)
    return took, slower


@pytest.mark.timeout(300)
def test_paused_holders_are_fenced_on_local_files(tmp_path: Path) -> None:
    """Idle, between steps or right before its record, synchronous or not: fenced, named, ended in time."""
    hows = ("idle", "idle-async", "steps", "commit", "commit-async")
    stories = {str(tmp_path / how): how for how in hows}
    took, slower = check_stories(tmp_path, stories, str(tmp_path / "living"), {})
    assert slower > 1.0 or took["steps"] < took["idle"], "whoever takes steps need not be ended"


@needs_s3
@pytest.mark.timeout(300)
def test_paused_holders_are_fenced_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a server with conditional PUTs."""
    with s3_server() as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        stories = {
            f"s3://{BUCKET}/runs/{how}": how for how in ("idle-async", "steps", "commit", "commit-async")
        }
        check_stories(tmp_path, stories, f"s3://{BUCKET}/runs/living", env)


@pytest.mark.ranks
def test_all_ranks_of_a_fenced_job_end(tmp_path: Path) -> None:
    """Under torchrun the ranks that hold no log hear of it too, and all leave with 4."""
    place = str(tmp_path / "place")
    with Job(PROGRAMS / "two_writers.py", place, "idle", ranks=2, cwd=tmp_path) as job:
        job.wait_for("training")
        ranks = job.workers()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        taker, refused = take_over([place], {})
        assert refused == [""]
        begun = time.monotonic()
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        ended = job.wait(100)
        # The launcher takes a moment of its own to gather and to leave.
        assert time.monotonic() - begun < ENDS_WITHIN_SECS + 10
        assert ended.rc != 0
        assert "exitcode  : 4" in ended.err, str(ended)
        assert ended.out.count("saved") == 2, str(ended)
        for rank in range(2):
            assert f"(pid {taker}," in ended.of_rank(rank), str(ended)


def test_the_guard_waits_for_a_clean_end() -> None:
    """A process that ends by itself within the grace is left alone; one that does not is ended with 4."""
    ended: list[int] = []
    told = threading.Event()
    state = RunState()
    guard = FenceGuard(state, grace_secs=0.05, end=lambda code: (ended.append(code), told.set()))
    guard.fenced(FencedError("taken over"))
    assert told.wait(60)
    assert ended == [DirectoryInUseError.exit_code]
    with pytest.raises(FencedError):
        state.check()
    left = FenceGuard(RunState(), grace_secs=30, end=lambda code: ended.append(code))
    left.fenced(FencedError("taken over"))
    left.close()
    for thread in threading.enumerate():
        if thread.name == "torchrelay-fence":
            thread.join(60)
    assert ended == [4]


def test_a_fenced_process_that_nobody_hears_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what read its stderr is gone, it is ended all the same."""
    reads, writes = os.pipe()
    os.close(reads)
    ended: list[int] = []
    with open(writes, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        guard = FenceGuard(RunState(), grace_secs=0.01, end=ended.append)
        guard._enforce(FencedError("taken over"))
        with suppress(BrokenPipeError):
            broken.close()
    assert ended == [DirectoryInUseError.exit_code]


def test_an_interactive_interpreter_is_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the job raises at its next step, and the interpreter stays."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    ended: list[int] = []
    guard = FenceGuard(RunState(), grace_secs=0.01, end=ended.append)
    guard._enforce(FencedError("taken over"))
    assert ended == [] and saver.GRACE_SECS + 2 < ENDS_WITHIN_SECS
