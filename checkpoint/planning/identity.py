"""What makes leaves of several nodes the same leaf, and the digest of all leaves of a node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.canonical_json import dumps, dumps_read, sha256, words
from torchrelay.checkpoint.format.manifest.schema import VALUE_LIMIT_BYTES, has_odd_gradient

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec


def sorted_leaves(leaves: Iterable[LeafSpec]) -> list[LeafSpec]:
    """Leaves in the order of their names."""
    return sorted(leaves, key=attrgetter("name"))


def same(leaf: LeafSpec) -> tuple[object, ...]:
    """Equal for leaves that are one leaf on several nodes.

    The size of a value may differ between them, and with what else a tensor is shared.
    """
    mesh = leaf.sharding
    described = (leaf.group, leaf.alias_of, leaf.kind, leaf.role, leaf.dtype, leaf.shape)
    size = leaf.nbytes if leaf.kind == "tensor" else 0
    return (leaf.name, leaf.blob, *described, size, "" if mesh is None else mesh.digest)


def leaves_digest(leaves: Sequence[LeafSpec]) -> str:
    """SHA-256 (hex) over all of a node's leaves that a plan depends on, in whatever order they are listed.

    Of canonical JSON: the names, sorted; the number of each leaf's form; and the forms in the order of first
    use, with the digests of their meshes. The blob is null in a form where the leaf is its blob. Of the size
    of a value counts whether a manifest can hold it. Raises UsageError for what is no canonical JSON.
    """
    ordered = sorted_leaves(leaves)
    # Looked up by identity, for each takes long to compare; told by digest, for several objects may be equal.
    distinct = {id(leaf.sharding): leaf.sharding for leaf in ordered}
    meshes = {key: "" if mesh is None else mesh.digest for key, mesh in distinct.items()}
    numbers: dict[tuple[Any, ...], int] = {}
    column: list[int] = []
    for leaf in ordered:
        form = (
            None if leaf.blob == leaf.name else leaf.blob,
            leaf.group,
            leaf.alias_of,
            leaf.kind,
            leaf.role._value_,
            leaf.dtype,
            leaf.shape,
            leaf.nbytes if leaf.kind == "tensor" else leaf.nbytes > VALUE_LIMIT_BYTES,
            meshes[id(leaf.sharding)],
            *(("odd gradient",) if has_odd_gradient(leaf.role._value_, leaf.frozen) else ()),
            *(() if leaf.order is None else (("order", *leaf.order),)),
            *(("order changed",) if leaf.order_changed else ()),
            *(() if leaf.device is None else (("device", leaf.device),)),
            *(() if leaf.same_as is None else (("same as", leaf.same_as),)),
        )
        column.append(numbers.setdefault(form, len(numbers)))
    names = ",".join(words([leaf.name for leaf in ordered]))
    return sha256(b"[[%b],%b,%b]" % (names.encode(), dumps_read(column), dumps(list(numbers))))
