"""The exit code of a launch, out of what an attempt has left."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.distributed.launcher import DIRECTORY, write_agent, write_failure, write_run
from torchrelay.runners.programs.run_selection import is_restart, launch_of
from torchrelay.runners.session.stop_requests import END_TIME, GRACE_SECS, Requests, deadlines_of, notice_of
from torchrelay.tools.launch.agent import code_of
from torchrelay.tools.launch.outcome import (
    Evidence,
    LaunchOutcome,
    RankEnd,
    evidence_of,
    idle_starts,
    last_lines,
    verdict_of,
    wants_requeue,
    without_end,
)

KILLED = RankEnd(1, "h", -9)


@pytest.mark.parametrize(
    ("well", "status", "first", "asked", "code"),
    [
        (True, {"state": "FINISHED"}, None, None, 0),
        (True, {}, None, None, 0),
        (True, {"state": "PREEMPTED"}, None, None, 75),
        (False, {"state": "PREEMPTED"}, RankEnd(0, "h", 75), "SIGTERM", 75),
        (False, {"state": "FAILED", "exit_code": 93}, RankEnd(0, "h", 93), None, 93),
        (False, {"state": "FAILED", "exit_code": 5}, None, "SIGTERM", 5),
        (False, {"state": "FAILED", "exit_code": 130}, None, "SIGINT", 130),
        (False, {"state": "FAILED", "exit_code": 1}, RankEnd(1, "h", 1), None, 1),
        (False, {"state": "FAILED", "exit_code": 1}, KILLED, None, 6),  # the others' connections broke
        (False, {"state": "FAILED", "exit_code": "no"}, None, None, 1),
        (False, {"state": "FAILED", "exit_code": True, "error": [1]}, None, None, 1),
        (False, {"state": ["FAILED"]}, None, None, 6),
        (False, {"state": "PREEMPTED", "stop": {"a": 1}}, None, None, 75),
        (False, {"state": "RUNNING"}, KILLED, None, 6),  # rank 0 itself
        (False, {}, KILLED, None, 6),
        (False, {}, KILLED, "SIGTERM", 75),
        (False, {}, None, "SIGUSR1", 75),
        (False, {}, None, "SIGINT", 130),
        (False, {}, None, "the time limit", 75),
        (False, {}, None, None, 6),
        (False, {}, RankEnd(0, "h", 4), None, 4),
        (False, {}, RankEnd(0, "h", 2), None, 2),
        (False, {}, RankEnd(0, "h", 17), None, 1),
        (False, {"state": "FINISHED"}, RankEnd(0, "h", 17), None, 1),
        (False, {"state": "FINISHED"}, KILLED, None, 0),
        (False, {"state": "STOPPED", "stop": ["STOP"]}, None, "SIGTERM", 0),
    ],
)
def test_the_code_is_that_of_the_guides_table(
    well: bool, status: dict[str, Any], first: RankEnd | None, asked: str | None, code: int
) -> None:
    """status.json decides where it is of this attempt, else the ranks do; never torchrun's 1."""
    assert verdict_of(Evidence(well, status, first, asked)).code == code


def test_where_no_note_could_be_left_the_agents_code_counts() -> None:
    """A full disk, or a directory that was removed, makes no lost rank of a program that fails."""
    for code, told in ((1, 1), (2, 2), (5, 5), (93, 93), (6, 6), (-9, 6), (137, 6), (0, 6)):
        assert verdict_of(Evidence(False, {}, code=code)).code == told
    assert verdict_of(Evidence(False, {}, KILLED, code=1)).code == 6
    assert code_of([{"code": 1, "time": 10}, {"code": -15, "time": 10}]) == 1
    assert code_of([{"code": 3, "time": 10}, {"code": -9, "time": 40}]) == 3
    for ends, told in (([], 6), ([{"code": -9, "time": 1}], 6), ([{"code": 17, "time": 1}], 1)):
        assert code_of(ends) == told


def test_a_preempted_job_is_queued_again_and_no_other_one() -> None:
    """75 always, within a budget where there is one; a lost rank only with one; nothing else."""
    for code in (0, 1, 2, 3, 4, 5, 93, 130):
        assert not wants_requeue(LaunchOutcome(code, ""), 0, 9)
    assert wants_requeue(LaunchOutcome(75, ""), 99, 0) and wants_requeue(LaunchOutcome(75, ""), 1, 2)
    assert not wants_requeue(LaunchOutcome(75, ""), 2, 2)
    assert not wants_requeue(LaunchOutcome(6, ""), 0, 0) and wants_requeue(LaunchOutcome(6, ""), 0, 1)


def test_starts_that_are_ended_before_a_run_begins_are_not_repeated_for_ever(tmp_path: Path) -> None:
    """The third in a row ends with 93; a run that began, or a budget of restarts, counts by itself."""
    for number in range(4):
        (tmp_path / f"attempt_{number}").mkdir()
    assert [idle_starts(tmp_path, number) for number in range(4)] == [1, 2, 3, 4]
    (tmp_path / "attempt_1/run.json").write_text('{"run": "r"}')
    assert [idle_starts(tmp_path, number) for number in range(4)] == [1, 0, 1, 2]
    left = LaunchOutcome(75, "")
    assert without_end(left, 2, 0) is left and without_end(left, 3, 9) is left
    assert without_end(LaunchOutcome(1, ""), 3, 0).code == 1
    ended = without_end(left, 3, 0)
    assert ended.code == 93 and not wants_requeue(ended, 2, 0)


