"""Encode and decode manifests: canonical JSON, column by column, validated on read.

- format, job {uuid, name}, position {epoch, step}, branch, generation, tries, plan
- world: {nodes, others, hosts, host_of}
- facts: {metrics, stop, total_steps, elapsed_secs, seed, run, over[, selection][, made_by_init][, places]}
- classes: node sets, packed
- layouts: {kind, class}; of split replicas {items, cut_items, cut_elements}; of sharded leaves {mesh,
  placements, rule}
- blobs: {name, kind, scope}
- leaves: {name, blob, kind, role, dtype, shape, bytes, scope, group, layout, alias_of, try[, frozen] [,
  learning][, order][, order_changed][, device][, same_as]}
- shards: {node, group, part, bytes, header_bytes, try} and header_sha256: base64 of all, joined
- values: [leaf row, typed value]

Columns of whole numbers and of names are packed; repeated words are indexes into `words`. Of the kinds of
layouts `boxes` is reserved. Cut points are stored, so reading needs no planning code.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.manifest.schema import (
    BlobRow,
    Cut,
    EpochNodes,
    Layout,
    LeafRow,
    Manifest,
    PerNode,
    ReplicatedLayout,
    ShardRow,
    Split,
    has_odd_gradient,
    in_order,
)
from torchrelay.checkpoint.format.manifest.validation import RequiredFiles, check_files, check_tables
from torchrelay.checkpoint.format.mesh import Mesh, placements_json, placements_of
from torchrelay.checkpoint.format.mesh_geometry import KNOWN
from torchrelay.checkpoint.format.names import (
    Recent,
    manifest_path,
    pack_names,
    pack_numbers,
    unpack_names,
    unpack_numbers,
)
from torchrelay.checkpoint.format.position import CommittedPosition, Position, facts_in, facts_json
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, FormatError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import Json, dataclass

T = TypeVar("T")

HINT_LIMIT_BYTES = 1 << 30
"""Larger unverified manifests are not read; the size of verified ones is in the record."""
_NEW = "the new manifest"
_SHA256_BYTES = 32
_KEYS = "format job position branch generation tries plan world facts classes layouts blobs leaves shards"
_KNOWN = frozenset([*_KEYS.split(), "values", "words"])


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`; raises DamagedError for a manifest that no reader would accept."""
    tables = prepare(manifest)
    check_files(manifest, tables.stored, _NEW)
    words = _Numbers(tables.words)
    known = {
        "format": canonical_json.stamp(_features(manifest)),
        "job": {"uuid": manifest.job_uuid, "name": manifest.job_name},
        "position": {"epoch": manifest.position.epoch, "step": manifest.position.step},
        "branch": manifest.branch,
        "generation": manifest.generation,
        "tries": list(manifest.tries),
        "plan": manifest.plan_hash,
        "facts": facts_json(manifest.facts),
        "values": [[row, manifest.values[row]] for row in sorted(manifest.values)],
    }
    texts = {key: _text(value) for key, value in {**manifest.extra, **known}.items()}
    # Rows that were checked: their numbers need no further check.
    of = _by_column(ShardRow, sorted(manifest.shards, key=in_order))
    digests = bytes.fromhex("".join(of["header_sha256"]))
    columns = {
        "node": pack_numbers(of["node"]),
        "group": words.column(of["group"]),
        "part": pack_numbers(of["part"]),
        "bytes": pack_numbers(of["nbytes"]),
        "header_bytes": pack_numbers(of["header_bytes"]),
        "header_sha256": base64.b64encode(digests).decode("ascii"),
        "try": pack_numbers(of["source"]),
    }
    encoded = {key: canonical_json.dumps_read(column) for key, column in columns.items()}
    texts |= {**tables.texts, "shards": canonical_json.object_of(encoded)}
    if len(words.numbers) > len(tables.words):
        texts["words"] = _text(list(words.numbers))
    return canonical_json.object_of(texts)


def _features(manifest: Manifest) -> list[str]:
    """Features that a reader must know to resume from here."""
    gradients = any(blob.name == GRADIENTS for blob in manifest.blobs)
    return [canonical_json.GRADIENTS] * gradients + [canonical_json.PLACES] * bool(manifest.facts.places)


