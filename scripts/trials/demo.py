"""The demo: real data on two ranks, killed, resumed, rewound, compared, and evaluated by partial load.

Exit code 1 if the final weights differ or the accuracy is below 97 %.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fingerprint import weights_sha256
from launching import (
    REPOSITORY,
    Launch,
    TrialError,
    clean_environment,
    end_like_an_error,
    send,
    state_of,
    torchrun,
    wait_until,
)
from run_table import COLUMNS, rows_of
from screen import Screen

import torchrelay
from torchrelay.errors import RelayError

EPOCHS = 8
KILLED_FROM = 4
REWOUND_TO = 2
LEAST_ACCURACY = 0.97
STEPS_PER_EPOCH = 75
LAUNCH_SECS = 120.0
_EPOCH = re.compile(r".* I r0/\d+ (epoch (\d+) .*done \|.*)")
_STEP = re.compile(r"epoch (\d+), step (\d+)")


@dataclass(frozen=True)
class Place:
    """Where the demo's runs and logs lie."""

    root: Path

    def run(self, name: str) -> Path:
        """A run directory."""
        return self.root / name

    def log(self, name: str) -> Path:
        """What a launch printed."""
        return self.root / f"{name}.log"


class Demo:
    """The five parts, each a stage on the screen."""

    def __init__(self, place: Place, screen: Screen) -> None:
        self.place = place
        self.screen = screen
        self.rows: list[list[str]] = []
        self.hashes: dict[str, str] = {}
        self.killed_in = 0

    def run(self) -> None:
        """All parts; raises TrialError where something is not as promised."""
        self.interrupted()
        self.resumed()
        self.rewound()
        self.uninterrupted()
        found = self.evaluated()
        self.screen.table(COLUMNS, self.rows)
        self.judge(found)

    # The launches

    def interrupted(self) -> None:
        """Train, and kill rank 1 in the middle of an epoch."""
        title = f"train on 2 ranks; rank 1 is killed in the middle of epoch {KILLED_FROM}"
        with self.screen.stage(title, EPOCHS) as tell, self._launch("interrupted", tell) as launch:
            self.killed_in, step = kill_mid_epoch(launch, self.place.run("interrupted"), KILLED_FROM, rank=1)
            code = launch.wait(LAUNCH_SECS)
            where = f"step {step} of {STEPS_PER_EPOCH} in epoch {self.killed_in}"
            tell(self.killed_in - 1, f"rank 1 was killed after {where}; torchrun ended with {code}")
        if code == 0:
            raise TrialError("torchrun says that all is well although a rank was killed")
        self._remember("interrupted", "", since=1)

    def resumed(self) -> None:
        """Run the same command again."""
        self._train("the same command again resumes by itself", "interrupted")
        self._remember("interrupted", f"resumed from {self.killed_in - 1}", since=self.killed_in)
        self._hash("interrupted and resumed", "interrupted")

    def rewound(self) -> None:
        """Go back to an earlier epoch and train again."""
        title = f"the same with --resume-from-epoch {REWOUND_TO} rewinds"
        self._train(title, "interrupted", "--resume-from-epoch", str(REWOUND_TO))
        if f"rewinding to epoch {REWOUND_TO} " not in self.place.log("interrupted").read_text():
            raise TrialError(f"nothing was rewound: {self.place.log('interrupted')}")
        self._remember("rewound", f"rewound to {REWOUND_TO}", since=REWOUND_TO + 1, directory="interrupted")
        self._hash(f"rewound to epoch {REWOUND_TO}", "interrupted")

    def uninterrupted(self) -> None:
        """Train in another directory, undisturbed."""
        self._train("an uninterrupted run in another directory", "uninterrupted")
        self._remember("uninterrupted", "", since=1)
        self._hash("uninterrupted", "uninterrupted")

    def _train(self, title: str, run: str, *options: str) -> None:
        with self.screen.stage(title, EPOCHS) as tell, self._launch(run, tell, *options) as launch:
            launch.expect(0, LAUNCH_SECS)

    def _launch(self, run: str, tell: Any, *options: str) -> Launch:
        def on_line(line: str) -> None:
            epoch = _EPOCH.fullmatch(line)
            if epoch:
                tell(int(epoch[2]), epoch[1])

        program = [str(REPOSITORY / "examples/digits.py"), str(self.place.run(run))]
        program += ["--batch-size=16", "--watch=0.05", *options]
        return Launch(torchrun(*program, ranks=2), self.place.log(run), on_line=on_line)

    def _remember(self, run: str, how: str, *, since: int, directory: str | None = None) -> None:
        self.rows += rows_of(self.place.run(directory or run), run, how, since)

    def _hash(self, what: str, run: str) -> None:
        self.hashes[what] = weights_sha256(torchrelay.open_checkpoint(self.place.run(run), epoch=EPOCHS))

    # The evaluation

    def evaluated(self) -> dict[str, Any]:
        """Load the model's blobs of the best epoch in a fresh process and measure it on the test part."""
        script = REPOSITORY / "scripts/trials/evaluate_digits.py"
        run = self.place.run("interrupted")
        with self.screen.stage("evaluate the best epoch in a fresh process by partial load", 1) as tell:
            done = subprocess.run(
                [sys.executable, script, run],
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=LAUNCH_SECS,
                check=False,
            )
            if done.returncode != 0:
                raise TrialError(f"the evaluation ended with {done.returncode}:\n{done.stderr}")
            found: dict[str, Any] = json.loads(done.stdout)
            tell(1, f"epoch {found['epoch']}, test accuracy {found['test_accuracy']:.2%}")
        directory = run / "checkpoints" / "data" / found["directory"]
        return {**found, "bytes_on_disk": sum(file.stat().st_size for file in directory.iterdir())}

    def judge(self, found: dict[str, Any]) -> None:
        """Say what came out; raises TrialError when it is not what was promised."""
        say = self.screen.line
        say(
            f"evaluation: epoch {found['epoch']} (best on the validation part, {found['val_accuracy']:.2%}) "
            f"reads {found['test_accuracy']:.2%} of the test digits right"
        )
        say(
            f"evaluation read {found['bytes_read_by_load']:,} bytes for {found['bytes_of_model']:,} bytes "
            f"of model ({found['bytes_read_in_all']:,} with log and manifests); "
            f"the whole epoch has {found['bytes_on_disk']:,} bytes on disk"
        )
        for what, value in self.hashes.items():
            say(f"SHA-256 of the final weights, {what + ':':28} {value}")
        if len(set(self.hashes.values())) != 1:
            raise TrialError("the final weights differ")
        if found["test_accuracy"] < LEAST_ACCURACY:
            raise TrialError(f"the test accuracy is below {LEAST_ACCURACY:.0%}")
        if found["bytes_read_in_all"] >= found["bytes_on_disk"]:
            raise TrialError("the partial load read as much as the whole epoch has")
        say("the final weights are equal, bit by bit", style="bold green")