def test_only_a_status_of_this_attempt_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has written, of whatever job, says nothing of these ranks."""
    run, attempt = RunDirectory(tmp_path / "run"), tmp_path / "attempt"
    run.path.mkdir()
    attempt.mkdir()
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    run.write_status("FAILED", exit_code=5, **here)
    assert evidence_of(attempt, well=False, nodes=1).status == {}
    monkeypatch.setenv(DIRECTORY, str(attempt))
    write_run(run.path)
    assert evidence_of(attempt, well=False, nodes=1).status["exit_code"] == 5
    run.write_status("FAILED", exit_code=5, host="other", pid=os.getpid())
    assert evidence_of(attempt, well=False, nodes=1).status == {}
    for damaged in ("[", "[" * 100_000, "\0", "9" * 5000):
        (run.path / "status.json").write_text(damaged)
        assert evidence_of(attempt, well=False, nodes=1).status == {}
    (attempt / "run.json").write_text('{"run": "\\u0000"}')
    assert evidence_of(attempt, well=False, nodes=1).status == {}


def test_the_first_to_fail_is_whom_the_ranks_agreed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first note counts; torchrun's view serves where ranks noted nothing, killed ones before others."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    ends = [{"rank": 0, "host": "h", "code": 6, "time": 1}, {"rank": 3, "host": "h", "code": -9, "time": 2}]
    write_agent(1, {"failures": ends})
    assert evidence_of(tmp_path, well=False, nodes=2).first == RankEnd(3, "h", -9)
    write_failure(2, "g", "why", 1)
    write_failure(0, "h", "later", 6)
    assert evidence_of(tmp_path, well=False, nodes=2).first == RankEnd(2, "g", 1, "why")
    for damaged in ("[", "[1]", json.dumps({"rank": "x"}), "\0"):
        (tmp_path / "failure.json").write_text(damaged)
        assert evidence_of(tmp_path, well=False, nodes=2).first == RankEnd(3, "h", -9)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([(0, 1, 10), (1, -15, 10)], (0, 1)),  # torchrun ended rank 1
        ([(1, 1, 10), (0, -9, 40)], (1, 1)),  # the same, and SIGTERM did not help
        ([(0, 6, 10), (1, -9, 10)], (1, -9)),  # rank 0 noticed
        ([(0, 6, 9), (1, 1, 10)], (1, 1)),
        ([(1, -11, 10), (0, -6, 12)], (1, -11)),
        ([(1, -15, 10)], (1, -15)),
    ],
)
def test_of_ranks_that_agreed_on_nothing_the_likely_cause_counts(
    ends: list[tuple[int, int, int]], first: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that the launcher ended, or that noticed another one's end, is not the first to fail."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    told = [{"rank": rank, "host": "h", "code": code, "time": time} for rank, code, time in ends]
    write_agent(0, {"failures": told})
    assert evidence_of(tmp_path, well=False, nodes=1).first == RankEnd(first[0], "h", first[1])


def test_how_a_lost_rank_ended_is_torchruns_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks agree that it is gone, torchrun knows the signal; of one that failed it tells less."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    write_agent(0, {"failures": [{"rank": 1, "host": "h", "code": -9, "time": 1}]})
    write_failure(1, "h", "gone", 6)
    assert evidence_of(tmp_path, well=False, nodes=1).first == RankEnd(1, "h", -9, "gone")
    (tmp_path / "failure.json").unlink()
    write_failure(1, "h", "raised", 1)
    assert evidence_of(tmp_path, well=False, nodes=1).first == RankEnd(1, "h", 1, "raised")


def test_the_last_lines_are_those_of_stderr_else_of_stdout(tmp_path: Path) -> None:
    """A rank that printed nothing has none; a long file is read at its end only."""
    assert last_lines(tmp_path, 0) is None
    (tmp_path / "rank_0.out").write_text("said\n")
    (tmp_path / "rank_0.err").touch()
    assert last_lines(tmp_path, 0) == (tmp_path / "rank_0.out", ["said"])
    (tmp_path / "rank_0.err").write_text("".join(f"line {number}\n" for number in range(100_000)))
    found = last_lines(tmp_path, 0)
    assert found is not None and found[1][-1] == "line 99999" and len(found[1]) == 15


def test_a_launcher_says_when_the_job_ends_and_how_long_before_it_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time limit is a deadline; a save after SIGUSR1 has all of the notice, after SIGTERM 30 s."""
    monkeypatch.setattr("time.time", lambda: 1000.0)
    (found,) = deadlines_of(None, {END_TIME: "1090"})
    assert found.name == "the time limit of the launch"
    assert deadlines_of(None, {END_TIME: "990"}) == ()
    assert notice_of({"TORCHRELAY_NOTICE_SECS": "240"}, GRACE_SECS) == 240
    assert notice_of({"TORCHRELAY_NOTICE_SECS": "x"}, GRACE_SECS) == notice_of({}, GRACE_SECS) == GRACE_SECS
    requests = Requests(clock=lambda: 0.0, notice_secs=240)
    requests.preempt("SIGUSR1")
    assert requests.secs_left() == 240
    requests.preempt("SIGTERM")
    assert requests.secs_left() == GRACE_SECS and requests.reason() == "SIGUSR1"


def test_all_attempts_of_a_launch_are_one_launch_to_a_program() -> None:
    """The id of the launcher counts before torchrun's, which is another one for every start."""
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "7.1",
    }
    given = {"TORCHRELAY_LAUNCH_ID": "slurm.7", "TORCHRELAY_LAUNCH_ATTEMPT": "1"}
    assert launch_of(ranks | given) == "launch slurm.7" and is_restart(ranks | given)
    assert launch_of(ranks) == "torchrun 7.1" and not is_restart(ranks)
    assert not is_restart(ranks | given | {"TORCHRELAY_LAUNCH_ATTEMPT": "0"})
