"""`load`: the model of a package, by its program, or by its archived source where that is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrelay.checkpoint.archive.archive_file import MEMBER_LIMIT, ArchiveFile, open_archive_file
from torchrelay.checkpoint.archive.loading import fill
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.package.opening import SOURCE, Package, open_package, package_of
from torchrelay.errors import BlobError, DamagedError, UsageError
from torchrelay.metadata.code.imports import ArchivedImports


def load(path: Where, *, trust_source: bool = False) -> nn.Module:
    """The model of a package, in eval mode on the CPU, without its class being there.

    Without more said its program runs: operators of torch, told as data. No code of the package is run and
    nothing is unpickled. A package of strangers can still cost time and memory, and meet bugs of torch's
    operators.
    **With `trust_source=True` the archived source is run** with this process's rights, to make the class
    anew with the archived constructor arguments: trust it as your own scripts. Then it is the real class,
    which trains as ever. Its modules get names of their own, so nothing of yours is replaced.
    Raises UsageError where the package has not what is asked for, and says what it has; BlobError where the
    source does not give a model that the states fit; FormatError, DamagedError, StorageError.
    """
    if not trust_source:
        return open_package(path).module()
    with open_archive_file(path) as archive:
        package = package_of(archive, path)
        if not package.source or not package.has_constructor:
            raise UsageError(f"{package.where} cannot be rebuilt from source: {'; '.join(package.without)}")
        model = _constructed(archive, package)
        fill(archive, model, strict=True)
    return model.eval()


def _constructed(archive: ArchiveFile, package: Package) -> nn.Module:
    args, kwargs = _arguments(archive.fields.fields("package").fields("constructor"))
    contents = {name: archive.read(SOURCE + name, MEMBER_LIMIT) for name in package.source}
    module, _, name = package.class_path.partition(":")
    try:
        found: Any = ArchivedImports(package.where, contents, {}, ("",)).module(module)
        for part in name.split("."):
            found = getattr(found, part)
        model = found(*args, **kwargs)
    except Exception as error:
        raise BlobError(
            f"the archived source of {package.where} does not make {package.class_path}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise BlobError(f"{package.class_path} of {package.where} makes a {type(model).__name__}, no module")
    return model


def _arguments(fields: Fields) -> tuple[list[Any], Mapping[str, Any]]:
    args, kwargs = decode(fields.values.get("args")), decode(fields.values.get("kwargs"))
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise DamagedError(f"{fields.what} is damaged: no arguments")
    return args, kwargs
