"""Long saves, loads and proofs are shown with what is left of them; short ones are not."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from terminals import Terminal
from torchrun import clean_environment

import torchrelay.runners.monitoring.progress as workings
from torchrelay import Checkpointer, Job, JobRunner, max_epochs
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log import retention
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.checkpoint.storage.work import Work, moved, progress, works
from torchrelay.runners.monitoring import progress as run_progress
from torchrelay.runners.monitoring.text import RankLog
from torchrelay.runners.session.run_state import RunState
from torchrelay.tools.cli.main import main

NBYTES = 3_000_000 * 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The works in progress whenever bytes were moved; the real calls do it."""
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
    assert verify_epoch(storage, entry, level="full").verified
    for what in ("saving epoch 1", "saving epoch 2", "loading epoch 1", "verifying epoch 2"):
        done = [work for work in seen if work.what == what]
        assert done, what
        assert NBYTES <= done[-1].nbytes <= NBYTES * 1.01
        assert [work.done for work in done] == sorted(work.done for work in done)
    assert max(work.done for work in seen if work.what == "verifying epoch 2") >= NBYTES * 0.9
    assert not works()


def test_what_is_left_in_words() -> None:
    """Bytes done and in all, and the time at the rate until now; a work of unknown size has its time."""
    assert workings.in_words(Work("saving epoch 3", 4_000_000_000, 1_000_000_000, 10)) == (
        "saving epoch 3, 1 GB of 4 GB, 00:00:30 left"
    )
    assert workings.in_words(Work("saving epoch 3", 4000, 0, 10)) == "saving epoch 3, 0 B of 4 kB"
    assert workings.in_words(Work("uploading epoch 3", None, 0, 61)) == "uploading epoch 3, 00:01:01"


