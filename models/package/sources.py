"""The source of a model's class: its module, and the modules of the user's that these import."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from torchrelay.metadata.code.imports import PREFIX
from torchrelay.metadata.zip_reader import name_fits

MAIN = "__main__"
_FOREIGN = tuple(
    str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "platstdlib", "purelib", "platlib")
)


def sources_of(model: nn.Module) -> tuple[str, dict[str, bytes], str]:
    """The class as "module:Class", the source files by name, and why there are none, or nothing.

    Archived are the modules of the classes of all parts and of their bases, and what they import of the
    user's own; installed packages and the standard library are not. A script is archived by its own name.
    """
    kind = type(model)
    class_path = f"{_module_name(kind.__module__)}:{kind.__qualname__}"
    if "<locals>" in kind.__qualname__:
        return (
            class_path,
            {},
            f"{kind.__qualname__} is a class inside of a function, which nothing can import",
        )
    own = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    waiting, files = sorted(own), dict[str, bytes]()
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        source = _source(module)
        if source is None:
            continue
        files[_file_name(name, module)] = source
        waiting.extend(_imported(source, name, module))
        waiting.extend(name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1))
    if not _has_class(files, class_path) and kind.__module__.startswith(PREFIX):
        why = "was made by archived source (trust_source, load_code), which is not archived again"
        return class_path, {}, f"{class_path.partition('.')[2]} {why}: give a model of the source's own file"
    if not _has_class(files, class_path) and _is_foreign_class(kind):
        return class_path, {}, f"{class_path} is of an installed package, which is not archived"
    if not _has_class(files, class_path):
        return class_path, {}, f"the module of {class_path} is no file"
    if odd := [name for name in sorted(files) if not name_fits(f"source/{name}")]:
        return class_path, {}, f"its source {odd[0]!r} has a name with other signs than archives hold"
    return class_path, files, ""


def _has_class(files: dict[str, bytes], class_path: str) -> bool:
    base = class_path.partition(":")[0].replace(".", "/")
    return f"{base}.py" in files or f"{base}/__init__.py" in files


def _is_foreign_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and getattr(module, "__file__", None) is not None


def _module_name(name: str) -> str:
    """A script's classes are imported by the script's own name."""
    if name == MAIN and (file := getattr(sys.modules[MAIN], "__file__", None)):
        return Path(file).stem
    return name


def _file_name(name: str, module: ModuleType) -> str:
    base = _module_name(name).replace(".", "/")
    return f"{base}/__init__.py" if hasattr(module, "__path__") else f"{base}.py"


def _source(module: ModuleType) -> bytes | None:
    """The bytes of a module of the user's own; None for all others."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or module.__name__.partition(".")[0] == "torchrelay":
        return None
    path = Path(file).resolve()
    if str(path).startswith(_FOREIGN) or "site-packages" in path.parts:
        return None
    try:
        return path.read_bytes()
    except OSError:
        return None


def _imported(source: bytes, name: str, module: ModuleType) -> Iterator[str]:
    """The modules that a source may import, by full name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    package = name if hasattr(module, "__path__") else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{above}.{base}".strip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
