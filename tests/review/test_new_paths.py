"""Attacks on direct writes, reads by threads, saves behind the training and what is remembered of saves."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from interrupts import interrupted_in
from leaf_store import load, save
from ranks import local_store, on_ranks
from tear_job import torn, train
from torch import nn
from torch.distributed import checkpoint as dcp
from two_tensor import TwoTensor, two

from torchrelay import DcpReader, load_into, open_checkpoint, save_blobs
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.files.load_into import FileSource
from torchrelay.checkpoint.format.shard.reads import EACH, each
from torchrelay.checkpoint.save.agreement import BroadcastBuffers, SpecExchange
from torchrelay.checkpoint.save.background import Background
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.staging import Copier, StagedCopies
from torchrelay.checkpoint.state import steps
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.errors import DamagedError, PeerError, SaveFailedError, UnknownEpochError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.runtime import undisturbed
from torchrelay.jobs.session import Solo, together
from torchrelay.runners.distributed.agreement import StorePeers


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


@pytest.mark.parametrize(
    ("how", "atomic"), [("file", True), ("file", False), ("epoch", True), ("epoch", False), ("dcp", False)]
)
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
        elif how == "dcp":
            weights = {"model.3.weight": trainee.model[3].weight.data}
            dcp.load(weights, storage_reader=DcpReader(tmp_path / "run", epoch=0), no_dist=True)
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
    each(done.append, range(5), 2 * EACH, 3)
    assert done == [0, 1, 2, 3, 4]


def test_an_interrupted_load_leaves_no_thread_that_writes() -> None:
    """Once Ctrl-C has arrived while other threads read, no memory of the caller's is written any more."""
    go, waiting, written = threading.Event(), threading.Event(), list[int]()

    def work(item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert waiting.wait(60)
        else:
            waiting.set()
            assert go.wait(60)
            written.append(item)

    with interrupted_in("_ended", waiting, go.set):
        with pytest.raises(KeyboardInterrupt):
            each(work, range(2), 2 * EACH, 2)
        assert len(written) == 1


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
    assert time.monotonic() - began < 60, "the deadline is ten minutes"
    for error in errors:
        assert isinstance(error, PeerError) and "different points" in str(error)


def in_child(work: Any) -> int:
    """The exit status of a forked child that does this; it is killed after 60 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + 60
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
    copies = StagedCopies("samples")
    copies.close_gate()
    try:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(2)

        def stepped() -> int:
            optimizer.step()
            return 0 if float(weight.detach()[0]) == -1.0 else 2

        assert steps._copying == [copies]
        assert in_child(stepped) == 0
        assert steps._copying == [copies]
    finally:
        copies.release()


def test_a_module_in_the_memory_of_another_is_asked_for_its_own_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That DDP kept the buffers of a module alike says nothing of the next one with the same id."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr("torchrelay.checkpoint.save.agreement.broadcast_buffers", lambda: sent)
    asked = BroadcastBuffers()
    for _ in range(1000):
        module = nn.BatchNorm1d(2)
        sent[:] = module.buffers()
        assert asked.among(node_of(module)) == {f"bn.{name}" for name, _ in module.named_buffers()}
        sent.clear()
        assert asked.among(node_of(module)), "asked again"
        number = id(module)
        del module
        module = nn.BatchNorm1d(2)
        if id(module) == number:
            assert not asked.among(node_of(module))
            return
    pytest.fail("the memory was not given out again")


def node_of(module: nn.Module) -> NodeState:
    """A node whose only blob is a module."""
    leaves = {leaf.name: leaf for leaf in leaves_of({"bn": module})}
    return NodeState(NodePlace("trainer_0", 0, 1), leaves, (), {}, {"bn": module})


def test_a_file_that_was_replaced_is_not_read_with_the_values_of_the_old_one(tmp_path: Path) -> None:
    """Without a check of the blocks, too, tensors and values that are loaded are of one file."""
    path = tmp_path / "w.safetensors"
    for verify in ("headers", "full"):
        save_blobs(path, {"w": torch.zeros(9), "step": 1}, overwrite=True)
        file, target = open_blob_file(path, verify=verify), torch.full((9,), 5.0)
        save_blobs(path, {"w": torch.ones(9), "step": 2}, overwrite=True)
        with pytest.raises(DamagedError):
            FileSource(file).load({"w": target}, strict=True, rename=None)
        assert bool((target == 5).all())
        load_into(path, {"w": target}, strict=False, verify=verify)
        assert bool((target == 1).all())


def test_what_was_hashed_for_reuse_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write behind the gate where no sample looks never makes an epoch that is acknowledged and damaged."""
    begin, copy_late = Background.begin, Copier.copy_late
    written, begun = threading.Event(), list[int]()

    def noted(self: Background, *given: Any) -> None:
        self.wait()
        begun.append(len(begun))
        begin(self, *given)

    def after_the_write(*given: Any) -> None:
        if len(begun) == 3:  # epochs 0, 1, 2
            assert written.wait(30)
        copy_late(*given)

    def spoil(ctx: Any, trainee: Any) -> None:
        if ctx.epoch == 3 and not written.is_set():
            trainee.model[3].weight.data[60:64] += 1
            written.set()

    monkeypatch.setattr(Background, "begin", noted)
    monkeypatch.setattr(Copier, "copy_late", after_the_write)
    with pytest.warns(UserWarning, match=r"'model\.3\.weight' changed while being copied"):
        train(tmp_path / "run", 4, asynchronous=True, reuse=True, before_step=spoil)
    assert written.is_set()
    for epoch in (0, 1, 3, 4):
        open_checkpoint(tmp_path / "run", epoch=epoch).load_tensors("*")
    with pytest.raises(UnknownEpochError):
        open_checkpoint(tmp_path / "run", epoch=2)


class Line:
    """Peers of threads: values travel as JSON, ranks at different topics are an error at once."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def exchange(self, topic: str, value: Any, **_: Any) -> list[Any]:
        self._shared[self.rank] = topic, json.dumps(value)
        self._shared["met"].wait(20)
        posts = [self._shared[rank] for rank in range(self.size)]
        self._shared["met"].wait(20)
        assert {one for one, _ in posts} == {topic}, posts
        return [json.loads(text) for _, text in posts]

    def apart(self) -> Line:
        return self


RANKS = 3


def spec(name: str, dtype: str = "float32", count: int = 300_000, **more: Any) -> LeafSpec:
    given = {"blob": "m", "role": Role.PARAMETER, "group": "main", "kind": "tensor", "alias_of": None}
    size = {"float32": 4, "int32": 4, "float64": 8}[dtype]
    return LeafSpec(name=name, **{**given, "dtype": dtype, "shape": (count,), "nbytes": count * size, **more})


def value(name: str, nbytes: int) -> LeafSpec:
    return LeafSpec(name, name, Role.VALUE, "main", "value", None, (), nbytes)


def scene(random: Random) -> list[tuple[tuple[LeafSpec, ...], dict[str, str]]]:
    """What the ranks have at one save: mostly alike, some with other forms, values of any size, scopes."""
    common = [spec(f"m.{i}", random.choice(["float32", "float32", "int32"])) for i in range(3)]
    found = []
    for rank in range(RANKS):
        own = list(common)
        if random.random() < 0.4:
            own.append(value("note", random.choice([5, 500, 70_000])))
        if random.random() < 0.2:
            own[0] = spec("m.0", random.choice(["float32", "float64"]))
        if random.random() < 0.2:
            own.append(spec(f"stage.{rank}", count=random.choice([10, 20])))
        scopes = {one.name: random.choice(["rank"] + ["replicated"] * 9) for one in own}
        found.append((tuple(own), scopes))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_remember_different_things_agree_and_meet(seed: int) -> None:
    """Whatever each rank saw before, failed saves too: same exchanges, and the plan of a fresh one."""
    random = Random(seed)
    scenes = [scene(random) for _ in range(4)]
    saves = [random.choice(scenes) for _ in range(40)]
    shared: dict[str, Any] = {"met": threading.Barrier(RANKS)}
    names = [f"trainer_{rank}" for rank in range(RANKS)]

    def state(rank: int, one: Any) -> NodeState:
        place = NodePlace(names[rank], rank, RANKS, "host", 0)
        return NodeState(place, {}, one[rank][0], one[rank][1], {})

    def planned(exchange: SpecExchange, peers: Any, states: list[NodeState]) -> str:
        try:
            classes, scopes = exchange.classes(peers, states, names)
        except SaveFailedError as error:
            return str(error)
        return exchange.plan(classes, scopes, (0,) * RANKS).hash

    def work(rank: int) -> list[str]:
        exchange, peers = SpecExchange(), Line(rank, RANKS, shared)
        return [planned(exchange, peers, [state(rank, one)]) for one in saves]

    fresh = [planned(SpecExchange(), Solo(), [state(rank, one) for rank in range(RANKS)]) for one in saves]
    assert on_ranks(RANKS, work) == [fresh] * RANKS
    assert len(set(fresh)) > 1


def test_an_interrupt_while_a_save_begins_leaves_no_closed_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C between the gate and the thread that opens it, optimizers of this process still step."""
    close, hit = steps.close_gate, list[Any]()

    def interrupted(copies: Any) -> None:
        close(copies)
        hit.append(copies)
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "close_gate", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", 2, asynchronous=True)
        assert hit and steps._copying == []
    finally:
        steps._copying.clear()
