"""`local_cluster_train`: the same command once more, by torchrun, with several processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchrelay.errors import RelayError

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class LocalRanksError(RelayError):
    """The processes of a local job ended with a code that is not 0; they have said why."""


def command_of(
    config: str, overrides: Sequence[str], runner: str, count: int, run_dir: str | None
) -> list[str]:
    """How torchrun is told to run one profile on `count` processes; it chooses a free port itself. Pure."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    words += ["-m", "torchrelay", "run", "-m", config]
    for one in (*overrides, f"mode={runner}"):
        words += ["-o", one]
    return words if run_dir is None else [*words, "--run-dir", run_dir]


def run_local_ranks(command: Sequence[str]) -> None:
    """Run it to its end; signals to stop are passed on. Raises LocalRanksError with the code of the job.

    torchrun tells 1 for whatever its ranks ended with; the code of the run stands in its status.json.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, env=environment)  # noqa: S603 - our own words
    with process, _signals_to(process):
        code = process.wait()
    if code:
        error = LocalRanksError(
            f"the processes of this runner ended with {code}; what the first one said is above"
        )
        error.exit_code = code if code > 0 else 128 - code
        raise error


@contextmanager
def _signals_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    def pass_on(number: int, _: Any) -> None:
        # SIGUSR1 asks us to leave as SIGTERM does; torchrun would die of it and take nobody along.
        process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    try:
        before = {one: signal.signal(one, pass_on) for one in _PASSED_ON}
    except ValueError:  # not the main thread: whoever has it decides
        yield
        return
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
