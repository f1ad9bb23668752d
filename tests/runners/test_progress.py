"""What a person sees of a run: a bar on a terminal, few whole lines in a file, and every rank's own log."""

from __future__ import annotations

import io
import re
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from terminals import Terminal, controls
from torchrun import clean_environment, torchrun

import torchrelay.runners.monitoring.text as rank_log
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.progress import Progress, bar_tail
from torchrelay.runners.monitoring.text import ProgressState, RankLog
from torchrelay.runners.session.metrics import MetricLog
from torchrelay.runners.session.run_state import RunState

PROGRAM = Path(__file__).resolve().parent.parent / "programs/watched.py"
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I r0/\d+ epoch (\d+) step (\d+)/(\d+)( done)?( \| train/loss [\d.]+)?"
    r"( \| [\d.]+ steps/s)?( \| ckpt e\d+ ok [\d.]+s)?( \| eta \d\d:\d\d:\d\d)?"
)


def watch(stream: io.TextIOBase, every_secs: float = 0.0) -> tuple[Progress, RunState]:
    """A progress that looks at a run in its second epoch."""
    progress = Progress(RankLog(0, 1, "here"), every_secs=every_secs, stream=stream)  # type: ignore[arg-type]
    state = RunState()
    state.begin_epoch(2)
    state.expect_steps("trainer_0", 7)
    progress.begin(state, 3)
    for _ in range(3):
        state.count_step("trainer_0")
    state.log_of("trainer_0").log("train/loss", 0.25)
    return progress, state


def test_the_rate_counts_from_the_begin_of_the_first_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """A look at the first epoch shortly before its end does not make it a quick one."""
    progress = Progress(RankLog(0, 1, "here"), every_secs=1000.0)
    now = [time.monotonic() - 600.0]
    state = RunState(clock=lambda: now[0])
    state.begin_epoch(1)
    progress.begin(state, 10)
    progress.epoch({})
    progress.close()
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(r"epoch 1/10 done \| 600 s/epoch \| eta 01:30:0[0-9]$", line), line


def test_a_terminal_has_a_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    """A real job on a pseudo-terminal draws its bar there and nothing else; stdout stays a plain pipe."""
    with Terminal() as terminal:
        code, out = terminal.run(
            [sys.executable, str(PROGRAM), "run", "8", "0.1"],
            tmp_path,
            clean_environment({"TERM": "xterm", "TORCHRELAY_LOG_EVERY_N_SECS": "0"}),
        )
        drawn = terminal.drawn
    assert code == 0, drawn
    assert out == "words of rank 0\n"
    assert "\x1b[" in drawn and "━" in drawn and re.search(r"step [1-7]/8", drawn)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", drawn)
    assert "epoch 2 step 8/8 done | train/loss 0.5" in plain and "ckpt e2 ok" in plain
    assert "W r0/1 UserWarning: odd data on rank 0 (watched.py:" in plain
    assert drawn.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in drawn, "the cursor is shown again"


def test_no_color_leaves_the_bar_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR takes colours from the bar, not the bar."""
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])(?:;\d+)*m")
    for name, has_colours in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", name)
        with Terminal() as terminal, terminal.stream() as stream:
            progress, _ = watch(stream)
            terminal.wait_for("step 3/7")
            progress.close()
            assert bool(coloured.search(terminal.drawn)) == has_colours


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """TERM=dumb, as in editors, gets what a file gets: no control characters."""
    monkeypatch.setenv("TERM", "dumb")
    with Terminal() as terminal, terminal.stream() as stream:
        progress, _ = watch(stream)
        progress.epoch({"train/loss": 0.125})
        progress.line("that was\x1b[31m it")
        progress.close()
        terminal.wait_for("it\r\n")
        lines = terminal.drawn.replace("\r\n", "\n")
    assert not controls(lines)
    assert "epoch 2 step 3/7 done | train/loss 0.125" in lines and "that was [31m it" in lines


def test_an_interval_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand short epochs in a file are a line per interval; the last epoch is always told."""
    out = io.StringIO()
    began = time.monotonic()
    progress, state = watch(out, every_secs=1.0)
    for epoch in range(3, 1003):
        state.begin_epoch(epoch)
        progress.epoch({"train/loss": 1.0})
        time.sleep(0.002)
    progress.close()
    intervals = time.monotonic() - began
    lines = out.getvalue().splitlines()
    assert 1 <= len(lines) <= intervals + 1
    assert "epoch 1002 " in lines[-1]


