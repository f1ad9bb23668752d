"""`save` and `load`: a model, optionally with the states of an epoch, as one file that needs no source."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.files.publish import Where
from torchrelay.checkpoint.format import canonical_json, values
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import BlobError, DamagedError, UsageError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.code.imports import PREFIX, ArchivedImports
from torchrelay.metadata.zip_reader import name_fits
from torchrelay.models.archive.api import aux_of, checked, fill, recorded_call, states_of
from torchrelay.models.archive.manifest import (
    PACKAGE,
    Contents,
    States,
    TensorToStore,
    open_archive_file,
    write_contents,
)
from torchrelay.models.package import reader
from torchrelay.models.package.compile import export, parts_that_train_otherwise
from torchrelay.models.package.graph_lowering import Dynamic, LoweredProgram
from torchrelay.models.package.reader import SOURCE, Package, open_package, package_of
from torchrelay.records import Json

MAIN = "__main__"
_FOREIGN = tuple(
    str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "platstdlib", "purelib", "platlib")
)


def sources_of(model: nn.Module) -> tuple[str, dict[str, bytes], str]:
    """Return the class as "module:Class", the source files by name, and the reason if there are none.

    Source files are the user's modules that define the classes of all parts and their bases, and their
    imports, without installed packages and the standard library. A script is archived under its own name.
    """
    kind = type(model)
    class_path = f"{_module_name(kind.__module__)}:{kind.__qualname__}"
    if "<locals>" in kind.__qualname__:
        return class_path, {}, f"{kind.__qualname__} is a local class, which cannot be imported"
    own = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    waiting, files = sorted(own), dict[str, bytes]()
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        source = _source_text(module)
        if source is None:
            continue
        base = _module_name(name).replace(".", "/")
        files[f"{base}/__init__.py" if hasattr(module, "__path__") else f"{base}.py"] = source
        waiting.extend(_imported(source, name, module))
        waiting.extend(name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1))
    base = _module_name(kind.__module__).replace(".", "/")
    has_class = bool({f"{base}.py", f"{base}/__init__.py"} & files.keys())
    why = ""
    if has_class:
        if odd := [name for name in sorted(files) if not name_fits(f"source/{name}")]:
            why = f"its source {odd[0]!r} has a name with other signs than archives hold"
    elif kind.__module__.startswith(PREFIX):
        made = "was made by archived source (trust_source, load_code), which is not archived again"
        name = class_path.partition(".")[2]
        why = f"{name} {made}: use a model whose class is in its source file"
    elif getattr(sys.modules.get(kind.__module__), "__file__", None) is not None:
        why = f"{class_path} belongs to an installed package, which is not archived"
    else:
        why = f"the module of {class_path} is not a file"
    return class_path, {} if why else files, why


def _module_name(name: str) -> str:
    """Return the name under which a class is imported; for `__main__` the name of the script."""
    if name == MAIN and (file := getattr(sys.modules[MAIN], "__file__", None)):
        return Path(file).stem
    return name


def _source_text(module: ModuleType) -> bytes | None:
    """Return the source of a user's module; None for all other modules."""
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
    """Return the full names of modules that a source may import."""
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


