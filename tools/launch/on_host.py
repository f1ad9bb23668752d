"""Run one host of a launch on a cluster: torchrun in this process, with torchrelay's exit codes.

    python -m torchrelay.tools.launch.on_host --layout 2x8 --index 0 --endpoint job-0.job:29400 --id ID \
        --notice 300 --run RUN -- train.py --lr 0.1

torchrun exits with code 1 for every failure, but a cluster must distinguish preempted from failed runs
(`outcome`). Without `--layout`, torchrun's own variables (PET_NNODES ...) describe the job, as set by
Kubeflow Trainer. The ranks print to this process's stdout and stderr, which the cluster keeps.

It restarts nothing; the cluster does that, depending on the exit code.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torchrelay.errors import PeerError, RelayError
from torchrelay.runners.distributed import launcher
from torchrelay.runners.monitoring.console import arg
from torchrelay.tools.launch.outcome import (
    INTERRUPTED,
    PREEMPTED,
    LaunchOutcome,
    agreed,
    evidence_of,
    since,
    status_at,
    verdict_of,
)
from torchrelay.tools.launch.request import layout_of

JOIN_SECS = 1800
"""How long the hosts of a launch wait for each other, for example while images are pulled."""
_CONNECT_SECS, _PAUSE_SECS = 5.0, 1.0


def main(typed: Sequence[str] | None = None) -> int:
    """Run this host's ranks; returns the exit code."""
    chosen = _chosen(sys.argv[1:] if typed is None else typed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)  # pid 1 of a container has no default handlers
    try:
        verdict = _run(chosen)
    except RelayError as error:
        sys.stderr.write(f"torchrelay: {error}\n")
        return error.exit_code
    sys.stderr.write(f"torchrelay: exit code {verdict.code}: {verdict.why}\n")
    return verdict.code


def words_of(command: Sequence[str], *, notice: int, run: str | None, place: Sequence[str] = ()) -> list[str]:
    """Return Python's arguments that run `command` on a host; `place` are `--layout`, `--index` and so on."""
    known = [] if run is None else ["--run", run]
    return ["-m", f"{__package__}.on_host", *place, "--notice", str(notice), *known, "--", *command]


def time_to_leave(notice: int) -> int:
    """Return the seconds from SIGTERM to SIGKILL of the ranks, so that this process ends within `notice`."""
    return max(1, notice - min(15, notice // 2))


def _chosen(typed: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("on_host", description="Run one host of a launch.", allow_abbrev=False)
    for one in (
        arg("--layout", "nodes and ranks (default: PET_NNODES ...)", "NxP", type=layout_of),
        arg("--index", "index of this host, from 0", "I", type=int, default=0),
        arg("--endpoint", "address of host 0", "HOST:PORT", default="localhost:0"),
        arg("--host-variable", "variable that overrides HOST", "NAME"),
        arg("--id", "unique id of the launch", default="none"),
        arg("--notice", "seconds from SIGTERM to SIGKILL", "S", type=int, default=300),
        arg("--run", "run directory (default: reported by rank 0)", "RUN"),
    ):
        one(parser)
    split = typed.index("--") if "--" in typed else len(typed)
    chosen = parser.parse_args(typed[:split])
    chosen.command = typed[split + 1 :]
    if not chosen.command:
        parser.error("no command: give it after --, as for torchrun")
    return chosen


def _run(chosen: argparse.Namespace) -> LaunchOutcome:
    before = status_at(chosen.run)
    nodes = chosen.layout.nodes if chosen.layout is not None else 1
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as own:
        directory = Path(os.environ.setdefault(launcher.DIRECTORY, own))
        options = [*_place(chosen), f"--shutdown-timeout={time_to_leave(chosen.notice)}"]
        well, asked = _torchrun([*options, *chosen.command], chosen.index)
        found = evidence_of(directory, well=well, nodes=nodes, asked=asked)
    found = replace(found, status=found.status or since(before, status_at(chosen.run)))
    return agreed(verdict_of(found), found.status)


def _place(chosen: argparse.Namespace) -> list[str]:
    """Return torchrun's options for this host, after waiting for host 0."""
    if chosen.layout is None:
        return []
    endpoint = str(chosen.endpoint)
    if host := os.environ.get(chosen.host_variable or ""):  # TorchX gives the host in a variable
        endpoint = f"{host}:{endpoint.rpartition(':')[2]}"
    if chosen.index > 0:
        _wait_for(endpoint)
    return [
        f"--nnodes={chosen.layout.nodes}",
        f"--nproc-per-node={chosen.layout.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={chosen.id}",
        f"--rdzv-conf=is_host={int(chosen.index == 0)},join_timeout={JOIN_SECS}",
    ]


def _wait_for(endpoint: str) -> None:
    """Wait until host 0 accepts connections (torchrun waits only 60 s); PeerError after `JOIN_SECS`."""
    host, _, port = endpoint.rpartition(":")
    end = time.monotonic() + JOIN_SECS
    reason: OSError | None = None
    while time.monotonic() < end:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECS).close()
        except OSError as error:
            reason = error
        else:
            return
        time.sleep(_PAUSE_SECS)
    raise PeerError(
        f"host 0 of this launch did not answer at {endpoint} within {JOIN_SECS} s ({reason}): "
        "check that it was started"
    )


def _torchrun(words: list[str], index: int) -> tuple[bool, str | None]:
    """Run torchrun; returns True if all ranks succeeded, and the signal that torchrun received, if any."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from torchrelay.tools.launch.agent import failures_of

    asked = None
    well = False
    try:
        run.main(words)
        well = True
    except ChildFailedError as error:
        launcher.write_agent(index, {"failures": failures_of(error)})
    except SignalException as error:
        asked = signal.Signals(error.sigval).name
    except Exception as error:  # the rendezvous failed, no task
        sys.stderr.write(f"torchrelay: torchrun ended: {type(error).__name__}: {error}\n")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the ranks are gone and this process is about to exit
    return well, asked


def _exit(number: int, _: FrameType | None) -> NoReturn:
    """Exit on a signal before torchrun has installed its handlers; nothing runs yet."""
    sys.exit(PREEMPTED if number == signal.SIGTERM else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
