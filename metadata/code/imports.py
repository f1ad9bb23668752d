"""Import of archived source, and `torchrelay.load_code`.

Each archived module has its own `__import__` in its builtins, which Python calls for all imports of that
module, also later within functions. It searches the archive first, then uses the normal import. `sys.path`
and `sys.meta_path` do not change, and existing entries of `sys.modules` are not replaced. The modules are
added under unique names (`torchrelay_code_1.model`), so that several runs with equal module names can be
loaded in one process, and dataclasses, `typing` and `sys.modules[__name__]` find the right module.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import linecache
import os
import posixpath
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.capture import capture_with_code

_numbers = itertools.count(1)
PREFIX = "torchrelay_code_"
"""Prefix of the names of archived modules."""
_PATIENCE_SECS = 10.0


class ArchivedImports:
    """The modules of one archive; `prefix` is part of their names in `sys.modules`, not of their imports."""

    def __init__(
        self, what: str, contents: Mapping[str, bytes], links: Mapping[str, str], folders: Sequence[str]
    ) -> None:
        self.what = what
        self.prefix = f"{PREFIX}{next(_numbers)}"
        self.modules: dict[str, ModuleType] = {}
        self._contents, self._links = contents, links
        self._folders = tuple(folders)
        self._known_folders = {
            str(one) if str(one) != "." else ""
            for name in (*contents, *links)
            for one in PurePosixPath(name).parents
        }
        self._locks: dict[str, threading.RLock] = {}
        self._done: set[str] = set()
        self._builtins = {**vars(builtins), "__import__": self._import}

        # `importlib` whose `import_module` searches the archive.
        def import_module(name: str, package: str | None = None) -> ModuleType:
            full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
            full = self._plain(full)
            return self.module(full) if self._has(full) else importlib.import_module(full)

        own = ModuleType("importlib")
        own.__dict__.update(vars(importlib))
        own.__dict__["import_module"] = import_module
        self._importlib = own
        package = ModuleType(self.prefix, f"The modules of {what}.")
        package.__path__ = []
        sys.modules[self.prefix] = package

    def module(self, name: str) -> ModuleType:
        """Import a module of the archive by its full name; raises ModuleNotFoundError."""
        parent = ""
        for part in name.split("."):
            full = f"{parent}.{part}" if parent else part
            if full not in self._done:
                self._make_once(full, parent, part)
            parent = full
        return self.modules[name]

    def _has(self, name: str) -> bool:
        """Return True if the archive has the top-level module of this one, which is not built into Python."""
        top = name.partition(".")[0]
        if top in sys.builtin_module_names:
            return False
        return top in self.modules or self._find(top, self._folders) is not None

    def resolve(self, path: str) -> str:
        """Resolve links in the name of a file or folder."""
        for _ in range(40):
            parts = path.split("/")
            for count in range(1, len(parts) + 1):
                head = "/".join(parts[:count])
                if head in self._links:
                    target = posixpath.join(posixpath.dirname(head), self._links[head], *parts[count:])
                    path = posixpath.normpath(target)
                    break
            else:
                return path
        return path

    def _make_once(self, full: str, parent: str, part: str) -> None:
        """Import a module once; other threads wait with a timeout, because of possible deadlocks."""
        lock = self._locks.setdefault(full, threading.RLock())
        mine = lock.acquire(timeout=_PATIENCE_SECS)
        try:
            if full in self.modules:  # made meanwhile, or in progress in this thread or one that waits for it
                return
            if not mine:
                raise ImportError(f"{full} of {self.what} is being imported by another thread", name=full)
            self._make(full, parent, part)
            self._done.add(full)
        finally:
            if mine:
                lock.release()

    def _make(self, full: str, parent: str, part: str) -> None:
        places = self._folders if not parent else self._inside(self.modules[parent])
        found = self._find(part, places)
        if found is None:
            raise ModuleNotFoundError(f"No module named {full!r} in {self.what}", name=full)
        path, folders = found
        loader = _Loader(self, path)
        spec = importlib.machinery.ModuleSpec(
            f"{self.prefix}.{full}", loader, origin=f"{self.what}/{path}", is_package=folders is not None
        )
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__builtins__"] = self._builtins
        module.__file__ = f"{self.what}/{path}"
        if folders is not None:
            module.__path__ = [f"{self.what}/{folder}" for folder in folders]
        linecache.lazycache(module.__file__, module.__dict__)
        self.modules[full] = sys.modules[module.__name__] = module
        spec._initializing = True  # type: ignore[attr-defined]  # as importlib says of an import that is going on
        try:
            if path in self._contents:  # a folder without __init__.py
                loader.exec_module(module)
        except BaseException:
            self.modules.pop(full, None)
            sys.modules.pop(module.__name__, None)
            raise
        finally:
            spec._initializing = False  # type: ignore[attr-defined]
        setattr(self.modules[parent] if parent else sys.modules[self.prefix], part, module)

    def _inside(self, module: ModuleType) -> tuple[str, ...]:
        return tuple(one.removeprefix(f"{self.what}/") for one in getattr(module, "__path__", ()))

    def _find(self, part: str, places: Sequence[str]) -> tuple[str, list[str] | None] | None:
        """Find the file of a module, and the folders of a package."""
        bare: list[str] = []
        for place in places:
            folder = self.resolve(f"{place}/{part}" if place else part)
            package, file = self.resolve(f"{folder}/__init__.py"), self.resolve(f"{folder}.py")
            if package in self._contents:
                return package, [folder]
            if file in self._contents:
                return file, None
            if folder in self._known_folders:
                bare.append(folder)
        return (bare[0], bare) if bare else None

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level:
            around: Mapping[str, Any] = globals or {}
            package = around.get("__package__") or around.get("__name__", "").rpartition(".")[0]
            if not package:
                raise ImportError("attempted relative import with no known parent package")
            name = self._plain(importlib.util.resolve_name("." * level + name, package))
        elif name == "importlib" or name.startswith("importlib."):
            found = builtins.__import__(name, None, None, fromlist or (), 0)
            return self._importlib if found is importlib else found
        if not level and not self._has(name):
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        module = self.module(name)
        if not fromlist:
            return self.modules[name.partition(".")[0]]
        if hasattr(module, "__path__"):
            for one in getattr(module, "__all__", ()) if "*" in fromlist else fromlist:
                if not hasattr(module, one) and self._find(one, self._inside(module)) is not None:
                    self.module(f"{self._plain(module.__name__)}.{one}")
        return module

    def _plain(self, name: str) -> str:
        """Return a module's name without the prefix."""
        return name.removeprefix(f"{self.prefix}.")


