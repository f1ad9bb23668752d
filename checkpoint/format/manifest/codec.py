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

Columns of whole numbers and of names are packed; repeated words are indexes into `words`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, TypeVar

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.manifest.layouts import layout_json, layout_of
from torchrelay.checkpoint.format.manifest.schema import (
    BlobRow,
    EpochNodes,
    LeafRow,
    Manifest,
    ShardRow,
    has_odd_gradient,
    in_order,
)
from torchrelay.checkpoint.format.manifest.validation import RequiredFiles, check, check_files, check_tables
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
from torchrelay.errors import DamagedError
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
    tables = _tables_of(manifest)
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
    texts["shards"] = _shards_text(manifest.shards, words)
    return canonical_json.object_of({**texts, **tables.texts, "words": tables.words_text(words)})


def _features(manifest: Manifest) -> list[str]:
    """Features that a reader must know to resume from here."""
    gradients = any(blob.name == GRADIENTS for blob in manifest.blobs)
    return [canonical_json.GRADIENTS] * gradients + [canonical_json.PLACES] * bool(manifest.facts.places)


def prepare(manifest: Manifest) -> None:
    """Check and encode ahead what `encode` needs for a manifest of the same leaves, without shards."""
    _tables_of(manifest)


def _text(value: Json) -> bytes:
    return canonical_json.dumps(value, within=1)


@dataclass(frozen=True)
class _Tables:
    """The checked and encoded parts that most saves share: world, blobs, leaves, layouts."""

    of: tuple[object, ...]
    stored: tuple[RequiredFiles, ...]
    words: tuple[str, ...]
    texts: Mapping[str, bytes]
    """`words` among them, if no other part of the manifest has more."""

    def words_text(self, words: _Numbers) -> bytes:
        """The words of these tables, and of what was numbered after them."""
        return self.texts["words"] if len(words.items) == len(self.words) else _text(words.items)

    def fits(self, manifest: Manifest) -> bool:
        """Whether these are the tables of a manifest, by the identity of its immutable parts."""
        return all(one is other or one == other for one, other in zip(self.of, _parts(manifest), strict=True))


_recent: Recent[_Tables] = Recent(4)


def _tables_of(manifest: Manifest) -> _Tables:
    return _recent.get(lambda one: one.fits(manifest), lambda: _tables(manifest))


def _parts(manifest: Manifest) -> tuple[object, ...]:
    """Everything that decides the tables, the most variable and cheapest to compare first."""
    tables = (manifest.world, manifest.layouts, manifest.leaves, manifest.blobs)
    return (len(manifest.tries), manifest.values.keys(), *tables)


def _tables(manifest: Manifest) -> _Tables:
    stored = check_tables(manifest, _NEW)
    words, classes = _Numbers(), _Numbers()
    layouts = [layout_json(layout, classes.of(layout.nodes)) for layout in manifest.layouts]
    texts = {
        "world": _text(_world_json(manifest.world)),
        "classes": _text([pack_numbers(nodes) for nodes in classes.items]),
        "layouts": _text(layouts),
        "blobs": _text(_blobs_json(manifest.blobs, words)),
        "leaves": _leaves_text(manifest.leaves, words),
    }
    of = (len(manifest.tries), frozenset(manifest.values), *_parts(manifest)[2:])
    return _Tables(of, stored, tuple(words.items), {**texts, "words": _text(words.items)})


def decode(data: bytes, *, what: str = "manifest.json") -> Manifest:
    """Read a manifest whose size and digest were compared with its record already.

    Raises FormatError for unknown versions, features and kinds of layout, DamagedError for malformed data;
    `what` names the file in both.
    """
    raw = canonical_json.loads(data, what=what, limit_bytes=len(data))
    fields = Fields(raw if isinstance(raw, dict) else {}, what)
    canonical_json.check_stamp(fields.values.get("format"), what=what)
    words = fields.texts("words")
    classes = [unpack_numbers(nodes, f"{what} (classes)") for nodes in fields.items("classes")]
    job, position = fields.fields("job"), fields.fields("position")
    manifest = Manifest(
        job_uuid=job.text("uuid"),
        job_name=job.text("name"),
        position=Position(position.integer("epoch"), position.integer("step")),
        branch=fields.integer("branch"),
        generation=fields.integer("generation"),
        tries=fields.texts("tries"),
        world=_world(fields.fields("world")),
        blobs=_blobs(TableColumns(fields.fields("blobs"), words)),
        leaves=_leaves(TableColumns(fields.fields("leaves"), words)),
        layouts=fields.each("layouts", lambda one: layout_of(one, classes)),
        shards=_shards(TableColumns(fields.fields("shards"), words)),
        plan_hash=fields.text("plan"),
        values=_by_row(fields.items("values"), fields, "values"),
        facts=facts_in(fields.fields("facts")),
        extra=fields.rest(_KNOWN),
    )
    check(manifest, what)
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
    data = read_bytes(storage, entry)
    manifest = decode(data, what=path)
    if (manifest.position, manifest.tries) != (entry.position, entry.tries):
        raise DamagedError(
            f"{path} is the manifest of {manifest.position}, attempts {', '.join(manifest.tries)}"
        )
    return manifest


