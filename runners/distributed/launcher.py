"""The launch environment of a process, its world, and what is left for the launcher when it ends.

A forked process has no world of its own. These files go to the attempt's directory
(`TORCHRELAY_LAUNCH_DIR`); write errors are ignored, because training does not depend on them:

    run.json       the run, written once its log is held: then its status.json describes this attempt
    failure.json   the first failure that the ranks agreed on
    agent_N.json   how the agent of a node ended, and which of its ranks failed
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class LaunchEnv:
    """The launch environment of one process of a job.

    `launched` is False for plain `python train.py`: one process and no store. `agent_store`: the launcher
    hosts the store at `master_addr:master_port`, otherwise rank 0 does. `elastic`: torchrun is the parent, so
    its death ends the process. `restart_count` counts failures seen by this host's launcher, so it may differ
    by host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host_index: int = 0
    role: str = "default"
    master_addr: str = ""
    master_port: int = 0
    restart_count: int = 0
    run_id: str | None = None
    launched: bool = False
    elastic: bool = False
    agent_store: bool = False

    @property
    def hosts_store(self) -> bool:
        """True if this process serves the store to the others."""
        return self.launched and not self.agent_store and self.rank == 0


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read the launch environment; raises UsageError naming the variable that is invalid."""
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks.isdigit() and int(tasks) > 1:
            raise UsageError(
                f"SLURM_STEP_NUM_TASKS is {tasks}, but RANK and WORLD_SIZE are not set, so these processes "
                "are not connected: start one torchrun per host (srun --ntasks-per-node=1 torchrun ...)"
            )
        return LaunchEnv(restart_count=_restarts(env, None))
    if missing := [name for name in PLACE if not env.get(name)]:
        present = next(name for name in ("RANK", "WORLD_SIZE") if name in env)
        raise UsageError(
            f"{' and '.join(missing)} missing in the environment although {present} is set: "
            f"start with torchrun, or unset {present} to run a single process"
        )
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE", "False")
    if agent_store not in ("True", "False"):
        raise UsageError(
            f"TORCHELASTIC_USE_AGENT_STORE={agent_store!r} in the environment: expected True or False"
        )
    run_id = env.get("TORCHELASTIC_RUN_ID")
    run_id = None if run_id in ("", "none") else run_id
    found = LaunchEnv(
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE", least=1),
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1, least=1),
        host_index=_number(env, "GROUP_RANK", 0),
        role=env.get("ROLE_NAME", "default"),
        master_addr=env["MASTER_ADDR"],
        master_port=_number(env, "MASTER_PORT", least=1),
        restart_count=_restarts(env, run_id),
        run_id=run_id,
        launched=True,
        elastic="TORCHELASTIC_RUN_ID" in env,
        agent_store=agent_store == "True",
    )
    _check(found, env)
    return found


def launcher_restarts() -> bool:
    """Return True if torchrun restarts failed processes (`--max-restarts` above 0)."""
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return most.isascii() and most.isdigit() and int(most) > 0


def _number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isascii() or not text.strip().isdigit() or int(text) < least:
        raise UsageError(f"invalid {name}={text!r} in the environment: expected a number from {least}")
    return int(text)


def _restarts(env: Mapping[str, str], run_id: str | None) -> int:
    """Return the number of restarts; Slurm's if torchrun has no run id, as each requeue is a new launch."""
    slurm = env.get("SLURM_JOB_ID") and not run_id
    return _number(env, "SLURM_RESTART_COUNT" if slurm else "TORCHELASTIC_RESTART_COUNT", 0)


def _check(found: LaunchEnv, env: Mapping[str, str]) -> None:
    for low, high in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if _number(env, low, 0) >= _number(env, high, 1):
            raise UsageError(
                f"{low}={env.get(low)} is not below {high}={env.get(high, 1)} in the environment"
            )
    if found.local_world_size > found.world_size:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={found.local_world_size} is above WORLD_SIZE={found.world_size} "
            "in the environment"
        )
    if found.master_port > _HIGHEST_PORT:
        raise UsageError(f"invalid MASTER_PORT={found.master_port} in the environment: expected a port")


World = Any
"""`distributed.world.World`, which imports this module."""
worlds: list[World] = []
"""Open worlds of this process; the last one is current."""
_of_parents: list[World] = []  # kept alive, because their destructors would notify the other ranks


def current_world() -> World | None:
    """Return the open world; None if this process has none."""
    return worlds[-1] if worlds else None


def world_of_parent() -> World | None:
    """Return the world of the process that this one was forked from; None if it had none."""
    return _of_parents[-1] if _of_parents else None


def _reset_in_child() -> None:
    for world in worlds:
        atexit.unregister(world.close)
    _of_parents.extend(worlds)
    worlds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


_TRAINER = re.compile(r"trainer_(0|[1-9][0-9]*)")


