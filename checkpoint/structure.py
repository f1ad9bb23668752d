"""What a node's leaves are like, without their content; recognised when it is as it was at the last save.

Nothing is believed of an earlier save: every leaf is compared with what was found then, and whatever
differs is described anew. What did not change is given back as the same object, so that all that follows
from it (digests, classes, the plan) is recognised by identity. How long a small value is decides nothing
(a counter grows from 9 to 10): its spec stays, and the manifest is told the true size when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_

from torchrelay.checkpoint.format.dtypes import logical_name
from torchrelay.checkpoint.format.manifest.schema import VALUE_LIMIT_BYTES
from torchrelay.checkpoint.state.dtensor import is_sharded
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role, Value, device_of, order_of, spec_of
from torchrelay.checkpoint.state.names import overlaps_of
from torchrelay.checkpoint.state.restore.rehearsal import Start
from torchrelay.records import dataclass

Relations = tuple[list[list[int]], dict[str, tuple[str, int]], dict[str, str]]
"""The parameters in each group of the optimizers, by identity, what shares memory in part, and arrays."""
Order = tuple[int, ...] | None
_SHORT = (type(None), bool, int, float)
"""JSON that is short whatever its value: how long decides nothing."""


@dataclass(frozen=True, eq=False)
class Structure:
    """The leaves of a node: what each is like, in order, and whose it is. Never changed once made."""

    specs: tuple[LeafSpec, ...]
    scopes: Mapping[str, str]


class Structures:
    """Remembers the last structure of each hosted node; holds no tensors."""

    def __init__(self) -> None:
        self._last: dict[str, Structure] = {}
        self._rehearsed: dict[str, tuple[tuple[LeafSpec, ...], Relations]] = {}
        self._starts: dict[str, Start] = {}
        self._orders: dict[str, Mapping[str, Order]] = {}
        self._shown: dict[str, frozenset[str]] = {}

    def of(self, node: str, leaves: Sequence[Leaf], scopes: Mapping[str, str]) -> Structure:
        """The structure of a node's leaves: the very same object where nothing changed.

        Raises BlobError for placements and dtypes that have no stored form.
        """
        last = self._last.get(node)
        specs = _described(leaves, last.specs if last else (), self._orders.get(node, {}))
        if last is None or scopes != last.scopes or not _same(specs, last.specs):
            last = self._last[node] = Structure(specs, dict(scopes))
        return last

    def began(self, node: str, start: Start, orders: Mapping[str, Order]) -> None:
        """Keep what the program has built, and how it lay, before anything was loaded or trained."""
        self._starts[node], self._orders[node] = start, orders
        self._last.pop(node, None)

    def overlaps(self, node: str, leaves: Sequence[Leaf]) -> dict[str, tuple[str, int]]:
        """How those leaves that shared memory in part when the program had built them share it now."""
        start = self._starts.get(node)
        if start is None or not start.overlaps:
            return {}
        names = {*start.overlaps, *(other for other, _ in start.overlaps.values())}
        shared = {leaf.name: leaf.content for leaf in leaves if leaf.name in names}
        return overlaps_of({name: one for name, one in shared.items() if not isinstance(one, Value)})

    def has_arrays(self, node: str) -> bool:
        """Whether the program has built numpy arrays as blobs."""
        return node in self._starts and bool(self._starts[node].arrays)

    def changes(self, node: str, now: Start, wanted: Callable[[str], bool]) -> list[str]:
        """How `now` differs from what was built, in `wanted` leaves; nothing where nobody looked then."""
        start = self._starts.get(node)
        found = start.differences(now) if start else ()
        return [f"{name} {text}" for name, text in found if wanted(name)]

    def placed(self, node: str, now: Start) -> list[str]:
        """The tensors that were sharded, or gathered, since the program had built them."""
        start = self._starts.get(node)
        return start.placed(now) if start else []

    def is_rehearsed(self, node: str, structure: Structure, relations: Relations) -> bool:
        """Whether a load of these leaves was found to fit, whosever they are, so related."""
        specs, known = self._rehearsed.get(node, ((), None))
        return known == relations and _same(structure.specs, specs)

    def rehearsed(self, node: str, structure: Structure, relations: Relations) -> None:
        """A load of these leaves fits; the first ones stand for what the objects have from their start."""
        self._rehearsed[node] = structure.specs, relations
        self._shown.setdefault(node, _wrappers(structure.specs))

    def loaded(self, node: str, wrappers: frozenset[str]) -> None:
        """A load found place for these wrapper subclasses."""
        self._shown[node] = wrappers

    def shown(self, node: str) -> frozenset[str] | None:
        """The wrapper subclasses that objects have from their start; None while nothing was listed."""
        return self._shown.get(node)

    def start_over(self) -> None:
        """Other objects come: nothing is known of them."""
        self._rehearsed.clear()
        self._shown.clear()
        self._starts.clear()
        self._orders.clear()


def _wrappers(specs: Sequence[LeafSpec]) -> frozenset[str]:
    return frozenset(spec.name for spec in specs if spec.role is Role.SUBCLASS)


def _described(
    leaves: Sequence[Leaf], known: tuple[LeafSpec, ...], built: Mapping[str, Order]
) -> tuple[LeafSpec, ...]:
    """A spec per leaf; that of the same place at the last save where it says the same."""
    if len(leaves) != len(known):
        by_name = {spec.name: spec for spec in known}
        return tuple(_spec(leaf, by_name.get(leaf.name), built) for leaf in leaves)
    return tuple(_spec(leaf, spec, built) for leaf, spec in zip(leaves, known, strict=True))


def _spec(leaf: Leaf, known: LeafSpec | None, built: Mapping[str, Order]) -> LeafSpec:
    if known is not None and _unchanged(leaf, known):
        return known
    found = spec_of(leaf)
    if found.kind == "tensor" and built.get(leaf.name, found.order) != found.order:
        found = replace(found, order_changed=True)
    if known is None:
        return found
    return known if found == known or _small_values(found, known) else found


def _small_values(found: LeafSpec, known: LeafSpec) -> bool:
    """Whether two values differ only in how long they are, and neither is too long for a manifest."""
    if found.kind != "value" or max(found.nbytes, known.nbytes) > VALUE_LIMIT_BYTES:
        return False
    return replace(found, nbytes=known.nbytes) == known


def _unchanged(leaf: Leaf, known: LeafSpec) -> bool:
    """Whether a leaf is as described, as far as a look tells. False too for what is to be described anew."""
    content = leaf.content
    if isinstance(content, Value):
        alike = type(content.json) in _SHORT and known.kind == "value" and known.nbytes <= VALUE_LIMIT_BYTES
    elif known.sharding is not None or is_sharded(content):
        return False
    else:
        alike = content.shape == known.shape and logical_name(content.dtype) == known.dtype
        alike = alike and order_of(content) == known.order
        device = None if content.is_cpu else device_of(leaf.role, content)
        alike = alike and device == known.device
    return (
        alike
        and leaf.name == known.name
        and leaf.blob == known.blob
        and leaf.role is known.role
        and leaf.group == known.group
        and leaf.alias_of == known.alias_of
        and leaf.frozen is known.frozen
        and leaf.same_as == known.same_as
    )


def _same(one: tuple[LeafSpec, ...], other: tuple[LeafSpec, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