def of_epoch(
    model: nn.Module, run: str | os.PathLike[str], epoch: int | str, blob: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy of the model loaded from an epoch, and `run`, `epoch` and `code_id` as far as known."""
    opened = open_checkpoint(run, epoch)
    if blob not in opened.blobs:
        raise UsageError(f"{run} has no blob {blob!r}, it has {', '.join(opened.blobs)}: give blob=")
    loaded = copy.deepcopy(model)
    opened.load({blob: loaded})
    found = {"run": os.fspath(run), "epoch": opened.epoch, "code_id": code_id_of_run(run)}
    return loaded, {key: value for key, value in found.items() if value is not None}


def code_id_of_run(run: str | os.PathLike[str]) -> str | None:
    """Return the code id of a run; None if its launches had different ones."""
    path = Path(run)
    ids = {code_id_of(one) for one in captures(path)} if path.is_dir() else set()
    return ids.pop() if len(ids) == 1 else None


Constructor = tuple[Sequence[Any], Mapping[str, Any]]


def save(
    path: Where,
    model: nn.Module,
    inputs: Any = None,
    *,
    constructor: Constructor | None = None,
    dynamic: Dynamic | None = None,
    labels: Sequence[str] | None = None,
    preprocessing: Any = None,
    metadata: Mapping[str, Any] | None = None,
    aux_states: Mapping[str, Any] | None = None,
    source: bool = True,
    drop_unused: bool = False,
    run: str | os.PathLike[str] | None = None,
    epoch: int | str = "last",
    blob: str = "model",
    overwrite: bool = False,
) -> Package:
    """Write states, traced program and source of a model to one file, for `load`.

    Args:
        path: File name or fsspec URL.
        model: The model; it is not changed.
        inputs: Example inputs of `forward`, as for `compile`; default: those of `compile`.
        constructor: `(args, kwargs)` of the class, if it takes arguments.
        dynamic: Dynamic sizes such as `{"tokens": {0: "batch"}}`; default: the first size.
        labels: Names of the output classes.
        preprocessing: A description of the preprocessing.
        metadata: Plain values to store.
        aux_states: Values and tensors as for `save_states`.
        source: Archive the source.
        drop_unused: Omit inputs that do not affect the outputs.
        run: Run or checkpoint directory to take the states from, with `epoch` and `blob`.
        epoch: A number, "last" or "best".
        blob: Name of the blob with the states.
        overwrite: Replace an existing file.

    Returns:
        The written package.

    Example:
        save("model.zip", model, torch.zeros(1, 28, 28), labels=["cat", "dog"])
    """
    if inputs is None and (known := recorded_call(checked(model))):
        inputs, dynamic = known.inputs, dynamic or known.dynamic
    if run is not None:
        model, of_run = of_epoch(checked(model), run, epoch, blob)
        metadata = {**of_run, **(metadata or {})}
    states, without = states_of(checked(model)), list[str]()
    exported = _exported(model, inputs, dynamic, without, drop_unused=drop_unused)
    class_path, files = _source(model, wanted=source, without=without)
    arguments = _constructor(model, constructor, without) if files else None
    package = _described(exported, labels, preprocessing, metadata) | {
        "still": parts_that_train_otherwise(model), "class_path": class_path, "constructor": arguments,
        "without": without,
    }  # fmt: skip
    contents = _contents(states, exported, files, aux_of(aux_states or {}, states), package)
    where = write_contents(path, contents, overwrite=overwrite)
    _warn_incomplete(where, without, exported is not None, bool(files), arguments is not None)
    return open_package(path)


def _warn_incomplete(
    where: str, without: list[str], has_program: bool, has_source: bool, has_arguments: bool
) -> None:
    """Warn of a package that contains states only, or source without constructor arguments."""
    if not has_arguments and (has_source or not has_program):
        lacks = "cannot rebuild the model from its source" if has_program else "contains states only"
        warnings.warn(f"{where} {lacks}: {'; '.join(without)}", stacklevel=3)


def _described(
    exported: LoweredProgram | None,
    labels: Sequence[str] | None,
    preprocessing: Any,
    metadata: Mapping[str, Any] | None,
) -> dict[str, Json]:
    def refused(path: str, tensor: torch.Tensor) -> Json:
        raise BlobError(
            f"{path} is a tensor, but metadata takes plain values: use aux_states={{...}}, which "
            "load_states(path, model) and open_package(path).aux() give back"
        )

    if isinstance(labels, str) or not all(isinstance(one, str) for one in labels or ()):
        raise UsageError("labels must be a sequence of strings, one per class")
    return {
        "program": exported is not None,
        "signature": None if exported is None else exported.signature.to_json(),
        "labels": None if labels is None else list(labels),
        "preprocessing": values.encode(preprocessing, "preprocessing"),
        "metadata": values.encode(dict(metadata or {}), "metadata", tensor=refused),
    }


def _contents(
    states: States,
    exported: LoweredProgram | None,
    files: Mapping[str, bytes],
    aux: tuple[Json, Mapping[str, TensorToStore]],
    package: Json,
) -> Contents:
    constants = {} if exported is None else exported.constants
    members = {reader.SOURCE + name: data for name, data in files.items()}
    if exported is not None:
        members[reader.PROGRAM] = canonical_json.dumps(exported.json)
    stored = {name: TensorToStore(tensor) for name, tensor in constants.items()}
    return Contents(PACKAGE, states, aux, stored, package=package, members=members)


def _exported(
    model: nn.Module, inputs: Any, dynamic: Dynamic | None, without: list[str], *, drop_unused: bool
) -> LoweredProgram | None:
    if inputs is None:
        without.append("no program and no signature: no inputs were given, and compile was not called")
        return None
    try:
        exported = export(model, inputs, dynamic, drop_unused=drop_unused)
    except BlobError as error:
        without.append(f"no program: {error}")
        return None
    without.extend(f"no dynamic size {name!r}: the traced model fixes it" for name in exported.fixed)
    return exported


def _source(model: nn.Module, *, wanted: bool, without: list[str]) -> tuple[str, dict[str, bytes]]:
    class_path, files, reason = sources_of(model)
    if not wanted:
        without.append("no source: source=False was given")
        return class_path, {}
    if reason:
        without.append(f"no source: {reason}")
    return class_path, files


def _constructor(model: nn.Module, given: Constructor | None, without: list[str]) -> Json:
    if given is None:
        try:
            inspect.signature(type(model)).bind()
        except TypeError:
            without.append(
                f"no constructor arguments: {type(model).__name__} needs some; "
                "give constructor=(args, kwargs)"
            )
            return None
        given = ((), {})
    if len(given) != 2 or not isinstance(given[0], (list, tuple)) or not isinstance(given[1], Mapping):
        raise UsageError("constructor must be (args, kwargs), a sequence and a dict")
    args, kwargs = list(given[0]), dict(given[1])
    try:
        inspect.signature(type(model)).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"constructor: {type(model).__name__} does not accept these: {error}") from None
    return {"args": values.encode(args, "constructor"), "kwargs": values.encode(kwargs, "constructor")}


def load(path: Where, *, trust_source: bool = False) -> nn.Module:
    """Load the model of a package, in eval mode on the CPU.

    By default its program is run, which consists of torch operators: no code of the package is executed and
    nothing is unpickled. An untrusted package can still use much time and memory, or trigger bugs of torch's
    operators.

    Args:
        path: File name or fsspec URL.
        trust_source: **Execute the archived source** and build the original class with the archived
            constructor arguments, to train it. Its modules get unique names and replace none of yours.

    Returns:
        The model.

    Raises:
        UsageError: The package lacks the program or source.
        BlobError: The states do not fit the model built from source.
        FormatError: The file is not a package, or from a newer version.
        DamagedError: Stored bytes are damaged.
        StorageError: Reading failed.

    Example:
        model = load("model.zip")
    """
    if not trust_source:
        return open_package(path).module()
    with open_archive_file(path) as archive:
        package = package_of(archive, path)
        if not package.source or not package.has_constructor:
            raise UsageError(f"{package.where} cannot be rebuilt from source: {'; '.join(package.without)}")
        fields = archive.fields.fields("package").fields("constructor")
        args, kwargs = decode(fields.values.get("args")), decode(fields.values.get("kwargs"))
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise DamagedError(f"{fields.what} is damaged: it has no constructor arguments")
        contents = {name: archive.read(SOURCE + name) for name in package.source}
        module, _, name = package.class_path.partition(":")
        try:
            found: Any = ArchivedImports(package.where, contents, {}, ("",)).module(module)
            for part in name.split("."):
                found = getattr(found, part)
            model = found(*args, **kwargs)
        except Exception as error:
            raise BlobError(
                f"the archived source of {package.where} cannot build {package.class_path}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(model, nn.Module):
            raise BlobError(
                f"{package.class_path} of {package.where} returns a {type(model).__name__}, not a module"
            )
        fill(archive, model, strict=True)
    return model.eval()