def test_a_reader_that_stops_reading_holds_nobody_up() -> None:
    """While the pipe for the lines is full the training's calls return at once."""
    import os

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"x" * 65536):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        progress, state = watch(stream)
        began = time.monotonic()
        for epoch in range(3, 103):
            state.begin_epoch(epoch)
            state.count_step("trainer_0")
            progress.epoch({"train/loss": 1.0})
        assert time.monotonic() - began < 30, "nobody reads for longer than that"
        os.set_blocking(reading, False)
        while progress._waiting or not progress._printing.acquire(blocking=False):
            try:  # somebody reads again: all that waited comes
                os.read(reading, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        progress._printing.release()
        progress.close()
    os.close(reading)


@pytest.mark.ranks
def test_ranks_in_one_file(tmp_path: Path) -> None:
    """Four ranks into one file: whole lines, no control characters, at most one per interval.

    Warnings of the others have rank and host; each rank has its own log.
    """
    done = torchrun(
        PROGRAM, "run", "20", "0.1", warm=True, ranks=4, cwd=tmp_path, options=["--tee=0"],
        env={"TORCHRELAY_LOG_EVERY_N_SECS": "1"},
    )  # fmt: skip
    assert done.rc == 0, done
    ours = [line for line in done.err.splitlines() if re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert not controls(done.err), done.err
    progress = [line for line in ours if " I r0/4 epoch" in line]
    assert 2 <= len(progress) <= done.secs, done.err
    assert all(LINE.fullmatch(line) for line in progress), progress
    warned = {re.sub(r".* W (\S+) .*rank (\d).*", r"\1 \2", line) for line in ours if "odd data" in line}
    assert {one.split("@")[0] for one in warned} == {"r0/4 0", "r1", "r2", "r3"}, ours
    logs = tmp_path / "run" / "logs" / "attempt_0"
    assert sorted(path.name for path in logs.iterdir()) == [f"rank_{rank}.log" for rank in range(4)]
    for rank in range(4):
        text = (logs / f"rank_{rank}.log").read_text()
        assert f"odd data on rank {rank}" in text and "epoch 2 step 20/20 done" in text
        assert "words of rank" not in text, "what a program prints stays where it goes"


def test_a_rank_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file is kept once, and the next one begins; a folder that is gone is no error."""
    monkeypatch.setattr(rank_log, "MAX_BYTES", 1000)
    log = RankLog(5, 16, "node1")
    log.line("before the attempt is known")
    log.open(tmp_path, 2)
    for number in range(100):
        log.line(f"line {number}\nof one")
    folder = tmp_path / "attempt_2"
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["rank_5.log", "rank_5.log.1"]
    assert sum(path.stat().st_size for path in files) < 2200
    assert " I r5@node1 line 99 of one\n" in "".join(path.read_text() for path in files)
    for path in files:
        path.unlink()
    folder.rmdir()
    log.line("nobody hears it")


def test_warnings_go_where_they_went(tmp_path: Path) -> None:
    """Whoever records warnings still gets them, and what was there before is there again."""
    log = RankLog(0, 1, "here")
    log.open(tmp_path, 0)
    with pytest.warns(UserWarning, match="mine"):
        before = warnings.showwarning, warnings.formatwarning
        log.begin()
        warnings.warn("mine", UserWarning, stacklevel=1)
        log.end()
        assert (warnings.showwarning, warnings.formatwarning) == before
    assert "W r0/1 UserWarning: mine" in (tmp_path / "attempt_0" / "rank_0.log").read_text()


def test_the_line_is_the_convention() -> None:
    """Where, metrics, rate, newest save, time to the end; what is not known is left out."""
    current = ProgressState(
        3, 5, 1200, 3900, 9000, {"train/loss": 0.1234, "lr": 1e-3}, 41.0, 753.0, "ckpt e2 ok 4.1s"
    )
    said = "epoch 3 step 1200/3900 | lr 0.001 train/loss 0.1234 | 41 steps/s | ckpt e2 ok 4.1s | eta 00:12:33"
    assert current.line == said
    assert ProgressState(epoch=3, last_epoch=5).line == "epoch 3/5"


def test_a_narrow_terminal_keeps_the_bar() -> None:
    """What has no room behind the bar is left out, the newest save first and the time to the end last."""
    current = ProgressState(3, 5, 1, 9, 19, {"train/loss": 0.1234}, 41.0, 753.0, "ckpt e2 ok 4.1s")
    assert bar_tail(current, 100) == "train/loss 0.1234 | 41 steps/s | eta 00:12:33 | ckpt e2 ok 4.1s"
    assert bar_tail(current, 60) == "train/loss 0.1234 | 41 steps/s | eta 00:12:33"
    assert bar_tail(current, 40) == "train/loss 0.1234 | eta 00:12:33"
    assert bar_tail(current, 20) == "eta 00:12:33"
    assert bar_tail(replace(current, metrics={"a": 1.0, "train/loss": 0.1234}), 25) == "a 1 | eta 00:12:33"


def test_running_values_are_seen_while_they_run() -> None:
    """A glimpse is the mean of what was logged up to now, and changes nothing of the result."""
    log = MetricLog()
    assert log.running() == {}
    log.log("loss", 1.0)
    log.log("loss", 2.0, weight=3)
    log.log("nothing", 1.0, weight=0)
    assert log.running() == {"loss": 1.75}
    assert log.take()["loss"].result == 1.75


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TORCHRELAY_LOG_EVERY_N_SECS", "soon", "a number of seconds"),
        ("TORCHRELAY_LOG_EVERY_N_SECS", "nan", "a number of seconds"),
        ("TORCHRELAY_LOG_LEVEL", "loud", "expected info, or warning"),
    ],
)
def test_a_wrong_setting_is_one_line(
    name: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that means nothing is refused before anything is made."""
    monkeypatch.setenv(name, value)
    job = Job("wrong")
    job.stop_when(max_epochs(1))
    with pytest.raises(UsageError, match=words):
        JobRunner(job, tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_quiet_runs_say_nothing_but_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With TORCHRELAY_LOG_LEVEL=warning nothing is printed; the rank's log has it all the same."""
    monkeypatch.setenv("TORCHRELAY_LOG_LEVEL", "warning")
    job = Job("quiet", blobs=dict(x=1))
    job.epoch(lambda ctx: ctx.log("a", 1.0))
    job.stop_when(max_epochs(2))
    JobRunner(job, tmp_path / "run").train()
    assert capfd.readouterr() == ("", "")
    assert "epoch 2/2 done | a 1" in (tmp_path / "run/logs/attempt_0/rank_0.log").read_text()
