"""Load blobs of an epoch or of a blob file into existing objects, or into a workspace by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.files.blob_files import read_blobs
from torchrelay.checkpoint.files.blob_reader import BlobFile, open_blob_file
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import is_pattern, matches, matches_any
from torchrelay.checkpoint.load.lookup import Rename, check_exclude_used, pattern_list, renamed, renamed_all
from torchrelay.checkpoint.load.renaming import LoadResult, checked_objects, of_objects, owner_of
from torchrelay.checkpoint.load.tensors import Cast, Loading, TensorColumns, TensorRead, cast_of, checked_cast
from torchrelay.checkpoint.state.flatten import leaf_names
from torchrelay.checkpoint.state.leaf import NEEDS_OBJECT, LeafSpec, Role, blob_of
from torchrelay.checkpoint.state.restore.container import check_changed
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.restoration import Restoration, restoration
from torchrelay.checkpoint.state.steps import gate
from torchrelay.checkpoint.state.tensor_memory import NOTHING, InPlace, fitting, planned
from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import kind_of
from torchrelay.jobs.containers import is_container
from torchrelay.jobs.runtime import undisturbed
from torchrelay.jobs.workspace import Workspace

if TYPE_CHECKING:
    from torchrelay.checkpoint.load.checkpoint import Checkpoint
    from torchrelay.checkpoint.load.lookup import Nodes


def load_blobs_into(
    workspace: Workspace,
    where: str | os.PathLike[str],
    names: str | Iterable[str] = "*",
    *,
    epoch: int | str = "last",
    rename: Rename | None = None,
    strict: bool = True,
    nodes: Nodes = None,
    exclude: str | Sequence[str] = (),
    dtype: Cast = None,
) -> LoadResult:
    """Load blobs from a run directory, a `db_prefix` (there of `epoch`), or a file of `save_blobs`.

    `names` are those in the workspace, or patterns for stored blobs, by their new names. Objects are loaded
    in place; all other values are replaced or created. Raises KeyError for an object that is missing here.
    """
    from torchrelay.checkpoint.load.checkpoint import open_checkpoint  # not for files of blobs

    content: Callable[[str], Any]
    load: Callable[..., LoadResult]
    if Path(where).is_file():
        file = FileSource(open_blob_file(where))
        stored, content, load = file.kinds(), file.content, file.load
    else:
        checkpoint = open_checkpoint(where, epoch=epoch)
        stored = {name: blob.kind for name, blob in checkpoint.blobs.items() if name != "rng"}
        content = partial(_content_of, checkpoint, nodes)
        load = partial(checkpoint.load, nodes=nodes)
    kinds = {renamed(blob, rename): (blob, kind) for blob, kind in stored.items()}
    objects: dict[str, Any] = {}
    contents: dict[str, Any] = {}
    for name in _wanted(workspace, {new: kind for new, (_, kind) in kinds.items()}, names):
        blob, kind = kinds.get(name, (name, "stateful"))
        held = workspace.target(name) if name in workspace else None
        if kind_of(held) != "value" or (is_container(held) and kind == "value"):
            objects[name] = held
        elif kind != "stateful":
            contents[name] = content(blob)
        elif name in workspace:
            raise UsageError(f"no tensor or value {name!r}{nearest(name, kinds)}")
        else:
            objects[name] = workspace[name]  # raises with the nearest name
    left_out = pattern_list(exclude)
    result = LoadResult(())
    if objects:
        result = load(objects, strict=strict, rename=rename, exclude=left_out, dtype=dtype)
    containers = {name: held for name, held in objects.items() if is_container(held)}
    workspace.update({**contents, **containers})
    return LoadResult((*result.loaded, *contents), result.missing, result.unexpected, result.bytes_read)


@undisturbed()
def load_into(
    url: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    atomic: bool = True,
    verify: str = "full",
    exclude: str | Sequence[str] = (),
    dtype: Cast = None,
) -> LoadResult:
    """Load blobs of a file of `save_blobs` into objects, in place, on any device.

    All names, shapes and types are compared before any object changes. Modules on the meta device, and
    buffers not created yet, get memory.

    Args:
        url: path or URL of the file.
        objects: modules, optimizers, tensors and objects with `load_state_dict`, by blob name.
        rename: new names by stored names, such as `{"model.encoder.": "encoder."}`; applied first.
        strict: raise unless both sides have the same leaves.
        atomic: verify all bytes before the first object changes, and again while they are read. False: read
            once; damage then raises PartiallyLoadedError.
        verify: "headers" trusts the tensor bytes of the storage, so that damaged ones are loaded silently.
        exclude: names (with all below) or patterns of leaves of the objects to leave as they are.
        dtype: type, or types by pattern of the new names, to which floating-point tensors are converted.

    Returns:
        Names of the loaded, missing and unexpected leaves, and the bytes read.

    Raises:
        UsageError: an argument is invalid, or, when strict, a pattern of `exclude` matches nothing.
        BlobError: names, shapes or types differ; lists all differences.
        DamagedError, FormatError, StorageError: the file is damaged, of another format, or unreadable.
        PartiallyLoadedError: reading failed after objects had changed.

    Example:
        load_into("weights.safetensors", {"model": model})
    """
    objects = checked_objects(objects)
    return FileSource(open_blob_file(url, verify=verify)).load(
        objects, strict=strict, rename=rename, atomic=atomic, exclude=pattern_list(exclude), dtype=dtype
    )


def _wanted(workspace: Workspace, kinds: Mapping[str, str], names: str | Iterable[str]) -> list[str]:
    """The chosen names. A pattern matches every stored blob that can be loaded here."""
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        if not is_pattern(name):
            found[name] = None
            continue
        able = [new for new, kind in kinds.items() if new in workspace or kind != "stateful"]
        hits = [new for new in able if matches(new, name)]
        if not hits:
            raise UsageError(f"no blob that could be loaded here matches {name!r}{nearest(name, kinds)}")
        found.update(dict.fromkeys(hits))
    return list(found)


def _content_of(checkpoint: Checkpoint, nodes: Nodes, blob: str) -> Any:
    """A tensor or value of the chosen node."""
    node = nodes.get(blob) if isinstance(nodes, Mapping) else nodes
    name = blob if node is None else f"{node}:{blob}"
    if checkpoint.blobs[blob].kind == "tensor":
        return checkpoint.load_tensors(name)[blob]
    return checkpoint.value(name)


class FileSource:
    """A file of `save_blobs`."""

    def __init__(self, file: BlobFile) -> None:
        self.file = file

    def kinds(self) -> dict[str, str]:
        """Kinds by name; a blob is a tensor or value if a leaf of its name holds all of it."""
        found: dict[str, str] = {}
        for spec in self.file.specs.values():
            own = spec.name == spec.blob and spec.role not in NEEDS_OBJECT
            found.setdefault(spec.blob, spec.kind if own else "stateful")
        return found

    def content(self, blob: str) -> Any:
        """A tensor or value."""
        return read_blobs(self.file, [blob])[blob]

    def load(
        self,
        objects: Mapping[str, Any],
        *,
        strict: bool,
        rename: Rename | None,
        atomic: bool = True,
        exclude: Sequence[str] = (),
        dtype: Cast = None,
    ) -> LoadResult:
        """Compare everything, and, with `atomic`, verify all of it, before an object changes."""
        cast, found = checked_cast(dtype), NOTHING
        if rename is None and not exclude:
            blobs, inner = self.file.specs.plain_blobs(objects), self.file.inner
            blobs = [name for name in blobs if name not in inner] if inner else blobs
            found = fitting(objects, blobs, self.file.header.entries.forms(blobs))
        (stored, specs, plan), in_place = planned(
            lambda in_place: self._planned(objects, rename, in_place, exclude, cast, strict=strict), found
        )
        keys = list(in_place.tensors)
        columns = TensorColumns(
            in_place, partial(self.file.check_keys, keys), partial(self.file.fill_memories, keys)
        )
        wanted = [TensorRead(read, stored[read.leaf]) for read in plan.reads]
        loading = Loading(self.file, wanted, columns, atomic=atomic)
        loading.first()
        gate()
        loading.second()
        plan.finish()
        loaded = (*keys, *(name for name in specs if name not in plan.unexpected))
        nbytes = sum(in_place.sizes) + sum(read.spec.nbytes for read in plan.reads)
        return LoadResult(loaded, plan.missing, plan.unexpected, nbytes)

    def _planned(
        self,
        objects: Mapping[str, Any],
        rename: Rename | None,
        in_place: InPlace,
        exclude: Sequence[str],
        dtype: Cast,
        *,
        strict: bool,
    ) -> tuple[dict[str, str], dict[str, LeafSpec], Restoration]:
        """Stored names by new name, the leaves, and the restoration of all that is not in place."""
        rest, inner = in_place.rest(objects), self.file.inner
        names: Iterable[str] = self.file.specs
        if inner:  # tensors inside values keep their names
            names = [name for name in names if name not in inner]
        if rename is None:
            found = {name: name for name in of_objects(names, rest)}
        else:
            renamed_to = renamed_all(names, rename)
            found = {new: renamed_to[new] for new in of_objects(renamed_to, rest)}
        trees = set(found.values())
        stored = {**found, **{leaf: leaf for leaf, tree in inner.items() if tree in trees}}
        specs = self._specs(rest, stored)
        known = {spec.blob for spec in specs.values()}
        if strange := [name for name in rest if name not in known]:
            raise UsageError(f"no blob {strange[0]!r} in {self.file.path}{nearest(strange[0], self.kinds())}")
        kept: set[str] = set()
        if exclude:
            everything, here = renamed_all(self.file.specs, rename), leaf_names(rest)
            if strict:
                check_exclude_used([*everything, *specs, *here], exclude)
            learned = {new for new, old in everything.items() if self.file.specs[old].role is Role.PARAMETER}
            owners = {name: owner_of(name, spec.blob, learned)[0] for name, spec in specs.items()}
            kept = {name for name in [*owners, *here] if matches_any(name, exclude)}
            kept |= {name for name, owner in owners.items() if owner and matches_any(owner, exclude)}
            specs = {name: spec for name, spec in specs.items() if name not in kept}
        values = {new: self.file.values[old] for new, old in stored.items() if old in self.file.values}
        options = RestoreOptions(
            strict=strict,
            kept=kept,
            in_place=in_place.tensors,
            excluded=exclude,
            same_content=lambda one, other: self.file.same_content(stored[one], stored[other]),
            cast=lambda name: cast_of(name, dtype),
        )
        plan = restoration(objects, specs, values, options)
        check_changed(plan.replaced, objects, "torchrelay.load_blobs(path, {0})[{0}]")
        return stored, specs, plan

    def _specs(self, objects: Mapping[str, Any], stored: Mapping[str, str]) -> dict[str, LeafSpec]:
        inner = self.file.inner
        new_names = {old: new for new, old in stored.items()} if inner else {}
        first: dict[str, str] = {}
        found: dict[str, LeafSpec] = {}
        for new, old in stored.items():
            spec = self.file.specs[old]
            source = first.setdefault(spec.alias_of or old, new)
            blob = blob_of(new_names[inner[old]] if old in inner else new, objects) or spec.blob
            alias = None if source == new else source
            if (new, blob, alias) != (old, spec.blob, spec.alias_of):
                spec = replace(spec, name=new, blob=blob, alias_of=alias)
            found[new] = spec
        return found
