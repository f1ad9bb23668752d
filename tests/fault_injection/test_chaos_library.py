"""The preloaded library sees every call below its root, in order, and does to it what the plan says."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import struck_programs as programs

from torchrelay.chaos import faults as library_module
from torchrelay.chaos.faults import ERRNOS, Call, Fault, PlanFile, fault_of, library, read_calls
from torchrelay.chaos.processes import Ended, Order, Worker
from torchrelay.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("library") / "worker")
    yield made
    made.close()


def struck(worker: Worker, root: Path, program: str, fault: Fault | None = None, **more: object) -> Ended:
    """Call a program with the directory under a plan."""
    log, reads = root.with_name("calls"), bool(more.pop("reads", False))
    root.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    worker.plan.arm(root, fault, log=log, reads=reads, stall_secs=0.3)
    order = Order(f"{programs.HERE}:{program}", {"root": str(root), **more}, worker.plan.path)
    return worker.nursery.run(order)


def calls_of(root: Path) -> tuple[Call, ...]:
    return read_calls(root.with_name("calls"), root)


def test_every_call_is_seen_in_order(worker: Worker, tmp_path: Path) -> None:
    """Relative paths, directory descriptors, raw system calls, ctypes are seen; no file elsewhere is."""
    ended = struck(worker, tmp_path / "root", "every_call")
    assert ended.well, ended.trace
    calls = calls_of(tmp_path / "root")
    assert [one.kind for one in calls] == programs.EVERY_KIND
    assert [one.number for one in calls] == list(range(1, len(calls) + 1)) and worker.plan.calls == len(calls)
    assert all(one.error == 0 for one in calls)


@pytest.mark.parametrize("number", range(1, len(programs.EVERY_KIND) + 1))
def test_every_call_can_fail(worker: Worker, tmp_path: Path, number: int) -> None:
    """Each call, by its number, reports the error that the plan gives it."""
    ended = struck(worker, tmp_path / "root", "every_call", Fault("EDQUOT", number))
    assert worker.plan.fired == 1 and worker.plan.struck.split()[0] == programs.EVERY_KIND[number - 1]
    assert calls_of(tmp_path / "root")[number - 1].error == errno.EDQUOT
    through_ctypes = number in (10, 18, 19)  # the program does not look at what these return
    assert through_ctypes or "Disk quota exceeded" in ended.text


def test_a_kill_happens_before_after_and_in_the_middle(worker: Worker, tmp_path: Path) -> None:
    """Of a write nothing, all or half is there after the kill."""
    for when, size in (("before", 0), ("after", 1 << 16), ("middle", 1 << 15)):
        root = tmp_path / when
        assert struck(worker, root, "write_one", Fault("kill", 2, when)).killed
        assert (root / "file").stat().st_size == size


def test_writes_are_cut_short(worker: Worker, tmp_path: Path) -> None:
    """Short writes write half, in whole sectors past the page cache too; empty ones nothing."""
    half, quarter = 1 << 15, 1 << 14
    assert struck(worker, tmp_path / "a", "write_one", Fault("short", 2)).value == [half, half]
    lasting = struck(worker, tmp_path / "b", "write_one", Fault("short", 2, lasting=True)).value
    assert lasting[:2] == [half, quarter] and len(lasting) == 5
    assert struck(worker, tmp_path / "c", "write_one", Fault("zero", 2, lasting=True)).value == [0] * 5
    direct = struck(worker, tmp_path / "d", "write_one", Fault("short", 2), direct=True)
    assert direct.value == [half, half], direct.trace


def test_reads_count_where_asked(worker: Worker, tmp_path: Path) -> None:
    """Reads fail by the plan only where reads are counted."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("whole")
    assert struck(worker, root, "reads").value == "whole"
    assert [one.kind for one in calls_of(root)] == ["open", "release"]
    assert struck(worker, root, "reads", Fault("EIO", 2), reads=True).value == str(errno.EIO)


def test_threads_share_one_count(worker: Worker, tmp_path: Path) -> None:
    """Eight threads at once: no number is missing and none is given twice."""
    assert struck(worker, tmp_path / "root", "threads").well
    assert [one.number for one in calls_of(tmp_path / "root")] == list(range(1, 8 * 52 + 1))


def test_processes_share_one_count(worker: Worker, tmp_path: Path) -> None:
    """A process and its child count together, and the fault happens to one of them only."""
    root = tmp_path / "root"
    struck(worker, root, "two_processes", Fault("kill", 15))
    assert worker.plan.fired == 1 and len({one.pid for one in calls_of(root)}) == 2


def test_a_stall_takes_its_time(worker: Worker, tmp_path: Path) -> None:
    """A stalled call ends well, later."""
    assert struck(worker, tmp_path / "root", "write_one", Fault("stall", 2)).value == [1 << 16]
    assert worker.plan.fired == 1


@pytest.mark.parametrize(
    "text", ["kill@37", "kill@37:after", "kill@1:middle", "ENOSPC@12:lasting", "stall@5", "zero@9"]
)
def test_faults_are_written_and_read(text: str) -> None:
    """A fault's name says all of it."""
    assert str(fault_of(text)) == text


@pytest.mark.parametrize(
    "text", ["", "kill", "kill@0", "kill@x", "EPERM@3", "kill@3:later", "kill@3:after@4"]
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    """The refusal says how a fault is written."""
    with pytest.raises(UsageError, match="is not a fault: write"):
        fault_of(text)
    assert all(getattr(errno, name) for name in ERRNOS)


def test_without_a_compiler_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, or one that refuses, is a line with what to do; a library once built is used again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UsageError, match="install gcc"):
        library()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(UsageError, match="cannot compile"):
        library()
    monkeypatch.delenv("CC")
    built = library()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library() == built and built.parent == tmp_path / "torchrelay"
    assert library_module.SOURCE.exists()


def test_long_paths_are_refused(tmp_path: Path) -> None:
    """A path that the plan has no room for is named."""
    plan = PlanFile(tmp_path / "plan")
    with pytest.raises(UsageError, match="longer than"):
        plan.arm(tmp_path / ("x" * 1100), None)
    plan.close()
