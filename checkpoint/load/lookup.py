"""Find leaves and blobs by name or pattern, with suggestions for misspelt names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from torchrelay.checkpoint.format.manifest.schema import Layout, LeafRow, Manifest, PerNode
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import matches
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import GRADIENTS, RANDOM_STATES
from torchrelay.records import dataclass

Nodes = str | Mapping[str, str] | None
"""Node whose value is taken of leaves that differ: one for all, or one per stored blob."""

_NEIGHBOURS = 1000


def split_name(name: str, nodes: Iterable[str]) -> tuple[str | None, str]:
    """Split `trainer_1:total` at the last colon (node names may have some) into node, or None, and name."""
    node, colon, rest = name.rpartition(":")
    if not colon:
        return None, name
    known = list(nodes)
    if node not in known:
        raise UsageError(f"{name!r}: no node {node!r}{nearest(node, known)}")
    return node, rest


def find_row(manifest: Manifest, name: str, node: str | None = None) -> int:
    """The row of a leaf as `node` has it, aliases followed; raises UsageError that lists alternatives."""
    rows = manifest.rows.get(name)
    if rows is None and any(blob.name == name for blob in manifest.blobs):
        remedy = f"load it into an object, or use {name + '.*'!r}"
        raise UsageError(f"{name!r} is a blob, not a single leaf: {remedy}")
    if rows is None:
        raise UsageError(f"no leaf {name!r}{nearest(name, manifest.rows)}")
    if len(rows) > 1:
        number = manifest.world.number.get(node) if node is not None else None
        having = {row: manifest.nodes_of(manifest.leaves[row]) for row in rows}
        rows = tuple(row for row, nodes in having.items() if number in nodes)
        if not rows:
            every = sorted({one for nodes in having.values() for one in nodes})
            some = ", ".join(f"{manifest.world.names[one]}:{name}" for one in every[:4])
            more = ", ..." if every[4:] else ""
            raise UsageError(f"{name!r} differs in kind or form between nodes: use {some}{more}")
    leaf = manifest.leaves[rows[0]]
    return rows[0] if leaf.alias_of is None else find_row(manifest, leaf.alias_of, node)


def holder_of(manifest: Manifest, row: int, node: str | None) -> int | None:
    """The number of the node whose own value is chosen; None for a leaf that is the same on all owners."""
    leaf = manifest.leaves[row]
    layout = manifest.layouts[leaf.layout]
    if not isinstance(layout, PerNode):
        return None
    if node is None:
        if len(layout.nodes) == 1:
            return layout.nodes[0]
        raise UsageError(
            f"{leaf.name!r} has a different value on each node: use {own_names(manifest, leaf, layout)}"
        )
    number = manifest.world.number.get(node)
    if leaf.scope == "host" and number is not None and number < len(manifest.world.host_of):
        host_of = manifest.world.host_of
        here = [one for one in layout.nodes if one < len(host_of) and host_of[one] == host_of[number]]
        number = here[0] if here else None  # the lowest on that host
    if number is None or number not in layout.members:
        raise UsageError(
            f"{node!r} has no {leaf.name!r} of its own; available: {own_names(manifest, leaf, layout)}"
        )
    return number


def is_owned(manifest: Manifest, name: str, node: str | None) -> bool:
    """Whether a node of the epoch owns a leaf. On a mesh any node may have a part, possibly empty."""
    number = manifest.world.number.get(node or "")
    rows = [manifest.leaves[row] for row in manifest.rows[name]]
    return any(leaf.scope == "sharded" or number in manifest.owners_of(leaf) for leaf in rows)


def check_owned(manifest: Manifest, name: str, node: str | None) -> None:
    """Raise UsageError if `node` owns no such leaf, or none is given and several own different ones."""
    row = find_row(manifest, name, node)
    holder_of(manifest, row, node)
    if node in manifest.world.number and not is_owned(manifest, name, node):
        leaf = manifest.leaves[row]
        there = own_names(manifest, leaf, manifest.layouts[leaf.layout])
        raise UsageError(f"{node!r} has no {name!r} of its own; available: {there}")


def whose(manifest: Manifest, name: str) -> str:
    """Part of a message that names the owners of a leaf that only some nodes have; empty for others."""
    rows = [manifest.leaves[row] for row in manifest.rows.get(name, ())]
    numbers = sorted({number for leaf in rows for number in manifest.owners_of(leaf)})
    if not numbers or len(numbers) == len(manifest.world.nodes):
        return ""
    owners = [manifest.world.nodes[number] for number in numbers]
    some = ", ".join(owners[:4]) + (f", ... ({len(owners)} nodes)" if owners[4:] else "")
    return f"it belongs to {some}: choose a node, such as nodes={owners[0]!r}"


def several_owners(manifest: Manifest, name: str) -> tuple[str, ...]:
    """Nodes with different values of a leaf; empty if all owners have the same."""
    rows = manifest.rows[name]
    layout = manifest.layouts[manifest.leaves[rows[0]].layout]
    if len(rows) == 1 and not (isinstance(layout, PerNode) and len(layout.nodes) > 1):
        target = manifest.leaves[rows[0]].alias_of
        return () if target is None or target == name else several_owners(manifest, target)
    numbers = {number for row in rows for number in manifest.nodes_of(manifest.leaves[row])}
    return tuple(manifest.world.names[number] for number in sorted(numbers))


def node_for(manifest: Manifest, name: str, nodes: Nodes) -> str | None:
    """The node whose value is taken, None if it has one value; raises UsageError if `nodes` chooses none."""
    owners = several_owners(manifest, name)
    if not owners:
        return None
    check_decided(manifest, [name], nodes)
    return node_of(manifest, name, nodes)


def checked_nodes(nodes: Nodes) -> Nodes:
    """The option `nodes`, checked; raises UsageError."""
    named = [*nodes, *nodes.values()] if isinstance(nodes, Mapping) else [] if nodes is None else [nodes]
    if not all(isinstance(one, str) for one in named):
        raise UsageError(
            f"invalid nodes={nodes!r:.80}: expected the name of a node, or one for each blob, such as "
            "nodes={'model': 'trainer_0'}"
        )
    return nodes


def node_of(manifest: Manifest, name: str, nodes: Nodes) -> str | None:
    """The node that `nodes` chooses for a leaf."""
    return nodes.get(manifest.leaves[manifest.rows[name][0]].blob) if isinstance(nodes, Mapping) else nodes


def check_decided(manifest: Manifest, names: Iterable[str], nodes: Nodes) -> None:
    """Raise UsageError for unknown nodes, and for leaves with several values and no chosen node."""
    for node in nodes.values() if isinstance(nodes, Mapping) else [nodes]:
        if node is not None and node not in manifest.world.names:
            known = manifest.world.names
            raise UsageError(f"nodes={node!r}: no such node{nearest(str(node), known)}")
    if len(manifest.world.names) == 1:
        return
    unsaid = [name for name in names if node_of(manifest, name, nodes) is None]
    differing = {name: owners for name in unsaid if (owners := several_owners(manifest, name))}
    if not differing:
        return
    some = ", ".join(map(repr, list(differing)[:4]))
    more = f", ... ({len(differing)} leaves)" if len(differing) > 4 else ""
    has = "have different values" if len(differing) > 1 else "has a different value"
    owners = next(iter(differing.values()))
    raise UsageError(
        f"{some}{more} {has} on each of {len(owners)} nodes: choose one, such as nodes={owners[0]!r}"
    )


def own_names(manifest: Manifest, leaf: LeafRow, layout: Layout) -> str:
    """`a:name, b:name, ...` for a message."""
    names = [f"{manifest.world.names[number]}:{leaf.name}" for number in layout.nodes]
    return ", ".join(names[:4]) + (f", ... ({len(names)} nodes)" if len(names) > 4 else "")


def nearest_directory(path: Path) -> str:
    """Part of a message: a directory with a similar name, among some neighbours of a missing path."""
    with suppress(OSError, ValueError), os.scandir(path.parent) as beside:
        some = islice(beside, _NEIGHBOURS)
        names = [one.name for one in some if one.name.isprintable() and Path(one.path).is_dir()]
        close = get_close_matches(path.name, names, n=1, cutoff=0.6)
        return f" (did you mean {path.parent / close[0]}?)" if close else ""
    return ""


NOWHERE = ""
"""The new name of leaves that are dropped."""


@dataclass(frozen=True)
class Below:
    """A renaming that moves what is at or below `prefix` to below `into`, and drops all else.

    Prefixes end at dots: `sub_1` matches `sub_1.weight`, not `sub_10.weight`. An empty one matches all.
    `rename` applies to names below the prefix: with prefix `encoder`, `{"conv": "c"}` makes
    `encoder.conv.weight` into `<into>.c.weight`.
    """

    prefix: str
    into: str
    rename: Mapping[str, str] | None = None

    def of(self, name: str) -> str:
        """The new name, or NOWHERE."""
        if name == self.prefix:
            return self.into
        head = f"{self.prefix}." if self.prefix else ""
        if not name.startswith(head):
            return NOWHERE
        return ".".join(filter(None, (self.into, renamed(name[len(head) :], self.rename))))


Rename = Mapping[str, str] | Below
"""Whole names, dotted beginnings of them (`head`), or dotted parts that end with a dot (`encoder.`)."""

Chosen = tuple[str, str | None]
"""A leaf's name and the node whose value is chosen."""


