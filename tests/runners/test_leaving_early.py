"""Who may end a run early, when it counts in each phase, and what the run is called then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from stage import warned

import torchrelay
from torchrelay import (
    Context,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    RunResult,
    max_epochs,
    max_steps,
    max_time,
)
from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.save import pipeline
from torchrelay.errors import PreemptedError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.session import stop_requests as asking
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import (
    ASKED,
    GRACE_SECS,
    NOT_ASKED,
    PREEMPT,
    Requests,
    StopDeadline,
    deadlines_of,
    seconds_of,
    signals_ask,
)
from torchrelay.runners.training.exit import code_of_result
from torchrelay.runners.training.plan import parse_options


@dataclass
class Program:
    """A script whose phases can each be met by a signal; `events` has what ran."""

    run: Path
    epochs: int = 3
    events: list[str] = field(default_factory=list)

    def __call__(
        self, at: str = "", does=lambda: os.kill(os.getpid(), signal.SIGTERM), **options
    ) -> RunResult:
        self.events.clear()
        total = torch.zeros(1)
        job = Job("early", blobs={"total": total})

        def part(name: str) -> None:
            self.events.append(name)
            if name == at:
                does()

        def learn(ctx: Context) -> None:
            for number in ctx.steps(range(4)):
                total.add_(1)
                part(f"step {ctx.epoch}.{number}")

        job.setup(lambda: part("setup"))
        job.init(lambda: part("init"))
        job.epoch(learn)
        job.epoch(lambda ctx: part(f"after {ctx.epoch}"))
        job.download(lambda: part("download"))
        job.exit(lambda: part("exit"))
        job.stop_when(*options.pop("conditions", [max_epochs(self.epochs)]))
        result = JobRunner(job, self.run, **options).train(LocalSession())
        self.total = int(total)
        return result

    @property
    def state(self) -> str:
        return RunDirectory(self.run).status()["state"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "run")


@pytest.mark.parametrize("at", ["setup", "init", "step 1.3", "after 1", "after 3", "download"])
def test_a_signal_ends_each_phase_at_its_next_boundary(program, at):
    """Nothing of what follows the phase runs; the same command goes on, and all steps are done once."""
    before = signal.getsignal(signal.SIGTERM)
    result = program(at)
    assert result.status == program.state == "PREEMPTED" and program.events[-1] == at
    assert result.stop == ("SIGTERM",) and code_of_result(result) == 75 == PreemptedError.exit_code
    assert signal.getsignal(signal.SIGTERM) is before, "the handlers are ours for the time of a train only"
    first = [event for event in program.events if event.startswith("step")]
    assert program() == 3 and program.state == "FINISHED"
    steps = first + [event for event in program.events if event.startswith("step")]
    assert sorted(steps) == [f"step {epoch}.{number}" for epoch in (1, 2, 3) for number in range(4)]
    assert program.total == 12 and program.events[-1] == "exit"


def test_later_runs_of_the_process_leave_too(program, tmp_path, monkeypatch):
    """SIGTERM in one run of a sweep: later ones train nothing until the program is started again."""
    monkeypatch.setattr(asking, "_announced", [])
    later, over = Program(tmp_path / "later"), Program(tmp_path / "over")
    assert over() == 3
    assert program("step 2.1").status == "PREEMPTED"
    result = later()
    assert (int(result), result.status, later.events) == (0, "PREEMPTED", ["setup"])
    assert over().status == "FINISHED"
    asking._announced.clear()  # as a new process has it
    assert program() == 3 and later() == 3 and (program.total, later.total) == (12, 12)


def test_a_signal_during_a_save_lets_it_end(program, monkeypatch):
    """The save that the signal met is committed; then the run leaves, before the next epoch begins."""
    commit = pipeline.commit

    def met(job, *rest) -> None:
        if job.position.epoch == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        commit(job, *rest)

    monkeypatch.setattr(pipeline, "commit", met)
    result = program()
    assert (int(result), result.status, result.committed, result.stop) == (2, "PREEMPTED", 2, ("SIGUSR1",))
    assert program.events[-1] == "after 2"
    assert program() == 3 and program.total == 12


def test_the_stop_file_ends_the_run_for_good(program, capsys, monkeypatch):
    """The epoch ends as a short one, the tail runs, STOPPED; while the file is there nothing is trained."""
    monkeypatch.setattr(asking, "_LOOK_SECS", 0.0)
    stop = program.run / "STOP"
    result = program("step 2.1", stop.touch)
    assert (int(result), result.status, program.state) == (2, "STOPPED", "STOPPED") and code_of_result(
        result
    ) == 0
    assert program.events[-5:] == ["step 2.0", "step 2.1", "after 2", "download", "exit"]
    assert any(str(stop) in reason for reason in result.stop)
    assert f"stopped at epoch 2 (the file {stop})" in capsys.readouterr().err
    again = program()
    assert (int(again), again.status) == (2, "STOPPED") and program.events == ["setup"]
    stop.unlink()
    assert program() == 3 and program.state == "FINISHED"


def test_max_time_stops_the_run(program, monkeypatch):
    """A run whose time is over is STOPPED, also when it is started again; more time lets it go on."""
    slow, passed, measured = [max_epochs(2), max_time(200)], [0.0], RunState.elapsed_secs.fget
    monkeypatch.setattr(RunState, "elapsed_secs", property(lambda state: measured(state) + passed[0]))
    result = program("step 1.1", lambda: passed.append(passed.pop() + 300.0), conditions=slow)
    assert (int(result), result.status, program.state) == (1, "STOPPED", "STOPPED")
    assert program(conditions=slow).status == "STOPPED" and program.events == ["setup"]
    assert program(conditions=[max_epochs(2), max_time(2000)]).status == "FINISHED"


def test_a_time_limit_leaves_in_time_for_a_save(program, monkeypatch):
    """Within a margin and two saves of the limit the run leaves at its next step, to be continued."""
    near = lambda: monkeypatch.setattr(asking, "_MARGIN_SECS", 500.0)  # noqa: E731
    result = program("step 2.1", near, time_limit="400s")
    monkeypatch.undo()
    assert result.status == "PREEMPTED" and "time limit of 400 s" in result.stop[0]
    assert program.events[-1] == "step 2.1"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 20))
    result = program()
    assert result.stop == ("the end of the Slurm job",) and program.events == ["setup"]
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert program() == 3 and program.total == 12


def test_without_time_for_a_save_nothing_is_begun(program, monkeypatch, capsys):
    """Where two of the longest saves do not fit into the grace the place inside of the epoch is given up."""
    monkeypatch.setattr(asking, "GRACE_SECS", 0.0)
    assert program("step 2.1").status == "PREEMPTED"
    assert "could not be saved: the remaining time is too short" in capsys.readouterr().err
    assert program() == 3 and program.events[1] == "step 2.0", "the epoch begins anew"


def test_a_bare_manager_saves_no_place(tmp_path):
    """Automatic resume belongs to run directories: elsewhere nobody would ever read it."""
    program = Program(tmp_path / "prefix")
    program.run = MultiNodeCheckpointManager(tmp_path / "prefix")
    assert program("step 2.1").status == "PREEMPTED"
    assert [path.name[:10] for path in sorted((tmp_path / "prefix/data").iterdir())] == [
        "e00000000-",
        "e00000001-",
    ]


def test_an_evaluation_behind_training_in_one_task_may_end_within_the_grace(tmp_path):
    """To stop there would lose the epoch: it goes on while there is time, and the whole epoch is saved."""
    total = torch.zeros(1)
    job = Job("both", blobs={"total": total})

    @job.epoch
    def both(ctx: Context) -> None:
        for _ in ctx.steps(range(2)):
            total.add_(1)
        for number in ctx.steps(range(3), count=False):
            if number == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    job.stop_when(max_epochs(2))
    result = JobRunner(job, tmp_path / "run").train(LocalSession())
    assert (int(result), result.status, result.committed) == (1, "PREEMPTED", 1)


@pytest.mark.parametrize("counted", [False, True], ids=["count=False", "no_grad"])
@pytest.mark.parametrize("hurried", [False, True])
def test_what_an_evaluation_swapped_in_is_never_saved(tmp_path, monkeypatch, counted, hurried):
    """A stop waits for the loop's end, in which the weights come back; without time the epoch is given up."""
    if hurried:
        monkeypatch.setattr(asking, "RESERVE_SECS", 1000.0)
    weight, average = torch.zeros(1), torch.full((1,), 100.0)

    def train(stop: bool) -> RunResult:
        job = Job("swapping", blobs={"weight": weight, "average": average})

        @job.epoch
        def learn(ctx: Context) -> None:
            for _ in ctx.steps(range(2)):
                weight.add_(1)

        @job.epoch
        def evaluate(ctx: Context) -> None:
            weight.data, average.data = average.data, weight.data
            with torch.no_grad():
                for _ in ctx.steps(range(3), count=counted):
                    if stop and ctx.epoch == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
            weight.data, average.data = average.data, weight.data

        job.stop_when(max_epochs(3))
        return JobRunner(job, tmp_path / "run").train(LocalSession())

    left = train(stop=True)
    assert (left.status, left.committed) == ("PREEMPTED", 1 if hurried else 2)
    weight, average = torch.zeros(1), torch.zeros(1)
    assert train(stop=False) == 3
    assert (weight.item(), average.item()) == (6.0, 100.0)