def read_of_attempt(storage: Storage, attempt_name: str) -> Manifest:
    """Read an attempt's own manifest without verification: for hints only."""
    path = manifest_path(attempt_name)
    size = storage.stat(path)
    if size is None or size > HINT_LIMIT_BYTES:
        raise DamagedError(f"{path} is {'missing' if size is None else 'too large'}")
    return decode(storage.read_range(path, 0, size), what=path)


class _Numbers:
    """Numbers distinct items in order of first use."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items: list[Any] = list(items)
        self._numbers: dict[Any, int] = {item: number for number, item in enumerate(self.items)}

    def of(self, item: Any) -> int:
        if item not in self._numbers:
            self._numbers[item] = len(self.items)
            self.items.append(item)
        return self._numbers[item]

    def column(self, items: Sequence[Any]) -> list[Json]:
        if items and items.count(items[0]) == len(items):
            return pack_numbers([self.of(items[0])] * len(items))
        new = [item for item in dict.fromkeys(items) if item not in self._numbers]
        self._numbers.update(zip(new, count(len(self.items)), strict=False))
        self.items += new
        return pack_numbers(list(map(self._numbers.__getitem__, items)))


class TableColumns:
    """The columns of one table; all must have the length of the first one read."""

    def __init__(self, fields: Fields, words: tuple[str, ...]) -> None:
        self.fields = fields
        self._words = words
        self._length: int | None = None

    def numbers(self, key: str) -> tuple[int, ...]:
        """Whole numbers from 0 on."""
        found = unpack_numbers(self.fields.items(key), f"{self.fields.what} ({key})")
        if min(found, default=0) < 0:
            raise self.fields.wrong(key)
        return self._checked(found, key)

    def names(self, key: str) -> tuple[str, ...]:
        """Names, packed."""
        return self._checked(unpack_names(self.fields.items(key), f"{self.fields.what} ({key})"), key)

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


def _world_json(world: EpochNodes) -> Json:
    return {
        "nodes": pack_names(world.nodes),
        "others": pack_names(world.others),
        "hosts": pack_names(world.hosts),
        "host_of": pack_numbers(world.host_of),
    }


def _world(fields: Fields) -> EpochNodes:
    def names(key: str) -> tuple[str, ...]:
        return unpack_names(fields.items(key), f"{fields.what} ({key})")

    host_of = unpack_numbers(fields.items("host_of"), f"{fields.what} (host_of)")
    return EpochNodes(names("nodes"), names("hosts"), host_of, names("others"))


def _blobs_json(blobs: Sequence[BlobRow], words: _Numbers) -> Json:
    return {
        "name": [blob.name for blob in blobs],
        "kind": words.column([blob.kind for blob in blobs]),
        "scope": words.column([blob.scope for blob in blobs]),
    }


def _blobs(columns: TableColumns) -> tuple[BlobRow, ...]:
    return tuple(map(BlobRow, columns.names("name"), columns.words("kind"), columns.words("scope")))


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
    if orders := sorted({order for order in of["order"] if order is not None}):
        rows = {order: [row for row, one in enumerate(of["order"]) if one == order] for order in orders}
        table["order"] = [[list(order), pack_numbers(rows[order])] for order in orders]
    if changed := [row for row, one in enumerate(of["order_changed"]) if one]:
        table["order_changed"] = pack_numbers(changed)
    if devices := sorted({device for device in of["device"] if device is not None}):
        on = {device: [row for row, one in enumerate(of["device"]) if one == device] for device in devices}
        table["device"] = [[device, pack_numbers(on[device])] for device in devices]
    if shared := [[row, name] for row, name in enumerate(of["same_as"]) if name is not None]:
        table["same_as"] = shared
    texts = {key: _text(column) for key, column in table.items()}
    return canonical_json.object_of({**texts, "shape": _shapes_text(of["shape"])})


def _by_column(kind: type[LeafRow | ShardRow], rows: Sequence[tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
    columns = zip(*rows, strict=True) if rows else [()] * len(kind._fields)
    return dict(zip(kind._fields, columns, strict=True))


def _shapes_text(shapes: Sequence[tuple[int, ...]]) -> bytes:
    """Many leaves have few shapes, each of which is written once."""
    texts = {shape: _text(shape) for shape in set(shapes)}
    return b"[%b]" % b",".join(map(texts.__getitem__, shapes))


def _leaves(columns: TableColumns) -> tuple[LeafRow, ...]:
    names = columns.names("name")
    aliases = _names_by_row(columns.fields, "alias_of", len(names))
    shared = _names_by_row(columns.fields, "same_as", len(names))
    shapes = _shapes(columns)
    words = {key: columns.words(key) for key in ("blob", "kind", "role", "dtype", "scope", "group")}
    numbers = {key: columns.numbers(key) for key in ("bytes", "layout", "try")}
    dtypes = [word or None for word in words["dtype"]]
    table = (
        *(names, words["blob"], words["kind"], words["role"], dtypes, shapes, numbers["bytes"]),
        *(words["scope"], words["group"], numbers["layout"], map(aliases.get, range(len(names)))),
        *(numbers["try"], _frozen(columns.fields, words["role"])),
        map(_orders(columns.fields, shapes).get, range(len(names))),
        map(_rows(columns.fields, "order_changed", len(names)).__contains__, range(len(names))),
        map(_devices(columns.fields, len(names)).get, range(len(names))),
        map(shared.get, range(len(names))),
    )
    return tuple(map(LeafRow, *table))


def _names_by_row(fields: Fields, key: str, count: int) -> dict[int, str]:
    found = _by_row(fields.items(key) if key in fields.values or key == "alias_of" else [], fields, key)
    if not all(isinstance(name, str) and row < count for row, name in found.items()):
        raise fields.wrong(key)
    return found


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
    rows = unpack_numbers(fields.items(key), f"{fields.what} ({key})") if key in fields.values else ()
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


def _orders(fields: Fields, shapes: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The memory order of a leaf's dimensions, by row, if stored."""
    found: dict[int, tuple[int, ...]] = {}
    for row, order in _said(fields, "order", len(shapes)):
        if not isinstance(order, list) or set(map(type, order)) != {int}:
            raise fields.wrong("order")
        if sorted(order) != list(range(len(shapes[row]))):
            raise fields.wrong("order")
        found[row] = tuple(order)
    return found


