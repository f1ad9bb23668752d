"""Copy the pieces of one save: early ones at once, late ones in the background, verified afterwards.

On the CPU a late copy is a move of bytes that does not hold the GIL. On CUDA copies run on a separate stream,
which waits for the compute queued before; at the gate, compute waits for their event.

Late copies need tensors that only change in `step`, which waits at the gate: parameters and state of stock
optimizers. Module buffers change in `forward`, and other tensors at any time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format.dtypes import memory_of, stored_bytes
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.save.assignments import Assignment, SavePlan
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.change_detection import SAMPLE_BYTES, Verify, digest
from torchrelay.checkpoint.state import steps
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.leaf import is_sharded, memory_of_shard
from torchrelay.checkpoint.state.module_leaves import parameters, parts_of, state_prefix
from torchrelay.checkpoint.state.steps import takes_gate, written_between_steps
from torchrelay.errors import SaveFailedError
from torchrelay.jobs import runtime
from torchrelay.records import dataclass

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line."""


class Block:
    """One allocation; pinned if this process computes on a GPU, so that copies run in parallel.

    It is not pinned otherwise: that would initialise an unused GPU, with memory and random states to save.
    """

    def __init__(self, nbytes: int) -> None:
        pinned = nbytes > 0 and torch.cuda.is_initialized()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self.view = memory_of(self.tensor)
        self.address = self.tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class StagingSlot:
    """A place in a block. It keeps the block alive."""

    block: Block
    at: int
    nbytes: int

    @cached_property
    def address(self) -> int:
        """Its address."""
        return self.block.address + self.at

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes as a tensor."""
        return self.block.tensor[self.at : self.at + self.nbytes]


@dataclass(frozen=True, eq=False)
class StagedPiece:
    """A piece of a tensor, the key under which a shard holds it, and its slot."""

    assignment: Assignment
    key: str
    at: int
    nbytes: int
    entire: bool
    """Whether it is a whole tensor of a single node."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of each hosted node of a plan; `nbytes` is their total size."""

    plan: SavePlan
    nodes: tuple[int, ...]
    by_node: tuple[tuple[StagedPiece, ...], ...]
    nbytes: int
    _slots: list[Any] = field(default_factory=list)

    def slots_in(self, block: Block) -> tuple[tuple[StagingSlot, ...], ...]:
        """Slots of the pieces of each node in a block; the same objects for the same block."""
        if not self._slots or self._slots[0] is not block:
            slots = (tuple(StagingSlot(block, one.at, one.nbytes) for one in part) for part in self.by_node)
            self._slots[:] = [block, tuple(slots)]
        found: tuple[tuple[StagingSlot, ...], ...] = self._slots[1]
        return found


