"""Outputs between processes: small values and tensors travel, others say where they stayed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_sessions import paired_sessions
from ranks import on_ranks

from torchrelay.errors import NotAllowedNowError, TaskFailedError
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.task import NotHere, Task
from torchrelay.runners.session.executor import decode_output, encode_output

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


def fetched(step, **options):
    """What `fetch` gives on each of two processes; the task was declared alike in both."""
    sessions = paired_sessions(2)

    def process(rank):
        group = TaskGroup(name="outputs")
        task = Task(step, group=group, **options)
        sessions[rank].run(group)
        return task.result.fetch() if options else task.result.fetch_all()

    return on_ranks(2, process)


def test_a_placed_task_gives_all_processes_the_same_value():
    """Tuples stay tuples, tensors tensors, inside containers too."""
    value = {"a": (1, 2.5), "t": torch.arange(6).reshape(2, 3)}
    here, there = fetched(lambda: value, node="trainer_1")
    assert here["a"] == there["a"] == (1, 2.5)
    assert torch.equal(here["t"], there["t"])


def test_the_values_of_all_nodes_are_known_everywhere():
    """fetch_all has the node of every process."""
    assert fetched(lambda ctx: ctx.rank) == [{"trainer_0": 0, "trainer_1": 1}] * 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(1 << 19), "bytes are not sent"),
        ("x" * (1 << 21), "bytes are not sent"),
        (object(), "object"),
    ],
)
def test_what_cannot_travel_stays_and_says_so(value, reason):
    """Big or foreign values are fetched where they were made; elsewhere the error names node and reason."""
    here, there = fetched(lambda: value, on="rank0")
    assert here is value or torch.equal(here, value)
    assert isinstance(there, NotAllowedNowError)
    assert "stays on trainer_0" in str(there)
    assert reason in str(there)


def test_a_failure_in_one_process_is_that_of_all():
    """The other process raises the same kind of error with the rank; nobody waits for ever."""

    def step(ctx):
        if ctx.rank == 1:
            raise ValueError("boom")

    here, there = fetched(step)
    assert isinstance(here, TaskFailedError)
    assert isinstance(there, TaskFailedError)
    assert isinstance(there.__cause__, ValueError)
    assert "rank 1" in str(here)
    assert "boom" in str(here)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans())
def test_tensors_come_back_bit_for_bit(dtype, shape, transposed):
    """Any type and shape, empty and 0-d ones and views included."""
    tensor = (torch.randn(shape, dtype=torch.float64) * 10).to(dtype)
    tensor = tensor.mT if transposed and tensor.dim() > 1 else tensor
    back = decode_output(encode_output("x", tensor, "trainer_0"))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_a_sparse_tensor_stays():
    """Only plain dense tensors are sent."""
    told = decode_output(encode_output("x", torch.eye(2).to_sparse(), "trainer_0"))
    assert isinstance(told, NotHere)
