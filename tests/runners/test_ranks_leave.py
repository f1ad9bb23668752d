"""Ranks of real launches leave together: told one by one, all at once, or by the launcher."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchrun as launching
from ending_job import start
from exact_job import SAMPLES
from torchrun import REPOSITORY, Finished, Job, interruptible, kill, wait_for_the_end_of

from torchrelay import LocalSession
from torchrelay.errors import PeerError
from torchrelay.metadata.run_directory import RunDirectory

PROGRAM = REPOSITORY / "tests/programs/ending.py"
ENV = {"PYTHONPATH": f"{REPOSITORY / 'tests/helpers'}:{REPOSITORY / 'src'}"}
POINTS = {
    "one rank": [(2, [0])],
    "several times": [(5, [1]), (3, [0, 1]), (9, [1])],
    "evaluation": [(12, [0])],
}
LEFT = [(1, [1])]
"""Where two ranks leave the run that others go on with."""
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]

Told = list[dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ending")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """What both ranks tell of all points, played in one launch."""
    points = json.dumps([*POINTS.items(), ("left", LEFT)])
    done = launching.torchrun(PROGRAM, "exact", str(folder), points, warm=True, ranks=2, cwd=folder, env=ENV)
    assert done.rc == 0, str(done)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("point", POINTS)
def test_ranks_that_left_at_one_step_end_in_the_same_bits(told: Told, point: str) -> None:
    """Whichever rank was told: both stop at one step, and go on to the state and metrics of the whole run."""
    for number in range(len(POINTS[point])):
        left = [rank[point][number] for rank in told]
        assert {one["status"] for one in left} == {"PREEMPTED"}
        assert len({one["ticks"] for one in left}) == 1, "a rank went further than the other"
        tick = POINTS[point][number][0]  # agreed on one step later; an evaluation goes to its end
        assert tick <= left[0]["ticks"] <= tick + 6
    for rank in told:
        ended, whole = rank[point][-1], rank["whole"][-1]
        assert ended["status"] == "FINISHED"
        assert (ended["digest"], ended["values"][-1]) == (whole["digest"], whole["values"][-1])


def test_other_numbers_of_ranks_go_on_inside_of_the_epoch(told: Told, folder: Path) -> None:
    """2 ranks leave an epoch, 3 go on and leave it too, one ends it: each sample is seen once an epoch."""
    run = folder / "left"
    done = launching.torchrun(PROGRAM, "resized", str(run), "1", warm=True, ranks=3, cwd=folder, env=ENV)
    assert done.rc == 0, str(done)
    three = [json.loads(Path(f"{run}.rank-{rank}.json").read_text()) for rank in range(3)]
    assert {one["status"] for one in three} == {"PREEMPTED"}
    with LocalSession() as session:
        last = start(session, run)
    assert last.result == 3 and last.result.status == "FINISHED"
    seen = [step for rank in told for step in rank["left"][0]["seen"]]
    seen += [step for rank in three for step in rank["seen"]] + [list(step) for step in last.seen]
    for epoch in range(3):
        indices = [index for data_epoch, step in seen if data_epoch == epoch for index in step]
        assert sorted(indices) == list(range(SAMPLES)), epoch
    shares = (told[0]["left"][0]["seen"], three[0]["seen"], last.seen)
    parts = [{epoch for epoch, _ in share} for share in shares]
    assert parts == [{0}, {0}, {0, 1, 2}], "the first epoch was shared by all"


def slow(
    folder: Path, what: Callable[[Job], None], *options: str, max_restarts: int = 0, warm_ranks: bool = False
) -> tuple[Finished, dict[str, Any]]:
    """Start the slow job on two ranks and do something to it in its steps; how it ended, what status says."""
    run = str(folder / "slow")
    with Job(
        PROGRAM, "slow", run, ranks=2, cwd=folder, env=ENV, options=options, max_restarts=max_restarts,
        warm_ranks=warm_ranks,
    ) as job:  # fmt: skip
        job.wait_for("did step", times=6)
        what(job)
        done = job.wait(60)
    return done, RunDirectory(folder / "slow").status()


def test_signals_to_the_launcher_and_its_ranks(folder: Path) -> None:
    """SIGTERM to launcher or rank, SIGUSR1 that the launcher handles: PREEMPTED, the next goes on there."""
    handled = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    done, status = slow(folder, lambda job: job.process.send_signal(signal.SIGTERM), warm_ranks=True)
    assert done.rc == 1, "so torchrun ends when it is told to"
    assert (status["state"], status["stop"], status["exit_code"]) == ("PREEMPTED", ["SIGTERM"], 75), str(done)
    first = status["step"]
    one_rank: Callable[[Job], None] = lambda job: kill(job.workers()[1], signal.SIGTERM)  # noqa: E731
    done, status = slow(folder, one_rank, max_restarts=2, warm_ranks=True)
    assert done.rc == 0, f"a launcher with restarts left must not use them: {done}"
    assert status["state"] == "PREEMPTED" and status["step"] > first > 0
    assert f"begins after step {first}" in done.of_rank(1)
    second = status["step"]
    done, status = slow(folder, lambda job: job.process.send_signal(signal.SIGUSR1), handled, warm_ranks=True)
    assert (status["state"], status["stop"]) == ("PREEMPTED", ["SIGUSR1"]), str(done)
    assert status["step"] > second and f"begins after step {second}" in done.of_rank(0)


def test_ctrl_c_preempts(tmp_path: Path) -> None:
    """SIGINT to torchrun, which tells the ranks: a line says what comes, the place is saved, no traceback."""
    with interruptible():
        done, status = slow(tmp_path, lambda job: job.process.send_signal(signal.SIGINT))
    assert (status["state"], status["stop"], status["exit_code"]) == ("PREEMPTED", ["SIGINT"], 75), str(done)
    assert status["step"] > 0 and done.err.count("Ctrl-C: saving") == 1, str(done)
    assert "first failure" not in done.err, f"so a traceback begins: {done}"


def test_orphans_end_soon(tmp_path: Path) -> None:
    """A launcher that dies of SIGUSR1 leaves ranks behind; they end within 15 s."""
    pids: list[int] = []

    def orphan(job: Job) -> None:
        pids.extend(job.workers())
        job.process.send_signal(signal.SIGUSR1)

    done, _ = slow(tmp_path, orphan)
    assert done.rc == -signal.SIGUSR1 and len(pids) == 2
    wait_for_the_end_of(pids, 15)


def test_a_peers_death_is_no_preemption(tmp_path: Path) -> None:
    """Torchrun sends SIGTERM to the rank that is left: the run has failed, of the rank that was lost."""
    done, status = slow(tmp_path, lambda job: kill(job.workers()[1], signal.SIGKILL))
    assert done.rc == 1 and status["state"] == "FAILED", str(done)
    assert "preempted" not in done.out + done.err


def test_a_failure_that_rank_0_cannot_raise_is_noted(tmp_path: Path) -> None:
    """Where its main thread comes back from nothing, status and events say why its process was ended."""
    with Job(PROGRAM, "stuck", str(tmp_path / "stuck"), ranks=2, cwd=tmp_path, env=ENV) as job:
        job.wait_for("did step 4", times=2)
        kill(job.workers()[1], signal.SIGKILL)
        done = job.wait(40)
    run = RunDirectory(tmp_path / "stuck")
    status = run.status()
    failures = [line for line in (run.path / "events.0.jsonl").read_text().splitlines() if "failure" in line]
    assert (status["state"], status["exit_code"]) == ("FAILED", PeerError.exit_code), str(done)
    assert len(failures) == 1 and "died unexpectedly" in failures[0] and "rank 1" in status["error"]