def prepare(manifest: Manifest) -> _Tables:
    """Check and encode ahead what `encode` needs for a manifest of the same leaves, without shards."""
    parts = _parts(manifest)
    return _recent.get(
        lambda one: all(known is part or known == part for known, part in zip(one.of, parts, strict=True)),
        lambda: _tables(manifest),
    )


def _text(value: Json) -> bytes:
    return canonical_json.dumps(value, within=1)


@dataclass(frozen=True)
class _Tables:
    """The checked and encoded parts that most saves share; `of` immutable parts, compared by identity."""

    of: tuple[object, ...]
    stored: tuple[RequiredFiles, ...]
    words: tuple[str, ...]
    texts: Mapping[str, bytes]


_recent: Recent[_Tables] = Recent(4)


def _parts(manifest: Manifest) -> tuple[object, ...]:
    """Everything that decides the tables, the most variable and cheapest to compare first."""
    tables = (manifest.world, manifest.layouts, manifest.leaves, manifest.blobs)
    return (len(manifest.tries), manifest.values.keys(), *tables)


def _tables(manifest: Manifest) -> _Tables:
    stored = check_tables(manifest, _NEW)
    words, classes = _Numbers(), _Numbers()
    world = manifest.world
    blobs = {
        "name": [blob.name for blob in manifest.blobs],
        "kind": words.column([blob.kind for blob in manifest.blobs]),
        "scope": words.column([blob.scope for blob in manifest.blobs]),
    }
    packed = {key: pack_names(getattr(world, key)) for key in ("nodes", "others", "hosts")}
    texts = {
        "world": _text({**packed, "host_of": pack_numbers(world.host_of)}),
        "layouts": _text([_layout_json(one, classes.of(one.nodes)) for one in manifest.layouts]),
        "classes": _text([pack_numbers(nodes) for nodes in classes.numbers]),
        "blobs": _text(blobs),
        "leaves": _leaves_text(manifest.leaves, words),
    }
    of = (len(manifest.tries), frozenset(manifest.values), *_parts(manifest)[2:])
    return _Tables(of, stored, tuple(words.numbers), {**texts, "words": _text(list(words.numbers))})


def decode(data: bytes, *, what: str = "manifest.json") -> Manifest:
    """Read a manifest whose size and digest were compared with its record already; `what` names the file.

    Raises FormatError for unknown versions, features and kinds of layout, DamagedError for malformed data.
    """
    raw = canonical_json.loads(data, what=what, limit_bytes=len(data))
    fields = Fields(raw if isinstance(raw, dict) else {}, what)
    canonical_json.check_stamp(fields.values.get("format"), what=what)
    words = fields.texts("words")
    classes = [unpack_numbers(nodes, f"{what} (classes)") for nodes in fields.items("classes")]
    job, position, world = fields.fields("job"), fields.fields("position"), fields.fields("world")
    host_of = _numbers_in(world, "host_of")
    blobs = TableColumns(fields.fields("blobs"), words)
    manifest = Manifest(
        job_uuid=job.text("uuid"),
        job_name=job.text("name"),
        position=Position(position.integer("epoch"), position.integer("step")),
        branch=fields.integer("branch"),
        generation=fields.integer("generation"),
        tries=fields.texts("tries"),
        world=EpochNodes(
            _names_in(world, "nodes"), _names_in(world, "hosts"), host_of, _names_in(world, "others")
        ),
        blobs=tuple(map(BlobRow, blobs.names("name"), blobs.words("kind"), blobs.words("scope"))),
        leaves=_leaves(TableColumns(fields.fields("leaves"), words)),
        layouts=fields.each("layouts", lambda one: _layout_of(one, classes)),
        shards=_shards(TableColumns(fields.fields("shards"), words)),
        plan_hash=fields.text("plan"),
        values=_by_row(fields, "values"),
        facts=facts_in(fields.fields("facts")),
        extra=fields.rest(_KNOWN),
    )
    check_files(manifest, check_tables(manifest, what), what)
    return manifest


def check_size(storage: Storage, entry: CommittedPosition) -> None:
    """Raise DamagedError unless a manifest of the size in a log entry exists."""
    path = manifest_path(entry.attempt_name)
    size = storage.stat(path)
    if size is None:
        raise DamagedError(f"{path} is missing")
    if size != entry.manifest_bytes:
        raise DamagedError(f"{path} has {size} bytes instead of {entry.manifest_bytes}")


