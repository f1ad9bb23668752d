"""Processes of a profile: sessions over them, ranks on this machine, and what is put back behind it."""

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
from torchrelay.runners.distributed.environment import current_world

if TYPE_CHECKING:
    import torch

    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.session.distributed import DistributedSession


def session_on(device: torch.device) -> DistributedSession:
    """A session of its own, over the processes that have met if they compute on `device`, else met anew."""
    from torchrelay.runners.session.distributed import DistributedSession

    world = current_world()
    if world is not None and world.device == device:
        return DistributedSession(world)
    if world is not None:
        world.close()
    return DistributedSession.from_env(device=device)


def let_go(session: SessionBase, *, world_stays: bool) -> None:
    """Let go of what a profile kept; the processes stay together for the next one where `world_stays`."""
    from torchrelay.runners.session.distributed import DistributedSession

    if session.closed:
        return
    if world_stays and isinstance(session, DistributedSession):
        session.release()
    else:
        session.close()


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
    with process, signals_to(process, _PASSED_ON):
        code = process.wait()
    if code:
        error = LocalRanksError(
            f"the processes of this runner ended with {code}; what the first one said is above"
        )
        error.exit_code = code if code > 0 else 128 - code
        raise error


@contextmanager
def signals_to(process: subprocess.Popen[Any], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """While the block runs, these signals are passed on to a process."""

    def pass_on(number: int, _: Any) -> None:
        # SIGUSR1 asks us to leave as SIGTERM does; torchrun would die of it and take nobody along.
        process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    try:
        before = {one: signal.signal(one, pass_on) for one in numbers}
    except ValueError:  # not the main thread: whoever has it decides
        yield
        return
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def apart() -> Iterator[None]:
    """Put environment, working directory, `sys.path`, random streams, torch's defaults back in the end."""
    import torch

    from torchrelay.jobs.random import RandomStreams

    environ, folder, streams = dict(os.environ), Path.cwd(), RandomStreams.capture()
    paths = list(sys.path)
    dtype, gradients, exact = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
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