def test_limits_that_the_program_has_today_hold_inside_of_an_epoch(program):
    """`max_steps` ends the epoch that goes on as a short one; fewer epochs than are done end the run."""
    most = [max_steps(6)]
    assert program("step 2.0", conditions=most).status == "PREEMPTED"
    result = program(conditions=[max_epochs(1)])
    assert (int(result), result.status) == (1, "FINISHED") and program.events == ["setup", "download", "exit"]
    result = program(conditions=most)
    assert (int(result), result.status) == (2, "FINISHED") and program.total == 6
    assert program.events == ["setup", "step 2.1", "after 2", "download", "exit"]


def test_a_request_knows_how_long_it_has():
    """Signals count from when they came, limits from what they say; the earliest end counts."""
    now = [100.0]
    requests = Requests((StopDeadline(200.0, "the limit", 5.0),), clock=lambda: now[0])
    assert requests.level() == NOT_ASKED and requests.secs_left() == 100
    requests.preempt("SIGTERM")
    requests.preempt("SIGUSR1")
    assert requests.level() == PREEMPT and requests.reason() == "SIGTERM"
    assert requests.secs_left() == GRACE_SECS
    assert requests.level(patient=True) == NOT_ASKED, "who would lose an epoch waits while there is time"
    now[0] += GRACE_SECS - asking.RESERVE_SECS + 1
    assert requests.level(patient=True) == PREEMPT
    limit = StopDeadline(200.0, "the limit", 5.0)
    late = Requests((limit,), save_secs=lambda: 30.0, clock=lambda: now[0])
    now[0] = 200 - 60 - 5 - asking._MARGIN_SECS - 0.1
    assert late.level() == NOT_ASKED
    now[0] += 0.1
    assert late.level() == PREEMPT and late.reason() == "the limit"