def read_bytes(storage: Storage, entry: CommittedPosition) -> bytes:
    """The bytes of the manifest of a log entry; raises DamagedError if size or digest differ."""
    path = manifest_path(entry.attempt_name)
    try:
        data = storage.read_range(path, 0, entry.manifest_bytes + 1)
    except FileNotFoundError:
        data = b""
    if len(data) != entry.manifest_bytes:
        check_size(storage, entry)
        raise DamagedError(f"{path} gave {len(data)} bytes instead of {entry.manifest_bytes}")
    if canonical_json.sha256(data) != entry.manifest_sha256:
        raise DamagedError(f"{path} is not the manifest that was committed: its SHA-256 differs")
    return data


def read(storage: Storage, entry: CommittedPosition) -> Manifest:
    """Read the manifest of a log entry; raises DamagedError if size or digest differ."""
    path = manifest_path(entry.attempt_name)
    manifest = decode(read_bytes(storage, entry), what=path)
    if (manifest.position, manifest.tries) != (entry.position, entry.tries):
        tries = ", ".join(manifest.tries)
        raise DamagedError(f"{path} is the manifest of {manifest.position}, attempts {tries}")
    return manifest


def read_of_attempt(storage: Storage, attempt_name: str) -> Manifest:
    """Read an attempt's own manifest without verification: for hints only."""
    path = manifest_path(attempt_name)
    size = storage.stat(path)
    if size is None or size > HINT_LIMIT_BYTES:
        raise DamagedError(f"{path} is {'missing' if size is None else 'too large'}")
    return decode(storage.read_range(path, 0, size), what=path)


def _layout_json(layout: Layout, number: int) -> Json:
    """A layout as stored in a manifest; `number` is that of its node set."""
    if isinstance(layout, PerNode):
        return {"kind": "node", "class": number}
    if isinstance(layout, ReplicatedLayout):
        return {"kind": "replicated", "class": number}
    if isinstance(layout, Mesh):
        placements = placements_json(layout.placements)
        mesh, rule = list(layout.extents), layout.rule
        return {"kind": "mesh", "class": number, "mesh": mesh, "placements": placements, "rule": rule}
    return {
        "kind": "replicated",
        "class": number,
        "items": pack_numbers(layout.items),
        "cut_items": pack_numbers([cut.item for cut in layout.cuts]),
        "cut_elements": pack_numbers([cut.element for cut in layout.cuts]),
    }


def _layout_of(fields: Fields, classes: Sequence[tuple[int, ...]]) -> Layout:
    """Read the JSON of `_layout_json`; raises FormatError for a kind or rule of another version."""
    kind = fields.text("kind")
    remedy = "use the version of torchrelay that wrote it, or a newer one"
    if kind not in ("node", "replicated", "mesh"):
        raise FormatError(
            f"{fields.what} has a layout of kind {kind!r}, which this version does not read: {remedy}"
        )
    number = fields.integer("class")
    if number >= len(classes):
        raise fields.wrong("class")
    nodes = classes[number]
    if kind == "node":
        return PerNode(nodes)
    if kind == "replicated":
        if "items" not in fields.values:
            return ReplicatedLayout(nodes)
        items, *cuts = (_numbers_in(fields, key) for key in ("items", "cut_items", "cut_elements"))
        if len(cuts[0]) != len(cuts[1]):
            raise fields.wrong("cut_elements")
        return Split(nodes, items, tuple(map(Cut, *cuts)))
    if (rule := fields.integer("rule")) not in KNOWN:
        raise FormatError(
            f"{fields.what} has a mesh whose replicas share the writing by rule {rule}, which this version "
            f"does not know: {remedy}"
        )
    extents, placements = fields.items("mesh"), placements_of(fields.values.get("placements"))
    if not all(type(extent) is int and extent > 0 for extent in extents):
        raise fields.wrong("mesh")
    if placements is None or len(placements) != len(extents):
        raise fields.wrong("placements")
    return Mesh(nodes, tuple(extents), placements, rule)


def _numbers_in(fields: Fields, key: str) -> tuple[int, ...]:
    return unpack_numbers(fields.items(key), f"{fields.what} ({key})")


def _names_in(fields: Fields, key: str) -> tuple[str, ...]:
    return unpack_names(fields.items(key), f"{fields.what} ({key})")