class Notebook(io.StringIO):
    """A stream like that of a notebook's kernel."""

    __module__ = "ipykernel.iostream"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works are shown at once, and every time that the thread looks."""
    for name in ("LONG_SECS", "LINE_SECS"):
        monkeypatch.setattr(workings, name, 0.0)
    monkeypatch.setattr(workings, "_REFRESH_SECS", 0.01)


def wait_for(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [io.StringIO(), Notebook()])
def test_quick_work_prints_nothing(stream: io.StringIO) -> None:
    """A work that ends within two seconds is never shown."""
    lines: list[str] = []
    with workings.works_shown(lines.append, stream=stream), progress("short", 10):
        moved(5)
        time.sleep(0.5)
    assert (lines, stream.getvalue()) == ([], "")


def test_long_work_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """In a file a work has a line with its bytes, and the next one only seconds later."""
    lines: list[str] = []
    with workings.works_shown(lines.append, note=" (1 of 2)", stream=io.StringIO()), progress("long", 4000):
        moved(1000)
        wait_for(lambda: any("1 kB of 4 kB, 00:00:" in line for line in lines))
    assert all(line.startswith("long, ") and line.endswith(" (1 of 2)") for line in lines)
    monkeypatch.setattr(workings, "LINE_SECS", 1000.0)
    lines.clear()
    with workings.works_shown(lines.append, stream=io.StringIO()), progress("long", 4000):
        wait_for(lambda: bool(lines))
        time.sleep(0.3)
    assert len(lines) == 1


def test_a_notebook_has_one_bar_that_changes_in_place(quick: None) -> None:
    """In a notebook the line is the only one, and nothing is left when the work has ended."""
    stream = Notebook()
    with workings.works_shown(pytest.fail, stream=stream), progress("long", 4000):
        moved(1000)
        wait_for(lambda: "[#####...............] long, 1 kB of 4 kB, " in stream.getvalue())
    assert "\n" not in stream.getvalue()
    *_, blank, rest = stream.getvalue().split("\r")
    assert (blank.strip(), rest) == ("", "")


def test_a_terminal_has_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """On a terminal the bar stands before the text, fits into its width, and is removed at the end."""
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(60) as terminal, terminal.stream() as stream:
        with workings.works_shown(pytest.fail, stream=stream), progress("saving epoch 1", 4000):
            moved(1000)
            terminal.wait_for("saving epoch 1, 1 kB of 4 kB")
        terminal.wait_for("\x1b[2K")  # the line is erased
        lines = re.split(
            r"[\r\n]+|\x1b\[[0-9]*[AK]", re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", "", terminal.drawn)
        )
    assert any("\u2501" in line for line in lines)
    assert all(len(line) <= 60 for line in lines)


def test_works_say_what_they_did_themselves() -> None:
    """Bytes that no storage moves, such as deleted ones, are reported by the work."""
    with progress("deleting", 100) as advance, progress("other", 100):
        advance(30)
        advance(20)
        assert [(work.what, work.done) for work in works()] == [("deleting", 50), ("other", 0)]
    assert not works()


SLOW = (
    "import sys, time; import torchrelay.runners.monitoring.progress as w; w.LONG_SECS = 0.1\n"
    "from torchrelay.checkpoint.storage.local_io import LocalReadHandle as L; real = L.read_into\n"
    "L.read_into = lambda *a, **k: (time.sleep(0.05), real(*a, **k))[1]\n"
    "from torchrelay.__main__ import main; sys.exit(main({arguments!r}))"
)


def test_a_verb_shows_it_on_a_terminal_and_in_a_file(tmp_path: Path) -> None:
    """`verify` of an epoch whose reads are slow draws what is left, or has a line of it; `--json` none."""
    JobRunner(job(1), tmp_path / "run", best=None).train()
    command = [sys.executable, "-c", SLOW.format(arguments=["verify", "run"])]
    as_json = [sys.executable, "-c", SLOW.format(arguments=["verify", "run", "--json"])]
    with Terminal() as terminal:
        environment = clean_environment({"TERM": "xterm"})
        code, out = terminal.run(command, tmp_path, environment)
        drawn = terminal.drawn
        assert terminal.run(as_json, tmp_path, environment)[0] == 0
        assert terminal.drawn == drawn, "nothing beside an object"
    assert code == 0 and "2 of 2 epochs verified" in out
    assert "verifying epoch 1, " in drawn and " of 12 MB" in drawn and "left (2 of 2)" in drawn
    done = [
        subprocess.run(
            one,
            cwd=tmp_path,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        for one in (command, as_json, [sys.executable, "-m", "torchrelay", "verify", "run"])
    ]
    assert re.search(
        r"^torchrelay: verifying epoch \d, .* of 12 MB.* \(\d of 2\)$", done[0].stderr, re.MULTILINE
    )
    assert [one.stderr for one in done[1:]] == ["", ""], "neither beside an object, nor of quick work"


def slowly(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str) -> None:
    """Have each call take long enough to be seen."""
    real = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *given, **more: (time.sleep(0.1), real(*given, **more))[1])


def test_export_import_and_prune_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    """Each names what it does, with bytes; with `--json` nothing is printed beside the object."""
    JobRunner(job(3), tmp_path / "run", best=None).train()
    slowly(monkeypatch, LocalReadHandle, "read_into")
    slowly(monkeypatch, LocalWriteHandle, "write_at")
    slowly(monkeypatch, retention, "delete_attempt")
    capsys.readouterr()
    run, out = str(tmp_path / "run"), str(tmp_path / "out.safetensors")
    commands = {
        "exporting epoch 3, ": ["ckpt", "export", run, "--to", "safetensors", "-o", out],
        "importing out.safetensors, ": [
            "ckpt",
            "import",
            out,
            "--from",
            "safetensors",
            "-o",
            str(tmp_path / "new"),
        ],
        "deleting 3 epochs, ": ["ckpt", "prune", run, "--keep-last", "1"],
    }
    for said, command in commands.items():
        assert main(command) == 0
        error = capsys.readouterr().err
        assert re.search(rf"^torchrelay: {said}.* of (12|36\.1) MB", error, re.MULTILINE), (said, error)
    JobRunner(job(5), tmp_path / "run", best=None).train()
    capsys.readouterr()
    for command in (
        ["ckpt", "export", run, "--to", "safetensors", "-o", out, "--overwrite", "--json"],
        ["ckpt", "import", out, "--from", "safetensors", "-o", str(tmp_path / "other"), "--json"],
        ["ckpt", "prune", run, "--keep-last", "1", "--json"],
    ):
        assert main(command) == 0
        assert capsys.readouterr().err == "", command


def test_a_run_without_a_terminal_shows_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    """A long save and a long load have a line each; with an interval of 0 there are none between epochs."""
    monkeypatch.setattr(run_progress, "LONG_SECS", 0.0)
    monkeypatch.setattr(run_progress, "LOOK_SECS", 0.02)
    slowly(monkeypatch, LocalWriteHandle, "write_at")
    slowly(monkeypatch, LocalReadHandle, "read_into")
    JobRunner(job(1), tmp_path / "run", best=None).train()
    JobRunner(job(2), tmp_path / "run", best=None).train()
    error = capsys.readouterr().err
    for said in ("saving epoch 1, ", "loading epoch 1, ", "saving epoch 2, "):
        assert re.search(rf" I r0/1 {said}.* of 12 MB", error), said
    JobRunner(job(3), tmp_path / "run", best=None, log_every_n_secs=0).train()
    assert "saving epoch" not in capsys.readouterr().err


def test_other_ranks_show_nothing(quick: None) -> None:
    """Only rank 0 prints works, in a run as in a Checkpointer."""
    stream = io.StringIO()
    other = run_progress.Progress(RankLog(1, 2, "h"), talks=False, stream=stream)
    other.begin(RunState(seed=0), None)
    with progress("saving epoch 1", 10):
        time.sleep(0.3)
    other.close()
    assert stream.getvalue() == ""
    with Checkpointer("unused", dict(value=torch.zeros(1))) as one:
        session = SimpleNamespace(peers=SimpleNamespace(rank=1))
        assert isinstance(one._shown(session), nullcontext)  # type: ignore[arg-type]
        assert not isinstance(one._shown(SimpleNamespace(peers=SimpleNamespace(rank=0))), nullcontext)  # type: ignore[arg-type]


def test_a_checkpointer_shows_long_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    """Its saves and loads have lines; TORCHRELAY_LOG_LEVEL=warning has none."""
    slowly(monkeypatch, LocalWriteHandle, "write_at")
    slowly(monkeypatch, LocalReadHandle, "read_into")
    with Checkpointer(tmp_path / "c", dict(model=torch.nn.Linear(3000, 1000))) as one:
        one.save(1)
    with Checkpointer(tmp_path / "c", dict(model=torch.nn.Linear(3000, 1000))) as one:
        one.resume()
    error = capsys.readouterr().err
    assert " I r0 saving epoch 1, " in error and " I r0 loading epoch 1, " in error
    monkeypatch.setenv("TORCHRELAY_LOG_LEVEL", "warning")
    with Checkpointer(tmp_path / "c", dict(model=torch.nn.Linear(3000, 1000))) as one:
        one.resume()
        one.save(2)
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside other threads: that is the case
def test_a_forked_worker_prints_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked while the bar is being drawn writes to stderr without the bar's lock."""
    from torchrelay.runners.monitoring.progress import ProgressBar

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