def test_the_stop_file_is_looked_for_once_a_second(tmp_path):
    """A step costs no look at a file system; once seen the request stands."""
    now = [0.0]
    requests = Requests(stop_file=tmp_path / "STOP", clock=lambda: now[0])
    assert requests.level() == NOT_ASKED
    (tmp_path / "STOP").touch()
    assert requests.level() == NOT_ASKED
    now[0] = 1.0
    assert requests.level() == ASKED and str(tmp_path / "STOP") in requests.reason()
    (tmp_path / "STOP").unlink()
    now[0] = 3.0
    assert requests.level() == ASKED


@pytest.mark.parametrize(
    ("given", "secs"),
    [(90, 90), (1.5, 1.5), ("90", 90), ("1h30m", 5400), ("45s", 45), ("1d", 86400), ("01:30:00", 5400),
     ("2-00:00:01", 172801), (timedelta(minutes=2), 120)],
)  # fmt: skip
def test_time_limits_are_read(given, secs):
    """Seconds, units and clocks."""
    assert seconds_of(given) == secs
    if isinstance(given, str):
        assert parse_options(["--time-limit", given]).time_limit_secs == secs


@pytest.mark.parametrize(
    "given", [0, -1, "", "h", "1x", "soon", True, float("nan"), float("inf"), [], "9" * 30]
)
def test_time_limits_that_cannot_be_are_refused(given, tmp_path):
    """A user's mistake names the argument, as argument and as option."""
    with pytest.raises(UsageError, match="invalid time_limit"):
        JobRunner(Job("a"), tmp_path, time_limit=given)
    if isinstance(given, str):
        with pytest.raises(UsageError, match="invalid time_limit"):
            parse_options(["--time-limit", given])


def test_an_end_that_slurm_does_not_tell_is_none():
    """Slurm before 23.02 sets no end time; what is no number, or past, says nothing."""
    for value in ("", "soon", "12", "-5"):
        assert deadlines_of(None, {"SLURM_JOB_END_TIME": value}) == ()


def test_signals_that_others_handle_are_left_alone():
    """An ignored signal stays ignored; what the program had handled is put back."""
    mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        requests = Requests()
        with signals_ask(requests):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert requests.level() == NOT_ASKED
    finally:
        signal.signal(signal.SIGUSR1, mine)


