"""`gpu-check`: what only a GPU can show, as a table. With `--device cpu` the same programme, small.

Parts: copies against the pinned limit; stalls of saves, and loads, beside peers; whether steps wait for the
device; a run under torchrun (NCCL on GPUs) that is killed, and trainings of many kinds that are cut. Resumed
in a fresh process, they end in the same bits as those that were left alone. Exit code 2 if there is no
such device, 1 if something is wrong or the time is over.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from launching import clean_environment, torchrun

HERE = Path(__file__).parent
MOST_SECS = 450.0
EPOCHS = 4
PARTS = ("copies", "saves", "peers", "loads", "waits", "killed", "cases")


class CheckError(Exception):
    """Something is not as it must be."""


@dataclass
class Check:
    """What was asked for, what was found, and when the time is over."""

    device: str
    ranks: int
    mib: int
    rounds: int
    secs: float
    parts: Collection[str] = PARTS
    found: dict[str, float | str] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left; CheckError when there are none."""
        left = self.begun + self.secs - time.monotonic()
        if left <= 0:
            raise CheckError(f"not finished within {self.secs:.0f} s: raise --secs or lower --mib")
        return left

    def part(self, name: str, work: Callable[[], dict[str, float | str]]) -> None:
        """Do a part, if it is wanted and there is time, and note how long it took."""
        if name not in self.parts:
            return
        begin = self.left and time.monotonic()
        self.found |= work()
        self.found[f"{name}, s"] = time.monotonic() - begin


def machine(device: str) -> dict[str, float | str]:
    """What it was measured on."""
    import torch

    told: dict[str, float | str] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        told["device"] = f"{torch.cuda.device_count()} x {properties.name}"
        told["GPU memory, GB"] = properties.total_memory / 1e9
        told["CUDA"] = str(torch.version.cuda)
    return told