def kill_mid_epoch(launch: Launch, run: Path, first: int, *, rank: int) -> tuple[int, int]:
    """SIGKILL a rank in the middle of an epoch, the `first` if possible; return the epoch and the step.

    The rank is stopped first: what is seen then cannot change any more, so the kill really falls into
    the middle. If the stop came too late, the rank continues and the next epoch is tried.
    """
    for epoch in range(first, EPOCHS + 1):
        wait_for_middle(launch, epoch)
        pid = launch.ranks().get(rank)
        if pid is None or not send(pid, signal.SIGSTOP):
            raise TrialError(f"rank {rank} does not run; see {launch.log}")
        wait_for_stop(pid)
        time.sleep(0.3)  # several reports of rank 0: it can get one step further, then it waits for rank 1
        step = step_in(launch, epoch)
        committed = torchrelay.open_checkpoint(run, epoch="last").position.epoch
        if 1 < step < STEPS_PER_EPOCH and committed == epoch - 1:
            send(pid, signal.SIGKILL)
            return epoch, step
        send(pid, signal.SIGCONT)
    raise TrialError(f"rank {rank} could not be stopped in the middle of an epoch; see {launch.log}")


def wait_for_middle(launch: Launch, epoch: int) -> None:
    """Wait until rank 0 has reported a step of an epoch that leaves some time to its end."""

    def reported() -> bool:
        return launch.ended() or 1 < step_in(launch, epoch) < STEPS_PER_EPOCH * 2 // 3

    wait_until(reported, LAUNCH_SECS, f"the middle of epoch {epoch}", every_secs=0.002)


def wait_for_stop(pid: int) -> None:
    """Wait until a process that got SIGSTOP stands still."""
    wait_until(lambda: state_of(pid) == "T", 5, f"process {pid} to stop")


def step_in(launch: Launch, epoch: int) -> int:
    """The step that rank 0 reported last, 0 unless it was in this epoch."""
    seen = next((match for line in reversed(launch.lines) if (match := _STEP.fullmatch(line))), None)
    return int(seen[2]) if seen and int(seen[1]) == epoch else 0


def main() -> int:
    """Run the demo; 0 when everything is as promised."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Train, kill, resume, rewind, evaluate."
    )
    parser.add_argument("directory", nargs="?", type=Path, help="keep the runs here (default: temporary)")
    parser.add_argument("--from", dest="base", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_like_an_error()
    screen = Screen()
    began = time.monotonic()
    kept = options.directory is not None
    root = options.base / options.directory if kept else Path(tempfile.mkdtemp(prefix="torchrelay-demo-"))
    if kept and root.exists() and any(root.iterdir()):
        screen.line(f"{root} is not empty: give a new directory")
        return 2
    root.mkdir(parents=True, exist_ok=True)
    try:
        Demo(Place(root), screen).run()
    except RelayError as error:
        screen.line(f"the demo failed: {error}", style="bold red")
        screen.line(f"runs and logs are kept in {root}")
        return 1
    if not kept:
        shutil.rmtree(root)
    screen.line(
        f"all of this took {time.monotonic() - began:.0f} s" + (f"; the runs are in {root}" if kept else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