def test_a_save_signal_that_is_ignored_asks_for_a_save_all_the_same():
    """A process inherits what its parent ignores, such as one whose own training has ended."""
    mine = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        requests = Requests()
        with signals_ask(requests, signal.SIGUSR2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert requests.save_wanted
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, mine)


def test_a_second_sigterm_ends_the_process_at_once(tmp_path):
    """Within seconds it is the first one, passed on by a launcher; later it ends the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from torchrelay.runners.session import stop_requests as signals\n"
        "from torchrelay.runners.session.stop_requests import Requests\n"
        "signals.SAME_REQUEST_SECS = 600\n"
        "with signals.signals_ask(Requests()):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    signals.SAME_REQUEST_SECS = -1\n"  # whatever comes now comes later
        "    print('later', flush=True)\n"
        "    for _ in range(600): time.sleep(0.1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "later\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_where_torchrun_restarts_a_preempted_run_ends_with_0(monkeypatch):
    """Started again at once it would only be ended again: status.json is the truth."""
    preempted = RunResult(3, status="PREEMPTED")
    assert code_of_result(preempted) == 75
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert code_of_result(preempted) == 0 == code_of_result(RunResult(3, status="STOPPED"))


def test_a_save_that_fails_while_leaving_only_warns(program):
    """The run still leaves to be continued, from the epoch before."""
    data = program.run / "checkpoints/data"

    def take_away() -> None:
        data.rename(program.run / "away")
        data.write_text("in the way")
        os.kill(os.getpid(), signal.SIGTERM)

    with warned() as texts:
        assert program("step 2.1", take_away).status == "PREEMPTED"
    assert any("epoch 1+2 was NOT saved" in text for text in texts)
    data.unlink()
    (program.run / "away").rename(data)
    assert program() == 3 and program.events[1] == "step 2.0"


def test_status_tells_where_the_run_goes_on(program):
    """status.json has position, reason and code; the event says what was lost of the running epoch."""
    program("step 2.1")
    status = json.loads((program.run / "status.json").read_text())
    assert {key: status[key] for key in ("state", "epoch", "step", "stop", "exit_code", "committed")} == {
        "state": "PREEMPTED", "epoch": 1, "step": 2, "stop": ["SIGTERM"], "exit_code": 75, "committed": 1,
    }  # fmt: skip
    (event,) = [one for one in RunDirectory(program.run).events() if one["kind"] == "preempted"]
    assert (event["epoch"], event["step"], event["lost"]) == (1, 2, None)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_sequence_that_was_shuffled_in_its_task_is_not_continued(tmp_path: Path, drawn: bool) -> None:
    """It would be shuffled anew: some samples would come twice, others never; so the epoch begins anew."""

    def start(run: Path, stop_at: int = 0) -> tuple[RunResult, list[int], float]:
        torchrelay.seed(3)
        total, seen = torch.zeros(1, dtype=torch.float64), list[int]()
        job = Job("shuffled", blobs={"total": total})

        @job.epoch
        def learn(ctx: Context) -> None:
            order = torch.randperm(8).tolist() if drawn else [3, 1, 2, 0]
            for number in ctx.steps(order):
                seen.append(number)
                total.mul_(1.1).add_(number)
                if len(seen) == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        job.stop_when(max_epochs(1))
        return JobRunner(job, run).train(LocalSession()), seen, float(total)

    _, whole, expected = start(tmp_path / "whole")
    left, before, _ = start(tmp_path / "left", 3)
    _, after, total = start(tmp_path / "left")
    assert left.status == "PREEMPTED" and before == whole[:3]
    assert after == (whole if drawn else whole[3:]) and total == expected


@pytest.mark.parametrize("held", [True, False])
def test_a_start_that_leaves_while_hosts_send(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held: bool
) -> None:
    """Where taking the log over was left for a signal nothing is loaded or saved: the run is preempted."""
    program(at="step 3.1")
    capsys.readouterr()

    def leaves(ledger: Ledger, peers: object, **_: object) -> bool:
        opened(ledger, peers) if held else None  # type: ignore[arg-type]
        return False

    opened = Ledger.open
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "open", leaves)
        result = program()
    assert (result.status, int(result), program.events) == ("PREEMPTED", 2, [])
    assert "the same command resumes from epoch 2+2" in capsys.readouterr().err
    assert program().status == "FINISHED" and program.events[0] == "setup"
