"""Trains across two hosts, switches one off in the middle, and runs the same command again.

Exit code 1 if anything is not as promised, 3 if the machine cannot make hosts.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, TwoHosts, why_not
from launching import Launch, TrialError, end_like_an_error, wait_until
from safetensors import safe_open
from screen import Screen
from two_hosts_job import EPOCHS

import torchrelay
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.errors import RelayError
from torchrelay.metadata.run_directory import RunDirectory

RANKS_PER_HOST = 2
PORT = 29500
LAUNCH_SECS = 90.0
OFF_AFTER = 2
_JOB = Path(__file__).with_name("two_hosts_job.py")


@dataclass(frozen=True)
class Seen:
    """What one launch brought: per host the exit code and everything printed."""

    codes: dict[str, int]
    lines: dict[str, list[str]]

    def saw(self, host: str) -> list[str]:
        """What the ranks of a host said of themselves."""
        return sorted(line.removeprefix("saw: ") for line in self.lines[host] if line.startswith("saw: "))

    def having(self, text: str) -> list[str]:
        """The lines of all hosts that contain a text."""
        return [line for lines in self.lines.values() for line in lines if text in line]


def torchrun(hosts: Sequence[Host], run: Path, epochs: int = EPOCHS) -> list[str]:
    """The command that a person would type on each of these hosts."""
    program = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    program += [f"--nproc-per-node={RANKS_PER_HOST}", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"]
    return [*program, f"--rdzv-endpoint={hosts[0].name}:{PORT}", str(_JOB), str(run), str(epochs)]


def launch(
    hosts: Sequence[Host],
    run: Path,
    logs: Path,
    *,
    off: Host | None = None,
    off_after: int = OFF_AFTER,
    private: dict[str, Path] | None = None,
) -> Seen:
    """Run the job on all hosts until it ends.

    `off` is switched off once an epoch after `off_after` was begun; `private` gives a host a directory
    that the others do not share.
    """
    program = torchrun(hosts, run)
    with ExitStack() as stack:
        running: dict[str, Launch] = {}
        for host in hosts:
            command = host.command(program, private=(private or {}).get(host.name))
            running[host.name] = stack.enter_context(Launch(command, logs / f"{host.name}.log"))
        if off is not None:
            _switch_off(off, running, off_after)
        codes = {name: one.wait(LAUNCH_SECS) for name, one in running.items()}
        return Seen(codes, {name: one.lines for name, one in running.items()})


def _switch_off(host: Host, running: dict[str, Launch], after: int) -> None:
    """Kill a host once any rank has printed that epoch `after` is done."""
    mark = re.compile(rf".* I r0/\d+ epoch {after} .*done \|")

    def due() -> bool:
        return any(mark.match(line) for one in running.values() for line in one.lines)

    wait_until(lambda: due() or any(one.ended() for one in running.values()), LAUNCH_SECS, f"epoch {after}")
    if not due():
        last = "\n".join(line for one in running.values() for line in one.lines[-10:])
        raise TrialError(f"the job ended before epoch {after}:\n{last}")
    host.kill()


def written_by(run: Path, checkpoint: Checkpoint, blob: str = "model") -> dict[str, int]:
    """How many bytes of a blob's tensors lie in the files that each node has written."""
    found = dict.fromkeys(checkpoint.nodes, 0)
    directory = run / "checkpoints" / "data" / checkpoint.entry.attempt_name
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(key) for key in file.keys() if key.startswith(f"{blob}.")]  # noqa: SIM118
        found[path.name.split(".")[0]] += sum(tensor.nbytes for tensor in tensors)
    return found


class Trial:
    """The parts of the trial, each a stage on the screen."""

    def __init__(self, hosts: tuple[Host, Host], root: Path, screen: Screen) -> None:
        self.hosts = hosts
        self.root = root
        self.run_directory = root / "run"
        self.screen = screen

    def run(self) -> None:
        """All parts; raises TrialError where something is not as promised."""
        beta = self.hosts[1]
        with self.screen.stage(f"train on two hosts; {beta.name} is switched off in the middle", 1) as tell:
            first = launch(self.hosts, self.run_directory, self.root, off=beta)
            before = torchrelay.open_checkpoint(self.run_directory)
            tell(1, f"epoch {before.position} is the newest; torchrun ended with {first.codes}")
        with self.screen.stage("the same command again on both hosts", 1) as tell:
            second = launch(self.hosts, self.run_directory, self.root)
            tell(1, f"torchrun ended with {second.codes}")
        if set(second.codes.values()) != {0}:
            raise TrialError(f"the second launch failed; see {self.root}")
        if not second.having(f"resuming from epoch {before.position}"):
            raise TrialError(f"the second launch did not resume from epoch {before.position}")
        self.show(first, second)

    def show(self, first: Seen, second: Seen) -> None:
        """What each host saw, and what is on disk."""
        rows = [
            [host.name, host.address, number, line]
            for host in self.hosts
            for number, seen in (("first", first), ("second", second))
            for line in seen.saw(host.name)
        ]
        self.screen.table(("host", "address", "launch", "a rank there saw"), rows)
        last = torchrelay.open_checkpoint(self.run_directory, epoch=EPOCHS)
        status = RunDirectory(self.run_directory).status()
        hosts = dict.fromkeys(last.manifest.world.hosts)
        self.screen.line(f"the last epoch is {last.position}, {status['state']} on hosts {', '.join(hosts)}")
        for node, nbytes in written_by(self.run_directory, last).items():
            self.screen.line(f"{node} wrote {nbytes:,} bytes of its model")


def main() -> int:
    """Run the trial; 0 when everything is as promised."""
    parser = argparse.ArgumentParser(prog="scripts/two-hosts", description="Trains across two hosts.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run and the logs here")
    parser.add_argument("--from", dest="base", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_like_an_error()
    screen = Screen()
    why = why_not()
    if why is not None:
        screen.line(why)
        return 3
    root = options.base / options.keep if options.keep else Path(tempfile.mkdtemp(prefix="torchrelay-hosts-"))
    root.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with TwoHosts() as hosts:
            for host in hosts:
                screen.line(f"host {host.name} is namespace {host.namespace}")
            Trial(hosts, root, screen).run()
    except RelayError as error:
        screen.line(f"the trial failed: {error}", style="bold red")
        screen.line(f"runs and logs are kept in {root}")
        return 1
    if not options.keep:
        shutil.rmtree(root)
    screen.line(f"all of this took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
