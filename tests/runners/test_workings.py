"""Long saves, loads and proofs are shown with what is left of them; short ones are not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from terminals import Terminal
from torchrun import clean_environment

import torchrelay.runners.monitoring.progress_bar as workings
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.checkpoint.load.verify import prove
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.checkpoint.storage.work import Work, moved, progress, works

NBYTES = 3_000_000 * 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The works that are going on whenever bytes were moved; the real calls do it."""
    found: list[Work] = []

    def after(kind: Any, name: str) -> None:
        real = getattr(kind, name)

        def moving(self: Any, *given: Any, **more: Any) -> Any:
            done = real(self, *given, **more)
            found.extend(works())
            return done

        monkeypatch.setattr(kind, name, moving)

    after(LocalWriteHandle, "write_at")
    after(LocalReadHandle, "read_into")
    return found


def job(epochs: int) -> Job:
    made = Job("large", blobs=dict(model=torch.nn.Linear(3000, 1000)))
    made.epoch(lambda ctx: ctx["model"].weight.data.add_(1))
    made.stop_when(max_epochs(epochs))
    return made


def test_saves_loads_and_proofs_say_how_far_they_are(tmp_path: Path, seen: list[Work]) -> None:
    """Each names its epoch and its bytes, of which nearly all are moved when it ends."""
    JobRunner(job(1), tmp_path / "run", best=None).train()
    JobRunner(job(2), tmp_path / "run", best=None).train()
    storage = LocalStorage(tmp_path / "run/checkpoints")
    (entry,) = [one for one in open_log(storage).line() if one.position.epoch == 2]
    assert prove(storage, entry, level="full").proved
    for what in ("saving epoch 1", "saving epoch 2", "loading epoch 1", "verifying epoch 2"):
        done = [work for work in seen if work.what == what]
        assert done, what
        assert NBYTES <= done[-1].nbytes <= NBYTES * 1.01
        assert [work.done for work in done] == sorted(work.done for work in done)
    assert max(work.done for work in seen if work.what == "verifying epoch 2") >= NBYTES * 0.9
    assert not works()


def test_what_is_left_in_words() -> None:
    """Bytes done and in all, and the time at the rate until now; a work of unknown size tells its time."""
    assert workings.in_words(Work("saving epoch 3", 4_000_000_000, 1_000_000_000, 10)) == (
        "saving epoch 3, 1 GB of 4 GB, 00:00:30 left"
    )
    assert workings.in_words(Work("saving epoch 3", 4000, 0, 10)) == "saving epoch 3, 0 B of 4 kB"
    assert workings.in_words(Work("uploading epoch 3", None, 0, 61)) == "uploading epoch 3, 00:01:01"


def test_only_what_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short work is never spoken of; a long one is, until it ends."""
    shown: list[str] = []
    with workings.shown(shown.append), progress("short", 10):
        moved(5)
    assert shown == [""]
    monkeypatch.setattr(workings, "LONG_SECS", 0.05)
    come = threading.Event()
    with workings.shown(lambda text: (shown.append(text), come.set())), progress("long", 4000):
        moved(1000)
        for _ in range(2):  # a text that came before the bytes moved may still be underway
            come.clear()
            assert come.wait(60)
    assert any(text.startswith("long, 1 kB of 4 kB, 00:") for text in shown) and shown[-1] == ""


def test_a_verb_shows_it_on_a_terminal_and_not_in_a_file(tmp_path: Path) -> None:
    """`verify` of an epoch whose reads are slow draws on a terminal what is left, nothing into a pipe."""
    JobRunner(job(1), tmp_path / "run", best=None).train()
    slow = (
        "import sys, time; import torchrelay.runners.monitoring.progress_bar as w; w.LONG_SECS = 0.1\n"
        "from torchrelay.checkpoint.storage.local_io import LocalReadHandle as L; real = L.read_into\n"
        "L.read_into = lambda *a, **k: (time.sleep(0.05), real(*a, **k))[1]\n"
        "from torchrelay.__main__ import main; sys.exit(main(['verify', 'run']))"
    )
    command = [sys.executable, "-c", slow]
    with Terminal() as terminal:
        code, out = terminal.run(command, tmp_path, clean_environment({"TERM": "xterm"}))
        drawn = terminal.drawn
    assert code == 0 and "2 of 2 epochs verified" in out
    assert "verifying epoch 1, " in drawn and " of 12 MB" in drawn and "left (2 of 2)" in drawn
    plain = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert plain.returncode == 0 and plain.stderr == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside other threads: that is the case
def test_a_forked_worker_prints_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked while the bar is being drawn writes to stderr without the bar's lock."""
    from torchrelay.runners.monitoring.progress_bar import ProgressBar

    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal, terminal.stream() as stream:
        before = sys.stdout, sys.stderr
        bar = ProgressBar(stream)
        try:
            with bar._rich._lock, bar._rich.console._lock:
                holding = threading.Thread(target=lambda: None)
                holding.start()
                holding.join()
                pid = os.fork()
                if pid == 0:
                    os._exit(0 if (sys.stdout, sys.stderr) == before else 1)
            end = time.monotonic() + 60
            while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.01)
            assert found == (pid, 0)
        finally:
            bar.close()
        assert (sys.stdout, sys.stderr) == before
