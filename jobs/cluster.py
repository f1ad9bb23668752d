"""Nodes and their cluster: names, placement, and the current instances inside `with` blocks.

Each managed class has its own stack of current instances per thread; a thread starts with empty stacks.

Names are restricted so that an address such as `trainer_1:model.*.weight` is unambiguous.
"""

from __future__ import annotations

import functools
import re
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeVar, cast, overload

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.records import dataclass

M = TypeVar("M", bound="Managed")
F = TypeVar("F", bound=Callable[..., Any])

_thread = threading.local()


class Managed:
    """Base of classes whose instances can be current inside a `with` block, or around each decorated call."""

    @overload
    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: Literal[True] = True) -> M: ...

    @overload
    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: Literal[False]) -> M | None: ...

    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: bool = True) -> M | None:
        """Return `value` if there is one, else the innermost instance of this thread.

        Raises UsageError for a value of another class; NotAllowedNowError without one, if `required`.
        """
        if value is not None and not isinstance(value, cls):
            raise UsageError(f"expected a {cls.__name__}, got {value!r} of type {type(value).__name__}")
        if value is not None:
            return value
        stack = _stack(cls)
        if stack:
            return cast(M, stack[-1])
        if not required:
            return None
        raise NotAllowedNowError(
            f"no current {cls.__name__} in this thread: do this inside `with {cls.__name__}(...):`"
        )

    def __enter__(self: M) -> M:
        for cls in _managed_classes(type(self)):
            _stack(cls).append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stacks = [_stack(cls) for cls in _managed_classes(type(self))]
        if any(not stack or stack[-1] is not self for stack in stacks):
            raise NotAllowedNowError(
                f"{self!r} is not the innermost {type(self).__name__} of this thread: "
                "exit contexts in reverse order"
            )
        for stack in stacks:
            stack.pop()

    def __call__(self, function: F) -> F:
        """Wrap `function` so that it runs with this instance current."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(F, inside)


def _stack(cls: type[Managed]) -> list[Managed]:
    stacks: dict[type[Managed], list[Managed]] = _thread.__dict__.setdefault("stacks", {})
    return stacks.setdefault(cls, [])


def _managed_classes(cls: type[Managed]) -> list[type[Managed]]:
    return [base for base in cls.__mro__ if issubclass(base, Managed) and base is not Managed]


MAX_BLOB_NAME_BYTES = 1024
"""Longest blob name in bytes of UTF-8."""

RANDOM_STATES = "rng"
"""Reserved name of the blob with a node's random states."""

GRADIENTS = "@grad"
"""Reserved name of the blob with a node's gradients."""

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
_ADDRESS_CHARACTERS = ":*?[]@"


def check_node_name(name: str) -> str:
    """Return `name` if it is a valid node name; raises UsageError otherwise."""
    if isinstance(name, str) and _NODE.fullmatch(name):
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a node: use up to 63 letters, digits and . _ : - "
        "beginning with a letter or digit, such as 'trainer_0'"
    )


def check_blob_name(name: str) -> str:
    """Return `name` if it is a valid blob name; raises UsageError otherwise."""
    if _all_plain([name]):
        return name
    problem = ""
    if not isinstance(name, str):
        problem = f"it is a {type(name).__name__}, names are str"
    elif not name:
        problem = "it is empty"
    elif found := sorted(set(name) & set(_ADDRESS_CHARACTERS)):
        problem = f"it has {' '.join(found)}, reserved for addresses such as 'trainer_1:model.*'"
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        problem = "it has control characters or lone surrogates"
    elif len(name.encode()) > MAX_BLOB_NAME_BYTES:
        problem = f"it has {len(name.encode())} bytes, more than {MAX_BLOB_NAME_BYTES}"
    if problem:
        raise UsageError(f"{name!r} cannot be the name of a blob: {problem}")
    return name


def check_address(name: str) -> str:
    """Return `name` if it is a blob name or a `node:name` address; raises UsageError otherwise."""
    node, colon, blob = name.rpartition(":")  # only node names may contain a colon
    if colon:
        check_node_name(node)
    check_blob_name(blob)
    return name


