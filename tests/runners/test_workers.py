"""Workers of loaders and pools while their trainer is asked to leave, real processes in a group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import sample
from torchrun import REPOSITORY, children_of, clean_environment, interruptible, wait_for_the_end_of

from torchrelay.runners.session.stop_requests import SAME_INTERRUPT_SECS

PROGRAM = """
import json, os, sys, time
from functools import partial
import torch
from torch.utils.data import DataLoader, Dataset
from torchrelay import EpochLoader, Job, JobRunner, max_epochs

class Samples(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor([float(index)])

def greet(number):
    torch.manual_seed(number)

if __name__ == "__main__":
    run, how = sys.argv[1:]
    torch.set_num_threads(1)
    options = dict(batch_size=2, num_workers=2)
    if how == "own":
        loader = EpochLoader(Samples(), **options)
    elif how == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader
        loader = StatefulDataLoader(Samples(), worker_init_fn=greet, **options)
    else:
        loader = DataLoader(Samples(), multiprocessing_context=how, worker_init_fn=greet, **options)
    total = torch.zeros(1)
    job = Job(
        "workers", blobs=dict(total=total, **({"loader": loader} if how in ("own", "stateful") else {}))
    )

    @job.epoch
    def train(ctx):
        for number, batch in enumerate(ctx.steps(loader)):
            total.add_(batch.sum() if torch.is_tensor(batch) else batch[0].sum())
            if ctx.attempt == 0 and number == 3:
                print(json.dumps("ready"), flush=True)
                sys.stdin.readline()

    job.stop_when(max_epochs(2))
    JobRunner(job, run, code=False).main([])
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts the program in a process group of its own, and ends what is left of it."""
    program, begun = tmp_path / "program.py", []
    program.write_text(PROGRAM)
    environment = clean_environment() | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}

    def call(how: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(program), str(tmp_path / "run"), how]
        pipes: Any = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
        with interruptible():
            begun.append(subprocess.Popen(words, env=environment, start_new_session=True, **pipes))
        return begun[-1]

    yield call
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def descendants(process: int) -> list[int]:
    """The workers, and what forks for them."""
    children = children_of(process)
    return children + [one for child in children for one in descendants(child)]


def total_of(run: Path) -> float:
    from torchrelay import open_checkpoint

    return float(open_checkpoint(run).load_tensors("total")["total"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("own", signal.SIGTERM),  # test_worker_hunt sends all the others
        *sample([], [("spawn", signal.SIGTERM)]),
        ("forkserver", signal.SIGTERM),
        ("stateful", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_to_the_whole_group_preempts_the_trainer_alone(
    start: Any, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    """Loaders of any kind go on to the boundary: exit code 75, no worker stays, and the same command ends."""
    if how == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader")
    process = start(how)
    assert json.loads(process.stdout.readline()) == "ready"
    workers = descendants(process.pid)
    assert len(workers) >= 2
    os.killpg(process.pid, number)
    process.communicate("go\n", timeout=120)
    assert process.returncode == 75
    wait_for_the_end_of(workers, 20)
    assert start(how).communicate(timeout=120) is not None
    assert total_of(tmp_path / "run") == 2 * sum(range(40))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [75, 130])
def test_a_second_ctrl_c(start: Any, tmp_path: Path, code: int) -> None:
    """Passed on twice it is one request; pressed again it ends the trainer in its step, and its workers."""
    process = start("own")
    assert json.loads(process.stdout.readline()) == "ready"
    workers = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert any("Ctrl-C: saving" in line for line in process.stderr)
    time.sleep(SAME_INTERRUPT_SECS if code == 130 else 0)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate("go\n" if code == 75 else None, timeout=120)
    assert process.returncode == code
    wait_for_the_end_of(workers, 20)
    start("own").communicate("go\n", timeout=120)
    assert total_of(tmp_path / "run") == 2 * sum(range(40))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["own", "forkserver"])
def test_no_worker_outlives_a_trainer_that_was_killed(start: Any, how: str) -> None:
    """SIGKILL of the trainer alone ends its workers within seconds."""
    process = start(how)
    assert json.loads(process.stdout.readline()) == "ready"
    workers = descendants(process.pid)
    process.kill()
    process.communicate(timeout=30)
    wait_for_the_end_of(workers, 20)


@pytest.mark.timeout(300)
def test_a_worker_that_dies_of_itself_is_a_failure(start: Any) -> None:
    """SIGKILL of a worker is no request to leave: the run fails and says what died."""
    process = start("own")
    assert json.loads(process.stdout.readline()) == "ready"
    workers = descendants(process.pid)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    process.communicate("go\n", timeout=120)
    assert process.returncode == 1


OF_THE_PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, time
from torchrelay import Job, JobRunner, max_epochs

def wait(up):
    up.put("up")
    time.sleep(100)

def wait_and_clean(up):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    wait(up)

def with_a_child(up):
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,))
    child.start()
    child.terminate()
    child.join(60)
    sys.exit(5 if child.exitcode == -signal.SIGTERM else 6)

def end_of(context, target):
    up = context.Queue()
    process = context.Process(target=target, args=(up,))
    process.start()
    if target is not with_a_child:
        up.get()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            os.kill(process.pid, number)
        process.terminate()
    process.join(60)
    return process.exitcode

if __name__ == "__main__":
    job, ends = Job("pools"), []

    @job.epoch
    def work(ctx):
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(2) as pool:
            ends.append(pool.map(abs, [-1]))
        pool.join()
        ends.extend(end_of(context, one) for one in (wait, wait_and_clean, with_a_child))

    job.stop_when(max_epochs(1))
    JobRunner(job).train()
    ends.append(end_of(multiprocessing.get_context(sys.argv[1]), wait))
    print(ends)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", sample(["fork"], ["fork", "forkserver"]))
def test_processes_of_the_program_end_when_it_says_so(tmp_path: Path, how: str) -> None:
    """Pools and processes of a task, their own children, and those after the run obey terminate()."""
    program = tmp_path / "program.py"
    program.write_text(OF_THE_PROGRAM)
    environment = clean_environment() | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), how]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, timeout=240, capture_output=True, text=True, check=False
    )
    after = "-10" if how == "fork" else "-15"  # a fork server forks with what it began with
    assert done.stdout == f"[[1], -15, 3, 5, {after}]\n", done
