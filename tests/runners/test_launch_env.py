"""What torchrun tells, read and checked."""

from __future__ import annotations

import pytest

from torchrelay.errors import UsageError
from torchrelay.runners.distributed.launcher import read_launch_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "ROLE_NAME": "trainer",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_plain_python_is_a_world_of_one():
    """Without a launcher there is one process, and no store."""
    env = read_launch_env({})
    assert (env.rank, env.world_size, env.launched, env.hosts_store) == (0, 1, False, False)


def test_reads_what_torchrun_sets():
    """Every value of torchrun is taken over."""
    env = read_launch_env(TORCHRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 4, 1, 2)
    assert (env.host_index, env.role, env.master_addr, env.master_port) == (1, "trainer", "host0", 29500)
    assert (env.restart_count, env.run_id) == (2, "job-7")
    assert env.elastic and env.agent_store and not env.hosts_store


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is above"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "yes"}, "TORCHELASTIC_USE_AGENT_STORE='yes'"),
        ({"TORCHELASTIC_RESTART_COUNT": "1.5"}, "TORCHELASTIC_RESTART_COUNT='1.5'"),
    ],
)
def test_invalid_values_name_the_variable(change, named):
    """A value that cannot be is one clear error that names its variable."""
    with pytest.raises(UsageError) as caught:
        read_launch_env(TORCHRUN | change)
    assert named in str(caught.value)


@pytest.mark.parametrize("gone", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_values_name_the_variable(gone):
    """Half a launch environment is refused, not taken for a single process."""
    with pytest.raises(UsageError, match=gone):
        read_launch_env({name: value for name, value in TORCHRUN.items() if name != gone})


def test_processes_of_srun_without_torchrun_are_refused():
    """Several processes of one Slurm step that would each train alone are told how to start."""
    with pytest.raises(UsageError, match="torchrun"):
        read_launch_env({"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "9"})


@pytest.mark.parametrize("unnamed", ["none", ""])
def test_slurm_counts_where_torchrun_has_no_id(unnamed):
    """Attempts of one launch have store prefixes of their own, those of a requeued Slurm job too."""
    env = TORCHRUN | {"TORCHELASTIC_RUN_ID": unnamed}
    assert (read_launch_env(env).run_id, read_launch_env(env).restart_count) == (None, 2)
    slurm = env | {"SLURM_JOB_ID": "9"}
    counts = [read_launch_env(slurm | {"SLURM_RESTART_COUNT": n}).restart_count for n in ("0", "4")]
    assert counts == [0, 4]
    assert read_launch_env(slurm | {"TORCHELASTIC_RUN_ID": "job-7"}).restart_count == 2
