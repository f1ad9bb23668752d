"""A storage in memory that forgets as much as POSIX allows.

What processes see and what a power cut may leave are two things. File data that was not synced may be
empty, a prefix, torn or whole; of the names that a directory got or lost since it was synced any subset
may persist. `Cut`s are what a power cut may leave, and `missing` names the rules that the storage breaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from threading import RLock

from torchrelay.errors import StorageError

TORN_AT = 512
"""A torn file has zeros up to here and the new bytes behind."""
Tree = dict[str, bytes | None]
"""Files by path; directories are None."""


class CrashError(BaseException):
    """The process ends here; nothing may catch it."""


class Content:
    """The bytes of a file as processes see them, and as they are on the device for certain."""

    __slots__ = ("_variants", "safe", "seen")

    def __init__(self, seen: bytes, safe: bytes) -> None:
        self.seen, self.safe = seen, safe
        self._variants: tuple[bytes, ...] = ()

    def variants(self) -> tuple[bytes, ...]:
        """What a power cut may leave; the first is the least, the last all."""
        if not self._variants:
            torn = bytes(min(TORN_AT, len(self.seen))) + self.seen[TORN_AT:]
            half = self.seen[: len(self.seen) // 2]
            found = (self.seen,) if self.seen == self.safe else (self.safe, half, torn, self.seen)
            self._variants = tuple(dict.fromkeys(found))
        return self._variants


@dataclass(frozen=True)
class Change:
    """A name that a directory got (`file` is its number, 0 a directory) or lost (None)."""

    directory: str
    path: str
    file: int | None


@dataclass(frozen=True)
class Snapshot:
    """A disk at one moment: enough to make every state that a power cut may leave."""

    seen: dict[str, int]
    safe: dict[str, int]
    pending: tuple[Change, ...]
    contents: dict[int, Content]

    def kept(self) -> Tree:
        """What the next process finds when only the process died."""
        return {path: self.contents[file].seen if file else None for path, file in self.seen.items()}

    def cuts(self, limit: int, seed: int, draws: int = 1) -> Iterator[Tree]:
        """States after a power cut: all where they are at most `limit`, else the extremes and a sample.

        What nothing is proved by (hints, counters, timings, temporary names) is drawn `draws` times for each.
        """
        rng = random.Random(seed)
        heavy = [index for index, one in enumerate(self.pending) if not _light(one.path)]
        light = [index for index, one in enumerate(self.pending) if _light(one.path)]
        loose, noise = self._loose()
        choices = _picks(len(heavy), [len(self._variants(one)) for one in loose], limit, rng)
        for bits, picks in (one for one in choices for _ in range(draws if light or noise else 1)):
            keep = rng.choice((0.0, 0.5, 0.5, 1.0))
            persists = dict(zip(heavy, bits, strict=True))
            persists.update((index, rng.random() < keep) for index in light)
            chosen = dict(zip(loose, picks, strict=True))
            chosen.update((file, rng.randrange(len(self._variants(file)))) for file in noise)
            yield self._tree(persists, chosen)

    def _loose(self) -> tuple[list[int], list[int]]:
        """Files that were not synced: those that matter, and the others."""
        names = {file: path for path, file in {**self.safe, **self.seen}.items()}
        names.update((one.file, one.path) for one in self.pending if one.file and not _light(one.path))
        loose = [file for file in sorted(self.contents) if len(self._variants(file)) > 1]
        heavy = [file for file in loose if file in names and not _light(names[file])]
        return heavy, [file for file in loose if file not in heavy]

    def _variants(self, file: int) -> tuple[bytes, ...]:
        return self.contents[file].variants()

    def _tree(self, persists: dict[int, bool], picks: dict[int, int]) -> Tree:
        names = dict(self.safe)
        for index, change in enumerate(self.pending):
            if persists[index]:
                _apply(names, change)
        return {
            path: self._variants(file)[picks.get(file, -1)] if file else None
            for path, file in names.items()
            if _reaches(path, names)
        }


def _light(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith(".tmp-") or name in ("HINT", "writer.json", "stats.json")


def _picks(
    ops: int, choices: list[int], limit: int, rng: random.Random
) -> Iterator[tuple[tuple[bool, ...], tuple[int, ...]]]:
    """Which changes persist, and which variant of each file."""
    count = 1 << ops
    for size in choices:
        count *= size
    if count <= limit:
        yield from product(product((False, True), repeat=ops), product(*(range(n) for n in choices)))
        return
    least, most = tuple(0 for _ in choices), tuple(n - 1 for n in choices)
    for bits in _extremes(ops):
        yield bits, least
        if choices:
            yield bits, most
    for _ in range(limit):
        keep = rng.choice((0.2, 0.5, 0.8))
        yield tuple(rng.random() < keep for _ in range(ops)), tuple(rng.randrange(n) for n in choices)


def _extremes(ops: int) -> Iterator[tuple[bool, ...]]:
    for value in (False, True):
        yield (value,) * ops
        for odd in range(ops):
            yield tuple(value != (index == odd) for index in range(ops))


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _reaches(path: str, names: dict[str, int]) -> bool:
    above = _above(path)
    return not above or (names.get(above) == 0 and _reaches(above, names))


def _apply(names: dict[str, int], change: Change) -> None:
    if change.file is None:
        names.pop(change.path, None)
    else:
        names[change.path] = change.file


@dataclass
class WeakDisk:
    """The seam in memory. `observe` is called after every changing operation; `missing` are broken rules.

    Broken rules: `link sync`, `file sync <text in the path>`, `dir sync <directory>`, `exclusive`.
    """

    url: str = "memory://runs/job"
    observe: Callable[[str, str], None] | None = None
    missing: frozenset[str] = frozenset()
    seen: dict[str, int] = field(default_factory=dict)
    safe: dict[str, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    contents: dict[int, Content] = field(default_factory=dict)
    lock: RLock = field(default_factory=RLock)
    temporary: int = 0

    @classmethod
    def of(cls, tree: Tree, **options: object) -> WeakDisk:
        """A disk that holds this, all of it durable."""
        disk = cls(**options)
        for path, data in tree.items():
            disk.seen[path] = 0 if data is None else disk._file(data, data)
        disk.safe = dict(disk.seen)
        return disk

    def snapshot(self) -> Snapshot:
        with self.lock:
            alive = {*self.seen.values(), *self.safe.values(), *(one.file for one in self.pending)}
            contents = {file: one for file, one in self.contents.items() if file in alive}
            return Snapshot(dict(self.seen), dict(self.safe), tuple(self.pending), contents)

    @classmethod
    def at(cls, snapshot: Snapshot, **options: object) -> WeakDisk:
        """The disk as it was, nothing forgotten: only a process has died."""
        disk = cls(**options)
        disk.seen, disk.safe = dict(snapshot.seen), dict(snapshot.safe)
        disk.pending, disk.contents = list(snapshot.pending), dict(snapshot.contents)
        return disk

    # Changing

    def open_exclusive(self, path: str) -> WeakHandle:
        with self.lock:
            self._check_parent(path)
            if path in self.seen:
                raise FileExistsError(path)
            file = self._file(b"", b"")
            self._name(path, file)
        self._did("create", path)
        return WeakHandle(self, path, file)

    def link_exclusive(self, path: str, data: bytes) -> None:
        """As the local storage does it: a private name, synced, linked, and the private name removed."""
        temporary = self._write_beside(path, data, synced="link sync" not in self.missing)
        try:
            with self.lock:
                if path in self.seen and "exclusive" not in self.missing:
                    raise FileExistsError(path)
                self._name(path, self.seen[temporary])
            self._did("link", path)
        finally:
            with self.lock:
                self._name(temporary, None)
            self._did("unlink", temporary)

    def replace(self, path: str, data: bytes) -> None:
        """A rename: after a power cut the old file, the new one, or none."""
        temporary = self._write_beside(path, data, synced=False)
        with self.lock:
            file = self.seen[temporary]
            if path in self.seen:
                self._name(path, None)
            self._name(path, file)
            self._name(temporary, None)
        self._did("rename", path)

    def _write_beside(self, path: str, data: bytes, *, synced: bool) -> str:
        temporary = path
        while temporary == path or temporary in self.seen:
            self.temporary += 1
            temporary = f"{_above(path)}/.tmp-{self.temporary}".lstrip("/")
        handle = self.open_exclusive(temporary)
        handle.write_at(0, memoryview(data))
        if synced:
            handle.sync_file()
        return temporary

    def mkdir(self, path: str) -> None:
        with self.lock:
            made = [part for part in _parents(path) if part not in self.seen]
            for part in made:
                self._name(part, 0)
        if made:
            self._did("mkdir", path)

    def sync_dir(self, path: str) -> None:
        with self.lock:
            if path and self.seen.get(path) != 0:
                raise StorageError(f"cannot sync directory {path}: no such directory")
            top = path if path in ("", "log") or "/" not in path else "try"
            if f"dir sync {top or 'root'}" in self.missing:
                return
            for change in self.pending:
                if change.directory == path:
                    _apply(self.safe, change)
            self.pending = [change for change in self.pending if change.directory != path]
        self._did("sync", path)

    def delete(self, path: str) -> None:
        with self.lock:
            if path not in self.seen:
                return
            inside = [other for other in self.seen if _above(other) == path]
            if not all("/.tmp-" in other for other in inside):
                raise StorageError(f"cannot delete {path}: Directory not empty")
            for other in (*inside, path):
                self._name(other, None)
        self._did("delete", path)

    def _name(self, path: str, file: int | None) -> None:
        change = Change(_above(path), path, file)
        _apply(self.seen, change)
        self.pending.append(change)

    def _file(self, seen: bytes, safe: bytes) -> int:
        number = max(self.contents, default=0) + 1
        self.contents[number] = Content(seen, safe)
        return number

    def _check_parent(self, path: str) -> None:
        above = _above(path)
        if above and self.seen.get(above) != 0:
            raise StorageError(f"cannot create {path}: its directory is gone")

    def _did(self, verb: str, path: str) -> None:
        if self.observe is not None:
            self.observe(verb, path)

    def rot(self, path: str) -> None:
        """A byte in the middle of a file is another one from now on."""
        file = self.seen[path]
        bad = bytearray(self.contents[file].seen)
        bad[len(bad) * 3 // 4] ^= 1
        self.contents[file] = Content(bytes(bad), bytes(bad))

    # Reading

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self.lock:
            file = self.seen.get(path)
            if not file:
                raise FileNotFoundError(path)
            return self.contents[file].seen[offset : offset + length]

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        data = self.read_range(path, offset, len(destination))
        destination[: len(data)] = data
        return len(data)

    def stat(self, path: str) -> int | None:
        with self.lock:
            file = self.seen.get(path)
            return len(self.contents[file].seen) if file else None

    def list(self, path: str) -> list[str]:
        with self.lock:
            names = [name.rpartition("/")[2] for name in self.seen if _above(name) == path]
            return sorted(name for name in names if not name.startswith(".tmp-"))


def _parents(path: str) -> list[str]:
    parts = path.split("/") if path else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


@dataclass
class WeakHandle:
    """A new file of a WeakDisk."""

    disk: WeakDisk
    path: str
    file: int
    alignment: int = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        with self.disk.lock:
            one, new = self.disk.contents[self.file], bytes(data)
            seen = one.seen[:offset].ljust(offset, b"\0") + new + one.seen[offset + len(new) :]
            self.disk.contents[self.file] = Content(seen, one.safe)
        self.disk._did("write", self.path)

    def preallocate(self, nbytes: int) -> None:
        with self.disk.lock:
            one = self.disk.contents[self.file]
            self.disk.contents[self.file] = Content(one.seen.ljust(nbytes, b"\0"), one.safe)

    def sync_file(self) -> None:
        if any(rule.startswith("file sync ") and rule[10:] in self.path for rule in self.disk.missing):
            return
        with self.disk.lock:
            one = self.disk.contents[self.file]
            self.disk.contents[self.file] = Content(one.seen, one.seen)
        self.disk._did("fsync", self.path)

    def close(self) -> None:
        """Nothing is kept back."""
