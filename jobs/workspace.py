"""Workspaces: the named state of one node.

GLOBAL workspaces live as long as the session. PRIVATE ones are children for one run: they share the names of
their parent, and the names that they create are discarded with them.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import Blob, kind_of
from torchrelay.jobs.cluster import check_address, check_blob_name, dotted_prefixes
from torchrelay.jobs.containers import is_container, item_of, note_records, set_item, within
from torchrelay.records import dataclass


class WorkspaceType(str, Enum):
    """Type of workspace in which tasks of a group create names.

    Attributes:
        GLOBAL: It lives as long as the session.
        PRIVATE: It ends with the run.

    Example:
        TaskGroup(WorkspaceType.GLOBAL)
    """

    GLOBAL = "global"
    PRIVATE = "private"


def workspace_type_of(given: WorkspaceType | str | None) -> WorkspaceType | None:
    """Return the type given as itself or by its value; raises UsageError for another."""
    if given is None or given in list(WorkspaceType):
        return None if given is None else WorkspaceType(given)
    raise UsageError(f"{given!r} is not a workspace type: expected 'global' or 'private'")


class Origin(str, Enum):
    """Time of creation of a name in a GLOBAL workspace, which decides whether and how it is saved."""

    REGISTERED = "registered"
    INIT_PLACED = "init_placed"
    INIT_ALL = "init_all"
    LOADED = "loaded"
    LATER = "later"


@dataclass(frozen=True, eq=False)
class Entry:
    """The value of a name in a workspace; `blob` is set if the name was registered.

    A load changes the `registered` container in place, even if it was replaced since. `check` raises
    UsageError if the program replaced an object whose replacement is not saved.
    """

    value: Any
    origin: Origin = Origin.LATER
    blob: Blob | None = None
    registered: Any = None
    check: Callable[[], None] | None = None

    @property
    def target(self) -> Any:
        """Target of a load: the registered container, else the value."""
        return self.value if self.registered is None else self.registered


class Workspace(MutableMapping[str, Any]):
    """A thread-safe mapping of names to values.

    - Assigning a tensor to a registered tensor copies into it, so that closures over it stay valid.
    - A registered module or other object with state cannot be replaced; registered plain values can.
    - Items of containers also have dotted names (`ws["ema.weight"]`), unless that name exists itself.
    - Two workspaces are equal only if they are identical.

    Args:
        node: The name of its node.
        parent: The workspace whose names are shared; None means a GLOBAL one.

    Example:
        Workspace("trainer_0")["step"] = 0
    """

    __hash__ = object.__hash__

    def __init__(self, node: str = "trainer_0", parent: Workspace | None = None) -> None:
        self.node = node
        self.parent = parent
        self.gate: Callable[[], None] | None = None
        self.outliving: set[str] = set()
        """Names that are created here even by tasks with a PRIVATE child workspace."""
        self._entries: dict[str, Entry] = {}
        self._creating = Origin.LATER
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        kind = "" if self.parent is None else "private, "
        return f"Workspace({kind}{self.node}: {', '.join(self)})"

    def __getitem__(self, name: str) -> Any:
        owner = self._owner(name)
        return self._inner(name) if owner is None else owner._entries[name].value

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the value of `name`, or `default` if there is none.

        Args:
            name: A name, or the dotted name of an item in a container.
            default: What to return without a value.

        Returns:
            The value itself, not a copy.

        Example:
            best = ctx.workspace.get("best", 0.0)
        """
        try:
            return self[name]
        except KeyError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        check_blob_name(name)
        with self._lock:
            owner = self._owner(name)
            if owner is not None or (place := self._within(name)) is None:
                (owner or self._home(name))._assign(name, value)
                return
            if self.gate is not None:
                self.gate()
            held = item_of(*place) if name in self else None
            if isinstance(held, torch.Tensor) and held is not value:
                self._check_copy(name, held, value)
                with torch.no_grad():
                    held.copy_(value)
            else:
                set_item(*place, value)

    def setdefault(self, name: str, default: Any = None, /) -> Any:
        """Return the value of `name`, setting it to `default` first if there is none.

        Args:
            name: A name, or the dotted name of an item in a container.
            default: The value to set.

        Returns:
            The value itself, not a copy.

        Example:
            seen = ctx.workspace.setdefault("seen", [])
        """
        with self._lock:
            if name not in self:
                self[name] = default
            return self[name]

    def __delitem__(self, name: str) -> None:
        with self._lock:
            owner = self._owner(name)
            if owner is None:
                raise KeyError(self._missing(name))
            if owner._entries[name].blob is not None:
                raise UsageError(f"{name!r} is a registered blob of {self.node}: it cannot be deleted")
            owner._write(name, None)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            above = [] if self.parent is None else list(self.parent)
            return iter([*above, *(name for name in self._entries if name not in above)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def child(self) -> Workspace:
        """Create a PRIVATE child of this workspace."""
        return Workspace(self.node, self)

    def own_names(self) -> tuple[str, ...]:
        """Return the own names, without the parent's, in creation order."""
        return tuple(self.entries())

    def entries(self) -> dict[str, Entry]:
        """Return the own names with their entries, in creation order."""
        with self._lock:
            return dict(self._entries)

    def register(self, blob: Blob, value: Any, check: Callable[[], None] | None = None) -> None:
        """Set `value` as the content of a registered blob, replacing any earlier value.

        Args:
            blob: Its declaration.
            value: The content.
            check: Raises UsageError if the program replaced the object since.

        Example:
            ws.register(job.blobs["model"], model)
        """
        check_blob_name(blob.name)
        container = value if is_container(value) else None
        note_records(container)  # call the factory now
        with self._lock:
            self._write(blob.name, Entry(value, Origin.REGISTERED, blob, container, check))

    def registered(self, blob: Blob) -> bool:
        """Return True if this workspace holds the content of this declaration, not of a namesake."""
        entry = self._entries.get(blob.name)
        return entry is not None and entry.blob is blob

    def forget_others(self, blobs: Iterable[Blob]) -> None:
        """Drop names registered by other declarations, such as those of an earlier job."""
        mine = set(blobs)
        with self._lock:
            for name, entry in self.entries().items():
                if entry.blob is not None and entry.blob not in mine:
                    self._write(name, None)

    def set_loaded(self, name: str, value: Any) -> None:
        """Set a value loaded from a checkpoint.

        Registered names follow the rules of assignment; names created by `init` keep their origin, others
        become LOADED. A PRIVATE workspace forwards the value to its GLOBAL one.

        Args:
            name: A name, or for a value of another node its address, `trainer_1:total`, which is not saved.
            value: The value.

        Example:
            ws.set_loaded("step", 100)
        """
        if self.parent is not None:
            self.parent.set_loaded(name, value)
            return
        check_address(name)
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.origin is not Origin.LATER:
                self._assign(name, value)
            else:
                self._write(name, Entry(value, Origin.LOADED))

    @contextmanager
    def creating(self, origin: Origin) -> Iterator[None]:
        """Context manager that gives names created meanwhile, by any thread, this origin."""
        with self._lock:
            before, self._creating = self._creating, origin
        try:
            yield
        finally:
            with self._lock:
                self._creating = before

    def _owner(self, name: object) -> Workspace | None:
        if name in self._entries:
            return self
        return None if self.parent is None else self.parent._owner(name)

    def _home(self, name: str) -> Workspace:
        """Return the workspace in which a new name is created."""
        above = None if self.parent is None else self.parent._home(name)
        return above if above is not None and name in above.outliving else self

    def target(self, name: str) -> Any:
        """Return the target of a load of `name`: the registered container, else the value."""
        owner = self._owner(name)
        return self._inner(name) if owner is None else owner._entries[name].target

    def lies_inside(self, name: str) -> bool:
        """Return True if a dotted name refers to an existing or new item of a container held here."""
        return self._owner(name) is None and self._within(name) is not None

    def _within(self, name: object) -> tuple[Any, Any] | None:
        """Return the holder and key inside a container that a dotted name refers to."""
        for prefix in reversed(dotted_prefixes(name)) if isinstance(name, str) else ():
            owner = self._owner(prefix)
            if owner is not None and is_container(found := owner._entries[prefix].value):
                return within(found, str(name)[len(prefix) + 1 :])
        return None

    def _inner(self, name: object) -> Any:
        if (place := self._within(name)) is not None:
            with suppress(LookupError):
                return item_of(*place)
        raise KeyError(self._missing(name))

    def _assign(self, name: str, value: Any) -> None:
        entry = self._entries.get(name)
        if entry is None:
            self._write(name, Entry(value, self._creating))
        elif entry.blob is None or entry.value is value or kind_of(entry.value) == "value":
            self._write(name, replace(entry, value=value))
        else:
            self._check_copy(name, entry.value, value)
            self._write(name, entry, copied_from=value)

    def _write(self, name: str, entry: Entry | None, copied_from: torch.Tensor | None = None) -> None:
        """Set one own name, with the lock held; all writes of all workspaces pass through here.

        The gate blocks while a save still reads the old bytes, so a save must never wait for a workspace.
        """
        if self.gate is not None:
            self.gate()
        if entry is None:
            del self._entries[name]
            return
        if copied_from is not None:
            with torch.no_grad():
                entry.value.copy_(copied_from)
        self._entries[name] = entry

    def _check_copy(self, name: str, target: Any, value: Any) -> None:
        if not isinstance(target, torch.Tensor):
            raise UsageError(
                f"{name!r} on {self.node} is a registered {type(target).__name__} and cannot be replaced, "
                f"because other objects refer to it: change it in place, for instance with "
                f"ctx[{name!r}].load_state_dict(...)"
            )
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name!r} on {self.node} is a registered tensor, so it takes tensors and not a "
                f"{type(value).__name__}: for one number everywhere use ctx[{name!r}].fill_(...)"
            )
        if target.shape != value.shape or target.dtype != value.dtype:
            raise UsageError(
                f"{name!r} on {self.node} is a registered tensor of {tuple(target.shape)} {target.dtype} and "
                f"cannot take one of {tuple(value.shape)} {value.dtype}: convert it first or use another name"
            )

    def _missing(self, name: object) -> str:
        near = difflib.get_close_matches(str(name), self, n=3)
        names = f"the nearest are {', '.join(map(repr, near))}" if near else f"there are {len(self)} others"
        return f"no {name!r} in the workspace of {self.node}; {names}"
