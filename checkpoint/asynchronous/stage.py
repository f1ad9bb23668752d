"""One save's copies: early ones made at once, late ones behind the training, compared before they count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field

import torch

from torchrelay.checkpoint.asynchronous.arena import Block, Room
from torchrelay.checkpoint.asynchronous.copying import Copier
from torchrelay.checkpoint.asynchronous.late import Find, late_leaves
from torchrelay.checkpoint.asynchronous.pieces import Piece, Pieces
from torchrelay.checkpoint.asynchronous.samples import SAMPLE_BYTES, Verify, digest
from torchrelay.checkpoint.boundary import NodeState
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.planning.assignments import Assignment
from torchrelay.checkpoint.state import gate
from torchrelay.errors import SaveFailedError
from torchrelay.jobs import runtime
from torchrelay.records import dataclass


@dataclass(frozen=True)
class StagedState(NodeState):
    """A node whose pieces lie in staging memory, from where they are written."""

    staged: Mapping[str, memoryview] = field(default_factory=dict)
    """By the key under which a shard holds the piece."""

    def piece(self, assignment: Assignment) -> torch.Tensor | memoryview:
        """The staged copy of what this node writes of a leaf."""
        staged = self.staged.get(format_key(assignment.key))
        return super().piece(assignment) if staged is None else staged


@dataclass(frozen=True, eq=False)
class LatePiece:
    """A piece on its way: what it is copied from and to, and what it was at the boundary.

    `address` and `nbytes` are those of the whole tensor that `find` finds. `versions` are torch's counts of
    writes into the source and into the leaf: they see every operation of torch on the tensor (one on a
    DTensor is not counted in its local part), but neither fused optimizers (which wait at the gate), nor
    writes through `.data` or numpy; for these there is the digest.

    An owner may hold other memory for a while and the first again (weights swapped for an evaluation):
    `source` keeps what it held at the boundary, which lies at `begin` as long as nobody resizes it.
    """

    name: str
    blob: str
    leaf: torch.Tensor
    source: torch.Tensor
    target: Room
    address: int
    nbytes: int
    find: Find
    digest: int
    versions: tuple[int, int]
    begin: int

    @property
    def gone(self) -> bool:
        """Whether the memory of the boundary is no longer there to be copied."""
        return self.source.data_ptr() != self.begin

    @property
    def moved(self) -> bool:
        """Whether the owner holds other memory than at the boundary."""
        now = self.find()
        same = isinstance(now, torch.Tensor) and now.data_ptr() == self.address
        return not same or now.nbytes != self.nbytes

    @property
    def counted(self) -> bool:
        """Whether an operation of torch has written there since the boundary."""
        return _versions(self.leaf, self.source) != self.versions

    def changed(self, verify: Verify) -> bool:
        """Whether the source is another tensor than at the boundary, or was written."""
        return self.moved or self.counted or digest(self.source, verify) != self.digest


class Stage:
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
        """From now on, whoever is going to write waits. At the boundary, last."""
        self.copier.begin({piece.source.device for piece in self.late if piece.source.is_cuda})
        gate.close(self)

    def copy(self, also: Callable[[], None] = lambda: None) -> None:
        """Make the late copies, do what else must be done before the gate opens, and compare the sources.

        Whoever waits there goes on after that, also when this raises. What is written between the comparison
        and the gate no longer reaches the copies.
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
                self.copier.end()  # what a device still sends would reach the block of the next save
            also()
            self.compare()  # last: it names who wrote while that was done, too
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._copied.set()

    def compare(self) -> None:
        """Find the sources that are not what they were at the boundary."""
        found = []
        for piece in self.late:
            with self.copier.aside(piece.source):
                if piece in self._skipped or piece.changed(self.verify):
                    found.append(piece)
        self.changed = tuple(found)

    def pass_gate(self) -> None:
        """Wait for the copies, whose sources were compared by then. By any thread, more than once.

        An operation is counted when it ends. One that was writing while the sources were compared is
        therefore looked for once more here, before whoever waits begins to write.
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
            gate.open_for(self)

    def check(self) -> None:
        """Raise SaveFailedError, naming them, for sources that were written while they were copied."""
        self.pass_gate()
        if self.changed:
            names = ", ".join(repr(piece.name) for piece in self.changed[:8])
            more = f" and {len(self.changed) - 8} more" if len(self.changed) > 8 else ""
            raise SaveFailedError(
                f"{names}{more} changed while being copied behind the training: something else than a "
                "registered optimizer wrote there. Call ctx.before_mutation() before such writes; from now "
                "on these blobs are copied before the training goes on"
            )

    def forget(self) -> None:
        """Let go of what was copied; the save has ended."""
        with self._passing:
            if self._passed:
                self.late = []
                self._skipped.clear()

    def release(self) -> None:
        """Nobody waits for these copies any more, whatever became of them: perhaps they were never begun."""
        gate.open_for(self)
        self._copied.set()


def stage(
    states: Sequence[NodeState],
    pieces: Pieces,
    block: Block,
    verify: Verify,
    blocking: Collection[str],
) -> tuple[Stage, tuple[StagedState, ...]]:
    """Copy what must be copied now, and prepare the late copies; leaves of `blocking` blobs are early.

    `pieces` are those of the states, in their order; the block has room for them. Raises BlobError for
    what cannot be stored.
    """
    copies = Stage(verify)
    staged = []
    for state, part, rooms in zip(states, pieces.by_node, pieces.rooms_in(block), strict=True):
        late = late_leaves(state.objects, state.names, above_bytes=SAMPLE_BYTES)
        for one, target in zip(part, rooms.rooms, strict=True):
            leaf = one.assignment.leaf
            find = late.get(leaf.name) if one.nbytes > SAMPLE_BYTES and leaf.blob not in blocking else None
            _stage_one(copies, state, one, target, find)
        staged.append(_staged(state, rooms.views))
    return copies, tuple(staged)


def _stage_one(copies: Stage, state: NodeState, piece: Piece, target: Room, find: Find | None) -> None:
    one = piece.assignment
    name = one.leaf.name
    leaf = state.leaves[name].content
    source = leaf if piece.entire else state.piece(one)
    if not isinstance(leaf, torch.Tensor) or not isinstance(source, torch.Tensor):
        raise TypeError(f"{name} is staged already")
    if find is None or not source.is_contiguous():  # boxes of a strided shard do not lie in order
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
    """Where the leaves of a node lie that nobody may write before the gate opens, owned by it or not."""
    late = late_leaves(state.objects, state.names)
    leaves = (state.leaves[name] for name in late if name in state.leaves)
    return frozenset(late[leaf.name]().data_ptr() for leaf in leaves if leaf.blob not in blocking)


def _staged(state: NodeState, views: Mapping[str, memoryview]) -> StagedState:
    return StagedState(
        state.place, state.leaves, state.specs, state.scopes, state.objects, state.names, views
    )