class _Numbers:
    """Numbers distinct items in order of first use."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.numbers: dict[Any, int] = {item: number for number, item in enumerate(items)}

    def of(self, item: Any) -> int:
        return self.numbers.setdefault(item, len(self.numbers))

    def column(self, items: Sequence[Any]) -> list[Json]:
        if items and items.count(items[0]) == len(items):
            return pack_numbers([self.of(items[0])] * len(items))
        for item in dict.fromkeys(items):
            self.of(item)
        return pack_numbers(list(map(self.numbers.__getitem__, items)))


class TableColumns:
    """The columns of one table; all must have the length of the first one read."""

    def __init__(self, fields: Fields, words: tuple[str, ...]) -> None:
        self.fields = fields
        self._words = words
        self._length: int | None = None

    def numbers(self, key: str) -> tuple[int, ...]:
        """Whole numbers from 0 on."""
        found = _numbers_in(self.fields, key)
        if min(found, default=0) < 0:
            raise self.fields.wrong(key)
        return self._checked(found, key)

    def names(self, key: str) -> tuple[str, ...]:
        """Names, packed."""
        return self._checked(_names_in(self.fields, key), key)

    def words(self, key: str) -> tuple[str, ...]:
        """Repeated words."""
        numbers = self.numbers(key)
        if max(numbers, default=0) >= len(self._words) and numbers:
            raise self.fields.wrong(key)
        return tuple(map(self._words.__getitem__, numbers))

    def each(self, key: str) -> tuple[Json, ...]:
        """Any items, unchanged."""
        return self._checked(tuple(self.fields.items(key)), key)

    def _checked(self, found: tuple[T, ...], key: str) -> tuple[T, ...]:
        self._length = len(found) if self._length is None else self._length
        if len(found) != self._length:
            raise self.fields.wrong(key)
        return found


def _by_column(kind: type[LeafRow | ShardRow], rows: Sequence[tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
    columns = zip(*rows, strict=True) if rows else [()] * len(kind._fields)
    return dict(zip(kind._fields, columns, strict=True))


def _leaves_text(leaves: Sequence[LeafRow], words: _Numbers) -> bytes:
    of = _by_column(LeafRow, leaves)
    table = {
        "name": pack_names(of["name"]),
        "blob": words.column(of["blob"]),
        "kind": words.column(of["kind"]),
        "role": words.column(of["role"]),
        "dtype": words.column(["" if dtype is None else dtype for dtype in of["dtype"]]),
        "bytes": pack_numbers(of["nbytes"]),
        "scope": words.column(of["scope"]),
        "group": words.column(of["group"]),
        "layout": pack_numbers(of["layout"]),
        "alias_of": [[row, name] for row, name in enumerate(of["alias_of"]) if name is not None],
        "try": pack_numbers(of["source"]),
    }
    for key, role in _WITH_GRADIENT.items():
        said = [(row, frozen) for row, frozen in enumerate(of["frozen"]) if of["role"][row] == role]
        if any(frozen is not None for _, frozen in said):
            table[key] = pack_numbers([row for row, frozen in said if has_odd_gradient(role, frozen)])
    if changed := [row for row, one in enumerate(of["order_changed"]) if one]:
        table["order_changed"] = pack_numbers(changed)
    for key in ("order", "device"):
        rows: dict[Any, list[int]] = defaultdict(list)
        for row, value in enumerate(of[key]):
            if value is not None:
                rows[value].append(row)
        if rows:
            table[key] = [[value, pack_numbers(rows[value])] for value in sorted(rows)]
    if shared := [[row, name] for row, name in enumerate(of["same_as"]) if name is not None]:
        table["same_as"] = shared
    texts = {key: _text(column) for key, column in table.items()}
    shapes = {shape: _text(shape) for shape in set(of["shape"])}  # many leaves have few
    texts["shape"] = b"[%b]" % b",".join(map(shapes.__getitem__, of["shape"]))
    return canonical_json.object_of(texts)


def _leaves(columns: TableColumns) -> tuple[LeafRow, ...]:
    fields, names = columns.fields, columns.names("name")
    rows = range(len(names))
    aliases = _by_row(fields, "alias_of")
    shared = _by_row(fields, "same_as") if "same_as" in fields.values else {}
    for key, found in (("alias_of", aliases), ("same_as", shared)):
        if not all(isinstance(name, str) and row < len(names) for row, name in found.items()):
            raise fields.wrong(key)
    shapes = list(columns.each("shape"))
    extents: list[Json] = list(chain.from_iterable(shapes)) if set(map(type, shapes)) <= {list} else [None]
    if not set(map(type, extents)) <= {int} or min(extents, default=0) < 0:
        raise fields.wrong("shape")
    shapes = list(map(tuple, shapes))
    words = {key: columns.words(key) for key in ("blob", "kind", "role", "dtype", "scope", "group")}
    numbers = {key: columns.numbers(key) for key in ("bytes", "layout", "try")}
    dtypes = [word or None for word in words["dtype"]]
    orders, devices = (dict(_said(fields, key, len(names))) for key in ("order", "device"))
    for row, order in orders.items():
        whole = isinstance(order, list) and set(map(type, order)) == {int}
        if not whole or sorted(order) != list(range(len(shapes[row]))):
            raise fields.wrong("order")
    if not all(isinstance(device, str) and _DEVICE.fullmatch(device) for device in devices.values()):
        raise fields.wrong("device")
    changed = _rows(fields, "order_changed", len(names))
    table = (
        *(names, words["blob"], words["kind"], words["role"], dtypes, shapes, numbers["bytes"]),
        *(words["scope"], words["group"], numbers["layout"], map(aliases.get, rows)),
        *(numbers["try"], _frozen(fields, words["role"])),
        (tuple(orders[row]) if row in orders else None for row in rows),
        *(map(changed.__contains__, rows), map(devices.get, rows), map(shared.get, rows)),
    )
    return tuple(map(LeafRow, *table))


_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,4})?")
_WITH_GRADIENT = {"frozen": "parameter", "learning": "tensor"}
"""Columns of rows, each with the role for whose leaves it states whether they had a gradient."""


def _frozen(fields: Fields, roles: Sequence[str]) -> list[bool | None]:
    """Whether each parameter and tensor is frozen; None for all if the writer did not store it."""
    found: list[bool | None] = [None] * len(roles)
    for key, role in _WITH_GRADIENT.items():
        if key not in fields.values:
            continue
        odd = _rows(fields, key, len(roles))
        for row in (row for row, one in enumerate(roles) if one == role):
            found[row] = (row in odd) is (role == "parameter")
    return found


def _rows(fields: Fields, key: str, count: int) -> set[int]:
    """The row numbers in an optional column, checked against the number of rows."""
    rows = _numbers_in(fields, key) if key in fields.values else ()
    if len(set(rows)) != len(rows) or not all(0 <= row < count for row in rows):
        raise fields.wrong(key)
    return set(rows)


def _said(fields: Fields, key: str, count: int) -> Iterator[tuple[int, Json]]:
    """The values by row of a column of pairs: each pair is a word and, packed, its rows."""
    seen: set[int] = set()
    for item in fields.items(key) if key in fields.values else ():
        word, packed = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not isinstance(packed, list):
            raise fields.wrong(key)
        for row in unpack_numbers(packed, f"{fields.what} ({key})"):
            if not 0 <= row < count or row in seen:
                raise fields.wrong(key)
            seen.add(row)
            yield row, word


def _shards(columns: TableColumns) -> tuple[ShardRow, ...]:
    nodes, key = columns.numbers("node"), "header_sha256"
    try:
        joined = base64.b64decode(columns.fields.text(key), validate=True)
    except (binascii.Error, ValueError) as error:
        raise columns.fields.wrong(key) from error
    if len(joined) != len(nodes) * _SHA256_BYTES:
        raise columns.fields.wrong(key)
    digests = [joined[at : at + _SHA256_BYTES].hex() for at in range(0, len(joined), _SHA256_BYTES)]
    numbers = (columns.numbers(key) for key in ("part", "bytes", "header_bytes"))
    return tuple(map(ShardRow, nodes, columns.words("group"), *numbers, digests, columns.numbers("try")))


def _by_row(fields: Fields, key: str) -> dict[int, Json]:
    found: dict[int, Json] = {}
    for pair in fields.items(key):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int or pair[0] in found:
            raise fields.wrong(key)
        found[pair[0]] = pair[1]
    return found