def _devices(fields: Fields, count: int) -> dict[int, str]:
    """The GPU of a leaf, by row, if stored."""
    found = dict(_said(fields, "device", count))
    if not all(isinstance(device, str) and _DEVICE.fullmatch(device) for device in found.values()):
        raise fields.wrong("device")
    return found


def _shapes(columns: TableColumns) -> list[tuple[int, ...]]:
    found = columns.each("shape")
    lists = set(map(type, found)) <= {list}
    extents: list[Json] = list(chain.from_iterable(found)) if lists else [None]
    if not set(map(type, extents)) <= {int} or min(extents, default=0) < 0:
        raise columns.fields.wrong("shape")
    return list(map(tuple, found))


def _shards_text(shards: Sequence[ShardRow], words: _Numbers) -> bytes:
    """The text of checked rows, whose numbers need no further check."""
    of = _by_column(ShardRow, sorted(shards, key=in_order))
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
    return canonical_json.object_of(
        {key: canonical_json.dumps_read(column) for key, column in columns.items()}
    )


def _shards(columns: TableColumns) -> tuple[ShardRow, ...]:
    nodes = columns.numbers("node")
    digests = _digests(columns.fields, len(nodes))
    numbers = (columns.numbers(key) for key in ("part", "bytes", "header_bytes"))
    return tuple(map(ShardRow, nodes, columns.words("group"), *numbers, digests, columns.numbers("try")))


def _digests(fields: Fields, count: int) -> list[str]:
    try:
        joined = base64.b64decode(fields.text("header_sha256"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise fields.wrong("header_sha256") from error
    if len(joined) != count * _SHA256_BYTES:
        raise fields.wrong("header_sha256")
    return [joined[at : at + _SHA256_BYTES].hex() for at in range(0, len(joined), _SHA256_BYTES)]


def _by_row(pairs: list[Json], fields: Fields, key: str) -> dict[int, Json]:
    """Pairs of a leaf row and its value."""
    found: dict[int, Json] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int or pair[0] in found:
            raise fields.wrong(key)
        found[pair[0]] = pair[1]
    return found