def names_by_rank(declared: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Give each of `world_size` ranks the name of its node.

    A declared `trainer_<n>` gets rank n, other declared names the remaining ranks in the order of first use.
    Ranks without a declared node are named `trainer_<rank>`. Raises UsageError for duplicate names, more
    nodes than ranks, and a `trainer_<n>` whose rank does not exist.
    """
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice:
        raise UsageError(f"node {twice[0]!r} is declared twice: use a name of its own for each node")
    if len(declared) > world_size:
        raise UsageError(
            f"the job declares {len(declared)} nodes ({', '.join(declared)}) but there are {world_size} "
            f"ranks: start at least {len(declared)} processes"
        )
    for name in declared:
        rank = _rank_of(name)
        if rank is not None and rank >= world_size:
            raise UsageError(
                f"node {name!r} belongs to rank {rank}, but the ranks are 0 to {world_size - 1}: "
                f"start at least {rank + 1} processes"
            )
    return numbered_first(declared, world_size)


def numbered_first(names: Sequence[str], size: int | None = None) -> tuple[str, ...]:
    """Order emulated nodes: each `trainer_<n>` at rank n if that exists, the others in the rest."""
    ranks = range(len(names) if size is None else size)
    numbered = {rank: name for name in names if (rank := _rank_of(name)) in ranks}
    others = iter([name for name in names if name not in numbered.values()])
    return tuple(numbered[rank] if rank in numbered else next(others, f"trainer_{rank}") for rank in ranks)


def _rank_of(name: str) -> int | None:
    found = _TRAINER.fullmatch(name)
    return int(found.group(1)) if found else None


_MOST_TRACEBACK = 64 << 10


@dataclass(frozen=True)
class Failure:
    """The first failure of a job: rank, host, task, traceback and exit code."""

    rank: int
    host: str
    task: str
    traceback: str
    exit_code: int

    def encode(self) -> bytes:
        """Encode the failure for the store; a very long traceback keeps its end."""
        fields = asdict(self) | {"traceback": self.traceback[-_MOST_TRACEBACK:]}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Decode a failure."""
        return cls(**json.loads(data))

    def headline(self) -> str:
        """Return rank, host, task and the last line of the traceback."""
        lines = self.traceback.strip().splitlines()
        return f"rank {self.rank} on {self.host} failed in {self.task}: {lines[-1] if lines else 'unknown'}"

    def report(self, rank: int) -> str:
        """Return the text that `rank` prints."""
        if "\n" not in self.traceback.strip():
            return f"torchrelay: [rank {rank}] {self.headline()}\n"
        head = f"torchrelay: [rank {rank}] first failure: rank {self.rank} on {self.host}, in {self.task}"
        return f"{head}\n{self.traceback.rstrip()}\n"


SECS = 4.0
NOTE_SECS = 2.0


class Calls(list[Callable[..., None]]):
    """Functions to call before the process ends, each in a thread of its own."""

    def forget(self, call: Callable[..., None]) -> None:
        """Remove a call; does nothing if it is not registered."""
        if call in self:
            self.remove(call)

    def make(self, *values: Any, secs: float) -> None:
        """Call all in parallel with these values, each for at most `secs`; never raises."""
        _within(secs, [partial(call, *values) for call in self])


notes = Calls()
"""Called with a reason and an exit code before a thread ends the process because of a failure."""
final_calls = Calls()


def end_process(code: int) -> None:
    """Flush the output and end this process at once, also while its threads are busy.

    The files of a remote run are uploaded first, for at most four seconds.
    """
    final_calls.make(secs=SECS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nothing reads it any more
            continue
    os._exit(code)


def write_stderr(text: str) -> None:
    """Write to stderr; never raises, because the reader may have gone with the launcher."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def write_stderr_within(text: str, secs: float = SECS) -> None:
    """Write to stderr for at most `secs`, because a reader that has stopped reading must not block the exit.

    Nothing is written if no thread can be started.
    """
    _within(secs, [lambda: write_stderr(text)])


def _within(secs: float, calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads, each for at most `secs`; errors are ignored."""

    def quietly(call: Callable[[], None]) -> None:
        with suppress(Exception):
            call()

    threads = []
    for call in calls:
        thread = threading.Thread(target=quietly, args=(call,), daemon=True)
        with suppress(RuntimeError):  # no more threads available; the process ends all the same
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(secs)


DIRECTORY = "TORCHRELAY_LAUNCH_DIR"
LAUNCH_ID = "TORCHRELAY_LAUNCH_ID"
ATTEMPT = "TORCHRELAY_LAUNCH_ATTEMPT"
NODE = "TORCHRELAY_LAUNCH_NODE"
NODE_IN = "TORCHRELAY_LAUNCH_NODE_IN"
"""Name of the variable in which a scheduler gives an agent its node number, from 0, instead of NODE."""
LAUNCHER = "TORCHRELAY_LAUNCHER_PID"
_MOST = 1 << 20


def write_run(run: Path) -> None:
    """Write which run this process works on; the newest call counts."""
    _write("run.json", {"run": str(run), "host": socket.gethostname(), "pid": os.getpid()})


def write_failure(rank: int, host: str, text: str, exit_code: int) -> None:
    """Write the first failure of the job; only the first rank that calls it does so."""
    _write("failure.json", {"rank": rank, "host": host, "text": text, "exit_code": exit_code}, once=True)


def write_agent(node: int, end: Mapping[str, Any]) -> None:
    """Write how an agent of torchrun ended."""
    _write(f"agent_{node}.json", end)


def read_status(directory: Path, name: str) -> dict[str, Any]:
    """Read a status file; empty if it is missing or unreadable."""
    try:
        with (directory / name).open("rb") as file:
            found = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(name: str, what: Mapping[str, Any], *, once: bool = False) -> None:
    """Publish a JSON file in the launch directory, if there is one."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    path = Path(directory, name)
    own = path.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError):
        own.write_text(json.dumps(what))
        if once:
            with suppress(FileExistsError):
                path.hardlink_to(own)
            own.unlink()
        else:
            own.replace(path)
