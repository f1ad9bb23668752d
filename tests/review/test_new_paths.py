"""Attacks on direct writes, reads by threads, saves behind the training and what is remembered of saves."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from leaf_store import load, save
from ranks import local_store, on_ranks
from tear_job import torn, train
from torch import nn
from two_tensor import TwoTensor, two

from torchrelay import load_into, open_checkpoint, save_blobs
from torchrelay.checkpoint.asynchronous import gate
from torchrelay.checkpoint.asynchronous.copying import Copier
from torchrelay.checkpoint.asynchronous.stage import Stage
from torchrelay.checkpoint.disk.side_by_side import WORTH_IT, each
from torchrelay.checkpoint.replicas import ReplicaCheck
from torchrelay.errors import PeerError
from torchrelay.jobs.collector import undisturbed
from torchrelay.jobs.peers import together
from torchrelay.runners.distributed.store_peers import StorePeers


class Tree:
    """An object whose state is a dict."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("first", ["w", "w.a"])
def test_a_tensor_called_like_a_part_of_a_wrapper_keeps_its_own_content(first: str) -> None:
    """Two tensors of one state whose paths read alike are two leaves, also where one is inside a wrapper."""

    def state(seed: int) -> dict[str, Any]:
        parts = {"w": two(seed), "w.a": torch.full((3, 4), float(seed))}
        return {name: parts[name] for name in sorted(parts, key=lambda name: name != first)}

    target = Tree(**state(8))
    load(save({"t": Tree(**state(3))}), {"t": target})
    assert isinstance(target.state["w"], TwoTensor)
    assert torch.equal(target.state["w"].a, two(3).a) and torch.equal(target.state["w"].b, two(3).b)
    assert torch.equal(target.state["w.a"], torch.full((3, 4), 3.0))


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("how", ["file", "epoch"])
def test_a_load_into_live_objects_waits_for_a_save_that_still_copies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, atomic: bool
) -> None:
    """Neither a file nor an epoch that is loaded in a task is found in the epoch that was saved before it."""
    copy_late, loaded, copying = Copier.copy_late, threading.Event(), []

    def late(*given: Any) -> None:
        if copying:
            loaded.wait(0.5)  # without the gate the load comes first
        copy_late(*given)

    monkeypatch.setattr(Copier, "copy_late", late)
    steps: list[int] = []

    def warm_start(ctx: Any, trainee: Any) -> None:
        steps.append(ctx.epoch)
        if steps.count(ctx.epoch) > 1 or ctx.epoch < 3:
            copying[:] = [ctx.epoch] if ctx.epoch >= 2 else []
            return
        if how == "file":
            changed = {name: value.clone() for name, value in trainee.model.state_dict().items()}
            changed["3.weight"][60:64] += 1  # where no stretch is looked at
            other = type(trainee)(5).model
            other.load_state_dict(changed)
            save_blobs(tmp_path / "w.safetensors", {"model": other}, overwrite=True)
            load_into(tmp_path / "w.safetensors", {"model": trainee.model}, atomic=atomic)
        else:
            open_checkpoint(tmp_path / "run", epoch=0).load({"model": trainee.model}, atomic=atomic)
        loaded.set()

    truth = train(tmp_path / "run", 3, asynchronous=True, before_step=warm_start)
    assert loaded.is_set() and copying
    assert [epoch for epoch in (1, 2, 3) if torn(tmp_path / "run", epoch, truth[epoch])] == []


def test_without_more_threads_a_load_is_done_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have no more threads still loads."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    each(done.append, range(5), WORTH_IT, 3)
    assert done == [0, 1, 2, 3, 4]


def test_an_interrupted_load_leaves_no_thread_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Ctrl-C has arrived while other threads read, no memory of the caller's is written any more."""
    go, waiting = threading.Event(), threading.Event()
    join, hit = threading.Thread.join, []

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if not hit:
            hit.append(self)
            go.set()
            raise KeyboardInterrupt
        join(self, timeout)

    def work(item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert waiting.wait(60)
        else:
            waiting.set()
            assert go.wait(60)
            time.sleep(0.05)
            written.append(item)

    written: list[int] = []
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        each(work, range(2), WORTH_IT, 2)
    assert hit and not hit[0].is_alive() and len(written) == 1


def test_ranks_at_different_places_hear_so_whatever_they_post() -> None:
    """A post of another topic has any form: rank 0, which shortens reports, answers all the same."""
    served = local_store()

    def work(rank: int) -> Any:
        peers = StorePeers(served.clone("places"), rank, 2)
        if rank:
            return peers.exchange("probed", None)
        return together(peers, "save: write", lambda: {"bytes": 1}, for_first=True)

    began = time.monotonic()
    errors = on_ranks(2, work)
    assert time.monotonic() - began < 20
    for error in errors:
        assert isinstance(error, PeerError) and "different places" in str(error)


def in_child(work: Any) -> int:
    """The exit status of a forked child that does this; it is killed after 20 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


def test_a_child_forked_during_a_save_collects_its_cycles() -> None:
    """Workers of data that are forked while a thread saves do not live without the collector."""
    inside, leave = threading.Event(), threading.Event()

    def saving() -> None:
        with undisturbed():
            inside.set()
            leave.wait(60)

    def collects() -> int:
        with undisturbed():
            off = not gc.isenabled()
        return 0 if off and gc.isenabled() else 3

    thread = threading.Thread(target=saving)
    thread.start()
    try:
        assert inside.wait(60) and not gc.isenabled()
        assert in_child(lambda: 0 if gc.isenabled() else 2) == 0
        assert in_child(collects) == 0
        assert not gc.isenabled()
    finally:
        leave.set()
        thread.join()
    assert gc.isenabled()


def test_a_child_forked_while_copies_are_made_does_not_wait_for_them() -> None:
    """The thread that copies does not exist in a forked child: a step there goes on."""
    copies = Stage("samples")
    copies.close_gate([])
    try:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(2)

        def stepped() -> int:
            optimizer.step()
            return 0 if float(weight.detach()[0]) == -1.0 else 2

        assert gate._copying == [copies]
        assert in_child(stepped) == 0
        assert gate._copying == [copies]
    finally:
        copies.release()


def test_a_module_in_the_memory_of_another_is_asked_for_its_own_wrapper() -> None:
    """That DDP kept the buffers of a module alike says nothing of the next one with the same id."""
    check = ReplicaCheck()
    check._broadcasts.clear()
    module: nn.Module | None = nn.BatchNorm1d(2)
    number = id(module)
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torchrelay.checkpoint.replicas.wraps",
            lambda one: asked.append(id(one)) or (Broadcasting() if len(asked) == 1 else None),
        )
        assert check._ddp_broadcasts(module) and check._ddp_broadcasts(module) and asked == [number]
        module = None
        for _ in range(1000):
            gc.collect()
            others = [nn.BatchNorm1d(2) for _ in range(50)]
            module = next((one for one in others if id(one) == number), None)
            if module is not None:
                break
        if module is None:
            pytest.skip("the memory was not given out again")
        assert not check._ddp_broadcasts(module)


class Broadcasting:
    """What is asked of DDP."""

    broadcast_buffers = True