def pattern_list(patterns: str | Sequence[str]) -> list[str]:
    """Patterns as a list; raises UsageError unless they are one or more strings."""
    given = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Sequence | Set) or not all(isinstance(one, str) for one in given):
        raise UsageError(f"invalid {patterns!r:.80}: expected a name, a pattern, or a list of them")
    return list(given)


def choose(
    manifest: Manifest, patterns: str | Sequence[str], kind: str, *, strict: bool, nodes: Nodes = None
) -> list[Chosen]:
    """Leaves of a kind that match any pattern, each once, in the order of the patterns.

    `model.encoder` matches that leaf or all below it; `*`, `?` and `[...]` match any text; `trainer_1:` in
    front restricts to a node's own. Random states match only patterns that begin with `rng`. `nodes` chooses
    the node of leaves with several values. Raises UsageError for leaves with several values and no chosen
    node, and, when strict, for a pattern that matches nothing.
    """
    nodes = checked_nodes(nodes)
    found: dict[Chosen, None] = {}
    for pattern in pattern_list(patterns):
        node, text = split_name(pattern, manifest.world.names)
        gradients = text.startswith(GRADIENTS)  # leaves of a position match their exact name only
        matching = [
            name
            for name in manifest.rows
            if name.startswith(GRADIENTS) == gradients
            and matches(name, text)
            and manifest.leaves[manifest.rows[name][0]].kind == kind
        ]
        if node is None:
            if nodes is None and not (text == RANDOM_STATES or text.startswith(f"{RANDOM_STATES}.")):
                randoms = {name for name in matching if manifest.leaves[manifest.rows[name][0]].role == "rng"}
                several = {name for name in randoms if several_owners(manifest, name)}
                matching = [name for name in matching if name not in several]
            check_decided(manifest, matching, nodes)
            chosen = [(name, node_for(manifest, name, nodes)) for name in matching]
        else:
            chosen = [(name, node) for name in matching if _has(manifest, name, node)]
            if matching and not chosen:
                check_owned(manifest, matching[0], node)  # raises with the nodes to choose from
        if not chosen and strict:
            raise UsageError(f"no {kind} matches {pattern!r}{_instead(manifest, text, kind)}")
        found.update(dict.fromkeys(chosen))
    return list(found)


