"""Open any epoch of any run without its job, to inspect it or load parts of it.

Opening verifies the log record and the manifest; for `last` and `best` also the presence and size of all
files. A load verifies the headers of the files it needs and every block it reads, and reads nothing else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.position import Facts, Position, Selection
from torchrelay.checkpoint.format.shard.reads import ReadOptions, verifies
from torchrelay.checkpoint.load.info import Blobs, LeafInfo, Upstreams, leaf_info
from torchrelay.checkpoint.load.lookup import (
    Nodes,
    Rename,
    check_owned,
    choose,
    find_row,
    pattern_list,
    renamed,
    renamed_all,
    several_owners,
    split_name,
)
from torchrelay.checkpoint.load.objects import LoadOptions, check_kept, load_objects, load_tensors, load_value
from torchrelay.checkpoint.load.open import Best, CheckpointLocation, place_of, read_log, verified_entry
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.renaming import LoadResult
from torchrelay.checkpoint.load.tensors import (
    Cast,
    TensorHandle,
    check_types_used,
    checked_cast,
    checked_device,
)
from torchrelay.checkpoint.load.verify import Verification
from torchrelay.checkpoint.log.retention import whole_epochs
from torchrelay.checkpoint.log.view import LogView, wanted
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.jobs.session import warn

if TYPE_CHECKING:
    import torch


def open_checkpoint(
    where: str | os.PathLike[str] | Storage,
    epoch: int | str = "last",
    *,
    branch: int | None = None,
    best: Best | None = None,
    verify: str = "full",
) -> Checkpoint:
    """Open an epoch of a run directory or of a manager's `db_prefix`; reads no tensor.

    Args:
        where: run directory, `db_prefix` (also a URL), or storage.
        epoch: a number, `"last"`, `"best"`, or `"7,branch=0"` for an epoch that a rewind abandoned. `last`
            and `best` skip damaged epochs, with a warning; a number means exactly that epoch.
        branch: number of the branch, instead of `branch=` in `epoch`.
        best: metric and direction for `epoch="best"`, `("val/acc", "max")`; None: the one that the run names.
        verify: "full" verifies every block that is read; "headers" trusts the tensor bytes of the storage, so
            that damaged ones are loaded silently.

    Returns:
        The open checkpoint.

    Raises:
        UsageError: `where`, `best` or another argument is invalid.
        UnknownEpochError: no such epoch; the message lists those that exist.
        DamagedError, FormatError: the epoch is damaged, or of an unknown format.
        NoProvableEpochError: no epoch is undamaged.
        StorageError: the storage failed.

    Example:
        ckpt = open_checkpoint("runs/hello", "best", best=("val/acc", "max"))
        ckpt.load({"model": model})
    """
    wish = wanted(epoch, branch)
    verifying = verifies(verify)
    place = place_of(where)
    notices: list[str] = []
    with undisturbed():
        view = read_log(place)
        result = verified_entry(place, view, wish, best, notices.append)
        opened = Checkpoint(place, result, view, tuple(notices), verify=verifying)
    for notice in notices:
        warnings.warn(notice, stacklevel=2)
    return opened


class Checkpoint:
    """One committed epoch. `notices` lists replacements of damaged epochs, with the reasons."""

    def __init__(
        self,
        place: CheckpointLocation,
        result: Verification,
        view: LogView,
        notices: tuple[str, ...] = (),
        *,
        verify: bool = True,
    ) -> None:
        self.manifest: Manifest
        self.manifest, shards = result.check()
        self.entry = result.entry
        self.notices = (*view.notices, *notices)
        self._storage = place.storage
        self._view = view
        self._reader = LeafReader(place.storage, self.manifest, shards, ReadOptions(verify=verify))
        self._checked = 0
        self.blobs = Blobs(self._reader)

    def __repr__(self) -> str:
        return f"<checkpoint of epoch {self.position} in {self._storage.url}>"

    @property
    def position(self) -> Position:
        """Position of the save; `position.epoch` is the epoch's number."""
        return self.entry.position

    @property
    def epoch(self) -> int:
        """Number of the epoch, also after `epoch="best"` or "last"."""
        return self.entry.position.epoch

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs that the run had when this was opened; `open_checkpoint(RUN, n)` opens each."""
        return tuple(entry.position.epoch for entry in whole_epochs(self._view))

    @property
    def branch(self) -> int:
        """The branch that the epoch was committed on."""
        return self.entry.branch

    @property
    def facts(self) -> Facts:
        """Metrics, stop verdicts, totals and seed at the time of the save."""
        return self.manifest.facts

    @property
    def metrics(self) -> Mapping[str, float]:
        """The reduced metrics of the epoch."""
        return self.manifest.facts.metrics

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that saved it, in the order of their ranks."""
        return self.manifest.world.nodes

    @property
    def leaves(self) -> tuple[LeafInfo, ...]:
        """Every leaf of every blob; a name occurs twice if nodes have different leaves of that name."""
        return tuple(leaf_info(self.manifest, leaf) for leaf in self.manifest.leaves)

    @property
    def upstream(self) -> Upstreams:
        """The stages that the run was built on, by alias: `ckpt.upstream["expert"].metrics`."""
        return Upstreams(self)

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage since this was opened, records, manifests and headers included.

        Bytes that a load verifies first and then reads into place count once.
        """
        return self._storage.bytes_read - self._checked

    def load(
        self,
        objects: Mapping[str, Any],
        *,
        strict: bool = True,
        rename: Rename | None = None,
        nodes: Nodes = None,
        atomic: bool = True,
        exclude: str | Sequence[str] = (),
        dtype: Cast = None,
    ) -> LoadResult:
        """Load blobs into objects: modules, optimizers, tensors, objects with `load_state_dict`.

        All names, shapes and types are compared before any object changes. Modules on the meta device, and
        buffers not created yet, get memory. Objects that are JSON values are not changed: use `value`.

        Args:
            objects: the objects by blob name.
            strict: raise unless both sides have the same leaves.
            rename: new names by stored names, such as `{"model.encoder.": "encoder."}`; applied first.
            nodes: whose value to take of leaves that differ between nodes: a node's name, or a name per blob.
            atomic: verify all bytes before the first object changes, and again while they are read. False:
                read once; damage then raises PartiallyLoadedError.
            exclude: names (with all below) or patterns of leaves of the objects to leave as they are.
            dtype: type, or types by pattern of the new names, to which floating-point tensors are converted.

        Returns:
            Names of the loaded, missing and unexpected leaves, and the bytes read.

        Raises:
            UsageError: an argument is invalid, or, when strict, a pattern of `exclude` matches nothing.
            BlobError: names, shapes or types differ; lists all differences.
            DamagedError, StorageError: stored bytes are wrong or unreadable; no object has changed.
            PartiallyLoadedError: reading failed after objects had changed.

        Example:
            open_checkpoint("runs/hello").load({"model": model}, exclude="model.head")
        """
        before = self.bytes_read
        options = LoadOptions(strict, rename, nodes, atomic, tuple(pattern_list(exclude)), dtype)
        with undisturbed(), self._naming_damage():
            result, checked = load_objects(self._reader, self.entry, objects, options)
        self._checked += checked
        return replace(result, bytes_read=self.bytes_read - before)

    def __getitem__(self, name: str) -> TensorHandle:
        """A tensor that is read on demand, whole or in part: `ckpt["model.weight"][10:20]`.

        `trainer_1:name` is a node's own. Raises UsageError for a name that is not a tensor's.
        """
        if not isinstance(name, str):
            raise UsageError(f"invalid name {name!r:.60}: expected the name of a tensor")
        node, leaf = split_name(name, self.manifest.world.names)
        row = find_row(self.manifest, leaf, node)
        if self.manifest.leaves[row].kind != "tensor":
            raise UsageError(f"{name!r} is a value, not a tensor: use value({name!r})")
        check_owned(self.manifest, leaf, node)  # raises with the nodes to choose from
        check_kept(self._reader, self.entry, [leaf])
        return TensorHandle(self._reader, leaf, node, self._naming_damage)

    def load_tensors(
        self,
        patterns: str | Sequence[str],
        *,
        rename: Rename | None = None,
        device: str | torch.device | None = None,
        dtype: Cast = None,
        strict: bool = True,
        nodes: Nodes = None,
    ) -> dict[str, torch.Tensor]:
        """Load tensors by name or glob.

        Tied names give one tensor. Random states are loaded only by patterns that begin with `rng`.

        Args:
            patterns: such as `model.encoder` (with all below), `model.*.weight`, `trainer_1:rng.torch`.
            rename: new names by stored names.
            device: where the tensors are made.
            dtype: type, or types by pattern of the new names, `{"encoder.*": torch.bfloat16}`; the first
                match counts, and each pattern must match. Only floating-point tensors are converted.
            strict: raise for a pattern that matches nothing.
            nodes: whose value to take of tensors that differ between nodes, `"trainer_0"` or by blob `{"ema":
                "trainer_0"}`; one warning names them. Without it they raise UsageError.

        Returns:
            Tensors by their new names.

        Example:
            weights = ckpt.load_tensors("model.*", dtype=torch.bfloat16)
        """
        chosen = choose(self.manifest, patterns, "tensor", strict=strict, nodes=nodes)
        places = dict(chosen)
        if len(places) != len(chosen):
            raise UsageError(
                f"{patterns!r} matches tensors of several nodes under one name: load them one by one"
            )
        names = renamed_all(places, rename)
        wanted_names = {new: (name, places[name]) for new, name in names.items()}
        check_types_used((*names, *self.manifest.rows), checked_cast(dtype))
        with undisturbed(), self._naming_damage():
            loaded = load_tensors(self._reader, self.entry, wanted_names, checked_device(device), dtype)
        if nodes is not None:
            own = {name: node for name, node in chosen if node and several_owners(self.manifest, name)}
            if own:
                some = ", ".join(f"{name} of {node}" for name, node in list(own.items())[:5])
                more = f", ... ({len(own)} in all)" if len(own) > 5 else ""
                warnings.warn(
                    f"loaded one node's value of what differs between nodes: {some}{more}", stacklevel=2
                )
        return loaded

    def load_saved(
        self,
        objects: Mapping[str, Any],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        exclude: Sequence[str] = (),
    ) -> LoadResult:
        """Load into the objects of the program that saved; leaves left out of its saves stay unchanged.

        These are the leaves that `include` and `exclude` of the save left out. A warning names them.
        """
        kept = self.absent(objects, self.facts.selection, rename)
        if kept:
            more = f", {len(kept) - 4} more" if len(kept) > 4 else ""
            warn(
                f"{', '.join(kept[:4])}{more} stay as the program made them: epoch {self.epoch} was "
                "saved without them (`exclude`)",
                stacklevel=2,
            )
        return self.load(objects, strict=strict, rename=rename, exclude=[*kept, *exclude])

    def absent(
        self, objects: Mapping[str, Any], selection: Selection, rename: Mapping[str, str] | None = None
    ) -> list[str]:
        """The leaves of objects that a selection (by stored names) leaves out and the epoch lacks."""
        back = {new: old for old, new in (rename or {}).items()}
        left_out = {
            leaf.name: name
            for leaf in leaves_of(objects)
            if not selection.saves(name := renamed(leaf.name, back))
        }
        stored = {leaf.name for leaf in self.manifest.leaves} if left_out else set()
        return [name for name, old in left_out.items() if old not in stored]

    def value(self, name: str) -> Any:
        """Return a value (`total`), part of a container (`ema.step`), or a node's own (`trainer_1:total`)."""
        node, leaf = split_name(name, self.manifest.world.names)
        if node is not None:
            check_owned(self.manifest, leaf, node)
        with self._naming_damage():
            return load_value(self._reader, self.entry, leaf, node)

    def load_values(
        self, patterns: str | Sequence[str] = "*", *, strict: bool = True, nodes: Nodes = None
    ) -> dict[str, Any]:
        """Load values by name or glob, chosen as in `load_tensors`; keys are names without the node."""
        found: dict[str, Any] = {}
        for name, node in choose(self.manifest, patterns, "value", strict=strict, nodes=nodes):
            if name in found:
                raise UsageError(f"{patterns!r} matches {name!r} of several nodes: load them one by one")
            with self._naming_damage():
                found[name] = load_value(self._reader, self.entry, name, node)
        return found

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        """Add the epoch and a remedy to DamagedError raised while reading."""
        try:
            yield
        except DamagedError as error:
            raise DamagedError(
                f"epoch {self.position} in {self._storage.url} is damaged: {error}; open another epoch"
            ) from error