class _Loader(importlib.abc.InspectLoader):
    """`importlib` loader for one file of the archive."""

    def __init__(self, imports: ArchivedImports, path: str) -> None:
        self._imports, self._path = imports, path

    def get_source(self, fullname: str) -> str:
        """Return the decoded source, also for tracebacks."""
        return importlib.util.decode_source(self._imports._contents.get(self._path, b""))

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module, with its location in the archive as the file name."""
        source = self._imports._contents.get(self._path, b"")
        return self.source_to_code(source, f"{self._imports.what}/{self._path}")

    def is_package(self, fullname: str) -> bool:
        """Return True for a package."""
        return self._path not in self._imports._contents or self._path.endswith("__init__.py")


class LoadedCode:
    """The archived source of one run; see `load_code`."""

    def __init__(
        self, what: str, code: Mapping[str, Any], files: dict[str, bytes], links: Mapping[str, str]
    ) -> None:
        self.id = code["id"]
        self.script: str | None = code.get("script")
        self._files = files
        # import roots: archived folders that were on the script's `sys.path`, then the roots
        path, roots = code.get("import_path"), code.get("roots")
        known = [*(path if isinstance(path, list) else ()), *(roots if isinstance(roots, dict) else ("",))]
        folders = tuple(dict.fromkeys(one for one in known if isinstance(one, str)))
        self._imports = ArchivedImports(what, files, links, folders)

    def import_module(self, name: str) -> ModuleType:
        """Import a module of the archive by its full name, at the first call; raises ModuleNotFoundError."""
        return self._imports.module(name)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the archived files."""
        return tuple(sorted(self._files))

    def read(self, name: str) -> bytes:
        """Read a file, such as a configuration; raises UsageError for an unknown name."""
        data = self._files.get(self._imports.resolve(name))
        if data is None:
            raise UsageError(f"{self._imports.what} has no file {name!r}; see `files`")
        return data

    def __repr__(self) -> str:
        return f"<code {self.id[:12]} of {self._imports.what}: {len(self._files)} files>"


def load_code(run: str | os.PathLike[str], attempt: int | None = None) -> LoadedCode:
    """Load the archived source of a run, beside other runs with equal module names.

    **Importing its modules executes the archived code**; do this only with trusted runs. `load_code` itself
    verifies all files and executes nothing.

    Modules import from their own archive first, and everything else (the standard library, torch) from this
    process. `sys.path`, the working directory and your own modules do not change. The modules are named
    `torchrelay_code_1.model` and so on, so other processes cannot find them (`multiprocessing` with spawn,
    pickles); for that, extract the archive with `torchrelay runs code`.

    Args:
        run: The run directory.
        attempt: Number of the launch; default: the newest with archived source.

    Returns:
        The source, with `import_module`, `files` and `read`.

    Raises:
        UsageError: The run does not exist, or its source was not archived.
        DamagedError: The archive is damaged.

    Example:
        old, new = torchrelay.load_code("runs/a"), torchrelay.load_code("runs/b")
        model = old.import_module("model").Net()  # each has its own `model`
    """
    path = Path(run).absolute()
    code = capture_with_code(path, attempt)["code"]
    place = path / "code" / f"{code['id']}.zip"
    with open_archive(place) as archive:
        return LoadedCode(str(place), code, archive.read_all(), archive.manifest.links)