def renamed(name: str, rename: Rename | None) -> str:
    """The new name: the first entry that matches is applied, once.

    `head` matches `head` and `head.weight`, not `header`; `encoder.` matches `encoder.weight` and, if no
    earlier part matches, `model.encoder.weight`.
    """
    if isinstance(rename, Below):
        return rename.of(name)
    if rename is not None and not isinstance(rename, Mapping):
        raise UsageError(
            f'invalid rename={rename!r}: expected new names by old ones, such as {{"ema": "model"}}'
        )
    for old, new in (rename or {}).items():
        if name == old or name.startswith(old if old.endswith(".") else f"{old}."):
            return new + name[len(old) :] if new else name[len(old) :].removeprefix(".")
        head, dot, rest = name.partition(f".{old}") if old.endswith(".") else (name, "", "")
        if dot:
            return f"{head}.{new}{rest}"
    return name


def without_prefix(names: Iterable[str], prefix: str, plain: Callable[[str], str] = str) -> dict[str, str]:
    """Names, after `plain`, by their rest after a prefix; raises UsageError unless the rests are distinct."""
    known, found = list(names), dict[str, str]()
    if known and not any(name.startswith(prefix) for name in known):
        raise UsageError(f"no name begins with prefix={prefix!r}{nearest(prefix, known)}")
    for name in known:
        new = plain(name).removeprefix(prefix)
        if not new or found.setdefault(new, name) != name:
            raise UsageError(
                f"prefix={prefix!r} leaves {name!r} with an empty or duplicate name: choose another"
            )
    return found


def check_exclude_used(names: Iterable[str], patterns: Iterable[str]) -> None:
    """Raise UsageError for a pattern of `exclude` that matches no name."""
    known = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            raise UsageError(
                f"exclude={pattern!r} matches no leaf of the checkpoint or the "
                f"objects{nearest(pattern, known)}; strict=False ignores such patterns"
            )


def renamed_all(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Old names by new name; raises UsageError for duplicate and empty new names."""
    if rename is None:
        return {name: name for name in names}
    return names_apart(((name, renamed(name, rename)) for name in names), rename)


def names_apart(pairs: Iterable[tuple[str, str]], rename: Rename | None) -> dict[str, str]:
    """The same for pairs of old and new names."""
    found: dict[str, str] = {}
    for name, new in pairs:
        if (not new and rename) or found.setdefault(new, name) != name:
            other = f"{found[new]!r} and {name!r} both" if new else repr(name)
            raise UsageError(f"rename={rename!r} makes {other} {new!r}: choose other names")
    return found


def _has(manifest: Manifest, name: str, node: str | None) -> bool:
    try:
        check_owned(manifest, name, node)
    except UsageError:
        return False
    return True


def _instead(manifest: Manifest, text: str, kind: str) -> str:
    """End of a message: a match of another kind, else the closest name."""
    others = [name for name in manifest.rows if matches(name, text)]
    if not others:
        leaves = [leaf for leaf in manifest.leaves if leaf.kind == kind]
        own = {
            f"{manifest.world.names[node]}:{leaf.name}"
            for leaf in leaves
            if isinstance(layout := manifest.layouts[leaf.layout], PerNode)
            for node in layout.nodes[:1]
        }
        return nearest(text, [*(one.name for one in leaves), *own, *(one.name for one in manifest.blobs)])
    some = ", ".join(map(repr, others[:4])) + (f", ... ({len(others)} leaves)" if others[4:] else "")
    found, verb = ("value", "load_values") if kind == "tensor" else ("tensor", "load_tensors")
    are = f"are {found}s" if others[1:] else f"is a {found}"
    return f": {some} {are} (use {verb})"
