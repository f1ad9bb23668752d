"""Starts real torchrun jobs for tests: bounded in time, ended by pid, in a folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from warm import PLACE, server, warmed

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """A job that ended: its exit code, what all ranks printed, seconds it ran, time it ended."""

    rc: int
    out: str
    err: str
    secs: float
    ended: float

    def of_rank(self, rank: int, local_rank: int | None = None) -> str:
        """The lines that one rank printed, both streams (torchrun marks them by local rank)."""
        mark = f"[default{rank if local_rank is None else local_rank}]:"
        lines = (self.out + self.err).splitlines()
        return "\n".join(line.removeprefix(mark) for line in lines if line.startswith(mark))

    def __str__(self) -> str:
        return f"rc {self.rc} after {self.secs:.1f} s\n--- out\n{self.out}\n--- err\n{self.err}"


class Job:
    """A torchrun job that runs; use as a context manager, so that it never outlives the test.

    The script prints what the test waits for. Each rank's lines are marked `[default<rank>]:`. The launcher
    and its ranks are `warm` where a test is not about processes; the ranks alone are (`warm_ranks`) where it
    is about the launcher, whose children then stand for the ranks and pass signals on.
    """

    def __init__(
        self,
        script: str | Path,
        *args: str,
        ranks: int,
        cwd: Path,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        rendezvous: Sequence[str] = ("--standalone",),
        warm: bool = False,
        warm_ranks: bool = False,
    ) -> None:
        self.cwd = cwd
        self._began = time.monotonic()
        self._out, self._err = cwd / "torchrun.out", cwd / "torchrun.err"
        launcher = ["-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}"]
        launcher += [f"--max-restarts={max_restarts}", "--tee=3", *options]
        program = [str(script), *args]
        if warm or warm_ranks:
            launcher += ["--no-python"]
            program = warmed(program)
            env = {**(env or {}), PLACE: server()}
        command = warmed([*launcher, *program]) if warm else [sys.executable, *launcher, *program]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=clean_environment(env), stdout=out, stderr=err, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def printed(self) -> str:
        """What was printed until now."""
        return self._out.read_text() + self._err.read_text()

    def wait_for(self, text: str, timeout_secs: float = 100, times: int = 1) -> None:
        """Wait until the job has printed `text`; raises AssertionError when it ends or is late."""
        end = time.monotonic() + timeout_secs
        while self.printed().count(text) < times:
            ended = self.process.poll() is not None
            if self.printed().count(text) >= times:
                return
            assert not ended, f"the job ended without {text!r}:\n{self.printed()}"
            assert time.monotonic() < end, f"no {text!r} within {timeout_secs} s:\n{self.printed()}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """The pids of the ranks that live now, in order of their start."""
        return children_of(self.process.pid)

    def wait(self, timeout_secs: float = 100) -> Finished:
        """Wait for the end; raises AssertionError, having killed the job, when it takes longer."""
        try:
            rc = self.process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job ran longer than {timeout_secs} s:\n{self.printed()}") from None
        return Finished(
            rc, self._out.read_text(), self._err.read_text(), time.monotonic() - self._began, time.time()
        )

    def kill(self) -> None:
        """End the launcher and its ranks, which have sessions of their own."""
        for pid in [*children_of(self.process.pid), self.process.pid]:
            kill(pid)
        self.process.wait(60)


def torchrun(
    script: str | Path, *args: str, ranks: int, cwd: Path, timeout_secs: float = 100, **options: object
) -> Finished:
    """Run a script on `ranks` ranks of this machine to its end. `script` may be source text."""
    with Job(script_file(script, cwd), *args, ranks=ranks, cwd=cwd, **options) as job:  # type: ignore[arg-type]
        return job.wait(timeout_secs)


def script_file(script: str | Path, cwd: Path, name: str = "train_script.py") -> Path:
    """Write source text to a file; a path is returned as it is."""
    if isinstance(script, Path):
        return script
    path = cwd / name
    path.write_text(script)
    return path


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without traces of an outer launcher, one thread per rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "SLURM_", "MASTER_", "PYTEST_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    }
    env = kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(extra or {})
    # This very tree is tested, whatever is installed.
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return env | {"PYTHONPATH": os.pathsep.join([*paths, str(REPOSITORY / "src")])}


@contextmanager
def interruptible() -> Iterator[None]:
    """Processes started in the block hear of SIGINT, also where these tests run behind a shell's `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def children_of(pid: int) -> list[int]:
    """The pids of the processes that `pid` started and that still run."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def wait_for_the_end_of(pids: Sequence[int], timeout_secs: float) -> None:
    """Wait until none of the processes runs (a zombie does not); what is left is killed: AssertionError."""
    end = time.monotonic() + timeout_secs
    while left := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > end:
            for pid in left:
                kill(pid)
            raise AssertionError(f"processes {left} still run after {timeout_secs} s")
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