def pieces_of(plan: SavePlan, nodes: Sequence[int]) -> Pieces:
    """Lay out the tensors that these nodes write in staging memory, one after the other."""
    at = 0
    by_node = []
    for node in nodes:
        found = []
        for one in plan.assignments(node):
            if one.leaf.kind == "tensor":
                nbytes = one.nbytes
                entire = one.box is None and one.whole
                found.append(StagedPiece(one, format_key(one.key), at, nbytes, entire))
                at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        by_node.append(tuple(found))
    return Pieces(plan, tuple(nodes), tuple(by_node), at)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Copier:
    """Copies the pieces of one save."""

    def __init__(self) -> None:
        self._ready: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, Any] = {}
        self._done: list[tuple[torch.device, Any]] = []
        self._current: int | None = None

    def copy_now(self, target: StagingSlot, source: torch.Tensor, name: str) -> None:
        """Copy any tensor that can be stored; raises BlobError for others."""
        if source.is_cpu and source.nbytes == target.nbytes and is_plain(source):
            ctypes.memmove(target.address, source.data_ptr(), target.nbytes)
            return
        if source.nbytes == target.nbytes and is_plain(source):  # from the device right into its place
            target.tensor.copy_(source.detach().reshape(-1).view(torch.uint8))
            return
        view = stored_bytes(source, name)
        if len(view):
            target.tensor.copy_(torch.frombuffer(view, dtype=torch.uint8))

    def begin(self, devices: Collection[torch.device]) -> None:
        """Record the moment of the save in the compute streams, in the thread that computes."""
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._ready[device] = event
            self._current = torch.cuda.current_device()

    def enter_thread(self) -> None:
        """Set this thread to the device of `begin`: it would use memory of device 0 otherwise."""
        if self._current is not None:
            torch.cuda.set_device(self._current)

    def copy_late(self, target: StagingSlot, source: torch.Tensor) -> None:
        """Copy a contiguous tensor; complete after `end`."""
        if source.is_cpu:
            ctypes.memmove(target.address, source.data_ptr(), target.nbytes)
            return
        with self.aside(source):
            target.tensor.copy_(source.detach().reshape(-1).view(torch.uint8), non_blocking=True)

    def aside(self, source: torch.Tensor) -> AbstractContextManager[Any]:
        """Context in which to read a source without waiting for compute queued later."""
        return nullcontext() if source.is_cpu else torch.cuda.stream(self._stream(source.device))

    def end(self) -> None:
        """Wait until the late copies are complete, also after one has failed."""
        for device, stream in self._streams.items():
            event = torch.cuda.Event()
            event.record(stream)
            self._done.append((device, event))
            event.synchronize()

    def let_compute_wait(self) -> None:
        """Make the next compute of the calling thread wait for the copies."""
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            stream = torch.cuda.Stream(device)
            if device in self._ready:
                stream.wait_event(self._ready[device])
            self._streams[device] = stream
        return self._streams[device]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its content, in order."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


Find = Callable[[], Any]
"""Finds the owner's current tensor: of a sharded one the local part."""


def late_leaves(
    objects: Mapping[str, Any], names: Mapping[int, str] | None = None, *, above_bytes: int = -1
) -> dict[str, Find]:
    """The leaves of a node that only registered stock optimizers write, and how to find each again.

    `names` are those of the parameters by id, if known. Optimizer state counts from more than `above_bytes`
    bytes.

    Left out is what is written elsewhere than in a step with the hooks of `torch.optim`:

    - parameters that step inside of backward or in CUDA graphs (`capturable`)
    - inference tensors, and subclasses of Tensor other than DTensor
    - parameters of scripted modules, whose `load_state_dict` takes no gate
    - weights that a forward pass normalises (`max_norm` of embeddings)
    - parameters that an unknown optimizer holds too, or that the program was seen to write between steps
    """
    optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
    names = names or parameter_names(objects)
    foreign = {
        id(one) for other in optimizers.values() if not waits_at_the_gate(other) for one in parameters(other)
    }
    foreign |= written_between_steps()
    # Parameters that a module writes without a gate: in `load_state_dict` or in `forward`.
    modules = (value for value in objects.values() if isinstance(value, nn.Module))
    parts = [part for module in modules for part in parts_of(module)]
    ungated = {id(one) for part in parts if not takes_gate(part) for one in part.parameters()}
    ungated |= {id(part.weight) for part in parts if isinstance(part, _NORMALISING) and part.max_norm}
    found: dict[str, Find] = {}
    for blob, optimizer in optimizers.items():
        for parameter in parameters(optimizer):
            if id(parameter) in foreign or not _settled(parameter):
                continue
            name = names[id(parameter)]
            if id(parameter) not in ungated:
                found[name] = partial(_memory_of, parameter)
            prefix = f"{state_prefix(blob)}{name}."
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.nbytes > above_bytes and _settled(value):
                    found[f"{prefix}{key}"] = partial(_state_of, optimizer, parameter, key)
    return found


_NORMALISING = (nn.Embedding, nn.EmbeddingBag)
"""With `max_norm` their forward pass scales the rows that it looks up."""


