"""The ancestor's toy job: totals that a human can add up.

Each node has the numbers 0..9, a read position and a total that starts at 100; an epoch adds at most
three numbers. Epoch 4 finds the end of the data, and the job stops.
"""

from __future__ import annotations

import torch

from torchrelay import DatasetReader, Job, Node, ReaderWithLimit, Task, Workspace

EXPECTED = [103, 115, 136, 145]
"""The total after epochs 1 to 4."""


def add_toy_node(job: Job, node: int) -> None:
    """Give a job the toy's tasks on `trainer_<node>`; call inside `with job:`."""
    with Node(f"trainer_{node}"):
        with job.init_group:
            Task(begin)
        reader = ReaderWithLimit(DatasetReader("val"), num_iter=3)

        def add(ws: Workspace) -> None:
            for batch in reader.batches(ws):
                ws["total"] = ws["total"] + batch

        Task(add)
        job.add_stop_condition(reader.data_finished())


def begin(ws: Workspace) -> None:
    """The init task: data and total."""
    ws.update(val=torch.arange(10), total=torch.tensor([100]))


def toy(*nodes: int) -> Job:
    """A job of toy nodes (by default node 0 alone)."""
    with Job() as job:
        for node in nodes or (0,):
            add_toy_node(job, node)
    return job