def rates(check: Check, where: Path) -> None:
    """The parts that this process measures itself."""
    import torch
    from gpu_peers import loads, peers, waits
    from gpu_rates import copies, saves_and_loads

    device = torch.device("cuda", 0) if check.device == "cuda" else torch.device("cpu")
    nbytes = check.mib << 20
    check.part("copies", lambda: dict(copies(device, nbytes, check.rounds)))
    check.part("saves", lambda: dict(saves_and_loads(device, nbytes, check.rounds, where)))
    check.part("peers", lambda: peers(device, nbytes, 3, where))
    check.part("loads", lambda: loads(device, nbytes // 3, check.rounds, where))
    check.part("waits", lambda: waits(device, where))


class Cases:
    """Trainings of many kinds, in processes of their own, that are cut and resumed."""

    def __init__(self, check: Check, where: Path) -> None:
        self._check, self._where = check, where

    def rows(self) -> dict[str, float | str]:
        """One per kind, and one per change of the device; several at a time."""
        from gpu_cases import ALONE, ON_RANKS

        names = [*ALONE, *(ON_RANKS if self._check.ranks else ())]
        asked = [(f"cut and resumed: {name}", self.same_bits, name) for name in names]
        if self._check.device == "cuda":
            moved = [name for name in ALONE if name not in ("graphed", "windows")]  # these are for GPUs alone
            asked += [(f"resumed elsewhere: {name}", self.elsewhere, name) for name in moved]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
            done = [(row, pool.submit(self._kept, work, name)) for row, work, name in asked]
            return {row: future.result() for row, future in done}

    def _kept(self, work: Callable[[str], str], name: str) -> str:
        try:
            return work(name)
        except (CheckError, subprocess.TimeoutExpired) as error:
            return f"FAILED: {error}"

    def same_bits(self, name: str) -> str:
        """Cut by SIGTERM and by SIGKILL, it ends in the bits of one that is left alone."""
        from gpu_cases import FIRST, SECOND

        _, whole, said = self._run(name, self._where / name / "whole", self._check.device)
        if len(whole) != 2:
            return f"FAILED: left alone: {said}"
        told = []
        for cut, step in (("SIGTERM", FIRST), ("SIGKILL", SECOND)):
            run = self._where / name / cut
            code, words, said = self._run(name, run, self._check.device, cut, step)
            if not code or not run.is_dir():
                return f"FAILED: {cut} did not end it: {code}, {words}: {said}"
            _, words, said = self._run(name, run, self._check.device)
            if len(words) != 2 or words[1] != whole[1] or words[0] == "1":
                return f"FAILED: {cut} in step {step}: {words} instead of {whole}: {said}"
            told.append(f"{cut} in step {step}: from step {words[0]}")
        return f"same bits ({', '.join(told)})"

    def elsewhere(self, name: str) -> str:
        """Interrupt on the GPU and resume on the CPU, and the other way round, until the end."""
        from gpu_cases import FIRST

        ways = (("cuda", "cpu"), ("cpu", "cuda"))
        for first, second in ways[:1] if name == "made" else ways:  # what it holds comes back to the CPU
            run = self._where / name / f"{first}-{second}"
            self._run(name, run, first, "SIGTERM", FIRST)
            code, words, said = self._run(name, run, second)
            if code or words[:1] != [str(FIRST + 1)]:
                return f"FAILED: {first}, then {second}: {code}, {words}: {said}"
        return "goes on"

    def _run(self, name: str, run: Path, device: str, *cut: object) -> tuple[int, list[str], str]:
        from gpu_cases import ON_RANKS

        program = [str(HERE / "gpu_cases.py"), str(run), device, name, *map(str, cut)]
        command = torchrun(*program, ranks=1) if name in ON_RANKS else [sys.executable, *program]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=self._check.left,
            env=clean_environment(),
        )  # fmt: skip
        words = [
            line.split()[1] for line in done.stdout.splitlines() if line.startswith(("began ", "digest "))
        ]
        return done.returncode, words, done.stderr[-1500:]


class Started:
    """A run of the job in processes of its own; ended with everything that it started."""

    def __init__(self, check: Check, run: Path, hold: int = 0) -> None:
        numbers = map(str, (EPOCHS, min(check.mib, 64), hold))
        program = [str(HERE / "gpu_job.py"), str(run), check.device, *numbers]
        command = torchrun(*program, ranks=check.ranks) if check.ranks else [sys.executable, *program]
        self.lines: list[str] = []
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
            env=clean_environment(),
        )  # fmt: skip
        self._timer = threading.Timer(check.left, self.kill)
        self._timer.start()

    def until(self, word: str) -> bool:
        """Read lines until one begins so; False at the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if line.startswith(word):
                return True
        return False

    def kill(self) -> None:
        """End the processes of the job, and what started them: torchrun gives each a session of its own."""
        ranks = [int(line.split()[1]) for line in self.lines if line.startswith("holding ")]
        for end, number in [*((os.kill, rank) for rank in ranks), (os.killpg, self._process.pid)]:
            with suppress(ProcessLookupError):
                end(number, signal.SIGKILL)
        self.lines = [line for line in self.lines if not line.startswith("holding ")]

    def end(self, *, killed: bool = False) -> None:
        """Wait for the end; CheckError with what was said where it is another than it should be."""
        if killed:
            self.kill()
        code = self._process.wait()
        self._timer.cancel()
        self.kill()  # what torchrun started, if it was killed alone
        if not killed and code:
            self._log.seek(0)
            raise CheckError(f"the job ended with {code}: {self._log.read()[-2000:]}")
        self._log.close()

    @property
    def digest(self) -> str:
        """What the job said of its state at the end."""
        told = [line.split()[1] for line in self.lines if line.startswith("digest ")]
        if not told:
            raise CheckError(f"the job ended without a digest: {self.lines[-3:]}")
        return told[-1]


def killed_and_resumed(check: Check, where: Path) -> dict[str, float | str]:
    """A run that was killed in its third epoch, resumed, ends in the bits of one that was left alone."""
    alone = Started(check, where / "alone")
    alone.until("digest ")
    alone.end()
    first = Started(check, where / "killed", hold=3)
    for _ in range(max(check.ranks, 1)):
        if not first.until("holding"):
            first.end()
            raise CheckError("the run that was to be killed was over before")
    first.end(killed=True)
    begin = time.monotonic()
    again = Started(check, where / "killed")
    again.until("epoch")
    back = time.monotonic() - begin
    again.until("digest ")
    again.end()
    began = [int(line.split()[1]) for line in again.lines if line.startswith("epoch ")]
    if not began or not 1 < began[0] <= 3:
        raise CheckError(f"it resumed at epoch {began[:1]}, not at 2 or 3")
    if again.digest != alone.digest:
        raise CheckError(f"other bits after the resume: {again.digest} instead of {alone.digest}")
    return {
        "killed in epoch 3, resumed in": began[0],
        "start to first step of the resume, s": back,
        "bits of the resumed and the uninterrupted run": "the same",
    }


def table(found: dict[str, float | str]) -> str:
    """The figures in Markdown."""
    rows = [f"| {name} | {_cell(value)} |" for name, value in found.items()]
    return "\n".join(["| what | figure |", "|---|---|", *rows])


def _cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def parsed() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=int, help="processes of the killed run; default one per GPU; 0: no torchrun"
    )
    parser.add_argument("--mib", type=int, default=3072, help="of the state that is copied, saved and loaded")
    parser.add_argument("--rounds", type=int, default=5, help="copies, and saves, that are measured")
    parser.add_argument("--secs", type=float, default=MOST_SECS, help="the time for everything")
    parser.add_argument("--directory", type=Path, help="where runs are written; default a temporary folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--from", dest="origin", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if min(asked.mib, asked.rounds) < 1 or asked.secs <= 0 or (asked.ranks is not None and asked.ranks < 0):
        parser.error("--mib and --rounds are numbers from 1, --secs is above 0, --ranks is not negative")
    return asked


def main() -> int:
    """Check, and print the table, also of what was found before something was wrong."""
    asked = parsed()
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} shows no GPU here: nothing was checked; "
            "scripts/gpu-check --device cpu --mib 8 runs the programme without one",
            file=sys.stderr,
        )
        return 2
    many = torch.cuda.device_count() if asked.device == "cuda" else 2
    ranks = many if asked.ranks is None else asked.ranks
    check = Check(asked.device, ranks, asked.mib, asked.rounds, asked.secs, asked.parts)
    check.found |= machine(asked.device)
    base = None if asked.directory is None else asked.origin / asked.directory
    where = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=base))
    wrong = ""
    try:
        rates(check, where)
        check.part("killed", lambda: killed_and_resumed(check, where))
        check.part("cases", Cases(check, where / "cases").rows)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(where, ignore_errors=True)
    check.found |= {"ranks of the killed run": ranks, "all, s": time.monotonic() - check.begun}
    if wrong:
        check.found["FAILED"] = wrong
    wrong += "".join(name for name, value in check.found.items() if str(value).startswith("FAILED"))
    print(json.dumps(check.found) if asked.json else table(check.found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
