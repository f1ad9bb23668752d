"""Processes of a profile: sessions, local ranks, and global state that is restored afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.errors import RelayError
from torchrelay.runners.distributed.launcher import current_world

if TYPE_CHECKING:
    import torch

    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.session.distributed import DistributedSession


def session_on(device: torch.device) -> DistributedSession:
    """Create a session over the existing processes if they use `device`, else set up new ones."""
    from torchrelay.runners.session.distributed import DistributedSession

    world = current_world()
    if world is not None and world.device == device:
        return DistributedSession(world)
    if world is not None:
        world.close()
    return DistributedSession.from_env(device=device)


def release(session: SessionBase, *, world_stays: bool) -> None:
    """Release what a profile held; with `world_stays` the processes stay connected for the next one."""
    from torchrelay.runners.session.distributed import DistributedSession

    if session.closed:
        return
    if world_stays and isinstance(session, DistributedSession):
        session.release()
    else:
        session.close()


_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class LocalRanksError(RelayError):
    """The processes of a local job exited with a code other than 0; they have reported why."""


def command_of(
    config: str, overrides: Sequence[str], runner: str, count: int, run_dir: str | None
) -> list[str]:
    """Return the torchrun command that runs one profile on `count` processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    words += ["-m", "torchrelay", "run", "-m", config]
    for one in (*overrides, f"mode={runner}"):
        words += ["-o", one]
    return words if run_dir is None else [*words, "--run-dir", run_dir]


def run_local_ranks(command: Sequence[str]) -> None:
    """Run the command to its end, passing on stop signals. Raises LocalRanksError with its exit code.

    torchrun exits with code 1 for any failure of its ranks; the run's own code is in its status.json.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, env=environment)  # noqa: S603 - our own words
    with process, signals_to(process, _PASSED_ON):
        code = process.wait()
    if code:
        error = LocalRanksError(
            f"the processes of this runner exited with code {code}; the first error is printed above"
        )
        error.exit_code = code if code > 0 else 128 - code
        raise error


@contextmanager
def signals_to(process: subprocess.Popen[Any], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Pass these signals on to a process while the block runs."""

    def pass_on(number: int, _: Any) -> None:
        # SIGUSR1 asks to stop as SIGTERM does; torchrun would die of it without stopping its ranks.
        process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    try:
        before = {one: signal.signal(one, pass_on) for one in numbers}
    except ValueError:  # not the main thread, which alone handles signals
        yield
        return
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def apart() -> Iterator[None]:
    """At the end restore environment, working directory, `sys.path`, random streams and torch's defaults."""
    import torch

    from torchrelay.jobs.random import RandomStreams

    environ, folder, streams = dict(os.environ), Path.cwd(), RandomStreams.capture()
    paths = list(sys.path)
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    exact = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        for name, value in environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        os.chdir(folder)
        sys.path[:] = paths
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(exact)
        streams.restore()
