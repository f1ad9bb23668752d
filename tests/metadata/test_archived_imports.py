"""Imports from archived source behave as the interpreter's own, for several runs at once."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import traceback
import typing
from pathlib import Path
from types import ModuleType

import pytest
from source_trees import fill

from torchrelay.metadata.code.imports import ArchivedImports

_numbers = itertools.count()


def imports(files: dict[str, str], *folders: str, links: dict[str, str] | None = None) -> ArchivedImports:
    contents = {name: text.encode() for name, text in files.items()}
    what = f"code{next(_numbers)}.zip"  # an archive is named by its content
    return ArchivedImports(what, contents, links or {}, folders or ("",))


def test_packages_relative_imports_and_namespaces() -> None:
    """Every form of import finds the module that it names, each module is run once."""
    found = imports(
        {
            "pkg/__init__.py": "from . import a\nfrom .sub import *\ncount = []",
            "pkg/a.py": "import pkg.sub.deep as deep\nfrom pkg.sub.deep import D as value\n"
            "from .sub import deep as same",
            "pkg/sub/__init__.py": "__all__ = ['deep', 'E']\nE = 5",
            "pkg/sub/deep.py": "from . import E\nD = E - 1",
            "space/part/one.py": "X = 1",
            "user.py": "import space.part.one, pkg.sub as s\nfrom space.part import one\n"
            "Y = space.part.one.X + s.E",
        }
    )
    pkg, user = found.module("pkg"), found.module("user")
    assert (pkg.a.value, pkg.E, pkg.deep is pkg.a.deep is pkg.a.same, user.Y) == (4, 5, True, 6)
    assert user.one is found.module("space.part.one")
    assert found.module("pkg") is pkg


def test_circular_imports_and_failures() -> None:
    """Modules may import each other; one that raised is not there and can be asked for again."""
    found = imports(
        {
            "a.py": "import b\nX = 1",
            "b.py": "import a\ndef x(): return a.X",
            "bad.py": "import a\nraise KeyError(a.X)",
        }
    )
    assert found.module("a").b.x() == 1
    for _ in range(2):
        with pytest.raises(KeyError):
            found.module("bad")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        found.module("nothing")
    with pytest.raises(ModuleNotFoundError):
        found.module("a.inner")


def test_threads_that_import_while_a_module_is_being_made() -> None:
    """A module may wait for a thread of its own that imports others; each module is run once for all."""
    text = (
        "import threading\ntold = []\ndef work():\n from other import X\n told.append(X)\n"
        "some = [threading.Thread(target=work) for _ in range(4)]\n"
        "[one.start() for one in some]\n[one.join(60) for one in some]\n"
    )
    found = imports({"m.py": text, "other.py": "import time\ntime.sleep(0.05)\nX = object()"})
    told = found.module("m").told
    assert len(told) == 4
    assert set(told) == {found.module("other").X}


def test_imports_of_later_get_their_own_modules_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of functions, through importlib and __import__, in other threads: never another's module."""
    fill(tmp_path, {"later.py": "NAME = 'of this process'"})
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "def plain():\n from later import NAME\n return NAME\n"
        "def asked():\n import importlib\n return importlib.import_module('later').NAME\n"
        "def taken():\n from importlib import import_module as load\n return load('.later', 'pkg').NAME\n"
        "def called():\n return __import__('later').NAME\n"
    )
    one, two = (
        imports(
            {"m.py": text, "later.py": f"NAME = {n}", "pkg/__init__.py": "", "pkg/later.py": f"NAME = {n}"}
        )
        for n in (1, 2)
    )
    told: list[int] = []
    for _ in range(2):
        for number, found in ((1, one), (2, two)):
            module = found.module("m")
            thread = threading.Thread(target=lambda module=module: told.append(module.plain()))
            thread.start()
            thread.join()
            for how in (module.plain, module.asked, module.taken, module.called):
                assert how() == number
    assert told == [1, 2, 1, 2]
    assert "later" not in sys.modules


def test_what_is_not_archived_comes_from_this_process() -> None:
    """Standard library and installed packages are the very modules of this process, builtin ones always."""
    found = imports(
        {
            "m.py": "import sys, json, os.path as p, xml.etree.ElementTree as e\n"
            "from torch import nn\nimport colorsys",
            "sys.py": "x = 1",
        }
    )
    module = found.module("m")
    import json
    import os.path
    import xml.etree.ElementTree

    from torch import nn

    assert (module.sys, module.json, module.p, module.e, module.nn) == (
        sys,
        json,
        os.path,
        xml.etree.ElementTree,
        nn,
    )
    assert isinstance(module.colorsys, ModuleType)


def test_links_and_folders_of_the_path() -> None:
    """Folders that were on the path are looked into in their order, links followed."""
    files = {
        "rooms/a/x.py": "X = 'room'",
        "src/y.py": "import pkg.a.x as x\nY = x.X",
        "lib/y.py": "Y = 'lib'",
    }
    links = {"src/pkg/a": "../../rooms/a"}
    assert imports(files, "src", "lib", links=links).module("y").Y == "room"
    assert imports(files, "lib", "src", links=links).module("y").Y == "lib"


def test_tracebacks_and_inspect_show_archived_lines() -> None:
    """A person sees which archive a line is from, and the line; encodings that a file declares count."""
    found = imports({"m.py": "def f():\n    raise OSError('x')  # this very line\n"})
    module = found.module("m")
    assert "this very line" in inspect.getsource(module.f)
    try:
        module.f()
    except OSError:
        text = traceback.format_exc()
    assert f'File "{found.what}/m.py", line 2' in text
    assert "this very line" in text
    latin = ArchivedImports("code.zip", {"m.py": "# coding: latin-1\nX = 'é'".encode("latin-1")}, {}, ("",))
    assert latin.module("m").X == "é"


def test_classes_that_look_at_their_module_work() -> None:
    """Dataclasses with annotations as text, enums and named tuples are made as ever."""
    found = imports(
        {
            "m.py": "from __future__ import annotations\nimport dataclasses, enum, typing\n"
            "@dataclasses.dataclass\nclass A:\n    x: int = 1\n    y: typing.ClassVar[int] = 2\n"
            "class E(enum.Enum):\n    ONE = 1\nclass T(typing.NamedTuple):\n    x: int\n"
            "import sys\ndef own():\n    return sys.modules[__name__]\n"
        }
    )
    module = found.module("m")
    assert (module.A(5).x, module.E.ONE.value, module.T(3).x, module.A.__module__) == (
        5, 1, 3, f"{found.prefix}.m",
    )  # fmt: skip
    assert typing.get_type_hints(module.A)["x"] is int
    assert module.own() is module