def check_blob_names(names: Iterable[str], containers: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check each name, and that none is reserved or a dotted prefix of another; raises UsageError.

    Leaves are addressed as `blob.leaf`, so with both `a` and `a.b` the address `a.b.c` would be ambiguous.
    Objects inside a container are an exception; `containers` maps their names to its name.
    """
    given = list(names)
    if not _all_plain(given):
        for name in given:
            check_blob_name(name)
    known = set(given)
    if RANDOM_STATES in known or any(map(str.startswith, given, repeat(f"{RANDOM_STATES}."))):
        _refuse_mixed(known, containers)
    depths = set(map(str.count, given, repeat(".")))
    if len(depths) > 1 and not known.isdisjoint(_prefixes(given)):  # names of equal depth are never prefixes
        _refuse_mixed(known, containers)


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return all dotted prefixes of the names."""
    found = {""}
    while names := set(map(itemgetter(0), map(str.rpartition, names, repeat(".")))) - found:
        found |= names
    return found


def _all_plain(names: Sequence[object]) -> bool:
    """Fast check: return True if all names are printable ASCII without characters of addresses."""
    try:
        text = "".join(names)  # type: ignore[arg-type]
    except TypeError:  # not a str
        return False
    sizes = set(map(len, names))  # type: ignore[arg-type]
    return (
        text.isascii()
        and text.isprintable()
        and not any(character in text for character in _ADDRESS_CHARACTERS)
        and min(sizes, default=1) > 0
        and max(sizes, default=1) <= MAX_BLOB_NAME_BYTES
    )


def _refuse_mixed(known: Collection[str], containers: Mapping[str, str]) -> None:
    """Raise UsageError for the name that is reserved or a prefix of another."""
    for name in sorted(known):
        if name == RANDOM_STATES or name.startswith(f"{RANDOM_STATES}."):
            raise UsageError(f"blob name {name!r} is reserved: choose another name")
        shorter = next((prefix for prefix in dotted_prefixes(name) if prefix in known), None)
        if shorter is not None and shorter != containers.get(name):
            raise UsageError(
                f"blob {shorter!r} is a dotted prefix of blob {name!r}, so the addresses of their "
                f"leaves would be ambiguous: rename one of them, for instance to {name.replace('.', '_')!r}"
            )


def dotted_prefixes(name: str) -> list[str]:
    """Return the proper prefixes of `name` that end before a dot: `a.b.c` has `a` and `a.b`."""
    found, at = [], name.find(".")
    while at >= 0:
        found.append(name[:at])
        at = name.find(".", at + 1)
    return found


class Cluster(Managed):
    """The nodes declared while this cluster was current, ordered, each once.

    If a node is declared again with other scheduler options, the earlier value of each option is kept.
    """

    def __init__(self) -> None:
        self._options: dict[str, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"Cluster({', '.join(self._options)})"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes in the order of their first declaration."""
        return tuple(self._options)

    def declare(self, name: str, **options: Any) -> None:
        """Add a node; raises UsageError for a bad name."""
        known = self._options.setdefault(check_node_name(name), {})
        self._options[name] = {**options, **known}

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the options of a declared node; raises KeyError for another."""
        return MappingProxyType(self._options[name])


class Node(Managed):
    """A node, on which tasks run and which has a workspace; nodes with equal names are equal.

    Inside `with Node("trainer_0"):` new tasks belong to that node. A node is declared in the
    current Cluster, if any. Raises UsageError for an invalid name.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name = check_node_name(name)
        cluster = Cluster.current(required=False)
        if cluster is not None:
            cluster.declare(name, **options)

    def __repr__(self) -> str:
        return f"Node({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def node_name(node: str | Node | None) -> str | None:
    """Return the name of a node given as a Node or a name; None means the current node, if any."""
    if node is None:
        node = Node.current(required=False)
    if node is None or isinstance(node, Node):
        return node.name if node else None
    return check_node_name(node)


@dataclass(frozen=True)
class NodePlace:
    """A node of the job, its rank among them, and the process that hosts it.

    `host_index` is torchrun's group rank; emulated nodes share process 0.
    """

    name: str
    rank: int
    world_size: int
    host: str = "localhost"
    host_index: int = 0
    local_rank: int = 0
    role: str = "default"
    process: int = 0

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank} on {self.host})"


On = str | int | Collection[int] | Callable[[NodePlace], object]
"""Placement of a task: see `FORMS`."""

FORMS = (
    '"all", "rank0" (any rank<n>), an int or a list of ints (ranks), "host:1" (index or name), '
    '"local_rank0" (any local_rank<n>), "role:x", or a callable that takes the NodePlace'
)

_LISTS = (list, tuple, set, frozenset, range)
_TEXT = re.compile(
    r"(?P<all>all)|rank(?P<rank>[0-9]+)|local_rank(?P<local>[0-9]+)|host:(?P<host>.+)|role:(?P<role>.+)"
)


def check_on(on: On) -> None:
    """Raise UsageError with the valid forms for an invalid `on`."""
    ranks = on if isinstance(on, _LISTS) else [on]
    known = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ranks) and ranks
    if not (_TEXT.fullmatch(on) if isinstance(on, str) else callable(on) or known):
        raise UsageError(f"on={on!r} is invalid: expected {FORMS}")


def selected(on: On, place: NodePlace) -> bool:
    """Return True if a task with this `on` runs at `place`; raises UsageError for an unknown form."""
    check_on(on)
    if callable(on):
        return bool(on(place))
    if not isinstance(on, str):
        return place.rank == on if isinstance(on, int) else place.rank in on
    found = match.groupdict() if (match := _TEXT.fullmatch(on)) else {}
    if found["rank"]:
        return place.rank == int(found["rank"])
    if found["local"]:
        return place.local_rank == int(found["local"])
    if found["host"]:
        return found["host"] in (str(place.host_index), place.host)
    return place.role == found["role"] if found["role"] else True
