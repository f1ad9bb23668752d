"""Read the launch environment of this process; hold its world and its node name.

A forked process has no world of its own.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Mapping, Sequence
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

    @property
    def store_prefix(self) -> str:
        """Prefix of this launch's keys; a nonce (`rendezvous`) separates its attempts."""
        return f"tr/{self.run_id or 'job'}"


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read the launch environment (`os.environ` by default).

    Raises UsageError naming the variable that is missing, not a number, or contradicts another.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return _alone(env)
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


def launcher_restarts(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if torchrun restarts failed processes (`--max-restarts` above 0)."""
    most = (os.environ if environ is None else environ).get("TORCHELASTIC_MAX_RESTARTS", "0")
    return most.isascii() and most.isdigit() and int(most) > 0


def _alone(env: Mapping[str, str]) -> LaunchEnv:
    """Return the environment of a single process; raises UsageError under a bare srun of several."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1:
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS is {tasks}, but RANK and WORLD_SIZE are not set, so these processes are "
            "not connected: start one torchrun per host (srun --ntasks-per-node=1 torchrun ...)"
        )
    return LaunchEnv(restart_count=_restarts(env, None))


def _number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    """Parse a variable as an integer."""
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
    """Raise UsageError for contradicting variables."""
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
_worlds: list[World] = []
_of_parents: list[World] = []
"""Kept alive, because their destructors would notify the other ranks."""


def enter(world: World) -> None:
    """Make a world the current one until it is left or a later one is entered."""
    _worlds.append(world)


def leave(world: World) -> None:
    """Remove a world that is closed."""
    _worlds.remove(world)


def current_world() -> World | None:
    """Return the open world; None if this process has none."""
    return _worlds[-1] if _worlds else None


def world_of_parent() -> World | None:
    """Return the world of the process that this one was forked from; None if it had none."""
    return _of_parents[-1] if _of_parents else None


def _reset_in_child() -> None:
    """Forget the worlds of the parent in a forked process."""
    for world in _worlds:
        atexit.unregister(world.close)
    _of_parents.extend(_worlds)
    _worlds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


_TRAINER = re.compile(r"trainer_(0|[1-9][0-9]*)")


def names_by_rank(declared: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Give each of `world_size` ranks the name of its node.

    A declared `trainer_<n>` gets rank n, other declared names the remaining ranks in the order of first use.
    Ranks without a declared node are named `trainer_<rank>`. Raises UsageError for duplicate names, more
    nodes than ranks, and a `trainer_<n>` whose rank does not exist.
    """
    _check_declared(declared, world_size)
    return numbered_first(declared, world_size)


def numbered_first(names: Sequence[str], size: int | None = None) -> tuple[str, ...]:
    """Order the nodes that one process emulates: each `trainer_<n>` at rank n if that rank exists.

    The others fill the remaining ranks in their order. Nothing is an error here: a process may emulate only
    `trainer_3`.
    """
    ranks = range(len(names) if size is None else size)
    numbered = {rank: name for name in names if (rank := _rank_of(name)) in ranks}
    others = iter([name for name in names if name not in numbered.values()])
    return tuple(numbered[rank] if rank in numbered else next(others, f"trainer_{rank}") for rank in ranks)


def _rank_of(name: str) -> int | None:
    """Return n for `trainer_<n>`, else None."""
    found = _TRAINER.fullmatch(name)
    return int(found.group(1)) if found else None


def _check_declared(declared: Sequence[str], world_size: int) -> None:
    """Raise UsageError if the declared names do not fit the ranks."""
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