def waits_at_the_gate(optimizer: Optimizer) -> bool:
    """Whether every step of this optimizer runs the pre-step hooks, and nothing else of it writes."""
    stock = type(optimizer).__module__.startswith("torch.optim.")
    graphs = any(group.get("capturable") for group in optimizer.param_groups)
    hooked = getattr(type(optimizer).step, "hooked", False)
    in_backward = any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters(optimizer))
    return stock and bool(hooked) and not graphs and not in_backward


def _settled(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, or the local part of a sharded one, is its content in order."""
    memory = _memory_of(tensor)
    return is_plain(memory) and not memory.is_inference()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of_shard(tensor) if is_sharded(tensor) else tensor


def _state_of(optimizer: Optimizer, parameter: torch.Tensor, key: str) -> Any:
    found = optimizer.state.get(parameter, {}).get(key)
    return _memory_of(found) if isinstance(found, torch.Tensor) else found


@dataclass(frozen=True, eq=False)
class LatePiece:
    """A late copy: source, target, and what the source was at the moment of the save.

    `address` and `nbytes` are those of the whole tensor that `find` finds. `versions` are torch's version
    counters of the source and the leaf. They count every operation of torch on the tensor, except one on a
    DTensor in its local part, fused optimizers (which wait at the gate), and writes through `.data` or numpy.
    The digest covers these.

    An owner may swap its memory and swap it back (weights for an evaluation): `source` keeps the memory of
    the save, which stays at `begin` unless it is resized.
    """

    name: str
    blob: str
    leaf: torch.Tensor
    source: torch.Tensor
    target: StagingSlot
    address: int
    nbytes: int
    find: Find
    digest: int
    versions: tuple[int, int]
    begin: int

    @property
    def gone(self) -> bool:
        """Whether the memory of the save no longer exists to be copied."""
        return self.source.data_ptr() != self.begin

    @property
    def moved(self) -> bool:
        """Whether the owner now holds other memory."""
        now = self.find()
        same = isinstance(now, torch.Tensor) and now.data_ptr() == self.address
        return not same or now.nbytes != self.nbytes

    @property
    def counted(self) -> bool:
        """Whether an operation of torch has written there since the save began."""
        return _versions(self.leaf, self.source) != self.versions

    def changed(self, verify: Verify) -> bool:
        """Whether the source was replaced or written since the save began."""
        return self.moved or self.counted or digest(self.source, verify) != self.digest


class StagedCopies:
    """The copies of the hosted nodes' pieces. Made by `stage`; `copy` runs in the background."""

    def __init__(self, verify: Verify) -> None:
        self.verify = verify
        self.late: list[LatePiece] = []
        self.changed: tuple[LatePiece, ...] = ()
        self._skipped: set[LatePiece] = set()
        self.failure: BaseException | None = None
        self.copier = Copier()
        self._copied = threading.Event()
        self._passing = threading.Lock()
        self._passed = False

    def close_gate(self) -> None:
        """Make writers wait from now on; the last step of the synchronous part."""
        self.copier.begin({piece.source.device for piece in self.late if piece.source.is_cuda})
        steps.close_gate(self)

    def copy(self, also: Callable[[], None] = lambda: None) -> None:
        """Make the late copies, run `also` before the gate opens, and compare the sources.

        Waiting threads continue afterwards, also when this raises. Writes after the comparison do not reach
        the copies.
        """
        try:
            self.copier.enter_thread()
            try:
                for piece in self.late:
                    if piece.gone:  # for good: it may be back when the sources are compared
                        self._skipped.add(piece)
                    else:
                        self.copier.copy_late(piece.target, piece.source)
            finally:
                self.copier.end()  # a transfer in flight would reach the block of the next save
            also()
            self.compare()  # last: it also finds writes during that work
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._copied.set()

    def compare(self) -> None:
        """Find the sources that changed since the save began."""
        found = []
        for piece in self.late:
            with self.copier.aside(piece.source):
                if piece in self._skipped or piece.changed(self.verify):
                    found.append(piece)
        self.changed = tuple(found)

    def pass_gate(self) -> None:
        """Wait for the copies, whose sources were compared by then. Any thread, any number of times.

        An operation is counted when it ends. One in flight during the comparison is therefore checked once
        more here, before a waiting thread begins to write.
        """
        with self._passing:
            if self._passed:
                return
            if not self._copied.is_set():
                with runtime.waiting():
                    self._copied.wait()
            known = {id(piece) for piece in self.changed}
            self.changed += tuple(piece for piece in self.late if piece.counted and id(piece) not in known)
            self.copier.let_compute_wait()
            self._passed = True
            steps.open_gate(self)

    def check(self) -> None:
        """Raise SaveFailedError, naming them, for sources that were written while they were copied."""
        self.pass_gate()
        if self.changed:
            names = ", ".join(repr(piece.name) for piece in self.changed[:8])
            more = f" and {len(self.changed) - 8} more" if len(self.changed) > 8 else ""
            raise SaveFailedError(
                f"{names}{more} changed while being copied in the background: something other than a "
                "registered optimizer wrote to them. Before such writes call ctx.before_mutation(), or the "
                "Checkpointer's wait(); these blobs are copied synchronously from now on"
            )

    def forget(self) -> None:
        """Release the copies; the save has ended."""
        with self._passing:
            if self._passed:
                self.late = []
                self._skipped.clear()

    def release(self) -> None:
        """Open the gate, after any outcome, also if the copies were never begun."""
        steps.open_gate(self)
        self._copied.set()


def stage(
    states: Sequence[NodeState], pieces: Pieces, block: Block, verify: Verify, blocking: Collection[str]
) -> tuple[StagedCopies, tuple[NodeState, ...]]:
    """Copy what must be copied now, and prepare the late copies; leaves of `blocking` blobs are early.

    `pieces` are those of the states, in their order; the block has room for them. Raises BlobError for
    tensors that cannot be stored.
    """
    copies = StagedCopies(verify)
    staged = []
    for state, part, slots in zip(states, pieces.by_node, pieces.slots_in(block), strict=True):
        late = late_leaves(state.objects, state.names, above_bytes=SAMPLE_BYTES)
        for one, target in zip(part, slots, strict=True):
            leaf = one.assignment.leaf
            find = late.get(leaf.name) if one.nbytes > SAMPLE_BYTES and leaf.blob not in blocking else None
            _stage_one(copies, state, one, target, find)
        views = {one.key: block.view[one.at : one.at + one.nbytes] for one in part}
        staged.append(replace(state, staged=views))
    return copies, tuple(staged)


def _stage_one(
    copies: StagedCopies, state: NodeState, piece: StagedPiece, target: StagingSlot, find: Find | None
) -> None:
    one = piece.assignment
    name = one.leaf.name
    leaf = state.leaves[name].content
    source = leaf if piece.entire else state.piece(one)
    if not isinstance(leaf, torch.Tensor) or not isinstance(source, torch.Tensor):
        raise TypeError(f"{name} is staged already")
    if find is None or not source.is_contiguous():  # boxes of a strided shard are not in order
        copies.copier.copy_now(target, source, name)
        return
    owner = find()
    if source.nbytes != target.nbytes or owner is None:
        raise SaveFailedError(f"{name} changed its size while the save began: let one thread change it")
    found = digest(source, copies.verify)
    blob, address, nbytes = one.leaf.blob, owner.data_ptr(), owner.nbytes
    versions, begin = _versions(leaf, source), source.data_ptr()
    copies.late.append(
        LatePiece(name, blob, leaf, source, target, address, nbytes, find, found, versions, begin)
    )


def _versions(leaf: torch.Tensor, source: torch.Tensor) -> tuple[int, int]:
    return leaf._version, source._version


def guarded_addresses(state: NodeState, blocking: Collection[str]) -> frozenset[int]:
    """Addresses of the leaves of a node that must not be written before the gate opens."""
    late = late_leaves(state.objects, state.names)
    leaves = (state.leaves[name] for name in late if name in state.leaves)
    return frozenset(late[leaf.name]().data_ptr() for leaf in leaves if leaf.blob not in blocking)
