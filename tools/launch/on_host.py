"""One host's share of a launch on a cluster: torchrun in this process, and the code that it cannot give.

    python -m torchrelay.tools.launch.on_host --layout 2x8 --index 0 --endpoint job-0.job:29400 --id ID \
        --notice 300 --run RUN -- train.py --lr 0.1

torchrun ends with 1 whatever became of its processes; a cluster that is to tell a preempted run from a failed
one needs the code of the guide's table (`outcome`). Without `--layout` the place in the job is what
torchrun's own variables say (PET_NNODES ...), as Kubeflow's trainer gives it. What the ranks print goes where
this process prints, because a cluster keeps that.

What it does not do: it starts nothing again; whoever made the host does that, by the code.
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
from torchrelay.runners.distributed import launcher_status
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
"""How long the hosts of a launch wait for each other: images are pulled meanwhile."""
_CONNECT_SECS, _PAUSE_SECS = 5.0, 1.0


def main(typed: Sequence[str] | None = None) -> int:
    """Run this host's ranks to their end; returns the code of the table."""
    chosen = _chosen(sys.argv[1:] if typed is None else typed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # the first process of a container has no default of its own
    try:
        verdict = _run(chosen)
    except RelayError as error:
        sys.stderr.write(f"torchrelay: {error}\n")
        return error.exit_code
    sys.stderr.write(f"torchrelay: exit code {verdict.code}: {verdict.why}\n")
    return verdict.code


def words_of(command: Sequence[str], *, notice: int, run: str | None, place: Sequence[str] = ()) -> list[str]:
    """Python's arguments that run `command` so; `place` are `--layout`, `--index`, `--endpoint`, `--id`."""
    known = [] if run is None else ["--run", run]
    return ["-m", f"{__package__}.on_host", *place, "--notice", str(notice), *known, "--", *command]


def time_to_leave(notice: int) -> int:
    """Seconds that the ranks have after SIGTERM, so that this process still ends within `notice`."""
    return max(1, notice - min(15, notice // 2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "on_host", description="One host's share of a launch.", allow_abbrev=False
    )
    parser.add_argument("--layout", type=layout_of, metavar="NxP", help="default: what PET_NNODES ... say")
    parser.add_argument(
        "--index", type=int, default=0, metavar="I", help="which of the hosts this is, from 0"
    )
    parser.add_argument("--endpoint", default="localhost:0", metavar="HOST:PORT", help="of the host 0")
    parser.add_argument("--host-variable", metavar="NAME", help="in it stands another HOST, where it is set")
    parser.add_argument("--id", default="none", help="the same on all hosts, and no other launch's")
    parser.add_argument("--notice", type=int, default=300, metavar="S", help="from SIGTERM to SIGKILL")
    parser.add_argument("--run", metavar="RUN", help="the run directory (default: heard from rank 0)")
    return parser


def _chosen(typed: Sequence[str]) -> argparse.Namespace:
    """What stands behind the first `--` is the command, whatever it looks like."""
    parser = _parser()
    split = typed.index("--") if "--" in typed else len(typed)
    chosen = parser.parse_args(typed[:split])
    chosen.command = typed[split + 1 :]
    if not chosen.command:
        parser.error("no command: what torchrun takes stands behind --")
    return chosen


def _run(chosen: argparse.Namespace) -> LaunchOutcome:
    before = status_at(chosen.run)
    nodes = chosen.layout.nodes if chosen.layout is not None else 1
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as own:
        directory = Path(os.environ.setdefault(launcher_status.DIRECTORY, own))
        options = [*_place(chosen), f"--shutdown-timeout={time_to_leave(chosen.notice)}"]
        well, asked = _torchrun([*options, *chosen.command], chosen.index)
        found = evidence_of(directory, well=well, nodes=nodes, asked=asked)
    found = replace(found, status=found.status or since(before, status_at(chosen.run)))
    return agreed(verdict_of(found), found.status)


def _place(chosen: argparse.Namespace) -> list[str]:
    """What tells torchrun where it is; waits for the host that the others meet at."""
    if chosen.layout is None:
        return []
    endpoint = _endpoint(chosen)
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


def _endpoint(chosen: argparse.Namespace) -> str:
    """Where the hosts meet; TorchX's schedulers say the host in a variable whose name they choose."""
    host = os.environ.get(chosen.host_variable or "")
    return f"{host}:{chosen.endpoint.rpartition(':')[2]}" if host else str(chosen.endpoint)


def _wait_for(endpoint: str) -> None:
    """Return when somebody listens there; PeerError after `JOIN_SECS`. torchrun alone gives up after 60 s."""
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
        "look whether it was started"
    )


def _torchrun(words: list[str], index: int) -> tuple[bool, str | None]:
    """Run torchrun here; returns whether all its ranks ended with 0, and the signal that asked it to end."""
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
        launcher_status.tell_agent(index, {"failures": failures_of(error)})
    except SignalException as error:
        asked = signal.Signals(error.sigval).name
    except Exception as error:  # the hosts did not meet, or lost each other: nobody's task failed
        sys.stderr.write(f"torchrelay: torchrun ended: {type(error).__name__}: {error}\n")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the ranks are gone, and so is this process in a moment
    return well, asked


def _leave(number: int, _: FrameType | None) -> NoReturn:
    """Before torchrun has handlers of its own nothing runs that could be saved: the same command goes on."""
    sys.exit(PREEMPTED if number == signal.SIGTERM else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
