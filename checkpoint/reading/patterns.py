"""Choosing leaves by pattern, and giving them other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from torchrelay.checkpoint.format.layouts import PerNode
from torchrelay.checkpoint.format.manifest.position import matches
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.reading.lookup import (
    Nodes,
    check_decided,
    check_owned,
    checked_nodes,
    node_for,
    several_owners,
    split_name,
)
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import GRADIENTS, RANDOM_STATES
from torchrelay.records import dataclass

NOWHERE = ""
"""The new name of what belongs nowhere."""


@dataclass(frozen=True)
class Below:
    """A renaming that takes what lies at or below `prefix`, puts it below `into`, and drops all else.

    Prefixes end at dots: `sub_1` takes `sub_1.weight`, never `sub_10.weight`. An empty one takes all.
    `rename` is of names below the prefix: with `encoder` for a prefix `{"conv": "c"}` makes
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
"""Whole names or dotted beginnings of them (`head`), or dotted parts that end with a dot (`encoder.`)."""

Chosen = tuple[str, str | None]
"""A leaf's name and the node whose own is meant."""


def pattern_list(patterns: str | Sequence[str]) -> list[str]:
    """Patterns as a list; raises UsageError for anything but a text or texts."""
    given = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Sequence | Set) or not all(isinstance(one, str) for one in given):
        raise UsageError(f"{patterns!r:.80} is no name or pattern: give one, or a list of them")
    return list(given)


def choose(
    manifest: Manifest, patterns: str | Sequence[str], kind: str, *, strict: bool, nodes: Nodes = None
) -> list[Chosen]:
    """Leaves of a kind that match any pattern, each once, in the order of the patterns.

    `model.encoder` stands for that leaf or all below it, `*`, `?` and `[...]` for any text, and
    `trainer_1:` in front for what that node has. `nodes` says whose value is meant of leaves that have
    several. Random states, of which every node has its own, are meant only by patterns that begin with `rng`.
    A pattern that matches nothing is an error unless `strict` is False. Raises UsageError, naming `nodes=`,
    for leaves with several values of which nobody said which: none is left out.
    """
    nodes = checked_nodes(nodes)
    found: dict[Chosen, None] = {}
    for pattern in pattern_list(patterns):
        node, text = split_name(pattern, manifest.world.names)
        gradients = text.startswith(GRADIENTS)  # those of a position are meant by their name alone
        matching = [
            name
            for name in manifest.rows
            if name.startswith(GRADIENTS) == gradients
            and matches(name, text)
            and _has_kind(manifest, name, kind)
        ]
        if node is None:
            if nodes is None and not (text == RANDOM_STATES or text.startswith(f"{RANDOM_STATES}.")):
                matching = [name for name in matching if not _is_random_of_several(manifest, name)]
            check_decided(manifest, matching, nodes)
            chosen = [(name, node_for(manifest, name, nodes)) for name in matching]
        else:
            chosen = [(name, node) for name in matching if _has(manifest, name, node)]
            if matching and not chosen:
                check_owned(manifest, matching[0], node)  # says which node to ask for
        if not chosen and strict:
            raise UsageError(f"no {kind} matches {pattern!r}{_instead(manifest, text, kind)}")
        found.update(dict.fromkeys(chosen))
    return list(found)


def _is_random_of_several(manifest: Manifest, name: str) -> bool:
    leaf = manifest.leaves[manifest.rows[name][0]]
    return leaf.role == "rng" and bool(several_owners(manifest, name))


def renamed(name: str, rename: Rename | None) -> str:
    """The new name: the first entry that fits is applied, once.

    `head` fits `head` and `head.weight`, never `header`; `encoder.` fits `encoder.weight` and, where no
    part before it fits, `model.encoder.weight`.
    """
    if isinstance(rename, Below):
        return rename.of(name)
    if rename is not None and not isinstance(rename, Mapping):
        raise UsageError(f'rename is {rename!r}; give new names by old ones, such as {{"ema": "model"}}')
    for old, new in (rename or {}).items():
        if name == old or name.startswith(old if old.endswith(".") else f"{old}."):
            return new + name[len(old) :] if new else name[len(old) :].removeprefix(".")
        head, dot, tail = name.partition(f".{old}") if old.endswith(".") else (name, "", "")
        if dot:
            return f"{head}.{new}{tail}"
    return name


def check_prefix_used(names: Iterable[str], prefix: str) -> None:
    """Raise UsageError for a prefix that no name begins with: most likely a misspelt one."""
    known = list(names)
    if known and not any(name.startswith(prefix) for name in known):
        raise UsageError(f"no name begins with prefix={prefix!r}{nearest(prefix, known)}")


def check_exclude_used(names: Iterable[str], patterns: Iterable[str]) -> None:
    """Raise UsageError for a pattern of `exclude` that no name matches: what it was to keep would change."""
    known = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            raise UsageError(
                f"exclude={pattern!r} matches no leaf, neither of the checkpoint nor of the objects"
                f"{nearest(pattern, known)}; strict=False lets such patterns pass"
            )


def renamed_all(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """New name to old; raises UsageError where two would become one, or one would have no name."""
    if rename is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        new = renamed(name, rename)
        if (not new and rename) or found.setdefault(new, name) != name:
            other = f"{found[new]!r} and {name!r} both" if new else repr(name)
            raise UsageError(f"rename={rename!r} makes {other} {new!r}: choose other names")
    return found


def _has_kind(manifest: Manifest, name: str, kind: str) -> bool:
    return manifest.leaves[manifest.rows[name][0]].kind == kind


def _has(manifest: Manifest, name: str, node: str | None) -> bool:
    try:
        check_owned(manifest, name, node)
    except UsageError:
        return False
    return True


def _instead(manifest: Manifest, text: str, kind: str) -> str:
    """The end of a message: what bears the name and is of another kind, else what was probably meant."""
    others = [name for name in manifest.rows if matches(name, text)]
    if not others:
        return nearest(text, _near(manifest, kind))
    some = ", ".join(map(repr, others[:4])) + (f", ... ({len(others)} leaves)" if others[4:] else "")
    found, verb = ("value", "load_values") if kind == "tensor" else ("tensor", "load_tensors")
    are = f"are {found}s" if others[1:] else f"is a {found}"
    return f": {some} {are} (read by {verb})"


def _near(manifest: Manifest, kind: str) -> list[str]:
    own = {
        f"{manifest.world.names[node]}:{leaf.name}"
        for leaf in manifest.leaves
        if leaf.kind == kind and isinstance(layout := manifest.layouts[leaf.layout], PerNode)
        for node in layout.nodes[:1]
    }
    return [
        *(leaf.name for leaf in manifest.leaves if leaf.kind == kind),
        *own,
        *(b.name for b in manifest.blobs),
    ]
